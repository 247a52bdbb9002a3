"""Weights that accelerate keeps in host memory or on disk, and that a block loads while it is onloaded (weights.py).

`from_pretrained(..., device_map=...)` puts a hook on every module with offloaded weights, which loads them before a
call of the module and offloads them after it. `Offloaded.onloaded` loads the weights of a whole block at once and
disables the hooks until its end.

Stored weights shadow the loaded ones, in host memory or, for weights from disk, in unnamed files, as small as their
zeros allow. The checkpoint never changes: the files that offloaded weights are read from are checked at every read, and
other weights are copied out of them, since transformers maps weights on the CPU into memory. A file that is overwritten
later would change the weights, a truncated one kills the process.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from ..errors import MoonshotError, check_path, reason, require
from ..mapped import SpillFile
from ..packing.layer import spill_tensor
from .weights import FOLDERS, ONLOADED, RESIDENT, WEIGHTS, Load, Weights, offload_hooks, tie_again

_FILES = "_moonshot_files"  # attribute of accelerate's loader that holds its `SourceFiles`
_HINT = "load the model again"
_SAVE = "save_pretrained"


class Changes(NamedTuple):
    """The stored weights of an `Offloaded`, slot by slot."""

    written: list[dict[str, Load]]  # of the slot's map
    placeholders: list[Tensor]


class WrittenMap(Mapping[str, Tensor]):
    """accelerate's map from names to weights, with the weights that were written in place of the loaded ones."""

    def __init__(self, source: Mapping[str, Tensor]):
        self.source, self.files = source, SourceFiles.of(source)
        self.written: dict[str, Load] = {}

    def __getitem__(self, key: str) -> Tensor:
        if key in self.written:
            return self.written[key]()
        return self.files.read(self.source, key)

    def __iter__(self) -> Iterator[str]:
        return iter(self.source)

    def __len__(self) -> int:
        return len(self.source)

    def on_disk(self, key: str) -> bool:
        """Whether a weight is loaded from a file, not from host memory."""
        table, name = unprefixed(self.source, key)
        return name not in getattr(table, "state_dict", table)


@dataclass
class _Slot:
    """A parameter or buffer that a hook loads."""

    owner: nn.Module
    key: str
    hook: Any = field(compare=False)  # accelerate's AlignDevicesHook
    name: str = field(compare=False)  # in its map
    placeholder: Any = field(default=None, compare=False)  # the module's tensor while the weight is offloaded
    # While the weight is onloaded: always the same object, since layers are identified by their parameter.
    parameter: nn.Parameter | None = field(default=None, compare=False)

    @property
    def table(self) -> dict[str, Any]:
        """The dictionary of the module that holds it: parameters or buffers."""
        return self.owner._parameters if self.key in self.owner._parameters else self.owner._buffers


class Offloaded(Weights):
    """The offloaded weights of a block; `folder` returns the folder for written weights that come from disk."""

    stored = True
    read = 0  # bytes loaded, by all blocks

    def __init__(self, slots: list[_Slot], folder: Callable[[], str | None]):
        self.slots, self.folder = slots, folder
        self.written: set[tuple[nn.Module, str]] = set()  # owner and key of the weights to store on exit
        self._spill: SpillFile | None = None
        self._depth = 0
        for slot in slots:
            _wrap_map(slot.hook)
        self.on_disk = any(slot.hook.weights_map.on_disk(slot.name) for slot in slots)

    @contextmanager
    def onloaded(self) -> Iterator[None]:
        """A context in which the weights are in the model; those declared by `mark_written` are stored on exit."""
        if self._depth == 0:
            for slot in self.slots:
                slot.placeholder = slot.table[slot.key]
            try:
                self._onload()
            except BaseException:
                self._clear()
                raise
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                try:
                    self._store_written()
                finally:
                    self._clear()

    def _onload(self) -> None:
        tied: dict[tuple[int, Any], nn.Parameter] = {}  # placeholder and device → the one parameter
        for slot in self.slots:
            ONLOADED[slot.owner] = self.written
            weights, placeholder = slot.hook.weights_map, slot.placeholder
            key = (id(placeholder), slot.hook.execution_device)
            if key in tied:
                slot.parameter = slot.table[slot.key] = tied[key]
                continue
            stored = weights[slot.name]
            if slot.name not in weights.written:
                Offloaded.read += stored.nbytes
            tensor = stored.to(slot.hook.execution_device)
            if tensor is stored and not weights.on_disk(slot.name):
                tensor = tensor.clone()  # writes in place must not reach the stored tensor before exit
            if isinstance(placeholder, nn.Parameter):
                if slot.parameter is None:
                    slot.parameter = nn.Parameter(tensor, requires_grad=placeholder.requires_grad)
                slot.parameter.data = tensor
                slot.parameter.requires_grad_(placeholder.requires_grad)
                tensor = tied[key] = slot.parameter
            slot.table[slot.key] = tensor
        for slot in self.slots:
            slot.hook.offload = False

    def _store_written(self) -> None:
        """Store the declared weights, under every slot that holds them: tied ones have several."""
        written = {id(slot.table[slot.key]) for slot in self.slots if (slot.owner, slot.key) in self.written}
        for slot in self.slots:
            tensor = slot.table[slot.key]
            if id(tensor) not in written:
                continue
            untied = tensor is not slot.parameter
            if untied:
                slot.parameter = None
            if untied or tensor.shape != slot.placeholder.shape:
                empty = tensor.detach().to("meta")
                parameter = isinstance(tensor, nn.Parameter)
                slot.placeholder = nn.Parameter(empty, tensor.requires_grad) if parameter else empty
            slot.hook.weights_map.written[slot.name] = self._store(slot, tensor.detach())

    def _clear(self) -> None:
        self.written.clear()
        for slot in self.slots:
            ONLOADED.pop(slot.owner, None)
            slot.table[slot.key] = slot.placeholder
            if slot.parameter is not None:
                slot.parameter.data = slot.parameter.detach().new_empty(0)
            slot.hook.offload = True

    def _store(self, slot: _Slot, tensor: Tensor) -> Load:
        tensor = tensor.cpu()
        if not slot.hook.weights_map.on_disk(slot.name):
            copied = tensor.clone()
            return lambda: copied
        if self._spill is None:
            self._spill = SpillFile(self.folder())
        return spill_tensor(self._spill, slot.name, tensor)

    def replace(self, parameter: nn.Parameter, load: Load) -> None:
        for slot in self.slots:
            if slot.table[slot.key] is parameter:
                slot.hook.weights_map.written[slot.name] = load

    def changes(self) -> Changes:
        """The weights stored so far, for `restore`."""
        written = [dict(slot.hook.weights_map.written) for slot in self.slots]
        return Changes(written, [slot.placeholder if self._depth else slot.table[slot.key] for slot in self.slots])

    def restore(self, changes: Changes) -> None:
        """Drop the weights stored since `changes` was called."""
        for slot, written, placeholder in zip(self.slots, *changes, strict=True):
            slot.hook.weights_map.written = dict(written)
            if self._depth:
                slot.placeholder = placeholder
            else:
                slot.table[slot.key] = placeholder
        self._spill = None  # the loaders that remain keep the file open


def _wrap_map(hook: Any) -> None:
    if not isinstance(hook.weights_map, WrittenMap):
        hook.weights_map = WrittenMap(hook.weights_map)


def detach_from_files(model: nn.Module) -> None:
    """Make a model that was just loaded independent of its files.

    The files of offloaded weights are checked at every read instead, and `save_pretrained` does not overwrite them.
    """
    copy_from_files(model)
    for module in model.modules():
        for hook in offload_hooks(module):
            _wrap_map(hook)
    guard_source(model)


@contextmanager
def offloaded_from(model: nn.Module, sources: Mapping[nn.Module, Mapping[str, Tensor]]) -> Iterator[None]:
    """A context in which the weights of some modules, by name, are offloaded and can be onloaded to host memory.

    The model is not called in it. The placeholders have the shapes and dtypes of the sources.
    """
    from accelerate.hooks import AlignDevicesHook

    before = {module: vars(module).pop(WEIGHTS) for module in model.modules() if WEIGHTS in vars(module)}
    try:
        for module, source in sources.items():  # accelerate's own function would replace the module's forward
            vars(module)["_hf_hook"] = AlignDevicesHook("cpu", offload=True, weights_map=source)
        yield
    finally:
        for module in sources:
            vars(module).pop("_hf_hook", None)
        for module in model.modules():
            vars(module).pop(WEIGHTS, None)
        for module, weights in before.items():
            vars(module)[WEIGHTS] = weights


def offloaded_weights(model: nn.Module, block: nn.Module, modules: Sequence[nn.Module]) -> Weights:
    """The weights that hooks on some modules of a block load; `block` remembers them."""
    from accelerate.utils import named_module_tensors

    slots = []
    for module in modules:
        for hook in offload_hooks(module):
            tensors = named_module_tensors(
                module, include_buffers=hook.offload_buffers, recurse=hook.place_submodules, remove_non_persistent=True
            )
            for name, _ in tensors:
                owner, _, key = name.rpartition(".")
                slots.append(_Slot(module.get_submodule(owner), key, hook, name))
    if not slots:
        return RESIDENT
    tie_again(model)
    cached: Offloaded | None = vars(block).get(WEIGHTS)
    if cached is None or cached.slots != slots:
        cached = vars(block)[WEIGHTS] = Offloaded(slots, lambda: FOLDERS.get(model))
    return cached


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
