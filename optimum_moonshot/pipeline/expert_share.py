"""A layer of experts that several processes solve together, each some of the experts."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TypeVar

from ..calibration.layer_statistics import LayerStatistics
from ..distributed.ranks import Ranks
from ..model.layers import PrunableLayer

Result = TypeVar("Result")


def is_shared(layer: PrunableLayer, ranks: Ranks) -> bool:
    """Whether the processes divide a layer's experts, and not whole layers."""
    return ranks.size > 1 and layer.adapter.separate and layer.groups > 1


def shares(layer: PrunableLayer, ranks: Ranks) -> list[slice]:
    """The rows of each process's experts, by rank."""
    size = layer.shape[0] // layer.groups
    parts = [ranks.shard(layer.groups, rank) for rank in range(ranks.size)]
    return [slice(part.start * size, part.stop * size) for part in parts]


class ExpertShare:
    """The statistics of this process's experts of a layer.

    Args:
        statistics: of the layer; the gradients of this process's experts alone.
        ranks: the processes.
        count: E, experts in all.
    """

    def __init__(self, statistics: LayerStatistics, ranks: Ranks, count: int):
        self.ranks, self.count, self.part = ranks, count, ranks.shard(count)
        own = slice(self.part.start, self.part.stop)
        self.own = dataclasses.replace(
            statistics,
            inputs=statistics.inputs[own],
            tokens=None if statistics.tokens is None else statistics.tokens[own],
            unknown=frozenset(index - own.start for index in statistics.unknown if index in self.part),
        )

    def groups(self, count: int) -> Iterator[LayerStatistics | None]:
        """As `LayerStatistics.groups`; None for the experts of others."""
        yield from [None] * self.part.start
        yield from self.own.groups(len(self.part)) if self.part else ()
        yield from [None] * (count - self.part.stop)

    def complete(self, own: Sequence[Result]) -> list[Result]:
        """The results of all experts, in all processes.

        Args:
            own: of this process's experts, in their order; small.
        """
        return [result for results in self.ranks.all_gather_object(list(own)) for result in results]
