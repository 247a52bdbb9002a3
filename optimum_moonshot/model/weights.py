"""The weights of a block, wherever they are.

Code that reads a block's weights, or runs the block, does it under ``with block.onloaded():``. The block's `Weights`
decides what that loads, so calibration, solvers and recovery need not know whether a model is on disk, in host memory
or on the device. offload.py has the weights that accelerate keeps elsewhere.

Write-back is explicit: a weight is stored on exit if `mark_written` declared it, and dropped otherwise.
"""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

WEIGHTS = "_moonshot_weights"  # attribute of a block, or of the model for the rest, that holds its `Offloaded`
# Of each onloaded weight's module: the set of modules and keys whose weights will be stored on exit.
ONLOADED: WeakKeyDictionary[nn.Module, set[tuple[nn.Module, str]]] = WeakKeyDictionary()
FOLDERS: WeakKeyDictionary[nn.Module, str | None] = WeakKeyDictionary()  # of a model, for written weights from disk


Load = Callable[[], Tensor]


class Weights:
    """The weights of a block; in this class, they are in the model all the time."""

    stored: bool = False  # whether written ones are stored elsewhere, and `replace` can do so without onloading
    on_disk: bool = False  # whether some of them are loaded from disk

    def onloaded(self) -> AbstractContextManager[None]:
        """A reentrant context in which the block's parameters hold its weights."""
        return nullcontext()

    def changes(self) -> Any:
        """The weights stored so far, for `restore`; None for weights that are not stored."""
        return None

    def restore(self, changes: Any) -> None:
        """Drop the weights stored since `changes` was called."""

    def replace(self, parameter: nn.Parameter, load: Load) -> None:
        """Store another weight in place of a placeholder, without onloading; `load` has the parameter's layout."""
        raise NotImplementedError("weights that are not stored are written in place")


RESIDENT = Weights()


def mark_written(module: nn.Module, key: str) -> None:
    """Declare that an onloaded weight of a module was written, or replaced: it is stored when it is offloaded again.

    Does nothing for resident weights, so writers need not distinguish them.
    """
    written = ONLOADED.get(module)
    if written is not None:
        written.add((module, key))


def offload_hooks(module: nn.Module) -> list[Any]:
    """accelerate's hooks that load a module's weights."""
    hook = getattr(module, "_hf_hook", None)
    return [hook for hook in getattr(hook, "hooks", (hook,)) if getattr(hook, "weights_map", None) is not None]


def is_offloaded(model: nn.Module) -> bool:
    """Whether some of a model's weights are offloaded between calls."""
    return any(map(offload_hooks, model.modules()))


def bare_copy(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A copy of a module without the hooks that load weights, and without the weights.

    `memo` is the argument of `copy.deepcopy`, with replacements for the tensors.
    """
    if not is_offloaded(module):
        return copy.deepcopy(module, memo)
    from accelerate.hooks import ModelHook, remove_hook_from_module

    for inner in module.modules():
        attributes = (vars(inner).get("_hf_hook"), vars(inner).get(WEIGHTS))
        memo |= {id(value): ModelHook() for value in attributes if value is not None}
    return remove_hook_from_module(copy.deepcopy(module, memo), recurse=True)


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
