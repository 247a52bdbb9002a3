"""Held-out perplexity of the shipped model with sparsity allocation (OWL, AlphaPruning) and recomputed statistics (++).

Every run is a complete `MoonshotPruner.prune` on calibration windows of its seed, timed in processor seconds.
Seeds in an existing results file are not run again.
"""

import copy
import json
import statistics
import time
from itertools import product

import torch
from common import RESULTS, parser, write
from quality import DEMO, mean_error
from transformers import AutoModelForCausalLM, AutoTokenizer

from optimum_moonshot import MoonshotConfig, MoonshotPruner, perplexity
from optimum_moonshot.reports.tables import text_table

VARIANTS = {
    "uniform": {"recompute": False},
    "OWL": {"allocation": "owl", "recompute": False},
    "AlphaPruning": {"allocation": "alpha", "recompute": False},
    "++": {"recompute": True},
}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--seeds", type=int, default=3)
    arguments.add_argument("--sparsity", type=float, default=0.7)
    arguments.add_argument("--samples", type=int, default=128)
    arguments.add_argument("--tokens", type=int, default=256)
    arguments.add_argument("--lambdas", type=float, nargs="+", default=[1.0, 0.5])
    arguments.add_argument("--solvers", nargs="+", default=["wanda", "sparsegpt"])
    arguments.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    arguments.add_argument("--name", default="allocation")
    options = arguments.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()

    def measure(model) -> float:
        return perplexity(model, tokenizer, str(DEMO / "heldout.txt"), sequence_length=options.tokens).value

    dense, path = measure(model), RESULTS / f"{options.name}.json"
    results = json.loads(path.read_text())["results"]["runs"] if path.exists() else {}
    for seed, solver, lam, variant in product(range(options.seeds), options.solvers, options.lambdas, options.variants):
        row = results.setdefault(f"{solver} λ={lam:g}", {}).setdefault(variant, {"perplexity": [], "seconds": []})
        if len(row["perplexity"]) > seed:
            continue
        settings = {"sparsity": options.sparsity, "num_samples": options.samples, "sequence_length": options.tokens}
        config = MoonshotConfig(solver=solver, lam=lam, seed=seed, **settings, **VARIANTS[variant])
        pruner = MoonshotPruner(copy.deepcopy(model), config, tokenizer)
        started = time.process_time()
        report = pruner.prune(str(DEMO / "calibration.txt"), progress=False)
        row["seconds"].append(time.process_time() - started)
        row["perplexity"].append(measure(pruner.model))
        row["blocks"] = [layer.target_sparsity for layer in report.layers if "up_proj" in layer.name]
        row["sparsity"], row["notes"] = report.sparsity, report.notes
        print(f"seed {seed} {solver} λ={lam:g} {variant}: {row['perplexity'][-1]:.2f}", flush=True)
        write(options.name, {"options": vars(options), "dense": dense, "runs": results})
    show(results, dense, options)


def show(results: dict, dense: float, options) -> None:
    rows = []
    for name, row in results.items():
        rows.append([name, *(mean_error(row[variant]["perplexity"]) for variant in options.variants)])
        seconds = (row[variant]["seconds"] for variant in options.variants)
        rows.append(["seconds", *(f"{statistics.median(each):.1f}" if each else "" for each in seconds)])
    print(f"held-out perplexity at {options.sparsity:g}, dense {dense:.1f}")
    print(text_table(["method", *options.variants], rows, 120))


if __name__ == "__main__":
    main()
