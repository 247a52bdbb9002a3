"""Whether the product of one row of inputs, as in decoding, is faster with a "bitmask" matrix than with a dense one.

Uses measured thresholds where there are any (benchmarks/results/runtime-sets.json, docs/measured.md), and otherwise
measures once for every shape.
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

# Largest packed size, as a fraction of the dense size, at which one row was at least 10% faster, by instruction set and
# bytes of a weight. This is a sparsity of 20% in 16 bits, and of 40% to 50% in 32 bits, where the dense product already
# reaches the memory bandwidth. A few rows more gain less, and many rows lose nothing significant.
_WIDE = {2: 0.87, 4: 0.64}
_MOST = {"avx2": {2: 0.87, 4: 0.55}, "avx512": _WIDE, "vbmi2": _WIDE, "amx": _WIDE}
SLOWER = ("portable",)  # 0.05 to 0.25 times the dense product, whatever the sparsity
LEAST = 1 << 18  # weights: below, the overhead of a call, 30 µs, exceeds the time of the dense product
_MEASURED = 1 << 24  # most weights of a matrix in a measurement
_CYCLED = 1 << 28  # bytes of the copies that a measurement cycles through, more than any cache
_ROUNDS = 30


def decoding(
    shape: tuple[int, int], pattern: NM | None, fraction: float, dtype: torch.dtype, device: torch.device
) -> Verdict:
    """`Codec.decoding` of the format."""
    lacks = _lacks(dtype, device)
    if lacks is not None:
        return Verdict(False, lacks)
    if shape[0] * shape[1] < LEAST:
        return Verdict(False, f"smaller than {LEAST} weights")
    library = find_library() if device.type == "cpu" else None
    name = "Triton" if library is None else library.instruction_set
    if name in _MOST:
        most = _MOST[name][dtype.itemsize]
        why = f"{name} kernels" if fraction <= most else f"more than {most:.0%} of the bytes are left"
        return Verdict(fraction <= most, why)
    gain = _gain(shape, pattern, round(fraction, 2), dtype, device)  # rounded, to measure once for similar layers
    return Verdict(gain > 1, f"{name} kernels, {gain:.2f} times the dense speed when tried")


def _lacks(dtype: torch.dtype, device: torch.device) -> str | None:
    """The reason why no kernel can be faster; None if one can."""
    if device.type == "cpu":
        library = find_library()
        if library is None:
            return "no compiled kernel here"
        if library.instruction_set in SLOWER:
            return f"the {library.instruction_set} kernel is slower"
        return None if library.computes(dtype) else f"no kernel for {dtype}"
    if device.type != "cuda":
        return f"no kernel for {device.type}"
    if find_gpu_kernels() is None:
        return "no kernel for cuda: Triton is missing"
    return None if dtype.itemsize <= 4 else f"no kernel for {dtype}"


@lru_cache
def _gain(
    shape: tuple[int, int], pattern: NM | None, fraction: float, dtype: torch.dtype, device: torch.device
) -> float:
    """The measured speed-up of a product of one row with a random packed matrix, as for `decoding`."""
    d_in = shape[1]
    d_out = max(1, min(shape[0], _MEASURED // d_in))
    with torch.device("cpu"), torch.random.fork_rng([]), torch.no_grad():
        torch.manual_seed(0)
        scores = torch.rand(d_out, d_in)
        keep = scores < fraction - 1 / (8 * dtype.itemsize) if pattern is None else pattern.keep(scores)
        weight = torch.where(keep, torch.randn(d_out, d_in), 0).to(dtype)
        values, meta = (part.to(device) for part in pack(weight, pattern))
        offsets, window = find_offsets(values, meta, d_in), find_window(values, meta, d_in)
        dense, inputs = weight.to(device), torch.randn(1, d_in).to(device, dtype)
        copies = max(1, _CYCLED // dense.nbytes)
        matrices = [dense.clone() for _ in range(copies)]
        packed = [(values.clone(), meta.clone()) for _ in range(copies)]
        calls = [
            (partial(functional.linear, inputs, each), partial(packed_linear, inputs, *parts, offsets, None, window))
            for each, parts in zip(matrices, packed, strict=True)
        ]
        gains = []
        for number in range(_ROUNDS):  # alternating, so that a change of clock speed affects both
            multiply_dense, multiply_packed = calls[number % copies]
            gains.append(_seconds(multiply_dense, device) / _seconds(multiply_packed, device))
        return median(gains[3:])  # the first calls include compilation


def _seconds(call: Callable[[], Tensor], device: torch.device) -> float:
    """The time of a call, including the kernels that it launches."""
    started = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started
