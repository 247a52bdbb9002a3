"""A device that is out of memory does not end a run: what was too large is halved, and done again.

What is repeated, and from where:

* a layer in the solver, from its statistics, which are still there: with smaller slices of rows;
* a round of statistics, from the cached inputs of its block: with fewer layers at once, then with smaller chunks of
  rows or of experts. Where the passes have moved on to another block with some batches, they begin anew, as after a
  kill: the layers that have results are not asked for again;
* passes, from the first block on: with fewer bytes of caches on the device, or with smaller batches;
* a recovery, from the block where it was: with smaller batches;
* a step of learning a rotation: with what it reads of the inputs in host memory.

What is large is halved first: layers that are gathered at once, then caches, then batches, and then what is small;
chunks of a layer come last, since each takes a pass. Batches change results by the rounding of the model. Nothing grows
again in a run. What cannot be halved is tried once more, with the memory that the failure gave back; then the error of
the device goes on (device_memory.py). Each time is noted for the report.

Several processes halve alike, and repeat a round together, because they agree at its ends (`Backoff.together`,
`Backoff.lost`). A process that is out of memory between two meetings of some work cannot repeat it alone, unless the
work is cut into pieces that lie between two meetings each (`Backoff.piece`).
"""

import copy
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from ..calibration.storage import Storage
from ..data.batches import Batch, batch_size
from ..devices import is_out_of_memory, release_unused
from ..distributed.group import one_line
from ..distributed.ranks import SINGLE_PROCESS, Ranks
from ..malloc_trim import trim_host_memory
from ..objective.row_slices import cutting

Value = TypeVar("Value")
# Statistics or caches that take no more than one part in so many of the budget are not why the device is full.
SMALL = 8
# What becomes smaller, in the order in which it does; after those of `ANEW` the passes begin anew.
WAYS = ("large rounds", "large caches", "batches", "rounds", "chunks", "caches", "again")
ANEW = ("large caches", "batches", "caches")
_SAID = {
    "rounds": "statistics gathered at once halved",
    "caches": "caches on the device halved",
    "batches": "batches halved, which changes results by rounding",
    "chunks": "rows or experts gathered at once halved",
    "slices": "rows solved at once halved",
    "kept": "what it keeps there",
    "again": "tried again with what was free then",
}


class PassTooLarge(torch.OutOfMemoryError):
    """There was too little memory for a pass over the data; of several processes, all know of it."""


class Halvable(Protocol):
    """What gathers statistics in rounds: `StatisticsSchedule`."""

    def halved(self, parts: bool) -> tuple[int, int] | None:
        """Bytes that were gathered at once, and that may be from here on.

        Args:
            parts: of a single layer in chunks, or of several layers.

        Returns:
            None where there is no half.
        """


@dataclass
class _Change:
    """How something became smaller."""

    where: str  # at first
    first: str
    last: str
    times: int = 0

    def said(self, kind: str, device: torch.device) -> str:
        """For the report."""
        often = "once" if self.times == 1 else f"{self.times} times, first"
        change = f", from {self.first} to {self.last}" if self.first else ""
        return f"out of memory on {device} {often} at {self.where}: {_SAID[kind]}{change}"


class Backoff:
    """How large the pieces of a run's work may be, as far as its device has shown.

    Args:
        storage: of the run, whose budget shrinks.
        ranks: the processes of the run.
    """

    def __init__(self, storage: Storage, ranks: Ranks = SINGLE_PROCESS):
        self.storage, self.ranks, self.device = storage, ranks, storage.device
        self.small = storage.limits[self.device] // SMALL
        self.samples: int | None = None  # of a batch, at most
        self.slices: int | None = None  # bytes of a solver's slice of rows, at most
        self.failed: str | None = None  # what the device said in the round that is going on
        self.in_solver = False  # it was there
        self.cached = 0  # bytes of caches on the device then
        self.changes: dict[str, _Change] = {}
        self.told: list[str] = []  # of all processes
        self.again: set[str] = set()  # where what cannot be halved was tried once more

    @property
    def notes(self) -> list[str]:
        """What ran out, where, how often, and what became smaller; of other processes as `share` has found it."""
        return self._own_notes() if self.ranks.size == 1 else self.told

    def _own_notes(self) -> list[str]:
        return [change.said(kind, self.device) for kind, change in self.changes.items()]

    def share(self) -> None:
        """Tell all processes what has become smaller in each."""
        if self.ranks.size > 1:
            found = self.ranks.all_gather_object(self._own_notes())
            shared = [note for note in found[0] if all(note in notes for notes in found)]
            own = [f"rank {rank}: {note}" for rank, notes in enumerate(found) for note in notes if note not in shared]
            self.told = shared + own

    def by_one(self) -> "Backoff":
        """For work that one of several processes does, while the others wait for its end."""
        found = copy.copy(self)
        found.ranks = SINGLE_PROCESS
        return found

    def release(self) -> None:
        """Give back what the failed work has left."""
        release_unused(self.device)
        trim_host_memory()

    def together(self, work: Callable[[], Value]) -> Value:
        """Work on this process's samples, without a meeting; where one process is out of memory, all stop behind it.

        Args:
            work: which all processes do at this place.

        Raises:
            PassTooLarge: in all processes, where one was out of memory.
        """
        found, told = self._attempted(work)
        lost = [each for each in self.ranks.all_gather_object(told) if each is not None]
        if lost:
            raise PassTooLarge(lost[0])
        return found  # type: ignore[return-value]

    def _attempted(
        self, work: Callable[[], Value], but: type[Exception] | tuple[()] = ()
    ) -> tuple[Value | None, str | None]:
        """What it returns, or what the device says; the error, and all that hangs on it, is gone then."""
        try:
            return work(), None
        except Exception as error:
            if isinstance(error, but) or not is_out_of_memory(error):
                raise
            self.cached = self.storage.cached
            return None, one_line(error)

    @contextmanager
    def attempt(self, round_: Generator[Any, None, None]) -> Iterator[None]:
        """A round, whose statistics are gone at its end; `lost` then says whether it is to be done again.

        Args:
            round_: what gives them.
        """
        try:
            yield
        except Exception as error:
            agreed = self.ranks.size == 1 or isinstance(error, PassTooLarge)
            if not (agreed and is_out_of_memory(error)):
                raise
            self.failed, self.in_solver = one_line(error), False
        finally:
            self.cached = self.storage.cached
            round_.close()

    def solved(self, where: str, work: Callable[[], None], alone: bool = True) -> bool:
        """Solve a layer, with smaller and smaller slices while there is too little memory.

        Args:
            where: the layer's name.
            work: solves it from statistics that it leaves as they are.
            alone: no other process takes part.

        Returns:
            Whether it is solved; else `lost` will say so, where other processes need not be told before.

        Raises:
            torch.OutOfMemoryError: others take part, who would wait in vain; or a pass for a chunk of it did not fit.
        """
        met = self.ranks.barriers_passed
        told = self._sliced(where, work)[1]
        if told is None:
            return True
        if self.ranks.barriers_passed != met or (not alone and self.ranks.size > 1):
            raise torch.OutOfMemoryError(told)
        self.failed, self.in_solver = told, True
        return False

    def piece(self, where: str, work: Callable[[], Value]) -> Value:
        """Work of one of several processes on a layer that others solve with it, between two meetings.

        Args:
            where: the layer's name.
            work: which leaves what it is given as it is.

        Raises:
            torch.OutOfMemoryError: the smallest slices did not fit, or the processes have met meanwhile.
        """
        found, told = self._sliced(where, work)
        if told is not None:
            raise torch.OutOfMemoryError(told)
        return found  # type: ignore[return-value]

    def _sliced(self, where: str, work: Callable[[], Value]) -> tuple[Value | None, str | None]:
        """As `_attempted`, with smaller and smaller slices as long as that can help and the processes have not met."""
        while True:
            met = self.ranks.barriers_passed
            with cutting(self.slices) as cuts:
                found, told = self._attempted(work, but=PassTooLarge)  # which is the round's
            if told is None or self.ranks.barriers_passed != met:
                return found, told
            self.release()
            if cuts.largest:
                self._note("slices", where, _bytes(cuts.largest), _bytes(cuts.largest // 2))
                self.slices = cuts.largest // 2
            elif where in self.again:
                return None, told
            else:
                self.again.add(where)
                self._note("again", where, "", "")

    def lost(self) -> bool:
        """Whether the round that has ended is to be done again, in all processes the same."""
        found = [
            (told, solving)
            for told, solving in self.ranks.all_gather_object((self.failed, self.in_solver))
            if told is not None
        ]
        if found:
            self.failed, self.in_solver = found[0][0], any(solving for _, solving in found)
        return bool(found)

    def moved(self, here: bool) -> bool:
        """Whether the passes have moved on in some process.

        Args:
            here: in this one.
        """
        return any(self.ranks.all_gather_object(here))

    def halve(self, where: str, batches: Sequence[Batch], schedule: Halvable | None = None) -> bool:
        """After a round, or passes, that all processes have left: what comes next that can be halved.

        Args:
            where: it was, for the report.
            batches: that pass.
            schedule: of the rounds, where it was one.

        Returns:
            Whether the passes have to begin anew for it.

        Raises:
            torch.OutOfMemoryError: there is nothing left.
        """
        return self._halve(where, batches, schedule, self.ranks)

    def repeated(
        self,
        where: Callable[[], str],
        work: Callable[[], Value],
        batches: Callable[[], Sequence[Batch]],
        schedule: Callable[[], Halvable | None] = lambda: None,
    ) -> Value:
        """Work that begins anew each time, with smaller batches or caches.

        Args:
            where: it was, for the report.
            work: from its beginning, or from where it has kept results.
            batches: that it passes.
            schedule: as for `halve`.

        Raises:
            torch.OutOfMemoryError: there is nothing left to be halved, or the processes have met meanwhile.
        """
        while True:
            met = self.ranks.barriers_passed
            found, told = self._attempted(work)
            if told is None:
                return found  # type: ignore[return-value]
            if self.ranks.barriers_passed != met:
                raise torch.OutOfMemoryError(told)
            self.failed, self.in_solver = told, False
            self._halve(where(), batches(), schedule(), SINGLE_PROCESS)
            self.release()

    def relieved(self, where: str, work: Callable[[], Value], kept: Callable[[], int]) -> Value:
        """Work of this process alone, which begins anew with less beside it on the device.

        Args:
            where: it was, for the report.
            work: which leaves everything as it was where it fails.
            kept: moves what the work reads away from the device; the bytes that this frees, 0 where there are none.

        Raises:
            torch.OutOfMemoryError: nothing is left to be moved, and trying once more did not help.
        """
        while True:
            found, told = self._attempted(work)
            if told is None:
                return found  # type: ignore[return-value]
            self.release()
            if moved := kept():
                self._note("kept", where, _bytes(moved), "none")
            elif where in self.again:
                raise torch.OutOfMemoryError(told)
            else:
                self.again.add(where)
                self._note("again", where, "", "")

    def _halve(self, where: str, batches: Sequence[Batch], schedule: Halvable | None, ranks: Ranks) -> bool:
        told, self.failed = self.failed, None
        ways = [*self._ways(batches, schedule), None if where in self.again else (0, 0)]
        first = next((index for index, values in enumerate(ways) if values is not None), len(ways))
        index = ranks.all_reduce_min(first)
        if index == len(ways):
            raise torch.OutOfMemoryError(told)
        way, values = WAYS[index], ways[index]
        if values is not None:
            self._apply(way, where, *values)
        return way in ANEW

    def _ways(self, batches: Sequence[Batch], schedule: Halvable | None) -> list[tuple[int, int] | None]:
        """What each of `WAYS` but the last is now and would be, or None where it is as small as it can be."""
        samples = max(map(batch_size, batches), default=1)
        rounds = None if schedule is None else schedule.halved(parts=False)
        caches = (self.cached, self.cached // 2) if self.cached and self.storage.next_place else None
        return [
            rounds if rounds is not None and rounds[0] > self.small else None,
            caches if self.cached > self.small else None,
            (samples, (samples + 1) // 2) if samples > 1 and not self.in_solver else None,
            rounds,
            None if schedule is None else schedule.halved(parts=True),
            caches,
        ]

    def _apply(self, way: str, where: str, before: int, after: int) -> None:
        if way == "again":
            self.again.add(where)
            self._note(way, where, "", "")
            return
        if way == "batches":
            self.samples = after
            self._note(way, where, f"{before} samples", f"{after}")
            return
        way = way.removeprefix("large ")
        if way in ("rounds", "chunks"):
            self.storage.most = 2 * after  # of which a round takes half
        else:
            self.storage.caches = after
        self._note(way, where, _bytes(before), _bytes(after))

    def _note(self, kind: str, where: str, before: str, after: str) -> None:
        change = self.changes.setdefault(kind, _Change(where, before, after))
        change.last, change.times = after, change.times + 1


def _bytes(size: int) -> str:
    """For people."""
    power = min(3, max(0, size.bit_length() - 1) // 10)
    return f"{size / 2 ** (10 * power):.4g} {('bytes', 'KiB', 'MiB', 'GiB')[power]}"
