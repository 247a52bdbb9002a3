"""The report of a sweep over λ, sparsities and patterns: a table, CSV, JSON, and two plots.

Reports of several seeds are combined to means with standard errors. With several sparsities the differences between λ
are too small to see in a plot, so a second panel shows them relative to the single-objective baseline.
"""

from __future__ import annotations

import csv
import dataclasses
import math
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import require
from ..files import staged
from ..reports.json_files import Amount, Fraction, check_fields, check_value, load_json, save_json
from ..reports.plots import COLORS, MARKERS, drawable, plain

if TYPE_CHECKING:
    from matplotlib.figure import Figure

REPORT_NAME = "sweep.json"


@dataclasses.dataclass(frozen=True)
class SweepEntry:
    """One variant: pattern, sparsity and λ, with its measurements."""

    pattern: str
    sparsity: Fraction
    lam: Fraction
    metric: float
    loss: float  # mean over the layers of L_λ(W), 0 dense to 1 empty
    seconds: Amount  # of solving and measuring


@dataclasses.dataclass(repr=False)
class SweepReport:
    """All variants of one sweep, in the order of the configuration. In JSON, values that are not finite are null."""

    solver: str
    metric: str  # the name of `SweepEntry.metric`, such as "calibration perplexity"
    maximize: bool  # whether higher is better
    dense: float  # the metric of the dense model
    entries: list[SweepEntry]
    config: dict[str, Any]  # the settings common to all variants
    calibration: dict[str, Any] | None
    seconds: dict[str, Amount]  # calibration, variants, total
    versions: dict[str, str]

    def settings(self) -> list[tuple[str, float]]:
        """The pairs of pattern and sparsity."""
        return list(dict.fromkeys((entry.pattern, entry.sparsity) for entry in self.entries))

    def best(self, pattern: str | None = None, sparsity: float | None = None) -> SweepEntry:
        """Return the entry with the best metric of one pattern and sparsity, at the larger λ if two are equal.

        Args:
            pattern: "unstructured", "structured" or "n:m"; required if the sweep has several.
            sparsity: fraction of the weights removed, in [0, 1]; required if the sweep has several.

        Raises:
            MoonshotError: no such entry, or entries of several patterns or sparsities.
        """
        matching = [
            entry
            for entry in self.entries
            if (pattern is None or entry.pattern == pattern)
            and (sparsity is None or math.isclose(entry.sparsity, sparsity))
        ]
        settings = dict.fromkeys((entry.pattern, entry.sparsity) for entry in matching)
        which = f"pattern={pattern!r}, sparsity={sparsity}"
        require(bool(settings), f"{which}: the sweep has {self.settings()}")
        several = f"best of what? Give `pattern` and `sparsity` of one of {list(settings)}"
        require(len(settings) == 1, several)
        candidates = [entry for entry in matching if not math.isnan(entry.metric)]
        require(bool(candidates), f"{which}: the metric is NaN for every λ")
        return max(candidates, key=lambda entry: (entry.metric if self.maximize else -entry.metric, entry.lam))

    def table(self) -> str:
        """A text table: a row per λ, a column per pattern and sparsity, the best of each marked."""
        return table([self])

    def __repr__(self) -> str:
        """One line: the number of variants, and the best λ of each pattern and sparsity."""
        best = [(label(*setting), choice([self], *setting)) for setting in self.settings()]
        choices = ", ".join(f"{lam:g} at {setting}" for setting, lam in best if lam is not None)
        parts = [self.solver, self.metric, f"{len(self.entries)} variants", *([f"best λ {choices}"] if choices else [])]
        parts += [f"{self.seconds['total']:.1f} s"] if "total" in self.seconds else []
        return f"{type(self).__name__}({', '.join(parts)})"

    def to_dict(self) -> dict[str, Any]:
        """Convert the report to JSON types; `from_dict` is the inverse."""
        return _finite(dataclasses.asdict(self))

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> SweepReport:
        """The inverse of `to_dict`.

        Raises:
            MoonshotError: a field that is missing, unknown, or of another type.
        """
        require(isinstance(values.get("entries"), list), "must be a list", field="entries", value=values.get("entries"))
        values = {**_with_nan(values, "dense"), "entries": [_with_nan(e, "metric", "loss") for e in values["entries"]]}
        report: SweepReport = check_fields(cls, values)
        check_value(int, report.config.get("seed"), "config.seed")
        variants = {(*setting, entry.lam) for setting in report.settings() for entry in report.entries}
        complete = {(entry.pattern, entry.sparsity, entry.lam) for entry in report.entries} == variants
        require(complete, "entries: must have every λ of every pattern and sparsity")
        return report

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> SweepReport:
        """Read a saved report, from the file or its folder.

        Raises:
            MoonshotError: there is no such file, or it is damaged.
        """
        return load_json(cls.from_dict, "a sweep", path, REPORT_NAME)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write sweep.json, sweep.csv, metric_by_lambda.png and, with several sparsities, metric_by_sparsity.png."""
        with staged("output", folder, model=False) as staging:
            _write_all([self], staging)
            save_json(self.to_dict(), staging / REPORT_NAME)


class Mean(NamedTuple):
    """A mean over seeds with its standard error, 0 for one seed."""

    value: float
    error: float


def means(reports: Sequence[SweepReport]) -> dict[tuple[str, float, float], Mean]:
    """(pattern, sparsity, λ) → the mean metric of the reports, which must have the same variants.

    Raises:
        MoonshotError: no reports, or they differ in more than the seed.
    """
    require(len(reports) > 0, "reports: must not be empty")
    keys = [(entry.pattern, entry.sparsity, entry.lam) for entry in reports[0].entries]
    for report in reports[1:]:
        same = (report.solver, report.metric) == (reports[0].solver, reports[0].metric)
        same = same and [(entry.pattern, entry.sparsity, entry.lam) for entry in report.entries] == keys
        require(same, "reports: must have the same solver, metric and variants")
    values = zip(*([entry.metric for entry in report.entries] for report in reports), strict=True)
    return dict(zip(keys, map(mean, values), strict=True))


def mean(values: Sequence[float]) -> Mean:
    """Mean and standard error."""
    values = list(values)
    if not all(abs(value) < 1e150 for value in values):  # NaN, or values whose squares overflow
        return Mean(sum(values) / len(values), math.nan if len(values) > 1 else 0.0)
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return Mean(statistics.fmean(values), error)


def choice(reports: Sequence[SweepReport], pattern: str, sparsity: float) -> float | None:
    """Return the λ with the best mean metric, the larger λ if two are equal; None if every metric is NaN."""
    values = {lam: m.value for (p, s, lam), m in means(reports).items() if (p, s) == (pattern, sparsity)}
    candidates = [lam for lam, value in values.items() if not math.isnan(value)]
    return max(candidates, key=lambda lam: (values[lam] if reports[0].maximize else -values[lam], lam), default=None)


def baseline_lam(solver: str) -> float:
    """The λ of the solver's single-objective baseline: CAP minimises the Fisher loss, others the reconstruction."""
    return 0.0 if solver == "cap" else 1.0


def table(reports: Sequence[SweepReport]) -> str:
    """A text table of the metric by λ (rows), pattern and sparsity (columns), for reports of the same variants."""
    metrics, first = means(reports), reports[0]
    settings, lambdas = first.settings(), list(dict.fromkeys(entry.lam for entry in first.entries))
    best = {setting: choice(reports, *setting) for setting in settings}
    rows = [["λ", *(label(*setting) for setting in settings)]]
    for lam in lambdas:
        row = [f"{lam:g}"]
        for setting in settings:
            value = metrics[(*setting, lam)]
            spread = f" ± {value.error:.2g}" if len(reports) > 1 else ""
            row.append(f"{value.value:.4g}{spread}{'*' if best[setting] == lam else ' '}")
        rows.append(row)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    dense = mean([report.dense for report in reports]).value
    return "\n".join([f"{first.solver}: {first.metric} (dense {dense:.4g}), * is the best λ", *lines])


def label(pattern: str, sparsity: float) -> str:
    """The label of a pattern with its sparsity, which n:m implies."""
    return {"unstructured": f"{sparsity:g}", "structured": f"structured {sparsity:g}"}.get(pattern, pattern)


def _with_nan(values: Any, *fields: str) -> Any:
    """Replace null, which `_finite` writes, by NaN in some fields of a JSON object."""
    if not isinstance(values, dict):
        return values
    return {name: math.nan if value is None and name in fields else value for name, value in values.items()}


def _finite(values: Any) -> Any:
    """Replace NaN and infinity, which JSON does not have, by null."""
    if isinstance(values, dict):
        return {key: _finite(value) for key, value in values.items()}
    if isinstance(values, list):
        return list(map(_finite, values))
    return None if isinstance(values, float) and not math.isfinite(values) else values


def save_all(reports: Sequence[SweepReport], folder: str | os.PathLike[str]) -> None:
    """Write sweep.csv with every entry of every report, and the plots of their means over seeds.

    Raises:
        MoonshotError: the reports are of different variants, or the folder cannot be written.
    """
    with staged("output", folder, model=False) as staging:
        _write_all(reports, staging)


def _write_all(reports: Sequence[SweepReport], folder: Path) -> None:
    with open(folder / "sweep.csv", "w", newline="", encoding="utf-8", errors="backslashreplace") as file:
        fields = [field.name for field in dataclasses.fields(SweepEntry)]
        writer = csv.DictWriter(file, ["solver", "seed", *fields])
        writer.writeheader()
        for report in reports:
            shared = {"solver": report.solver, "seed": report.config["seed"]}
            writer.writerows({**shared, **dataclasses.asdict(entry)} for entry in report.entries)
    plot_by_lambda(reports, folder / "metric_by_lambda.png")
    if len({s for p, s in reports[0].settings() if p == "unstructured"}) > 1:
        plot_by_sparsity(reports, folder / "metric_by_sparsity.png")


def plot_by_lambda(reports: Sequence[SweepReport], path: str | os.PathLike[str]) -> None:
    """Plot the metric against λ, a line per pattern and sparsity; λ = 0 and 1, the single objectives, are marked.

    The suffix of the path selects the format.
    """
    settings, metrics = reports[0].settings(), means(reports)
    changes = _changes(reports)
    figure, panels = _panels(reports, len(settings) > 1 and bool(changes))
    for axes, values in zip(panels, (metrics, changes), strict=False):
        for number, (pattern, sparsity) in enumerate(settings):
            points = sorted((lam, m) for (p, s, lam), m in values.items() if (p, s) == (pattern, sparsity))
            line = _line(axes, points, plain(label(pattern, sparsity)), number)
            _mark(axes, [point for point in points if point[0] in (0.0, 1.0)], "o", 110, line)
            best = choice(reports, pattern, sparsity)
            _mark(axes, [point for point in points if point[0] == best], "*", 170, line, filled=True)
        axes.set_xlabel("λ (1: reconstruction alone, 0: Fisher alone)")
    _mark(panels[0], [(math.nan, Mean(math.nan, 0.0))], "o", 110, "grey", name="one objective")
    _mark(panels[0], [(math.nan, Mean(math.nan, 0.0))], "*", 170, "grey", filled=True, name="best λ")
    _finish(figure, panels, reports, path, "sparsity" if len(settings) > 1 else None)


def plot_by_sparsity(reports: Sequence[SweepReport], path: str | os.PathLike[str]) -> None:
    """Plot the metric against unstructured sparsity, for the best λ and the λ of the single-objective baseline."""
    from matplotlib.ticker import FixedFormatter, FixedLocator  # late: importing matplotlib is slow

    solver, single = plain(reports[0].solver), baseline_lam(reports[0].solver)
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


def _changes(reports: Sequence[SweepReport]) -> dict[tuple[str, float, float], Mean]:
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


def _panels(reports: Sequence[SweepReport], relative: bool) -> tuple[Figure, list[Any]]:
    """Return a figure with axes for the metric and, if `relative`, further axes for its changes."""
    from matplotlib.figure import Figure  # not pyplot, which would change the caller's figures and backend

    figure = Figure(figsize=(9.5 if relative else 7, 4.6), layout="constrained")
    panels = list(figure.subplots(1, 1 + relative, squeeze=False)[0])
    panels[0].set_ylabel(plain(reports[0].metric))
    panels[-1].grid(alpha=0.3)
    panels[0].grid(alpha=0.3)
    if relative:
        panels[1].set_ylabel(f"change from λ = {baseline_lam(reports[0].solver):g}, %")
    return figure, panels


def _line(axes: Any, points: Iterable[tuple[float, Mean]], name: str, number: int) -> str:
    """Draw a line with error bars, and a cross at the upper edge for values that are not finite; return its colour."""
    points, color = list(points), COLORS[number % len(COLORS)]
    drawn = [(x, m) for x, m in points if math.isfinite(drawable(m.value))]
    xs, ys, errors = [x for x, _ in drawn], [m.value for _, m in drawn], [m.error for _, m in drawn]
    style = {"marker": MARKERS[number % len(MARKERS)], "markersize": 5, "capsize": 3, "color": color}
    axes.errorbar(xs, ys, yerr=errors if any(errors) else None, label=name, **style)
    for x in (x for x, m in points if not math.isfinite(drawable(m.value))):
        labelled = "not finite" in axes.get_legend_handles_labels()[1]
        edge = {"transform": axes.get_xaxis_transform(), "clip_on": False, "zorder": 5, "linestyle": "none"}
        axes.plot([x], [1.0], marker="x", color="grey", label=None if labelled else "not finite", **edge)
    return color


def _mark(
    axes: Any,
    points: list[tuple[float, Mean]],
    marker: str,
    size: int,
    color: str,
    filled: bool = False,
    name: str | None = None,
) -> None:
    faces = {"facecolors": color if filled else "none", "edgecolors": color}
    axes.scatter(
        [x for x, _ in points], [m.value for _, m in points], s=size, marker=marker, zorder=4, label=name, **faces
    )


def _finish(
    figure: Figure, panels: list[Any], reports: Sequence[SweepReport], path: str | os.PathLike[str], title: str | None
) -> None:
    from matplotlib.ticker import LogLocator, PercentFormatter

    values = [value.value for value in means(reports).values() if math.isfinite(value.value)]
    if values and not reports[0].maximize and min(values) > 0 and max(values) > 8 * min(values):
        panels[0].set_yscale("log")
        panels[0].yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
        panels[0].yaxis.set_major_formatter("{x:g}")
        panels[0].yaxis.set_minor_formatter("{x:g}")
    elif values and reports[0].metric.startswith("accuracy") and max(values) <= 1:
        panels[0].yaxis.set_major_formatter(PercentFormatter(1))
    seeds = f", mean ± standard error of {len(reports)} seeds" if len(reports) > 1 else ""
    figure.suptitle(f"{plain(reports[0].solver)}{seeds}", fontsize=11)
    handles, names = panels[0].get_legend_handles_labels()
    columns = min(len(names), 4 if max(map(len, names)) > 14 else 7)
    figure.legend(handles, names, title=title, loc="outside lower center", ncols=columns, fontsize=9, frameon=False)
    figure.savefig(path, dpi=150)
