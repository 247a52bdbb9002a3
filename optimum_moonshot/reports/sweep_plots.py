"""Plots of a sweep: the metric against λ and against sparsity, as means over seeds with standard errors.

With several sparsities on an axis, the differences between λ are too small to see: a second panel shows them relative
to the single-objective baseline.
"""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure  # not pyplot, which would change the caller's figures and backend
from matplotlib.ticker import FixedFormatter, FixedLocator, LogLocator, PercentFormatter

from .layer_plot import COLORS, MARKERS
from .seeds import Mean, Swept, baseline_lam, choice, label, mean, means

Point = tuple[float, Mean]


def plot_by_lambda(reports: Sequence[Swept], path: str | os.PathLike[str]) -> None:
    """Plot the metric against λ, a line per pattern and sparsity; λ = 0 and 1, the single objectives, are marked.

    Args:
        reports: of the same variants, one per seed.
        path: of the plot; its suffix selects the format.

    Raises:
        MoonshotError: the reports are of different variants.
    """
    settings, metrics = reports[0].settings(), means(reports)
    changes = _changes(reports)
    figure, panels = _panels(reports, len(settings) > 1 and bool(changes))
    for axes, values in zip(panels, (metrics, changes), strict=False):
        for number, (pattern, sparsity) in enumerate(settings):
            points = sorted((lam, m) for (p, s, lam), m in values.items() if (p, s) == (pattern, sparsity))
            line = _line(axes, points, label(pattern, sparsity), number)
            _mark(axes, [point for point in points if point[0] in (0.0, 1.0)], "o", 110, line)
            best = choice(reports, pattern, sparsity)
            _mark(axes, [point for point in points if point[0] == best], "*", 170, line, filled=True)
        axes.set_xlabel("λ (1: reconstruction alone, 0: Fisher alone)")
    _mark(panels[0], [(math.nan, Mean(math.nan, 0.0))], "o", 110, "grey", name="one objective")
    _mark(panels[0], [(math.nan, Mean(math.nan, 0.0))], "*", 170, "grey", filled=True, name="best λ")
    _finish(figure, panels, reports, path, "sparsity" if len(settings) > 1 else None)


def plot_by_sparsity(reports: Sequence[Swept], path: str | os.PathLike[str]) -> None:
    """Plot the metric against unstructured sparsity, for the best λ of each and the single-objective baseline.

    Args:
        reports: of the same variants, one per seed.
        path: of the plot; its suffix selects the format.

    Raises:
        MoonshotError: the reports are of different variants.
    """
    solver, single = reports[0].solver, baseline_lam(reports[0].solver)
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
    panels[0].set_ylabel(reports[0].metric)
    panels[-1].grid(alpha=0.3)
    panels[0].grid(alpha=0.3)
    if relative:
        panels[1].set_ylabel(f"change from λ = {baseline_lam(reports[0].solver):g}, %")
    return figure, panels


def _line(axes: Any, points: Iterable[Point], name: str, number: int) -> str:
    """Draw a line with error bars, and a cross at the upper edge for values that are not finite; return its colour."""
    points, color = list(points), COLORS[number % len(COLORS)]
    drawn = [(x, m) for x, m in points if math.isfinite(m.value)]
    xs, ys, errors = [x for x, _ in drawn], [m.value for _, m in drawn], [m.error for _, m in drawn]
    style = {"marker": MARKERS[number % len(MARKERS)], "markersize": 5, "capsize": 3, "color": color}
    axes.errorbar(xs, ys, yerr=errors if any(errors) else None, label=name, **style)
    for x in (x for x, m in points if not math.isfinite(m.value)):
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
    figure.suptitle(f"{reports[0].solver}{seeds}", fontsize=11)
    handles, names = panels[0].get_legend_handles_labels()
    columns = min(len(names), 4 if max(map(len, names)) > 14 else 7)
    figure.legend(handles, names, title=title, loc="outside lower center", ncols=columns, fontsize=9, frameon=False)
    figure.savefig(path, dpi=150)
