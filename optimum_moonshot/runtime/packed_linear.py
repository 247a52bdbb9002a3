"""Linear layers whose weights stay packed in memory."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..packing.bitmask import (
    find_window,
    unpack,
)


class PackedLinear(nn.Module):
    """A Linear (or GPT-2's Conv1D) whose weight stays packed in memory; every forward pass unpacks it.

    Args:
        shape: d_out, d_in.
        values: how many are stored: their shape.
        bias: the layer's own, or None.
    """

    def __init__(self, shape: tuple[int, int], values: tuple[int, ...], bias: nn.Parameter | None, dtype: torch.dtype):
        super().__init__()
        self.out_features, self.in_features = shape
        self.register_buffer("weight_packed", torch.zeros(values, dtype=dtype))
        self.register_buffer("weight_meta", torch.zeros(shape[0], -(-shape[1] // 8), dtype=torch.uint8))
        self.register_parameter("bias", bias)
        self._window: int | None = None

    @property
    def weight(self) -> Tensor:
        """The dense weight [d_out, d_in], unpacked anew."""
        if self._window is None:
            self._window = find_window(self.weight_packed, self.weight_meta, self.in_features)
        return unpack(self.weight_packed, self.weight_meta, self.in_features, self._window)

    def forward(self, inputs: Tensor) -> Tensor:
        return functional.linear(inputs, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, values={list(self.weight_packed.shape)}"
