"""Several processes that prune one model together, over `torch.distributed`.

`processes()` returns `Ranks`: the rank of this process, the number of processes, and their collective operations. One
process alone is `SINGLE_PROCESS`, whose operations return their argument.
"""

import contextlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..approximate import same_text
from ..errors import MoonshotError, one_line
from .group import RunGroup

Value = TypeVar("Value")
# Numbers the runs and the calls of `on_main_process`; equal in all processes, which make the same calls.
_calls = itertools.count()
_RUN, _MAIN = "a run of all processes", "a call that the first process serves, such as a save"


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

    def shard(self, count: int) -> range:
        """The share of this process in `count` items."""
        return shards(count, self.size)[self.rank]

    def shard_sizes(self, count: int) -> list[int]:
        """The number of items that each process has of `count`, by rank."""
        return [len(shard) for shard in shards(count, self.size)]

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
        """The picklable value of one process, in all of them; those of the others are ignored."""
        if self.group is None:
            return value
        values: list[Any] = [value if self.rank == rank else None]
        self.group.run(dist.broadcast_object_list, values, src=rank)
        return values[0]

    def broadcast(self, tensor: Tensor | None, like: Tensor, rank: int) -> Tensor:
        """The tensor of one process, in the host memory of all; `like` has its shape and dtype in all processes."""
        if self.group is None:
            assert tensor is not None
            return tensor
        sent = tensor if self.rank == rank else None
        result = torch.empty(like.shape, dtype=like.dtype) if sent is None else sent.cpu().contiguous()
        self.group.run(dist.broadcast, result.view(torch.uint8), src=rank)
        return result

    def all_reduce(self, tensor: Tensor, owner: int | None = None) -> None:
        """Sum a tensor over all processes, in place; with an owner, the tensors of the others are undefined then."""
        if self.group is not None:
            self.group.all_reduce(tensor, owner)

    def gather_rows(self, part: Tensor, whole: Tensor | None, sizes: Sequence[int], owner: int | None = None) -> None:
        """Gather this process's samples [n, …] and those of all others into `whole` [N, …], in the order of the ranks.

        `sizes` has the number of samples of each process. Only the owner needs them, where there is one; `whole` is
        None in the other processes.
        """
        if self.group is None:
            assert whole is not None
            whole.copy_(part)
            return
        parts = [part if owner in (None, rank) else None for rank in range(self.size)]
        self.group.exchange(parts, [None] * self.size if whole is None else [*whole.split([*sizes])])

    def all_to_all(self, parts: Sequence[Tensor], whole: Tensor, sizes: Sequence[int]) -> None:
        """Gather the samples of all processes into `whole` [N, …], in order, of which each needs another part.

        `parts` has the part of this process's samples that each process needs, [n, …] each; `sizes` as `gather_rows`.
        """
        if self.group is None:
            whole.copy_(parts[0])
            return
        self.group.exchange(parts, whole.split([*sizes]))

    def check_equal(self, what: str, values: Mapping[str, str]) -> None:
        """Check that texts are the same in all processes; `what` and the first name that differs are in the message.

        Raises:
            MoonshotError: they differ.
        """
        for rank, others in enumerate(self.all_gather_object({**values})):
            names = [name for name in {**values, **others} if not same_text(values.get(name), others.get(name))]
            if names:
                raise MoonshotError(
                    f"{what} of rank {self.rank} differs from that of rank {rank} in {names[0]}: processes that prune "
                    "together have one model, one configuration and one call",
                    hint="give all of them the same",
                )


def shards(count: int, processes: int) -> list[range]:
    """The items of each process: contiguous, in the order of the ranks."""
    return [range(count * each // processes, count * (each + 1) // processes) for each in range(processes)]


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
    group = RunGroup(f"call {next(_calls)}", _RUN)
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
    """Do work in the first process, and return its value, which JSON can hold, in all processes.

    The others wait for the first process, but it does not wait for them.

    Raises:
        MoonshotError: the first process failed or died.
    """
    if not several():
        return work()
    group = RunGroup(f"call {next(_calls)}", _MAIN)
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


def leave(error: BaseException) -> tuple[str, str] | None:
    """The prefix and the message that this process prints before an error ends its command: ("rank 1 failed: ", "…").

    None where another process prints them.
    """
    if not several():
        return "", one_line(error)
    group = RunGroup()
    failure = group.failure(error)
    return (f"rank {failure.rank} failed: ", failure.reason) if group.record(failure) else None
