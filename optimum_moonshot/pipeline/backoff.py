"""Backoff: a device that is out of memory does not end a run; a piece of work is halved and repeated.

Which work is repeated, and from where:

* a layer in the solver, from its statistics, which are still there: with smaller slices of rows;
* a part of a stage, from the cached inputs of its block: with fewer layers at once, then with smaller slices of a
  layer's rows or experts. Where the stage has advanced for some batches, the pipeline restarts, as after a kill: layers
  that have results are not collected again;
* the pipeline, from its first stage: with fewer bytes of caches on the device, or with smaller batches;
* a recovery, from the block where it was: with smaller batches;
* a step of learning a rotation: with its cached inputs in host memory.

Large pieces are halved first: layers that are collected together, then caches, then batches, and then small pieces;
slices of a layer come last, since each takes a pass. Smaller batches change results by the rounding of the model.
Nothing grows again in a run. Work that cannot be halved is tried once more, with the memory that the failure released;
then the device's error ends the run (see `enough_memory`). Each change is noted for the report.

Several processes halve alike and repeat a part together, because they agree at its ends (`Backoff.together`,
`Backoff.must_repeat`). A process that is out of memory between two collectives cannot repeat its work alone, unless the
work is cut into pieces that lie between two collectives each (`Backoff.between_collectives`).
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from ..calibration.observer import Owner, merge_statistics
from ..calibration.storage import Storage
from ..data.batches import Batch, batch_size
from ..devices import is_out_of_memory, release_unused, trim_host_memory
from ..distributed.ranks import SINGLE_PROCESS, Ranks
from ..errors import MoonshotError, Text, one_line
from ..objective.linalg import SliceLimit, limited

Value = TypeVar("Value")
Hooks = TypeVar("Hooks", bound=AbstractContextManager[Any])  # an observer
Halving = tuple[int, int]  # bytes that were used at once, and that may be from here on
# Statistics or caches that take no more than one part in so many of the budget do not fill the device.
SMALL = 8
# The pieces that become smaller, in this order; after those of `RESTARTING` the pipeline starts over.
WAYS = ("large rounds", "large caches", "batches", "rounds", "chunks", "caches", "again")
RESTARTING = ("large caches", "batches", "caches")
_CHANGES = {
    "rounds": "statistics gathered at once halved",
    "caches": "caches on the device halved",
    "batches": "batches halved, which changes results by rounding",
    "chunks": "rows or experts gathered at once halved",
    "slices": "rows solved at once halved",
    "kept": "what it keeps there",
    "again": "tried again with what was free then",
}
SMALLER = Text("lower {}, {} or {}", "max_memory", "batch_size", "num_samples")


class PassTooLarge(torch.OutOfMemoryError):
    """There was too little memory for a pass over the data; all processes raise it together."""


class Restart(Exception):
    """The pipeline has to start over: its batches or caches are smaller, or a stage has advanced for some batches."""


@contextmanager
def enough_memory(hint: Text = SMALLER) -> Iterator[None]:
    """Inside the block, a device that is out of memory raises a `MoonshotError` with a hint how to fix it."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise MoonshotError(Text(f"out of device memory: {{}} ({error})", hint)) from None


@dataclass
class _Halved:
    """How a kind of pieces became smaller."""

    where: str  # at first
    first: str
    last: str
    times: int = 0

    def describe(self, kind: str, device: torch.device) -> str:
        often = "once" if self.times == 1 else f"{self.times} times, first"
        change = f", from {self.first} to {self.last}" if self.first else ""
        return f"out of memory on {device} {often} at {self.where}: {_CHANGES[kind]}{change}"


class Backoff:
    """The sizes of a run's pieces, which shrink with the storage's budget; `where` names work in the report."""

    def __init__(self, storage: Storage, ranks: Ranks = SINGLE_PROCESS):
        self.storage, self.ranks, self.device = storage, ranks, storage.device
        self.small = storage.limits[self.device] // SMALL
        self.samples: int | None = None  # of a batch, at most
        self.limit = SliceLimit()  # of a solver's slices of rows
        self.failure: str | None = None  # message of the device in the current part
        self.in_solver = False  # where it failed
        self.cached = 0  # bytes of caches on the device then
        self.changes: dict[str, _Halved] = {}
        self.notes: list[str] = []  # the changes in all processes, for the report; see `share`
        self.repeated_at: set[str] = set()  # where work that cannot be halved was tried once more

    def share(self) -> None:
        """Gather the notes of all processes, and the bytes that they have spilled."""
        changes = [change.describe(kind, self.device) for kind, change in self.changes.items()]
        processes = self.ranks.all_gather_object((changes, self.storage.spilled))
        gathered, spilled = [notes for notes, _ in processes], sum(size for _, size in processes)
        common = [note for note in gathered[0] if all(note in notes for notes in gathered)]
        self.notes = common + [
            f"rank {rank}: {note}" for rank, notes in enumerate(gathered) for note in notes if note not in common
        ]
        self.notes += [f"{spilled / 2**30:.2f} GiB of caches went to disk"] if spilled else []

    def single_process(self) -> "Backoff":
        """For work that one of several processes does, while the others wait for its end."""
        single = copy.copy(self)
        single.ranks = SINGLE_PROCESS
        return single

    def solves(self, owner: Owner) -> bool:
        """Whether this process takes part in solving a layer."""
        return not isinstance(owner, int) or owner == self.ranks.rank

    def release(self) -> None:
        """Free the memory that failed work has left."""
        release_unused(self.device)
        trim_host_memory()

    # Passes over the data

    @contextmanager
    def together(self) -> Iterator[None]:
        """Work on this process's samples, without a collective; where one process is out of memory, all stop behind it.

        Raises:
            PassTooLarge: in all processes, where one was out of memory.
        """
        message = None
        try:
            yield
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self.cached, message = self.storage.cached, one_line(error)
        failures = [each for each in self.ranks.all_gather_object(message) if each is not None]
        if failures:
            raise PassTooLarge(failures[0])

    @contextmanager
    def passing(self, observer: Hooks, merge: Callable[[Any, Ranks], None] = merge_statistics) -> Iterator[Hooks]:
        """Like `together`, under an observer's hooks; `merge` then adds the statistics of all processes."""
        with self.together(), observer:
            yield observer
        if self.ranks.size > 1:
            merge(observer, self.ranks)

    def pass_failed(self, error: PassTooLarge, where: str, batches: Sequence[Batch]) -> None:
        """After a pass outside of parts: halve its batches or caches.

        Raises:
            torch.OutOfMemoryError: nothing is left to be halved.
        """
        self.failure, self.in_solver = str(error), False
        self._halve(where, batches)

    def with_smaller_batches(
        self, where: str, work: Callable[[], Value], batches: Callable[[], Sequence[Batch]]
    ) -> Value:
        """Work of this process that starts over, or from its kept results, with smaller batches or caches.

        Raises:
            torch.OutOfMemoryError: nothing is left to be halved, or a collective has taken place meanwhile.
        """
        while True:
            barriers = self.ranks.barriers_passed
            value, message = self._attempted(work)
            if message is None:
                return value  # type: ignore[return-value]
            if self.ranks.barriers_passed != barriers:
                raise torch.OutOfMemoryError(message)
            self.failure, self.in_solver = message, False
            self._halve(where, batches(), single=True)
            self.release()

    def with_more_memory(self, where: str, work: Callable[[], Value], offload: Callable[[], int]) -> Value:
        """Work of this process alone, which changes nothing where it fails, and starts over with more free memory.

        `offload` moves cached inputs of the work to the host, and returns the bytes that this frees on the device.

        Raises:
            torch.OutOfMemoryError: nothing is left to be moved, and trying once more did not help.
        """
        while True:
            value, message = self._attempted(work)
            if message is None:
                return value  # type: ignore[return-value]
            self.release()
            if moved := offload():
                self._note("kept", where, _bytes(moved), "none")
            elif not self._once_more(where):
                raise torch.OutOfMemoryError(message)

    # Parts of a stage

    def part_failed(self, error: Exception) -> None:
        """After a part that ended with an error; `must_repeat` then says that it has to be repeated.

        Raises:
            Exception: the error, unless all processes were out of memory together.
        """
        agreed = self.ranks.size == 1 or isinstance(error, PassTooLarge)
        if not (agreed and is_out_of_memory(error)):
            raise error
        self.failure, self.in_solver = one_line(error), False

    def solved(self, where: str, work: Callable[[], None], alone: bool = True) -> bool:
        """Solve a layer, with smaller and smaller slices while there is too little memory; False if that is not enough.

        `must_repeat` is True then. `work` does not change the statistics; no other process takes part if it is `alone`.

        Raises:
            torch.OutOfMemoryError: other processes take part, which would wait in vain; or a pass for a slice of the
                layer did not fit.
        """
        barriers = self.ranks.barriers_passed
        _, message = self._sliced(where, work)
        if message is None:
            return True
        if self.ranks.barriers_passed != barriers or (not alone and self.ranks.size > 1):
            raise torch.OutOfMemoryError(message)
        self.failure, self.in_solver = message, True
        return False

    def between_collectives(self, where: str, work: Callable[[], Value]) -> Value:
        """Work of one of several processes on a layer that others solve with it, between two collectives.

        Raises:
            torch.OutOfMemoryError: the smallest slices did not fit, or a collective has taken place meanwhile.
        """
        value, message = self._sliced(where, work)
        if message is not None:
            raise torch.OutOfMemoryError(message)
        return value  # type: ignore[return-value]

    def must_repeat(self) -> bool:
        """Whether the part that has ended has to be repeated, in all processes the same."""
        self.cached = self.storage.cached
        states = self.ranks.all_gather_object((self.failure, self.in_solver))
        failures = [(failure, in_solver) for failure, in_solver in states if failure is not None]
        if failures:
            self.failure, self.in_solver = failures[0][0], any(in_solver for _, in_solver in failures)
        return bool(failures)

    def shrink(
        self,
        where: str,
        batches: Sequence[Batch],
        layers: Halving | None = None,
        slices: Halving | None = None,
        advanced: bool = False,
    ) -> None:
        """After a part that all processes have left: halve the next piece that can be halved.

        `layers` are the bytes of layers that were collected together, `slices` those of a single layer's slices.

        Raises:
            Restart: the pipeline has to start over.
            torch.OutOfMemoryError: nothing is left to be halved.
        """
        restarts = self._halve(where, batches, layers, slices)
        if any(self.ranks.all_gather_object(advanced)) or restarts:
            raise Restart
        self.release()

    def _sliced(self, where: str, work: Callable[[], Value]) -> tuple[Value | None, str | None]:
        """Like `_attempted`, but with smaller and smaller slices while that helps and no collective has taken place."""
        while True:
            barriers, self.limit.largest = self.ranks.barriers_passed, 0
            with limited(self.limit):
                value, message = self._attempted(work, but=PassTooLarge)  # which belongs to the part
            if message is None or self.ranks.barriers_passed != barriers:
                return value, message
            self.release()
            if largest := self.limit.largest:
                self._note("slices", where, _bytes(largest), _bytes(largest // 2))
                self.limit.most = largest // 2
            elif not self._once_more(where):
                return None, message

    def _attempted(
        self, work: Callable[[], Value], but: type[Exception] | tuple[()] = ()
    ) -> tuple[Value | None, str | None]:
        """The value of some work, or the device's message; the error and what its traceback refers to are freed."""
        try:
            return work(), None
        except Exception as error:
            if isinstance(error, but) or not is_out_of_memory(error):
                raise
            self.cached = self.storage.cached
            return None, one_line(error)

    def _once_more(self, where: str) -> bool:
        """Whether work that cannot be halved may be tried once more."""
        if where in self.repeated_at:
            return False
        self.repeated_at.add(where)
        self._note("again", where, "", "")
        return True

    def _halve(
        self,
        where: str,
        batches: Sequence[Batch],
        layers: Halving | None = None,
        slices: Halving | None = None,
        single: bool = False,
    ) -> bool:
        """Halve the first of `WAYS` that all processes (or a single one) can; whether the pipeline has to restart."""
        message, self.failure = self.failure, None
        samples = max(map(batch_size, batches), default=1)
        caches = (self.cached, self.cached // 2) if self.cached and self.storage.next_place else None
        ways = [  # the present and the halved size of each; None where it cannot be halved
            layers if layers is not None and layers[0] > self.small else None,
            caches if self.cached > self.small else None,
            (samples, (samples + 1) // 2) if samples > 1 and not self.in_solver else None,
            layers,
            slices,
            caches,
            None if where in self.repeated_at else (0, 0),
        ]
        first = next((index for index, sizes in enumerate(ways) if sizes is not None), len(ways))
        first = first if single else self.ranks.all_reduce_min(first)
        if first == len(ways):
            raise torch.OutOfMemoryError(message)
        way, sizes = WAYS[first], ways[first]
        if sizes is not None:  # else another process halves its pieces
            self._apply(way, where, *sizes)
        return way in RESTARTING

    def _apply(self, way: str, where: str, before: int, after: int) -> None:
        kind = way.removeprefix("large ")
        if kind == "again":
            self._once_more(where)
        elif kind == "batches":
            self.samples = after
            self._note(kind, where, f"{before} samples", f"{after}")
        else:
            if kind == "caches":
                self.storage.caches = after
            else:
                self.storage.most = 2 * after  # of which a part uses half
            self._note(kind, where, _bytes(before), _bytes(after))

    def _note(self, kind: str, where: str, before: str, after: str) -> None:
        change = self.changes.setdefault(kind, _Halved(where, before, after))
        change.last, change.times = after, change.times + 1


def _bytes(size: int) -> str:
    """For people."""
    power = min(3, max(0, size.bit_length() - 1) // 10)
    return f"{size / 2 ** (10 * power):.4g} {('bytes', 'KiB', 'MiB', 'GiB')[power]}"
