"""The neurons of a layer: columns that may be permuted or scaled, with the rows that compute them.

A neuron's column is computed from one row of each preceding matrix (found by model/structured_groups.py) by the same
activation for all neurons. A channel permutation of the neurons therefore preserves the function; it determines which
weights an n:m pattern compares. Neurons are not permuted if another parameter, such as a gain, acts on each of them.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ..model.structured_groups import StructuredGroups
from .spaces import Place, Space, occupied_axes
from .trace import Node, Trace, tolerance_of


def find_neurons(
    trace: Trace, groups: Mapping[str, StructuredGroups], layers: Collection[str], spaces: Collection[Space]
) -> list[Space]:
    """The spaces of neurons, whose coordinates may be permuted.

    Args:
        trace: of the model's run.
        groups: layer → the structured groups of its columns.
        layers: the names of the layers to consider.
        spaces: whose axes are not neurons.

    Returns:
        A space for every layer whose columns are neurons.
    """
    taken = occupied_axes(spaces)
    neurons = []
    for name, group in groups.items():
        node = trace.nodes[trace.place[name]] if name in trace.place and name in layers else None
        if node is None or any((axis.holder, axis.name, axis.axis) in taken for axis in node.reads):
            continue
        makers = _makers(trace, node, group)
        if makers and _makers_alone(trace, node, makers):
            places = [Place(axis) for axis in node.reads]
            places += [Place(axis, _rows(group, maker.name), writes=True) for maker in makers for axis in maker.writes]
            neurons.append(Space(f"{name} neurons", group.count, 1, False, tuple(places), permuted=True))
    return neurons


def find_scales(
    trace: Trace, groups: Mapping[str, StructuredGroups], layers: Collection[str], spaces: Collection[Space]
) -> list[Space]:
    """The spaces whose coordinates may be scaled: those of heads, and of neurons that are homogeneous in a row.

    A gated MLP's columns are linear in the rows of up, and ReLU is positively homogeneous.

    Args:
        trace: of the model's run.
        groups: layer → the structured groups of its columns.
        layers: the names of the layers to consider.
        spaces: of heads, and of neurons that may be permuted.

    Returns:
        A space for every layer whose columns may be scaled.
    """
    heads = [space for space in spaces if space.name in {f"{name} heads" for name in layers}]
    scales = [replace(space, name=f"{space.name}, scaled", scaled=True, follows=space) for space in heads]
    permuted = {space.name: space for space in spaces if space.permuted}
    taken = occupied_axes(spaces)
    for name, group in groups.items():
        node = trace.nodes[trace.place[name]] if name in trace.place and name in layers else None
        follows = permuted.get(f"{name} neurons")
        if node is None or (follows is None and any((at.holder, at.name, at.axis) in taken for at in node.reads)):
            continue
        makers = _makers(trace, node, group)
        rows = next((rows for maker in makers if (rows := _homogeneous(trace, node, group, maker)) is not None), None)
        if rows is not None:
            maker, index = rows
            places = [Place(axis) for axis in node.reads] + [Place(axis, index, writes=True) for axis in maker.writes]
            scale = Space(f"{name} neurons, scaled", group.count, 1, False, tuple(places), scaled=True, follows=follows)
            scales.append(scale)
    return scales


def _makers(trace: Trace, node: Node, group: StructuredGroups) -> list[Node]:
    """The nodes that compute a layer's neurons; empty if its columns are not neurons, or these nodes are unknown."""
    makers = [trace.nodes[trace.place[maker]] for maker in group.rows if maker in trace.place]
    complete = len(makers) == len(group.rows) and all(len(maker.leaves) == 1 for maker in makers)
    return makers if complete and group.size == 1 and len(node.inputs) == 1 else []


def _homogeneous(trace: Trace, node: Node, group: StructuredGroups, maker: Node) -> tuple[Node, Tensor] | None:
    """The rows of a maker, int64 [1, 1, neurons], in which the columns are positively homogeneous of degree 1.

    By Euler's theorem a column is then the inner product of the row and the column's gradient with respect to it.
    """
    (inputs,), (leaf,) = node.inputs, maker.leaves
    generator = torch.Generator().manual_seed(4)
    cotangent = torch.randn(inputs.shape, generator=generator).to(inputs.device, inputs.dtype)
    (gradient,) = trace.gradients([inputs], [cotangent], [leaf])
    if gradient is None:
        return None
    grown = (gradient.double() * leaf.detach().double()).flatten(0, -2).sum(0).cpu()
    whole = (cotangent.double() * inputs.detach().double()).flatten(0, -2).sum(0).cpu()
    for rows in _rows(group, maker.name)[0]:
        if float((grown[rows] - whole).norm()) <= tolerance_of(inputs.dtype) * float(whole.norm()):
            return maker, rows[None, None]
    return None


def _makers_alone(trace: Trace, node: Node, makers: list[Node]) -> bool:
    """Whether the inputs of a node depend only on the given nodes."""
    (inputs,) = node.inputs
    if not inputs.requires_grad:
        return False
    generator = torch.Generator().manual_seed(3)
    cotangent = torch.randn(inputs.shape, generator=generator).to(inputs.device, inputs.dtype)
    flat = [(other, leaf) for other in trace.nodes for leaf in other.leaves]
    gradients = trace.gradients([inputs], [cotangent], [leaf for _, leaf in flat])
    reached = {other.name for (other, _), gradient in zip(flat, gradients, strict=True) if gradient is not None}
    return reached == {maker.name for maker in makers}


def _rows(group: StructuredGroups, maker: str) -> Tensor:
    """The rows of a layer that compute each neuron, int64 [1, copies, neurons]."""
    served = group.rows[maker]
    rows = (served >= 0).nonzero()[:, 0]
    rows = rows[served[rows].argsort(stable=True)]
    return rows.view(1, group.count, -1).mT.contiguous()
