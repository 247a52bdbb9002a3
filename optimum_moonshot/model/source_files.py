"""The files that offloaded weights are read from, which must not change after the model was loaded."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import nn

from ..errors import MoonshotError, reason

_FILES = "_moonshot_files"  # attribute of accelerate's loader that holds its `SourceFiles`
_HINT = "load the model again"


class SourceFiles:
    """Size and time of each file of one of accelerate's loaders, as they were when the model was loaded."""

    def __init__(self, loader: Any):
        index = getattr(loader, "index", {})  # a dictionary in host memory has no files
        paths = {str(info["safetensors_file"]) for info in index.values() if info.get("safetensors_file")}
        self.stamps = {path: _stamp(path) for path in paths}

    @staticmethod
    def of(source: Any) -> "SourceFiles":
        """Those of one of accelerate's maps from names to weights, the same for all maps of a loader."""
        loader, _ = unprefixed(source, "")
        if not hasattr(loader, "index"):
            return SourceFiles(loader)
        files: SourceFiles = vars(loader).setdefault(_FILES, None) or SourceFiles(loader)
        vars(loader)[_FILES] = files
        return files

    @property
    def folders(self) -> set[Path]:
        return {Path(path).parent.resolve() for path in self.stamps}

    @contextmanager
    def reading(self, source: Any, key: str) -> Iterator[None]:
        """A context in which a weight is read.

        Raises:
            MoonshotError: its file has changed since the model was loaded, or cannot be read.
        """
        loader, name = unprefixed(source, key)
        path = str(getattr(loader, "index", {}).get(name, {}).get("safetensors_file", ""))
        self._check(path)
        try:
            yield
        except (OSError, SafetensorError) as error:
            self._check(path)
            raise MoonshotError(f"{name} cannot be read: {reason(error)}", hint=_HINT) from error
        self._check(path)

    def _check(self, path: str) -> None:
        if path not in self.stamps:
            return
        stamp = _stamp(path)
        if stamp is None or stamp != self.stamps[path]:
            change = "is gone" if stamp is None else "has changed"
            raise MoonshotError(f"{path} {change} since the model was loaded, whose weights it holds", hint=_HINT)


def unprefixed(source: Any, key: str) -> tuple[Any, str]:
    """The table behind accelerate's maps with prefixes, and the name of a weight in it."""
    while hasattr(source, "dataset"):
        source, key = source.dataset, source.prefix + key
    return source, key


def source_files(model: nn.Module) -> list[SourceFiles]:
    """Those of all offloaded weights of a model; the first call records their sizes and times."""
    hooks = [hook for module in model.modules() for hook in _hooks(module)]
    maps = [getattr(hook.weights_map, "source", hook.weights_map) for hook in hooks]
    return list({id(files): files for files in map(SourceFiles.of, maps)}.values())


def _hooks(module: nn.Module) -> list[Any]:
    hook = getattr(module, "_hf_hook", None)
    return [each for each in getattr(hook, "hooks", (hook,)) if isinstance(getattr(each, "weights_map", None), Mapping)]


def _stamp(path: str) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns, status.st_ino
