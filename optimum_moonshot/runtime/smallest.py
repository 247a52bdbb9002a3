"""Pack a weight without a record of its pattern, such as one that vLLM merged from several, or sharded."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..objective.patterns import NM
from ..packing import Codec, find_codec
from ..packing.codec import Parts

_FORMAT = "bitmask"
_WINDOWS = (4, 8, 16, 32)  # candidates for m: n:m needs no row offsets, unlike unstructured nonzeros
_FILLED = 1 / 64  # largest fraction of zeros among the values that n:m stores
_SAMPLE = 64  # rows that rule out n:m for most weights


class Packed(NamedTuple):
    """A packed matrix."""

    codec: Codec
    parts: Parts  # in host memory


def pack_if_smaller(matrix: Tensor) -> Packed | None:
    """Pack a matrix [d_out, d_in], of 16 bits or more and on any device; None if the result is not smaller.

    The result has its n:m pattern if there is one, and otherwise exactly its nonzeros.
    """
    matrix, codec = matrix.detach().cpu().contiguous(), find_codec(_FORMAT)
    pattern = find_pattern(matrix)
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
