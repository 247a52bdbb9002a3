"""The parts of a stage: which statistics one pass collects, and which process solves each layer.

A part is a value, made by one pure function of the layers, their bytes, the memory and the number of processes. It is
either some layers whose statistics fit in memory together, or a single layer that exceeds the memory, with the slices
of its rows or experts that are collected one pass at a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from ..calibration.merging import Owner
from ..distributed.ranks import Ranks
from ..model.layers import PrunableLayer
from .spec import StatisticsSpec


@dataclass(frozen=True)
class Part:
    """Layers that are collected and solved together."""

    layers: tuple[PrunableLayer, ...]
    owners: tuple[Owner, ...]  # who solves each layer: a process, several with some rows each, or (None) all
    slices: tuple[slice, ...] = ()  # rows or experts of the only layer, one pass each; () is all in one pass
    sizes: tuple[int, ...] = ()  # bytes of each layer's statistics in this process

    @property
    def name(self) -> str:
        """For the report."""
        others = f" and {len(self.layers) - 1} more layers" if len(self.layers) > 1 else ""
        return self.layers[0].name + others


def partition(layers: Sequence[PrunableLayer], spec: StatisticsSpec, memory: int, ranks: Ranks) -> list[Part]:
    """Divide layers into parts.

    A part may use half of the memory; the other half is for the solver.

    Args:
        layers: of a stage, in their order.
        spec: the statistics.
        memory: bytes that are available, the same in all processes.
        ranks: the processes.
    """
    room = memory // 2
    sizes = [resident_bytes(layer, spec, room, ranks) for layer in layers]
    parts: list[Part] = []
    first = 0
    while first < len(layers):
        end, used = first + 1, sizes[first]
        while end < len(layers) and used + sizes[end] <= room:
            used += sizes[end]
            end += 1
        together, slices = tuple(layers[first:end]), tuple[slice, ...]()
        if len(together) == 1 and used > room:
            slices = spec.slices(layers[first], used, room)
        parts.append(Part(together, _owners(together, spec, room, ranks), slices, tuple(sizes[first:end])))
        first = end
    return parts


def halvings(part: Part, spec: StatisticsSpec) -> tuple[tuple[int, int] | None, tuple[int, int] | None]:
    """The bytes that a part collects at once, and half of them, for its layers and for the slices of a single layer.

    Args:
        part: the part.
        spec: the statistics.
    """
    if not part.sizes:  # without data
        return None, None
    if len(part.layers) > 1:
        total = sum(part.sizes)
        return (total, max(total // 2, *part.sizes)), None
    slicing = spec.slicing(part.layers[0], part.sizes[0])
    width = max((each.stop - each.start for each in part.slices), default=slicing.pieces)
    if width == 1:
        return None, None
    return None, (slicing.fixed + width * slicing.each, slicing.fixed + -(-width // 2) * slicing.each)


def resident_bytes(layer: PrunableLayer, spec: StatisticsSpec, room: int, ranks: Ranks) -> int:
    """Bytes of a layer's statistics in a process, on average where several processes have some samples each.

    Such a process has its samples of every layer, and all samples of the layers that it solves: twice its shard. A
    layer that fills the memory counts whole, unless its experts or its rows are sharded.

    Args:
        layer: the layer.
        spec: the statistics.
        room: bytes that a part may use.
        ranks: the processes.
    """
    whole, size = spec.bytes_of(layer), ranks.size
    if size <= 2 or spec.diagonal or not spec.needs_gradients(layer) or spec.plan(layer).column_block is not None:
        return whole
    if whole > room and not (_shards_experts(layer, ranks) or _shards_rows(layer, spec, ranks)):
        return whole
    inputs = spec.gram_bytes(layer)
    return inputs + 2 * (whole - inputs) // size


def _owners(layers: Sequence[PrunableLayer], spec: StatisticsSpec, room: int, ranks: Ranks) -> tuple[Owner, ...]:
    """Who solves each layer. A matrix whose statistics exceed one process is sharded, whatever it costs."""
    if ranks.size == 1:
        return (0,) * len(layers)
    whole = [layer for layer in layers if not _shards_experts(layer, ranks)]
    costs = [inf if _exceeds(layer, spec, room, ranks) else spec.cost(layer) for layer in whole]
    sharded = [spec.cost(layer, ranks.size) if _shards_rows(layer, spec, ranks) else None for layer in whole]
    owners = {layer.name: owner for layer, owner in zip(whole, ranks.divide(costs, sharded), strict=True)}
    return tuple(_rows(layer, ranks) if (owner := owners.get(layer.name)) is None else owner for layer in layers)


def _exceeds(layer: PrunableLayer, spec: StatisticsSpec, room: int, ranks: Ranks) -> bool:
    """Whether the statistics of a layer that can be sharded leave a single process no memory for others."""
    whole = spec.bytes_of(layer)
    return _shards_rows(layer, spec, ranks) and whole > room and whole > resident_bytes(layer, spec, room, ranks)


def _shards_experts(layer: PrunableLayer, ranks: Ranks) -> bool:
    return ranks.size > 1 and layer.separate and layer.groups > 1


def _shards_rows(layer: PrunableLayer, spec: StatisticsSpec, ranks: Ranks) -> bool:
    return layer.shape[0] >= ranks.size > 1 and spec.shards_rows(layer)


def _rows(layer: PrunableLayer, ranks: Ranks) -> tuple[slice, ...]:
    """The rows of each process, by rank: whole experts where there are several."""
    groups = layer.groups if layer.separate else layer.shape[0]
    size = layer.shape[0] // groups
    shards = [ranks.shard(groups, rank) for rank in range(ranks.size)]
    return tuple(slice(shard.start * size, shard.stop * size) for shard in shards)
