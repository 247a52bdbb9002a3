"""The model cards of pruned and rotated models: YAML and text about the run, above the card of the dense model.

The text has the lines that prune the model again, and the programs that load it.
"""

import json
import math
import re
import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from torch import nn
from transformers.models.auto import modeling_auto as auto

from ..data.sources import CORPORA, FORMATS, is_hub_name
from ..data.text import SELF, SelfCalibration
from ..errors import MoonshotError, check_number, check_whole, require
from ..files import read_json, replace_file
from ..objective.patterns import Structured
from ..options import OF_THE_MACHINE, OPTIONS, RECOVERY_DEFAULTS
from ..reports.plots import PLOT_NAME, by_kind, save_plot
from ..reports.prune_report import LayerReport, PruneReport, data_name, mean_over_weights
from ..reports.record import PruningRecord
from ..rotate.report import ROTATION_NAME, RotationReport
from ..shrink.report import SHRINK_NAME, ShrinkReport
from ..solvers.base import options_of, solver_class
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
from .packed_files import bytes_on_disk
from .weight_files import EXPORT

_EVALUATION = re.compile(r"^## Evaluation\n.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)
_AFTER_EVALUATION = "## Size and cost"
_SOLVERS = {
    "sparsegpt": "SparseGPT", "wanda": "Wanda", "obc": "OBC", "cap": "CAP", "osscar": "OSSCAR",
    "alps": "ALPS", "magnitude": "magnitude pruning", "reap": "REAP", "frequency": "the routing frequency",
}  # fmt: skip
_TASKS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "AutoModelForCausalLM": ("text-generation", auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    "AutoModelForMaskedLM": ("fill-mask", auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
    "AutoModelForImageClassification": ("image-classification", auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES),
    "AutoModelForImageTextToText": ("image-text-to-text", auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES),
    "AutoModelForSequenceClassification": (
        "text-classification", auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    ),
}  # fmt: skip
# Architectures that the tests load there: tests/integrations/test_vllm.py, test_smaller_vllm.py, test_smaller_gguf.py.
_IN_LLAMA_CPP = ("LlamaForCausalLM", "MixtralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_IN_VLLM = (*_IN_LLAMA_CPP, "GPT2LMHeadModel", "GPTNeoXForCausalLM", "OPTForCausalLM", "Qwen2MoeForCausalLM")
# Of the parameters and bytes of `MoonshotPruner.shrink`, and its milliseconds.
_TARGETS = {"parameters": ("parameters", 1), "bytes": ("bytes", 1), "seconds": ("latency", 1000)}


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
        datasets=[CORPORA[source].path] if source in CORPORA else None,
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


def literal(value: Any) -> str:
    """JSON values as Python in one line, without unprintable characters; text is in double quotes."""
    if isinstance(value, str):
        quoted = json.dumps(value, ensure_ascii=False)
        return "".join(sign if sign.isprintable() else f"\\U{ord(sign):08x}" for sign in quoted)
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{literal(key)}: {literal(entry)}' for key, entry in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(literal, value))}]"
    return repr(value)


def _call(function: str, *positional: str, **options: Any) -> str:
    named = [f"{name}={literal(value)}" for name, value in options.items()]
    return f"{function}({', '.join([*positional, *named])})"


def _changed_options(report: PruneReport) -> dict[str, Any]:
    """The options of the run whose values differ from the defaults."""
    defaults: dict[str, Any] = {name: field.default for name, field in OPTIONS.items() if field.compare}
    defaults |= {"ignore": [], "solver_options": {}}
    with suppress(MoonshotError):  # a solver of another package
        declared = options_of(solver_class(report.config["solver"]))
        defaults |= {name: declared[name].default for name in ("damping",) if name in declared}
    if report.shrink is not None:  # it determines these; a λ that the user gave is not discernible from its default
        for name in ("lam", "allocation"):
            del defaults[name]
    return {
        name: report.config[name]
        for name, default in defaults.items()
        if name not in OF_THE_MACHINE and name in report.config and report.config[name] != default
    }


def _calibration(report: PruneReport) -> tuple[str | None, list[str]]:
    """The argument of `prune` for the calibration data, and the lines that define it."""
    if report.calibration is None:
        return None, []
    source = report.calibration["source"]
    if source == SelfCalibration().describe():
        return literal(SELF), []
    if source in CORPORA or is_hub_name(source) or source.endswith(FORMATS):
        return literal(source), []
    return "calibration", [f"calibration = ...  # {literal(source)}"]


def pruning_code(report: PruneReport, source: str | None, architecture: str, name: str, format: str) -> str | None:
    """Python that prunes the dense model again and saves it, as the report records it.

    Files have the names that the report has, without their folders. `...` stands for a model or data in memory.

    Args:
        report: of the run.
        source: name or folder of the dense model; None for a model in memory.
        architecture: the class of the model.
        name: of the folder of the pruned model.
        format: of its checkpoint.

    Returns:
        None if the report does not record all steps: of a pruned model that lost tokens, or an unknown target.
    """
    vocabulary = None if report.shrink is None else report.shrink.vocabulary
    if vocabulary is not None or (report.shrink is not None and report.shrink.unit not in _TARGETS):
        return None
    calibration, lines = _calibration(report)
    data = [] if calibration is None else [calibration]
    config = _call("config = MoonshotConfig", **_changed_options(report))
    if source is None:
        pruner = [f"model = ...  # {literal(architecture)}", "pruner = MoonshotPruner(model, config)"]
    else:
        pruner = [f"pruner = MoonshotPruner.from_pretrained({literal(source)}, config)"]
    lines = ["from optimum_moonshot import MoonshotConfig, MoonshotPruner", "", *lines, config, *pruner]
    if report.rotation is not None and report.config["rotation"] is None:
        lines.append(_call("pruner.rotate", *data))
    if report.shrink is None:
        lines.append(_call("pruner.prune", *data))
    else:
        option, scale = _TARGETS[report.shrink.unit]
        budget = report.shrink.budget * scale
        target: dict[str, Any] = {option: int(budget) if budget % 1 == 0 else budget}
        if report.shrink.batch_shape is not None:
            target["batch_shape"] = report.shrink.batch_shape
        lines.append(_call("pruner.shrink", *data, **target))
    if report.compaction and report.config["pattern"] == Structured.kind and report.shrink is None:
        lines.append("pruner.compact()")
    saved = {} if format == "dense" else {"format": format}
    return "\n".join([*lines, _call("pruner.save_pretrained", literal(name), **saved)])


def programs(report: PruneReport, architecture: str, name: str, format: str) -> list[tuple[str, str]]:
    """Programs other than transformers that load the model, each with its command."""
    argument = shlex.quote(name)
    changed = report.compaction["config"] if report.compaction else {}
    fewer_heads = "num_attention_heads" in changed
    commands = []
    if architecture in _IN_VLLM and not (architecture == "Qwen2ForCausalLM" and fewer_heads):
        needs = ', after `pip install "optimum-moonshot[vllm]"`' if format == "packed" else ""
        commands.append((f"vLLM{needs}", f"vllm serve {argument}"))
    if architecture in _IN_LLAMA_CPP and format != EXPORT:
        export = f"optimum-cli moonshot export {argument} model.gguf"
        zeros = "" if report.compaction else ", where zeros save no bytes"
        commands.append((f"llama.cpp{zeros}, by its `convert_hf_to_gguf.py`", export))
    return commands
