"""Which layers show whose inputs they read: samples of a batch one after another, on the first axis of a call.

Gradients are gathered sample by sample, and padding counts in no statistic, so that it must be known which part of a
layer's inputs belongs to which sample. Most layers read [samples, tokens, features]. Others read tokens first, what all
samples share (tables of relative positions), the tokens that were sent to one expert, or patches of all images in one
row. Shapes alone do not tell these apart: a batch of two samples and its second sample alone are compared.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..data.batches import Batch, batch_size, take
from ..errors import MoonshotError
from ..model.calls import close, run_model
from ..model.layers import PrunableLayer
from ..model.losses import token_mask


def unshown_samples(model: nn.Module, layers: Sequence[PrunableLayer], batch: Batch) -> list[str]:
    """The names of the layers whose inputs do not show the samples of a batch.

    Args:
        model: in evaluation mode, its weights present while it is called.
        layers: to ask; one that is not called shows all.
        batch: two samples on the model's device.
    """
    both, alone = (
        calls_seen(layers, token_mask(each), batch_size(each), partial(run_model, model, each))
        for each in (batch, take(batch, 1, 2))
    )
    return unlike(layers, both, alone)


Calls = dict[str, list[Tensor | None]]


def unlike(layers: Sequence[PrunableLayer], both: Calls, alone: Calls) -> list[str]:
    """The names of the layers whose calls do not show the samples.

    Args:
        layers: that were asked.
        both: their calls with two samples.
        alone: with the second of them.
    """
    return [layer.name for layer in layers if not _follow(both[layer.name], alone[layer.name])]


@torch.no_grad()
def calls_seen(layers: Sequence[PrunableLayer], mask: Tensor | None, samples: int, run: Callable[[], Any]) -> Calls:
    """One number for each element of the first axis of every call's inputs; None for a call that shows no samples.

    Args:
        layers: to watch.
        mask: bool [B, T], True where a token counts; None where all do.
        samples: B.
        run: calls them.
    """
    found: Calls = {layer.name: [] for layer in layers}

    def see(name: str, form: PrunableLayer, inputs: Tensor, output: Tensor) -> None:
        found[name].append(_print(inputs) if _accepts(form, inputs, output, mask, samples) else None)

    with ExitStack() as stack:
        for layer in layers:
            for module in layer.modules:
                stack.callback(layer.at(module).watch(partial(see, layer.name)).remove)
        run()
    return found


def _accepts(form: PrunableLayer, inputs: Tensor, output: Tensor, mask: Tensor | None, samples: int) -> bool:
    try:
        kept = form.token_mask(inputs, mask)
        next(form.pairs(inputs, output, kept, samples))
    except MoonshotError:
        return False
    return True


def _print(inputs: Tensor) -> Tensor:
    """[first axis], each a weighted sum of what lies behind it."""
    rows = inputs.detach().float().flatten(1) if inputs.ndim > 1 else inputs.detach().float()[:, None]
    return rows @ torch.arange(rows.shape[1], device=rows.device).cos()


def _follow(both: list[Tensor | None], alone: list[Tensor | None]) -> bool:
    """Whether every call's second half is the second sample's."""
    if len(both) != len(alone):
        return False
    for two, one in zip(both, alone, strict=True):
        if two is None or one is None or len(two) != 2 * len(one) or not close(two[len(one) :], one):
            return False
    return True
