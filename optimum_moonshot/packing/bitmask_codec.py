"""The format "bitmask" as a codec, and the product with its matrices as operators: one node for `torch.compile`.

``moonshot::packed_linear`` is x Wᵀ + bias, with gradients for x and bias; W is constant. ``moonshot::packed_grouped``
is the same for groups of inputs, each with a matrix of a stack, without bias. The compiled library multiplies directly
with the packed W. For gradients, and where torch is faster, tiles of W are unpacked into a buffer that fits the CPU's
cache, so that no dense copy of W is written to memory.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from ..errors import require
from ..kernels import Library, find_gpu_kernels, find_library
from ..objective.patterns import NM
from .bitmask import check_packed, find_offsets, find_window, is_nm, pack, packed_bytes, select_rows, unpack
from .codec import Codec, Parts, Shape, Verdict, register_operators
from .timing import kernel_name, kernel_obstacle, timed_verdict

# Computed once for a matrix: the results of `find_window` (-1: not computed) and of `find_offsets` (None: not computed,
# or rows of equal lengths).
Plan = tuple[int, Tensor | None]
_NO_PLAN: Plan = (-1, None)

_TILE = 1 << 20  # bytes of a tile of unpacked rows: at most half the second-level cache of current CPUs
# Largest packed size, as a fraction of the dense size, at which one row was at least 10% faster, by instruction set and
# bytes of a weight (benchmarks/results/runtime-sets.json). This is a sparsity of 20% in 16 bits, and of 40% to 50% in
# 32 bits, where the dense product already reaches the memory bandwidth. With a few more rows the gain is smaller; with
# many rows the loss is not significant.
_WIDE = {2: 0.87, 4: 0.64}
_MOST = {"avx2": {2: 0.87, 4: 0.55}, "avx512": _WIDE, "vbmi2": _WIDE, "amx": _WIDE}

_MATRIX = "Tensor values, Tensor meta, Tensor? offsets"
_library = torch.library.Library("moonshot", "DEF")
_library.define(f"packed_linear(Tensor inputs, {_MATRIX}, Tensor? bias, int window) -> Tensor")
_library.define(f"packed_product(Tensor inputs, {_MATRIX}, Tensor? bias, int window) -> Tensor")
_library.define(f"packed_transposed(Tensor outputs, {_MATRIX}, int d_in, int window) -> Tensor")
_library.define(f"packed_grouped(Tensor inputs, Tensor counts, {_MATRIX}) -> Tensor")
_library.define(f"packed_grouped_transposed(Tensor outputs, Tensor counts, {_MATRIX}, int d_in) -> Tensor")


class Bitmask(Codec):
    """The codec of the formulas in bitmask.py."""

    name = "bitmask"
    suffixes: ClassVar[tuple[str, ...]] = ("_packed", "_meta")

    def pack(self, matrix: Tensor, pattern: NM | None) -> Parts:
        return dict(zip(self.suffixes, pack(matrix, pattern), strict=True))

    def check(self, parts: Parts, shape: Shape, dtype: torch.dtype | None = None, pattern: NM | None = None) -> None:
        values, meta = self._tensors(parts)
        check_packed(values, meta, shape)
        require(dtype in (None, values.dtype), f"its values are {values.dtype}, {dtype} was written")
        require(pattern is None or is_nm(meta, shape[1], pattern), f"it is not {pattern}")

    def unpack(self, parts: Parts, shape: Shape, plan: Plan | None = None) -> Tensor:
        return unpack(*self._tensors(parts), shape[1], *(plan or _NO_PLAN))

    def packed_bytes(self, matrix: Tensor, pattern: NM | None) -> int:
        d_out, d_in = matrix.shape
        values = matrix.numel() * pattern.n // pattern.m if pattern else int(matrix.count_nonzero())
        return packed_bytes((d_out, d_in), values, matrix.dtype.itemsize)

    def rows(self, parts: Parts, shape: Shape, first: int, stop: int, plan: Plan | None = None) -> tuple[Parts, Plan]:
        values, meta = self._tensors(parts)
        window, offsets = plan or _NO_PLAN
        offsets = find_offsets(values, meta, shape[1]) if offsets is None else offsets
        *rows, offsets = select_rows(values, meta, offsets, first, stop)
        return dict(zip(self.suffixes, rows, strict=True)), (window, offsets)

    def stack(self, matrices: Sequence[Parts], shapes: Sequence[Shape]) -> Parts:
        values, meta = self.suffixes
        if len({parts[values].shape[1:] for parts in matrices}) > 1:  # rows of unequal lengths
            matrices = [{values: parts[values].flatten(), meta: parts[meta]} for parts in matrices]
        return super().stack(matrices, shapes)

    def plan(self, parts: Parts, shape: Shape) -> Plan:
        values, meta = self._tensors(parts)
        if torch.compiler.is_compiling():  # data-dependent values must be computed inside the operators
            return _NO_PLAN
        library = find_library()
        compiled = library is not None and library.takes(values)
        return -1 if compiled else find_window(values, meta, shape[1]), find_offsets(values, meta, shape[1])

    def linear(
        self, inputs: Tensor, parts: Parts, shape: Shape, bias: Tensor | None = None, plan: Plan | None = None
    ) -> Tensor:
        if torch.is_autocast_enabled(inputs.device.type) or inputs.shape[-1] != shape[1]:
            return super().linear(inputs, parts, shape, bias, plan)
        values, meta = self._tensors(parts)
        window, offsets = plan or _NO_PLAN
        differentiable = torch.is_grad_enabled() and (inputs.requires_grad or (bias is not None and bias.requires_grad))
        if differentiable or torch.compiler.is_compiling():
            return torch.ops.moonshot.packed_linear.default(inputs, values, meta, offsets, bias, window)
        # Without gradients, skip autograd: its overhead per call is as large as a small product.
        return torch.ops.moonshot.packed_product.default(inputs, values, meta, offsets, bias, window)

    def direct(
        self, parts: Parts, shape: Shape, bias: Tensor | None = None, plan: Plan | None = None
    ) -> Callable[[Tensor], Tensor | None] | None:
        (values, meta), library, (_, offsets) = self._tensors(parts), find_library(), plan or _NO_PLAN
        like = values.new_empty(1, shape[1])
        if library is None or not _supports(library, like, values, meta, bias):
            return None
        offsets = find_offsets(values, meta, shape[1]) if offsets is None else offsets
        return library.direct_product(values, meta, offsets, shape[1], bias)

    def grouped(self, inputs: Tensor, counts: Tensor, parts: Parts, shape: Shape, plan: Plan | None = None) -> Tensor:
        if torch.is_autocast_enabled(inputs.device.type) or inputs.shape[-1] != shape[1]:
            return super().grouped(inputs, counts, parts, shape, plan)
        _, offsets = plan or _NO_PLAN
        outputs: Tensor = torch.ops.moonshot.packed_grouped.default(inputs, counts, *self._tensors(parts), offsets)
        return outputs

    def decoding(
        self, shape: Shape, pattern: NM | None, fraction: float, dtype: torch.dtype, device: torch.device
    ) -> Verdict:
        """Like `Codec.decoding`, by the measured thresholds where there are any, else by one measurement per shape."""
        obstacle, name = kernel_obstacle("bitmask", shape, dtype, device), kernel_name(device)
        if obstacle is not None:
            return Verdict(False, obstacle)
        if name in _MOST:
            most = _MOST[name][dtype.itemsize]
            why = f"{name} kernels" if fraction <= most else f"more than {most:.0%} of the bytes remain"
            return Verdict(fraction <= most, why)
        return timed_verdict(self, shape, pattern, fraction - 1 / (8 * dtype.itemsize), dtype, device)

    def _tensors(self, parts: Parts) -> tuple[Tensor, Tensor]:
        values, meta = (parts[suffix] for suffix in self.suffixes)
        return values, meta


def _product(
    inputs: Tensor, values: Tensor, meta: Tensor, offsets: Tensor | None, bias: Tensor | None, window: int
) -> Tensor:
    library, d_in, shape = find_library(), inputs.shape[-1], (*inputs.shape[:-1], len(meta))
    if _is_for_gpu(inputs, values):
        return _gpu_product(inputs, values, meta, offsets, bias, window)
    if library is None or not _supports(library, inputs, values, meta, bias):
        return functional.linear(inputs, unpack(values, meta, d_in, window, offsets), bias)
    flat = inputs.reshape(-1, d_in).contiguous()
    offsets = find_offsets(values, meta, d_in) if offsets is None else offsets
    if len(flat) <= library.most_rows:
        return library.product(flat, values, meta, offsets, bias).view(shape)
    outputs = flat.new_empty(len(flat), len(meta))
    for rows, tile in _tiles(library, values, meta, offsets, d_in):
        outputs[:, rows] = functional.linear(flat, tile, None if bias is None else bias[rows])
    return outputs.view(shape)


def _is_for_gpu(inputs: Tensor, values: Tensor) -> bool:
    supported = inputs.dtype == values.dtype and values.dtype.itemsize <= 4
    return inputs.is_cuda and supported and find_gpu_kernels("bitmask") is not None


def _gpu_product(
    inputs: Tensor, values: Tensor, meta: Tensor, offsets: Tensor | None, bias: Tensor | None, window: int
) -> Tensor:
    """Few rows, bound by memory bandwidth, are multiplied by the packed matrix, more rows by the unpacked one."""
    kernels, flat = find_gpu_kernels("bitmask"), inputs.reshape(-1, inputs.shape[-1])
    assert kernels is not None
    offsets = find_offsets(values, meta, flat.shape[1]) if offsets is None else offsets
    if len(flat) > kernels.MOST_ROWS:
        return functional.linear(inputs, kernels.unpack(values, meta, flat.shape[1], offsets), bias)
    window = find_window(values, meta, flat.shape[1]) if window < 0 else window
    outputs = kernels.linear(flat, values, meta, offsets, window)
    outputs = outputs if bias is None else outputs + bias
    return outputs.view(*inputs.shape[:-1], len(meta))


def _supports(library: Library, x: Tensor, values: Tensor, meta: Tensor, bias: Tensor | None) -> bool:
    """Whether the library supports these tensors; for invalid ones, torch's dense product raises the error."""
    return (
        library.takes(values)
        and x.dtype == values.dtype
        and x.device.type == meta.device.type == "cpu"
        and x.numel() > 0
        and meta.is_contiguous()
        and meta.shape[1] == -(-x.shape[-1] // 8)
        and (bias is None or (bias.dtype == x.dtype and bias.shape == meta.shape[:1] and bias.is_contiguous()))
    )


def _tiles(
    library: Library, values: Tensor, meta: Tensor, offsets: Tensor | None, d_in: int
) -> Iterator[tuple[slice, Tensor]]:
    """Unpack W by tiles of rows into one buffer, [rows, d_in]: the range of rows and the tile, valid until the next."""
    size = max(1, _TILE // (d_in * values.dtype.itemsize))
    buffer = values.new_empty(min(size, len(meta)), d_in)
    for first in range(0, len(meta), size):
        tile = library.unpack(buffer[: len(meta) - first], values, meta, offsets, first)
        yield slice(first, first + len(tile)), tile


def _transposed(
    outputs: Tensor, values: Tensor, meta: Tensor, offsets: Tensor | None, d_in: int, window: int
) -> Tensor:
    """y W: [..., d_out] → [..., d_in]."""
    library = find_library()
    if library is None or not library.takes(values) or not outputs.numel():
        return outputs @ unpack(values, meta, d_in, window, offsets)
    flat = outputs.reshape(-1, len(meta))
    offsets = find_offsets(values, meta, d_in) if offsets is None else offsets
    sums = torch.zeros(len(flat), d_in, dtype=torch.float32, device="cpu")
    for rows, tile in _tiles(library, values, meta, offsets, d_in):
        sums += flat[:, rows] @ tile
    return sums.to(outputs.dtype).view(*outputs.shape[:-1], d_in)


def _grouped(inputs: Tensor, counts: Tensor, values: Tensor, meta: Tensor, offsets: Tensor | None) -> Tensor:
    library, d_in = find_library(), inputs.shape[1]
    offsets = find_offsets(values, meta, d_in) if offsets is None else offsets
    outputs = inputs.new_zeros(len(inputs), len(meta) // len(counts))
    if (
        library is not None
        and _supports(library, inputs, values, meta, None)
        and int(counts.max()) <= library.most_rows
    ):
        library.grouped(outputs, inputs.contiguous(), counts, values, meta, offsets)
        return outputs
    for rows, matrix in _groups(counts, values, meta, offsets):
        outputs[rows] = _product(inputs[rows], *matrix, None, -1)
    return outputs


def _grouped_transposed(
    outputs: Tensor, counts: Tensor, values: Tensor, meta: Tensor, offsets: Tensor | None, d_in: int
) -> Tensor:
    """Like `_transposed` for groups of rows: [rows, d_out] → [rows, d_in]."""
    offsets = find_offsets(values, meta, d_in) if offsets is None else offsets
    sums = outputs.new_zeros(len(outputs), d_in)
    for rows, matrix in _groups(counts, values, meta, offsets):
        sums[rows] = _transposed(outputs[rows], *matrix, d_in, -1)
    return sums


def _groups(
    counts: Tensor, values: Tensor, meta: Tensor, offsets: Tensor | None
) -> Iterator[tuple[slice, tuple[Tensor, Tensor, Tensor | None]]]:
    """The rows of inputs and the matrix of every group that has inputs."""
    d_out, first = len(meta) // len(counts), 0
    for group, count in enumerate(counts.tolist()):
        if count:
            yield slice(first, first + count), select_rows(values, meta, offsets, group * d_out, (group + 1) * d_out)
            first += count


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, values, meta, offsets, _, ctx.window = inputs
    ctx.d_in = x.shape[-1]
    ctx.save_for_backward(values, meta, offsets)


def _gradients(ctx: Any, outputs: Tensor) -> tuple[Tensor | None, ...]:
    x = bias = None
    if ctx.needs_input_grad[0]:
        x = torch.ops.moonshot.packed_transposed.default(outputs, *ctx.saved_tensors, ctx.d_in, ctx.window)
    if ctx.needs_input_grad[4]:
        bias = outputs.flatten(0, -2).sum(0) if outputs.ndim > 1 else outputs
    return x, None, None, None, bias, None


def _remember_grouped(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.d_in = inputs[0].shape[1]
    ctx.save_for_backward(*inputs[1:])


def _gradients_grouped(ctx: Any, outputs: Tensor) -> tuple[Tensor | None, ...]:
    x = torch.ops.moonshot.packed_grouped_transposed.default(outputs, *ctx.saved_tensors, ctx.d_in)
    return x, None, None, None, None


register_operators(
    _library,
    (
        ("packed_linear", _product, lambda x, _, meta, *rest: x.new_empty(*x.shape[:-1], meta.shape[0])),
        ("packed_product", _product, lambda x, _, meta, *rest: x.new_empty(*x.shape[:-1], meta.shape[0])),
        ("packed_transposed", _transposed, lambda y, _, meta, offsets, d_in, w: y.new_empty(*y.shape[:-1], d_in)),
        ("packed_grouped", _grouped, lambda x, n, _, meta, *rest: x.new_empty(x.shape[0], meta.shape[0] // n.shape[0])),
        ("packed_grouped_transposed", _grouped_transposed, lambda y, *rest: y.new_empty(y.shape[0], rest[-1])),
    ),
    (
        ("packed_linear", _gradients, _remember),
        ("packed_grouped", _gradients_grouped, _remember_grouped),
    ),
)
