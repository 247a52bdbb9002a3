"""Statistics of several processes that share the samples, merged into those of all samples."""

from collections.abc import Mapping
from types import MappingProxyType

from ..distributed.ranks import Ranks
from ..errors import require
from .observer import Observer, SharedSums
from .statistic import Merger
from .statistic import Owner as Owner  # for its users


def merge_statistics(observer: Observer, ranks: Ranks, owners: Mapping[str, Owner] = MappingProxyType({})) -> None:
    """Merge the statistics of a pass, each from the samples of one process.

    `owners` says by a layer's name who needs its statistics; all processes need the statistics of other layers. A
    process that does not need a layer only knows that it was reached.

    Raises:
        MoonshotError: layers share their statistics in some processes only, or a statistic cannot be merged.
    """
    _merge_inputs(observer, ranks)
    sizes = ranks.all_gather_object(observer.here) if observer.gradients else []
    for layer in observer.layers:
        owner, sums = owners.get(layer.name), observer.gradients.get(layer.name)
        for statistic in sums.statistics.values() if sums is not None else ():
            statistic.merge(Merger(ranks, owner, sizes))
        if isinstance(owner, int) and owner != ranks.rank:
            observer.gradients.pop(layer.name, None)


def _merge_inputs(observer: Observer, ranks: Ranks) -> None:
    """Layers that share a tensor have one statistic in all processes, also where a process has not reached them."""
    inputs, numbers = observer.inputs, dict[int, int]()
    shared = {name: numbers.setdefault(id(sums), len(numbers)) for name, sums in inputs.of_layer.items()}
    processes = ranks.all_gather_object(shared)
    merged: dict[tuple[int | None, ...], SharedSums] = {}
    for layer in observer.layers:
        key = tuple(numbered.get(layer.name) for numbered in processes)
        if all(number is None for number in key):
            continue
        if key not in merged:
            sums = inputs.sums_of(layer)
            message = f"{layer.name} reads the same tensor as another layer in some batches only"
            require(all(sums is not other for other in merged.values()), message)
            for statistic in sums.statistics.values():
                for tensor in statistic.sums():
                    ranks.all_reduce(tensor)
            merged[key] = sums
        inputs.of_layer[layer.name] = merged[key]
