"""The line between processes that prune together: meetings at the store of their process group, and transfers.

Each transfer begins with a meeting: nobody enters a collective before all have come, however long the slowest solves.
Who waits there looks whether another has failed, which it says at the store, or died, which shows on the same machine;
launchers such as torchrun end all processes where one dies on another. So no time-out is longer than a transfer.
"""

import contextlib
import itertools
import json
import logging
import os
import re
import socket
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from ..devices import is_out_of_memory
from ..errors import MoonshotError, reason

Value = TypeVar("Value")
# Minutes that one transfer may take, and that a process may take to come to a run that another has begun.
TRANSFER, OPENING = 30, 120
# Hours that one may be behind another inside of a run, where nobody sees whether it lives: on another machine.
LONGEST = 24
# Seconds between two looks at the store: at first, at most, and between looks for those who have failed or died.
FIRST, LAST, WATCH = 0.0002, 0.02, 0.2
# Seconds after which a process that waits for others to come says so.
LATE = 60
# Seconds that rank 0 stays for the others to read at its store.
LINGER = 5
_log = logging.getLogger(__name__)
_FAILED = re.compile(r"rank \d+ failed: ")


def one_line(error: BaseException) -> str:
    """What an error says; where it says nothing, its type."""
    return " ".join(str(error).split()) or type(error).__name__


def who_failed(rank: int, error: BaseException) -> tuple[str, str]:
    """Such as ("rank 1 failed: ", "…"), one line together; an error that another process told of names that one.

    Args:
        rank: of this process.
        error: that ends it.
    """
    message = one_line(error)
    told = _FAILED.match(message) if isinstance(error, MoonshotError) else None
    return (told[0], message[told.end() :]) if told else (f"rank {rank} failed: ", message)


def _place() -> str:
    """What tells machines apart, and containers on one, whose processes do not see each other."""
    with contextlib.suppress(OSError):
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()


class Line:
    """What connects the processes of a run.

    Args:
        name: of the run, at the store; the same in all processes.
        above: the name under which a process tells that it ends, for whatever reason.
    """

    def __init__(self, name: str, above: str | None = None):
        self.name, self.above = name, above
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.store = dist.distributed_c10d._get_default_store()
        self.group: dist.ProcessGroup | None = None
        self.nccl = "nccl" in str(dist.get_backend_config())
        self.place, self.others = _place(), dict[int, psutil.Process | None]()
        self.meetings = itertools.count()
        self.barriers = 0  # how often this process has come to one

    def open(self) -> None:
        """Wait for all to come, and make their group."""
        self.announce()
        hint = f"rank {self.rank} waits for other processes of the group: all of them make this call together"
        self.barrier(60 * OPENING, hint)
        self.group = dist.new_group(backend="gloo", timeout=timedelta(minutes=TRANSFER))

    def announce(self) -> None:
        """Say which process this is, so that others on the machine see whether it lives."""
        process = psutil.Process()
        self.store.set(f"{self.name}/who/{self.rank}", json.dumps([self.place, process.pid, process.create_time()]))

    def close(self) -> None:
        """Let go of the group."""
        if self.group is not None:
            dist.destroy_process_group(self.group)
            self.group = None

    def barrier(self, seconds: float = 3600 * LONGEST, hint: str = "") -> None:
        """Wait for all, so long at most.

        Args:
            seconds: how long.
            hint: is logged once the others are late.

        Raises:
            MoonshotError: one has failed or died, or does not come.
        """
        key = f"{self.name}/{next(self.meetings)}"
        self.barriers += 1
        with self._store_alive():
            come = self.store.add(key, 1)
            if come == self.size:
                self.store.set(f"{key}/all", "1")
                return
        self.wait(f"{key}/all", range(self.size), seconds, hint)

    def leave(self) -> None:
        """Leave together, rank 0 the last: the store may be its own.

        Raises:
            MoonshotError: one has failed or died.
        """
        self.barrier()
        if self.rank:
            with self._store_alive():
                self.store.add(f"{self.name}/told", 1)
        else:
            self._linger(self.size - 1)

    def read(self, what: str, rank: int) -> bytes:
        """What another process writes, once it is there.

        Args:
            what: its name.
            rank: of the process.

        Raises:
            MoonshotError: it has failed or died.
        """
        self.wait(f"{self.name}/{what}", [rank], 3600 * LONGEST)
        with self._store_alive():
            found = self.store.get(f"{self.name}/{what}")
            self.store.add(f"{self.name}/told", 1)
        return found

    def write(self, what: str, value: str) -> None:
        """For others to read, of whom those that wait already have read it in the end.

        Args:
            what: its name.
            value: of any length.
        """
        self.store.set(f"{self.name}/{what}", value)
        others = [f"{self.name}/who/{rank}" for rank in range(self.size) if rank != self.rank]
        self._linger(sum(map(self._has, others)))

    def _has(self, key: str) -> bool:
        return self.store.check([key])

    def wait(self, key: str, ranks: Sequence[int], seconds: float, hint: str = "") -> None:
        """Wait until a key is at the store.

        Args:
            key: which.
            ranks: of those who may set it.
            seconds: at most.
            hint: is logged once the others are late.

        Raises:
            MoonshotError: another process has failed, one of those has died, or the time is over.
        """
        started, watched = time.monotonic(), 0.0
        while True:
            with self._store_alive():
                if self._has(key):
                    return
                waited = time.monotonic() - started
                if waited - watched > WATCH:
                    watched = waited
                    self._watch(key, ranks)
            if hint and waited > LATE:
                _log.warning(hint)
                hint = ""
            if waited > seconds:
                told = f"rank {self.rank} has waited {seconds / 3600:g} hours: call this in every process of the group"
                raise MoonshotError(f"a process did not come: {told}, or end those that are left")
            time.sleep(min(LAST, max(FIRST, waited / 10)))

    @contextlib.contextmanager
    def _store_alive(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # a MoonshotError is none
            gone = "rank 0 failed: it has ended, and the process group's store with it"
            raise MoonshotError(f"{gone} ({reason(error)})") from None

    def _watch(self, key: str, ranks: Sequence[int]) -> None:
        """Raise where another process has failed, or one of some has died before the key was there."""
        for name in filter(None, (self.above, self.name)):
            if self._has(f"{name}/failed"):
                rank, message = json.loads(self.store.get(f"{name}/failed"))
                if rank != self.rank:
                    self.store.add(f"{name}/told", 1)
                    raise MoonshotError(message)
        for rank in ranks:
            if rank != self.rank and self._died(rank) and not self._has(key):
                raise MoonshotError(f"rank {rank} failed: its process has died (killed, or out of memory)")

    def _died(self, rank: int) -> bool:
        """Whether a process on this machine is no more."""
        if rank not in self.others:
            if not self._has(f"{self.name}/who/{rank}"):
                return False
            place, pid, born = json.loads(self.store.get(f"{self.name}/who/{rank}"))
            try:
                self.others[rank] = psutil.Process(pid) if place == self.place else None
            except psutil.NoSuchProcess:
                return True
            known = self.others[rank]
            if known is not None and known.create_time() != born:
                return True
        process = self.others[rank]
        if process is None:
            return False
        try:
            return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    def fail(self, error: BaseException) -> None:
        """Tell the others why this process leaves the run."""
        self.tell(error)
        if self.rank == 0:
            self._linger(self.size - 1)

    def tell(self, error: BaseException) -> bool:
        """Leave a message for all who wait; whether no other has left one."""
        mine = json.dumps([self.rank, "".join(who_failed(self.rank, error))])
        with contextlib.suppress(RuntimeError):
            return self.store.compare_set(f"{self.name}/failed", "", mine).decode() == mine
        return False  # the store is gone, and rank 0 with it

    def _linger(self, readers: int) -> None:
        """Where the store ends with this process: give so many others time to read."""
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return
        started = time.monotonic()
        with contextlib.suppress(RuntimeError):
            while time.monotonic() - started < LINGER and self.store.add(f"{self.name}/told", 0) < readers:
                time.sleep(LAST)

    def all_gather_object(self, value: Value) -> list[Value]:
        """As `Ranks.all_gather_object`."""
        found: list[Any] = [None] * self.size
        with self._transfer():
            dist.all_gather_object(found, value, group=self.group)
        return found

    def broadcast_object(self, value: Value, rank: int) -> Value:
        """As `Ranks.broadcast_object`."""
        found = [value if self.rank == rank else None]
        with self._transfer():
            dist.broadcast_object_list(found, src=rank, group=self.group)
        return found[0]  # type: ignore[return-value]

    def broadcast(self, tensor: Tensor, rank: int) -> None:
        """A tensor of one process, contiguous, into the same of all.

        Args:
            tensor: of any shape.
            rank: of the one.
        """
        with self._carried(tensor) as (carried, group), self._transfer():
            dist.broadcast(carried.view(torch.uint8), src=rank, group=group)

    def all_reduce(self, tensor: Tensor, owner: int | None) -> None:
        """As `Ranks.all_reduce`."""
        with self._carried(tensor) as (carried, group), self._transfer():
            if owner is None:
                dist.all_reduce(carried, group=group)
            else:
                dist.reduce(carried, dst=owner, group=group)

    def send_to(self, part: Tensor, into: Tensor | None, rank: int, owner: int | None) -> None:
        """A process's part to the owner, or to all.

        Args:
            part: what this process has, of any shape.
            into: of any shape, where what `rank` has goes; None where nobody needs it here.
            rank: whose part it is.
            owner: who gets it; None is all.
        """
        if self.rank == rank and into is not None:
            into.copy_(part)
        if owner is None:
            assert into is not None
            self.broadcast(into, rank)
            return
        if rank == owner:
            return
        tensor = part if self.rank == rank else into
        on_gpus = self._on_gpus(tensor is None or tensor.is_cuda)
        if tensor is None or self.rank not in (rank, owner):
            self.barrier()
            return
        with self._carried(tensor, on_gpus) as (carried, group), self._transfer():
            if self.rank == rank:
                dist.send(carried.view(torch.uint8), dst=owner, group=group)
            else:
                dist.recv(carried.view(torch.uint8), src=rank, group=group)

    def all_to_all(self, parts: Sequence[Tensor], into: Sequence[Tensor]) -> None:
        """From each process to each other one, in rounds in which every process sends to one and hears from one.

        Args:
            parts: what each process gets of this one, of any shape.
            into: where what each process has for this one goes, of the shape that it sends.
        """
        into[self.rank].copy_(parts[self.rank])
        on_gpus = self._on_gpus(all(tensor.is_cuda for tensor in (*parts, *into)))
        for distance in range(1, self.size):
            to, source = (self.rank + distance) % self.size, (self.rank - distance) % self.size
            with (
                self._carried(parts[to].contiguous(), on_gpus) as (sent, group),
                self._carried(into[source], on_gpus) as (received, _),
                self._transfer(),
            ):
                ends = (dist.isend, sent, to), (dist.irecv, received, source)
                full = [(end, tensor.view(torch.uint8), peer) for end, tensor, peer in ends if tensor.numel()]
                for work in dist.batch_isend_irecv([dist.P2POp(*each, group) for each in full]) if full else ():
                    work.wait()

    @contextlib.contextmanager
    def _transfer(self) -> Iterator[None]:
        """Meet, and exchange something; where that breaks off, say who has."""
        self.barrier()
        try:
            yield
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            started = time.monotonic()
            while time.monotonic() - started < LINGER:
                with self._store_alive():
                    self._watch("", range(self.size))
                time.sleep(WATCH)
            raise MoonshotError(f"a transfer between the processes failed: {reason(error)}") from error

    def _on_gpus(self, mine: bool) -> bool:
        """Whether a tensor is on a GPU in all processes that have one: budgets may end at different layers."""
        return self.nccl and min(self.all_gather_object(mine))

    @contextlib.contextmanager
    def _carried(self, tensor: Tensor, on_gpus: bool | None = None) -> Iterator[tuple[Tensor, Any]]:
        """A tensor as its group takes it, with that group; what it has in the end is the tensor's."""
        on_gpus = self._on_gpus(tensor.is_cuda) if on_gpus is None else on_gpus
        carried = (tensor if on_gpus else tensor.cpu()).contiguous()
        yield carried, None if on_gpus else self.group
        if carried is not tensor:
            tensor.copy_(carried)
