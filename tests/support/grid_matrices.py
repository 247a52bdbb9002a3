"""Random matrices on a grid."""

import torch


def random_matrix(grid, d_out, d_in, pattern=None, density=0.5, seed=0):
    """A matrix on a grid, with an empty row, an empty group, and −0.0 as a pruned weight."""
    generator = torch.Generator().manual_seed(seed)
    weight = 0.02 * torch.randn(d_out, d_in, generator=generator)
    scores = torch.rand(d_out, d_in, generator=generator)
    keep = scores < density if pattern is None else pattern.keep(scores)
    weight = torch.where(keep, weight, 0)
    weight[0], weight[-1, : grid.group] = 0, 0
    return on_grid(grid, weight)


def on_grid(grid, weight):
    """The nearest weights on a grid, in its dtype; a scale for the largest weight of every group."""
    scale = (grid.blocks(weight.float()).abs().amax(-1) / grid.top).to(grid.dtype)
    step = grid.per_weight(scale, weight.shape[1])
    return torch.where(weight == 0, -0.0, grid.values(grid.codes(weight, step), step))
