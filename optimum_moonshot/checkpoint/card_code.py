"""The code in a model card: the lines that prune the model again, and the programs that load it."""

import json
import shlex
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from ..data.sources import CORPORA, FORMATS, is_hub_name
from ..data.text import SELF, SelfCalibration
from ..errors import MoonshotError
from ..objective.patterns import Structured
from ..options import OF_THE_MACHINE, OPTIONS
from ..reports.prune_report import PruneReport
from ..solvers.base import options_of, solver_class
from .weight_files import EXPORT

# Architectures that the tests load there: tests/integrations/test_vllm.py, test_smaller_vllm.py, test_smaller_gguf.py.
_IN_LLAMA_CPP = ("LlamaForCausalLM", "MixtralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_IN_VLLM = (*_IN_LLAMA_CPP, "GPT2LMHeadModel", "GPTNeoXForCausalLM", "OPTForCausalLM", "Qwen2MoeForCausalLM")
# Of the parameters and bytes of `MoonshotPruner.shrink`, and its milliseconds.
_TARGETS = {"parameters": ("parameters", 1), "bytes": ("bytes", 1), "seconds": ("latency", 1000)}


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
        target: dict[str, Any] = {option: int(budget) if budget == int(budget) else budget}
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
