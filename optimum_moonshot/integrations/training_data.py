"""Calibration batches from the training data of a `Trainer`."""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from ..model.losses import IGNORED

# Further inputs of flash attention, for samples of a batch that are concatenated in one row.
FLATTENED = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}


def training_inputs(dataloader: Any, size: int, seed: int) -> Iterator[dict[str, Tensor]]:
    """Yield random samples of a data loader's data set through its collator; the loader is unchanged.

    Args:
        dataloader: of torch; a stream is read from its start.
        size: samples per batch.
        seed: of the order.
    """
    dataset, examples = dataloader.dataset, None
    if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(seed)).tolist()
        examples = (dataset[index] for index in order)
    else:
        examples = iter(dataset)
    while chunk := list(islice(examples, size)):
        for batch in collated(dataloader.collate_fn, chunk):
            selected = labelled(batch)
            if selected is not None:
                yield selected


def collated(collate: Callable[[list[Any]], Any], samples: list[Any]) -> list[dict[str, Any]]:
    """Collate samples to one batch, or to one each if the collator concatenates them in one row.

    Args:
        collate: list of samples → batch.
        samples: of one batch.
    """
    batch = dict(collate(samples))
    if FLATTENED.isdisjoint(batch):
        return [batch]
    batches = [batch] if len(samples) == 1 else [dict(collate([sample])) for sample in samples]
    return [{name: value for name, value in batch.items() if name not in FLATTENED} for batch in batches]


def labelled(batch: dict[str, Any]) -> dict[str, Any] | None:
    """Select the samples of a batch with labels to predict; None if there are none."""
    labels = batch.get("labels")
    if not isinstance(labels, Tensor) or labels.ndim != 2:
        return batch
    rows = (labels[:, 1:] != IGNORED).any(1)
    if bool(rows.all()):
        return batch
    return {name: value[rows] for name, value in batch.items()} if bool(rows.any()) else None
