"""Loading a model with its blocks elsewhere: in the checkpoint's files or in host memory, by accelerate's offload."""

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
from ..errors import require
from ..files import writing
from ..model.layers import find_blocks
from .meta_model import empty_model

PLACES = ("cpu", "disk")


def offload_options(config: Any, place: str, device: Any, folder: str | None) -> dict[str, Any]:
    """What `from_pretrained` has to be told.

    Args:
        config: of the model.
        place: "disk" or "cpu", where the weights of the blocks are.
        device: where the blocks go, one at a time, and everything else is; None is the first GPU, or the CPU.
        folder: in which weights lie that are not as the files have them, such as fused experts; None is the system's
            for temporary files.

    Raises:
        MoonshotError: a place that there is not, or a model without blocks.
    """
    check_place(place)
    device = str(default_device()) if device is None else device
    require(isinstance(device, str | int | torch.device), f"device_map={device!r}: with offload=, name one device")
    require(place == "disk" or str(device) != "cpu", 'offload="cpu": the model is on the CPU anyway; use "disk"')
    device_map = _device_map(empty_model(config), place, device)
    if folder is not None:
        with writing("offload_dir", Path(folder)):
            Path(folder).mkdir(parents=True, exist_ok=True)
    return {
        "device_map": device_map,
        "offload_folder": tempfile.mkdtemp(prefix="moonshot-offload-", dir=folder),
    }


def check_place(place: str) -> None:
    """Raise `MoonshotError` for anything but a place where blocks can be."""
    require(place in PLACES, f'offload={place!r}: use "disk" or "cpu"')


@contextmanager
def folder_of_its_model(folder: str | None) -> Iterator[Callable[[nn.Module], None]]:
    """Remove a folder with offloaded weights when its model goes, or if there will be none.

    Args:
        folder: None does nothing.

    Yields:
        What is told the model.
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
    """Every block in its place, everything else on the device, by the largest modules that hold no block."""
    blocks = {name for name, _ in find_blocks(model)}
    require(bool(blocks), f"offload={place!r}: {type(model).__name__} has no repeated blocks that could be elsewhere")
    found: dict[str, Any] = {}

    def place_in(module: nn.Module, prefix: str) -> None:
        for own in (module._parameters, module._buffers):
            found.update({prefix + key: device for key, tensor in own.items() if tensor is not None})
        for key, child in module.named_children():
            name = prefix + key
            if name in blocks:
                found[name] = place
            elif any(block.startswith(f"{name}.") for block in blocks):
                place_in(child, f"{name}.")
            else:
                found[name] = device

    place_in(model, "")
    return found
