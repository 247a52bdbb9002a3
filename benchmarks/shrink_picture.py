"""The picture of shrink_methods.py: perplexity by the share of the parameters."""

import statistics
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

STYLES = {"one-shot": "-", "block-wise": "--", "distilled": ":"}


def picture(results: dict, methods: list[str], path: Path) -> None:
    """One line per method, recovery and best λ.

    Args:
        results: of shrink_methods.py.
        methods: in the order of their colours.
        path: of the PNG.
    """
    figure, axes = plt.subplots(figsize=(8, 4.2), layout="constrained")
    dense = results["dense"]
    for recovery, style in STYLES.items():
        for index, method in enumerate(methods):
            points = {}
            for row in results["cells"]:
                if row["step"] == f"{method}, {recovery}":
                    points.setdefault((row["parameters"], row["lam"]), []).append(row["perplexity"])
            least: dict[int, float] = {}
            for (parameters, _), values in points.items():
                least[parameters] = min(least.get(parameters, float("inf")), statistics.fmean(values))
            if least:
                line = sorted((parameters / dense["parameters"], value) for parameters, value in least.items())
                axes.plot(
                    *zip(*line, strict=True), style, marker="o", ms=4, color=f"C{index}", label=f"{method}, {recovery}"
                )
    axes.axhline(dense["perplexity"], color="grey", lw=0.8)
    axes.set(xlabel="share of the parameters", ylabel="held-out perplexity", yscale="log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, fontsize=8, loc="outside right center")
    figure.savefig(path, dpi=150, metadata={"Software": None})
