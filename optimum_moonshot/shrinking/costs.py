"""The cost of a smaller model: parameters or bytes, exactly, from the shapes that a configuration leaves."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from ..model.layers import PrunableLayer, find_blocks
from ..model.structured_groups import StructuredGroups
from .experts import ExpertCount
from .widths import Width

Size = Callable[[nn.Parameter, int], float]  # (parameter, number of its entries) → cost


@dataclass(frozen=True)
class Costs:
    """Of a model and of each part that may leave, in one unit."""

    unit: str  # "parameters", "bytes" or "seconds"
    dense: float
    blocks: tuple[float, ...]  # of each block
    # Width → the saving in each block by every level, [blocks][levels].
    savings: Mapping[str, tuple[tuple[float, ...], ...]]


def count_entries(parameter: nn.Parameter, entries: int) -> float:
    """For a cost in parameters."""
    return entries


def count_bytes(parameter: nn.Parameter, entries: int) -> float:
    """For a cost in bytes, without the headers of a file."""
    return entries * parameter.element_size()


def shape_costs(
    model: PreTrainedModel, layers: Mapping[str, PrunableLayer], widths: Sequence[Width], unit: str
) -> Costs:
    """The parameters or the bytes of a model and its parts; shared parameters count once.

    Args:
        model: dense.
        layers: all layers of the model's blocks, by name.
        widths: that can be reduced.
        unit: "parameters" or "bytes".
    """
    size = count_entries if unit == "parameters" else count_bytes
    blocks = [module for _, module in find_blocks(model)]

    def total(module: nn.Module) -> float:
        return sum(size(each, each.numel()) for each in module.parameters())

    savings = {}
    for width in widths:
        by_block = [
            sum(group_cost(layer, groups, layers, size) for layer, groups in width.members if belongs(layer, block))
            + (width.expert_cost(block, size) if isinstance(width, ExpertCount) else 0.0)
            for block in blocks
        ]
        savings[width.name] = tuple(tuple(each * level for level in width.levels) for each in by_block)
    return Costs(unit, total(model), tuple(map(total, blocks)), savings)


def belongs(layer: PrunableLayer, block: nn.Module) -> bool:
    """Whether a layer is inside of a block."""
    return any(module is each for module in layer.modules for each in block.modules())


def group_cost(
    layer: PrunableLayer, groups: StructuredGroups, layers: Mapping[str, PrunableLayer], size: Size = count_entries
) -> float:
    """The cost of one neuron or head: its columns, and the rows and biases that produce them."""
    cost = size(layer.parameter, layer.shape[0] * groups.size)
    for name, served in groups.rows.items():
        producer, rows = layers[name], int((served == 0).sum())
        cost += size(producer.parameter, rows * producer.shape[1])
        bias = producer.module._parameters.get("bias")
        cost += 0 if bias is None else size(bias, rows)
    return cost
