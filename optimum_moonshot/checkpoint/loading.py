"""Load a pruned checkpoint after integrity checks, dense or packed in memory."""

import os
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..config import MoonshotConfig
from ..errors import MoonshotError, check_choice, check_path, error_context, reason, require
from ..model.offload import guard_source
from ..packing import INPUTS
from ..reports.prune_report import REPORT_NAME, PruneReport
from ..reports.record import NOT_PRUNED, PruningRecord
from .folder import Checkpoint, check_complete
from .hub import HUB_OPTIONS
from .in_memory import to_runtime
from .pretrained import model_class, read_model_config
from .weight_files import EXPORT, RUNTIMES, MoonshotPrunedCheckpoint, loaded_into

# These would load unverified files, or return something other than a model.
_REFUSED = (
    "adapter_kwargs", "config", "gguf_file", "output_loading_info", "state_dict", "subfolder", "use_safetensors",
    "variant",
)  # fmt: skip


def load_pruned(
    name_or_path: str | os.PathLike[str],
    runtime: str = "dense",
    *,
    inputs: str = INPUTS[0],
    **model_kwargs: Any,
) -> nn.Module:
    """Load a pruned model as the class that its configuration names, after checking its files.

    Args:
        name_or_path: a local folder or a Hub repository.
        runtime: "dense" unpacks the weights, which can be trained. "auto" is for inference: the layers whose packed
            product is faster on this device while decoding remain packed; a log message lists them with the reason.
            "packed" keeps all possible layers packed. A dense checkpoint is packed after loading.
        inputs: of products with packed weights of integer codes. "int8" rounds them to 8 bits per row and group of
            weights, where this processor multiplies integers; "float" never rounds them.
        model_kwargs: for the model's `from_pretrained`, such as `dtype`, `device_map`, `revision`, `token`.

    Returns:
        The model in evaluation mode; except for "dense", `model.moonshot_runtime` has the runtime of each layer.

    Raises:
        MoonshotError: a missing, truncated or damaged file, with the name of the layer; counts or shapes that do not
            match; a checkpoint that is not pruned.
    """
    check_path("name_or_path", name_or_path)
    check_choice("runtime", runtime, RUNTIMES)
    check_choice("inputs", inputs, INPUTS)
    _check_options(name_or_path, model_kwargs)
    hub = {name: model_kwargs.pop(name) for name in HUB_OPTIONS if name in model_kwargs}
    checkpoint = Checkpoint.find(name_or_path, **hub)
    folder = checkpoint.folder
    supported = checkpoint.format != EXPORT or runtime == "dense"
    hint = 'use runtime="dense", or give the dense or the packed checkpoint'
    require(supported, f"not for a {EXPORT} checkpoint", field="runtime", value=runtime, hint=hint)
    checkpoint.check_files()
    checkpoint.check_no_other_weights()
    shared = {name: model_kwargs[name] for name in ("trust_remote_code",) if name in model_kwargs}
    config = read_model_config(folder, **shared)
    require(PruningRecord.read(config) is not None, f"{name_or_path}: {NOT_PRUNED}")
    given = model_kwargs.get("quantization_config")
    if isinstance(given, MoonshotPrunedCheckpoint) or (given is None and checkpoint.packed):
        choice = MoonshotPrunedCheckpoint(runtime, getattr(given, "dequantize", False), inputs)
        choice.verified = frozenset(map(os.path.abspath, checkpoint.files))
        model_kwargs["quantization_config"] = choice if checkpoint.packed else None
    model, info = _load(model_class(config), folder, config=config, **model_kwargs)
    check_complete(info["missing_keys"], info["unexpected_keys"], info["mismatched_keys"])
    guard_source(model)
    if not checkpoint.packed:
        _check_zeros(checkpoint, model)
        if runtime != "dense":
            to_runtime(model, runtime, inputs)
    return model


def _check_options(name_or_path: str | os.PathLike[str], model_kwargs: dict[str, Any]) -> None:
    for name in _REFUSED:
        message, hint = "load_pruned does not support it", "call the model's from_pretrained with it"
        require(name not in model_kwargs, message, field=name, hint=hint)
    again = isinstance(model_kwargs.get("quantization_config"), MoonshotConfig)
    message = f"{name_or_path} is pruned already"
    require(not again, message, field="quantization_config", hint="load it without one")


def _load(cls: type[Any], folder: Path, **options: Any) -> tuple[nn.Module, dict[str, Any]]:
    """Call `from_pretrained`, with `MoonshotError` for any error: a damaged config.json can cause all kinds."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "You passed `quantization_config`")
            return cls.from_pretrained(folder, output_loading_info=True, use_safetensors=True, **options)
    except (MoonshotError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        message = f"{folder}: transformers cannot load it: {type(error).__name__}: {reason(error)}"
        raise MoonshotError(message) from error


def _check_zeros(checkpoint: Checkpoint, model: nn.Module) -> None:
    """Raise `MoonshotError` for a layer of a dense checkpoint with fewer zeros than in its report.

    There is nothing to compare without a report, or after compaction.
    """
    path = checkpoint.folder / REPORT_NAME
    if not path.is_file():
        return
    report = PruneReport.load(checkpoint.folder)
    layers = () if report.compaction else report.layers
    try:
        zeros = {layer.name: round(layer.sparsity * layer.shape[0] * layer.shape[1]) for layer in layers}
    except (TypeError, ValueError, IndexError, OverflowError) as error:
        raise MoonshotError(f"{path} is damaged: {error}") from None
    zeros |= {f"{name}.weight": count for name, count in zeros.items()}  # a layer, or fused experts
    counted = Counter[str]()
    with checkpoint.open() as tensors:
        for stored, name in loaded_into(model, tensors).items() if zeros else ():
            if name in zeros:
                weight = tensors[stored]
                counted[name] += weight.numel() - int(torch.count_nonzero(weight))
    for name, count in counted.items():
        with error_context(name):
            require(count >= zeros[name], f"it has {count} zeros, its report says {zeros[name]}")
