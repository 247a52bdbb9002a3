"""Ranges of rows and columns, cut into pieces that pass together."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

# Intermediates of one slice of rows: few enough on a CPU to stay near its cache, while a GPU wants many at a time.
CPU_BYTES = 64 * 2**20
GPU_BYTES = 1024 * 2**20


def split_range(start: int, stop: int, width: int) -> list[slice]:
    """[start, stop) in pieces.

    Args:
        start: the first index.
        stop: one more than the last.
        width: indices of a piece, at least 1; the last piece has what is left.
    """
    return [slice(first, min(first + width, stop)) for first in range(start, stop, width)]


def row_slices(rows: slice, bytes_per_row: int, device: torch.device) -> list[slice]:
    """Rows in pieces whose intermediates pass together, within `CPU_BYTES` or `GPU_BYTES`.

    Args:
        rows: with start and stop.
        bytes_per_row: of intermediates.
        device: of the work.
    """
    return slices_within(rows, bytes_per_row, slice_bytes(device))


def slices_within(rows: slice, bytes_per_row: int, most: int) -> list[slice]:
    """Rows in pieces of so many bytes at most, or of what `cutting` says, if that is less; at least one row each.

    Args:
        rows: with start and stop.
        bytes_per_row: of intermediates.
        most: bytes of a piece.
    """
    cuts = _cutting[-1]
    width = max(1, (most if cuts.most is None else min(most, cuts.most)) // bytes_per_row)
    together = min(width, rows.stop - rows.start)
    if together > 1:
        cuts.largest = max(cuts.largest, together * bytes_per_row)
    return split_range(rows.start, rows.stop, width)


@dataclass
class Cuts:
    """The slices that some work cuts."""

    most: int | None = None  # bytes of one that has several rows; None is what each asks for
    largest: int = 0  # bytes of the largest one of several rows


_cutting = [Cuts()]


@contextmanager
def cutting(most: int | None) -> Iterator[Cuts]:
    """Meanwhile slices are no larger than that, and the largest one is known.

    Args:
        most: bytes of a slice of several rows; None sets no limit.
    """
    _cutting.append(Cuts(most))
    try:
        yield _cutting[-1]
    finally:
        _cutting.pop()


def slice_bytes(device: torch.device) -> int:
    """What the intermediates of a slice may take on a device."""
    return CPU_BYTES if device.type == "cpu" else GPU_BYTES
