"""Small problems for learning a rotation."""

import torch
from torch import nn

from optimum_moonshot.model.layer_kinds import LinearLayer
from optimum_moonshot.objective.patterns import Unstructured
from optimum_moonshot.rotate.objective import Coordinates, Group, Matrix, Objective, inverse, set_totals
from optimum_moonshot.rotate.spaces import Space

HALF = Unstructured(0.5)


def space(width=8, count=1, fixes_ones=False):
    return Space("test", width, count, fixes_ones, ())


def problem(stream, patterns=(HALF,), heads=None, seed=0):
    """Two matrices that read a stream together, and one that reads heads and writes to the stream."""
    generator = torch.Generator().manual_seed(seed)

    def layer(name, *shape):
        module = nn.Linear(shape[1], shape[0], bias=False)
        module.weight.data = torch.randn(shape, generator=generator)
        return LinearLayer(name, (module,), False)

    def gram(size):
        x = torch.randn(4 * size, size, generator=generator) * torch.logspace(0, 1, size)
        return x.T @ x

    width = stream.width
    first = [Matrix(layer(f"read {i}", 12, width), patterns, ()) for i in range(2)]
    reads = Coordinates(stream, None)
    groups = [Group(first, reads, inverse(gram(width), reads), [])]
    inner = None
    if heads is not None:
        index = torch.arange(2 * heads.count * heads.width).view(heads.count, 2, heads.width)
        inner = Coordinates(heads, index)
    size = 16 if heads is None else 2 * heads.count * heads.width
    write = Matrix(layer("write", width, size), patterns, (Coordinates(stream, None),))
    groups.append(Group([write], inner, inverse(gram(size), inner), []))
    objective = Objective([(None, groups)])
    set_totals(objective, None)
    return objective
