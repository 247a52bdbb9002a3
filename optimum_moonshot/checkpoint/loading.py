"""Models from checkpoints.

A dense model is loaded with tokenizer and image processor, offloaded, or on the meta device; a pruned one after
integrity checks, dense or packed in memory.
"""

import inspect
import logging
import os
import tempfile
import warnings
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from ..config import MoonshotConfig
from ..devices import default_device
from ..errors import MoonshotError, check_choice, check_path, error_context, reason, require
from ..files import temporary_folder, writing
from ..model.layers import find_blocks
from ..model.model_info import load_processor, load_tokenizer
from ..model.offload import detach_from_files, guard_source
from ..reports.prune_report import REPORT_NAME, PruneReport
from ..reports.record import NOT_PRUNED, PruningRecord
from .folder import (
    CHECKPOINT_OPTIONS,
    FILE_OPTIONS,
    HUB_OPTIONS,
    Checkpoint,
    check_complete,
    find_checkpoint,
    refuse_adapter,
    repository,
)
from .in_memory import to_runtime
from .origin import Source, remember_source
from .weight_files import EXPORT, METHOD, MoonshotPrunedCheckpoint, check_runtime, loaded_into

PLACES = ("disk", "cpu")  # of offloaded blocks: the checkpoint's files, or host memory
# Options of `load_pruned` that would load unverified files, or return something other than a model.
_REFUSED = (
    "adapter_kwargs", "config", "gguf_file", "output_loading_info", "state_dict", "subfolder", "use_safetensors",
    "variant",
)  # fmt: skip


def model_class(config: Any) -> type[Any]:
    """The transformers class that a configuration names; `AutoModelForCausalLM` if it names none."""
    from transformers import PreTrainedModel  # imported late: transformers' quantizers import this package

    names = getattr(config, "architectures", None)
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
    cls = getattr(transformers, name, None)
    return cls if isinstance(cls, type) and issubclass(cls, PreTrainedModel) else AutoModelForCausalLM


@contextmanager
def _explained(message: str, others: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Convert errors to `MoonshotError`, except `others`: a damaged file can cause any error in a class."""
    try:
        yield
    except Exception as error:
        if isinstance(error, (MoonshotError, *others)):
            raise
        raise MoonshotError(f"{message} ({reason(error)})") from error


def _empty_model(config: Any, **options: Any) -> Any:
    """The model of a configuration, on the meta device."""
    cls = model_class(config)
    with torch.device("meta"):
        return cls.from_config(config, **options) if cls is AutoModelForCausalLM else cls(config)


def load_config(name_or_path: str | os.PathLike[str], **options: Any) -> Any:
    """`AutoConfig.from_pretrained`, with a `MoonshotError` for a PEFT adapter in place of a model."""
    try:
        return AutoConfig.from_pretrained(name_or_path, **options)
    except (OSError, ValueError):
        shared = {name: options[name] for name in HUB_OPTIONS if name in options}
        refuse_adapter(name_or_path, name_or_path, **shared)
        raise


def read_model_config(folder: Path, **options: Any) -> Any:
    """Read the configuration of a checkpoint, with options for `AutoConfig`; `MoonshotError` if transformers cannot."""
    with _explained(f"{folder}: its model is unknown to transformers"):
        return load_config(folder, **options)


def checkpoint_meta_model(folder: Path, **options: Any) -> nn.Module:
    """The model of a checkpoint on the meta device; `options`, such as `trust_remote_code`, are for its classes."""
    config = read_model_config(folder, **options)
    with _explained(f"{folder}: transformers cannot create its model"):
        return _empty_model(config, **options)


def load_meta(name_or_config: Any, offload: str | None, dtype: Any = None, **options: Any) -> nn.Module:
    """The model of a configuration, or of the config.json of a folder or Hub repository, on the meta device.

    The dtype None or "auto" is the configuration's dtype, or float32. `offload` is only checked. `OSError` if there is
    no such model.
    """
    if offload is not None:
        check_choice("offload", offload, PLACES)
    config = name_or_config
    if not isinstance(config, PretrainedConfig):
        check_path("name_or_config", name_or_config)
        with _explained(f"{name_or_config}: its configuration cannot be read", (OSError,)):
            name, options = find_checkpoint(name_or_config, {"dtype": dtype, **options})
            dtype = options.pop("dtype")
            config = load_config(name, **options)
    kind = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    kind = kind or getattr(config, "dtype", None) or torch.float32
    with _explained(f"{name_or_config}: transformers cannot create its model"):
        model = _empty_model(config)
    return model.to(kind).eval()


def offload_map(config: Any, place: str, device: Any) -> dict[str, Any]:
    """The `device_map` of `from_pretrained` for blocks that are offloaded to a place, "disk" or "cpu".

    `device`, by default the first GPU or the CPU, is for onloaded blocks and all other weights.
    """
    check_choice("offload", place, PLACES)
    device = str(default_device()) if device is None else device
    single = isinstance(device, str | int | torch.device)
    require(single, "with `offload`, name one device", field="device_map", value=device)
    message = "the model is on the CPU anyway"
    require(place == "disk" or str(device) != "cpu", message, field="offload", value=place, hint='use "disk"')
    return _device_map(_empty_model(config), place, device)


@contextmanager
def offload_folder(folder: str | None) -> Iterator[Path]:
    """A temporary folder in `folder`, created if missing, for weights such as fused experts that are not in the files.

    None is the system's folder of temporary files.
    """
    directory = Path(folder or tempfile.gettempdir())
    with ExitStack() as stack:
        with writing("offload_dir", directory):
            directory.mkdir(parents=True, exist_ok=True)
            path = stack.enter_context(temporary_folder("moonshot-offload-", directory))
        yield path


def _device_map(model: nn.Module, place: str, device: Any) -> dict[str, Any]:
    """Name → location: blocks in `place`, the largest modules without blocks on the device."""
    blocks = {name for name, _ in find_blocks(model)}
    message = f"{type(model).__name__} has no repeated blocks to offload"
    require(bool(blocks), message, field="offload", value=place)
    device_map: dict[str, Any] = {}

    def place_in(module: nn.Module, prefix: str) -> None:
        for tensors in (module._parameters, module._buffers):
            device_map.update({prefix + key: device for key, tensor in tensors.items() if tensor is not None})
        for key, child in module.named_children():
            name = prefix + key
            if name in blocks:
                device_map[name] = place
            elif any(block.startswith(f"{name}.") for block in blocks):
                place_in(child, f"{name}.")
            else:
                device_map[name] = device

    place_in(model, "")
    return device_map


def load_dense(
    name_or_path: str | os.PathLike[str], options: dict[str, Any], offload: str | None, offload_dir: str | None
) -> tuple[Any, Any, Any]:
    """A model of the class that its configuration names, its tokenizer, and its image processor, each None without one.

    Raises:
        MoonshotError: weights of the model are missing in the checkpoint, or it is damaged or quantized.
        OSError: there is no such model.
    """
    check_path("name_or_path", name_or_path)
    message = "from_pretrained returns a pruner"
    require("output_loading_info" not in options, message, field="output_loading_info")
    given = options.get("config")
    valid = given is None or isinstance(given, PretrainedConfig | str | os.PathLike)
    require(valid, "give a configuration of transformers, or its folder", field="config", value=given)
    original_options, (name, options) = options, find_checkpoint(name_or_path, options)
    shared = {key: options[key] for key in CHECKPOINT_OPTIONS if key in options}
    message, hint = "not for a GGUF file", "save its model with transformers, and give that folder"
    require(offload != "disk" or "gguf_file" not in shared, message, field="offload", value=offload, hint=hint)
    model, info = _load(name, shared, options, offload, offload_dir)
    check_complete(info["missing_keys"], (), info["mismatched_keys"])
    if "gguf_file" in shared:
        model.name_or_path = model.config.name_or_path = repository(name_or_path)
    source, options = repository(name_or_path) if "gguf_file" in shared else name, {**original_options, **options}
    remember_source(model, Source(source, {key: options[key] for key in FILE_OPTIONS if key in options}))
    if given is not None:
        shared["config"] = model.config
    return model, load_tokenizer(name, **shared), load_processor(model, name, **shared)


def _load(
    name_or_path: str | os.PathLike[str],
    shared: dict[str, Any],
    options: dict[str, Any],
    offload: str | None,
    folder: str | None,
) -> tuple[Any, Any]:
    """A model and the loading info of transformers; `shared` are the options of the configuration."""
    quantized = None
    try:
        config = options.get("config")
        if not isinstance(config, PretrainedConfig):
            config = load_config(name_or_path if config is None else config, **shared)
        quantized = getattr(config, "quantization_config", None)
        options = {**_dequantizing(config, shared), **options}
        with ExitStack() as stack:
            if offload is not None:
                place = {"device_map": offload_map(config, offload, options.get("device_map"))}
                options = {**options, **place, "offload_folder": str(stack.enter_context(offload_folder(folder)))}
            with _without_offload_warning(), warnings.catch_warnings():
                warnings.filterwarnings("ignore", "You passed `quantization_config`")
                loaded = model_class(config).from_pretrained(name_or_path, output_loading_info=True, **options)
            detach_from_files(loaded[0])
            weakref.finalize(loaded[0], stack.pop_all().close)
        return loaded
    except MoonshotError:
        raise
    except Exception as error:  # a damaged file or a missing library can fail anywhere in transformers
        Checkpoint(Path(name_or_path, shared.get("subfolder", "")), packed=False).check_index()
        if isinstance(error, OSError):
            raise
        message = " ".join(str(error).split())[:300] or type(error).__name__
        if quantized is None:
            raise MoonshotError(f"{name_or_path}: cannot be loaded ({message})") from error
        method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized
        raise MoonshotError(
            f"{name_or_path}: its weights are quantized ({method}) and cannot be loaded ({message}); "
            "prune the model that they were made from"
        ) from error


def _dequantizing(config: Any, shared: dict[str, Any]) -> dict[str, Any]:
    """The options by which `from_pretrained` dequantizes the weights of a checkpoint, where transformers can.

    Without them, it depends on the machine whether FP8, MXFP4 and GGUF weights remain quantized.
    """
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING  # late: quantizers import this package

    entry: Any = {"quant_method": "gguf"} if "gguf_file" in shared else None
    for part in (config, config.get_text_config()):
        entry = entry or getattr(part, "quantization_config", None)
    method = entry.get("quant_method") if isinstance(entry, dict) else METHOD
    cls: Any = AUTO_QUANTIZATION_CONFIG_MAPPING.get(str(method))
    if cls is None or method == METHOD or "dequantize" not in inspect.signature(cls).parameters:
        return {}
    return {"quantization_config": cls.from_dict({**entry, "dequantize": True})}


@contextmanager
def _without_offload_warning() -> Iterator[None]:
    """Drop accelerate's warning that parameters are on the meta device, as offloading requires."""
    logger = logging.getLogger("accelerate.big_modeling")

    def keep(record: logging.LogRecord) -> bool:
        return "on the meta device because they were offloaded" not in record.getMessage()

    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)


def load_pruned(
    name_or_path: str | os.PathLike[str],
    runtime: str = "dense",
    *,
    inputs: str = "int8",
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
    check_runtime(runtime, inputs)
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
    model, info = _load_pruned(model_class(config), folder, config=config, **model_kwargs)
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


def _load_pruned(cls: type[Any], folder: Path, **options: Any) -> tuple[nn.Module, dict[str, Any]]:
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
