"""Pruning of a small mixture of experts: zeros within experts, whole experts or their neurons removed, and both.

    python benchmarks/experts.py                     # three seeds, hours; cells in the results file are not repeated
    python benchmarks/experts.py --seeds 0 --minutes 30
    python benchmarks/experts.py --show              # the tables and the plot of the existing results

The model is benchmarks/mixture_model, a Qwen3-MoE of 4 decoder layers with 16 experts each, 4 per token
(train_language.py). Each cell is one run of the product from the dense model in float32: held-out perplexity,
processor seconds with one thread, and the fraction of nonzero weights. The file is written after every cell, so an
interrupted benchmark resumes.
"""

import math
import statistics
import time
from collections.abc import Iterable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from cells import add_options, gather, least, mean_error, run_cells
from common import RESULTS, parser
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from optimum_moonshot import MoonshotConfig, MoonshotPruner, perplexity

MODEL = Path(__file__).parent / "mixture_model"
DEMO = Path(__file__).parents[1] / "examples" / "demo_model"
PICTURE = Path(__file__).parents[1] / "docs" / "pictures" / "experts.png"
LENGTH, SAMPLES = 256, 128
INSIDE = {"0.5": {"sparsity": 0.5}, "0.7": {"sparsity": 0.7}, "2:4": {"pattern": "2:4"}}
WHOLE = {f"1/{n} of the experts": {"pattern": "experts", "sparsity": 1 / n} for n in (8, 4, 2)}
BOTH, NEURONS = "OSSCAR, then 2:4", "OSSCAR, neurons"
LAMBDAS = (1.0, 0.9, 0.5)
# Step → fields, settings, values of λ. The baselines' selection of whole experts does not depend on λ.
STEPS: dict[str, tuple[dict, Iterable[str], tuple[float, ...]]] = {
    "SparseGPT": ({}, INSIDE, LAMBDAS),
    "frequency": ({"solver": "frequency"}, WHOLE, LAMBDAS[:1]),
    "REAP": ({"solver": "reap"}, WHOLE, LAMBDAS[:1]),
    "OSSCAR": ({"solver": "osscar"}, WHOLE, LAMBDAS),
    NEURONS: ({"solver": "osscar", "pattern": "structured", "targets": [r"experts\.down_proj"]}, WHOLE, LAMBDAS[:1]),
    BOTH: ({"solver": "osscar"}, ("1/4 of the experts",), LAMBDAS[:2]),
    "SparseGPT, shares": ({"allocation": "fisher"}, ("0.7",), LAMBDAS),
    "ALPS": ({"solver": "alps"}, ("0.7", "2:4"), LAMBDAS[:1]),
    "ALPS, shares": ({"solver": "alps", "allocation": "fisher"}, ("0.7",), LAMBDAS[:1]),
    "Wanda": ({"solver": "wanda"}, INSIDE, LAMBDAS),
}
SETTINGS = {**INSIDE, **WHOLE}


def cells(options) -> list[tuple[int, str, str, float]]:
    """(seed, setting, step, λ), in the order of the seeds, and λ = 1 first."""
    return [
        (seed, setting, step, lam)
        for seed in options.seeds
        for lam in options.lambdas
        for step in options.steps
        for setting in STEPS[step][1]
        if lam in STEPS[step][2]
    ]


def load() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


def quality(model: PreTrainedModel) -> dict:
    """Held-out perplexity, and the number of nonzero weights."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    value = perplexity(model, tokenizer, str(DEMO / "heldout.txt"), sequence_length=LENGTH).value
    return {"perplexity": value, "weights": sum(int(weight.count_nonzero()) for weight in model.parameters())}


def measure(seed: int, setting: str, step: str, lam: float) -> dict:
    """Run one cell."""
    model, tokenizer = load(), AutoTokenizer.from_pretrained(DEMO)
    same = {"lam": lam, "seed": seed, "num_samples": SAMPLES, "sequence_length": LENGTH}
    seconds, notes = 0.0, []
    for fields in [{**SETTINGS[setting], **STEPS[step][0]}, *([INSIDE["2:4"]] if step == BOTH else [])]:
        pruner = MoonshotPruner(model, MoonshotConfig(**fields, **same), tokenizer)
        started = time.process_time()
        report = pruner.prune(str(DEMO / "calibration.txt"), progress=False)
        seconds += time.process_time() - started
        notes += report.notes
    if step == NEURONS:
        pruner.compact()
    return {**quality(pruner.model), "seconds": seconds, "notes": notes}


def table(results: dict, settings: Iterable[str]) -> str:
    """Markdown: perplexity, mean ± standard error over the seeds, and mean seconds of one core."""
    head = [*settings, "seconds, one core"]
    lines = ["| | λ | " + " | ".join(head) + " |", "|---|---|" + "---:|" * len(head)]
    for step in STEPS:
        for lam in LAMBDAS:
            values = [mean_error(gather(results, setting, step, lam)) for setting in settings]
            if any(values):
                cost = [value for setting in settings for value in gather(results, setting, step, lam, "seconds")]
                lines.append(f"| {step} | {lam:g} | " + " | ".join([*values, f"{statistics.fmean(cost):.0f}"]) + " |")
    return "\n".join(lines)


def picture(results: dict, path: Path) -> None:
    """Plot the excess loss over the dense model by the fraction of remaining weights, at the best λ."""
    figure, axes = plt.subplots(figsize=(7.5, 3.8), layout="constrained")
    for step, (_, settings, _) in STEPS.items():
        lines: dict[str, list[tuple[float, float]]] = {"o": [], "s": []}
        for setting in settings:
            best = least(results, setting, step, LAMBDAS)
            if best is not None:
                left = gather(results, setting, step, LAMBDAS[0], "weights")[0] / results["dense"]["weights"]
                marker = "s" if "2:4" in (setting, step[-3:]) else "o"
                lines[marker].append((left, math.log(best / results["dense"]["perplexity"])))
        colour = f"C{list(STEPS).index(step)}"
        style = "--" if set(settings) <= set(WHOLE) else "-"
        for marker, points in lines.items():
            if points:
                label = "_" * (marker == "s" and bool(lines["o"])) + step
                axes.plot(*zip(*points, strict=True), style, marker=marker, ms=5, color=colour, label=label)
    axes.set(xlabel="share of the model's weights that is left (squares: 2:4)", yscale="log")
    axes.set(ylabel="loss above the dense model's, nats")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, fontsize=8, loc="outside right center")
    figure.savefig(path, dpi=150, metadata={"Software": None})


def main() -> None:
    arguments = parser(__doc__)
    add_options(arguments, STEPS, LAMBDAS)
    options = arguments.parse_args()
    torch.set_num_threads(1)
    path = RESULTS / "experts.json"
    results = run_cells(path, cells(options), lambda cell: measure(*cell), lambda: quality(load()), options)
    for settings in (INSIDE, WHOLE):
        print(table(results, settings), end="\n\n")
    for place in (path.with_suffix(".png"), PICTURE):
        picture(results, place)


if __name__ == "__main__":
    main()
