"""Combine sweeps of several seeds: means with their standard errors."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from ..errors import require
from .json_files import Amount, Fraction


@dataclasses.dataclass(frozen=True)
class SweepEntry:
    """One variant: pattern, sparsity and λ, with its measurements."""

    pattern: str
    sparsity: Fraction
    lam: Fraction
    metric: float
    loss: float  # mean over the layers of L_λ(W), 0 dense to 1 empty
    seconds: Amount  # of solving and measuring


class Swept(Protocol):
    """The fields of a `SweepReport` that this module reads."""

    solver: str
    metric: str
    maximize: bool
    dense: float
    entries: list[SweepEntry]
    config: dict[str, Any]

    def settings(self) -> list[tuple[str, float]]:
        """All pairs of pattern and sparsity, each once."""


class Mean(NamedTuple):
    """A mean over seeds with its standard error, 0 for one seed."""

    value: float
    error: float


def means(reports: Sequence[Swept]) -> dict[tuple[str, float, float], Mean]:
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
    if not all(abs(value) < 1e150 for value in values):  # whose squares overflow, or NaN
        return Mean(sum(values) / len(values), math.nan if len(values) > 1 else 0.0)
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return Mean(statistics.fmean(values), error)


def choice(reports: Sequence[Swept], pattern: str, sparsity: float) -> float | None:
    """The λ with the best mean of one pattern and sparsity, the larger of equal ones; None if every metric is NaN."""
    values = {lam: m.value for (p, s, lam), m in means(reports).items() if (p, s) == (pattern, sparsity)}
    candidates = [lam for lam, value in values.items() if not math.isnan(value)]
    return max(candidates, key=lambda lam: (values[lam] if reports[0].maximize else -values[lam], lam), default=None)


def baseline_lam(solver: str) -> float:
    """The λ of the solver's single-objective baseline: CAP minimises the Fisher loss, others the reconstruction."""
    return 0.0 if solver == "cap" else 1.0


def table(reports: Sequence[Swept]) -> str:
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
