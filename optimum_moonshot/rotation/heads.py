"""The spaces between the values of key-value heads and o, found from the derivatives of o's columns.

Attention mixes the tokens of a head's values but not their channels. The derivative of o's inputs with respect to the
outputs of v is therefore a token mixing times an identity: a factor on one column is a factor on one row, the same at
every token. This identifies v's rows in any order of a fused projection, and distinguishes them from those of q and k.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..model.structured_groups import StructuredGroups
from .spaces import Place, Space, occupied_axes
from .trace import Node, Trace, tolerance_of

# The columns of a head have factors from 1 to this: a range in which 16 bits distinguish 512 of them.
LARGEST_FACTOR = 2.0**8


def find_heads(trace: Trace, groups: Mapping[str, StructuredGroups], spaces: Sequence[Space]) -> list[Space]:
    """The spaces between values and the layers that read them, one for all heads of a layer.

    Args:
        trace: of the model's run.
        groups: layer → the structured groups of its columns.
        spaces: of whole axes; a single head is among them.

    Returns:
        A space for every layer whose columns are heads, with a rotation for each key-value head.
    """
    head_spaces: list[Space] = []
    sizes: dict[int, int] = {}  # columns of a group → the head size, the first guess for other layers
    taken = occupied_axes(spaces)
    for name, group in groups.items():
        node = trace.nodes[trace.place[name]] if name in trace.place else None
        if node is None or group.size < 2 or len(node.inputs) != 1:
            continue
        if any((axis.holder, axis.name, axis.axis) in taken for axis in node.reads):
            continue
        space = _head_space(trace, node, group, sizes.get(group.size))
        if space is not None:
            sizes[group.size] = space.width
            head_spaces.append(space)
    return head_spaces


def _head_space(trace: Trace, node: Node, group: StructuredGroups, likely: int | None) -> Space | None:
    """The space of one layer's heads; None if its columns are not heads, or not each of one row."""
    makers = [trace.nodes[trace.place[name]] for name in group.rows if name in trace.place]
    makers = [maker for maker in makers if len(maker.leaves) == 1]
    (inputs,) = node.inputs
    if not makers or not inputs.requires_grad:
        return None
    generator = torch.Generator().manual_seed(2)
    cotangent = torch.randn(inputs.shape, generator=generator).to(inputs.device, inputs.dtype)
    leaves = [maker.leaves[0] for maker in makers]
    plain = trace.gradients([inputs], [cotangent], leaves)
    served = torch.cat([group.rows[maker.name] for maker in makers])
    sizes = [size for size in range(group.size, 1, -1) if group.size % size == 0]
    for size in dict.fromkeys([likely, *sizes] if likely else sizes):
        factors = LARGEST_FACTOR ** (torch.arange(size, dtype=torch.float64) / size)
        scale = factors.repeat(inputs.shape[-1] // size).to(inputs.device, inputs.dtype)
        scaled = trace.gradients([inputs], [cotangent * scale], leaves)
        rows = torch.cat([_positions(*three, factors) for three in zip(leaves, plain, scaled, strict=True)])
        index = _index(rows, served, group, size)
        if index is not None:
            return _space(node, makers, group, size, index)
    return None


def _positions(leaf: Tensor, plain: Tensor | None, scaled: Tensor | None, factors: Tensor) -> Tensor:
    """The column of a head that each row computes alone, int64 [rows]; -1 for none."""
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


def _index(positions: Tensor, served: Tensor, group: StructuredGroups, size: int) -> Tensor | None:
    """The row of each column of each key-value head, int64 [heads, size]; None unless there is exactly one."""
    valid = positions >= 0
    if not valid.any() or (served[valid] < -1).any():
        return None
    shared = bool((served[valid] == -1).all())  # one key-value head for all query heads
    heads = 1 if shared else group.count
    if not shared and (served[valid] < 0).any():
        return None
    column = positions[valid] + (0 if shared else size * served[valid])
    if not torch.equal(column.sort().values, torch.arange(heads * size)):
        return None
    return valid.nonzero()[:, 0][column.argsort()].view(heads, size)


def _space(node: Node, makers: list[Node], group: StructuredGroups, size: int, rows: Tensor) -> Space | None:
    heads = len(rows)
    columns = torch.arange(group.count * group.size).view(heads, -1, size)
    places = [Place(axis, columns) for axis in node.reads]
    first = 0
    for maker in makers:
        count = maker.leaves[0].shape[-1]
        inside = (rows >= first) & (rows < first + count)
        if inside.any():
            if not inside.all():
                return None  # values of several matrices
            places += [Place(axis, (rows - first)[:, None], writes=True) for axis in maker.writes]
        first += count
    return Space(f"{node.name} heads", size, heads, False, tuple(places))
