"""Backoff: a device that is out of memory does not end a run; a size is halved, and the work is repeated.

There are two levers, each halved after a failure and doubled after blocks that succeed, up to its first value:

* the samples of a batch, for passes over the data;
* the rows of a slice: the layers, rows or experts whose statistics one pass collects, and the rows of a layer that the
  solver processes at once.

A failed pass halves the statistics first if they fill much of the device, else the batches, and the statistics where a
batch has one sample. A failed solver halves its slices, then the statistics collected in one pass. Caches that fill
much of the device, or the last size that can become smaller, move half by half to the place behind it. Work that cannot
become smaller is tried once more, with the memory that the failure released; then the device's error ends the run (see
`enough_memory`). The report has a note on each. Only smaller batches change results, by the rounding of the model.

The work that is repeated, and its start:

* a layer in the solver, from its statistics, which are still there;
* a part of a stage, from the cached inputs of its block, which are cut into the new batches. Where the stage has
  advanced for some batches, or its caches cannot be cut or have to move, the pipeline restarts, as after a kill: layers
  that have results are not collected again;
* other passes, from the first stage of their pipeline;
* a recovery, from the block where it was; a step of learning a rotation, with its cached inputs in host memory.

Several processes decide alike and repeat a part together, because they agree at its ends (`Backoff.together`,
`Backoff.must_repeat`). A process that is out of memory between two collectives cannot repeat its work alone, unless the
work is cut into pieces that lie between two collectives each (`Backoff.with_smaller_slices`).
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from ..calibration.observer import merge_statistics
from ..calibration.storage import Storage
from ..data.batches import Batch, batch_size
from ..devices import is_out_of_memory, release_unused, trim_host_memory
from ..distributed.ranks import SINGLE_PROCESS, Ranks
from ..distributed.sharing import Merger, Owner
from ..errors import MoonshotError, one_line
from ..objective.linalg import SliceLimit, limited

Value = TypeVar("Value")
Hooks = TypeVar("Hooks", bound=AbstractContextManager[Any])  # an observer
# Statistics or caches of at most one part in so many of the budget do not fill the device.
SMALL = 8
SMALLER = "lower max_memory, batch_size or num_samples"


class PassTooLarge(torch.OutOfMemoryError):
    """There was too little memory for a pass over the data; all processes raise it together."""


class Restart(Exception):
    """The pipeline has to restart: its caches move or cannot be cut anew, or a stage has advanced for some batches."""


@contextmanager
def enough_memory(hint: str = SMALLER) -> Iterator[None]:
    """Inside the block, a device that is out of memory raises a `MoonshotError` with a hint how to fix it."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise MoonshotError(f"out of device memory: {hint} ({error})") from None


@dataclass
class Lever:
    """A size that is halved where memory runs out, and doubled after blocks that succeed, up to its first value.

    A size that fails as soon as it has been doubled is doubled after twice as many blocks the next time, so that a
    lasting shortage costs few failures.
    """

    change: str  # for the report
    unit: str = ""  # of the size; "": bytes
    size: int | None = None  # at most; None: no limit
    first: int = 0  # that failed
    least: int = 0
    where: str = ""  # the first failure
    times: int = 0  # that it was halved
    patience: int = 1  # blocks that succeed before it is doubled
    succeeded: int = 0  # since the last change
    doubled: bool = False  # since the last block

    def halve(self, where: str, present: int, half: int) -> None:
        """Limit the size to half of the present one."""
        if not self.times:
            self.where, self.first, self.least = where, present, half
        self.patience *= 2 if self.doubled else 1
        self.size = half if self.size is None else min(self.size, half)
        self.first, self.least = max(self.first, present), min(self.least, half)
        self.times, self.succeeded, self.doubled = self.times + 1, 0, False

    def grow(self) -> None:
        """After a block that succeeded, double the size for the next one."""
        self.doubled, self.succeeded = False, self.succeeded + 1
        if self.size is not None and self.succeeded >= self.patience:
            self.size = None if 2 * self.size >= self.first else 2 * self.size
            self.succeeded, self.doubled = 0, True

    def describe(self, device: torch.device) -> str:
        """The note for the report."""
        often = "once" if self.times == 1 else f"{self.times} times, first"
        note = f"out of memory on {device} {often} at {self.where}: {self.change}"
        if not self.first:
            return note
        first, least = (str(size) if self.unit else _bytes(size) for size in (self.first, self.least))
        restored = f", and later {first} again" if self.size is None else ""
        return f"{note}, from {first}{self.unit and ' '}{self.unit} to {least}{restored}"


class Backoff:
    """The levers of a run; `where` names work in the report."""

    def __init__(self, storage: Storage, ranks: Ranks = SINGLE_PROCESS):
        self.storage, self.ranks, self.device = storage, ranks, storage.device
        self.small = storage.limits[self.device] // SMALL
        self.samples = Lever("batches halved, which changes results by rounding", "samples")
        self.rows = Lever("statistics collected in one pass halved")
        self.slices = Lever("rows solved at once halved")
        self.caches = Lever("caches on the device halved")  # it does not grow again
        self.moved = Lever("its cached inputs moved off the device")
        self.again = Lever("tried again with what was free then")
        self.failure: str | None = None  # message of the device in the current part
        self.in_solver = False  # where it failed
        self.cached = 0  # bytes of caches on the device then
        self.notes: list[str] = []  # the changes in all processes, for the report; see `share`
        self.retried: set[str] = set()  # where work that cannot become smaller was tried once more

    def share(self) -> None:
        """Gather the notes of all processes, and the bytes that they have spilled."""
        levers = self.samples, self.rows, self.slices, self.caches, self.moved, self.again
        changes = [lever.describe(self.device) for lever in levers if lever.times]
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

    def gather(self, value: Value) -> list[Value]:
        """The values of all processes; small, and picklable."""
        return self.ranks.all_gather_object(value)

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
        failures = [failure for failure in self.ranks.all_gather_object(message) if failure is not None]
        if failures:
            self.failure, self.in_solver = failures[0], False
            raise PassTooLarge(failures[0])

    @contextmanager
    def passing(self, observer: Hooks, merge: Callable[[Any, Merger], None] = merge_statistics) -> Iterator[Hooks]:
        """Like `together`, under an observer's hooks; `merge` then adds the statistics of all processes."""
        with self.together(), observer:
            yield observer
        if self.ranks.size > 1:
            merge(observer, Merger(self.ranks))

    def with_smaller_batches(
        self, where: str, work: Callable[[], Value], batches: Callable[[], Sequence[Batch]]
    ) -> Value:
        """Work of this process that starts over, or from its stored results, with smaller batches or caches.

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
            self.shrink(where, batches(), ranks=SINGLE_PROCESS)
            self.release()

    def with_more_memory(self, where: str, work: Callable[[], Value], spill: Callable[[], int]) -> Value:
        """Work of this process alone, which changes nothing where it fails, and starts over with more free memory.

        `spill` moves cached inputs of the work to the host, and returns the bytes that this frees on the device.

        Raises:
            torch.OutOfMemoryError: nothing is left to be moved, and trying once more did not help.
        """
        while True:
            value, message = self._attempted(work)
            if message is None:
                return value  # type: ignore[return-value]
            self.release()
            if moved := spill():
                self.moved.halve(where, moved, 0)
            elif not self._once_more(where):
                raise torch.OutOfMemoryError(message)

    # Parts of a stage

    def solved(self, where: str, work: Callable[[], None], alone: bool = True) -> bool:
        """Solve a layer, with smaller and smaller slices while there is too little memory; False if that is not enough.

        `must_repeat` is True then. `work` does not change the statistics; no other process takes part if it is `alone`.

        Raises:
            torch.OutOfMemoryError: other processes take part, which would wait in vain; or a pass for a slice of the
                layer did not fit.
        """
        barriers = self.ranks.barriers_passed
        try:
            self.with_smaller_slices(where, work)
            return True
        except PassTooLarge:
            raise
        except torch.OutOfMemoryError as error:
            if self.ranks.barriers_passed != barriers or (not alone and self.ranks.size > 1):
                raise
            self.failure, self.in_solver = str(error), True
            return False

    def with_smaller_slices(self, where: str, work: Callable[[], Value]) -> Value:
        """Work of this process on a layer, with smaller and smaller slices of rows while there is too little memory.

        Raises:
            torch.OutOfMemoryError: the smallest slices did not fit, or a collective has taken place meanwhile.
        """
        while True:
            barriers, limit = self.ranks.barriers_passed, SliceLimit(self.slices.size)
            with limited(limit):
                value, message = self._attempted(work, but=PassTooLarge)  # which belongs to the part
            if message is None:
                return value  # type: ignore[return-value]
            if self.ranks.barriers_passed != barriers:
                raise torch.OutOfMemoryError(message)
            self.release()
            if largest := limit.largest:
                self.slices.halve(where, largest, largest // 2)
            elif not self._once_more(where):
                raise torch.OutOfMemoryError(message)

    def part_failed(self, error: Exception) -> None:
        """After a part that ended with an error; `must_repeat` then says that it has to be repeated.

        Raises:
            Exception: the error, unless all processes were out of memory together.
        """
        agreed = self.ranks.size == 1 or isinstance(error, PassTooLarge)
        if not (agreed and is_out_of_memory(error)):
            raise error
        self.failure, self.in_solver = one_line(error), False

    def must_repeat(self) -> bool:
        """Whether the part that has ended has to be repeated, in all processes the same."""
        self.cached = self.storage.cached
        states = self.ranks.all_gather_object((self.failure, self.in_solver))
        failures = [(failure, in_solver) for failure, in_solver in states if failure is not None]
        if failures:
            self.failure, self.in_solver = failures[0][0], any(in_solver for _, in_solver in failures)
        return bool(failures)

    def shrink(
        self, where: str, batches: Sequence[Batch], rows: tuple[int, int] | None = None, ranks: Ranks | None = None
    ) -> str:
        """Halve the first size that can become smaller, in all processes the same, after a failure that all know.

        Args:
            where: the failure was.
            batches: of the pass.
            rows: bytes of the statistics that the pass collected, and bytes for half as many layers, rows or experts.
            ranks: the processes that take part; None: all processes of the run.

        Returns:
            The kind of the change: "samples", "rows", "caches" or, where the work is tried once more, "again".

        Raises:
            torch.OutOfMemoryError: no size can become smaller.
        """
        message, self.failure = self.failure, None
        samples = max(map(batch_size, batches), default=1)
        levers = samples, self.small, self.cached if self.storage.next_place else 0, where in self.retried
        gathered = (self.ranks if ranks is None else ranks).all_gather_object(levers)
        samples, small, cached, retried = map(max, zip(*gathered, strict=True))
        order = [
            ("rows", rows is not None and rows[0] > small),
            ("caches", cached > small),
            ("samples", samples > 1 and not self.in_solver),
            ("rows", rows is not None),
            ("caches", cached > 0),
            ("again", not retried),
        ]
        kind = next((kind for kind, possible in order if possible), None)
        if kind is None:
            raise torch.OutOfMemoryError(message)
        if kind == "samples":
            self.samples.halve(where, samples, (samples + 1) // 2)
        elif kind == "rows" and rows is not None:
            self.rows.halve(where, *rows)
            self.storage.most = self.rows.size and 2 * self.rows.size  # a part uses half of it
        elif kind == "caches":
            self.storage.caches = cached // 2
            self.caches.halve(where, cached, cached // 2)
        else:
            self._once_more(where)
        return kind

    def grow(self, recut: Callable[[Sequence[Batch]], bool], batches: Callable[[], Sequence[Batch]]) -> None:
        """After a block that succeeded, double the sizes that were halved, for the next block.

        `recut` continues with other batches of the same samples, or returns False where it cannot. No collective.
        """
        before = self.samples.size
        for lever in (self.samples, self.rows, self.slices):
            if lever.times:
                lever.grow()
        if self.samples.size != before and not recut(batches()):
            self.samples.size = before
        self.storage.most = self.rows.size and 2 * self.rows.size  # a part uses half of it

    def _attempted(
        self, work: Callable[[], Value], but: type[Exception] | tuple[()] = ()
    ) -> tuple[Value | None, str | None]:
        """The value of some work, or the device's message; the error and the tensors in its traceback are freed."""
        try:
            return work(), None
        except Exception as error:
            if isinstance(error, but) or not is_out_of_memory(error):
                raise
            self.cached = self.storage.cached
            return None, one_line(error)

    def _once_more(self, where: str) -> bool:
        """Whether work that cannot become smaller may be tried once more."""
        if where in self.retried:
            return False
        self.retried.add(where)
        self.again.halve(where, 0, 0)
        return True


def _bytes(size: int) -> str:
    """For people."""
    power = min(3, max(0, size.bit_length() - 1) // 10)
    return f"{size / 2 ** (10 * power):.4g} {('bytes', 'KiB', 'MiB', 'GiB')[power]}"
