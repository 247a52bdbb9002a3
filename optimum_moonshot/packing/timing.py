"""Timed products of one row of inputs with a packed and a dense matrix, for kernels without benchmarks."""

import time
from collections.abc import Callable
from functools import lru_cache, partial
from statistics import median

import torch
from torch.nn import functional

from ..kernels.library import find_gpu_kernels, find_library
from ..objective.patterns import NM
from .codec import Codec, Shape, Verdict

LEAST = 1 << 18  # weights: for fewer, the dense matrix is in the cache, and the product seldom faster
LEAST_QUANTIZED = 1 << 16  # the same for integer codes: the call of a packed layer takes 5 µs more than a dense one
SLOWER = ("portable",)  # 0.05 to 0.25 times the dense product at any sparsity
_MEASURED = 1 << 24  # most weights of a matrix in a measurement
_CYCLED = 1 << 28  # bytes of the copies that a measurement cycles through, more than any cache
_ROUNDS = 30


def kernel_obstacle(formats: str, shape: Shape, dtype: torch.dtype, device: torch.device) -> str | None:
    """The reason why no kernel of these `formats`, as in `find_gpu_kernels`, can be faster; None if one can."""
    if device.type == "cpu":
        library = find_library()
        if library is None:
            return "no compiled kernel here"
        if library.instruction_set in SLOWER:
            return f"the {library.instruction_set} kernel is slower"
        supported = library.computes(dtype)
    else:
        if device.type != "cuda":
            return f"no kernel for {device.type}"
        if find_gpu_kernels(formats) is None:
            return "no kernel for cuda: Triton is missing"
        supported = dtype.itemsize <= 4
    if not supported:
        return f"no kernel for {dtype}"
    integers = formats == "quantized" and device.type == "cpu"
    least = min(LEAST, LEAST_QUANTIZED) if integers else LEAST
    return f"smaller than {least} weights" if shape[0] * shape[1] < least else None


def kernel_name(device: torch.device) -> str:
    """The kernels of a device: an instruction set of the library, or "Triton"."""
    library = find_library() if device.type == "cpu" else None
    return "Triton" if library is None else library.instruction_set


def timed_verdict(
    codec: Codec, shape: Shape, pattern: NM | None, share: float, dtype: torch.dtype, device: torch.device
) -> Verdict:
    """Like `Codec.decoding`, timed once for every shape.

    Args:
        codec: the packed format.
        shape: d_out, d_in.
        pattern: n:m of all rows; None where rows differ.
        share: fraction of nonzero weights; ignored with a pattern.
        dtype: of the values and the inputs.
        device: of the values and the inputs.
    """
    share = 1.0 if pattern else round(20 * share) / 20  # rounded, to measure once for similar layers
    gain = _gain(codec, shape, pattern, share, dtype, device)
    return Verdict(gain > 1, f"{kernel_name(device)} kernels, {gain:.2f} times the dense speed when tried")


@lru_cache
def _gain(
    codec: Codec, shape: Shape, pattern: NM | None, share: float, dtype: torch.dtype, device: torch.device
) -> float:
    """The measured speed-up of a product of one row with a random packed matrix; arguments of `timed_verdict`."""
    d_in = shape[1]
    d_out = max(1, min(shape[0], _MEASURED // d_in))
    with torch.device("cpu"), torch.random.fork_rng([]), torch.no_grad():
        torch.manual_seed(0)
        scores = torch.rand(d_out, d_in)
        keep = scores < share if pattern is None else pattern.keep(scores)
        weight = torch.where(keep, torch.randint(0, 2, (d_out, d_in)) * 2 - 1, 0).to(dtype)  # ±1 are on every grid
        parts = {suffix: part.to(device) for suffix, part in codec.pack(weight, pattern).items()}
        plan = codec.plan(parts, (d_out, d_in))
        dense, inputs = weight.to(device), torch.randn(1, d_in).to(device, dtype)
        copies = max(1, _CYCLED // dense.nbytes)
        matrices = [dense.clone() for _ in range(copies)]
        packed = [{suffix: part.clone() for suffix, part in parts.items()} for _ in range(copies)]
        calls = []
        for matrix, copy in zip(matrices, packed, strict=True):
            direct = codec.direct(copy, (d_out, d_in), None, plan) if device.type == "cpu" else None
            multiply = partial(codec.linear, inputs, copy, (d_out, d_in), None, plan)
            calls.append((partial(functional.linear, inputs, matrix), partial(direct, inputs) if direct else multiply))
        gains = []
        for number in range(_ROUNDS):  # alternating, so that a change of clock speed affects both
            multiply_dense, multiply_packed = calls[number % copies]
            gains.append(_seconds(multiply_dense, device) / _seconds(multiply_packed, device))
        return median(gains[3:])  # the first calls include compilation


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """The time of a call, including the kernels that it launches."""
    started = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started
