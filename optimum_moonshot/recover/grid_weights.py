"""Weights on a grid that train: latent float32 weights are rounded in each forward pass, straight through in backward.

The codes are c = round(v/s), clipped to ±top, the weights c·s. The gradient of a scale is that of LSQ (Esser et al.,
arXiv 1902.08153): dw/ds = c - v/s where v/s is inside of the grid, and ±top outside. Latent weights
outside pass their gradients too; zero gradients there measured the same.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..model.layers import PrunableLayer
from ..objective.grid import Grid


@dataclass(frozen=True)
class GridWeight:
    """The grid of a layer whose parameter holds the latent weights in float32."""

    layer: PrunableLayer
    grid: Grid
    scale: nn.Parameter  # [d_out, groups] in float32

    @classmethod
    def restore(cls, layer: PrunableLayer, grid: Grid) -> "GridWeight":
        """The grid of weights that are on it.

        Raises:
            MoonshotError: they are not.
        """
        return cls(layer, grid, nn.Parameter(grid.scales_of(layer.matrix.to(grid.dtype)).float()))

    def parameter(self) -> Tensor:
        """The weights on the grid in float32, in the form of the layer's parameter."""
        latent = self.layer.as_matrix(self.layer.parameter)
        return self.layer.as_parameter(on_grid(latent, self.scale, self.grid))


def on_grid(latent: Tensor, scale: Tensor, grid: Grid) -> Tensor:
    """The nearest weights on a grid, with gradients of both arguments.

    Args:
        latent: [d_out, d_in] in float32.
        scale: [d_out, groups] in float32; the weights use it in the dtype of the grid.
        grid: its dtype is that of the weights.

    Returns:
        [d_out, d_in] in float32, exact in the dtype of the grid.
    """
    weight: Tensor = _StraightThrough.apply(latent, scale, grid)
    return weight


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, latent: Tensor, scale: Tensor, grid: Grid) -> Tensor:
        step = grid.per_weight(scale.to(grid.dtype), latent.shape[1])
        ctx.save_for_backward(latent, scale)
        ctx.grid = grid
        return grid.values(grid.codes(latent, step), step).float()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        (gradient,), (latent, scale), grid = gradients, ctx.saved_tensors, ctx.grid
        step = grid.per_weight(scale.to(grid.dtype), latent.shape[1]).float()
        ratio = latent / step.masked_fill(step == 0, 1)
        by_step = grid.codes(latent, step) - ratio.masked_fill(ratio.abs() > grid.top, 0)
        return gradient, grid.blocks(gradient * by_step).sum(-1), None
