"""The cost of a smaller model: parameters or bytes, exactly, from the shapes of its configuration."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn
from transformers import PreTrainedModel

from ..model.layers import PrunableLayer, find_blocks, find_structure
from ..model.structured_groups import StructuredGroups
from .experts import ExpertCount
from .widths import Width

Size = Callable[[nn.Parameter, int], float]  # (parameter, number of its entries) → cost


@dataclass(frozen=True)
class Costs:
    """The costs of a model and of each part that can be removed, in one unit."""

    unit: str  # "parameters", "bytes" or "seconds"
    dense: float  # of the whole model
    blocks: tuple[float, ...]  # of each block
    # Width → the saving in each block by every level, [blocks][levels].
    savings: Mapping[str, tuple[tuple[float, ...], ...]]
    # Pair of widths → in each block, what the last levels of both save together and `savings` counts twice: the neurons
    # of removed experts. It is proportional to both levels.
    overlaps: Mapping[tuple[str, str], tuple[float, ...]] = field(default_factory=dict)

    def scaled(self, factor: float) -> "Costs":
        """The same costs, each multiplied by a factor."""
        blocks = tuple(factor * block for block in self.blocks)
        savings = {
            name: tuple(tuple(factor * saving for saving in levels) for levels in by_block)
            for name, by_block in self.savings.items()
        }
        overlaps = {names: tuple(factor * cost for cost in by_block) for names, by_block in self.overlaps.items()}
        return Costs(self.unit, factor * self.dense, blocks, savings, overlaps)

    def least(self, most_blocks: int) -> float:
        """The cost without the `most_blocks` most expensive blocks, at the last level of every width."""
        saved = [
            sum(by_block[index][-1] for by_block in self.savings.values())
            - sum(by_block[index] for by_block in self.overlaps.values())
            for index in range(len(self.blocks))
        ]
        remaining = [block - saving for block, saving in zip(self.blocks, saved, strict=True)]
        return self.dense - sum(saved) - sum(sorted(remaining, reverse=True)[:most_blocks])


@dataclass(frozen=True)
class Narrowing:
    """A smaller hidden size, and the number of axes of each parameter that become shorter."""

    width: int  # the hidden size of the model
    size: int
    axes: Mapping[int, int]  # id of a parameter → number

    def entries(self, parameter: nn.Parameter, entries: int) -> int:
        """The number that remains of `entries` of a parameter, which span all axes that become shorter."""
        axes = self.axes.get(id(parameter), 0)
        return entries * self.size**axes // self.width**axes


def count_entries(parameter: nn.Parameter, entries: int) -> float:
    """The cost of some entries of a parameter, in parameters."""
    return entries


def count_bytes(parameter: nn.Parameter, entries: int) -> float:
    """The cost of some entries of a parameter, in bytes, without the headers of a file."""
    return entries * parameter.element_size()


def dense_cost(model: nn.Module, unit: str) -> float:
    """The parameters or the bytes of a model; shared parameters count once."""
    size = count_entries if unit == "parameters" else count_bytes
    return sum(size(parameter, parameter.numel()) for parameter in model.parameters())


def shape_costs(
    model: PreTrainedModel,
    widths: Sequence[Width],
    unit: str,
    narrowing: Narrowing | None = None,
) -> Costs:
    """The parameters or the bytes of a model and its parts; shared parameters count once.

    Args:
        model: dense.
        widths: the reducible widths.
        unit: "parameters" or "bytes".
        narrowing: a smaller hidden size to compute the costs for; None is the model's own.
    """
    count = count_entries if unit == "parameters" else count_bytes
    layers: dict[str, PrunableLayer] = {layer.name: layer for layer in find_structure(model).layers()}

    def size(parameter: nn.Parameter, entries: int) -> float:
        return count(parameter, entries if narrowing is None else narrowing.entries(parameter, entries))

    blocks = [module for _, module in find_blocks(model)]

    def total(module: nn.Module) -> float:
        return sum(size(parameter, parameter.numel()) for parameter in module.parameters())

    def one(width: Width, block: nn.Module, of_experts: int | None = None) -> float:
        """The cost of one group of a width in a block, or in each mixture of this number of experts there."""
        if isinstance(width, ExpertCount):
            return width.expert_cost(block, size)
        return sum(
            group_cost(layer, groups, layers, size) * (groups.count // width.count)
            for layer, groups in width.members
            if belongs(layer, block) and of_experts in (None, layer.matrices)
        )

    savings, overlaps = {}, {}
    for width in widths:
        by_block = [one(width, block) for block in blocks]
        savings[width.name] = tuple(tuple(cost * level for level in width.levels) for cost in by_block)
    for experts in (width for width in widths if isinstance(width, ExpertCount)):
        share = experts.sparsity(experts.levels[-1])
        for width in (width for width in widths if any(layer.separate for layer, _ in width.members)):
            by_block = [share * width.levels[-1] * one(width, block, experts.count) for block in blocks]
            overlaps[experts.name, width.name] = tuple(by_block)
    return Costs(unit, total(model), tuple(map(total, blocks)), savings, overlaps)


def belongs(layer: PrunableLayer, block: nn.Module) -> bool:
    """Whether a layer is inside a block."""
    return any(module is inner for module in layer.modules for inner in block.modules())


def group_cost(
    layer: PrunableLayer, groups: StructuredGroups, layers: Mapping[str, PrunableLayer], size: Size = count_entries
) -> float:
    """The cost of one neuron or head, of every expert: its columns, and the rows and biases that produce them."""
    cost = size(layer.parameter, layer.shape[0] * groups.size)
    for name, served in groups.rows.items():
        producer = layers[name]
        rows = producer.matrices * int((served == 0).sum())
        cost += size(producer.parameter, rows * producer.shape[1])
        cost += 0 if producer.bias is None else size(producer.bias, rows)
    return cost
