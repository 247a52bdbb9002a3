"""The picture of a run: sparsity and loss of every layer."""

import os
import re
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from .prune_report import LayerReport, PruneReport

PLOT_NAME = "moonshot_report.png"
COLORS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#555555", "#ee8866", "#000000")
MARKERS = "osD^vP*X<>"


def split_name(name: str) -> tuple[str, str]:
    """A layer's block and its kind: "model.layers.3.mlp.up_proj" is "model.layers.3" and "mlp.up_proj"."""
    match = re.match(r"(.*\.\d+)\.([^0-9]*[^.]*)$", name)
    return (match[1], match[2]) if match else ("", name)


def by_kind(report: PruneReport) -> dict[str, list[tuple[int, LayerReport]]]:
    """The layers of every kind, in the model's order, with the number of their block; outside of blocks it is the last.

    Kinds are in the order of their first layer.
    """
    blocks: dict[str, int] = {}
    for layer in report.layers:
        if split_name(layer.name)[0]:
            blocks.setdefault(split_name(layer.name)[0], len(blocks))
    kinds: dict[str, list[tuple[int, LayerReport]]] = {}
    for layer in report.layers:
        block, kind = split_name(layer.name)
        kinds.setdefault(kind, []).append((blocks.get(block, len(blocks)), layer))
    return kinds


def plot_report(report: PruneReport) -> Figure:
    """Sparsity over the blocks, and below it the loss L_λ where calibration data was given; a line for every kind."""
    measured = any(layer.loss is not None for layer in report.layers)
    figure = Figure(figsize=(8, 6 if measured else 3.6), dpi=120, layout="constrained")
    axes = figure.subplots(2 if measured else 1, sharex=True, squeeze=False)[:, 0]
    for number, (kind, layers) in enumerate(by_kind(report).items()):
        style = dict(
            color=COLORS[number % len(COLORS)],
            marker=MARKERS[number % len(MARKERS)],
            markersize=4,
            linewidth=1.2,
            alpha=0.85,
        )
        places = [place for place, _ in layers]
        axes[0].plot(places, [layer.sparsity for _, layer in layers], label=kind, **style)
        if measured:
            axes[1].plot(places, [layer.loss for _, layer in layers], **style)
    _asked(axes[0], report)
    what = "experts removed, %" if any(layer.experts for layer in report.layers) else "zeros, % of the weights"
    axes[0].set(title="Sparsity of every pruned layer", ylabel=what, ylim=(-0.03, 1.03))
    axes[0].yaxis.set_major_formatter(PercentFormatter(1, symbol=None))
    if measured:
        axes[1].set(title="Loss of every pruned layer (0: as dense, 1: as without the layer)", ylabel="$L_λ$, relative")
        losses = [layer.loss for layer in report.layers if layer.loss is not None]
        axes[1].set_yscale("log" if min(losses) > 0 and max(losses) > 20 * min(losses) else "linear")
    axes[-1].set(xlabel="block, in the model's order")
    axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    for axis in axes:
        axis.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=8, frameon=False)
    return figure


def _asked(axis: Axes, report: PruneReport) -> None:
    """A dashed line where all layers were asked for the same sparsity."""
    asked = {layer.asked for layer in report.layers}
    share = asked.pop() if len(asked) == 1 else None
    if share is not None:
        axis.axhline(share, color="black", linestyle="--", linewidth=1, label="asked for", zorder=0)


def save_plot(report: PruneReport, folder: str | os.PathLike[str]) -> Path:
    """Write the picture to a folder, as moonshot_report.png.

    Args:
        report: of the run to show.
        folder: that exists.

    Returns:
        The picture's path.
    """
    path = Path(folder) / PLOT_NAME
    plot_report(report).savefig(path)
    return path
