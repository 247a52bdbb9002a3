"""Detects layers whose inputs do not show which sample they belong to.

Gradients are collected sample by sample, and statistics exclude padding, so the samples must be on the first axis of a
layer's inputs. Most inputs are [samples, tokens, features]. Others have tokens first, are shared by all samples (tables
of relative positions), or are the tokens of one expert, or the patches of all images in one row. Shapes alone do not
distinguish these, so the calls with two samples are compared with the calls with the second sample alone.
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

# By layer, for each call: one number per element of the first axis of its inputs; None if it does not show the samples.
Calls = dict[str, list[Tensor | None]]


def unshown_samples(model: nn.Module, layers: Sequence[PrunableLayer], batch: Batch) -> list[str]:
    """The names of the layers whose inputs do not show the samples of a batch of two, on the model's device.

    The model is in evaluation mode, with its weights onloaded while it is called.
    """
    both, second = (
        calls_seen(layers, token_mask(samples), batch_size(samples), partial(run_model, model, samples))
        for samples in (batch, take(batch, 1, 2))
    )
    return unlike(layers, both, second)


def unlike(layers: Sequence[PrunableLayer], both: Calls, second: Calls) -> list[str]:
    """The names of the layers where the second half of some call with both samples is not the second sample's call."""
    names = []
    for layer in layers:
        calls, alone = both[layer.name], second[layer.name]
        pairs = [(two, one) for two, one in zip(calls, alone, strict=False) if two is not None and one is not None]
        complete = len(pairs) == len(calls) == len(alone)
        if not complete or not all(len(two) == 2 * len(one) and close(two[len(one) :], one) for two, one in pairs):
            names.append(layer.name)
    return names


@torch.no_grad()
def calls_seen(layers: Sequence[PrunableLayer], mask: Tensor | None, samples: int, run: Callable[[], Any]) -> Calls:
    """The calls of the layers while `run` is called with B `samples`.

    `mask` is bool [B, T], True where a token counts; None where all do.
    """
    calls: Calls = {layer.name: [] for layer in layers}

    def see(name: str, called: PrunableLayer, inputs: Tensor, output: Tensor) -> None:
        try:
            next(called.pairs(inputs, output, called.token_mask(inputs, mask), samples))
        except MoonshotError:
            calls[name].append(None)
            return
        rows = inputs.detach().float().flatten(1) if inputs.ndim > 1 else inputs.detach().float()[:, None]
        calls[name].append(rows @ torch.arange(rows.shape[1], device=rows.device).cos())

    with ExitStack() as stack:
        for layer in layers:
            layer.watch(partial(see, layer.name), stack)
        run()
    return calls
