"""Several processes that prune one model together, over `torch.distributed`.

`processes()` returns `Ranks`: the rank of this process, the number of processes, and their collective operations. One
process alone is `SINGLE_PROCESS`, whose operations return their argument.
"""

import contextlib
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import MoonshotError, one_line
from .group import RunGroup

Value = TypeVar("Value")
# Costs are estimates: a matrix is divided between processes where that reduces the largest load by this factor.
UNEVEN = 1.1
# Number the runs, and the calls of `on_main_process`; equal in all processes, which make the same calls.
_runs, _calls = itertools.count(), itertools.count()


@dataclass(frozen=True)
class Ranks:
    """This process among those of a run."""

    rank: int = 0
    size: int = 1
    group: RunGroup | None = field(default=None, repr=False)  # None in a single process

    @property
    def is_main(self) -> bool:
        """Whether this process writes files, prints, and shows progress bars."""
        return self.rank == 0

    @property
    def barriers_passed(self) -> int:
        """How many collectives this process has joined: one process alone may repeat its work between two of them."""
        return 0 if self.group is None else self.group.collectives

    def shard(self, count: int, rank: int | None = None) -> range:
        """The samples of a process: contiguous, in order of the ranks.

        Args:
            count: N, samples in all.
            rank: of the process; None for this one.
        """
        rank = self.rank if rank is None else rank
        return range(count * rank // self.size, count * (rank + 1) // self.size)

    def owners(self, costs: Sequence[float]) -> list[int]:
        """Assign each task to a process: the most expensive first, to the process with the least load.

        Args:
            costs: of the tasks.
        """
        load, owners = [0.0] * self.size, [0] * len(costs)
        for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
            owners[index] = min(range(self.size), key=lambda rank: load[rank])
            load[owners[index]] += costs[index]
        return owners

    def divide(self, costs: Sequence[float], parts: Sequence[float | None]) -> list[int | None]:
        """As `owners`, where all processes may share the most expensive tasks, no more of them than balance requires.

        Args:
            costs: of the tasks, each done by one process.
            parts: the cost for each process where all share the task; None where they cannot.

        Returns:
            The owner of each task; None for all processes.
        """
        shareable = [index for index, part in enumerate(parts) if part is not None]
        shareable.sort(key=lambda index: -costs[index])
        candidates: list[tuple[float, list[int | None]]] = []
        for count in range(len(shareable) + 1):
            shared = shareable[:count]
            whole = [index for index in range(len(costs)) if index not in shared]
            owners: list[int | None] = [None] * len(costs)
            load = [0.0] * self.size
            for index, owner in zip(whole, self.owners([costs[index] for index in whole]), strict=True):
                owners[index] = owner
                load[owner] += costs[index]
            candidates.append((max(load) + sum(parts[index] or 0.0 for index in shared), owners))
        least = min(load for load, _ in candidates)
        return next(owners for load, owners in candidates if load <= UNEVEN * least)

    def barrier(self) -> None:
        """Wait for all processes.

        Raises:
            MoonshotError: another process failed or died; so do all collectives below.
        """
        if self.group is not None:
            self.group.run(dist.barrier)

    def all_reduce_min(self, value: int) -> int:
        """The minimum over all processes."""
        return min(self.all_gather_object(value))

    def all_gather_object(self, value: Value) -> list[Value]:
        """The values of all processes, by rank; small, and picklable."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.size
        self.group.run(dist.all_gather_object, values, value)
        return values

    def broadcast_object(self, value: Value, rank: int = 0) -> Value:
        """The value of one process, in all of them.

        Args:
            value: picklable; ignored in the other processes.
            rank: of the one.
        """
        if self.group is None:
            return value
        values: list[Any] = [value if self.rank == rank else None]
        self.group.run(dist.broadcast_object_list, values, src=rank)
        return values[0]

    def broadcast(self, tensor: Tensor | None, like: Tensor, rank: int) -> Tensor:
        """The tensor of one process, in the host memory of all.

        Args:
            tensor: of any shape and dtype; ignored in the other processes.
            like: has its `shape` and dtype, in all processes.
            rank: of the one.
        """
        if self.group is None:
            assert tensor is not None
            return tensor
        sent = tensor if self.rank == rank else None
        result = torch.empty(like.shape, dtype=like.dtype) if sent is None else sent.cpu().contiguous()
        self.group.run(dist.broadcast, result.view(torch.uint8), src=rank)
        return result

    def all_reduce(self, tensor: Tensor, owner: int | None = None) -> None:
        """Sum a tensor over all processes, in place.

        Args:
            tensor: of any shape and dtype, the same everywhere.
            owner: the only process that needs the sum, the tensors of the others are undefined then; None for all.
        """
        if self.group is not None:
            self.group.all_reduce(tensor, owner)

    def gather_rows(self, part: Tensor, whole: Tensor | None, count: int, owner: int | None = None) -> None:
        """Gather the samples of all processes, in order.

        Args:
            part: of this process, [n, …].
            whole: receives them, [N, …]; None where another process is the owner.
            count: N.
            owner: the only process that needs them; None for all.
        """
        if self.group is None:
            assert whole is not None
            whole.copy_(part)
            return
        parts = [part if owner in (None, rank) else None for rank in range(self.size)]
        self.group.exchange(parts, self._split(whole, count))

    def all_to_all(self, parts: Sequence[Tensor], whole: Tensor, count: int) -> None:
        """Gather the samples of all processes, in order, of which each process needs another part.

        Args:
            parts: what each process needs of this process's samples, [n, …] each.
            whole: receives what this process needs of all samples, [N, …].
            count: N.
        """
        if self.group is None:
            whole.copy_(parts[0])
            return
        self.group.exchange(parts, self._split(whole, count))

    def _split(self, whole: Tensor | None, count: int) -> list[Tensor | None]:
        shards = [self.shard(count, rank) for rank in range(self.size)]
        return [None if whole is None else whole[shard.start : shard.stop] for shard in shards]

    def check_equal(self, what: str, value: str) -> None:
        """Check that all processes have the same value.

        Args:
            what: the value is, for the message.
            value: of this process.

        Raises:
            MoonshotError: they differ.
        """
        others = [rank for rank, other in enumerate(self.all_gather_object(value)) if other != value]
        if others:
            raise MoonshotError(
                f"{what} of rank {self.rank} differs from that of rank {others[0]}: processes that prune together have "
                "one model, one configuration and one call",
                hint="load the same model in all of them",
            )


SINGLE_PROCESS = Ranks()


@contextlib.contextmanager
def processes() -> Iterator[Ranks]:
    """The processes of the default group, all of which enter; `SINGLE_PROCESS` without a group.

    A process that fails inside stops the others with its reason; none leaves before all are done.

    Raises:
        MoonshotError: another process failed or died.
    """
    if not several():
        yield SINGLE_PROCESS
        return
    group = RunGroup(f"run {next(_runs)}")
    try:
        group.open()
        ranks = Ranks(group.rank, group.size, group)
        yield ranks
        ranks.barrier()
    except BaseException as error:
        group.fail(error)
        raise
    finally:
        group.close()


def several() -> bool:
    """Whether there is a process group of more than one."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def on_main_process(work: Callable[[], Value]) -> Value:
    """Do work in the first process; the others wait for it, but it does not wait for them.

    Args:
        work: returns a value that JSON can hold.

    Returns:
        Its value, in all processes.

    Raises:
        MoonshotError: the first process failed or died.
    """
    if not several():
        return work()
    group = RunGroup(f"call {next(_calls)}")
    if group.rank:
        return json.loads(group.read())
    try:
        value = work()
    except BaseException as error:
        group.fail(error)
        raise
    group.publish(json.dumps(value))
    return value


def leave(error: BaseException) -> tuple[str, str] | None:
    """Select the process that prints the error before a command ends.

    Args:
        error: that ends the command.

    Returns:
        The prefix and the message to print, such as ("rank 1 failed: ", "…"); None where another process prints them.
    """
    if not several():
        return "", one_line(error)
    group = RunGroup()
    failure = group.failure(error)
    return (f"rank {failure.rank} failed: ", failure.reason) if group.record(failure) else None
