"""Measurements: the memory and the time of some work, and of a solver on some rows of every matrix."""

import dataclasses
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..allocate.loss_curves import SampledRows, matrix_curve, sampled_rows, trial_patterns
from ..allocate.run import allocated_bits
from ..calibration.observer import LayerStatistics
from ..calibration.storage import Storage
from ..data.batches import Batch
from ..devices import is_gpu, trim_host_memory, wait_for
from ..errors import FactorizationError
from ..model.layers import PrunableLayer
from ..objective.fisher import SampleGradients
from ..objective.grid import Grid
from ..pipeline.loop import Task
from ..pipeline.solve import RowStatistics, weight_losses
from ..prune.layers import find_source, weighted_samples
from ..solvers.quantization import on_grid
from .memory import Point, RunSpec, Trial, extrapolated

Solve = Callable[[RunSpec, PrunableLayer, Tensor, LayerStatistics], object]  # some rows [rows, d_in] of a layer

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
        of_rows = gradients
        if of_rows is not None:
            of_rows = of_rows[:count] if isinstance(of_rows, Tensor) else of_rows.part(slice(count))
        with suppress(FactorizationError):  # raised after most of the time
            solve(weight[:count].contiguous(), dataclasses.replace(statistics, gradients=of_rows))

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


def _prune(run: RunSpec, layer: PrunableLayer, weight: Tensor, statistics: LayerStatistics) -> None:
    selection, solver, pattern = run.selection, run.selection.solver, run.selection.pattern_of(layer)
    objective = statistics.objective(weight, selection.lam_of(layer), solver.column_block(weight.shape[1], pattern))
    (result,) = solver.solve_path(objective, [pattern])
    result = on_grid(solver, objective, result, pattern)
    weight_losses(objective, result.weight, result.keep, layer.parameter.dtype)


def _measure_curve(run: RunSpec, layer: PrunableLayer, weight: Tensor, statistics: LayerStatistics) -> None:
    selection, config = run.selection, run.selection.config
    grids = [Grid(bits, config.quant_group) for bits in allocated_bits(config)]
    matrix_curve(selection.solver, weight.float(), statistics, trial_patterns(selection.patterns[layer.name]), grids)


SOLVERS: dict[str, Solve] = {"calibration": _prune, "allocation": _measure_curve}  # by phase


class TrialTask(Task):
    """Passes the data for all layers, with memory for `samples`; `solve` tries the first layer of every shape."""

    def __init__(self, run: RunSpec, cut: RunSpec, samples: list[Batch] | None, solve: Solve | None):
        self.run, self.trial, self.done, self.trials = run, solve, set[str](), dict[Any, Trial]()
        weighted = max(1, round(cut.count * weighted_samples(run.count) / run.count))
        source = find_source(cut, self, lambda layer: layer.matrix, weighted=weighted)
        spec = dataclasses.replace(run.statistics, token_weights=source.weights)
        if not (spec.keeps_routing or any(map(run.reads_all_tokens, run.selection.layers))):
            spec.under_calibrated_experts = "magnitude"  # a few samples reach few experts
        super().__init__(spec, cut.backoff, lambda: samples or cut.batches)
        self.pipeline = source.pipeline
        if run.backward:
            self.pipeline.gradients = True  # also where no layer has statistics of them

    def lacks(self, layer: PrunableLayer) -> bool:
        return layer.name not in self.done

    def skip(self, layer: PrunableLayer) -> None:
        self.done.add(layer.name)

    def solve(self, layer: PrunableLayer, statistics: Any) -> None:
        """Try the layer; where it is in slices, pass the data as often as a run, to rank removals and to solve."""
        parts = [statistics]
        if isinstance(statistics, RowStatistics):
            slices: Any = statistics
            parts = [slices.collect(rows, None) for rows in (*slices.slices, *slices.slices[-2::-1])][:1]
        elif layer.separate:
            parts = [group for group in statistics.groups(layer.groups) if group is not None]
        key = self.run.key(layer)
        if self.trial is not None and key not in self.trials:
            matrix = layer.expert(0).matrix if layer.separate else layer.matrix
            matrix = matrix[sampled_rows(layer)] if self.run.kind is SampledRows else matrix
            solve = partial(self.trial, self.run, layer)
            self.trials[key] = try_rows(solve, matrix, parts[0], self.run.storage.device, layer)
        self.done.add(layer.name)
