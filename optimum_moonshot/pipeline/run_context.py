"""The conditions of a run: checks of the model, the processes that take part, and weights outside of the blocks."""

import dataclasses
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from ..distributed.ranks import SINGLE_PROCESS, processes
from ..errors import require
from ..model.calls import CALL, Forward, called_by, replace_call
from ..model.isolation import isolate, use_differentiable_attention, wide_products
from ..model.layers import find_blocks, rest_onloaded
from ..runtime.packed_module import is_packed
from .backoff import enough_memory
from .selection import Subject

_APPLIED: dict[nn.Module, int] = {}  # models with the weights of a variant, and how many contexts gave them some
_RUNNING: set[nn.Module] = set()  # the models of runs, and their modules above the blocks
_LOCK = threading.Lock()
PACKED = 'the model is packed in memory: call pruner.to_runtime("dense") first'


@contextmanager
def run_context(subject: Subject, forward: Forward | None = None, call: str | None = None) -> Iterator[Subject]:
    """Yield the subject with the processes of the run; its model is called by `forward` inside the block.

    All processes of `torch.distributed` enter together, with the same `call`; None is for one process.

    Raises:
        MoonshotError: inference mode, a model that is packed, that another run works on or that has the weights of a
            variant, weights that cannot be changed in place, or a loss or forward that cannot be called; inside the
            block, a device that is out of memory.
    """
    model, loss = subject.model, subject.loss
    message = "torch.inference_mode() forbids gradients: prune outside of it"
    require(not torch.is_inference_mode_enabled(), message)
    inference = any(tensor.is_inference() for tensor in chain(model.parameters(), model.buffers()))
    message = "its weights were created inside torch.inference_mode(), and cannot be changed outside of it"
    require(not inference, message, field="model", hint="load it under torch.no_grad()")
    for name, parameter in model.named_parameters():
        shared = any(stride == 0 and size > 1 for stride, size in zip(parameter.stride(), parameter.shape, strict=True))
        message = f"entries of {name} share their memory, as after expand()"
        require(not shared, message, field="model", hint="clone it: weight.data = weight.data.clone()")
    require(loss is None or callable(loss), "give a function of output and inputs", field="loss", value=loss)
    require(not is_packed(model), PACKED)
    with ExitStack() as undo:
        isolate(model, undo)
        # Other threads cannot call the model, and nobody can start another run on it or on a part of it.
        parents = {name[:end] for name, _ in find_blocks(model) for end, letter in enumerate(name) if letter == "."}
        modules = {module for name, module in model.named_modules() if not name or name in parents}
        with _LOCK:
            check_idle(model, call)
            _RUNNING.update(modules)
            undo.callback(_RUNNING.difference_update, modules)
        for module in modules:
            replace_call(module, partial(_call, module, threading.get_ident()), undo, CALL)
        notes = use_differentiable_attention(model, undo)
        ranks = SINGLE_PROCESS if call is None else undo.enter_context(processes())
        for context in (called_by(model, forward), rest_onloaded(model), wide_products(model)):
            undo.enter_context(context)
        if ranks.size > 1:
            ranks.check_equal("the call", {"the method": str(call)})
        progress = subject.progress and ranks.is_main
        with enough_memory():
            yield dataclasses.replace(subject, progress=progress, ranks=ranks, notes=notes)


def _call(module: nn.Module, thread: int, *args: Any, **kwargs: Any) -> Any:
    """Call a module in the thread of its run, or in one of autograd's, which compute activations again."""
    in_this_run = threading.get_ident() == thread or torch._C._current_graph_task_id() != -1
    message = f"another thread called {type(module).__name__} during a run, which changes it and observes its calls"
    require(in_this_run, message, hint="wait for the end of the run, or call a copy made before it")
    return module._call_impl(*args, **kwargs)


@contextmanager
def holding_variant(model: nn.Module) -> Iterator[None]:
    """A context in which the model has the weights of a variant, and `check_idle` raises an error."""
    _APPLIED[model] = _APPLIED.get(model, 0) + 1
    try:
        yield
    finally:
        _APPLIED[model] -= 1
        if not _APPLIED[model]:
            del _APPLIED[model]


def check_idle(model: nn.Module, call: str | None) -> None:
    """Check that a call that changes or saves weights is outside of runs and of `applied`, which would replace them.

    None is a plan, which does neither, but observes the calls of the model: it is outside of runs too.

    Raises:
        MoonshotError: it is inside.
    """
    name = call or "plan"
    message = f"{name}: another run on this model is at work"
    hint = f"call {name} after its end, or on a copy made before it"  # a later copy has the hooks of the run
    require(_RUNNING.isdisjoint(model.modules()), message, hint=hint)
    message = f"{call}: inside of applied() the model has a variant's weights, and the end of the block replaces them"
    require(call is None or model not in _APPLIED, message, hint=f"call {call} after the block")
