"""Whether a matrix in the format "bitmask" is multiplied faster than a dense one, by the one row that a decoder has.

Where the product was measured (benchmarks/results/runtime-sets.json, docs/measured.md), by the figures; elsewhere by
trying it once for every size of matrix.
"""

import time
from collections.abc import Callable
from functools import lru_cache, partial
from statistics import median

import torch
from torch import Tensor
from torch.nn import functional

from ..kernels import find_gpu_kernels, find_library
from ..objective.patterns import NM
from .bitmask import find_offsets, find_window, pack
from .bitmask_product import packed_linear
from .codec import Verdict

# Packed bytes, in dense ones, up to which one row was a tenth faster or more, by instruction set and bytes of a weight.
# In 16 bits that is a fifth of zeros; in 32 bits, where the dense product is as fast as memory allows, two fifths, or
# half. Some rows more gain less, many lose nothing that counts.
_WIDE = {2: 0.87, 4: 0.64}
_MOST = {"avx2": {2: 0.87, 4: 0.55}, "avx512": _WIDE, "vbmi2": _WIDE, "amx": _WIDE}
_SLOWER = ("portable",)  # 0.05 to 0.25 times the dense product, whatever the sparsity
_LEAST = 1 << 18  # weights: the call itself takes 30 microseconds longer, a dense product of a cached matrix less
_TRIED = 1 << 24  # weights at most, when it is tried
_CYCLED = 1 << 28  # bytes of dense matrices, which no cache holds
_ROUNDS = 30


def decoding(
    shape: tuple[int, int], pattern: NM | None, share: float, dtype: torch.dtype, device: torch.device
) -> Verdict:
    """As `Codec.decoding`.

    Args:
        shape: d_out, d_in.
        pattern: the n:m that every row has; None where rows differ.
        share: bytes of the packed tensors, in bytes of the dense matrix.
        dtype: of the values and the inputs.
        device: that they are on.
    """
    lacks = _lacks(dtype, device)
    if lacks is not None:
        return Verdict(False, lacks)
    if shape[0] * shape[1] < _LEAST:
        return Verdict(False, f"smaller than {_LEAST} weights")
    library = find_library() if device.type == "cpu" else None
    name = "Triton" if library is None else library.instruction_set
    if name in _MOST:
        most = _MOST[name][dtype.itemsize]
        why = f"{name} kernels" if share <= most else f"more than {most:.0%} of the bytes are left"
        return Verdict(share <= most, why)
    gain = _gain(shape, pattern, round(share, 2), dtype, device)
    return Verdict(gain > 1, f"{name} kernels, {gain:.2f} times the dense speed when tried")


def _lacks(dtype: torch.dtype, device: torch.device) -> str | None:
    """What is missing for a kernel that could be faster; None where nothing is."""
    if device.type == "cpu":
        library = find_library()
        if library is None:
            return "no compiled kernel here"
        if library.instruction_set in _SLOWER:
            return f"the {library.instruction_set} kernel is slower"
        return None if library.computes(dtype) else f"no kernel for {dtype}"
    if device.type != "cuda":
        return f"no kernel for {device.type}"
    if find_gpu_kernels() is None:
        return "no kernel for cuda: Triton is missing"
    return None if dtype.itemsize <= 4 else f"no kernel for {dtype}"


@lru_cache
def _gain(shape: tuple[int, int], pattern: NM | None, share: float, dtype: torch.dtype, device: torch.device) -> float:
    """Times that one row is multiplied faster by a random packed matrix than by a dense one, in turns.

    Args:
        shape, pattern, share, dtype, device: as for `decoding`.
    """
    d_in = shape[1]
    d_out = max(1, min(shape[0], _TRIED // d_in))
    with torch.device("cpu"), torch.random.fork_rng([]), torch.no_grad():
        torch.manual_seed(0)
        scores = torch.rand(d_out, d_in)
        keep = scores < share - 1 / (8 * dtype.itemsize) if pattern is None else pattern.keep(scores)
        weight = torch.where(keep, torch.randn(d_out, d_in), 0).to(dtype)
        values, meta = (part.to(device) for part in pack(weight, pattern))
        offsets, window = find_offsets(values, meta, d_in), find_window(values, meta, d_in)
        dense, inputs = weight.to(device), torch.randn(1, d_in).to(device, dtype)
        copies = max(1, _CYCLED // dense.nbytes)
        matrices = [dense.clone() for _ in range(copies)]
        packed = [(values.clone(), meta.clone()) for _ in range(copies)]
        calls = [
            (partial(functional.linear, inputs, each), partial(packed_linear, inputs, *ours, offsets, None, window))
            for each, ours in zip(matrices, packed, strict=True)
        ]
        gains = []
        for number in range(_ROUNDS):
            theirs, ours = calls[number % copies]
            gains.append(_seconds(theirs, device) / _seconds(ours, device))
        return median(gains[3:])  # what comes first is compiled


def _seconds(call: Callable[[], Tensor], device: torch.device) -> float:
    """The time of a call, and of what it has started on its device."""
    started = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started
