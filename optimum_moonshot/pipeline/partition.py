"""The parts of a stage: which statistics one pass collects, and which process solves each layer.

A part is a value, made by one pure function of the layers, their bytes, the memory and the number of processes. It is
either some layers whose statistics fit in memory together, or a single layer that exceeds the memory, with the slices
of its rows or experts that are collected one pass at a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from ..calibration.accumulators import GradientPlan
from ..calibration.merging import Owner
from ..distributed.ranks import shards
from ..model.layers import PrunableLayer
from .spec import StatisticsSpec

# Costs are estimates: a matrix is divided between processes where that reduces the largest load by this factor.
UNEVEN = 1.1


@dataclass(frozen=True)
class Part:
    """Layers that are collected and solved together."""

    layers: tuple[PrunableLayer, ...]
    owners: tuple[Owner, ...]  # who solves each layer: a process, several with some rows each, or (None) all
    slices: tuple[slice, ...] = ()  # rows or experts of the only layer, one pass each; () is all in one pass
    sizes: tuple[int, ...] = ()  # bytes of each layer's statistics in this process
    plan: GradientPlan | None = None  # of the gradients of the only layer; None for that of the spec

    @property
    def name(self) -> str:
        """For the report."""
        others = f" and {len(self.layers) - 1} more layers" if len(self.layers) > 1 else ""
        return self.layers[0].name + others


def partition(
    layers: Sequence[PrunableLayer], spec: StatisticsSpec, memory: int, processes: int = 1, most: int | None = None
) -> list[Part]:
    """Divide the layers of a stage into parts; `memory` is the bytes available, the same in all processes.

    `most` is the largest number of samples that a process observes; None is that of equal shards. A part may use half
    of the memory; the other half is for the solver.
    """
    budget = memory // 2
    most = -(-spec.samples // processes) if most is None else most
    sizes = [resident_bytes(layer, spec, budget, processes, most) for layer in layers]
    parts: list[Part] = []
    first = 0
    while first < len(layers):
        end, used = first + 1, sizes[first]
        while end < len(layers) and used + sizes[end] <= budget:
            used += sizes[end]
            end += 1
        together = tuple(layers[first:end])
        slices = spec.slices(layers[first], used, budget) if used > budget else ()
        owners = layer_owners(together, spec, budget, processes, most) if processes > 1 else (0,) * len(together)
        parts.append(Part(together, owners, slices, tuple(sizes[first:end])))
        first = end
    return parts


def halvings(part: Part, spec: StatisticsSpec) -> tuple[tuple[int, int] | None, tuple[int, int] | None]:
    """The bytes that a part collects at once, and half of them, for its layers and for the slices of a single layer."""
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


def resident_bytes(layer: PrunableLayer, spec: StatisticsSpec, budget: int, processes: int, most: int) -> int:
    """Bytes of a layer's statistics in the process with the most samples, on average over the layers that it solves.

    It has its samples of every layer, and all samples of the layers that it solves. A layer that fills the memory
    counts whole, unless its experts or its rows are sharded.
    """
    whole = spec.bytes_of(layer)
    if processes <= 2 or spec.diagonal or not spec.needs_rows(layer) or spec.plan(layer).column_block is not None:
        return whole
    if whole > budget and not (_has_experts(layer) or shards_rows(layer, spec, processes)):
        return whole
    inputs = spec.gram_bytes(layer)
    gradients = whole - inputs
    return inputs + min(gradients, gradients * most // spec.samples + gradients // processes)


def layer_owners(
    layers: Sequence[PrunableLayer], spec: StatisticsSpec, budget: int, processes: int, most: int
) -> tuple[Owner, ...]:
    """Who of several processes solves each layer; a matrix whose statistics exceed one process is always sharded."""

    def cost(layer: PrunableLayer) -> float:
        whole = spec.bytes_of(layer)
        exceeds = shards_rows(layer, spec, processes) and whole > budget
        exceeds = exceeds and whole > resident_bytes(layer, spec, budget, processes, most)
        return inf if exceeds else spec.cost(layer)

    whole = [layer for layer in layers if not _has_experts(layer)]
    sharded = [spec.cost(layer, processes) if shards_rows(layer, spec, processes) else None for layer in whole]
    divided = divide([cost(layer) for layer in whole], sharded, processes)
    owners = {layer.name: owner for layer, owner in zip(whole, divided, strict=True)}
    return tuple(
        rows_of_processes(layer, processes) if (owner := owners.get(layer.name)) is None else owner for layer in layers
    )


def _has_experts(layer: PrunableLayer) -> bool:
    return layer.separate and layer.groups > 1


def shards_rows(layer: PrunableLayer, spec: StatisticsSpec, processes: int) -> bool:
    """Whether several processes can solve a matrix together, some of its rows each."""
    return layer.shape[0] >= processes > 1 and spec.shards_rows(layer)


def rows_of_processes(layer: PrunableLayer, processes: int) -> tuple[slice, ...]:
    """The rows of each process, by rank: whole experts where there are several."""
    groups = layer.groups if layer.separate else layer.shape[0]
    size = layer.shape[0] // groups
    return tuple(slice(shard.start * size, shard.stop * size) for shard in shards(groups, processes))


def assign(costs: Sequence[float], processes: int) -> list[int]:
    """The process that does each task: the most expensive task first, to the process with the least load."""
    load, owners = [0.0] * processes, [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        owners[index] = min(range(processes), key=lambda process: load[process])
        load[owners[index]] += costs[index]
    return owners


def divide(costs: Sequence[float], parts: Sequence[float | None], processes: int) -> list[int | None]:
    """Like `assign`, but all processes (None) share the most expensive tasks, no more of them than balance requires.

    `parts` has the cost for each process where all share a task; None where they cannot.
    """
    shareable = [index for index, part in enumerate(parts) if part is not None]
    shareable.sort(key=lambda index: -costs[index])
    candidates: list[tuple[float, list[int | None]]] = []
    for count in range(len(shareable) + 1):
        shared = shareable[:count]
        whole = [index for index in range(len(costs)) if index not in shared]
        owners: list[int | None] = [None] * len(costs)
        load = [0.0] * processes
        for index, owner in zip(whole, assign([costs[index] for index in whole], processes), strict=True):
            owners[index] = owner
            load[owner] += costs[index]
        candidates.append((max(load) + sum(parts[index] or 0.0 for index in shared), owners))
    least = min(load for load, _ in candidates)
    return next(owners for load, owners in candidates if load <= UNEVEN * least)
