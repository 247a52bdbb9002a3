"""Whether the product of one row of inputs, as in decoding, is faster with a "bitmask" matrix than with a dense one.

Uses measured thresholds where there are any (benchmarks/results/runtime-sets.json, docs/measured.md), and otherwise
measures once for every shape.
"""

import torch

from ..objective.patterns import NM
from .codec import Codec, Verdict
from .timing import LEAST, kernel_lacks, kernel_name, timed_verdict

# Largest packed size, as a fraction of the dense size, at which one row was at least 10% faster, by instruction set and
# bytes of a weight. This is a sparsity of 20% in 16 bits, and of 40% to 50% in 32 bits, where the dense product already
# reaches the memory bandwidth. A few rows more gain less, and many rows lose nothing significant.
_WIDE = {2: 0.87, 4: 0.64}
_MOST = {"avx2": {2: 0.87, 4: 0.55}, "avx512": _WIDE, "vbmi2": _WIDE, "amx": _WIDE}


def decoding(
    codec: Codec,
    shape: tuple[int, int],
    pattern: NM | None,
    fraction: float,
    dtype: torch.dtype,
    device: torch.device,
) -> Verdict:
    """`Codec.decoding` of the format, whose codec is an argument since its module imports this one."""
    lacks = kernel_lacks("bitmask", dtype, device)
    if lacks is not None:
        return Verdict(False, lacks)
    if shape[0] * shape[1] < LEAST:
        return Verdict(False, f"smaller than {LEAST} weights")
    name = kernel_name(device)
    if name in _MOST:
        most = _MOST[name][dtype.itemsize]
        why = f"{name} kernels" if fraction <= most else f"more than {most:.0%} of the bytes are left"
        return Verdict(fraction <= most, why)
    share = fraction - 1 / (8 * dtype.itemsize)
    return timed_verdict(codec, shape, pattern, share, dtype, device, name)
