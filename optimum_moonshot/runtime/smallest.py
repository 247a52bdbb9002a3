"""Pack a weight without a record of its pattern, such as one that vLLM merged from several, or sharded."""

import logging
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import MoonshotError
from ..objective.grid import Grid
from ..objective.patterns import NM
from ..packing import Codec, Quantized, find_codec
from ..packing.codec import Parts

_log = logging.getLogger(__name__)
_FORMAT = "bitmask"
_WINDOWS = (4, 8, 16, 32)  # candidates for m: n:m needs no row offsets, unlike unstructured nonzeros
_FILLED = 1 / 64  # largest fraction of zeros among the values that n:m stores
_SAMPLE = 64  # rows that rule out n:m for most weights


class Packed(NamedTuple):
    """A packed matrix."""

    codec: Codec
    parts: Parts  # in host memory


def pack_if_smaller(matrix: Tensor, grid: Grid | None = None) -> Packed | None:
    """Pack a matrix [d_out, d_in], of 16 bits or more and on any device; None if the result is not smaller.

    The result has its n:m pattern if there is one, and otherwise exactly its nonzeros. On a `grid` in the dtype of the
    matrix, its codes are packed; with a warning, its values if it is not on that grid, as the part of a row is whose
    inputs do not start with a group.
    """
    matrix = matrix.detach().cpu().contiguous()
    pattern = find_pattern(matrix)
    if grid is not None:
        quantized = Quantized.of(grid)
        try:
            return Packed(quantized, quantized.pack(matrix, pattern))
        except MoonshotError as error:
            _log.warning("a weight is packed without integer codes: %s", error)
    codec = find_codec(_FORMAT)
    if codec.packed_bytes(matrix, pattern) >= matrix.nbytes:
        return None
    return Packed(codec, codec.pack(matrix, pattern))


def find_pattern(matrix: Tensor) -> NM | None:
    """The n:m of a matrix with the smallest m; None if storing it that way would store many zeros."""
    keep = matrix != 0
    stored = int(keep.sum())
    for m in _WINDOWS:
        if matrix.shape[1] % m or not stored:
            continue
        for rows in (keep[:_SAMPLE], keep):
            n = int(rows.reshape(-1, m).sum(1, dtype=torch.uint8).max())
            if keep.numel() // m * n > stored * (1 + _FILLED):
                break
        else:
            return NM(n, m)
    return None
