"""Measurements: the memory and the time of some work, and of a solver on some rows of a matrix."""

import dataclasses
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..calibration.observer import LayerStatistics
from ..calibration.storage import Storage
from ..devices import is_gpu, trim_host_memory, wait_for
from ..errors import FactorizationError
from ..model.layers import PrunableLayer
from ..objective.fisher import SampleGradients

# A trial has ROWS, and GROWTH times as many until it takes ENOUGH seconds, and VISIBLE times as long as with fewer:
# from less, noise would be extrapolated to thousands of rows.
ROWS, GROWTH, ENOUGH, VISIBLE = 8, 16, 0.3, 1.5


class RoomyStorage(Storage):
    """Has room for everything on the device, and divides the layers by the limit of a run; records what it gives."""

    largest = statistics = 0  # bytes of the largest tensor of a cache, and of all statistics at their peak

    def place(self, size: int, cache: bool = False) -> torch.device:
        if cache:
            self.largest = max(self.largest, size)
        else:
            self.statistics = max(self.statistics, self.used[self.device] - self.cached + size)
        return self.device


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that are allocated in its context by this thread: alive `now`, and the peak."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.laps: list[tuple[int, int]] = []  # the peak of each lap, and the bytes alive at its end
        self._live: dict[int, weakref.ref[Any]] = {}

    def lap(self) -> None:
        """End a lap."""
        self.laps.append((self.peak, self.now))
        self.peak = self.now

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        inputs = {id(leaf.untyped_storage()) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if id(storage) not in self._live and id(storage) not in inputs:
                    self._add(storage)
        return output

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()

        def release(_: Any) -> None:
            self.now -= size
            self._live.pop(key, None)

        self._live[key] = weakref.ref(storage, release)
        self.now += size
        self.peak = max(self.peak, self.now)


def clock(device: torch.device) -> float:
    """CPU seconds of this process if a single thread does all the work, so that other processes do not count; else
    seconds of wall time.
    """
    if not is_gpu(device) and torch.get_num_threads() == 1:
        return time.process_time()
    wait_for(device)
    return time.perf_counter()


Point = tuple[int, float]  # a count, and the seconds or bytes of so many


def extrapolated(points: Sequence[Point], count: int) -> float:
    """The value at a count on the line through the last two points, or through zero and a single one.

    It neither falls with the count nor grows faster than the count does.
    """
    (few, less), (more, most) = [(0, 0.0), *points][-2:]
    return most + min(max(0.0, most - less) / (more - few), most / more) * (count - more)


class Trial(NamedTuple):
    """The solver of a matrix."""

    rows: int
    seconds: float
    sizes: Sequence[Point]  # bytes at its peak by the rows, besides the statistics


@torch.no_grad()
def try_rows(
    solve: Callable[[Tensor, LayerStatistics], object],
    weight: Tensor,
    statistics: LayerStatistics,
    device: torch.device,
    layer: PrunableLayer,
) -> Trial:
    """Solve more and more rows of a matrix; the seconds and bytes of all rows follow from the last two trials."""
    gradients = statistics.gradients
    rows = gradients.count if isinstance(gradients, SampleGradients) else len(weight)  # of a slice
    whole = layer.groups > 1 and not layer.separate  # groups of rows have their own inputs
    count, times, sizes = rows if whole else min(rows, ROWS), list[Point](), list[Point]()

    def solve_some(count: int) -> None:
        some = gradients
        if some is not None:
            some = some[:count] if isinstance(some, Tensor) else some.part(slice(count))
        with suppress(FactorizationError):  # raised after most of the time
            solve(weight[:count].contiguous(), dataclasses.replace(statistics, gradients=some))

    solve_some(count)  # the first call has costs of the process
    while not times or (count < rows and (len(times) < 2 or times[-1][1] < max(ENOUGH, VISIBLE * times[-2][1]))):
        count = min(rows, GROWTH * count) if times else count
        trim_host_memory()  # as between the layers of a run, whose solver then writes to new pages
        started = clock(device)
        solve_some(count)
        times.append((count, clock(device) - started))
    most = min(rows, 2 * count)  # of fewer rows all are in one slice of a solver, which would be extrapolated
    for count in dict.fromkeys([most if whole else max(1, most // 2), most]):
        with LiveBytes() as live:
            solve_some(count)
        sizes.append((count, live.peak))
    return Trial(len(weight), extrapolated(times, len(weight)), sizes)
