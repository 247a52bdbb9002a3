"""Ranges of rows and columns that pass together."""

import torch

# Intermediates of one slice of rows: few enough on a CPU to stay near its cache, while a GPU wants many at a time.
CPU_BYTES = 64 * 2**20
GPU_BYTES = 1024 * 2**20


def ranges(start: int, stop: int, width: int) -> list[slice]:
    """[start, stop) in pieces of `width`, the last one shorter."""
    return [slice(first, min(first + width, stop)) for first in range(start, stop, width)]


def slices(rows: slice, bytes_per_row: int, device: torch.device) -> list[slice]:
    """Rows in pieces whose intermediates, of `bytes_per_row` each, pass together."""
    limit = CPU_BYTES if device.type == "cpu" else GPU_BYTES
    return ranges(rows.start, rows.stop, max(1, limit // bytes_per_row))
