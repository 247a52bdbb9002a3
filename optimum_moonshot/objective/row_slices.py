"""Ranges of rows and columns, split into slices of bounded memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch

# Intermediates of a slice of rows: near the size of the caches of a CPU, large enough to occupy a GPU.
CPU_BYTES = 64 * 2**20
GPU_BYTES = 1024 * 2**20


@dataclass(eq=False)
class SliceLimit:
    """The limit on a solver's slices with several rows, which a run lowers when its device is out of memory."""

    most: int | None = None  # bytes; None sets no limit
    largest: int = 0  # bytes of the largest such slice so far


_LIMIT: ContextVar[SliceLimit | None] = ContextVar("limit of slices of rows", default=None)


@contextmanager
def limited(limit: SliceLimit) -> Iterator[None]:
    """Apply a limit to the results of `slices_within` and `row_slices` in this thread, inside the block.

    Work that needs little memory beside a solver's, such as a selection, uses `split_within`: smaller slices of it
    would not help a solver whose device is out of memory.
    """
    token = _LIMIT.set(limit)
    try:
        yield
    finally:
        _LIMIT.reset(token)


def split_range(start: int, stop: int, width: int) -> list[slice]:
    """Split [start, stop) into slices of `width` indices; the last one has the remainder."""
    return [slice(first, min(first + width, stop)) for first in range(start, stop, width)]


def split_within(rows: int, bytes_per_row: int, most: int) -> list[slice]:
    """Split [0, rows) into slices of at most `most` bytes and at least one row, whatever `limited` allows."""
    return split_range(0, rows, max(1, most // bytes_per_row))


def row_slices(rows: slice, bytes_per_row: int, device: torch.device) -> list[slice]:
    """Like `slices_within`, but with intermediates that fit `CPU_BYTES` or `GPU_BYTES`."""
    return slices_within(rows, bytes_per_row, slice_bytes(device))


def slices_within(rows: slice, bytes_per_row: int, most: int) -> list[slice]:
    """Split rows (with start and stop) into slices of at most `most` bytes, or what `limited` allows if that is less.

    A slice has at least one row.
    """
    limit = _LIMIT.get() or SliceLimit()
    width = max(1, (most if limit.most is None else min(most, limit.most)) // bytes_per_row)
    together = min(width, rows.stop - rows.start)
    if together > 1:
        limit.largest = max(limit.largest, together * bytes_per_row)
    return split_range(rows.start, rows.stop, width)


def slice_bytes(device: torch.device) -> int:
    """Limit on the intermediates of a slice on a device."""
    return CPU_BYTES if device.type == "cpu" else GPU_BYTES
