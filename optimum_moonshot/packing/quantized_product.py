"""The product with a matrix in a format "int{bits}g{group}", as operators of torch, like those of `bitmask_product`.

``moonshot::quantized_linear`` is x Wᵀ + bias, with gradients for x and bias; W is constant. For gradients, and where
there is no compiled library, slices of rows of W are unpacked, so that no dense copy of W is written to memory.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..objective.grid import Grid
from .quantized import unpacked_slices

_MATRIX = "Tensor codes, Tensor scale, Tensor meta, Tensor? offsets, int bits, int group"
_library = torch.library.Library("moonshot", "FRAGMENT")
_library.define(f"quantized_linear(Tensor inputs, {_MATRIX}, Tensor? bias, bool wide) -> Tensor")
_library.define(f"quantized_product(Tensor inputs, {_MATRIX}, Tensor? bias, bool wide) -> Tensor")
_library.define(f"quantized_transposed(Tensor outputs, {_MATRIX}, int d_in) -> Tensor")


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
    outputs = inputs.new_empty(*inputs.shape[:-1], len(scale))
    for rows, tile in unpacked_slices(Grid(bits, group, scale.dtype), codes, scale, meta, inputs.shape[-1]):
        outputs[..., rows] = functional.linear(inputs, tile, None if bias is None else bias[rows])
    return outputs


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
    wider = torch.promote_types(outputs.dtype, torch.float32)
    sums = torch.zeros(*outputs.shape[:-1], d_in, dtype=wider, device=outputs.device)
    for rows, tile in unpacked_slices(Grid(bits, group, scale.dtype), codes, scale, meta, d_in):
        sums += outputs[..., rows] @ tile
    return sums.to(outputs.dtype)


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


_COMPUTED = {"quantized_linear": _product, "quantized_product": _product, "quantized_transposed": _transposed}
for _name, _compute in _COMPUTED.items():
    _library.impl(_name, _compute, "CompositeExplicitAutograd")
for _name in ("quantized_linear", "quantized_product"):
    torch.library.register_fake(
        f"moonshot::{_name}", lambda x, _, scale, *rest: x.new_empty(*x.shape[:-1], scale.shape[0]), lib=_library
    )
torch.library.register_fake(
    "moonshot::quantized_transposed", lambda y, *rest: y.new_empty(*y.shape[:-1], rest[-1]), lib=_library
)
torch.library.register_autograd("moonshot::quantized_linear", _gradients, setup_context=_remember, lib=_library)
