"""Pack a weight without a record of its pattern, such as one that vLLM merged from several, or sharded."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import MoonshotError
from ..objective.grid import BLOCK, Grid
from ..objective.patterns import NM
from ..packing import Codec, Quantized, find_codec
from ..packing.bitmask import fullest_window, pack_bits, popcounts
from ..packing.codec import Parts

_FORMAT = "bitmask"
_WINDOWS = (4, 8, 16, 32)  # candidates for m: n:m needs no row offsets, unlike unstructured nonzeros
_FILLED = 1 / 64  # largest fraction of zeros among the values that n:m stores
_SAMPLE = 64  # rows that rule out n:m for most weights
_PROBED = 4  # rows that rule out a grid for most weights, where restoring scales is slow


class Packed(NamedTuple):
    """A packed matrix."""

    codec: Codec
    parts: Parts  # in host memory


def pack_if_smaller(matrix: Tensor, grids: Sequence[Grid] = ()) -> Packed | None:
    """Pack a matrix; None if the result is not smaller.

    The result has its n:m pattern if there is one, and otherwise exactly its nonzeros: integer codes if the matrix is
    on one of the grids, and else its values.

    Args:
        matrix: [d_out, d_in], of 16 bits or more and on any device.
        grids: grids to try in this order, in any dtype. A part of the inputs that starts within a group has smaller
            groups, of 64 or a multiple that divides the group, or is on no grid if it starts within a block of 64.
    """
    matrix = matrix.detach().cpu().contiguous()
    pattern = find_pattern(matrix)
    for grid in _with_smaller_groups(grids, matrix.dtype):
        quantized = Quantized.of(grid)
        try:
            grid.scales_of(matrix[:: max(1, len(matrix) // _PROBED)])
            return Packed(quantized, quantized.pack(matrix, pattern))
        except MoonshotError:
            continue
    codec = find_codec(_FORMAT)
    if codec.packed_bytes(matrix, pattern) >= matrix.nbytes:
        return None
    return Packed(codec, codec.pack(matrix, pattern))


def _with_smaller_groups(grids: Sequence[Grid], dtype: torch.dtype) -> Iterator[Grid]:
    """The grids with their own groups, and with smaller ones that divide these, large ones first."""
    for grid in grids:
        for group in range(grid.group, 0, -BLOCK):
            if grid.group % group == 0:
                yield replace(grid, group=group, dtype=dtype)


def find_pattern(matrix: Tensor) -> NM | None:
    """The n:m of a matrix in host memory with the smallest m; None if storing it that way would store many zeros."""
    meta = pack_bits(matrix != 0)
    stored = int(popcounts(meta.device)[meta.int()].sum())
    for m in _WINDOWS:
        if matrix.shape[1] % m or not stored:
            continue
        for rows in (meta[:_SAMPLE], meta):
            n = fullest_window(rows, m)
            if matrix.numel() // m * n > stored * (1 + _FILLED):
                break
        else:
            return NM(n, m)
    return None
