"""Plots of reports: sparsity and loss of the layers of a run; the metric of a sweep against λ and sparsity.

Plots of a sweep show means over seeds with standard errors. If the sweep has several sparsities, the differences
between λ are too small to see, so a second panel shows them relative to the single-objective baseline.
"""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure  # not pyplot, which would change the caller's figures and backend
from matplotlib.ticker import FixedFormatter, FixedLocator, LogLocator, MaxNLocator, PercentFormatter

from .by_kind import PLOT_NAME, by_kind
from .prune_report import PruneReport
from .seeds import Mean, Swept, baseline_lam, choice, label, mean, means

COLORS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#555555", "#ee8866", "#000000")
MARKERS = "osD^vP*X<>"
Point = tuple[float, Mean]


def plot_report(report: PruneReport) -> Figure:
    """Plot sparsity over the blocks, and the loss L_λ if there was calibration data; a line for every kind."""
    measured = any(layer.loss is not None for layer in report.layers)
    figure = Figure(figsize=(8, 6 if measured else 3.6), dpi=120, layout="constrained")
    axes = figure.subplots(2 if measured else 1, sharex=True, squeeze=False)[:, 0]
    for number, (kind, layers) in enumerate(by_kind(report).items()):
        color, marker = COLORS[number % len(COLORS)], MARKERS[number % len(MARKERS)]
        style = {"color": color, "marker": marker, "markersize": 4, "linewidth": 1.2, "alpha": 0.85}
        indices = [index for index, _ in layers]
        axes[0].plot(indices, [layer.sparsity for _, layer in layers], label=_plain(kind), **style)
        if measured:
            axes[1].plot(indices, [_drawn(layer.loss) for _, layer in layers], **style)
    targets = {layer.target_sparsity for layer in report.layers}
    target = targets.pop() if len(targets) == 1 else None
    if target is not None:
        axes[0].axhline(target, color="black", linestyle="--", linewidth=1, label="target", zorder=0)
    unit = "experts removed, %" if any(layer.experts for layer in report.layers) else "zeros, % of the weights"
    axes[0].set(title="Sparsity of every pruned layer", ylabel=unit, ylim=(-0.03, 1.03))
    axes[0].yaxis.set_major_formatter(PercentFormatter(1, symbol=None))
    if measured:
        axes[1].set(title="Loss of every pruned layer (0: dense, 1: layer removed)", ylabel="$L_λ$, relative")
        losses = [loss for loss in (_drawn(layer.loss) for layer in report.layers) if math.isfinite(loss)]
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


def plot_by_lambda(reports: Sequence[Swept], path: str | os.PathLike[str]) -> None:
    """Plot the metric against λ, a line per pattern and sparsity; λ = 0 and 1, the single objectives, are marked.

    The suffix of the path selects the format.
    """
    settings, metrics = reports[0].settings(), means(reports)
    changes = _changes(reports)
    figure, panels = _panels(reports, len(settings) > 1 and bool(changes))
    for axes, values in zip(panels, (metrics, changes), strict=False):
        for number, (pattern, sparsity) in enumerate(settings):
            points = sorted((lam, m) for (p, s, lam), m in values.items() if (p, s) == (pattern, sparsity))
            line = _line(axes, points, _plain(label(pattern, sparsity)), number)
            _mark(axes, [point for point in points if point[0] in (0.0, 1.0)], "o", 110, line)
            best = choice(reports, pattern, sparsity)
            _mark(axes, [point for point in points if point[0] == best], "*", 170, line, filled=True)
        axes.set_xlabel("λ (1: reconstruction alone, 0: Fisher alone)")
    _mark(panels[0], [(math.nan, Mean(math.nan, 0.0))], "o", 110, "grey", name="one objective")
    _mark(panels[0], [(math.nan, Mean(math.nan, 0.0))], "*", 170, "grey", filled=True, name="best λ")
    _finish(figure, panels, reports, path, "sparsity" if len(settings) > 1 else None)


def plot_by_sparsity(reports: Sequence[Swept], path: str | os.PathLike[str]) -> None:
    """Plot the metric against unstructured sparsity, for the best λ of each and the single-objective baseline."""
    solver, single = _plain(reports[0].solver), baseline_lam(reports[0].solver)
    sparsities = sorted({s for p, s in reports[0].settings() if p == "unstructured"})
    best = {s: choice(reports, "unstructured", s) for s in sparsities}
    shown: dict[str, Mapping[float, float | None]] = {
        f"{solver}, λ = {single:g}": dict.fromkeys(sparsities, single),
        f"MOONSHOT-{solver}, best λ": best,
    }
    changes = _changes(reports)
    figure, panels = _panels(reports, bool(changes))
    for axes, values in zip(panels, (means(reports), changes), strict=False):
        for number, (name, lams) in enumerate(shown.items()):
            keys = [("unstructured", s, lam) for s, lam in lams.items() if lam is not None]
            points = [(key[1], values[key]) for key in keys if key in values]
            if points:
                _line(axes, points, name, number)
        axes.set(xlabel="sparsity, fraction of the weights removed")
        axes.xaxis.set_major_locator(FixedLocator(sparsities))
        axes.xaxis.set_major_formatter(FixedFormatter([f"{s:g}" for s in sparsities]))
    for s, lam in best.items():
        if lam is not None:
            value = sum(values["unstructured", s, lam])  # above the error bar
            place = {"xytext": (0, 8), "textcoords": "offset points", "ha": "center", "fontsize": 9}
            axes.annotate(f"λ={lam:g}", (s, value), **place)
    axes.margins(0.1, 0.15)
    panels[0].axhline(mean([report.dense for report in reports]).value, color="grey", linestyle=":", label="dense")
    _finish(figure, panels, reports, path, None)


def _plain(text: str, most: int = 60) -> str:
    """Text of any file that is drawn as it is, cut: a dollar would start a formula, lone surrogates have no glyph."""
    text = text if len(text) <= most else f"{text[: most - 1]}…"
    return text.encode(errors="backslashreplace").decode().replace("$", r"\$")


def _drawn(value: float | None) -> float:
    """A value that axes can have: they overflow near the largest numbers. NaN, which is not drawn, for others."""
    return value if value is not None and abs(value) < 1e100 else math.nan


def _changes(reports: Sequence[Swept]) -> dict[tuple[str, float, float], Mean]:
    """(pattern, sparsity, λ) → the metric's change in percent from the baseline's λ of the same seed.

    Empty if that λ is missing, or its metric is not a positive number.
    """
    single, rows = baseline_lam(reports[0].solver), []
    for report in reports:
        base = {(e.pattern, e.sparsity): e.metric for e in report.entries if e.lam == single}
        if any(not math.isfinite(value) or value <= 0 for value in base.values()) or not base:
            return {}
        rows.append([100 * (e.metric / base[e.pattern, e.sparsity] - 1) for e in report.entries])
    keys = [(e.pattern, e.sparsity, e.lam) for e in reports[0].entries]
    return dict(zip(keys, map(mean, zip(*rows, strict=True)), strict=True))


def _panels(reports: Sequence[Swept], relative: bool) -> tuple[Figure, list[Any]]:
    """Axes for the metric, and with `relative` others for its changes."""
    figure = Figure(figsize=(9.5 if relative else 7, 4.6), layout="constrained")
    panels = list(figure.subplots(1, 1 + relative, squeeze=False)[0])
    panels[0].set_ylabel(_plain(reports[0].metric))
    panels[-1].grid(alpha=0.3)
    panels[0].grid(alpha=0.3)
    if relative:
        panels[1].set_ylabel(f"change from λ = {baseline_lam(reports[0].solver):g}, %")
    return figure, panels


def _line(axes: Any, points: Iterable[Point], name: str, number: int) -> str:
    """Draw a line with error bars, and a cross at the upper edge for values that are not finite; return its colour."""
    points, color = list(points), COLORS[number % len(COLORS)]
    drawn = [(x, m) for x, m in points if math.isfinite(_drawn(m.value))]
    xs, ys, errors = [x for x, _ in drawn], [m.value for _, m in drawn], [m.error for _, m in drawn]
    style = {"marker": MARKERS[number % len(MARKERS)], "markersize": 5, "capsize": 3, "color": color}
    axes.errorbar(xs, ys, yerr=errors if any(errors) else None, label=name, **style)
    for x in (x for x, m in points if not math.isfinite(_drawn(m.value))):
        labelled = "not finite" in axes.get_legend_handles_labels()[1]
        edge = {"transform": axes.get_xaxis_transform(), "clip_on": False, "zorder": 5, "linestyle": "none"}
        axes.plot([x], [1.0], marker="x", color="grey", label=None if labelled else "not finite", **edge)
    return color


def _mark(
    axes: Any, points: list[Point], marker: str, size: int, color: str, filled: bool = False, name: str | None = None
) -> None:
    faces = {"facecolors": color if filled else "none", "edgecolors": color}
    axes.scatter(
        [x for x, _ in points], [m.value for _, m in points], s=size, marker=marker, zorder=4, label=name, **faces
    )


def _finish(
    figure: Figure, panels: list[Any], reports: Sequence[Swept], path: str | os.PathLike[str], title: str | None
) -> None:
    values = [value.value for value in means(reports).values() if math.isfinite(value.value)]
    if values and not reports[0].maximize and min(values) > 0 and max(values) > 8 * min(values):
        panels[0].set_yscale("log")
        panels[0].yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
        panels[0].yaxis.set_major_formatter("{x:g}")
        panels[0].yaxis.set_minor_formatter("{x:g}")
    elif values and reports[0].metric.startswith("accuracy") and max(values) <= 1:
        panels[0].yaxis.set_major_formatter(PercentFormatter(1))
    seeds = f", mean ± standard error of {len(reports)} seeds" if len(reports) > 1 else ""
    figure.suptitle(f"{_plain(reports[0].solver)}{seeds}", fontsize=11)
    handles, names = panels[0].get_legend_handles_labels()
    columns = min(len(names), 4 if max(map(len, names)) > 14 else 7)
    figure.legend(handles, names, title=title, loc="outside lower center", ncols=columns, fontsize=9, frameon=False)
    figure.savefig(path, dpi=150)
