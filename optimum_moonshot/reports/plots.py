"""The layers of a report by their kind, and the plot of their sparsities and losses."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from .prune_report import LayerReport, PruneReport

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PLOT_NAME = "moonshot_report.png"
COLORS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#555555", "#ee8866", "#000000")
MARKERS = "osD^vP*X<>"


def split_name(name: str) -> tuple[str, str]:
    """Split a layer's name into block and kind: "model.layers.3.mlp.up_proj" → "model.layers.3", "mlp.up_proj"."""
    match = re.match(r"(.*\.\d+)\.([^0-9]*[^.]*)$", name)
    return (match[1], match[2]) if match else ("", name)


def by_kind(report: PruneReport) -> dict[str, list[tuple[int, LayerReport]]]:
    """The layers of every kind, with the index of their block; layers outside of blocks have the last index.

    Kinds and layers are in the model's order.
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
    """Plot sparsity over the blocks, and the loss L_λ if there was calibration data; a line for every kind."""
    # Not pyplot, which would change the caller's figures and backend; late, because importing matplotlib is slow.
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    measured = any(layer.loss is not None for layer in report.layers)
    figure = Figure(figsize=(8, 6 if measured else 3.6), dpi=120, layout="constrained")
    axes = figure.subplots(2 if measured else 1, sharex=True, squeeze=False)[:, 0]
    for number, (kind, layers) in enumerate(by_kind(report).items()):
        color, marker = COLORS[number % len(COLORS)], MARKERS[number % len(MARKERS)]
        style = {"color": color, "marker": marker, "markersize": 4, "linewidth": 1.2, "alpha": 0.85}
        indices = [index for index, _ in layers]
        axes[0].plot(indices, [layer.sparsity for _, layer in layers], label=plain(kind), **style)
        if measured:
            axes[1].plot(indices, [drawable(layer.loss) for _, layer in layers], **style)
    targets = {layer.target_sparsity for layer in report.layers}
    target = targets.pop() if len(targets) == 1 else None
    if target is not None:
        axes[0].axhline(target, color="black", linestyle="--", linewidth=1, label="target", zorder=0)
    unit = "experts removed, %" if any(layer.experts for layer in report.layers) else "zeros, % of the weights"
    axes[0].set(title="Sparsity of every pruned layer", ylabel=unit, ylim=(-0.03, 1.03))
    axes[0].yaxis.set_major_formatter(PercentFormatter(1, symbol=None))
    if measured:
        axes[1].set(title="Loss of every pruned layer (0: dense, 1: layer removed)", ylabel="$L_λ$, relative")
        losses = [loss for loss in (drawable(layer.loss) for layer in report.layers) if math.isfinite(loss)]
        log = bool(losses) and min(losses) > 0 and max(losses) > 20 * min(losses)
        axes[1].set_yscale("log" if log else "linear")
    axes[-1].set(xlabel="block, in the model's order")
    axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    for axis in axes:
        axis.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=8, frameon=False)
    return figure


def save_plot(report: PruneReport, folder: str | os.PathLike[str]) -> Path:
    """Save the plot as moonshot_report.png in a folder, and return its path."""
    path = Path(folder) / PLOT_NAME
    plot_report(report).savefig(path)
    return path


LONGEST = 60  # characters of a label


def plain(text: str) -> str:
    """Shorten and escape text, to draw it literally: a dollar starts a formula, lone surrogates have no glyph."""
    text = text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
    return text.encode(errors="backslashreplace").decode().replace("$", r"\$")


def drawable(value: float | None) -> float:
    """The value; NaN, which is not drawn, for None and for values that would overflow the axes."""
    return value if value is not None and abs(value) < 1e100 else math.nan
