"""Batches of model inputs: dictionaries of tensors whose dim 0 is the sample.

A batch of one sample may hold tensors of other lengths: all of them are the sample's, such as the patches of its images
in one row, [patches, features].
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import MoonshotError, require

Batch = dict[str, Tensor]

INPUT_RANKS = {"input_ids": 1, "pixel_values": 3}  # main model inputs, and the dimensions of one sample
PACKED = {
    "image_grid_thw": "pixel_values",
    "video_grid_thw": "pixel_values_videos",
}  # rows [t, h, w], and their patches
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
    packed = {name for pair in PACKED.items() if pair[0] in batch for name in pair}
    if single or batch[main].ndim <= INPUT_RANKS.get(main, 1):
        batch = {name: tensor if name in packed else tensor[None] for name, tensor in batch.items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in batch.items()}
    same = len({shape[:1] for name, shape in shapes.items() if name not in packed}) == 1
    own = main == "input_ids" and len(batch[main]) == 1  # all of it is one sample's
    require(same or own, f"{what} has the shapes {shapes}: dim 0 of every tensor must be the sample")
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


def unpack(batch: Batch, what: str) -> list[Batch]:
    """A batch with the patches of all its images in one row as batches of one sample each; any other as it is.

    Args:
        batch: of `as_batch`.
        what: names it in errors.

    Raises:
        MoonshotError: several samples whose images are not one each.
    """
    grids = [(grid, patches) for grid, patches in PACKED.items() if grid in batch]
    samples = batch_size(batch)
    if not grids or samples == 1:
        return [batch]
    own: list[Batch] = [{} for _ in range(samples)]
    for name, tensor in batch.items():
        if all(name not in pair for pair in grids):
            for sample, part in zip(own, tensor.split(1), strict=True):
                sample[name] = part
    for grid, patches in grids:
        shown = len(batch[grid]) == samples
        require(
            shown,
            f"{what}: {grid} has {len(batch[grid])} rows for {samples} samples, which does not show whose image is "
            "whose: give one image for each sample, or one sample at a time",
        )
        lengths = batch[grid].prod(1).tolist()
        for i, part in enumerate(batch[patches].split(lengths)):
            own[i] |= {grid: batch[grid][i : i + 1], patches: part}
    return own


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


def batch_size(batch: Batch) -> int:
    """The samples of a batch. One alone may have tensors of other lengths beside its tokens: patches of its images."""
    return len(batch[next((name for name in INPUT_RANKS if name in batch), next(iter(batch)))])


def take(batch: Batch, start: int, stop: int) -> Batch:
    """The samples `start` to `stop` of a batch; one that is its batch's only one is taken whole.

    Args:
        batch: any.
        start: the first sample taken.
        stop: the one after the last.
    """
    if batch_size(batch) == 1:
        return batch
    return {name: tensor[start:stop] for name, tensor in batch.items()}


TOKEN_INPUTS = {"input_ids", "attention_mask", "token_type_ids", "labels"}


def shorten(batch: Batch, samples: int = 1) -> Batch:
    """A batch's first samples, cut to a few tokens where nothing but tokens goes in.

    Args:
        batch: any.
        samples: how many, at most.
    """
    first = take(batch, 0, samples)
    if "input_ids" in first and set(first) <= TOKEN_INPUTS and all(tensor.ndim == 2 for tensor in first.values()):
        return {name: tensor[:, :PROBE_TOKENS] for name, tensor in first.items()}
    return first


def split_batches(batches: list[Batch], size: int) -> list[Batch]:
    """The same samples in smaller batches, in the same order.

    Args:
        batches: any.
        size: samples of a batch, at most.
    """
    return [take(batch, start, start + size) for batch in batches for start in range(0, batch_size(batch), size)]


def samples_between(batches: list[Batch], start: int, stop: int) -> list[Batch]:
    """Some samples of all batches, in their order; a batch with an end of them inside is cut there.

    Args:
        batches: any.
        start: the number of the first sample among all.
        stop: of the one after the last.
    """
    found, first = [], 0
    for batch in batches:
        size = batch_size(batch)
        low, high = max(0, start - first), min(size, stop - first)
        if low < high:
            found.append(batch if high - low == size else take(batch, low, high))
        first += size
    return found


def without_padding(batch: Batch) -> Batch:
    """A single sample without the tokens that its mask leaves out at either end."""
    mask = batch.get("attention_mask")
    if mask is None or mask.ndim != 2 or len(mask) != 1 or bool(mask.all()) or not bool(mask.any()):
        return batch
    kept = mask[0].nonzero()
    part = slice(int(kept[0]), int(kept[-1]) + 1)
    tokens = mask.shape[1]
    aligned = {name for name in batch if name in TOKEN_INPUTS and batch[name].shape == (1, tokens)}
    return {name: tensor[:, part] if name in aligned else tensor for name, tensor in batch.items()}


def spread_samples(batches: list[Batch], count: int) -> list[Batch]:
    """Some of the samples, spread evenly over all, in their order and in batches no larger than those before.

    Args:
        batches: any.
        count: how many; all, if there are no more.
    """
    size = max(map(batch_size, batches))
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
