"""Plots of the README and of guides, from the JSON in results/: quality, bytes and speed after pruning.

Usage: python benchmarks/plot_readme.py [FOLDER]

smollm2.png shows how often SmolLM2 predicts the same token as the dense model, by bytes and by speed, results.png
perplexity by sparsity and top-1 accuracy by λ, speed.png the speed of a packed layer by sparsity and of a complete
model.
"""

import sys
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from cells import gather
from common import read
from real import cells_of

PICTURES = Path(__file__).resolve().parents[1] / "docs" / "pictures"
SPARSITIES = ("0.6", "0.7", "0.8")
GRAY, BLUE, RED, GREEN, VIOLET = "#8a9099", "#3f6fa8", "#b3361e", "#2e7d4f", "#7a4fa3"
METHODS = {  # label → step and λ in beyond-llama.json, color
    "SparseGPT": ("SparseGPT", 1.0, BLUE),
    'recipe "one-shot"': ("ALPS, basis, shares", 0.5, RED),
    "one-shot, distilled": ("ALPS, basis, shares, distill", 0.5, GREEN),
}
# Of real.py: label → settings with their names in the plot, color, and the side of the names: -1 left, 1 right.
SMOLLM2 = {
    "quantized, no weight removed": (
        {"8 bits, magnitude": "8 bits", "4 bits, ALPS": "4 bits", "3 bits, ALPS": "3 bits"}, GRAY, 1,
    ),
    "sparse and quantized": ({"0.5 and 4 bits, fast": "0.5, 4 bits"}, "#c08a2b", 1),
    "sparse": ({"0.3, SparseGPT": "0.3", "0.5, fast": "0.5", "0.7, fast": "0.7"}, RED, -1),
    "n:m": ({"6:8, SparseGPT": "6:8", "8:16, ALPS": "8:16", "2:4, ALPS": "2:4"}, BLUE, 1),
    "distilled": ({"0.5, recovered": "0.5", "2:4, recovered": "2:4"}, VIOLET, 1),
    "smaller and dense": ({"shrink 0.9": "90%", "shrink 0.75": "75%"}, GREEN, 1),
}  # fmt: skip


def plot_language(axes: plt.Axes) -> None:
    """Held-out perplexity of the shipped Llama by sparsity: the paper's methods, and the recipes."""
    quality = read("quality")["perplexity"]
    lines = {"Wanda": ("wanda λ=1", "#c08a2b"), "paper: SparseGPT, λ = 0.9": ("sparsegpt λ=0.9", VIOLET)}
    for label, (key, color) in lines.items():
        values = [fmean(quality[key][sparsity]) for sparsity in SPARSITIES]
        axes.plot(list(map(float, SPARSITIES)), values, "o-", color=color, label=label)
    for label, (step, lam, color) in METHODS.items():
        values = [fmean(gather(read("beyond-llama"), sparsity, step, lam)) for sparsity in SPARSITIES]
        axes.plot(list(map(float, SPARSITIES)), values, "o-", color=color, label=label)
    dense = read("beyond-llama")["dense"]
    axes.axhline(dense, color="black", linestyle=":", linewidth=1)
    axes.text(0.6, dense * 0.985, "dense", va="top")
    axes.set(title="Llama of 3.5M parameters", xlabel="sparsity", ylabel="held-out perplexity", yscale="log")
    axes.set(xticks=[0.6, 0.7, 0.8], yticks=[30, 40, 60, 100, 150], yticklabels=["30", "40", "60", "100", "150"])
    axes.set_ylim(30, 180)
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


def plot_smollm2(axes: plt.Axes, key: str, scale: float = 1.0, style: str = "o-", **labels: Any) -> None:
    """Agreement of pruned SmolLM2-135M with the dense model, by another measured number of the same setting."""
    measured = cells_of(read("real-SmolLM2-135M-Instruct"))

    def point(setting: str) -> tuple[float, float]:
        runs = measured[setting]
        fastest = min(runs, key=lambda run: run["seconds"])  # as in the tables
        return scale * fastest[key], 100 * fmean(run["agreement"] for run in runs)

    for label, (settings, color, side) in SMOLLM2.items():
        points = [point(setting) for setting in settings]
        axes.plot(*zip(*points, strict=True), style, color=color, label=label, markersize=5)
        beside = {"xytext": (6 * side, 0), "ha": "left" if side > 0 else "right", "va": "center", "color": color}
        for text, place in zip(settings.values(), points, strict=True):
            axes.annotate(text, place, textcoords="offset points", fontsize=8, **beside)
    axes.plot(*[[value] for value in point("dense")], "ko")
    axes.annotate("dense", point("dense"), (0, -13), textcoords="offset points", ha="center", fontsize=8)
    axes.set(title="SmolLM2-135M", ylabel="same next token as the dense model, %", ylim=(50, 104), **labels)


def plot_smollm2_bytes(axes: plt.Axes) -> None:
    """Agreement by bytes."""
    plot_smollm2(axes, "bytes", 1e-6, xlabel="size of the file, MB", xlim=(50, 290))


def plot_smollm2_speed(axes: plt.Axes) -> None:
    """Agreement by the speed of decoding."""
    plot_smollm2(axes, "tokens_per_second", style="o", xlabel="tokens per second, one thread", xlim=(10, 70))


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
    pictures = {
        "smollm2": (plot_smollm2_bytes, plot_smollm2_speed),
        "results": (plot_language, plot_vision),
        "speed": (plot_layer, plot_model),
    }
    for picture, panels in pictures.items():
        figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
        for plot, place in zip(panels, axes, strict=True):
            plot(place)
        if picture == "smollm2":
            handles = axes[0].get_legend_handles_labels()
            figure.legend(*handles, loc="outside lower center", ncols=5, frameon=False)
        figure.savefig(Path(folder) / f"{picture}.png", dpi=150, metadata={"Software": None})


if __name__ == "__main__":
    main(*sys.argv[1:])
