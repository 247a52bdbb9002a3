"""The evaluation results of a model, which `optimum-cli moonshot eval` saves and compares with later results."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from pathlib import Path
from typing import Any

from ..data.sources import short_name
from ..errors import MoonshotError, check_path, require
from ..files import replace_file, writing
from ..reports.json_files import check_fields
from ..reports.prune_report import Measured, Measurement
from ..reports.record import versions
from .metrics import Accuracy, Agreement, Divergence, Perplexity
from .zeroshot import ZeroShot

Result = Perplexity | Accuracy | Agreement
KINDS: dict[str, type[Result]] = {"perplexity": Perplexity, "accuracy": Accuracy, "agreement": Agreement}


@dataclasses.dataclass
class EvalReport:
    """Perplexities, accuracies and agreements by data set, zero-shot accuracies, and the versions of the libraries."""

    model: str
    perplexity: dict[str, Perplexity] = dataclasses.field(default_factory=dict)
    accuracy: dict[str, Accuracy] = dataclasses.field(default_factory=dict)
    zero_shot: ZeroShot | None = None
    versions: dict[str, str] = dataclasses.field(default_factory=versions)
    agreement: dict[str, Agreement] = dataclasses.field(default_factory=dict)

    def add(self, result: Result | ZeroShot) -> None:
        if isinstance(result, ZeroShot):
            self.zero_shot, self.versions = result, {**self.versions, **result.versions}
        else:
            field = next(field for field, kind in KINDS.items() if isinstance(result, kind))
            getattr(self, field)[result.dataset] = result

    @property
    def results(self) -> list[Result]:
        """The results on data sets."""
        return [result for field in KINDS for result in getattr(self, field).values()]

    def measurements(self) -> dict[str, Measurement]:
        """All results, by short name of the data set or by task."""
        results: list[Measured] = [*self.results, *([self.zero_shot] if self.zero_shot else [])]
        return {name: figure for result in results for name, figure in result.measurements().items()}

    def of(self, dataset: str) -> Result | None:
        """The result on a data set, for any path to its file."""
        return {short_name(result.dataset): result for result in self.results}.get(short_name(dataset))

    def to_dict(self) -> dict[str, Any]:
        """JSON types: values by data set, and the settings of each; an infinite perplexity is None."""
        values = {
            field: {name: one.value if math.isfinite(one.value) else None for name, one in getattr(self, field).items()}
            for field in KINDS
            if field != "agreement" or self.agreement
        }
        settings = {result.dataset: dataclasses.asdict(result) for result in self.results}
        for fields in settings.values():
            del fields["value"], fields["dataset"]
        return {
            "model": self.model,
            **values,
            "measured_on": settings,
            "zero_shot": self.zero_shot.to_dict() if self.zero_shot else None,
            "versions": self.versions,
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> EvalReport:
        """The inverse of `to_dict`; also accepts the result of `ZeroShot.to_dict`."""
        if "num_fewshot" in values:
            values = {"zero_shot": values}
        settings, zero_shot = values.get("measured_on", {}), values.get("zero_shot")
        results: dict[str, dict[str, Any]] = {field: {} for field in KINDS}
        for field, kind in KINDS.items():
            for dataset, value in values.get(field, {}).items():
                value = math.inf if value is None and kind is Perplexity else value
                fields = {"value": value, "dataset": dataset, **settings[dataset]}
                results[field][dataset] = check_fields(Divergence if "kl" in fields else kind, fields, dataset)
        return cls(
            model=values.get("model", ""),
            zero_shot=ZeroShot.from_dict(zero_shot) if zero_shot else None,
            versions=values.get("versions", {}),
            **results,
        )

    def save(self, path: str | os.PathLike[str], **more: Any) -> None:
        """Write a JSON file; `more` are further entries, as JSON types."""
        check_path("path", path)
        with writing("output", path):
            replace_file(path, json.dumps({**self.to_dict(), **more}, indent=2, ensure_ascii=False) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> EvalReport:
        """Read a file written by `save`, or one with the result of `ZeroShot.to_dict`.

        Raises:
            MoonshotError: no such file, or one without results.
        """
        check_path("path", path)
        try:
            report = cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise MoonshotError(f"{path} contains no results of an evaluation ({error})") from None
        require(bool(report.measurements()), f"{path} contains no results of an evaluation")
        return report
