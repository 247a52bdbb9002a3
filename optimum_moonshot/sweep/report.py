"""The report of a sweep over λ, sparsities and patterns: a table, CSV, JSON, and two plots.

Reports of several seeds are combined to means with standard errors.
"""

from __future__ import annotations

import csv
import dataclasses
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import Option, Text, require
from ..files import staged
from ..reports.json_files import Amount, check_fields, check_value, load_json, save_json
from ..reports.seeds import SweepEntry, choice, label, table

REPORT_NAME = "sweep.json"


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
        """All pairs of pattern and sparsity, each once."""
        return list(dict.fromkeys((entry.pattern, entry.sparsity) for entry in self.entries))

    def best(self, pattern: str | None = None, sparsity: float | None = None) -> SweepEntry:
        """The entry with the best metric of one pattern and sparsity; the larger of equal λ.

        Args:
            pattern: "unstructured", "structured" or "n:m"; required if the sweep has several.
            sparsity: fraction of the weights removed, in [0, 1]; likewise.

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
        which = Option("pattern", pattern), Option("sparsity", sparsity)
        require(bool(settings), Text(f"{{}}, {{}}: the sweep has {self.settings()}", *which))
        several = Text(f"best of what? Give {{}} and {{}} of one of {list(settings)}", "pattern", "sparsity")
        require(len(settings) == 1, several)
        candidates = [entry for entry in matching if not math.isnan(entry.metric)]
        require(bool(candidates), Text("{}, {}: the metric is NaN for every λ", *which))
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
        """As JSON types; `from_dict` is the inverse."""
        return _finite(dataclasses.asdict(self))

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> SweepReport:
        """The inverse of `to_dict`.

        Raises:
            MoonshotError: a field that is missing, unknown, or of another type.
        """
        require(isinstance(values.get("entries"), list), "must be a list", field="entries", value=values.get("entries"))
        values = {**_with_nan(values, "dense"), "entries": [_with_nan(e, "metric", "loss") for e in values["entries"]]}
        check_fields(cls, values)
        check_value(int, values["config"].get("seed"), "config.seed")
        report = cls(**{**values, "entries": [SweepEntry(**entry) for entry in values["entries"]]})
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


def _with_nan(values: Any, *fields: str) -> Any:
    """An object with NaN for null in some of its fields, as `_finite` writes it."""
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
            for entry in report.entries:
                shared = {"solver": report.solver, "seed": report.config["seed"]}
                writer.writerow({**shared, **dataclasses.asdict(entry)})
    from ..reports.plots import plot_by_lambda, plot_by_sparsity  # late: importing matplotlib is slow

    plot_by_lambda(reports, folder / "metric_by_lambda.png")
    if len({s for p, s in reports[0].settings() if p == "unstructured"}) > 1:
        plot_by_sparsity(reports, folder / "metric_by_sparsity.png")
