"""The model cards of pruned and rotated models: YAML and text about the run, above the card of the dense model."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from torch import nn
from transformers.models.auto import modeling_auto as auto

from ..errors import check_number, check_whole, require
from ..files import read_json, replace_file
from ..model.layers import by_visit
from ..options import RECOVERY_DEFAULTS
from ..reports.plots import PLOT_NAME, by_kind, save_plot
from ..reports.prune_report import LayerReport, PruneReport, data_name, mean_over_weights
from ..reports.record import PruningRecord
from ..rotate.report import ROTATION_NAME, RotationReport
from ..shrink.report import SHRINK_NAME, ShrinkReport
from .base_card import (
    MARKER,
    Base,
    code,
    escaped,
    find_base,
    find_source,
    parted,
    printable,
    read_entry,
    split,
    unescaped,
)
from .card_code import literal, programs, pruning_code
from .packed_files import packed_weights

_EVALUATION = re.compile(r"^## Evaluation\n.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)
_AFTER_EVALUATION = "## Size and cost"
_SOLVERS = {
    "sparsegpt": "SparseGPT", "wanda": "Wanda", "obc": "OBC", "cap": "CAP", "osscar": "OSSCAR",
    "alps": "ALPS", "magnitude": "magnitude pruning", "reap": "REAP", "frequency": "the routing frequency",
}  # fmt: skip
_CORPORA = {"c4": "allenai/c4", "wikitext2": "Salesforce/wikitext", "ptb": "ptb-text-only/ptb_text_only"}
_TASKS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "AutoModelForCausalLM": ("text-generation", auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    "AutoModelForMaskedLM": ("fill-mask", auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
    "AutoModelForImageClassification": ("image-classification", auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES),
    "AutoModelForImageTextToText": ("image-text-to-text", auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES),
    "AutoModelForSequenceClassification": (
        "text-classification", auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    ),
}  # fmt: skip


def bytes_on_disk(model: nn.Module) -> tuple[int, int]:
    """Bytes of a pruned model's weights on disk, dense and packed."""
    state = model.state_dict()
    dense = sum({tensor.data_ptr() or name: tensor.nbytes for name, tensor in state.items()}.values())
    # Tied weights count once.
    unique = {model.get_parameter(name): (name, layer) for name, layer in packed_weights(model).items()}
    layers = dict(unique.values())
    saved = 0
    for visit, names in by_visit(model, layers):
        with visit():
            for name in names:
                tensor = model.get_parameter(name)
                saved += tensor.nbytes - layers[name].stored_bytes(tensor)
    return dense, dense - saved


def _auto_class(architecture: str) -> tuple[str, str | None]:
    """The transformers class that loads a model, and its task on the Hub; None for an unknown task."""
    for cls, (task, mapping) in _TASKS.items():
        if any(architecture in ([name] if isinstance(name, str) else name) for name in mapping.values()):
            return cls, task
    return (architecture if hasattr(transformers, architecture) else "AutoModelForCausalLM"), None


@dataclass(frozen=True)
class Facts:
    """The content of a card that is not in the report."""

    name: str  # of the repository, or of the folder
    format: str  # of the checkpoint
    base: Base
    lam: float | None
    dense_bytes: int
    packed_bytes: int
    architecture: str  # the model's class
    source: str | None = None  # of the dense model: its name on the Hub, or that of its folder; None in memory

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", printable(self.name))
        check_number("lambda", self.lam, optional=True)
        check_whole("packed", self.packed_bytes, least=0)
        check_whole("dense", self.dense_bytes, least=1)
        require(isinstance(self.architecture, str), "must name a class", field="architectures", value=self.architecture)
        named = self.source is None or isinstance(self.source, str)
        require(named, "must be a name", field="source", value=self.source)

    @classmethod
    def gather(cls, model: nn.Module, name: str, format: str) -> "Facts":
        """The facts of a pruned transformers model; `MoonshotError` if it is not pruned, or its record is damaged."""
        origin, lam = getattr(model, "name_or_path", ""), PruningRecord.require_of(model).lam
        sizes, architecture = bytes_on_disk(model), type(model).__name__
        return cls(name, format, find_base(origin), lam, *sizes, architecture, find_source(origin))

    @classmethod
    def read(cls, folder: Path, name: str | None, format: str) -> "Facts | None":
        """The facts in the card of a pruned model, for a new format, and maybe a new name; None for a foreign card."""
        try:
            card = ModelCard.load(folder / "README.md", ignore_metadata_errors=True)
            entry = read_entry(card)
            dense, packed = entry["weight_bytes"]["dense"], entry["weight_bytes"]["packed"]
            (architecture,) = read_json(folder / "config.json")["architectures"]
            heading = re.search(r"^# (.+)$", card.text, re.MULTILINE)
            name = name or (unescaped(heading[1].strip()) if heading else folder.resolve().name)
            source = entry.get("source")
            return cls(name, format, split(None, card), entry["lambda"], dense, packed, architecture, source)
        except Exception:  # any other content: not a card of this package
            return None


def write_card(folder: Path, report: PruneReport, facts: Facts) -> None:
    """Write README.md and its picture into a folder."""
    save_plot(report, folder)
    replace_file(folder / "README.md", str(render(report, facts)))


def update_evaluations(folder: Path, report: PruneReport, facts: Facts) -> None:
    """Replace the measurements in a folder's card; other text, which users may have edited, remains."""
    card, fresh = ModelCard.load(folder / "README.md", ignore_metadata_errors=True), render(report, facts)
    vars(card.data).update(eval_results=_results(report, facts) or None, model_name=facts.name)
    section = "".join(_EVALUATION.findall(fresh.text))
    ours, below = parted(card.text)
    if not _EVALUATION.search(ours):
        position = ours.find(_AFTER_EVALUATION)
        position = len(ours) if position < 0 else position
        ours = f"{ours[:position].rstrip()}\n\n## Evaluation\n\n{ours[position:]}"
    card.text = _EVALUATION.sub(lambda _: section, ours, count=1) + below
    replace_file(folder / "README.md", str(card))


def _from_template(template: str, data: ModelCardData, base: Base, **values: Any) -> ModelCard:
    """A card from a template in this folder, with the YAML `data`, and the card of the dense model below."""
    return ModelCard.from_template(
        data,
        template_str=Path(__file__).with_name(template).read_text(encoding="utf-8"),
        title=escaped(data.model_name),
        literal=literal(data.model_name),
        base=base.name,
        base_text=base.text,
        marker=MARKER,
        code=code,
        escaped=escaped,
        **values,
    )


def render_unpruned(model: nn.Module, report: RotationReport | ShrinkReport, name: str) -> ModelCard:
    """The card of a model that is rotated or has a smaller vocabulary, and is not pruned; `name` is the title."""
    base, (auto_class, task) = find_base(getattr(model, "name_or_path", "")), _auto_class(type(model).__name__)
    kind = "rotated" if isinstance(report, RotationReport) else "smaller-vocabulary"
    tags = ["moonshot", kind, *base.data.get("tags", ())]
    data = ModelCardData(
        model_name=name, base_model=base.name, library_name="transformers", tags=tags, **base.fields(task)
    )
    if isinstance(report, ShrinkReport):
        return _from_template(
            "vocabulary_card_template.md",
            data,
            base,
            auto_class=auto_class,
            vocabulary=report.vocabulary,
            report_name=SHRINK_NAME,
        )
    return _from_template(
        "rotated_card_template.md",
        data,
        base,
        untied=f" but an untied head of {report.untied_bytes / 2**20:.2f} MiB" if report.untied_bytes else "",
        auto_class=auto_class,
        report=report,
        report_name=ROTATION_NAME,
    )


def render(report: PruneReport, facts: Facts) -> ModelCard:
    """The card of a pruned model, with YAML and text."""
    solver = report.config["solver"]
    return _from_template(
        "card_template.md",
        _data(report, facts),
        facts.base,
        report=report,
        facts=facts,
        solver=_SOLVERS.get(solver) or escaped(solver),
        auto_class=_auto_class(facts.architecture)[0],
        programs=programs(report, facts.architecture, facts.name, facts.format),
        pruning_code=pruning_code(report, facts.source, facts.architecture, facts.name, facts.format),
        config=report.config,
        recovery_defaults=RECOVERY_DEFAULTS,
        plot=PLOT_NAME,
        kinds=[*_by_kind(report).items(), ("all", report.layers)],
        mixtures=[layer for layer in report.layers if layer.experts is not None],
        mean=mean_over_weights,
        data_name=data_name,
        recovered=_recovered,
        percent=_percent,
        short=lambda value: "" if value is None else f"{value:.4g}" if abs(value) < 1 else f"{value:.2f}",
    )


def _data(report: PruneReport, facts: Facts) -> ModelCardData:
    config, base = report.config, facts.base
    source = (report.calibration or {}).get("source")
    target = config["sparsity"]
    if all(layer.target_sparsity is not None for layer in report.layers):
        target = round(mean_over_weights(report.layers, "target_sparsity"), 6)
    return ModelCardData(
        model_name=facts.name,
        base_model=base.name,
        library_name="transformers",
        datasets=[_CORPORA[source]] if source in _CORPORA else None,
        tags=["moonshot", "pruning", "sparsity", config["solver"], config["pattern"], *base.data.get("tags", ())],
        eval_results=_results(report, facts) or None,
        moonshot={
            "format": facts.format,
            "source": facts.source,
            "solver": config["solver"],
            "pattern": config["pattern"],
            "lambda": facts.lam,
            "target_sparsity": target,
            "sparsity": round(report.sparsity, 6),
            "model_sparsity": round(report.model_sparsity, 6),
            **_bits(report),
            "sparsity_by_kind": {
                kind: round(mean_over_weights(layers, "sparsity"), 6) for kind, layers in _by_kind(report).items()
            },
            "calibration": report.calibration and {**report.calibration, "seed": config["seed"]},
            "seconds": {name: round(value, 1) for name, value in report.seconds.items()},
            "peak_memory_bytes": report.peak_memory,
            "weight_bytes": {"dense": facts.dense_bytes, "packed": facts.packed_bytes},
            "versions": dict(report.versions),
        },
        **base.fields(_auto_class(facts.architecture)[1]),
    )


def _results(report: PruneReport, facts: Facts) -> list[EvalResult]:
    """Every measurement, before and after pruning; JSON has no NaN or infinity, which are omitted."""
    return [
        EvalResult(
            task_type=_auto_class(facts.architecture)[1] or "other",
            dataset_type=data_name(name, values["metric"]),
            dataset_name=data_name(name, values["metric"]),
            metric_type=values["metric"],
            metric_name=f"{values['metric']}, {when}",
            metric_value=values[state],
        )
        for name, values in report.evaluations.items()
        for state, when in (("dense", "before pruning"), ("pruned", "after pruning"))
        if values[state] is not None and math.isfinite(values[state])
    ]


def _by_kind(report: PruneReport) -> dict[str, list[LayerReport]]:
    return {kind: [layer for _, layer in layers] for kind, layers in by_kind(report).items()}


def _bits(report: PruneReport) -> dict[str, Any]:
    """Bits of the survivors and bits per weight, if weights are quantized."""
    if not report.quantized:
        return {}
    sizes = {"bits_per_weight": report.bits_per_weight, "model_bits_per_weight": report.model_bits_per_weight}
    bits = sorted({layer.bits for layer in report.layers if layer.bits is not None})
    sizes["embedding_bits"] = report.embedding_bits
    return {"bits": bits, **{name: round(size, 4) for name, size in sizes.items() if size is not None}}


def _recovered(metric: str, dense: float | None, pruned: float) -> str:
    """Accuracy in % of the dense model's, or the dense perplexity in % of the pruned model's; empty if undefined."""
    if metric not in ("accuracy", "perplexity") or dense is None or not math.isfinite(dense + pruned):
        return ""
    over, under = (pruned, dense) if metric == "accuracy" else (dense, pruned)
    return _percent(over / under) if under else ""


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.1f}%"
