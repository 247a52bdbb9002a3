"""Several processes that prune one model together, over `torch.distributed`.

`processes()` returns `Ranks`: the rank of this process, the number of processes, and their collective operations. One
process alone is `SINGLE_PROCESS`, whose operations return their argument. `RunGroup` is the process group of one run,
with the parts that `torch.distributed` lacks:

- **A time-out that suits a solver.** One process may solve for hours while the others wait in a collective. The run's
  gloo group therefore waits for `TIMEOUT`, and failures are detected by the closed connections of a process that
  died, or failed and closed its group, on any machine. NCCL detects neither, so that tensors are transferred over it
  only after all processes have met in gloo.
- **The rank and the reason.** gloo reports the address of a closed connection alone. A process that fails stores its
  reason in the default group's store before it closes the group; a connection closed without a reason is a death.
- **The end of rank 0.** Unless a launcher such as torchrun hosts the store, it ends with rank 0, which waits for the
  others to read.
"""

import itertools
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from logging import getLogger
from traceback import clear_frames
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..approximate import same_text
from ..devices import is_out_of_memory
from ..errors import MoonshotError, one_line, reason

Value = TypeVar("Value")
TIMEOUT = timedelta(hours=24)  # for which processes wait for one another inside of a run
CONNECTING = timedelta(minutes=5)  # for which processes connect, once all of them have begun
OPENING = 7200  # seconds for which a process waits for the others at the beginning of a run
LATE = 60  # seconds after which it logs a warning there
LINGER = 5  # seconds that rank 0 waits for the others to read
LOOK = 2  # seconds between two checks of the connections to processes that have not begun
POLL = 0.02  # seconds between two checks of the store
_TAG = 2**30 + 1  # of messages that nobody receives
# Numbers the runs and the calls of `on_main_process`; equal in all processes, which make the same calls.
call_numbers = itertools.count()
_RUN = "a run of all processes"
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
        default = dist.distributed_c10d._get_default_store()
        self.store = dist.distributed_c10d.PrefixStore(f"optimum_moonshot/{name}", default)
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
        """Whether NCCL can transfer tensors: all processes have met, and all their tensors are on GPUs."""
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


@dataclass(frozen=True)
class Ranks:
    """This process among the processes of a run."""

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
        return list(map(len, shards(count, self.size)))

    def barrier(self) -> None:
        """Wait for all processes.

        Raises:
            MoonshotError: another process failed or died; so do all collectives below.
        """
        if self.group is not None:
            self.group.run(dist.barrier)

    def all_gather_object(self, value: Value) -> list[Value]:
        """The values of all processes, by rank; small, and picklable."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.size
        self.group.run(dist.all_gather_object, values, value)
        return values

    def broadcast_object(self, value: Value, rank: int = 0) -> Value:
        """The picklable value of one process, in all processes; values of the others are ignored."""
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
        """Gather the samples of all processes, [n, …] each, into `whole` [N, …], in the order of the ranks.

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
        """Gather the samples of all processes into `whole` [N, …], in order, where each process needs another part.

        `parts` has the part of this process's samples that each process needs, [n, …]; `sizes` as in `gather_rows`.
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
    return [range(count * rank // processes, count * (rank + 1) // processes) for rank in range(processes)]


SINGLE_PROCESS = Ranks()


def processes() -> AbstractContextManager[Ranks]:
    """The processes of the default group, which all enter this together; `SINGLE_PROCESS` without a group.

    A process that fails inside stops the others with its reason; all wait at the end until every process is done.

    Raises:
        MoonshotError: another process failed or died.
    """
    return _group() if several() else nullcontext(SINGLE_PROCESS)


@contextmanager
def _group() -> Iterator[Ranks]:
    group = RunGroup(f"call {next(call_numbers)}", _RUN)
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
