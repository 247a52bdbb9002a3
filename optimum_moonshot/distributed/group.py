"""The process group of one run, with the parts that `torch.distributed` lacks.

- **A time-out that suits a solver.** One process may solve for hours while the others wait in a collective. The run's
  gloo group therefore waits for `TIMEOUT`, and failures are detected by closed connections: those of a process that
  died, or failed and closed its group, on any machine. NCCL detects neither, so that tensors are transferred over it
  only after all processes have met in gloo.
- **The rank and the reason.** gloo reports the address of a closed connection alone. A process that fails stores its
  reason in the default group's store before it closes the group; a connection closed without a reason is a death.
- **The end of rank 0.** Unless a launcher such as torchrun hosts the store, it ends with rank 0, which waits for the
  others to read.
"""

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from logging import getLogger
from traceback import clear_frames
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..devices import is_out_of_memory
from ..errors import MoonshotError, one_line, reason

TIMEOUT = timedelta(hours=24)  # by which one process may be behind the others inside of a run
CONNECTING = timedelta(minutes=5)  # by which all processes connect, once all of them have begun
OPENING = 7200  # seconds by which it may be behind at the beginning of a run
LATE = 60  # seconds after which a process that waits there logs a warning
LINGER = 5  # seconds that rank 0 waits for the others to read
LOOK = 2  # seconds between two looks at the connections to processes that have not begun
POLL = 0.02  # seconds between two looks at the store
_ROOT = "optimum_moonshot"
_TAG = 2**30 + 1  # of messages that nobody receives
_log = getLogger(__name__)


class RankFailed(MoonshotError):
    """Another process of the group failed or died; `reason` is its error in one line."""

    def __init__(self, rank: int, reason: str):
        super().__init__(f"rank {rank} failed: {reason}")
        self.rank, self.reason = rank, reason


class RunGroup:
    """The connections between the processes of a run.

    `name` is the same in all of them; `kind` is, unless they make different calls.
    """

    def __init__(self, name: str = "", kind: str = ""):
        self.rank, self.size, self.kind = dist.get_rank(), dist.get_world_size(), kind
        self.store = dist.distributed_c10d.PrefixStore(f"{_ROOT}/{name}", dist.distributed_c10d._get_default_store())
        self.nccl = "nccl" in str(dist.get_backend_config())
        self.group: dist.ProcessGroup | None = None
        self.collectives = 0  # in which this process has taken part

    def open(self) -> None:
        """Wait until all processes begin the run, and connect them.

        Raises:
            MoonshotError: a process did not come.
        """
        begun = [f"begun/{rank}" for rank in range(self.size)]
        with _store_errors():
            self.begin()
            started, warned = time.monotonic(), False
            while not self._poll(begun, LOOK):
                self._check_kind()
                self._check_living()
                waited = time.monotonic() - started
                if waited > LATE and not warned:
                    _log.warning("rank %d waits for the others of the group: all make this call together", self.rank)
                    warned = True
                if waited > OPENING:
                    hint = "call this in every process of the group, or end the remaining ones"
                    message = f"a process did not come: rank {self.rank} has waited {OPENING / 3600:g} hours"
                    raise MoonshotError(message, hint=hint)
            self._check_kind()
        with self._failures():
            # A process that dies in this call is noticed by its time-out alone.
            self.group = dist.new_group(backend="gloo", timeout=CONNECTING)
        dist.distributed_c10d._set_pg_timeout(TIMEOUT, self.group)
        if self.nccl:  # all processes have to take part in the first operation, and not all do in an exchange
            dist.barrier(device_ids=[torch.cuda.current_device()])

    def begin(self) -> None:
        """Tell the other processes that this one has made its call."""
        self.store.set(f"begun/{self.rank}", self.kind)

    def _check_kind(self) -> None:
        """Check that the other processes that have begun make the same kind of call.

        Raises:
            MoonshotError: one does not; each would wait for the other.
        """
        for rank in range(self.size):
            kind = self.store.get(f"begun/{rank}").decode() if self.store.check([f"begun/{rank}"]) else self.kind
            if kind != self.kind:
                message = f"rank {self.rank} makes {self.kind}, and rank {rank} {kind}"
                raise MoonshotError(message, hint="make the same calls in the same order in all processes")

    def _check_living(self) -> None:
        """Raise `RankFailed` for a process that died before it began the run, if the default group shows it."""
        if "gloo" not in str(dist.get_backend_config()):
            return
        missing = [rank for rank in range(self.size) if not self.store.check([f"begun/{rank}"])]
        for rank in missing:
            if self._is_closed(rank):
                raise RankFailed(rank, "its process has died before this call")

    def close(self) -> None:
        """Close the connections; processes that wait for this one raise."""
        if self.group is not None:
            dist.destroy_process_group(self.group)
            self.group = None

    def _poll(self, keys: list[str], seconds: float) -> bool:
        """Wait for keys; `store.wait` could not be interrupted, and prints a warning when its time-out expires."""
        deadline = time.monotonic() + seconds
        while not self.store.check(keys):
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL)
        return True

    def failure(self, error: BaseException) -> RankFailed:
        """The error as the other processes raise it."""
        return error if isinstance(error, RankFailed) else RankFailed(self.rank, one_line(error))

    def record(self, failure: RankFailed) -> bool:
        """Store the reason why this process stops; return whether it is the first one stored."""
        message = json.dumps([failure.rank, failure.reason, self.rank])
        with suppress(RuntimeError):  # the store is closed, and rank 0 with it
            return self.store.compare_set("failed", "", message).decode() == message
        return False

    def fail(self, error: BaseException) -> None:
        """Store the reason why this process ends the run, and close its connections, which stops the others."""
        failure = self.failure(error)
        self.record(failure)
        self.close()
        self._linger({*range(1, self.size)} - {failure.rank})

    def _linger(self, ranks: set[int]) -> None:
        """Where the store ends with this process, give others time to read."""
        if self.rank == 0 and ranks and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            with suppress(RuntimeError):
                self._poll([f"read/{rank}" for rank in ranks], LINGER)

    def publish(self, value: str) -> None:
        """Hand a result of rank 0, of any length, to the processes that call `read`."""
        self.store.set("value", value)
        self._linger({rank for rank in range(1, self.size) if self.store.check([f"begun/{rank}"])})

    def read(self) -> str:
        """The result that rank 0 publishes.

        Raises:
            RankFailed: it failed.
        """
        with _store_errors():
            self.begin()
            while not self._poll(["value"], POLL):
                self._check_kind()
                if failure := self._stored_failure():
                    raise failure
            value = self.store.get("value").decode()
            self.store.set(f"read/{self.rank}", "")
            return value

    def _stored_failure(self) -> RankFailed | None:
        if not self.store.check(["failed"]):
            return None
        rank, message, _ = json.loads(self.store.get("failed"))
        self.store.set(f"read/{self.rank}", "")
        return RankFailed(rank, message)

    def _is_closed(self, rank: int) -> bool:
        """Whether the connection to another process is closed: gloo then refuses to send, and else sends later."""
        try:
            dist.isend(torch.zeros(1), rank, group=self.group, tag=_TAG)
        except RuntimeError:
            return True
        return False

    def run(self, collective: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Take part in a collective operation of `torch.distributed` over gloo, unless `group` is given.

        Raises:
            MoonshotError: another process failed or died.
        """
        self.collectives += 1
        with self._failures():
            collective(*args, **{"group": self.group, **kwargs})

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """Raise `MoonshotError` where an operation fails because another process failed or died."""
        try:
            yield
        except BaseException as error:
            clear_frames(error.__traceback__)  # a reference to the group there would keep its connections open
            if not isinstance(error, RuntimeError) or is_out_of_memory(error):
                raise
            closed = [rank for rank in range(self.size) if rank != self.rank and self._is_closed(rank)]
            with _store_errors():
                failure = self._stored_failure()  # read last: reasons are stored before connections are closed
            if failure is None and closed:
                failure = RankFailed(closed[0], "its process has died (killed, or out of memory)")
            raise failure or MoonshotError(f"a transfer between the processes failed: {reason(error)}") from None

    def all_reduce(self, tensor: Tensor, owner: int | None) -> None:
        on_gpus = self._on_gpus([tensor])
        carried = _carried(tensor, on_gpus)
        group = {"group": None} if on_gpus else {}
        if owner is None:
            self.run(dist.all_reduce, carried, **group)
        else:
            self.run(dist.reduce, carried, dst=owner, **group)
        if carried is not tensor:
            tensor.copy_(carried)

    def exchange(self, parts: Sequence[Tensor | None], into: Sequence[Tensor | None]) -> None:
        """Send a part to each process, and receive one from each.

        gloo has no gathering of different sizes, and `all_to_all_single` would need a copy of all parts at once. Here
        each process sends to one and receives from one at a time. A part is None for a process that needs nothing, and
        so is the tensor in `into` for a process from which this one needs nothing.
        """
        on_gpus = self._on_gpus([tensor for tensor in (*parts, *into) if tensor is not None])
        part, target = parts[self.rank], into[self.rank]
        if part is not None and target is not None:
            target.copy_(part)
        group = {"group": None} if on_gpus else {}
        for distance in range(1, self.size):
            to, source = (self.rank + distance) % self.size, (self.rank - distance) % self.size
            sent, target = parts[to], into[source]
            received = None if target is None else _carried(target, on_gpus)
            self.run(_send_receive, None if sent is None else _carried(sent, on_gpus), to, received, source, **group)
            if target is not None and received is not None and received is not target:
                target.copy_(received)

    def _on_gpus(self, tensors: list[Tensor]) -> bool:
        """Whether NCCL can transfer tensors, because those of all processes are on GPUs; all have met then."""
        if not self.nccl:
            return False
        on_gpu = [False] * self.size
        self.run(dist.all_gather_object, on_gpu, all(tensor.is_cuda for tensor in tensors))
        return all(on_gpu)


def _send_receive(
    sent: Tensor | None, to: int, received: Tensor | None, source: int, group: dist.ProcessGroup | None
) -> None:
    transfers = (dist.isend, sent, to), (dist.irecv, received, source)
    operations = [
        dist.P2POp(transfer, tensor.view(torch.uint8), peer, group)
        for transfer, tensor, peer in transfers
        if tensor is not None and tensor.numel()
    ]
    for work in dist.batch_isend_irecv(operations) if operations else ():
        if group is None:
            work.wait()  # over NCCL, where a time-out would block the host
        else:
            work.wait(TIMEOUT)  # else gloo waits for `CONNECTING`


def _carried(tensor: Tensor, on_gpus: bool) -> Tensor:
    return (tensor if on_gpus else tensor.cpu()).contiguous()


@contextmanager
def _store_errors() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # of the store; a MoonshotError is a ValueError
        raise RankFailed(0, f"it has ended, and the process group's store with it ({reason(error)})") from None
