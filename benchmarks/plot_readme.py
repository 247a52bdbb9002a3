"""Plots of the README, from the JSON in results/: quality and speed after pruning.

Usage: python benchmarks/plot_readme.py [FOLDER]

results.png shows perplexity by sparsity and top-1 accuracy by λ, speed.png the speed of a packed layer by sparsity and
of a complete model.
"""

import json
import sys
from pathlib import Path
from statistics import fmean, stdev

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

RESULTS = Path(__file__).parent / "results"
PICTURES = Path(__file__).resolve().parents[1] / "docs" / "pictures"
SPARSITIES = ("0.6", "0.7", "0.8")
LINES = {  # name in quality.json → label and color
    "magnitude": ("magnitude", "#8a9099"),
    "wanda λ=1": ("Wanda, λ = 1", "#c08a2b"),
    "sparsegpt λ=1": ("SparseGPT, λ = 1", "#3f6fa8"),
    "sparsegpt λ=0.9": ("SparseGPT, λ = 0.9 (two objectives)", "#b3361e"),
}
RECOVERED = "#2e7d4f"


def read(name: str) -> dict:
    """The results of one benchmark."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["results"]


def recovered() -> dict[float, float]:
    """Sparsity → perplexity after pruning with λ = 0.9 and block-wise recovery, mean over the seeds."""
    after_07 = [row["block-wise"] for row in read("finetune-recovery")["rows"] if row["case"] == "0.7"]
    after_08 = [row["recovered"] for row in read("finetune-lambdas")["rows"] if row["case"] == "λ=0.9"]
    return {0.7: fmean(after_07), 0.8: fmean(after_08)}


def plot_language(axes: plt.Axes) -> None:
    """Held-out perplexity of the shipped Llama by sparsity."""
    results = read("quality")
    for name, (label, colour) in LINES.items():
        values = [fmean(results["perplexity"][name][sparsity]) for sparsity in SPARSITIES]
        axes.plot(list(map(float, SPARSITIES)), values, "o-", color=colour, label=label)
    after = recovered()
    axes.plot(list(after), list(after.values()), "o-", color=RECOVERED, label="and block-wise recovery")
    axes.axhline(results["dense"], color="black", linestyle=":", linewidth=1)
    axes.text(0.6, results["dense"] * 0.985, "dense", va="top")
    axes.set(title="Llama, 3.5M parameters", xlabel="sparsity", ylabel="held-out perplexity", yscale="log")
    axes.set(xticks=[0.6, 0.7, 0.8], yticks=[30, 40, 60, 100, 180], yticklabels=["30", "40", "60", "100", "180"])
    axes.set_ylim(30, 200)
    axes.minorticks_off()
    axes.legend(frameon=False, loc="upper left")


def plot_vision(axes: plt.Axes) -> None:
    """Top-1 accuracy of a ResNet-20 by λ."""
    results = read("vision_resnet20")
    for sparsity, colour in (("0.8", "#3f6fa8"), ("0.9", "#b3361e")):
        runs = {float(lam): [100 * run for run in values[sparsity]] for lam, values in results["top1"].items()}
        lams = sorted(runs)
        errors = [stdev(runs[lam]) / len(runs[lam]) ** 0.5 for lam in lams]
        means = [fmean(runs[lam]) for lam in lams]
        axes.errorbar(lams, means, errors, fmt="o-", color=colour, capsize=3, label=f"sparsity {sparsity}")
    axes.axhline(100 * results["dense"], color="black", linestyle=":", linewidth=1)
    axes.text(0, 100 * results["dense"] + 1, "dense")
    axes.set(title="ResNet-20 on CIFAR-10, OBC", xlabel="λ: 0 Fisher loss alone, 1 reconstruction error alone")
    axes.set(xticks=[0, 0.25, 0.5, 0.75, 1], ylabel="top-1 accuracy, %", ylim=(0, 100))
    axes.legend(frameon=False, loc="lower right")


def plot_layer(axes: plt.Axes) -> None:
    """Speed of one packed layer relative to dense, for one row of inputs and one thread."""
    cells = [cell for cell in read("runtime")["cells"] if cell["rows"] == 1 and cell["threads"] == 1]
    for dtype, colour in (("bfloat16", "#b3361e"), ("float32", "#3f6fa8")):
        speeds = {cell["kind"]: cell["over_dense"] for cell in cells if cell["dtype"] == dtype}
        pattern, shares = speeds.pop("2:4"), [float(kind) for kind in speeds]
        axes.plot(shares, list(speeds.values()), "o-", color=colour, label=dtype)
        axes.plot([0.5], [pattern], "D", color=colour, markerfacecolor="white", label=f"{dtype}, 2:4")
    axes.axhline(1, color="black", linestyle=":", linewidth=1)
    axes.text(0.9, 1.04, "dense", ha="right", va="bottom")
    axes.set(title="One layer of 4096×2048, one row of inputs", xlabel="sparsity", ylabel="times the dense speed")
    axes.set(xticks=[0.5, 0.6, 0.7, 0.8, 0.9], ylim=(0, 4.5))
    axes.legend(frameon=False, loc="upper left")


def plot_model(axes: plt.Axes) -> None:
    """Tokens per second of a Llama of the shape of 1B, dense and packed."""
    runs = read("generate")["runs"]
    packed = [run for run in runs if run["runtime"] == "packed"]
    groups = sorted({(run["setting"] != "2:4", run["setting"], run["threads"]) for run in packed})
    for shift, runtime, colour in ((-0.2, "dense", "#8a9099"), (0.2, "packed", "#b3361e")):
        rates = [
            next(
                run["tokens_per_second"]
                for run in runs
                if (run["threads"], run["runtime"]) == (threads, runtime) and run["setting"] in (setting, "dense")
            )
            for _, setting, threads in groups
        ]
        bars = axes.bar([place + shift for place in range(len(groups))], rates, 0.38, color=colour, label=runtime)
        axes.bar_label(bars, fmt="%.1f", padding=2)
    names = [f"{setting}, {threads} thread{'s' * (threads > 1)}" for _, setting, threads in groups]
    axes.set(title="Llama of the shape of 1B, bfloat16", ylabel="tokens per second", xticks=range(len(groups)))
    axes.set(xticklabels=names, ylim=(0, 23))
    axes.legend(frameon=False, loc="upper left")


def main(folder: str | Path = PICTURES) -> None:
    """Write the plots."""
    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    for name, panels in (("results", (plot_language, plot_vision)), ("speed", (plot_layer, plot_model))):
        figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
        for plot, place in zip(panels, axes, strict=True):
            plot(place)
        figure.savefig(Path(folder) / f"{name}.png", dpi=150, metadata={"Software": None})


if __name__ == "__main__":
    main(*sys.argv[1:])
