"""The product with a matrix in the format "bitmask", as operators of torch: one node for `torch.compile` and `export`.

``moonshot::packed_linear`` is x Wᵀ + bias, with gradients for x and bias; W is constant. ``moonshot::packed_grouped``
is the same for groups of inputs, each with a matrix of a stack, without bias. The compiled library
multiplies directly with the packed W. For gradients, and where torch is faster, tiles of W are unpacked into a buffer
that fits the CPU's cache, so that no dense copy of W is written to memory.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..kernels import Library, find_gpu_kernels, find_library
from .bitmask import find_offsets, find_window, select_rows, unpack

_TILE = 1 << 20  # bytes of a tile of unpacked rows: at most half the second-level cache of current CPUs

_MATRIX = "Tensor values, Tensor meta, Tensor? offsets"
_library = torch.library.Library("moonshot", "DEF")
_library.define(f"packed_linear(Tensor inputs, {_MATRIX}, Tensor? bias, int window) -> Tensor")
_library.define(f"packed_product(Tensor inputs, {_MATRIX}, Tensor? bias, int window) -> Tensor")
_library.define(f"packed_transposed(Tensor outputs, {_MATRIX}, int d_in, int window) -> Tensor")
_library.define(f"packed_grouped(Tensor inputs, Tensor counts, {_MATRIX}) -> Tensor")
_library.define(f"packed_grouped_transposed(Tensor outputs, Tensor counts, {_MATRIX}, int d_in) -> Tensor")


def packed_linear(
    inputs: Tensor, values: Tensor, meta: Tensor, offsets: Tensor | None, bias: Tensor | None, window: int
) -> Tensor:
    """x Wᵀ + bias, [..., d_out], for x [..., d_in] in the dtype and on the device of the values.

    `offsets` is the result of `find_offsets`, None also if it was not computed; `window` that of `find_window`, −1 if
    it was not computed.
    """
    differentiable = torch.is_grad_enabled() and (inputs.requires_grad or (bias is not None and bias.requires_grad))
    if differentiable or torch.compiler.is_compiling():
        return torch.ops.moonshot.packed_linear.default(inputs, values, meta, offsets, bias, window)
    # Without gradients, skip autograd: its overhead per call is as large as a small product.
    return torch.ops.moonshot.packed_product.default(inputs, values, meta, offsets, bias, window)


def grouped_product(inputs: Tensor, counts: Tensor, values: Tensor, meta: Tensor, offsets: Tensor | None) -> Tensor:
    """The products [rows, d_out] of groups of inputs; arguments as for `Codec.grouped`."""
    result: Tensor = torch.ops.moonshot.packed_grouped.default(inputs, counts, values, meta, offsets)
    return result


def _grouped(inputs: Tensor, counts: Tensor, values: Tensor, meta: Tensor, offsets: Tensor | None) -> Tensor:
    library, d_out, numbers = find_library(), len(meta) // len(counts), counts.tolist()
    offsets = find_offsets(values, meta, inputs.shape[1]) if offsets is None else offsets
    outputs = inputs.new_empty(len(inputs), d_out)
    if library is not None and _takes(library, inputs, values, meta, None) and max(numbers) <= library.most_rows:
        library.grouped(outputs, inputs.contiguous(), counts, values, meta, offsets)
        outputs[sum(numbers) :] = 0
        return outputs
    first = 0
    for group, count in enumerate(numbers):
        if count:
            rows = select_rows(values, meta, offsets, group * d_out, (group + 1) * d_out)
            outputs[first : first + count] = _product(inputs[first : first + count], *rows, None, -1)
            first += count
    outputs[first:] = 0
    return outputs


def _product(
    inputs: Tensor, values: Tensor, meta: Tensor, offsets: Tensor | None, bias: Tensor | None, window: int
) -> Tensor:
    if _is_for_gpu(inputs, values):
        return _gpu_product(inputs, values, meta, offsets, bias, window)
    library, d_in = find_library(), inputs.shape[-1]
    if library is None or not _takes(library, inputs, values, meta, bias):
        return functional.linear(inputs, unpack(values, meta, d_in, None if window < 0 else window, offsets), bias)
    flat = inputs.reshape(-1, d_in).contiguous()
    offsets = find_offsets(values, meta, d_in) if offsets is None else offsets
    multiply = library.product if len(flat) <= library.most_rows else _multiply_tiles
    return multiply(flat, values, meta, offsets, bias).view(*inputs.shape[:-1], len(meta))


def _is_for_gpu(inputs: Tensor, values: Tensor) -> bool:
    supported = inputs.dtype == values.dtype and values.dtype.itemsize <= 4
    return inputs.is_cuda and supported and find_gpu_kernels("bitmask") is not None


def _gpu_product(
    inputs: Tensor, values: Tensor, meta: Tensor, offsets: Tensor | None, bias: Tensor | None, window: int
) -> Tensor:
    """As `_product`: few rows, bound by memory bandwidth, use the packed matrix; more rows use the unpacked one."""
    kernels, flat = find_gpu_kernels("bitmask"), inputs.reshape(-1, inputs.shape[-1])
    assert kernels is not None
    offsets = find_offsets(values, meta, flat.shape[1]) if offsets is None else offsets
    if len(flat) > kernels.MOST_ROWS:
        return functional.linear(inputs, kernels.unpack(values, meta, flat.shape[1], offsets), bias)
    window = find_window(values, meta, flat.shape[1]) if window < 0 else window
    outputs = kernels.linear(flat, values, meta, offsets, window)
    outputs = outputs if bias is None else outputs + bias
    return outputs.view(*inputs.shape[:-1], len(meta))


def _takes(library: Library, x: Tensor, values: Tensor, meta: Tensor, bias: Tensor | None) -> bool:
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
) -> Iterator[tuple[int, Tensor]]:
    """Unpack W by tiles of rows into one buffer, [rows, d_in]; yields the index of the first row and the tile."""
    size = max(1, _TILE // (d_in * values.dtype.itemsize))
    buffer = values.new_empty(min(size, len(meta)), d_in)
    for first in range(0, len(meta), size):
        yield first, library.unpack(buffer[: len(meta) - first], values, meta, offsets, first)


def _multiply_tiles(
    inputs: Tensor, values: Tensor, meta: Tensor, offsets: Tensor | None, bias: Tensor | None
) -> Tensor:
    library = find_library()
    assert library is not None
    outputs = inputs.new_empty(len(inputs), len(meta))
    for first, tile in _tiles(library, values, meta, offsets, inputs.shape[1]):
        part = slice(first, first + len(tile))
        outputs[:, part] = functional.linear(inputs, tile, None if bias is None else bias[part])
    return outputs


def _transposed(
    outputs: Tensor, values: Tensor, meta: Tensor, offsets: Tensor | None, d_in: int, window: int
) -> Tensor:
    """y W: [..., d_out] → [..., d_in]."""
    library = find_library()
    if library is None or not library.takes(values) or not outputs.numel():
        return outputs @ unpack(values, meta, d_in, None if window < 0 else window, offsets)
    flat = outputs.reshape(-1, len(meta))
    offsets = find_offsets(values, meta, d_in) if offsets is None else offsets
    sums = torch.zeros(len(flat), d_in, dtype=torch.float32, device="cpu")
    for first, tile in _tiles(library, values, meta, offsets, d_in):
        sums += flat[:, first : first + len(tile)] @ tile
    return sums.to(outputs.dtype).view(*outputs.shape[:-1], d_in)


def _grouped_transposed(
    outputs: Tensor, counts: Tensor, values: Tensor, meta: Tensor, offsets: Tensor | None, d_in: int
) -> Tensor:
    """As `_transposed` for groups of rows: [rows, d_out] → [rows, d_in]."""
    offsets = find_offsets(values, meta, d_in) if offsets is None else offsets
    size, first, sums = len(meta) // len(counts), 0, outputs.new_zeros(len(outputs), d_in)
    for group, count in enumerate(counts.tolist()):
        if count:
            rows = select_rows(values, meta, offsets, group * size, (group + 1) * size)
            sums[first : first + count] = _transposed(outputs[first : first + count], *rows, d_in, -1)
            first += count
    return sums


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, values, meta, offsets, _, ctx.window = inputs
    ctx.d_in = x.shape[-1]
    ctx.save_for_backward(values, meta, offsets)


def _gradients(ctx: Any, outputs: Tensor) -> tuple[Tensor | None, ...]:
    values, meta, offsets = ctx.saved_tensors
    x = bias = None
    if ctx.needs_input_grad[0]:
        x = torch.ops.moonshot.packed_transposed.default(outputs, values, meta, offsets, ctx.d_in, ctx.window)
    if ctx.needs_input_grad[4]:
        bias = outputs.flatten(0, -2).sum(0) if outputs.ndim > 1 else outputs
    return x, None, None, None, bias, None


def _remember_grouped(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.d_in = inputs[0].shape[1]
    ctx.save_for_backward(*inputs[1:])


def _gradients_grouped(ctx: Any, outputs: Tensor) -> tuple[Tensor | None, ...]:
    x = torch.ops.moonshot.packed_grouped_transposed.default(outputs, *ctx.saved_tensors, ctx.d_in)
    return x, None, None, None, None


for _name, _compute in (
    ("packed_linear", _product),
    ("packed_product", _product),
    ("packed_transposed", _transposed),
    ("packed_grouped", _grouped),
    ("packed_grouped_transposed", _grouped_transposed),
):
    _library.impl(_name, _compute, "CompositeExplicitAutograd")
for _name in ("packed_linear", "packed_product"):
    torch.library.register_fake(
        f"moonshot::{_name}", lambda x, _, meta, *rest: x.new_empty(*x.shape[:-1], meta.shape[0]), lib=_library
    )
torch.library.register_fake(
    "moonshot::packed_transposed", lambda y, _, meta, offsets, d_in, w: y.new_empty(*y.shape[:-1], d_in), lib=_library
)
torch.library.register_fake(
    "moonshot::packed_grouped",
    lambda x, counts, _, meta, *rest: x.new_empty(x.shape[0], meta.shape[0] // counts.shape[0]),
    lib=_library,
)
torch.library.register_fake(
    "moonshot::packed_grouped_transposed", lambda y, *rest: y.new_empty(y.shape[0], rest[-1]), lib=_library
)
torch.library.register_autograd("moonshot::packed_linear", _gradients, setup_context=_remember, lib=_library)
torch.library.register_autograd(
    "moonshot::packed_grouped", _gradients_grouped, setup_context=_remember_grouped, lib=_library
)
