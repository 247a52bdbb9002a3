"""Pack a weight of which only its numbers are known, such as one that was merged from several, or cut to a part."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..objective.patterns import NM
from ..packing import Codec, find_codec
from ..packing.codec import Parts

_FORMAT = "bitmask"
_WINDOWS = (4, 8, 16, 32)  # m of the n:m that is looked for: rows of one length need no offsets
_FILLED = 1 / 64  # of the values that n:m stores, at most so many are zeros
_SAMPLE = 64  # rows that show what most weights are not


class Packed(NamedTuple):
    """A packed matrix."""

    codec: Codec
    parts: Parts  # in host memory


def pack_if_smaller(matrix: Tensor) -> Packed | None:
    """A matrix packed, if that takes fewer bytes.

    Args:
        matrix: [d_out, d_in], floating point of 16 bits or more, on any device.

    Returns:
        Its tensors, of n:m where it is one, otherwise exactly its nonzeros; None: it takes no fewer bytes.
    """
    matrix, codec = matrix.detach().cpu().contiguous(), find_codec(_FORMAT)
    pattern = find_pattern(matrix)
    if codec.packed_bytes(matrix, pattern) >= matrix.nbytes:
        return None
    return Packed(codec, codec.pack(matrix, pattern))


def find_pattern(matrix: Tensor) -> NM | None:
    """The n:m with the least m that a matrix has; None where storing it as such would store many zeros.

    Args:
        matrix: [d_out, d_in], in host memory.
    """
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
