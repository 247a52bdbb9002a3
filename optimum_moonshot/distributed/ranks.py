"""Several processes that prune one model together, over `torch.distributed`: what they share, and what they exchange.

`processes()` gives what a run asks everywhere: `Ranks`, who this process is among how many. One process alone is
`SINGLE_PROCESS`, for which every method returns what it was given.
"""

import contextlib
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import MoonshotError
from .line import Line, one_line, who_failed

Value = TypeVar("Value")
_ROOT = "optimum_moonshot"
# Costs are estimates: pieces are divided between processes where the one with the most then has so much less.
UNEVEN = 1.1
# Of runs, and of works for the first process: the same in all processes, which all come to each of them.
_numbers, _numbers_of_the_first = itertools.count(), itertools.count()


@dataclass(frozen=True)
class Ranks:
    """This process among those of a run."""

    rank: int = 0
    size: int = 1
    line: Line | None = field(default=None, repr=False)  # to the others; None alone

    @property
    def is_main(self) -> bool:
        """Whether it is the one that writes files, prints, and shows bars."""
        return self.rank == 0

    @property
    def barriers_passed(self) -> int:
        """How often this process has come to where all meet: work between two of them can be repeated by one alone."""
        return 0 if self.line is None else self.line.barriers

    def shard(self, count: int, rank: int | None = None) -> range:
        """The samples of a process: those of all in order are the samples in order.

        Args:
            count: N, samples in all.
            rank: of the process; None is this one.
        """
        rank = self.rank if rank is None else rank
        return range(count * rank // self.size, count * (rank + 1) // self.size)

    def owners(self, costs: Sequence[float]) -> list[int]:
        """Who does each piece of work: the dearest first, to whoever has the least so far.

        Args:
            costs: of the pieces.
        """
        load, found = [0.0] * self.size, [0] * len(costs)
        for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
            found[index] = min(range(self.size), key=lambda rank: load[rank])
            load[found[index]] += costs[index]
        return found

    def divide(self, costs: Sequence[float], parts: Sequence[float | None]) -> list[int | None]:
        """As `owners`, where all processes may do some pieces together: the dearest of these, no more than it takes.

        Args:
            costs: of the pieces, each done by one process.
            parts: what a piece costs each process where all do it together; None of one that they cannot.

        Returns:
            Who does each piece; None is all.
        """
        able = [index for index, part in enumerate(parts) if part is not None]
        able.sort(key=lambda index: -costs[index])
        tried: list[tuple[float, list[int | None]]] = []
        for count in range(len(able) + 1):
            together = able[:count]
            alone = [index for index in range(len(costs)) if index not in together]
            found: list[int | None] = [None] * len(costs)
            load = [0.0] * self.size
            for index, owner in zip(alone, self.owners([costs[index] for index in alone]), strict=True):
                found[index] = owner
                load[owner] += costs[index]
            tried.append((max(load) + sum(parts[index] or 0.0 for index in together), found))
        least = min(most for most, _ in tried)
        return next(found for most, found in tried if most <= UNEVEN * least)

    def barrier(self) -> None:
        """Wait for all.

        Raises:
            MoonshotError: one has failed or died.
        """
        if self.line is not None:
            self.line.barrier()

    def all_reduce_min(self, value: int) -> int:
        """The least of all processes' values."""
        return value if self.line is None else min(self.all_gather_object(value))

    def all_gather_object(self, value: Value) -> list[Value]:
        """The values of all processes, by rank: what `pickle` takes, and small."""
        return [value] if self.line is None else self.line.all_gather_object(value)

    def broadcast_object(self, value: Value, rank: int = 0) -> Value:
        """The value of one process, in all of them.

        Args:
            value: what `pickle` takes; of the others it does not matter.
            rank: of the one.
        """
        return value if self.line is None else self.line.broadcast_object(value, rank)

    def broadcast(self, tensor: Tensor | None, like: Tensor, rank: int) -> Tensor:
        """The tensor of one process, in the host memory of all.

        Args:
            tensor: of any shape and dtype; of the others it does not matter.
            like: of its `shape` and dtype, in all processes.
            rank: of the one.
        """
        if self.line is None:
            assert tensor is not None
            return tensor
        mine = tensor if self.rank == rank else None
        found = torch.empty_like(like, device="cpu") if mine is None else mine.cpu().contiguous()
        self.line.broadcast(found, rank)
        return found

    def all_reduce(self, tensor: Tensor, owner: int | None = None) -> None:
        """Sum a tensor over all processes, in place.

        Args:
            tensor: of any shape and dtype, the same everywhere.
            owner: the only one who needs the sum: what the others have then is of no use. None is all.
        """
        if self.line is not None:
            self.line.all_reduce(tensor, owner)

    def gather_rows(self, part: Tensor, whole: Tensor | None, count: int, owner: int | None = None) -> None:
        """The samples of all processes, in order.

        Args:
            part: this process's, [n, …].
            whole: gets them, [N, …]; None where another is the owner.
            count: N.
            owner: the only one who needs them; None is all.
        """
        if self.line is None:
            assert whole is not None
            whole.copy_(part)
            return
        for rank in range(self.size):
            samples = self.shard(count, rank)
            if len(samples):
                self.line.send_to(part, None if whole is None else whole[samples.start : samples.stop], rank, owner)

    def all_to_all(self, parts: Sequence[Tensor], whole: Tensor, count: int) -> None:
        """The samples of all processes, in order: to each process a part of its own, all at once.

        Args:
            parts: of this process's samples what each process needs, [n, …] each.
            whole: gets what this process needs of all samples, [N, …].
            count: N.
        """
        if self.line is None:
            whole.copy_(parts[0])
            return
        samples = [self.shard(count, rank) for rank in range(self.size)]
        self.line.all_to_all(parts, [whole[own.start : own.stop] for own in samples])

    def check_equal(self, what: str, value: str) -> None:
        """Check that all processes have the same.

        Args:
            what: for the message.
            value: of this process.

        Raises:
            MoonshotError: they differ.
        """
        others = [rank for rank, other in enumerate(self.all_gather_object(value)) if other != value]
        if others:
            raise MoonshotError(
                f"{what} of rank {self.rank} differs from that of rank {others[0]}: processes that prune together have "
                "one model, one configuration and one call; load the same model in all of them"
            )


SINGLE_PROCESS = Ranks()


@contextlib.contextmanager
def processes() -> Iterator[Ranks]:
    """The processes of the default group, which all come here; this one `SINGLE_PROCESS` where there is no group.

    Who fails inside tells the others, who then stop; nobody leaves before all are done.

    Raises:
        MoonshotError: another process has failed or died.
    """
    if not several():
        yield SINGLE_PROCESS
        return
    line = _line(str(next(_numbers)))
    try:
        line.open()
        yield Ranks(line.rank, line.size, line)
        line.leave()
    except BaseException as error:
        line.fail(error)
        raise
    finally:
        line.close()


def several() -> bool:
    """Whether there is a process group of more than one."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def on_main_process(work: Callable[[], Value]) -> Value:
    """Work for the first of several processes alone: the others wait for its end, and it waits for nobody.

    Args:
        work: returns what JSON takes.

    Returns:
        What it returned, in all processes.

    Raises:
        MoonshotError: the first process has failed or died.
    """
    if not several():
        return work()
    line = _line(f"first/{next(_numbers_of_the_first)}")
    line.announce()
    if line.rank:
        return json.loads(line.read("done", 0))
    try:
        found = work()
    except BaseException as error:
        line.fail(error)
        raise
    line.write("done", json.dumps(found))
    return found


def leave(error: BaseException) -> tuple[str, str] | None:
    """Before a process ends that has failed: tell the others why.

    Returns:
        Such as ("rank 1 failed: ", "…"), to be printed; None where another process prints it.
    """
    if not several():
        return "", one_line(error)
    line = Line(_ROOT)
    return who_failed(line.rank, error) if line.tell(error) else None


def _line(name: str) -> Line:
    return Line(f"{_ROOT}/{name}", _ROOT)
