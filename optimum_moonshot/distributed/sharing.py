"""Which process does which work, such as a save, and the merging of the statistics that each has of its samples."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from ..errors import one_line, require
from .ranks import Ranks, RunGroup, call_numbers, several, shards

Value = TypeVar("Value")
# The only process that needs a layer's statistics; or the rows that each process needs, by rank; None is all processes.
Owner = int | tuple[slice, ...] | None
# Costs are estimates: a matrix is divided between processes where that reduces the largest load by this factor.
UNEVEN = 1.1
_MAIN = "a call that the first process serves, such as a save"


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


def rows_of_processes(rows: int, groups: int, processes: int) -> tuple[slice, ...]:
    """The rows of a matrix for each process, by rank: whole groups, such as experts."""
    size = rows // groups
    return tuple(slice(shard.start * size, shard.stop * size) for shard in shards(groups, processes))


@dataclass(frozen=True)
class Merger:
    """Merges the results of several processes, each from some of the samples, into what this process needs."""

    ranks: Ranks
    owner: Owner = None
    sizes: Sequence[int] = ()  # number of samples of each process, for `stacked`

    def of_layer(self, owner: Owner, sizes: Sequence[int]) -> "Merger":
        """For the statistics of a layer with this owner."""
        return Merger(self.ranks, owner, sizes)

    @property
    def is_elsewhere(self) -> bool:
        """Whether only another process needs the statistics."""
        return isinstance(self.owner, int) and self.owner != self.ranks.rank

    def summed(self, tensor: Tensor) -> Tensor:
        """The sum over the processes; the first axis has the layer's rows, or k for each."""
        if not isinstance(self.owner, tuple):
            self.ranks.all_reduce(tensor, self.owner)
            return tensor
        per_row = len(tensor) // self.owner[-1].stop
        slices = [slice(per_row * rows.start, per_row * rows.stop) for rows in self.owner]
        for rank, rows in enumerate(slices):
            self.ranks.all_reduce(tensor[rows], rank)
        return tensor[slices[self.ranks.rank]].clone()

    def summed_groups(self, tensor: Tensor, rows: int) -> tuple[Tensor, int]:
        """The sum over the processes, and this process's number of rows; the first axis has groups of the layer's rows.

        It has the groups of this process's rows alone.
        """
        self.ranks.all_reduce(tensor, self.owner if isinstance(self.owner, int) else None)
        if not isinstance(self.owner, tuple):
            return tensor, rows
        solved, size = self.owner[self.ranks.rank], rows // len(tensor)
        return tensor[solved.start // size : -(-solved.stop // size)], solved.stop - solved.start

    def rows_here(self, tensor: Tensor) -> Tensor:
        """The rows of a tensor that this process solves, where processes divide the layer's rows; else all."""
        return tensor[self.owner[self.ranks.rank]] if isinstance(self.owner, tuple) else tensor

    def stacked(self, tensor: Tensor, empty: Callable[[tuple[int, ...]], Tensor]) -> Tensor:
        """The samples of all processes, [N, rows, …], of tensors [n, rows, …]; `empty` allocates it by its shape."""
        samples, rank = sum(self.sizes), self.ranks.rank
        if isinstance(self.owner, tuple):
            whole = empty((samples, *tensor[:, self.owner[rank]].shape[1:]))
            self.ranks.all_to_all([tensor[:, rows] for rows in self.owner], whole, self.sizes)
            return whole
        if self.owner not in (None, rank):
            self.ranks.gather_rows(tensor, None, self.sizes, self.owner)
            return tensor
        whole = empty((samples, *tensor.shape[1:]))
        self.ranks.gather_rows(tensor, whole, self.sizes, self.owner)
        return whole

    def values(self, value: Value) -> list[Value]:
        """The values of all processes, by rank; small, and picklable."""
        require(not isinstance(self.owner, tuple), "a statistic of a whole layer cannot be divided by rows")
        return self.ranks.all_gather_object(value)


def on_main_process(work: Callable[[], Value]) -> Value:
    """Do work in the first process, and return its value, which JSON can hold, in all processes.

    The others wait for the first process, but it does not wait for them.

    Raises:
        MoonshotError: the first process failed or died.
    """
    if not several():
        return work()
    group = RunGroup(f"call {next(call_numbers)}", _MAIN)
    if group.rank:
        return json.loads(group.read())
    group.begin()
    try:
        value = work()
    except BaseException as error:
        group.fail(error)
        raise
    group.publish(json.dumps(value))
    return value


def exit_message(error: BaseException) -> tuple[str, str] | None:
    """The prefix and the message, ("rank 1 failed: ", "…"), that this process prints when an error ends its command.

    None if another process prints them.
    """
    if not several():
        return "", one_line(error)
    group = RunGroup()
    failure = group.failure(error)
    return (f"rank {failure.rank} failed: ", failure.reason) if group.record(failure) else None
