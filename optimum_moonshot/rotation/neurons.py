"""The neurons of a layer: columns that may change their order or their scale, with the rows that make them.

What makes a neuron's column is one row of each matrix before (model/structured_groups.py finds which), by an activation that is
the same for all. So another order of the neurons leaves the function alone; it decides which of them an n:m pattern lets
compete. Where a parameter of its own acts on each neuron, as a gain would, they keep their order.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ..model.structured_groups import StructuredGroups
from .spaces import Place, Space, held
from .trace import Node, Trace, tolerance_of


def find_neurons(
    trace: Trace, units: Mapping[str, StructuredGroups], layers: Collection[str], spaces: Collection[Space]
) -> list[Space]:
    """The spaces of neurons, whose coordinates may change their order.

    Args:
        trace: of the model's run.
        units: layer → the units of its columns.
        layers: the names of those to look at.
        spaces: that were found; what they hold is no neurons.

    Returns:
        A space for every layer whose columns are neurons.
    """
    taken = held(spaces)
    found = []
    for name, unit in units.items():
        node = trace.nodes[trace.place[name]] if name in trace.place and name in layers else None
        if node is None or any((axis.holder, axis.name, axis.axis) in taken for axis in node.reads):
            continue
        makers = _makers(trace, node, unit)
        if makers and _makers_alone(trace, node, makers):
            places = [Place(axis) for axis in node.reads]
            places += [Place(axis, _rows(unit, maker.name), gives=True) for maker in makers for axis in maker.gives]
            found.append(Space(f"{name} neurons", unit.count, 1, False, tuple(places), permuted=True))
    return found


def find_scales(
    trace: Trace, units: Mapping[str, StructuredGroups], layers: Collection[str], spaces: Collection[Space]
) -> list[Space]:
    """The spaces whose coordinates may be scaled: those of heads, and of neurons that grow with a row of theirs.

    A gated MLP's columns are linear in the rows of up, and a factor on a row of a matrix before a ReLU comes out of it.

    Args:
        trace: of the model's run.
        units: layer → the units of its columns.
        layers: the names of those to look at.
        spaces: that were found: heads, and neurons that may be permuted.

    Returns:
        A space for every layer whose columns may be scaled.
    """
    heads = [space for space in spaces if space.name in {f"{name} heads" for name in layers}]
    found = [replace(space, name=f"{space.name}, scaled", scaled=True, follows=space) for space in heads]
    ordered = {space.name: space for space in spaces if space.permuted}
    taken = held(spaces)
    for name, unit in units.items():
        node = trace.nodes[trace.place[name]] if name in trace.place and name in layers else None
        follows = ordered.get(f"{name} neurons")
        if node is None or (follows is None and any((at.holder, at.name, at.axis) in taken for at in node.reads)):
            continue
        makers = _makers(trace, node, unit)
        rows = next((rows for maker in makers if (rows := _growing(trace, node, unit, maker)) is not None), None)
        if rows is not None:
            maker, index = rows
            places = [Place(axis) for axis in node.reads] + [Place(axis, index, gives=True) for axis in maker.gives]
            scale = Space(f"{name} neurons, scaled", unit.count, 1, False, tuple(places), scaled=True, follows=follows)
            found.append(scale)
    return found


def _makers(trace: Trace, node: Node, unit: StructuredGroups) -> list[Node]:
    """What makes a layer's neurons; nothing where its columns are none, or where that is not known."""
    makers = [trace.nodes[trace.place[maker]] for maker in unit.rows if maker in trace.place]
    known = len(makers) == len(unit.rows) and all(len(maker.leaves) == 1 for maker in makers)
    return makers if known and unit.size == 1 and len(node.inputs) == 1 else []


def _growing(trace: Trace, node: Node, unit: StructuredGroups, maker: Node) -> tuple[Node, Tensor] | None:
    """Rows of a maker, int64 [1, 1, neurons], that a positive factor passes through to the columns unchanged.

    By Euler's theorem that is where a column is the sum of its derivatives at the row times the row itself.
    """
    (inputs,), (leaf,) = node.inputs, maker.leaves
    generator = torch.Generator().manual_seed(4)
    cotangent = torch.randn(inputs.shape, generator=generator).to(inputs.device, inputs.dtype)
    (gradient,) = trace.gradients([inputs], [cotangent], [leaf])
    if gradient is None:
        return None
    grown = (gradient.double() * leaf.detach().double()).flatten(0, -2).sum(0).cpu()
    whole = (cotangent.double() * inputs.detach().double()).flatten(0, -2).sum(0).cpu()
    for rows in _rows(unit, maker.name)[0]:
        if float((grown[rows] - whole).norm()) <= tolerance_of(inputs.dtype) * float(whole.norm()):
            return maker, rows[None, None]
    return None


def _makers_alone(trace: Trace, node: Node, makers: list[Node]) -> bool:
    """Whether what a node reads depends on the given nodes, and on no other parameter in another way."""
    (inputs,) = node.inputs
    if not inputs.requires_grad:
        return False
    generator = torch.Generator().manual_seed(3)
    cotangent = torch.randn(inputs.shape, generator=generator).to(inputs.device, inputs.dtype)
    flat = [(other, leaf) for other in trace.nodes for leaf in other.leaves]
    gradients = trace.gradients([inputs], [cotangent], [leaf for _, leaf in flat])
    reached = {other.name for (other, _), found in zip(flat, gradients, strict=True) if found is not None}
    return reached == {maker.name for maker in makers}


def _rows(unit: StructuredGroups, maker: str) -> Tensor:
    """The rows of a layer that make each neuron, int64 [1, copies, neurons]."""
    served = unit.rows[maker]
    rows = (served >= 0).nonzero()[:, 0]
    rows = rows[served[rows].argsort(stable=True)]
    return rows.view(1, unit.count, -1).mT.contiguous()
