"""The formats "int{bits}g{group}" written out code by code, and random matrices on a grid."""

import torch


def pack(grid, matrix, keep, scale):
    """The bytes of all codes: a block at a time, a bit at a time; `keep` marks the stored weights."""
    content = []
    for row, stored, scales in zip(matrix.tolist(), keep.tolist(), scale.tolist(), strict=True):
        for first in range(0, len(row), 64):
            bits = []
            for place in range(first, min(first + 64, len(row))):
                if stored[place]:
                    step = scales[place // grid.group]
                    code = (round(row[place] / step) if step else 0) + 2 ** (grid.bits - 1)
                    bits += [code >> index & 1 for index in range(grid.bits)]
            bits += [0] * (-len(bits) % 8)
            content += [sum(bit << j for j, bit in enumerate(bits[b : b + 8])) for b in range(0, len(bits), 8)]
    return content


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
