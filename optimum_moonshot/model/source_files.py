"""The files of a loaded model: offloaded weights are read from them, so they must not change; others are copied.

transformers maps weights on the CPU into memory: a file that is overwritten later changes the weights, a truncated one
kills the process.
"""

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from ..errors import MoonshotError, check_path, reason, require
from .weights import offload_hooks

_FILES = "_moonshot_files"  # attribute of accelerate's loader that holds its `SourceFiles`
_HINT = "load the model again"
_SAVE = "save_pretrained"


class SourceFiles:
    """Size and time of the files of one of accelerate's loaders, from when the model was loaded."""

    def __init__(self, loader: Any):
        index = getattr(loader, "index", {})  # a dictionary in host memory has no files
        paths = {str(info["safetensors_file"]) for info in index.values() if info.get("safetensors_file")}
        self.stamps = {path: _stamp(path) for path in paths}

    @staticmethod
    def of(source: Any) -> "SourceFiles":
        """The files behind one of accelerate's maps from names to weights, the same for all maps of a loader."""
        loader, _ = unprefixed(source, "")
        if not hasattr(loader, "index"):
            return SourceFiles(loader)
        if _FILES not in vars(loader):
            vars(loader)[_FILES] = SourceFiles(loader)
        files: SourceFiles = vars(loader)[_FILES]
        return files

    @property
    def folders(self) -> set[Path]:
        return {Path(path).parent.resolve() for path in self.stamps}

    def read(self, source: Mapping[str, Tensor], key: str) -> Tensor:
        """A weight of one of accelerate's maps, without a reference to its file.

        Raises:
            MoonshotError: its file has changed since the model was loaded, or cannot be read.
        """
        loader, name = unprefixed(source, key)
        path = str(getattr(loader, "index", {}).get(name, {}).get("safetensors_file", ""))
        if path not in self.stamps:
            return source[key]
        self._check(path)
        try:
            weight = source[key].clone()  # mapped from the file
        except (OSError, SafetensorError) as error:
            self._check(path)
            raise MoonshotError(f"{name} cannot be read: {reason(error)}", hint=_HINT) from error
        self._check(path)
        return weight

    def _check(self, path: str) -> None:
        stamp = _stamp(path)
        if stamp is None or stamp != self.stamps[path]:
            change = "is gone" if stamp is None else "has changed"
            raise MoonshotError(f"{path} {change} since the model was loaded, whose weights it holds", hint=_HINT)


def unprefixed(source: Any, key: str) -> tuple[Any, str]:
    """The table that accelerate's maps with prefixes read from, and the name of a weight in it."""
    while hasattr(source, "dataset"):
        source, key = source.dataset, source.prefix + key
    return source, key


def source_files(model: nn.Module) -> list[SourceFiles]:
    """The files of all offloaded weights of a model; the first call records their sizes and times."""
    hooks = [hook for module in model.modules() for hook in offload_hooks(module)]
    maps = [getattr(hook.weights_map, "source", hook.weights_map) for hook in hooks]
    return list({id(files): files for files in map(SourceFiles.of, maps)}.values())


@torch.no_grad()
def copy_from_files(model: nn.Module) -> None:
    """Copy the weights that are in host memory out of the files, one after another, which releases each mapping."""
    copies: dict[tuple[int, torch.Size], Tensor] = {}  # tied weights remain one

    def copied(tensor: Tensor) -> Tensor:
        if tensor.device.type != "cpu" or not tensor.numel():
            return tensor.detach()
        key = tensor.data_ptr(), tensor.shape
        if key not in copies:
            copies[key] = tensor.detach().clone()
        return copies[key]

    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = copied(tensor)
    hooks = [hook for module in model.modules() for hook in offload_hooks(module)]
    loaders = [unprefixed(getattr(hook.weights_map, "source", hook.weights_map), "")[0] for hook in hooks]
    in_host_memory = [getattr(loader, "state_dict", loader) for loader in loaders]
    for weights in {id(table): table for table in in_host_memory}.values():
        weights.update({name: copied(tensor) for name, tensor in weights.items()})
    # accelerate identifies tied weights by their address, which another weight could get once it is free.
    moved = {address: copy.data_ptr() for (address, _), copy in copies.items()}
    for tied in {id(hook.tied_params_map): hook.tied_params_map for hook in hooks if hook.tied_params_map}.values():
        entries = {moved.get(address, address): value for address, value in tied.items()}
        tied.clear()
        tied.update(entries)


def guard_source(model: nn.Module) -> None:
    """Replace `save_pretrained` of a model with offloaded weights, and of its parts, by one that keeps their files."""
    for module in model.modules():
        if hasattr(type(module), _SAVE) and source_files(module):
            # A partial is copied and pickled with its model; a bound method would refer to the original.
            vars(module).setdefault(_SAVE, partial(_save_elsewhere, module))


def _save_elsewhere(model: Any, save_directory: str | os.PathLike[str], *args: Any, **options: Any) -> None:
    """Replaces `save_pretrained`, which deletes the files of a folder before it reads the weights from them."""
    check_not_source(model, save_directory, "save_directory")
    type(model).save_pretrained(model, save_directory, *args, **options)


def check_not_source(model: nn.Module, folder: str | os.PathLike[str], field: str) -> None:
    """Raise `MoonshotError` if offloaded weights of a model are read from a folder, the value of a field."""
    check_path(field, folder)
    sources = {source for files in source_files(model) for source in files.folders}
    message, hint = "the offloaded weights of the model are read from there", "give another folder"
    require(Path(folder).resolve() not in sources, message, field=field, value=folder, hint=hint)


def _stamp(path: str) -> tuple[int, int, int] | None:
    """Without `st_ctime`, which a hard link or a change of the permissions alters too."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns, status.st_ino
