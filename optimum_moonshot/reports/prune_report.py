"""The report of a run: a `PruneReport`, with one `LayerReport` per weight matrix, as a table and as JSON."""

import dataclasses
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypedDict

from ..errors import require
from ..objective.quadratic import RelativeLoss
from ..rotate.report import RotationReport
from ..shrink.report import ShrinkReport
from .json_files import Amount, Count, Fraction, JsonFields, Size, check_fields, check_value, load_json, save_json
from .tables import text_table

REPORT_NAME = "moonshot_report.json"
# In the JSON, for other programs.
_DERIVED = ("sparsity", "chosen", "model_sparsity", "bits_per_weight", "model_bits_per_weight")


class Measurement(NamedTuple):
    """One measurement of a model."""

    metric: str  # such as "perplexity", or "accuracy", 0 to 1
    value: float
    settings: dict[str, Any]  # must be equal for comparable values; as JSON types


def metric_key(dataset: str, metric: str) -> str:
    """The name of one of several measurements on a data set; `data_name` is the inverse."""
    return f"{dataset} ({metric})"


def data_name(key: str, metric: str) -> str:
    """The data set, or the task, of a measurement."""
    return key.removesuffix(f" ({metric})")


class Measured(Protocol):
    """Results of `perplexity`, `accuracy`, `agreement` and `zero_shot`."""

    def measurements(self) -> dict[str, Measurement]:
        """The measurements, by their data set or task."""


@dataclasses.dataclass(frozen=True)
class ExpertChoice:
    """The experts of a mixture that were removed.

    Raises:
        MoonshotError: `losses` is empty.
    """

    removed: tuple[int, ...]  # their indices before the removal
    losses: dict[str, float]  # L_λ of the choice of each expert solver, the run's solver first

    def __post_init__(self) -> None:
        require(len(self.losses) > 0, "must not be empty", field="experts.losses", value=self.losses)

    def line(self) -> str:
        """One line of text."""
        numbers = ", ".join(map(str, self.removed))
        first, *others = (f"{name} {loss:.4f}" for name, loss in self.losses.items())
        return f"without experts {numbers}; L_λ {first}" + (f" ({', '.join(others)})" if others else "")


@dataclasses.dataclass(frozen=True)
class LayerReport(JsonFields):
    """One pruned matrix, or a mixture with fewer experts. Losses are relative, L(W)/L(0): 0 is the dense layer, 1 an
    empty one.

    `masked` losses are of the mask on the dense weights, before the update of the survivors; other losses are of the
    solver's weights, before any recovery. Fisher losses are None for λ = 1, which needs no gradients; all losses are
    None without calibration data. Losses of one solver are comparable between layers and λ; Wanda's are computed from
    diagonals, like its scores.
    """

    name: str
    shape: tuple[Size, Size]  # d_out, d_in; of a mixture the number of experts before, and the weights of one
    lam: Fraction | None  # λ of the layer; None without calibration data
    sparsity: Fraction  # fraction of zeros in the model's dtype; of a mixture the fraction of removed experts
    reconstruction: float | None = None  # L_R(W)/L_R(0)
    reconstruction_masked: float | None = None
    fisher: float | None = None  # L_F(W)/L_F(0)
    fisher_masked: float | None = None
    loss: float | None = None  # L_λ(W)
    loss_masked: float | None = None
    damping: Amount = 0.0
    seconds: Amount = 0.0  # in the solver
    peak_memory: Count = 0  # bytes: on a GPU the peak for this layer, on a CPU the process's so far
    notes: tuple[str, ...] = ()
    target_sparsity: Fraction | None = None  # of the layer's pattern
    zeros_before: Count = 0  # zeros of the weight before the run, which all remain
    bits: Size | None = None  # of a surviving weight, if they are quantized
    packed_bytes: Count | None = None  # of the weight in a packed checkpoint
    experts: ExpertChoice | None = None  # of a mixture with fewer experts
    expert_targets: tuple[Fraction, Fraction] | None = None  # minimum and maximum, if each expert has its own

    def _notes(self) -> str:
        """The notes in the table, with the removed experts, or the sparsities of experts if they differ."""
        notes = [self.experts.line()] if self.experts else []
        notes += [note for note in self.notes if note]
        if self.expert_targets is not None and self.target_sparsity is not None:
            least, most = self.expert_targets
            mean = f"mean {self.target_sparsity:.4f}"
            notes.append(f"its experts' sparsities: least {least:.4f}, {mean}, most {most:.4f}")
        return "; ".join(notes)


MODEL = "model"  # the name of the whole model among recovered blocks


@dataclasses.dataclass(frozen=True)
class BlockReport(JsonFields):
    """One recovered block. Losses are |output - dense output|² / |dense output|², the mean over the tokens of held-out
    samples, with the preceding blocks recovered. For the distilled `MODEL` they are the divergence from the dense
    model's predictions, in nats per token, or half such a distance from its embeddings.
    """

    name: str
    loss_before: float  # with the pruned weights
    loss_after: float  # with the recovered ones in the model's dtype; never more than before
    steps: Count
    seconds: Amount
    notes: tuple[str, ...] = ()

    def line(self) -> str:
        """One line of text."""
        notes = "".join(f"; {note}" for note in self.notes)
        change = f"loss {self.loss_before:.4f} → {self.loss_after:.4f}"
        done = "distilled" if self.name == MODEL else f"recovered {self.name}"
        return f"{done}: {change} in {self.steps} steps, {self.seconds:.1f} s{notes}"


class _Evaluation(TypedDict):
    """An entry of `PruneReport.evaluations`."""

    dense: float | None
    pruned: float
    metric: str
    settings: dict[str, Any]


class _Settings(TypedDict):
    """The fields of `PruneReport.config` that cards, tables and `verify` read."""

    solver: str
    pattern: str
    sparsity: float | None
    group_size: Size
    allocation: Any
    fisher_layers: str
    damping: float | None
    seed: int
    rotation: Any
    solver_options: dict[str, Any]
    quant_group: int
    recover: Literal["blockwise", "gradual", "distill", "routers"] | None
    recover_steps: Count | None


class _Calibration(TypedDict):
    """The fields of `PruneReport.calibration` that cards show."""

    source: str
    num_samples: int
    sequence_length: int | None
    digest: str


class _Compaction(TypedDict):
    """The fields of `PruneReport.compaction` that a table shows."""

    parameters: tuple[int, int]
    config: dict[str, tuple[Any, Any]]
    zeros: dict[str, str]


@dataclasses.dataclass(repr=False)
class PruneReport:
    """The report of a run, with the layers in the model's order."""

    config: dict[str, Any]
    layers: list[LayerReport]
    skipped: dict[str, str]  # dense layer → reason
    calibration: dict[str, Any] | None  # source, num_samples, sequence_length, digest, notes
    seconds: dict[str, Amount]  # calibration, solver, recovery (where there was one), total
    peak_memory: Count  # bytes
    versions: dict[str, str]
    parameters: Size  # of the whole dense model, shared ones once
    notes: list[str] = dataclasses.field(default_factory=list)
    evaluations: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    recovery: list[BlockReport] = dataclasses.field(default_factory=list)
    compaction: dict[str, Any] | None = None  # `Compaction.to_dict`, if the model was compacted
    rotation: RotationReport | None = None
    shrink: ShrinkReport | None = None  # of a model that was made smaller to a target
    other_bytes: Count | None = None  # of the parameters outside of pruned layers, in a packed checkpoint
    embedding_bits: Size | None = None  # of the word embeddings and the head, if they were rounded

    @property
    def quantized(self) -> bool:
        """Whether the surviving weights of a layer are quantized."""
        return any(layer.bits is not None for layer in self.layers)

    @property
    def bits_per_weight(self) -> float | None:
        """Bits of the pruned layers in a packed checkpoint, for each of their weights; None if unknown."""
        sizes = [layer.packed_bytes for layer in self.layers if layer.packed_bytes is not None]
        weights = sum(math.prod(layer.shape) for layer in self.layers)
        return 8 * sum(sizes) / weights if len(sizes) == len(self.layers) else None

    @property
    def model_bits_per_weight(self) -> float | None:
        """Bits of all parameters in a packed checkpoint, for each of them; None if unknown."""
        if self.bits_per_weight is None or self.other_bytes is None:
            return None
        pruned = self.bits_per_weight * sum(math.prod(layer.shape) for layer in self.layers)
        return (pruned + 8 * self.other_bytes) / self.parameters

    @property
    def bits_line(self) -> str:
        """Bits per weight of the pruned layers and of the model, as text; empty unless weights are quantized."""
        if not self.quantized or self.bits_per_weight is None:
            return ""
        whole = self.model_bits_per_weight
        embeddings = "" if self.embedding_bits is None else f" with word embeddings in {self.embedding_bits} bits"
        model = "" if whole is None else f", {whole:.3f} of the whole model{embeddings}"
        return f"{self.bits_per_weight:.3f} bits per weight over {len(self.layers)} layers{model}"

    @property
    def sparsity(self) -> float:
        """Zeros among all weights of the pruned layers."""
        return mean_over_weights(self.layers, "sparsity")

    @property
    def chosen(self) -> float:
        """The fraction of the model's parameters that are in pruned layers."""
        return sum(math.prod(layer.shape) for layer in self.layers) / self.parameters

    @property
    def model_sparsity(self) -> float:
        """Zeros of the pruned layers among all parameters of the model."""
        return sum(layer.sparsity * math.prod(layer.shape) for layer in self.layers) / self.parameters

    @property
    def mostly_dense(self) -> str:
        """A sentence for models with less than half of the weights in pruned layers; empty for others."""
        if self.chosen >= 0.5:
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
        """Add a measurement of the model before and after pruning.

        Args:
            name: of the data set or task.
            dense: before; None keeps an earlier value with the same settings.
            pruned: after.
            metric: "perplexity", or "accuracy", 0 to 1.
            settings: must be equal for comparable values; as JSON types.
        """
        before = self.evaluations.get(name)
        how = {"metric": metric, "settings": settings or {}}
        if dense is None and before and {key: before[key] for key in how} == how:
            dense = before["dense"]
        self.evaluations[name] = {**how, "dense": dense, "pruned": pruned}

    def record(self, pruned: Measured, dense: Measured | None = None) -> None:
        """Add the result of `perplexity`, `accuracy` or `zero_shot`.

        Args:
            pruned: for the pruned model.
            dense: for the dense one; None keeps earlier values, as in `record_evaluation`.

        Raises:
            MoonshotError: the two were measured in different ways.
        """
        before = {} if dense is None else dense.measurements()
        for name, (metric, value, settings) in pruned.measurements().items():
            if name in before:
                other, _, dense_settings = before[name]
                same = (other, dense_settings) == (metric, settings)
                require(same, f"{name}: dense {other} with {dense_settings}, pruned {metric} with {settings}")
            self.record_evaluation(name, before[name].value if name in before else None, value, metric, settings)

    @property
    def loss(self) -> float | None:
        """The mean relative L_λ over the weights of the pruned layers; None without calibration data."""
        layers = [layer for layer in self.layers if layer.loss is not None]
        return mean_over_weights(layers, "loss") if layers else None

    def __repr__(self) -> str:
        """One line: layers, sparsity, loss and time."""
        parts = [f"{len(self.layers)} layers"]
        whole = f" ({self.model_sparsity:.4f} of the whole model)"
        parts += [f"sparsity {self.sparsity:.4f}{whole}"] if self.layers else []
        parts += [] if self.loss is None else [f"loss {self.loss:.4g}"]
        parts += [f"{self.seconds['total']:.1f} s"] if "total" in self.seconds else []
        return f"{type(self).__name__}({', '.join(parts)})"

    def table(self, width: int = 120) -> str:
        """A text table with a row per layer, then the skipped layers and the totals.

        Args:
            width: characters per line, plus eight if the target sparsities differ and have a column.
        """
        allocated = len({layer.target_sparsity for layer in self.layers}) > 1
        sparsities = ("target", "sparsity") if allocated else ("sparsity",)
        headers = ["layer", "shape", "λ", *sparsities, "L_R mask", "L_R", "L_F mask", "L_F", "damping", "s", "notes"]
        rows = [
            [
                layer.name,
                f"{layer.shape[0]}×{layer.shape[1]}",
                "" if layer.lam is None else f"{layer.lam:g}",
                *([_short(layer.target_sparsity)] if allocated else []),
                f"{layer.sparsity:.4f}",
                *map(_short, (layer.reconstruction_masked, layer.reconstruction, layer.fisher_masked, layer.fisher)),
                f"{layer.damping:g}" if layer.damping else "",
                f"{layer.seconds:.2f}",
                layer._notes(),
            ]
            for layer in self.layers
        ]
        table = text_table(headers, rows, width + (8 if allocated else 0), left=("notes",))
        return "\n".join([table, *self._summary()])

    @property
    def compacted(self) -> str:
        """The change of the model's size by compaction; empty without one."""
        if not self.compaction:
            return ""
        before, after = self.compaction["parameters"]
        changes = [f"{name} {old} → {new}" for name, (old, new) in self.compaction["config"].items()]
        return "; ".join([f"{before:,} → {after:,} parameters", *changes])

    @property
    def headline(self) -> str:
        """The sparsity of the pruned layers, and of the whole model."""
        return f"{self.sparsity:.4f} over {len(self.layers)} layers, {self.model_sparsity:.4f} of the whole model"

    def _summary(self) -> list[str]:
        lines = [f"left dense: {name} ({reason})" for name, reason in self.skipped.items()]
        lines += [f"note: {note}" for note in self.notes]
        lines += [self.rotation.line()] if self.rotation else []
        lines += [self.shrink.line()] if self.shrink else []
        lines += [block.line() for block in self.recovery]
        seconds = ", ".join(f"{name} {value:.1f} s" for name, value in self.seconds.items())
        lines += [self.mostly_dense] if self.mostly_dense else []
        lines.append(f"sparsity {self.headline}; {seconds}; peak memory {self.peak_memory / 2**30:.2f} GiB")
        lines += [self.bits_line] if self.bits_line else []
        if self.compaction:
            lines.append(f"compacted: {self.compacted}")
            lines += [f"not compacted: {name}: {reason}" for name, reason in self.compaction["zeros"].items()]
        for name, values in self.evaluations.items():
            digits = ".2%" if values["metric"] == "accuracy" else ".3f"
            dense = "" if values["dense"] is None else f"dense {values['dense']:{digits}}, "
            lines.append(f"{name}: {dense}pruned {values['pruned']:{digits}}")
        return lines

    def to_dict(self) -> dict[str, Any]:
        """Convert the report to JSON types; `from_dict` is the inverse."""
        return {**dataclasses.asdict(self), **{name: getattr(self, name) for name in _DERIVED}}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "PruneReport":
        """The inverse of `to_dict`.

        Raises:
            MoonshotError: a field that is missing, unknown, or of another type.
        """
        values = {name: value for name, value in values.items() if name not in _DERIVED}
        report: PruneReport = check_fields(cls, values)
        check_value(dict[str, _Evaluation], report.evaluations, "evaluations")
        check_value(_Calibration | None, report.calibration, "calibration")
        check_value(_Compaction | None, report.compaction, "compaction")
        check_fields(_Settings, report.config, "config")
        require(len(report.layers) > 0, "layers: must not be empty")
        return report

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write JSON to a file, or to moonshot_report.json in a folder."""
        return save_json(self.to_dict(), path, REPORT_NAME)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "PruneReport":
        """Read a saved report, from the file or its folder.

        Raises:
            MoonshotError: there is no such file, or it is damaged.
        """
        return load_json(cls.from_dict, "a run", path, REPORT_NAME)


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def mean_over_weights(layers: Sequence[LayerReport], field: str) -> float:
    """The mean of a numeric field over layers, at least one, weighted by their numbers of weights."""
    sizes = [math.prod(layer.shape) for layer in layers]
    return sum(getattr(layer, field) * size for layer, size in zip(layers, sizes, strict=True)) / sum(sizes)


def loss_fields(lam: float, masked: RelativeLoss, pruned: RelativeLoss) -> dict[str, Any]:
    """λ and the losses in a `LayerReport`, of the mask on the dense weights and of the solver's weights."""
    return {
        "lam": lam,
        "reconstruction": pruned.reconstruction,
        "reconstruction_masked": masked.reconstruction,
        "fisher": pruned.fisher,
        "fisher_masked": masked.fisher,
        "loss": pruned.total,
        "loss_masked": masked.total,
    }
