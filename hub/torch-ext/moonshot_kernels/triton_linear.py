"""The operator on GPUs: few rows of inputs, bound by memory bandwidth, use the packed weights, more the dense ones."""

from torch import Tensor
from torch.nn import functional

from . import triton_bitmask


def packed_linear(
    inputs: Tensor, values: Tensor, meta: Tensor, offsets: Tensor | None, bias: Tensor | None, window: int
) -> Tensor:
    d_in = inputs.shape[-1]
    flat = inputs.reshape(-1, d_in)
    if len(flat) > triton_bitmask.MOST_ROWS:
        return functional.linear(inputs, triton_bitmask.unpack(values, meta, d_in, offsets), bias)
    outputs = triton_bitmask.linear(flat, values, meta, offsets, window)
    outputs = outputs if bias is None else outputs + bias
    return outputs.view(*inputs.shape[:-1], len(meta))
