"""The picture of the README, from the JSON in results/: perplexity by sparsity, and top-1 accuracy by λ.

Usage: python benchmarks/plot_readme.py [OUTPUT.png]
"""

import json
import sys
from pathlib import Path
from statistics import fmean, stdev

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

RESULTS = Path(__file__).parent / "results"
PICTURE = Path(__file__).resolve().parents[1] / "docs" / "pictures" / "results.png"
SPARSITIES = ("0.6", "0.7", "0.8")
LINES = {  # the name in quality.json → what the picture calls it, and its colour
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
    found = read("quality")
    for name, (label, colour) in LINES.items():
        values = [fmean(found["perplexity"][name][sparsity]) for sparsity in SPARSITIES]
        axes.plot(list(map(float, SPARSITIES)), values, "o-", color=colour, label=label)
    after = recovered()
    axes.plot(list(after), list(after.values()), "o-", color=RECOVERED, label="and block-wise recovery")
    axes.axhline(found["dense"], color="black", linestyle=":", linewidth=1)
    axes.text(0.6, found["dense"] * 0.985, "dense", va="top")
    axes.set(title="Llama, 3.5M parameters", xlabel="sparsity", ylabel="held-out perplexity", yscale="log")
    axes.set(xticks=[0.6, 0.7, 0.8], yticks=[30, 40, 60, 100, 180], yticklabels=["30", "40", "60", "100", "180"])
    axes.set_ylim(30, 200)
    axes.minorticks_off()
    axes.legend(frameon=False, loc="upper left")


def plot_vision(axes: plt.Axes) -> None:
    """Top-1 accuracy of a ResNet-20 by λ."""
    found = read("vision_resnet20")
    for sparsity, colour in (("0.8", "#3f6fa8"), ("0.9", "#b3361e")):
        runs = {float(lam): [100 * run for run in values[sparsity]] for lam, values in found["top1"].items()}
        lams = sorted(runs)
        errors = [stdev(runs[lam]) / len(runs[lam]) ** 0.5 for lam in lams]
        means = [fmean(runs[lam]) for lam in lams]
        axes.errorbar(lams, means, errors, fmt="o-", color=colour, capsize=3, label=f"sparsity {sparsity}")
    axes.axhline(100 * found["dense"], color="black", linestyle=":", linewidth=1)
    axes.text(0, 100 * found["dense"] + 1, "dense")
    axes.set(title="ResNet-20 on CIFAR-10, OBC", xlabel="λ: 0 Fisher loss alone, 1 reconstruction error alone")
    axes.set(xticks=[0, 0.25, 0.5, 0.75, 1], ylabel="top-1 accuracy, %", ylim=(0, 100))
    axes.legend(frameon=False, loc="lower right")


def main(output: str | Path = PICTURE) -> None:
    """Write the picture."""
    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    plot_language(left)
    plot_vision(right)
    figure.savefig(output, dpi=150, metadata={"Software": None})


if __name__ == "__main__":
    main(*sys.argv[1:])
