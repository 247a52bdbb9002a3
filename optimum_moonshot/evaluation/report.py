"""The evaluation results of a model, written by `optimum-cli moonshot eval` and compared with those of later models."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from pathlib import Path
from typing import Any, TypeVar

from ..data.sources import short_name
from ..errors import MoonshotError, check_path, require
from ..files import replace_file, writing
from ..reports.json_files import check_fields
from ..reports.measurement import Measured, Measurement, versions
from .agreement import Agreement
from .images import Accuracy
from .text import Perplexity
from .zeroshot import ZeroShot

Result = TypeVar("Result", Perplexity, Accuracy, Agreement)


@dataclasses.dataclass
class EvalReport:
    """Perplexities, accuracies and agreements by data set, zero-shot accuracies, and the versions of the libraries."""

    model: str
    perplexity: dict[str, Perplexity] = dataclasses.field(default_factory=dict)
    accuracy: dict[str, Accuracy] = dataclasses.field(default_factory=dict)
    zero_shot: ZeroShot | None = None
    versions: dict[str, str] = dataclasses.field(default_factory=versions)
    agreement: dict[str, Agreement] = dataclasses.field(default_factory=dict)

    def add(self, result: Perplexity | Accuracy | Agreement | ZeroShot) -> None:
        if isinstance(result, ZeroShot):
            self.zero_shot, self.versions = result, {**self.versions, **result.versions}
        elif isinstance(result, Accuracy):
            self.accuracy[result.dataset] = result
        elif isinstance(result, Agreement):
            self.agreement[result.dataset] = result
        else:
            self.perplexity[result.dataset] = result

    def measurements(self) -> dict[str, Measurement]:
        """All results, by the short name of the data set, or by the task."""
        results: list[Measured] = [*self.perplexity.values(), *self.accuracy.values(), *self.agreement.values()]
        results += [self.zero_shot] if self.zero_shot else []
        return {name: figure for result in results for name, figure in result.measurements().items()}

    def of(self, dataset: str) -> Perplexity | Accuracy | Agreement | None:
        """The result on a data set, of any path to its file."""
        results: dict[str, Perplexity | Accuracy | Agreement] = {**self.perplexity, **self.accuracy, **self.agreement}
        return {short_name(name): result for name, result in results.items()}.get(short_name(dataset))

    def to_dict(self) -> dict[str, Any]:
        """JSON types: values by data set, and the settings of each; an infinite perplexity is None."""
        results: list[Perplexity | Accuracy | Agreement] = [*self.perplexity.values(), *self.accuracy.values()]
        results += self.agreement.values()
        return {
            "model": self.model,
            "perplexity": {d: r.value if math.isfinite(r.value) else None for d, r in self.perplexity.items()},
            "accuracy": {d: result.value for d, result in self.accuracy.items()},
            **({"agreement": {d: r.value for d, r in self.agreement.items()}} if self.agreement else {}),
            "measured_on": {result.dataset: _settings(result) for result in results},
            "zero_shot": self.zero_shot.to_dict() if self.zero_shot else None,
            "versions": self.versions,
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> EvalReport:
        """The inverse of `to_dict`; also accepts the result of `ZeroShot.to_dict`."""
        if "num_fewshot" in values:
            values = {"zero_shot": values}
        settings, zero_shot = values.get("measured_on", {}), values.get("zero_shot")
        perplexities = {d: math.inf if v is None else v for d, v in values.get("perplexity", {}).items()}
        return cls(
            model=values.get("model", ""),
            perplexity={d: _read(Perplexity, v, d, settings) for d, v in perplexities.items()},
            accuracy={d: _read(Accuracy, v, d, settings) for d, v in values.get("accuracy", {}).items()},
            agreement={d: _read(Agreement, v, d, settings) for d, v in values.get("agreement", {}).items()},
            zero_shot=ZeroShot.from_dict(zero_shot) if zero_shot else None,
            versions=values.get("versions", {}),
        )

    def save(self, path: str | os.PathLike[str], **more: Any) -> None:
        """Write a JSON file, with further entries as JSON types."""
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


def _read(kind: type[Result], value: Any, dataset: str, settings: dict[str, Any]) -> Result:
    fields = {"value": value, "dataset": dataset, **settings[dataset]}
    check_fields(kind, fields, dataset)
    return kind(**fields)


def _settings(result: Perplexity | Accuracy | Agreement) -> dict[str, Any]:
    return {name: value for name, value in dataclasses.asdict(result).items() if name not in ("value", "dataset")}
