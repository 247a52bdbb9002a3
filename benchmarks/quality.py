"""Held-out perplexity of the shipped model after pruning: magnitude, Wanda, SparseGPT, λ = 1 and the best λ < 1.

Every seed draws its own calibration windows, with one calibration per seed: the statistics do not depend on method,
pattern or λ.
"""

import copy
import math
import statistics
import sys
from pathlib import Path

import torch
from common import parser, write
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from optimum_moonshot import MoonshotConfig, perplexity  # noqa: E402
from optimum_moonshot.functional import prune_weight  # noqa: E402
from optimum_moonshot.prune import layers as solving  # noqa: E402
from optimum_moonshot.pruner import MoonshotPruner  # noqa: E402
from optimum_moonshot.reports.tables import text_table  # noqa: E402

DEMO = ROOT / "examples" / "demo_model"
PATTERNS = {"0.6": {"sparsity": 0.6}, "0.7": {"sparsity": 0.7}, "0.8": {"sparsity": 0.8}, "2:4": {"pattern": "2:4"}}


def methods(lambdas: list[float]):
    """(name, options) of each compared method."""
    yield "magnitude", {"solver": "magnitude"}
    for solver in ("wanda", "sparsegpt"):
        for lam in (1.0, *lambdas):
            yield f"{solver} λ={lam:g}", {"solver": solver, "lam": lam}
    yield "sparsegpt λ=0.9 attention", {"solver": "sparsegpt", "lam": 0.9, "fisher_layers": "attention"}


def choices(layer, lambdas: list[float]):
    """((method, pattern), configuration) compared on one layer."""
    for pattern, choice in PATTERNS.items():
        for name, method in methods(lambdas):
            method = {**method}
            if method.get("fisher_layers") == "attention" and not layer.attention:
                method["lam"] = 1.0
            yield (name, pattern), MoonshotConfig(**choice, **method)


def prune_all(model, tokenizer, calibration: Path, config: MoonshotConfig, choose):
    """{(method, pattern): {layer: pruned weight}}, from one calibration.

    `config` configures the calibration; ``choose(config, layer)`` yields (method, pattern) with their configuration.
    """
    weights = {}

    def solve(layer, layer_statistics, variants):
        fisher = layer_statistics.gradients
        gradients = None if fisher is None else fisher.gradients
        for key, choice in choose(config, layer):
            pruned = prune_weight(layer.matrix, layer_statistics.inputs, gradients, config=choice)
            weights.setdefault(key, {})[layer.name] = pruned.weight
        return original(layer, layer_statistics, variants)

    original, solving.prune_layer = solving.prune_layer, solve
    try:
        MoonshotPruner(copy.deepcopy(model), config, tokenizer).prune(str(calibration))
    finally:
        solving.prune_layer = original
    return weights


def set_weights(model, layers: dict[str, torch.Tensor]) -> None:
    """Write pruned matrices into a model."""
    for layer, weight in layers.items():
        model.get_submodule(layer).weight.data.copy_(weight)


def demo_parser(description: str, name: str):
    """The options of a benchmark on the shipped model; results are written to results/`name`.json."""
    arguments = parser(description)
    arguments.add_argument("--seeds", type=int, default=3)
    arguments.add_argument("--samples", type=int, default=128)
    arguments.add_argument("--tokens", type=int, default=256)
    arguments.add_argument("--name", default=name)
    return arguments


def load_demo():
    """The shipped model in float32, and its tokenizer."""
    return AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval(), AutoTokenizer.from_pretrained(DEMO)


def measure(model, tokenizer, options) -> float:
    """Held-out perplexity."""
    return perplexity(model, tokenizer, str(DEMO / "heldout.txt"), sequence_length=options.tokens).value


def main() -> None:
    arguments = demo_parser(__doc__, "quality")
    arguments.add_argument("--lambdas", type=float, nargs="+", default=[0.1, 0.25, 0.5, 0.75, 0.9])
    options = arguments.parse_args()
    model, tokenizer = load_demo()
    dense = measure(model, tokenizer, options)
    results: dict[str, dict[str, list[float]]] = {}
    for seed in range(options.seeds):
        config = MoonshotConfig(
            sparsity=0.5, lam=0.5, seed=seed, num_samples=options.samples, sequence_length=options.tokens
        )
        weights = prune_all(
            model, tokenizer, DEMO / "calibration.txt", config, lambda _, layer: choices(layer, options.lambdas)
        )
        pruned = copy.deepcopy(model)
        for (name, pattern), layers in weights.items():
            set_weights(pruned, layers)
            results.setdefault(name, {}).setdefault(pattern, []).append(measure(pruned, tokenizer, options))
        print(
            f"seed {seed}: { ({name: {p: round(v[-1], 1) for p, v in row.items()} for name, row in results.items()}) }"
        )
    write(options.name, {"options": vars(options), "dense": dense, "perplexity": results})
    show(results, dense, PATTERNS)


def mean_error(values: list[float]) -> str:
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.1f} ± {error:.1f}"


def show(results: dict[str, dict[str, list[float]]], dense: float, columns) -> None:
    rows = [[name, *(mean_error(row[column]) for column in columns)] for name, row in results.items()]
    print(f"held-out perplexity, dense {dense:.1f}", text_table(["method", *columns], rows, 100), sep="\n")


if __name__ == "__main__":
    main()
