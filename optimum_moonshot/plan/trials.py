"""The memory probe and the timer of a rehearsal, and its trials of the solver on some rows of a matrix."""

import dataclasses
import time
import weakref
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..allocate.loss_curves import SampledRows, matrix_curve, sampled_rows, trial_patterns
from ..allocate.run import allocated_bits
from ..calibration.observer import LayerStatistics
from ..devices import is_gpu, wait_for
from ..errors import FactorizationError
from ..model.layers import PrunableLayer
from ..objective.fisher import SampleGradients
from ..objective.grid import Grid
from ..pipeline.solve import weight_losses
from ..solvers.quantization import on_grid
from .memory import Line, RunSpec, Trial

# A trial has ROWS, and GROWTH times as many until it takes ENOUGH seconds, and VISIBLE times as long as with fewer:
# from less, noise would be extrapolated to thousands of rows.
ROWS, GROWTH, ENOUGH, VISIBLE = 8, 16, 0.3, 1.5

Solve = Callable[[PrunableLayer, Tensor, LayerStatistics], object]  # solves some rows [rows, d_in] of a layer


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that are allocated in its context by this thread: alive `now`, and the peak."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._live: dict[int, weakref.ref[Any]] = {}

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


def solver_of(run: RunSpec, phase: str) -> Solve | None:
    """The solver of a calibration, or the trials of an allocation."""
    selection, solver = run.selection, run.selection.solver

    def solve(layer: PrunableLayer, weight: Tensor, statistics: LayerStatistics) -> None:
        pattern = run.pattern(layer)
        block = solver.column_block(weight.shape[1], pattern)
        objective = statistics.objective(weight, selection.lam_of(layer), block)
        (result,) = solver.solve_path(objective, [pattern])
        result = on_grid(solver, objective, result, pattern)
        weight_losses(objective, result.weight, result.keep, layer.parameter.dtype)

    def measure(layer: PrunableLayer, weight: Tensor, statistics: LayerStatistics) -> None:
        grids = [Grid(bits, selection.config.quant_group) for bits in allocated_bits(selection.config)]
        matrix_curve(solver, weight.float(), statistics, trial_patterns(selection.patterns[layer.name]), grids)

    return {"calibration": solve, "allocation": measure}.get(phase)


def try_layer(solve: Solve, statistics: LayerStatistics, run: RunSpec, layer: PrunableLayer) -> Trial:
    """A trial of a matrix, or of the first expert."""
    matrix = layer.expert(0).matrix if layer.separate else layer.matrix
    matrix = matrix[sampled_rows(layer)] if run.kind is SampledRows else matrix
    return try_rows(partial(solve, layer), matrix, statistics, run, layer)


@torch.no_grad()
def try_rows(
    solve: Callable[..., object], weight: Tensor, statistics: LayerStatistics, run: RunSpec, layer: PrunableLayer
) -> Trial:
    """Solve more and more rows of a matrix; seconds and bytes of all lie on the line through the last two."""
    gradients, rows = statistics.gradients, len(weight)
    rows = gradients.count if isinstance(gradients, SampleGradients) else rows  # of a slice

    def tried(count: int, probe: Any = None) -> float:
        of_rows: Any = gradients
        if isinstance(of_rows, SampleGradients):  # as many as in the run
            few = of_rows.gradients[:, :count]
            of_rows = SampleGradients(few.repeat(-(-run.samples // len(few)), 1, 1)[: run.samples])
        elif of_rows is not None:
            of_rows = of_rows[:count] if isinstance(of_rows, Tensor) else of_rows.part(slice(count))
        part, matrix = dataclasses.replace(statistics, gradients=of_rows), weight[:count].contiguous()
        with ExitStack() as stack:
            stack.enter_context(suppress(FactorizationError))  # raised after most of the time
            if probe is not None:
                stack.enter_context(probe)
            started = clock(run.device)
            solve(matrix, part)
        return clock(run.device) - started

    whole = layer.groups > 1 and not layer.separate  # groups of rows have their own inputs
    count, before = rows if whole else min(rows, ROWS), (0, 0.0)
    tried(count)  # the first one has costs of the process
    while (taken := tried(count)) < max(ENOUGH, VISIBLE * before[1]) or not before[0]:
        if count == rows:
            break
        before, count = (count, taken), min(rows, GROWTH * count)
    growth = max(0.0, taken - before[1]) / (count - before[0])
    most = count if whole else min(count, GROWTH * ROWS)
    few, sizes = most if whole else max(1, most // 2), list[int]()
    for each in (few, most):
        live = LiveBytes()
        tried(each, live)
        sizes.append(live.peak)
    seconds = taken + min(growth, taken / count) * (len(weight) - count)
    return Trial(len(weight), seconds, Line.through((few, sizes[0]), (most, sizes[1])))
