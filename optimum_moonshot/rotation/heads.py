"""What a key-value head carries from v to o: a space for each, found by what the columns of o follow from.

Attention mixes the tokens of a head's values, the channels stay what they are. So the derivative of o's columns at the
rows of v is a product of a token mixing and an identity: a factor on one column is a factor on one row, the same at
every token. That names v's rows, in whatever order a fused projection has them, and tells them from those of q and k.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..model.structured_groups import StructuredGroups
from .spaces import Place, Space, held
from .trace import Node, Trace, tolerance_of

# Factors on the columns of a head lie between 1 and this; so 16 bits tell 512 of them apart.
LARGEST_FACTOR = 2.0**8


def find_heads(trace: Trace, units: Mapping[str, StructuredGroups], spaces: Sequence[Space]) -> list[Space]:
    """The spaces between values and what reads them, those of one layer together.

    Args:
        trace: of the model's run.
        units: layer → the units of its columns.
        spaces: that were found. A single head is a whole space between two matrices already.

    Returns:
        A space for every layer whose columns are heads, with a rotation for each key-value head.
    """
    found, sizes = [], {}
    taken = held(spaces)
    for name, unit in units.items():
        node = trace.nodes[trace.place[name]] if name in trace.place else None
        if node is None or unit.size < 2 or len(node.inputs) != 1:
            continue
        if any((axis.holder, axis.name, axis.axis) in taken for axis in node.reads):
            continue
        space = _head_space(trace, node, unit, sizes.get(unit.size))
        if space is not None:
            sizes[unit.size] = space.width
            found.append(space)
    return found


def _head_space(trace: Trace, node: Node, unit: StructuredGroups, likely: int | None) -> Space | None:
    """The space of one layer's heads; None where its columns are none, or have no row of their own."""
    makers = [trace.nodes[trace.place[name]] for name in unit.rows if name in trace.place]
    makers = [maker for maker in makers if len(maker.leaves) == 1]
    (inputs,) = node.inputs
    if not makers or not inputs.requires_grad:
        return None
    generator = torch.Generator().manual_seed(2)
    cotangent = torch.randn(inputs.shape, generator=generator).to(inputs.device, inputs.dtype)
    leaves = [maker.leaves[0] for maker in makers]
    plain = trace.gradients([inputs], [cotangent], leaves)
    served = torch.cat([unit.rows[maker.name] for maker in makers])
    sizes = [size for size in range(unit.size, 1, -1) if unit.size % size == 0]
    for size in dict.fromkeys([likely, *sizes] if likely else sizes):
        factors = LARGEST_FACTOR ** (torch.arange(size, dtype=torch.float64) / size)
        scale = factors.repeat(inputs.shape[-1] // size).to(inputs.device, inputs.dtype)
        scaled = trace.gradients([inputs], [cotangent * scale], leaves)
        rows = torch.cat([_positions(*three, factors) for three in zip(leaves, plain, scaled, strict=True)])
        index = _index(rows, served, unit, size)
        if index is not None:
            return _space(node, makers, unit, size, index)
    return None


def _positions(leaf: Tensor, plain: Tensor | None, scaled: Tensor | None, factors: Tensor) -> Tensor:
    """The column of a head that each row makes alone, int64 [rows], -1 where it does not make one."""
    if plain is None or scaled is None:
        return torch.full((leaf.shape[-1],), -1)
    before, after = (each.flatten(0, -2).double().cpu() for each in (plain, scaled))
    size = before.square().sum(0)
    ratio = (before * after).sum(0) / size.clamp_min(1e-300)
    error = (after - before * ratio).norm(dim=0)
    constant = (size > 0) & (error <= tolerance_of(plain.dtype) * after.norm(dim=0)) & (ratio > 0)
    nearest = (ratio.clamp_min(1e-300).log()[:, None] - factors.log()).abs().argmin(1)
    exact = (ratio / factors[nearest] - 1).abs() <= 0.2 * (LARGEST_FACTOR ** (1 / len(factors)) - 1)
    return torch.where(constant & exact, nearest, -1)


def _index(positions: Tensor, served: Tensor, unit: StructuredGroups, size: int) -> Tensor | None:
    """Which row makes each column of each key-value head, int64 [heads, size]; None unless there is exactly one."""
    chosen = positions >= 0
    if not chosen.any() or (served[chosen] < -1).any():
        return None
    shared = bool((served[chosen] == -1).all())  # one key-value head for all query heads
    heads = 1 if shared else unit.count
    if not shared and (served[chosen] < 0).any():
        return None
    place = positions[chosen] + (0 if shared else size * served[chosen])
    if not torch.equal(place.sort().values, torch.arange(heads * size)):
        return None
    return chosen.nonzero()[:, 0][place.argsort()].view(heads, size)


def _space(node: Node, makers: list[Node], unit: StructuredGroups, size: int, rows: Tensor) -> Space | None:
    heads = len(rows)
    columns = torch.arange(unit.count * unit.size).view(heads, -1, size)
    places = [Place(axis, columns) for axis in node.reads]
    first = 0
    for maker in makers:
        count = maker.leaves[0].shape[-1]
        mine = (rows >= first) & (rows < first + count)
        if mine.any():
            if not mine.all():
                return None  # values of several matrices
            places += [Place(axis, (rows - first)[:, None], gives=True) for axis in maker.gives]
        first += count
    return Space(f"{node.name} heads", size, heads, False, tuple(places))
