"""ALPS compared with SparseGPT on square layers: seconds of one thread, memory of the call, and remaining loss.

    python benchmarks/alps.py                               # about 10 minutes
    python benchmarks/alps.py --inputs 512 --lambdas 1      # one row of the table

Sparsity 0.7. Each case runs in a separate process, for its peak memory.
"""

import json
import subprocess
import sys
import time

import torch
from common import parser, peak_above, random_layer, write

from optimum_moonshot import MoonshotConfig
from optimum_moonshot.functional import build_objective

SOLVERS = ("sparsegpt", "alps")


def measure(solver: str, inputs: int, lam: float, samples: int) -> dict:
    """Solve one layer in this process."""
    torch.set_num_threads(1)
    weight, gram, gradients = random_layer(inputs, inputs, samples, tokens=max(64, 4 * inputs // samples))
    config = MoonshotConfig(solver=solver, sparsity=0.7, lam=lam)
    chosen, pattern = config.make_solver(), config.parsed_pattern
    objective = build_objective(chosen, pattern, weight, gram, gradients if lam < 1 else None, lam)
    results, started = [], time.process_time()
    memory = peak_above(lambda: results.append(chosen.solve(objective, pattern)))
    seconds = time.process_time() - started
    return {"seconds": seconds, "memory": memory, "loss": objective.losses(results[0].weight)[0].total}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--inputs", nargs="+", type=int, default=[512, 1024, 2048])
    arguments.add_argument("--lambdas", nargs="+", type=float, default=[1.0, 0.9])
    arguments.add_argument("--samples", type=int, default=128)
    arguments.add_argument("--case", nargs=4, help="one measurement, for internal use")
    options = arguments.parse_args()
    if options.case:
        solver, inputs, lam, samples = options.case
        print(json.dumps(measure(solver, int(inputs), float(lam), int(samples))))
        return
    rows = []
    for inputs in options.inputs:
        for lam in options.lambdas:
            row = {"inputs": inputs, "lam": lam}
            for solver in SOLVERS:
                case = [solver, str(inputs), str(lam), str(options.samples)]
                command = [sys.executable, __file__, "--case", *case]
                row[solver] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            rows.append(row)
            print(json.dumps(row), flush=True)
    write("alps", rows)


if __name__ == "__main__":
    main()
