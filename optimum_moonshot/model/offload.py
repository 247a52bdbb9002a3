"""Blocks whose weights accelerate keeps in host memory or on disk: they are in the model for the time of a visit.

`from_pretrained(..., device_map=...)` leaves a hook on every module with such weights, which brings them before a call
of the module and takes them away behind it. `Offloaded.onloaded` brings those of a whole block at once, for as long as
somebody reads or writes them, and the hooks stand still meanwhile.

What is written during a visit is kept beside the weights that were loaded, as small as its zeros allow: in host memory
where those are there, else in unnamed files. The checkpoint that they come from never changes.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from ..mapped import SpillFile
from ..packing.spill_codec import spill_matrix
from .onloading import RESIDENT, Block, Weights

Load = Callable[[], Tensor]


class Changes(NamedTuple):
    """What was written to weights that are elsewhere, slot by slot."""

    written: list[dict[str, Load]]  # of its map
    standing: list[Tensor]  # in its place between visits


class Kept(Mapping[str, Tensor]):
    """In place of a hook's map from names to weights: with the weights that took the place of some.

    Args:
        source: accelerate's map.
    """

    def __init__(self, source: Mapping[str, Tensor]):
        self.source = source
        self.changed: dict[str, Load] = {}

    def __getitem__(self, key: str) -> Tensor:
        return self.changed[key]() if key in self.changed else self.source[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.source)

    def __len__(self) -> int:
        return len(self.source)

    def on_disk(self, key: str) -> bool:
        """Whether a weight comes from a file, not from host memory."""
        table, name = self.source, key
        while hasattr(table, "dataset"):
            table, name = table.dataset, table.prefix + name
        return name not in getattr(table, "state_dict", table)


class _Slot(NamedTuple):
    """A place in a module that a hook fills."""

    owner: nn.Module
    key: str
    hook: Any  # accelerate's AlignDevicesHook
    name: str  # for its map

    @property
    def table(self) -> dict[str, Any]:
        """Where the module has it: among its parameters or its buffers."""
        return self.owner._parameters if self.key in self.owner._parameters else self.owner._buffers


class Offloaded:
    """The weights of a block that are elsewhere.

    Args:
        slots: where they go in the model.
        folder: for what is written to weights that come from disk; asked when it is needed.
    """

    read = 0  # bytes of the weights that were loaded, by all blocks

    def __init__(self, slots: list[_Slot], folder: Callable[[], str | None]):
        self.slots, self.folder = slots, folder
        self._spill: SpillFile | None = None
        self._depth = 0
        self._away: list[Tensor] = []  # what stands in the slots when the weights are away
        self._here: list[nn.Parameter | None] = [None] * len(slots)
        self._came: list[tuple[int, int, int]] = []  # the state of what came for this visit
        for slot in slots:
            if not isinstance(slot.hook.weights_map, Kept):
                slot.hook.weights_map = Kept(slot.hook.weights_map)

    @property
    def on_disk(self) -> bool:
        """Whether some of them come from disk."""
        return any(slot.hook.weights_map.on_disk(slot.name) for slot in self.slots)

    @contextmanager
    def onloaded(self) -> Iterator[None]:
        """A context in which the weights are in the model; what was written to them is kept on exit."""
        if self._depth == 0:
            self._away = [slot.table[slot.key] for slot in self.slots]
            try:
                self._bring()
            except BaseException:
                self._put_away()
                raise
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._take_away()

    def _bring(self) -> None:
        self._came = []
        shared: dict[tuple[int, Any], nn.Parameter] = {}  # what stands for a weight, and where it goes → the weight
        for index, (slot, away) in enumerate(zip(self.slots, self._away, strict=True)):
            known = (id(away), slot.hook.execution_device)
            if known in shared:
                self._here[index] = slot.table[slot.key] = shared[known]
                self._came.append(_state(shared[known]))
                continue
            stored = slot.hook.weights_map[slot.name]
            if slot.name not in slot.hook.weights_map.changed:
                Offloaded.read += stored.nbytes
            tensor = stored.to(slot.hook.execution_device)
            if tensor is stored and not slot.hook.weights_map.on_disk(slot.name):
                tensor = tensor.clone()  # what is written must not reach it before the visit is over
            if isinstance(away, nn.Parameter):
                # One object for all visits: layers are known by it.
                here = self._here[index]
                if here is None:
                    self._here[index] = here = nn.Parameter(tensor, requires_grad=away.requires_grad)
                here.data = tensor
                here.requires_grad_(away.requires_grad)
                tensor = shared[known] = here
            slot.table[slot.key] = tensor
            self._came.append(_state(tensor))
        for slot in self.slots:
            slot.hook.offload = False

    def _take_away(self) -> None:
        try:
            for index, (slot, before) in enumerate(zip(self.slots, self._came, strict=True)):
                here = slot.table[slot.key]
                if id(here) != before[0]:  # one of its own in place of one that was shared
                    self._here[index] = None
                if id(here) != before[0] or here.shape != self._away[index].shape:
                    self._away[index] = _stand_in(here)
                if _state(here) != before:
                    slot.hook.weights_map.changed[slot.name] = self._keep(slot, here.detach())
        finally:
            self._put_away()

    def _put_away(self) -> None:
        for slot, away, here in zip(self.slots, self._away, self._here, strict=True):
            slot.table[slot.key] = away
            if here is not None:
                here.data = here.detach().new_empty(0)
            slot.hook.offload = True

    def _keep(self, slot: _Slot, tensor: Tensor) -> Load:
        tensor = tensor.cpu()
        if not slot.hook.weights_map.on_disk(slot.name):
            return _same(tensor.clone())
        shape = tuple(tensor.shape)
        matrix = tensor.reshape((shape[0], -1) if len(shape) > 1 else (1, -1))
        if self._spill is None:
            self._spill = SpillFile(self.folder())
        load = spill_matrix(self._spill, slot.name, matrix)
        return lambda: load().reshape(shape)

    def replace(self, parameter: nn.Parameter, load: Load) -> None:
        """Put another weight in the place of one, without a visit.

        Args:
            parameter: what stands in the model while the weights are away.
            load: gives the weight, laid out as the parameter, whenever it is brought.
        """
        for slot in self.slots:
            if slot.table[slot.key] is parameter:
                slot.hook.weights_map.changed[slot.name] = load

    def changes(self) -> Changes:
        """What was written so far; `restore` goes back to it."""
        written = [dict(slot.hook.weights_map.changed) for slot in self.slots]
        return Changes(written, self._away[:] if self._depth else [slot.table[slot.key] for slot in self.slots])

    def restore(self, changes: Changes) -> None:
        """Forget what was written since.

        Args:
            changes: what `changes` returned.
        """
        for slot, before in zip(self.slots, changes.written, strict=True):
            slot.hook.weights_map.changed = dict(before)
        if self._depth:
            self._away = changes.standing[:]
        else:
            for slot, standing in zip(self.slots, changes.standing, strict=True):
                slot.table[slot.key] = standing
        self._spill = None  # what it held for them goes with it; what is left holds on to it


def _same(tensor: Tensor) -> Load:
    return lambda: tensor


def _state(tensor: Tensor) -> tuple[int, int, int]:
    """Differs once a tensor is another one, or was written to, or holds other memory."""
    return id(tensor), tensor._version, tensor.data_ptr()


def _stand_in(tensor: Tensor) -> Tensor:
    """What stands for a tensor while it is elsewhere."""
    empty = tensor.detach().to("meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


_OWN = "_moonshot_weights"  # the attribute of a block, or of the model for the rest, that has its `Offloaded`
_FOLDERS: WeakKeyDictionary[nn.Module, str | None] = WeakKeyDictionary()


def hooked(module: nn.Module) -> list[Any]:
    """The hooks of accelerate's that bring a module's own weights."""
    hook = getattr(module, "_hf_hook", None)
    hooks = getattr(hook, "hooks", (hook,))
    return [each for each in hooks if getattr(each, "offload", False) or getattr(each, "weights_map", None) is not None]


@contextmanager
def visiting(model: nn.Module, sources: Mapping[nn.Module, Mapping[str, Tensor]]) -> Iterator[None]:
    """Inside the block the weights of some modules are elsewhere, and come to host memory for the time of a visit.

    Args:
        model: that has them; it is not called meanwhile.
        sources: the weights of each of these modules, of any shape, by their names in it. What stands there between
            visits has the same shapes and dtypes.
    """
    from accelerate.hooks import AlignDevicesHook

    before = {module: vars(module).pop(_OWN) for module in model.modules() if _OWN in vars(module)}
    try:
        for module, source in sources.items():  # not by accelerate's own function, which changes the module's calls
            vars(module)["_hf_hook"] = AlignDevicesHook("cpu", offload=True, weights_map=source)
        yield
    finally:
        for module in sources:
            vars(module).pop("_hf_hook", None)
        for module in model.modules():
            vars(module).pop(_OWN, None)
        for module, own in before.items():
            vars(module)[_OWN] = own


def is_offloaded(model: nn.Module) -> bool:
    """Whether some of a model's weights are elsewhere between calls."""
    return any(hooked(module) for module in model.modules())


def bare_copy(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A copy of a module without the hooks that bring weights, and without these.

    Args:
        module: which stays as it is.
        memo: of `copy.deepcopy`, what stands for the tensors.
    """
    if not is_offloaded(module):
        return copy.deepcopy(module, memo)
    from accelerate.hooks import ModelHook, remove_hook_from_module

    for each in module.modules():
        known = (vars(each).get("_hf_hook"), vars(each).get(_OWN))
        memo |= {id(own): ModelHook() for own in known if own is not None}
    return remove_hook_from_module(copy.deepcopy(module, memo), recurse=True)


def weights_of(model: nn.Module, block: nn.Module) -> Weights:
    """Where a block's weights come from.

    Args:
        model: that has it.
        block: one of its modules.
    """
    return _weights(model, block, list(block.modules()))


def is_on_disk(blocks: Sequence[Block]) -> bool:
    """Whether some weights of some blocks come from disk."""
    return any(isinstance(block.weights, Offloaded) and block.weights.on_disk for block in blocks)


def rest_of(model: nn.Module, blocks: list[nn.Module]) -> Weights:
    """Where the weights of everything but the blocks come from: embeddings, last norm and head.

    Args:
        model: that has them.
        blocks: of it.
    """
    inside = {module for block in blocks for module in block.modules()}
    return _weights(model, model, [module for module in model.modules() if module not in inside])


def write_to(model: nn.Module, folder: str | None) -> None:
    """Say where what is written to weights from disk is kept.

    Args:
        model: whose weights they are.
        folder: None is the system's for temporary files.
    """
    _FOLDERS[model] = folder


def _weights(model: nn.Module, key: nn.Module, modules: list[nn.Module]) -> Weights:
    slots = [slot for module in modules for slot in _slots(module)]
    if not slots:
        return RESIDENT
    tie_again(model)
    known: Offloaded | None = vars(key).get(_OWN)
    if known is None or [slot[:2] for slot in known.slots] != [slot[:2] for slot in slots]:
        known = vars(key)[_OWN] = Offloaded(slots, lambda: _FOLDERS.get(model))
    return known


def tie_again(model: nn.Module) -> None:
    """Give tied weights that are elsewhere one stand-in: a call of the model leaves every place with one of its own."""
    if not getattr(getattr(model, "config", None), "tie_word_embeddings", False):
        return
    for name, source in getattr(model, "all_tied_weights_keys", {}).items():
        own, shared = _parameter(model, name), _parameter(model, source)
        if own is None or shared is None or own is shared or not (own.is_meta and shared.is_meta):
            continue
        if own.shape == shared.shape:
            owner, _, key = name.rpartition(".")
            model.get_submodule(owner)._parameters[key] = shared


def _parameter(model: nn.Module, name: str) -> nn.Parameter | None:
    try:
        return model.get_parameter(name)
    except AttributeError:
        return None


def _slots(module: nn.Module) -> Iterator[_Slot]:
    from accelerate.utils import named_module_tensors

    for hook in hooked(module):
        tensors = named_module_tensors(
            module, include_buffers=hook.offload_buffers, recurse=hook.place_submodules, remove_non_persistent=True
        )
        for name, _ in tensors:
            owner, _, key = name.rpartition(".")
            yield _Slot(module.get_submodule(owner), key, hook, name)


def read_bytes() -> int:
    """How many bytes of weights were brought so far, in this process."""
    return Offloaded.read
