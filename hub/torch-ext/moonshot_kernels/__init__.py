"""Linear layers with pruned weights that stay packed: their nonzero values, and one bit per weight."""

import torch
from torch import Tensor

from ._ops import add_op_namespace_prefix, ops

__all__ = ["packed_linear"]


def packed_linear(
    inputs: Tensor,
    values: Tensor,
    meta: Tensor,
    offsets: Tensor | None = None,
    bias: Tensor | None = None,
    window: int = 0,
) -> Tensor:
    """The product x Wᵀ + bias, without gradients.

    Args:
        inputs: x [..., d_in], in the dtype of the values.
        values: the weights that are kept, row by row: [d_out, values of a row], or flat if rows differ in their number.
        meta: uint8 [d_out, ⌈d_in/8⌉]; bit j of byte b, from the least significant, is set where weight 8b+j is kept.
        offsets: for flat values, int64 [d_out + 1]: the index of the first value of each row, and the number of all.
        bias: [d_out].
        window: 4 or 8 if all windows of so many weights keep the same number of weights, as in 2:4; faster on GPUs.

    Returns:
        [..., d_out] in the dtype of x, accumulated in float32.
    """
    return ops.packed_linear(inputs, values, meta, offsets, bias, window)


@torch.library.register_fake(add_op_namespace_prefix("packed_linear"))
def _fake(inputs, values, meta, offsets, bias, window):
    return inputs.new_empty(*inputs.shape[:-1], meta.shape[0])


if torch.version.cuda or torch.version.hip:
    from .triton_linear import packed_linear as _on_gpu

    torch.library.impl(add_op_namespace_prefix("packed_linear"), "CUDA")(_on_gpu)
