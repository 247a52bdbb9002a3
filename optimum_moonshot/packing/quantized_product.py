"""The product with a matrix in a format "int{bits}g{group}", as operators of torch, like those of `bitmask_product`.

``moonshot::quantized_linear`` is x Wᵀ + bias, with gradients for x and bias; W is constant.
``moonshot::quantized_grouped`` is the same for groups of inputs, each with a matrix of a stack, without bias. The
compiled library multiplies directly with the packed W, and so do GPU kernels with few rows of x. For gradients, and
where there is no library, tiles of W are unpacked, so that no dense copy of W is written to memory; GPU kernels unpack
all of W.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..kernels import QuantizedMatrix, find_gpu_kernels, find_library
from ..objective.grid import DTYPES, Grid
from ..objective.row_slices import split_range
from .quantized import find_offsets, library_matrix, select_rows, unpacked_slices

_TILE = 1 << 20  # bytes of a tile of unpacked rows, as in `bitmask_product`
_MOST_WIDE = 4  # rows of inputs that are not rounded; above, torch's product with tiles is faster
_MATRIX = "Tensor codes, Tensor scale, Tensor meta, Tensor? offsets, int bits, int group"
_library = torch.library.Library("moonshot", "FRAGMENT")
_library.define(f"quantized_linear(Tensor inputs, {_MATRIX}, Tensor? bias, bool wide) -> Tensor")
_library.define(f"quantized_product(Tensor inputs, {_MATRIX}, Tensor? bias, bool wide) -> Tensor")
_library.define(f"quantized_grouped(Tensor inputs, Tensor counts, {_MATRIX}, bool wide) -> Tensor")
_library.define(f"quantized_transposed(Tensor outputs, {_MATRIX}, int d_in) -> Tensor")
_library.define(f"quantized_grouped_transposed(Tensor outputs, Tensor counts, {_MATRIX}, int d_in) -> Tensor")


class QuantizedTensors(NamedTuple):
    """A packed matrix, as the arguments of the operators."""

    codes: Tensor
    scale: Tensor
    meta: Tensor
    offsets: Tensor | None  # of `find_offsets`; None also if they were not computed
    bits: int
    group: int


def quantized_linear(inputs: Tensor, matrix: QuantizedTensors, bias: Tensor | None, wide: bool) -> Tensor:
    """x Wᵀ + bias, [..., d_out], for x [..., d_in] in the dtype and on the device of the scales.

    Unless `wide`, a compiled library rounds x to 8 bits per row and group; gradients are those of the exact product.
    """
    differentiable = torch.is_grad_enabled() and (inputs.requires_grad or (bias is not None and bias.requires_grad))
    if differentiable or torch.compiler.is_compiling():
        return torch.ops.moonshot.quantized_linear.default(inputs, *matrix, bias, wide)
    # Without gradients, skip autograd: its overhead per call is as large as a small product.
    return torch.ops.moonshot.quantized_product.default(inputs, *matrix, bias, wide)


def grouped_product(inputs: Tensor, counts: Tensor, matrix: QuantizedTensors, wide: bool) -> Tensor:
    """The products [rows, d_out] of groups of inputs; arguments as for `Codec.grouped`."""
    result: Tensor = torch.ops.moonshot.quantized_grouped.default(inputs, counts, *matrix, wide)
    return result


def _grouped(
    inputs: Tensor,
    counts: Tensor,
    codes: Tensor,
    scale: Tensor,
    meta: Tensor,
    offsets: Tensor | None,
    bits: int,
    group: int,
    wide: bool,
) -> Tensor:
    library, d_out, numbers = find_library(), len(scale) // len(counts), counts.tolist()
    matrix = library_matrix(Grid(bits, group, scale.dtype), codes, scale, meta, inputs.shape[1], offsets)
    outputs, first = inputs.new_empty(len(inputs), d_out), 0
    fits = _takes(inputs, scale, None) and max(numbers) <= _most_rows(wide)
    if library is not None and matrix is not None and fits:
        library.quantized_grouped(outputs, inputs.contiguous(), counts, matrix, wide)
        outputs[sum(numbers) :] = 0
        return outputs
    offsets = find_offsets(meta, inputs.shape[1], bits) if offsets is None else offsets
    for number, count in enumerate(numbers):
        if count:
            rows = select_rows(codes, scale, meta, offsets, number * d_out, (number + 1) * d_out)
            outputs[first : first + count] = _product(inputs[first : first + count], *rows, bits, group, None, wide)
            first += count
    outputs[first:] = 0
    return outputs


def _most_rows(wide: bool) -> int:
    """Most rows of inputs that the library multiplies at once; more are multiplied by unpacked tiles."""
    library = find_library()
    if library is None:
        return 0
    return min(library.most_rows, _MOST_WIDE) if wide else library.most_rows


def _product(
    inputs: Tensor,
    codes: Tensor,
    scale: Tensor,
    meta: Tensor,
    offsets: Tensor | None,
    bits: int,
    group: int,
    bias: Tensor | None,
    wide: bool,
) -> Tensor:
    if _is_for_gpu(inputs, scale):
        return _gpu_product(inputs, QuantizedTensors(codes, scale, meta, offsets, bits, group), bias)
    library, flat = find_library(), inputs.reshape(-1, inputs.shape[-1])
    matrix = library_matrix(Grid(bits, group, scale.dtype), codes, scale, meta, inputs.shape[-1], offsets)
    outputs = inputs.new_empty(*inputs.shape[:-1], len(scale))
    fits = _takes(inputs, scale, bias) and len(flat) <= _most_rows(wide)
    if library is not None and matrix is not None and fits:
        return library.quantized_product(flat.contiguous(), matrix, bias, wide).view_as(outputs)
    for rows, tile in _tiles(matrix, codes, scale, meta, bits, group, inputs.shape[-1]):
        outputs[..., rows] = functional.linear(inputs, tile, None if bias is None else bias[rows])
    return outputs


def _is_for_gpu(inputs: Tensor, scale: Tensor) -> bool:
    supported = inputs.dtype == scale.dtype and scale.dtype in DTYPES
    return inputs.is_cuda and supported and find_gpu_kernels("quantized") is not None


def _gpu_product(inputs: Tensor, matrix: QuantizedTensors, bias: Tensor | None) -> Tensor:
    """As `_product`, with inputs that are not rounded: few rows, bound by memory bandwidth, use the packed matrix."""
    kernels, d_in = find_gpu_kernels("quantized"), inputs.shape[-1]
    assert kernels is not None
    flat = inputs.reshape(-1, d_in)
    if len(flat) > kernels.MOST_ROWS:
        return functional.linear(inputs, _gpu_dense(matrix, d_in), bias)
    outputs = kernels.linear(flat, *_with_offsets(matrix, d_in))
    outputs = outputs if bias is None else outputs + bias
    return outputs.view(*inputs.shape[:-1], len(matrix.scale))


def _gpu_dense(matrix: QuantizedTensors, d_in: int) -> Tensor:
    kernels = find_gpu_kernels("quantized")
    assert kernels is not None
    return kernels.unpack(*_with_offsets(matrix, d_in), d_in)


def _with_offsets(matrix: QuantizedTensors, d_in: int) -> QuantizedTensors:
    offsets = find_offsets(matrix.meta, d_in, matrix.bits) if matrix.offsets is None else matrix.offsets
    return matrix._replace(offsets=offsets)


def _takes(x: Tensor, scale: Tensor, bias: Tensor | None) -> bool:
    """Whether the library supports these inputs; for invalid ones, torch's dense product raises the error."""
    fits = bias is None or (bias.dtype == x.dtype and bias.shape == scale.shape[:1] and bias.is_contiguous())
    return fits and x.dtype == scale.dtype and x.device.type == "cpu" and x.numel() > 0


def _tiles(
    matrix: QuantizedMatrix | None, codes: Tensor, scale: Tensor, meta: Tensor, bits: int, group: int, d_in: int
) -> Iterator[tuple[slice, Tensor]]:
    """Unpack W by tiles of rows: the range of rows and the tile, valid until the next one."""
    library = find_library()
    if library is None or matrix is None:
        yield from unpacked_slices(Grid(bits, group, scale.dtype), codes, scale, meta, d_in)
        return
    size = max(1, _TILE // (d_in * scale.dtype.itemsize))
    buffer = scale.new_empty(min(size, len(scale)), d_in)
    for rows in split_range(0, len(scale), size):
        yield rows, library.quantized_unpack(buffer[: rows.stop - rows.start], matrix, rows.start)


def _transposed(
    outputs: Tensor,
    codes: Tensor,
    scale: Tensor,
    meta: Tensor,
    offsets: Tensor | None,
    bits: int,
    group: int,
    d_in: int,
) -> Tensor:
    """y W: [..., d_out] → [..., d_in]."""
    if _is_for_gpu(outputs, scale):
        return outputs @ _gpu_dense(QuantizedTensors(codes, scale, meta, offsets, bits, group), d_in)
    wider = torch.promote_types(outputs.dtype, torch.float32)
    sums = torch.zeros(*outputs.shape[:-1], d_in, dtype=wider, device=outputs.device)
    matrix = library_matrix(Grid(bits, group, scale.dtype), codes, scale, meta, d_in, offsets)
    for rows, tile in _tiles(matrix, codes, scale, meta, bits, group, d_in):
        sums += outputs[..., rows] @ tile
    return sums.to(outputs.dtype)


def _grouped_transposed(
    outputs: Tensor,
    counts: Tensor,
    codes: Tensor,
    scale: Tensor,
    meta: Tensor,
    offsets: Tensor | None,
    bits: int,
    group: int,
    d_in: int,
) -> Tensor:
    """As `_transposed` for groups of rows: [rows, d_out] → [rows, d_in]."""
    offsets = find_offsets(meta, d_in, bits) if offsets is None else offsets
    size, first, sums = len(scale) // len(counts), 0, outputs.new_zeros(len(outputs), d_in)
    for number, count in enumerate(counts.tolist()):
        if count:
            rows = select_rows(codes, scale, meta, offsets, number * size, (number + 1) * size)
            sums[first : first + count] = _transposed(outputs[first : first + count], *rows, bits, group, d_in)
            first += count
    return sums


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, codes, scale, meta, offsets, ctx.bits, ctx.group, _, _ = inputs
    ctx.d_in = x.shape[-1]
    ctx.save_for_backward(codes, scale, meta, offsets)


def _gradients(ctx: Any, outputs: Tensor) -> tuple[Tensor | None, ...]:
    x = bias = None
    if ctx.needs_input_grad[0]:
        matrix = *ctx.saved_tensors, ctx.bits, ctx.group
        x = torch.ops.moonshot.quantized_transposed.default(outputs, *matrix, ctx.d_in)
    if ctx.needs_input_grad[7]:
        bias = outputs.flatten(0, -2).sum(0) if outputs.ndim > 1 else outputs
    return x, None, None, None, None, None, None, bias, None


def _remember_grouped(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, *tensors, ctx.bits, ctx.group, _ = inputs
    ctx.d_in = x.shape[1]
    ctx.save_for_backward(*tensors)


def _gradients_grouped(ctx: Any, outputs: Tensor) -> tuple[Tensor | None, ...]:
    matrix = *ctx.saved_tensors, ctx.bits, ctx.group
    x = torch.ops.moonshot.quantized_grouped_transposed.default(outputs, *matrix, ctx.d_in)
    return x, None, None, None, None, None, None, None, None


_COMPUTED = {
    "quantized_linear": _product,
    "quantized_product": _product,
    "quantized_grouped": _grouped,
    "quantized_transposed": _transposed,
    "quantized_grouped_transposed": _grouped_transposed,
}
for _name, _compute in _COMPUTED.items():
    _library.impl(_name, _compute, "CompositeExplicitAutograd")
for _name in ("quantized_linear", "quantized_product"):
    torch.library.register_fake(
        f"moonshot::{_name}", lambda x, _, scale, *rest: x.new_empty(*x.shape[:-1], scale.shape[0]), lib=_library
    )
for _name in ("quantized_transposed", "quantized_grouped_transposed"):
    torch.library.register_fake(
        f"moonshot::{_name}", lambda y, *rest: y.new_empty(*y.shape[:-1], rest[-1]), lib=_library
    )
torch.library.register_fake(
    "moonshot::quantized_grouped",
    lambda x, counts, _, scale, *rest: x.new_empty(x.shape[0], scale.shape[0] // counts.shape[0]),
    lib=_library,
)
torch.library.register_autograd("moonshot::quantized_linear", _gradients, setup_context=_remember, lib=_library)
torch.library.register_autograd(
    "moonshot::quantized_grouped", _gradients_grouped, setup_context=_remember_grouped, lib=_library
)
