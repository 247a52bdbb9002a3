"""One run in 1, 2 and 4 processes of one thread each, on the shipped model.

    python benchmarks/ranks.py               # a few minutes

Wall-clock seconds of the run, and processor seconds of all processes: the increase over one process is the overhead of
sharding, independent of other load. With more processes than cores the wall-clock seconds are meaningless. Waiting
at a collective takes almost no processor time.
"""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from common import parser, write

from optimum_moonshot import MoonshotConfig, MoonshotPruner

DEMO = Path(__file__).parents[1] / "examples" / "demo_model"
SETTINGS = {
    "sparsegpt, 2:4, λ = 0.9": dict(pattern="2:4", lam=0.9),
    "cap, 50%, λ = 0.9": dict(solver="cap", sparsity=0.5, lam=0.9),
    "obc, 50%, λ = 0.9": dict(solver="obc", sparsity=0.5, lam=0.9),
}


def measure(name: str, samples: int, length: int) -> dict:
    """One run, as seen by this process."""
    config = MoonshotConfig(**SETTINGS[name], num_samples=samples, sequence_length=length, batch_size=4)
    pruner = MoonshotPruner.from_pretrained(DEMO, config)
    started, used = time.perf_counter(), time.process_time()
    pruner.prune(str(DEMO / "calibration.txt"), progress=False)
    seconds = time.perf_counter() - started
    zeros = {layer: parameter == 0 for layer, parameter in pruner.model.named_parameters() if parameter.ndim == 2}
    return {"seconds": seconds, "processor": time.process_time() - used, "zeros": zeros}


def of_processes(name: str, size: int, options) -> tuple[dict, dict]:
    """Start a run with some processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    case = [name, str(size), str(port), str(options.samples), str(options.length)]
    command = [sys.executable, __file__, "--case", *case]
    every = [{**os.environ, "OMP_NUM_THREADS": "1", "RANK": str(rank)} for rank in range(size)]
    started = [subprocess.Popen(command, env=one, stdout=subprocess.PIPE, text=True) for one in every]
    paths = [process.communicate()[0].strip().splitlines()[-1] for process in started]
    outputs = [torch.load(path, weights_only=False) for path in paths]
    for path in paths:
        Path(path).unlink()
    row = {"processes": size, "seconds": max(each["seconds"] for each in outputs)}
    return row | {"processor_seconds": sum(each["processor"] for each in outputs)}, outputs[0]["zeros"]


def case(name: str, size: str, port: str, samples: str, length: str) -> None:
    """One process of several; prints the path of its result."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    if int(size) > 1:
        dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=int(size))
    path = f"{os.environ.get('TMPDIR', '/tmp')}/ranks-{os.getpid()}.pt"
    torch.save(measure(name, int(samples), int(length)), path)
    print(path)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--sizes", nargs="+", type=int, default=[1, 2, 4])
    arguments.add_argument("--samples", type=int, default=32)
    arguments.add_argument("--length", type=int, default=64)
    arguments.add_argument("--note", default="", help="on the machine, such as its other load")
    arguments.add_argument("--case", nargs=5, help="one process, for internal use")
    options = arguments.parse_args()
    if options.case:
        case(*options.case)
        return
    rows = []
    for name in SETTINGS:
        zeros = None
        for size in options.sizes:
            row, mask = of_processes(name, size, options)
            zeros = zeros or mask
            same = sum(int((mask[key] == zero).sum()) for key, zero in zeros.items())
            total = sum(zero.numel() for zero in zeros.values())
            row = {"run": name, **row, "share_of_the_mask_that_is_the_first": same / total}
            rows.append(row)
            print(json.dumps(row), flush=True)
    settings = {"samples": options.samples, "length": options.length, "cores": os.cpu_count(), "note": options.note}
    write("ranks", {"settings": settings, "rows": rows})


if __name__ == "__main__":
    main()
