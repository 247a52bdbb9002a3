"""The neurons of a layer: columns that may change their order, with the rows that make them.

What makes a neuron's column is one row of each matrix before (model/units.py finds which), by an activation that is the
same for all. So another order of the neurons leaves the function alone; it decides which of them an n:m pattern lets
compete. Where a parameter of its own acts on each neuron, as a gain would, they keep their order.
"""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from ..model.units import Units
from .spaces import Place, Space
from .trace import Node, Trace


def find_neurons(
    trace: Trace, units: Mapping[str, Units], layers: Collection[str], spaces: Collection[Space]
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
    taken = {(place.at.holder, place.at.name, place.at.axis) for space in spaces for place in space.places}
    found = []
    for name, unit in units.items():
        node = trace.nodes[trace.place[name]] if name in trace.place and name in layers else None
        if node is None or unit.size > 1 or len(node.inputs) != 1:
            continue
        if any((axis.holder, axis.name, axis.axis) in taken for axis in node.reads):
            continue
        makers = [trace.nodes[trace.place[maker]] for maker in unit.rows if maker in trace.place]
        if len(makers) == len(unit.rows) and _makers_alone(trace, node, makers):
            places = [Place(axis) for axis in node.reads]
            places += [Place(axis, _rows(unit, maker.name)) for maker in makers for axis in maker.gives]
            found.append(Space(f"{name} neurons", unit.count, 1, False, tuple(places), permuted=True))
    return found


def _makers_alone(trace: Trace, node: Node, makers: list[Node]) -> bool:
    """Whether what a node reads depends on the given nodes, and on no other parameter in another way."""
    (inputs,) = node.inputs
    if not inputs.requires_grad or any(len(maker.leaves) != 1 for maker in makers):
        return False
    generator = torch.Generator().manual_seed(3)
    cotangent = torch.randn(inputs.shape, generator=generator).to(inputs.device, inputs.dtype)
    flat = [(other, leaf) for other in trace.nodes for leaf in other.leaves]
    gradients = trace.gradients([inputs], [cotangent], [leaf for _, leaf in flat])
    reached = {other.name for (other, _), found in zip(flat, gradients, strict=True) if found is not None}
    return reached == {maker.name for maker in makers}


def _rows(unit: Units, maker: str) -> Tensor:
    """The rows of a layer that make each neuron, int64 [1, copies, neurons]."""
    served = unit.rows[maker]
    rows = (served >= 0).nonzero()[:, 0]
    rows = rows[served[rows].argsort(stable=True)]
    return rows.view(1, unit.count, -1).mT.contiguous()
