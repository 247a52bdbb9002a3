"""Batches of model inputs: dictionaries of tensors whose dim 0 is the sample.

A batch of one sample may contain tensors of another length, such as the patches of its images, [patches, features].
"""

import hashlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import MoonshotError, require

Batch = dict[str, Tensor]

SAMPLE_DIMS = {"input_ids": 1, "pixel_values": 3}  # main model input → number of dimensions of one sample
PACKED = {"image_grid_thw": "pixel_values", "video_grid_thw": "pixel_values_videos"}  # rows [t, h, w] → their patches
TOKEN_INPUTS = {"input_ids", "attention_mask", "token_type_ids", "labels"}
PROBE_TOKENS = 16
IGNORED = -100  # the label of a token that is not predicted
INPUTS = "give dictionaries of model inputs, such as {'input_ids': tensor}, or pairs of inputs and labels"


def as_batch(item: Any, what: str, single: bool) -> Batch:
    """Tensors with a batch dimension by name, on the CPU, from a dictionary or from a pair of inputs and labels.

    NaN and tensors of unequal length are errors, in which `what` names the item. `single` declares a sample without a
    batch dimension; for the inputs in `SAMPLE_DIMS` this follows from the number of dimensions.
    """
    if isinstance(item, list | tuple) and len(item) == 2 and hasattr(item[0], "ndim"):
        item = {"pixel_values" if item[0].ndim in (3, 4) else "inputs": item[0], "labels": item[1]}
    if not isinstance(item, Mapping):
        raise MoonshotError(f"{what} is a {type(item).__name__}", hint=INPUTS)
    batch = {name: _as_tensor(value, f"{what}: {name}") for name, value in item.items() if value is not None}
    require(len(batch) > 0, f"{what} is empty", hint=INPUTS)
    main = next((name for name in SAMPLE_DIMS if name in batch), next(iter(batch)))
    packed = {name for pair in PACKED.items() if pair[0] in batch for name in pair}
    if single or batch[main].ndim <= SAMPLE_DIMS.get(main, 1):
        batch = {name: tensor if name in packed else tensor[None] for name, tensor in batch.items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in batch.items()}
    equal = len({shape[:1] for name, shape in shapes.items() if name not in packed}) == 1
    one_sample = main == "input_ids" and len(batch[main]) == 1
    require(equal or one_sample, f"{what} has the shapes {shapes}", hint="dim 0 of every tensor must be the sample")
    ids, mask = batch.get("input_ids"), batch.get("attention_mask")
    if ids is None or mask is None or mask.ndim != 2:
        return batch
    if mask.shape != ids.shape[:2]:
        message = f"{what}: attention_mask of {shapes['attention_mask']} for input_ids of {shapes['input_ids']}"
        raise MoonshotError(message, hint="give one entry for each token")
    visible = bool((mask != 0).any(1).all())
    require(visible, f"{what}: attention_mask hides all tokens of a sample", hint="leave that sample out")
    return batch


def unpack(batch: Batch, what: str) -> list[Batch]:
    """Split a batch into single samples if its images are packed into one row of patches."""
    grids = [(grid, patches) for grid, patches in PACKED.items() if grid in batch]
    samples = batch_size(batch)
    if not grids or samples == 1:
        return [batch]
    single: list[Batch] = [{} for _ in range(samples)]
    for name, tensor in batch.items():
        if all(name not in pair for pair in grids):
            for sample, row in zip(single, tensor.split(1), strict=True):
                sample[name] = row
    for grid, patches in grids:
        if len(batch[grid]) != samples:
            ambiguous = f"{grid} has {len(batch[grid])} rows for {samples} samples, which does not assign the images"
            raise MoonshotError(f"{what}: {ambiguous}", hint="give one image for each sample, or one sample at a time")
        lengths = batch[grid].prod(1).tolist()
        for i, image in enumerate(batch[patches].split(lengths)):
            single[i] |= {grid: batch[grid][i : i + 1], patches: image}
    return single


def _as_tensor(value: Any, what: str) -> Tensor:
    if isinstance(value, str | bool):
        raise MoonshotError(f"{what}={value!r}", hint="give a tensor or a list of numbers")
    try:
        tensor = torch.as_tensor(value).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise MoonshotError(f"{what}: give a tensor, or lists of numbers of equal length ({error})") from error
    require(tensor.layout is torch.strided, f"{what} is of layout {tensor.layout}", hint="give a dense tensor")
    tensor = tensor.clone() if tensor.is_inference() else tensor  # inference tensors do not support a backward pass
    require(tensor.numel() > 0, f"{what} has shape {tuple(tensor.shape)}, which is empty", hint="leave it out")
    finite = not tensor.is_floating_point() or not bool(tensor.isnan().any())
    require(finite, f"{what} contains NaN", hint="give finite numbers")
    return tensor


def digest(batches: list[Batch]) -> str:
    """SHA-256 of the keys, shapes, dtypes and bytes of all samples in order, in batches of any size."""
    sha = hashlib.sha256()
    for sample in map(without_padding, split_batches(batches, 1)):
        for name, tensor in sorted(sample.items()):
            if name != "attention_mask" or not bool(tensor.all()):  # only batches with padding have one
                sha.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
                row = tensor.clone(memory_format=torch.contiguous_format).flatten()
                sha.update(row.view(torch.uint8).numpy().data)
    return sha.hexdigest()


def sample_digests(batch: Batch) -> list[str]:
    """SHA-256 of the inputs of each sample without padding, in a batch of any size."""
    samples = [without_padding(sample) for sample in split_batches([batch], 1)]
    counted = ("attention_mask", "labels")
    return [digest([{k: v.cpu() for k, v in sample.items() if k not in counted}]) for sample in samples]


def batch_size(batch: Batch) -> int:
    """The number of samples, by the main input: tensors of a single sample may have other lengths."""
    return len(batch[next((name for name in SAMPLE_DIMS if name in batch), next(iter(batch)))])


def sample_count(batches: Sequence[Batch]) -> int:
    """The number of samples in all batches."""
    return sum(map(batch_size, batches))


def take(batch: Batch, start: int, stop: int) -> Batch:
    """The samples `start` to `stop` of a batch; a batch of one sample is returned whole."""
    if batch_size(batch) == 1:
        return batch
    return {name: tensor[start:stop] for name, tensor in batch.items()}


def shorten(batch: Batch, samples: int = 1, tokens: int = PROBE_TOKENS) -> Batch:
    """At most the first `samples` of a batch, cut to a few tokens if tokens are the only inputs.

    `tokens` are counted from the first that all samples predict, by its label or, without labels, as the second after
    padding: prompts may have no labels, and padding has none. If a sample has no such token, nothing is cut.
    """
    batch = take(batch, 0, samples)
    if not ("input_ids" in batch and set(batch) <= TOKEN_INPUTS and all(tensor.ndim == 2 for tensor in batch.values())):
        return batch
    predicted = torch.ones(1, 1, dtype=torch.bool)
    if "labels" in batch:
        predicted = batch["labels"][:, 1:] != IGNORED
    elif "attention_mask" in batch:
        predicted = (batch["attention_mask"][:, 1:] != 0) & (batch["attention_mask"][:, :-1] != 0)
    if not bool(predicted.any(1).all()):
        return batch
    end = int(predicted.int().argmax(1).max()) + tokens
    return {name: tensor[:, :end] for name, tensor in batch.items()}


def split_batches(batches: Iterable[Batch], size: int) -> list[Batch]:
    """The same samples in batches of at most `size`, in the same order."""
    return [take(batch, start, start + size) for batch in batches for start in range(0, batch_size(batch), size)]


def samples_between(batches: list[Batch], start: int, stop: int) -> list[Batch]:
    """The samples `start` to `stop`, counted over all batches, in the same order and batches."""
    selected, first = [], 0
    for batch in batches:
        size = batch_size(batch)
        low, high = max(0, start - first), min(size, stop - first)
        if low < high:
            selected.append(batch if high - low == size else take(batch, low, high))
        first += size
    return selected


def cut_batches(batches: list[Batch], sizes: list[int]) -> list[Batch]:
    """The same samples in the same order, in batches that do not cross the ends of consecutive parts of these sizes."""
    ends = itertools.accumulate(sizes, initial=0)
    return [batch for start, stop in itertools.pairwise(ends) for batch in samples_between(batches, start, stop)]


def without_padding(batch: Batch) -> Batch:
    """A single sample without the masked tokens at either end."""
    mask = batch.get("attention_mask")
    if mask is None or mask.ndim != 2 or len(mask) != 1 or bool(mask.all()) or not bool(mask.any()):
        return batch
    visible = mask[0].nonzero()
    inside = slice(int(visible[0]), int(visible[-1]) + 1)
    aligned = {name for name in batch if name in TOKEN_INPUTS and batch[name].shape == mask.shape}
    return {name: tensor[:, inside] if name in aligned else tensor for name, tensor in batch.items()}


def spread_samples(batches: list[Batch], count: int, without: int = 0) -> list[Batch]:
    """At most `count` evenly spaced samples, in order, in batches that are not larger than the original ones.

    Before that, `without` evenly spaced samples are excluded, unless these are all samples.
    """
    size = max(map(batch_size, batches))
    samples = split_batches(batches, 1)
    if without < len(samples):
        excluded = {index * len(samples) // without for index in range(without)}
        samples = [sample for index, sample in enumerate(samples) if index not in excluded]
    count = min(count, len(samples))
    merged: list[list[Batch]] = []
    shapes: dict[str, torch.Size] | None = None
    for sample in (samples[index * len(samples) // count] for index in range(count)):
        previous, shapes = shapes, {name: tensor.shape for name, tensor in sample.items()}
        if shapes != previous or len(merged[-1]) == size:
            merged.append([])
        merged[-1].append(sample)
    return [{name: torch.cat([one[name] for one in group]) for name in group[0]} for group in merged]
