"""The mean loss ℓ_n of a model on the calibration data."""

import dataclasses
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from ..data.batches import batch_size
from ..data.text import CalibrationData
from ..model.calls import evaluation_mode, model_device, run_model, to_device
from ..model.layers import onloaded_in_turn
from ..model.losses import Divergence, OutputLoss, sample_losses
from .backoff import enough_memory
from .inputs import Prepared


@enough_memory("lower batch_size")
def mean_loss(prepared: Prepared) -> float:
    """The mean over all samples, by one forward pass of the model as it is.

    Raises:
        MoonshotError: too little memory for one sample.
    """
    backoff = prepared.backoff
    losses = backoff.with_smaller_batches(
        "the calibration loss", partial(_sum_of_losses, prepared), lambda: prepared.batches
    )
    sums = backoff.gather(losses)
    backoff.share()
    return sum(total for total, _ in sums) / sum(count for _, count in sums)


def remember_outputs(prepared: Prepared) -> None:
    """Keep the outputs of the dense model, where the loss of others is the distance to them."""
    loss = prepared.subject.loss
    if not isinstance(loss, OutputLoss | Divergence):
        return
    with evaluation_mode(prepared.model), torch.no_grad(), onloaded_in_turn(prepared.selection.structure.blocks):
        for batch in prepared.batches:
            loss.remember(run_model(prepared.model, to_device(batch, model_device(prepared.model))), batch)


def against_dense(prepared: Prepared, data: CalibrationData) -> Prepared:
    """The run of a dense model on some samples, where `mean_loss` measures changes of its outputs.

    A loss that the caller gives stays.
    """
    subject = prepared.subject
    subject = dataclasses.replace(subject, loss=subject.loss or Divergence(prepared.model))
    prepared = dataclasses.replace(prepared, subject=subject, data=data)
    remember_outputs(prepared)
    return prepared


def _sum_of_losses(prepared: Prepared) -> tuple[float, int]:
    """Σ ℓ_n over the samples of this process, and their number."""
    total, count = 0.0, 0
    for batch in prepared.batches:
        batch = to_device(batch, model_device(prepared.model))
        output = run_model(prepared.model, batch)
        total += float(sample_losses(prepared.model, output, batch, prepared.subject.loss).sum())
        count += batch_size(batch)
    return total, count


def mean_of(prepared: Prepared, losses: Sequence[Tensor | None]) -> float | None:
    """The mean of losses that this and other processes have computed batch by batch; None if any is missing."""
    gathered = prepared.backoff.gather([None if loss is None else loss.cpu() for loss in losses])
    losses = [loss for of_process in gathered for loss in of_process]
    present = [loss for loss in losses if loss is not None]
    return float(torch.cat(present).mean()) if present and len(present) == len(losses) else None
