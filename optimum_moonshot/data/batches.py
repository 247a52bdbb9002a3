"""Batches of model inputs: dictionaries of tensors whose dim 0 is the sample."""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import MoonshotError, require

Batch = dict[str, Tensor]

INPUT_RANKS = {"input_ids": 1, "pixel_values": 3}  # main model inputs, and the dimensions of one sample
PROBE_TOKENS = 16


def as_batch(item: Any, what: str, single: bool) -> Batch:
    """A dictionary of tensors with a batch dimension, on the CPU.

    Args:
        item: such a dictionary, or a pair of inputs and labels.
        what: names it in errors.
        single: it is one sample without a batch dimension; model inputs of a known rank show that themselves.

    Raises:
        MoonshotError: anything else, tensors of unequal length, or NaN.
    """
    mend = "give dictionaries of model inputs, such as {'input_ids': tensor}, or pairs of inputs and labels"
    if isinstance(item, list | tuple) and len(item) == 2 and hasattr(item[0], "ndim"):
        item = {"pixel_values" if item[0].ndim in (3, 4) else "inputs": item[0], "labels": item[1]}
    require(isinstance(item, Mapping), f"{what} is a {type(item).__name__}: {mend}")
    batch = {name: _as_tensor(value, f"{what}: {name}") for name, value in item.items() if value is not None}
    require(len(batch) > 0, f"{what} is empty: {mend}")
    main = next((name for name in INPUT_RANKS if name in batch), next(iter(batch)))
    if single or batch[main].ndim <= INPUT_RANKS.get(main, 1):
        batch = {name: tensor[None] for name, tensor in batch.items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in batch.items()}
    same = len({shape[:1] for shape in shapes.values()}) == 1
    require(same, f"{what} has the shapes {shapes}: dim 0 of every tensor must be the sample")
    _check_mask(batch, what)
    return batch


def _check_mask(batch: Batch, what: str) -> None:
    """A mask [B, T] has a place for every token, and hides not all of a sample."""
    ids, mask = batch.get("input_ids"), batch.get("attention_mask")
    if ids is None or mask is None or mask.ndim != 2:
        return
    shapes = f"{tuple(mask.shape)} for input_ids of {tuple(ids.shape)}"
    require(mask.shape == ids.shape[:2], f"{what}: attention_mask of {shapes}: give one entry for each token")
    require(bool((mask != 0).any(1).all()), f"{what}: attention_mask hides all tokens of a sample: leave that out")


def _as_tensor(value: Any, what: str) -> Tensor:
    require(not isinstance(value, str | bool), f"{what}={value!r}: give a tensor or a list of numbers")
    try:
        tensor = torch.as_tensor(value).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise MoonshotError(f"{what}: give a tensor, or lists of numbers of equal length ({error})") from error
    require(tensor.layout is torch.strided, f"{what} is of layout {tensor.layout}: give a dense tensor")
    require(tensor.numel() > 0, f"{what} has shape {tuple(tensor.shape)}: it is empty, leave it out")
    require(not tensor.is_floating_point() or not tensor.isnan().any(), f"{what} holds NaN: give finite numbers")
    return tensor


def digest(batches: list[Batch]) -> str:
    """sha256 of the keys, shapes, dtypes and bytes of all batches in order."""
    found = hashlib.sha256()
    for batch in batches:
        for name, tensor in sorted(batch.items()):
            found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
            found.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


def shorten(batch: Batch) -> Batch:
    """A batch's first sample, cut to a few tokens where nothing but tokens goes in."""
    single = {name: tensor[:1] for name, tensor in batch.items()}
    token_inputs = {"input_ids", "attention_mask", "token_type_ids", "labels"}
    if "input_ids" in single and set(single) <= token_inputs and all(tensor.ndim == 2 for tensor in single.values()):
        return {name: tensor[:, :PROBE_TOKENS] for name, tensor in single.items()}
    return single


def split_batches(batches: list[Batch], size: int) -> list[Batch]:
    """The same samples in smaller batches, in the same order.

    Args:
        batches: any.
        size: samples of a batch, at most.
    """
    return [
        {name: tensor[start : start + size] for name, tensor in batch.items()}
        for batch in batches
        for start in range(0, len(next(iter(batch.values()))), size)
    ]


def spread_samples(batches: list[Batch], count: int) -> list[Batch]:
    """Some of the samples, spread evenly over all, in their order and in batches no larger than those before.

    Args:
        batches: any.
        count: how many; all, if there are no more.
    """
    size = max(len(next(iter(batch.values()))) for batch in batches)
    samples = split_batches(batches, 1)
    count = min(count, len(samples))
    merged: list[list[Batch]] = []
    for sample in (samples[index * len(samples) // count] for index in range(count)):
        alike = merged and len(merged[-1]) < size and _shapes(merged[-1][0]) == _shapes(sample)
        if not alike:
            merged.append([])
        merged[-1].append(sample)
    return [{name: torch.cat([one[name] for one in some]) for name in some[0]} for some in merged]


def _shapes(batch: Batch) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in batch.items()}
