"""Weights that are in the model all the time, or that accelerate keeps in host memory or on disk.

Code that reads a block's weights, or runs the block, does it under ``with block.onloaded():``. The block's `Weights`
decides what that loads, so calibration, solvers and recovery need not know whether a model is on disk, in host memory
or on the device.

`from_pretrained(..., device_map=...)` puts a hook on every module with offloaded weights, which loads them before a
call of the module and offloads them after it. `Offloaded.onloaded` loads the weights of a whole block at once and
disables the hooks until its end.

Write-back is explicit: a weight is stored on exit if `mark_written` declared it, and dropped otherwise. Stored weights
shadow the loaded ones, in host memory or, for weights from disk, in unnamed files, as small as their zeros allow. The
checkpoint never changes.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from ..mapped import SpillFile
from ..packing.spill_codec import spill_tensor
from .source_files import SourceFiles, copy_from_files, guard_source, offload_hooks, unprefixed

Load = Callable[[], Tensor]


class Weights(Protocol):
    """The weights of a block."""

    def onloaded(self) -> AbstractContextManager[None]:
        """A reentrant context in which the block's parameters hold its weights."""


class Resident:
    """Weights that are in the model all the time."""

    def onloaded(self) -> AbstractContextManager[None]:
        return nullcontext()


RESIDENT = Resident()


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


class Offloaded:
    """The offloaded weights of a block; `folder` returns the folder for written weights that come from disk."""

    read = 0  # bytes loaded, by all blocks

    def __init__(self, slots: list[_Slot], folder: Callable[[], str | None]):
        self.slots, self.folder = slots, folder
        self.written: set[tuple[nn.Module, str]] = set()  # owner and key of the weights to store on exit
        self._spill: SpillFile | None = None
        self._depth = 0
        for slot in slots:
            _wrap_map(slot.hook)

    @property
    def on_disk(self) -> bool:
        """Whether some of them are loaded from disk."""
        return any(slot.hook.weights_map.on_disk(slot.name) for slot in self.slots)

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
            _ONLOADED[slot.owner] = self
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
            _ONLOADED.pop(slot.owner, None)
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
        """Store another weight in place of a placeholder, without onloading; `load` has the parameter's layout."""
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


_ONLOADED: WeakKeyDictionary[nn.Module, Offloaded] = WeakKeyDictionary()  # by the owner of each onloaded weight


def mark_written(module: nn.Module, key: str) -> None:
    """Declare that an onloaded weight of a module was written, or replaced: it is stored when it is offloaded again.

    Does nothing for resident weights, so writers need not distinguish them.
    """
    weights = _ONLOADED.get(module)
    if weights is not None:
        weights.written.add((module, key))


_WEIGHTS = "_moonshot_weights"  # attribute of a block, or of the model for the rest, that holds its `Offloaded`
_FOLDERS: WeakKeyDictionary[nn.Module, str | None] = WeakKeyDictionary()


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

    before = {module: vars(module).pop(_WEIGHTS) for module in model.modules() if _WEIGHTS in vars(module)}
    try:
        for module, source in sources.items():  # accelerate's own function would replace the module's forward
            vars(module)["_hf_hook"] = AlignDevicesHook("cpu", offload=True, weights_map=source)
        yield
    finally:
        for module in sources:
            vars(module).pop("_hf_hook", None)
        for module in model.modules():
            vars(module).pop(_WEIGHTS, None)
        for module, weights in before.items():
            vars(module)[_WEIGHTS] = weights


def is_offloaded(model: nn.Module) -> bool:
    """Whether some of a model's weights are offloaded between calls."""
    return any(offload_hooks(module) for module in model.modules())


def bare_copy(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A copy of a module without the hooks that load weights, and without the weights.

    `memo` is the argument of `copy.deepcopy`, with replacements for the tensors.
    """
    if not is_offloaded(module):
        return copy.deepcopy(module, memo)
    from accelerate.hooks import ModelHook, remove_hook_from_module

    for inner in module.modules():
        attributes = (vars(inner).get("_hf_hook"), vars(inner).get(_WEIGHTS))
        memo |= {id(value): ModelHook() for value in attributes if value is not None}
    return remove_hook_from_module(copy.deepcopy(module, memo), recurse=True)


def weights_of(model: nn.Module, block: nn.Module, without: Sequence[nn.Module] = ()) -> Weights:
    """The weights of a block of a model; with the model as `block`, the weights outside of its blocks `without`."""
    from accelerate.utils import named_module_tensors

    others = {module for other in without for module in other.modules()}
    slots = []
    for module in (module for module in block.modules() if module not in others):
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
    cached: Offloaded | None = vars(block).get(_WEIGHTS)
    if cached is None or cached.slots != slots:
        cached = vars(block)[_WEIGHTS] = Offloaded(slots, lambda: _FOLDERS.get(model))
    return cached


def write_to(model: nn.Module, folder: str | None) -> None:
    """Set the folder for written weights that come from disk; None is the system's folder of temporary files."""
    _FOLDERS[model] = folder


def tie_again(model: nn.Module) -> None:
    """Give tied offloaded weights one placeholder again: after a call of the model each name has its own."""
    if not getattr(getattr(model, "config", None), "tie_word_embeddings", False):
        return
    for name, source in getattr(model, "all_tied_weights_keys", {}).items():
        try:
            tied, shared = model.get_parameter(name), model.get_parameter(source)
        except AttributeError:
            continue
        if tied is not shared and tied.is_meta and shared.is_meta and tied.shape == shared.shape:
            owner, _, key = name.rpartition(".")
            model.get_submodule(owner)._parameters[key] = shared
