"""The picture of shrink_methods.py: perplexity by the share of the parameters."""

import statistics
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

STYLES = {"one-shot": "-", "block-wise": "--", "distilled": ":", "own-distilled": "-."}


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
            points: dict[tuple[str, float], list[tuple[float, float]]] = {}
            for row in results["cells"]:
                if row["step"] == f"{method}, {recovery}":
                    share = row["parameters"] / dense["parameters"]
                    points.setdefault((row["setting"], row["lam"]), []).append((row["perplexity"], share))
            least: dict[str, tuple[float, float]] = {}  # over λ
            for (setting, _), pairs in points.items():
                perplexity, share = (statistics.fmean(values) for values in zip(*pairs, strict=True))
                least[setting] = min(least.get(setting, (float("inf"), 1.0)), (perplexity, share))
            if least:
                values, shares = zip(*least.values(), strict=True)
                label = f"{method}, {recovery}"
                axes.plot(shares, values, style, marker="o", ms=4, color=f"C{index}", label=label)
    axes.axhline(dense["perplexity"], color="grey", lw=0.8)
    axes.set(xlabel="share of the parameters", ylabel="held-out perplexity", yscale="log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, fontsize=8, loc="outside right center")
    figure.savefig(path, dpi=150, metadata={"Software": None})
