"""The conditions of a run: checks of the model, the processes that take part, and weights outside of the blocks."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import nn

from ..checkpoint.in_memory import is_packed
from ..distributed.ranks import SINGLE_PROCESS, processes
from ..errors import require
from ..model.calls import Forward, called_by
from ..model.layers import rest_onloaded
from ..model.offload import write_to
from ..model.wide_products import wide_products
from .selection import Subject

_APPLIED: dict[nn.Module, int] = {}  # models with the weights of a variant, and how many contexts gave them some
PACKED = 'the model is packed in memory: call pruner.to_runtime("dense") first'


@contextmanager
def run_context(
    subject: Subject, offload_dir: str | None, forward: Forward | None = None, call: str | None = None
) -> Iterator[Subject]:
    """Yield the subject with the processes of the run; its model is called by `forward` inside the block.

    All processes of `torch.distributed` enter together, with the same `call`; None is for one process. Weights written
    to offloaded blocks go to `offload_dir`.

    Raises:
        MoonshotError: inference mode, a model that is packed or has the weights of a variant, or a loss or forward that
            cannot be called.
    """
    model, loss = subject.model, subject.loss
    message = "torch.inference_mode() forbids gradients: prune outside of it"
    require(not torch.is_inference_mode_enabled(), message)
    require(loss is None or callable(loss), "give a function of output and inputs", field="loss", value=loss)
    require(not is_packed(model), PACKED)
    if call is not None:
        check_not_applied(model, call)
    together = nullcontext(SINGLE_PROCESS) if call is None else processes()
    with together as ranks, called_by(model, forward), rest_onloaded(model), wide_products(model):
        ranks.check_equal("the call", {"the method": str(call)})
        write_to(model, offload_dir)
        yield dataclasses.replace(subject, progress=subject.progress and ranks.is_main, ranks=ranks)


@contextmanager
def holding_variant(model: nn.Module) -> Iterator[None]:
    """Meanwhile the model has the weights of a variant, and `check_not_applied` refuses calls."""
    _APPLIED[model] = _APPLIED.get(model, 0) + 1
    try:
        yield
    finally:
        _APPLIED[model] -= 1
        if not _APPLIED[model]:
            del _APPLIED[model]


def check_not_applied(model: nn.Module, call: str) -> None:
    """Check that a call which changes or saves weights is outside of `applied`, whose end would replace them.

    Raises:
        MoonshotError: it is inside.
    """
    message = f"{call}: inside of applied() the model has a variant's weights, and the end of the block replaces them"
    require(model not in _APPLIED, message, hint=f"call {call} after the block")
