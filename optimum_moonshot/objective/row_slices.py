"""Ranges of rows and columns, split into slices of bounded memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

# Intermediates of a slice of rows: near the size of the caches of a CPU, large enough to occupy a GPU.
CPU_BYTES = 64 * 2**20
GPU_BYTES = 1024 * 2**20


def split_range(start: int, stop: int, width: int) -> list[slice]:
    """Split [start, stop) into slices.

    Args:
        start: the first index.
        stop: one more than the last.
        width: indices of a slice, at least 1; the last slice has the remainder.
    """
    return [slice(first, min(first + width, stop)) for first in range(start, stop, width)]


def row_slices(rows: slice, bytes_per_row: int, device: torch.device) -> list[slice]:
    """Split rows into slices whose intermediates fit `CPU_BYTES` or `GPU_BYTES`.

    Args:
        rows: with start and stop.
        bytes_per_row: of intermediates.
        device: of the computation.
    """
    return slices_within(rows, bytes_per_row, slice_bytes(device))


def slices_within(rows: slice, bytes_per_row: int, most: int) -> list[slice]:
    """Split rows into slices of at most `most` bytes, or the limit of `cutting` if that is less; at least one row each.

    Args:
        rows: with start and stop.
        bytes_per_row: of intermediates.
        most: bytes of a slice.
    """
    cuts = _cutting[-1]
    width = max(1, (most if cuts.most is None else min(most, cuts.most)) // bytes_per_row)
    together = min(width, rows.stop - rows.start)
    if together > 1:
        cuts.largest = max(cuts.largest, together * bytes_per_row)
    return split_range(rows.start, rows.stop, width)


@dataclass
class Cuts:
    """The limit on slices, and the largest slice so far."""

    most: int | None = None  # bytes of a slice with several rows; None sets no limit
    largest: int = 0  # bytes of the largest slice with several rows


_cutting = [Cuts()]


@contextmanager
def cutting(most: int | None) -> Iterator[Cuts]:
    """Limit slices inside the context, and record the largest.

    Args:
        most: bytes of a slice of several rows; None sets no limit.
    """
    _cutting.append(Cuts(most))
    try:
        yield _cutting[-1]
    finally:
        _cutting.pop()


def slice_bytes(device: torch.device) -> int:
    """Limit on the intermediates of a slice on a device."""
    return CPU_BYTES if device.type == "cpu" else GPU_BYTES
