"""What a run did: one `LayerReport` per weight matrix, gathered in a `PruneReport` that prints and saves as JSON."""

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict

from ..errors import MoonshotError, check_path, require
from ..files import read_json, replace_file
from ..objective.quadratic import RelativeLoss
from .conform import check_fields, check_value
from .measurement import Measured
from .rotation_report import RotationReport
from .tables import html_table, text_table

REPORT_NAME = "moonshot_report.json"
_DERIVED = ("sparsity", "chosen", "model_sparsity")  # in the JSON, for those who read no Python
_LEFT = ("notes",)  # columns of the table that are to the left


@dataclasses.dataclass(frozen=True)
class ExpertChoice:
    """Which experts of a mixture went.

    Raises:
        MoonshotError: there is no loss.
    """

    removed: tuple[int, ...]  # their numbers, as they were before
    losses: dict[str, float]  # L_λ of the choice by each solver that takes experts, the run's own first

    def __post_init__(self) -> None:
        require(len(self.losses) > 0, "experts.losses: there are none")

    def line(self) -> str:
        """For people."""
        numbers = ", ".join(map(str, self.removed))
        own, *others = (f"{name} {loss:.4f}" for name, loss in self.losses.items())
        return f"without experts {numbers}; L_λ {own}" + (f" ({', '.join(others)})" if others else "")


@dataclasses.dataclass(frozen=True)
class LayerReport:
    """One pruned matrix, or a mixture that lost experts. Losses are relative: L(W)/L(0), so 0 is the dense layer and 1
    an empty one.

    `masked` losses are those of the chosen mask on the dense weights, before the survivors were updated; the others
    are those of the weights that the solver gave, which a recovery may have changed since. Fisher losses are None where
    λ = 1 needed no gradients, and all are None where no calibration data was given. Losses of one solver are comparable
    between layers and λ; Wanda's are measured on diagonals, as it decides by them.
    """

    name: str
    shape: tuple[int, int]  # d_out, d_in; of a mixture its experts as they were, and the weights of one
    lam: float | None  # the λ used here; None without calibration data
    sparsity: float  # zeros counted in the weight, in the model's dtype; of a mixture the share of experts that went
    reconstruction: float | None = None  # L_R(W)/L_R(0)
    reconstruction_masked: float | None = None
    fisher: float | None = None  # L_F(W)/L_F(0)
    fisher_masked: float | None = None
    loss: float | None = None  # L_λ(W)
    loss_masked: float | None = None
    damping: float = 0.0
    seconds: float = 0.0  # in the solver
    peak_memory: int = 0  # bytes: on a GPU the most allocated during this layer, on a CPU the process's peak so far
    notes: tuple[str, ...] = ()
    asked: float | None = None  # sparsity asked for: the pattern's, for this layer
    experts: ExpertChoice | None = None  # of a mixture that lost some
    experts_asked: tuple[float, float] | None = None  # the least and the most of an expert, where each has its own

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "LayerReport":
        """From what JSON makes of `dataclasses.asdict`."""
        choice, lists = values.get("experts"), {"shape": values["shape"], "notes": values.get("notes", ())}
        if values.get("experts_asked") is not None:
            lists["experts_asked"] = values["experts_asked"]
        experts = None if choice is None else ExpertChoice(tuple(choice["removed"]), choice["losses"])
        return cls(**{**values, **{name: tuple(found) for name, found in lists.items()}, "experts": experts})

    @property
    def shares(self) -> str:
        """What its experts were asked for, for people; empty where all were asked for the same."""
        if self.experts_asked is None or self.asked is None:
            return ""
        least, most = self.experts_asked
        return f"its experts' sparsities: least {least:.4f}, mean {self.asked:.4f}, most {most:.4f}"


@dataclasses.dataclass(frozen=True)
class BlockReport:
    """One recovered block. Losses are |output - dense output|² / |dense output|², a mean over the tokens of the samples
    that were held out, behind the recovered blocks before it.
    """

    name: str
    loss_before: float  # with the pruned weights
    loss_after: float  # with the recovered ones, rounded to the model's dtype; never more than before
    steps: int
    seconds: float
    notes: tuple[str, ...] = ()

    def line(self) -> str:
        """For people."""
        notes = "".join(f"; {note}" for note in self.notes)
        change = f"loss {self.loss_before:.4f} → {self.loss_after:.4f}"
        return f"recovered {self.name}: {change} in {self.steps} steps, {self.seconds:.1f} s{notes}"

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "BlockReport":
        """From what JSON makes of `dataclasses.asdict`."""
        return cls(**{**values, "notes": tuple(values.get("notes", ()))})


class _Measured(TypedDict):
    dense: float | None
    pruned: float


class _Evaluation(_Measured, total=False):
    """An entry of `PruneReport.evaluations`; the first releases wrote no metric."""

    metric: str
    settings: dict[str, Any]


class _Compaction(TypedDict):
    """`PruneReport.compaction`, as far as a table shows it."""

    parameters: tuple[int, int]
    config: dict[str, tuple[Any, Any]]
    zeros: dict[str, str]


@dataclasses.dataclass(repr=False)
class PruneReport:
    """The whole run, in the model's order of layers."""

    config: dict[str, Any]
    layers: list[LayerReport]
    skipped: dict[str, str]  # left dense, with the reason
    calibration: dict[str, Any] | None  # source, num_samples, sequence_length, digest, notes
    seconds: dict[str, float]  # calibration, solver, recovery (where there was one), total
    peak_memory: int  # bytes
    versions: dict[str, str]
    notes: list[str] = dataclasses.field(default_factory=list)
    evaluations: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    recovery: list[BlockReport] = dataclasses.field(default_factory=list)  # empty without one
    compaction: dict[str, Any] | None = None  # what a `Compaction` says, once the model was made smaller
    rotation: RotationReport | None = None  # None without one
    parameters: int | None = None  # of the whole model as it was pruned, shared ones once; None in older reports

    @property
    def sparsity(self) -> float:
        """Zeros among all weights of the pruned layers."""
        return mean_over_weights(self.layers, "sparsity")

    @property
    def chosen(self) -> float | None:
        """The share of the model's parameters that the pruned layers are; None where the report is older."""
        return None if self.parameters is None else sum(_size(layer) for layer in self.layers) / self.parameters

    @property
    def model_sparsity(self) -> float | None:
        """Zeros of the pruned layers among all parameters of the model; None where the report is older."""
        if self.parameters is None:
            return None
        return sum(layer.sparsity * _size(layer) for layer in self.layers) / self.parameters

    @property
    def mostly_dense(self) -> str:
        """That less than half of the model was chosen, as a sentence; empty where it is not so, or not known."""
        if self.chosen is None or self.chosen >= 0.5:
            return ""
        return f"most of the model stayed dense: {100 * self.chosen:.3g}% of its weights were chosen"

    def record_evaluation(
        self,
        name: str,
        dense: float | None,
        pruned: float,
        metric: str = "perplexity",
        settings: dict[str, Any] | None = None,
    ) -> None:
        """Note a measurement of the model before and after.

        Args:
            name: of the data it was measured on.
            dense: before; None keeps the one that was noted earlier, if it was measured with the same settings.
            pruned: after.
            metric: "perplexity", or "accuracy", 0 to 1.
            settings: what must be equal for two values to compare, as JSON types.
        """
        before = self.evaluations.get(name)
        how = {"metric": metric, "settings": settings or {}}
        if dense is None and before and {key: before.get(key, {}) for key in how} == how:
            dense = before["dense"]
        self.evaluations[name] = {**how, "dense": dense, "pruned": pruned}

    def record(self, pruned: Measured, dense: Measured | None = None) -> None:
        """Note what `perplexity`, `accuracy` or `zero_shot` returned.

        Args:
            pruned: for the pruned model.
            dense: for the dense one; None keeps what was noted earlier, as in `record_evaluation`.

        Raises:
            MoonshotError: the two were measured in different ways.
        """
        before = {} if dense is None else dense.measurements()
        for name, (metric, value, settings) in pruned.measurements().items():
            if name in before:
                other, _, theirs = before[name]
                same = (other, theirs) == (metric, settings)
                require(same, f"{name}: dense {other} with {theirs}, pruned {metric} with {settings}")
            self.record_evaluation(name, before[name].value if name in before else None, value, metric, settings)

    @property
    def loss(self) -> float | None:
        """L_λ, relative, of the pruned layers: a mean over their weights; None without calibration data."""
        layers = [layer for layer in self.layers if layer.loss is not None]
        return mean_over_weights(layers, "loss") if layers else None

    def __repr__(self) -> str:
        """One line: how many layers, and what was done to them."""
        known = [f"{len(self.layers)} layers"]
        whole = "" if self.chosen is None else f" ({self.model_sparsity:.4f} of the whole model)"
        known += [f"sparsity {self.sparsity:.4f}{whole}"] if self.layers else []
        known += [] if self.loss is None else [f"loss {self.loss:.4g}"]
        known += [f"{self.seconds['total']:.1f} s"] if "total" in self.seconds else []
        return f"{type(self).__name__}({', '.join(known)})"

    def table(self, width: int = 120) -> str:
        """For people: a row per layer, then what was skipped and the totals.

        Args:
            width: characters of a line of the table; a column for the sparsities asked for, where they differ, adds
                eight.
        """
        headers, rows = self._cells()
        wide = width + (8 if "asked" in headers else 0)
        return "\n".join([text_table(headers, rows, wide, left=_LEFT), *self._summary()])

    def _repr_html_(self) -> str:
        """The same for a notebook, which shows the first and the last layers of many."""
        return html_table(*self._cells(), self._summary(), left=_LEFT)

    def _cells(self) -> tuple[list[str], list[list[str]]]:
        """Headers, and a row per layer."""
        allocated = len({layer.asked for layer in self.layers}) > 1
        share = ("asked", "sparsity") if allocated else ("sparsity",)
        headers = ["layer", "shape", "λ", *share, "L_R mask", "L_R", "L_F mask", "L_F", "damping", "s", "notes"]
        rows = [
            [
                layer.name,
                f"{layer.shape[0]}×{layer.shape[1]}",
                "" if layer.lam is None else f"{layer.lam:g}",
                *([_short(layer.asked)] if allocated else []),
                f"{layer.sparsity:.4f}",
                _short(layer.reconstruction_masked),
                _short(layer.reconstruction),
                _short(layer.fisher_masked),
                _short(layer.fisher),
                f"{layer.damping:g}" if layer.damping else "",
                f"{layer.seconds:.2f}",
                "; ".join(
                    [*([layer.experts.line()] if layer.experts else []), *layer.notes, *filter(None, [layer.shares])]
                ),
            ]
            for layer in self.layers
        ]
        return headers, rows

    @property
    def compacted(self) -> str:
        """How the model became smaller; empty where it did not."""
        if not self.compaction:
            return ""
        before, after = self.compaction["parameters"]
        changes = [f"{name} {was} → {now}" for name, (was, now) in self.compaction["config"].items()]
        return "; ".join([f"{before:,} → {after:,} parameters", *changes])

    @property
    def headline(self) -> str:
        """The sparsity of the pruned layers, and of the whole model."""
        whole = "" if self.chosen is None else f", {self.model_sparsity:.4f} of the whole model"
        return f"{self.sparsity:.4f} over {len(self.layers)} layers{whole}"

    def _summary(self) -> list[str]:
        lines = [f"left dense: {name} ({reason})" for name, reason in self.skipped.items()]
        lines += [f"note: {note}" for note in self.notes]
        lines += [self.rotation.line()] if self.rotation else []
        lines += [block.line() for block in self.recovery]
        seconds = ", ".join(f"{name} {value:.1f} s" for name, value in self.seconds.items())
        lines += [self.mostly_dense] if self.mostly_dense else []
        lines.append(f"sparsity {self.headline}; {seconds}; peak memory {self.peak_memory / 2**30:.2f} GiB")
        if self.compaction:
            lines.append(f"compacted: {self.compacted}")
            lines += [f"not compacted: {name}: {reason}" for name, reason in self.compaction["zeros"].items()]
        for name, values in self.evaluations.items():
            shown = ".2%" if values.get("metric") == "accuracy" else ".3f"
            dense = "" if values["dense"] is None else f"dense {values['dense']:{shown}}, "
            lines.append(f"{name}: {dense}pruned {values['pruned']:{shown}}")
        return lines

    def to_dict(self) -> dict[str, Any]:
        """As JSON types; `from_dict` is its inverse."""
        return {**dataclasses.asdict(self), **{name: getattr(self, name) for name in _DERIVED}}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "PruneReport":
        """From what `to_dict` gave.

        Raises:
            MoonshotError: a field that is missing, unknown, or of another type.
        """
        values = {name: value for name, value in values.items() if name not in _DERIVED}
        check_fields(cls, values)
        check_value(dict[str, _Evaluation], values.get("evaluations", {}), "evaluations")
        if values.get("compaction") is not None:
            check_fields(_Compaction, values["compaction"], "compaction")
        require(len(values["layers"]) > 0, "layers: there are none")
        layers = [LayerReport.from_dict(layer) for layer in values.pop("layers")]
        recovery = [BlockReport.from_dict(block) for block in values.pop("recovery", ())]
        turned = values.pop("rotation", None)
        rotation = None if turned is None else RotationReport.from_dict(turned)
        return cls(layers=layers, recovery=recovery, rotation=rotation, **values)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write JSON to a file, or to moonshot_report.json in a folder."""
        path = Path(path)
        path = path / REPORT_NAME if path.is_dir() else path
        replace_file(path, json.dumps(self.to_dict(), indent=2, ensure_ascii=False) + "\n")
        return path

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "PruneReport":
        """Read what `save` wrote, from the file or its folder.

        Raises:
            MoonshotError: there is no such file, or it is damaged.
        """
        check_path("path", path)
        path = Path(path)
        path = path / REPORT_NAME if path.is_dir() else path
        try:
            return cls.from_dict(read_json(path))
        except MoonshotError as error:
            raise MoonshotError(f"{path} is damaged: it is no report of a run ({error})") from None


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def mean_over_weights(layers: Sequence[LayerReport], field: str) -> float:
    """The mean of a field, each layer with as many votes as it has weights.

    Args:
        layers: at least one.
        field: of `LayerReport`, a number in each of them.
    """
    return sum(getattr(layer, field) * _size(layer) for layer in layers) / sum(map(_size, layers))


def _size(layer: LayerReport) -> int:
    """How many weights it has."""
    return layer.shape[0] * layer.shape[1]


def loss_fields(lam: float, masked: RelativeLoss, pruned: RelativeLoss) -> dict[str, float | None]:
    """The fields of a `LayerReport` that say what pruning costs.

    Args:
        lam: λ used, in [0, 1].
        masked: losses of the mask on the dense weights.
        pruned: losses of the weights that the solver gave.
    """
    return {
        "lam": lam,
        "reconstruction": pruned.reconstruction,
        "reconstruction_masked": masked.reconstruction,
        "fisher": pruned.fisher,
        "fisher_masked": masked.fisher,
        "loss": pruned.total,
        "loss_masked": masked.total,
    }
