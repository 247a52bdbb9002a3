"""Ranges of rows and columns, cut into pieces that pass together."""

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
    return split_range(rows.start, rows.stop, max(1, slice_bytes(device) // bytes_per_row))


def slice_bytes(device: torch.device) -> int:
    """What the intermediates of a slice may take on a device."""
    return CPU_BYTES if device.type == "cpu" else GPU_BYTES
