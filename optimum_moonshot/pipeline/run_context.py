"""The conditions of a run: checks of the model, the processes that take part, and weights outside of the blocks."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from ..checkpoint.in_memory import is_packed
from ..distributed.ranks import SINGLE_PROCESS, processes
from ..errors import require
from ..model.calls import Forward, called_by
from ..model.layers import rest_onloaded
from ..model.offload import write_to
from .selection import Subject

PACKED = 'the model is packed in memory: call pruner.to_runtime("dense") first'


@contextmanager
def run_context(
    subject: Subject, offload_dir: str | None, forward: Forward | None = None, call: str | None = None
) -> Iterator[Subject]:
    """Yield the subject with the processes of the run; its model is called by `forward` inside the block.

    All processes of `torch.distributed` enter together, with the same `call`; None is for one process. Weights written
    to offloaded blocks go to `offload_dir`.

    Raises:
        MoonshotError: inference mode, a packed model, or a loss or forward that cannot be called.
    """
    model, loss = subject.model, subject.loss
    message = "torch.inference_mode() forbids gradients: prune outside of it"
    require(not torch.is_inference_mode_enabled(), message)
    require(loss is None or callable(loss), "give a function of output and inputs", field="loss", value=loss)
    require(not is_packed(model), PACKED)
    together = nullcontext(SINGLE_PROCESS) if call is None else processes()
    with together as ranks, called_by(model, forward), rest_onloaded(model):
        ranks.check_equal("the call", {"the method": str(call)})
        write_to(model, offload_dir)
        yield dataclasses.replace(subject, progress=subject.progress and ranks.is_main, ranks=ranks)
