"""Held-out perplexity of the shipped model after pruning: magnitude, Wanda, SparseGPT, λ = 1 against the best λ < 1.

Every seed draws its own calibration windows. They are visited once per seed: all methods, patterns and λ see the same
statistics, which do not depend on any of them.
"""

import copy
import math
import statistics
import sys
from pathlib import Path

import torch
from common import parser, write
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from optimum_moonshot import MoonshotConfig, perplexity  # noqa: E402
from optimum_moonshot.functional import prune_weight  # noqa: E402
from optimum_moonshot.pruner import MoonshotPruner  # noqa: E402
from optimum_moonshot.run import Run  # noqa: E402

DEMO = ROOT / "examples" / "demo_model"
PATTERNS = {"0.6": {"sparsity": 0.6}, "0.7": {"sparsity": 0.7}, "0.8": {"sparsity": 0.8}, "2:4": {"pattern": "2:4"}}


def methods(lambdas: list[float]):
    """(name, options) of everything compared."""
    yield "magnitude", {"solver": "magnitude"}
    for solver in ("wanda", "sparsegpt"):
        for lam in (1.0, *lambdas):
            yield f"{solver} λ={lam:g}", {"solver": solver, "lam": lam}
    yield "sparsegpt λ=0.9 attention", {"solver": "sparsegpt", "lam": 0.9, "fisher": "attention"}


def prune_all(model, tokenizer, calibration: Path, seed: int, options, lambdas):
    """{(method, pattern): {layer: pruned weight}}, from one calibration."""
    config = MoonshotConfig(
        sparsity=0.5, lam=0.5, seed=seed, num_samples=options.samples, sequence_length=options.tokens
    )
    weights = {}

    def solve(run, layer, layer_statistics):
        for pattern, choice in PATTERNS.items():
            for name, method in methods(lambdas):
                method = {**method}
                if method.get("fisher") == "attention" and not layer.attention:
                    method["lam"] = 1.0
                pruned = prune_weight(
                    layer.matrix,
                    layer_statistics.inputs,
                    layer_statistics.gradients,
                    config=MoonshotConfig(**choice, **method),
                )
                weights.setdefault((name, pattern), {})[layer.name] = pruned.weight
        return original(run, layer, layer_statistics)

    original = Run._solve
    Run._solve = solve
    try:
        MoonshotPruner(copy.deepcopy(model), config, tokenizer).prune(str(calibration))
    finally:
        Run._solve = original
    return weights


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--seeds", type=int, default=3)
    arguments.add_argument("--samples", type=int, default=128)
    arguments.add_argument("--tokens", type=int, default=256)
    arguments.add_argument("--lambdas", type=float, nargs="+", default=[0.1, 0.25, 0.5, 0.75, 0.9])
    arguments.add_argument("--name", default="quality")
    options = arguments.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
    heldout = str(DEMO / "heldout.txt")
    dense = perplexity(model, tokenizer, heldout, sequence_length=options.tokens).value
    found: dict[str, dict[str, list[float]]] = {}
    for seed in range(options.seeds):
        weights = prune_all(model, tokenizer, DEMO / "calibration.txt", seed, options, options.lambdas)
        pruned = copy.deepcopy(model)
        for (name, pattern), layers in weights.items():
            for layer, weight in layers.items():
                pruned.get_submodule(layer).weight.data.copy_(weight)
            value = perplexity(pruned, tokenizer, heldout, sequence_length=options.tokens).value
            found.setdefault(name, {}).setdefault(pattern, []).append(value)
        print(f"seed {seed}: { ({name: {p: round(v[-1], 1) for p, v in row.items()} for name, row in found.items()}) }")
    write(options.name, {"options": vars(options), "dense": dense, "perplexity": found})
    show(found, dense)


def mean_error(values: list[float]) -> str:
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.1f} ± {error:.1f}"


def show(found: dict[str, dict[str, list[float]]], dense: float) -> None:
    table = Table("method", *PATTERNS, title=f"held-out perplexity, dense {dense:.1f}")
    for name, row in found.items():
        table.add_row(name, *(mean_error(row[pattern]) for pattern in PATTERNS))
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
