"""Models on the meta device, from their configuration, and the device map by which accelerate offloads their blocks."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from ..devices import default_device
from ..errors import MoonshotError, Text, check_choice, check_path, reason, require
from ..files import temporary_folder, writing
from ..model.layers import find_blocks
from .hub import HUB_OPTIONS, find_checkpoint, refuse_adapter

PLACES = ("disk", "cpu")  # of offloaded blocks: the checkpoint's files, or host memory


def model_class(config: Any) -> type[Any]:
    """The transformers class that a configuration names; `AutoModelForCausalLM` if it names none."""
    from transformers import PreTrainedModel  # imported late: transformers' quantizers import this package

    names = getattr(config, "architectures", None)
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
    cls = getattr(transformers, name, None)
    return cls if isinstance(cls, type) and issubclass(cls, PreTrainedModel) else AutoModelForCausalLM


@contextmanager
def _explained(message: str, others: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Convert errors to `MoonshotError`, except `others`: a damaged file can cause any in the class that it names."""
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


def meta_device_model(name_or_config: Any, dtype: Any = None, **options: Any) -> nn.Module:
    """The model of a configuration, or of the config.json of a folder or Hub repository, on the meta device.

    The dtype None or "auto" is that of the configuration, or float32. `OSError` if there is no such model.
    """
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

    `device`, by default the first GPU or the CPU, is that of onloaded blocks and all other weights.
    """
    check_choice("offload", place, PLACES)
    device = str(default_device()) if device is None else device
    single = isinstance(device, str | int | torch.device)
    require(single, Text("with {}, name one device", "offload"), field="device_map", value=device)
    message = "the model is on the CPU anyway"
    require(place == "disk" or str(device) != "cpu", message, field="offload", value=place, hint='use "disk"')
    return _device_map(_empty_model(config), place, device)


@contextmanager
def offload_folder(folder: str | None) -> Iterator[Path]:
    """A temporary folder in `folder`, created if missing, for the weights that differ from those in the files.

    Such as fused experts. None is the system's folder of temporary files.
    """
    directory = Path(folder or tempfile.gettempdir())
    with ExitStack() as stack:
        with writing("offload_dir", directory):
            directory.mkdir(parents=True, exist_ok=True)
            path = stack.enter_context(temporary_folder("moonshot-offload-", directory))
        yield path


def _device_map(model: nn.Module, place: str, device: Any) -> dict[str, Any]:
    """All blocks in the place, other weights on the device, by the largest modules without blocks."""
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
