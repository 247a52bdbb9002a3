"""Load a model with offloaded blocks, in the checkpoint's files or in host memory, by accelerate."""

import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..devices import default_device
from ..errors import Text, require
from ..files import writing
from ..model.layers import find_blocks
from .meta_model import empty_model

PLACES = ("cpu", "disk")


def offload_options(config: Any, place: str, device: Any, folder: str | None) -> dict[str, Any]:
    """The options of `from_pretrained` for offloaded blocks.

    Args:
        config: of the model.
        place: "disk" or "cpu", of the weights of the blocks.
        device: of onloaded blocks and all other weights; None: the first GPU, or the CPU.
        folder: of weights that differ from those in the files, such as fused experts; None: the system's folder for
            temporary files.

    Raises:
        MoonshotError: an unknown place, or a model without blocks.
    """
    check_place(place)
    device = str(default_device()) if device is None else device
    single = isinstance(device, str | int | torch.device)
    require(single, Text("with {}, name one device", "offload"), field="device_map", value=device)
    message = "the model is on the CPU anyway"
    require(place == "disk" or str(device) != "cpu", message, field="offload", value=place, hint='use "disk"')
    device_map = _device_map(empty_model(config), place, device)
    if folder is not None:
        with writing("offload_dir", Path(folder)):
            Path(folder).mkdir(parents=True, exist_ok=True)
    return {
        "device_map": device_map,
        "offload_folder": tempfile.mkdtemp(prefix="moonshot-offload-", dir=folder),
    }


def check_place(place: str) -> None:
    """Raise `MoonshotError` unless blocks can be offloaded there."""
    require(place in PLACES, 'use "disk" or "cpu"', field="offload", value=place)


@contextmanager
def folder_of_its_model(folder: str | None) -> Iterator[Callable[[nn.Module], None]]:
    """Delete a folder of offloaded weights with its model, or if loading fails.

    Args:
        folder: the folder; None does nothing.

    Yields:
        A function to call with the loaded model.

    Raises:
        BaseException: whatever the block raises.
    """
    try:
        yield lambda model: None if folder is None else _remove_with(model, folder)
    except BaseException:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _remove_with(model: nn.Module, folder: str) -> None:
    weakref.finalize(model, shutil.rmtree, folder, ignore_errors=True)


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
