"""Statistics of several processes that share the samples, merged into those of all samples."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from torch import Tensor

from ..distributed.ranks import Ranks
from ..errors import MoonshotError, require
from .mixture_sums import MixtureObserver
from .observer import Observer, SharedSums
from .statistic import GradientStatistic, Small, Stacked, Summed

# The only process that needs a layer's statistics; or the rows that each process needs, by rank; None is all processes.
Owner = int | tuple[slice, ...] | None


def merge_mixtures(observer: MixtureObserver, ranks: Ranks) -> None:
    """Merge the statistics of mixtures, of which every process has those of its samples."""
    for sums in observer.sums.values():
        for total in (sums.gram, sums.norms, sums.tokens):
            ranks.all_reduce(total)
        if sums.gradients is not None:
            shard, sums.gradients = sums.gradients, sums.gradients.new_empty(sums.samples, sums.mixture.count)
            ranks.gather_rows(shard, sums.gradients, ranks.all_gather_object(len(shard)))


def merge_statistics(observer: Observer, ranks: Ranks, owners: Mapping[str, Owner] = MappingProxyType({})) -> None:
    """Merge the statistics of a pass, of which every process has those of its samples.

    `owners` says by a layer's name who needs its statistics; all processes need those of the other layers. In a process
    that does not need a layer, it is no more than reached.

    Raises:
        MoonshotError: layers share their statistics in some processes only, or a statistic cannot be merged.
    """
    _merge_inputs(observer, ranks)
    sizes = ranks.all_gather_object(observer.here) if observer.gradients else []
    for layer in observer.layers:
        owner, sums = owners.get(layer.name), observer.gradients.get(layer.name)
        for statistic in sums.statistics if sums is not None else ():
            _merge_gradients(statistic, ranks, owner, sizes)
        if isinstance(owner, int) and owner != ranks.rank:
            observer.gradients.pop(layer.name, None)


def _merge_inputs(observer: Observer, ranks: Ranks) -> None:
    """Layers that share a tensor have one statistic in all processes; one that some have not reached is theirs, too."""
    inputs, numbers = observer.inputs, dict[int, int]()
    shared = {name: numbers.setdefault(id(each), len(numbers)) for name, each in inputs.of_layer.items()}
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


def _merge_gradients(statistic: GradientStatistic, ranks: Ranks, owner: Owner, sizes: Sequence[int]) -> None:
    partial = statistic.partial()
    if isinstance(partial, Small):
        if isinstance(owner, tuple):
            raise MoonshotError(f"{type(statistic).__name__}: it cannot be divided by rows")
        statistic.combine(ranks.all_gather_object(partial.value))
    elif isinstance(partial, Summed):
        statistic.combine(_reduced(partial.tensor, ranks, owner))
    else:
        statistic.combine(_gathered(partial, ranks, owner, sizes))


def _reduced(tensor: Tensor, ranks: Ranks, owner: Owner) -> Tensor:
    if not isinstance(owner, tuple):
        ranks.all_reduce(tensor, owner)
        return tensor
    each = len(tensor) // owner[-1].stop
    parts = [slice(each * rows.start, each * rows.stop) for rows in owner]
    for rank, part in enumerate(parts):
        ranks.all_reduce(tensor[part], rank)
    return tensor[parts[ranks.rank]].clone()


def _gathered(partial: Stacked, ranks: Ranks, owner: Owner, sizes: Sequence[int]) -> Tensor:
    """The samples of all processes, of which each has `sizes[rank]`."""
    tensor, samples = partial.tensor, partial.samples
    if isinstance(owner, tuple):
        shard = tensor[:, owner[ranks.rank]]
        whole = partial.empty((samples, *shard.shape[1:]))
        ranks.all_to_all([tensor[:, rows] for rows in owner], whole, sizes)
        return whole
    if owner in (None, ranks.rank):
        whole = partial.empty((samples, *tensor.shape[1:]))
        ranks.gather_rows(tensor, whole, sizes, owner)
        return whole
    ranks.gather_rows(tensor, None, sizes, owner)
    return tensor
