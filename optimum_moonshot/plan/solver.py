"""Seconds of the solver, from trials with one random matrix of every shape.

A matrix that would take more than a moment is tried with fewer rows: its time then lies on the line through two trials,
a fixed part for all rows, such as a factorization, and a part per row. Where even a few rows take too long, inputs are
left out too, and the time follows from the operations that the solver states.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor

from ..allocate.byte_budget import allocated_bits
from ..allocate.loss_curves import matrix_curve, sampled_count, sampled_rows, trial_patterns
from ..calibration.observer import LayerStatistics
from ..devices import is_gpu, wait_for
from ..errors import FactorizationError
from ..model.layers import PrunableLayer
from ..objective.fisher import Fisher, FisherMatrices, SampleGradients
from ..objective.grid import Grid
from ..objective.patterns import Pattern
from ..objective.problem_size import ProblemSize
from ..pipeline.solve import weight_losses
from ..solvers import Solver
from ..solvers.quantization import on_grid
from .run_spec import RunSpec, pattern_of, problem_size

# Seconds of a trial, as predicted from smaller ones, at most; or this fraction of the predicted time of the run.
MATRIX_SECONDS, TRIAL_FRACTION = 0.7, 0.02
# Bytes that a trial allocates, at most.
TRIAL_BYTES = 2**29
# Rows and inputs of the first trial; rows of larger ones, with all inputs or so many.
FIRST_SIZE = 128, 128
ROWS = 8, 16, 32, 64, 128, 256, 512, 1024
FEWER_INPUTS = 256, 512, 1024, 2048
# Eigenvalues of a random Gram matrix decay as i^-DECAY: solvers that iterate until they converge, such as ALPS, take
# about as many steps then as with the inputs of trained models. White inputs would take half as many.
DECAY = 1.25
# Ratio of the operations of two trials from which they show how the seconds of an operation change.
LEAST_SPAN = 4


def clock(device: torch.device) -> float:
    """CPU seconds of this process if a single thread does all the work, so that other processes do not count; else
    seconds of wall time.
    """
    if not is_gpu(device) and torch.get_num_threads() == 1:
        return time.process_time()
    wait_for(device)
    return time.perf_counter()


def solving_seconds(run: RunSpec) -> dict[str, float]:
    """Seconds in the solver of every layer; layers of the same size and pattern share a trial."""
    layers, solver = run.selection.layers, run.selection.solver
    kinds = {layer.name: (problem_size(run, layer), pattern_of(run.selection, layer)) for layer in layers}
    matrices = {layer.name: layer.groups if layer.separate else 1 for layer in layers}
    counts: dict[tuple[ProblemSize, Pattern], int] = {}
    for name, kind in kinds.items():
        counts[kind] = counts.get(kind, 0) + matrices[name]
    seconds = {
        (size, pattern): _matrix_seconds(solver, pattern, size, count, partial(_solve, solver, pattern))
        for (size, pattern), count in counts.items()
    }
    return {name: seconds[kind] * matrices[name] for name, kind in kinds.items()}


def curve_seconds(run: RunSpec) -> dict[str, float]:
    """Seconds to measure the loss curve of every layer for an allocation; layers of the same size share a trial."""
    selection, config = run.selection, run.selection.config
    grids = [Grid(bits, config.quant_group) for bits in allocated_bits(config)]
    samples = sampled_count(run.samples)

    def measure(patterns: tuple[Pattern, ...], size: ProblemSize) -> float:
        generator = torch.Generator(size.device).manual_seed(0)
        weight, statistics = random_problem(selection.solver, size, generator)
        gradients = torch.randn(samples, *weight.shape, generator=generator, device=size.device)
        inputs = statistics.inputs.diag() if statistics.diagonal else statistics.inputs
        started = clock(size.device)
        with suppress(FactorizationError):  # after most of the time
            full = LayerStatistics(inputs, SampleGradients(gradients), samples)
            matrix_curve(selection.solver, weight, full, patterns, grids)
        return clock(size.device) - started

    seconds: dict[tuple[ProblemSize, tuple[Pattern, ...]], float] = {}
    by_layer = {}
    for layer in selection.layers:
        kind = size, patterns = _curve_size(run, layer), trial_patterns(selection.patterns[layer.name])
        if kind not in seconds:
            seconds[kind] = _matrix_seconds(selection.solver, patterns[0], size, 1, partial(measure, patterns))
        by_layer[layer.name] = seconds[kind] * (layer.groups if layer.separate else 1)
    return by_layer


def _curve_size(run: RunSpec, layer: PrunableLayer) -> ProblemSize:
    """The problem of a loss curve, which is solved at λ = 1."""
    sampled = len(range(*sampled_rows(layer).indices(layer.shape[0])))
    size = problem_size(run, layer, sampled // layer.groups if layer.separate else sampled)
    block = run.selection.solver.column_block(size.inputs, trial_patterns(run.selection.patterns[layer.name])[0])
    return dataclasses.replace(size, samples=0, compressed=False, lam=1.0, column_block=block)


def _matrix_seconds(
    solver: Solver, pattern: Pattern, size: ProblemSize, count: int, solve: Callable[[ProblemSize], float]
) -> float:
    """Seconds of one of `count` matrices in the run, by `solve` for smaller ones."""

    def seconds(other: ProblemSize) -> float:
        taken = solve(other)
        return min(taken, solve(other)) if taken < MATRIX_SECONDS else taken  # the first one has costs of the process

    def operations(other: ProblemSize) -> float:
        return solver.work(other, pattern).operations

    part = partial(_smaller, solver, pattern, size)
    candidates = {part(rows, d_in) for d_in in (*FEWER_INPUTS, size.inputs) for rows in (*ROWS, size.rows)}
    tried, trials = part(*FIRST_SIZE), list[tuple[float, float]]()
    while True:
        taken = seconds(tried)
        trials = [*trials[:1], (operations(tried), taken)]
        limit = max(MATRIX_SECONDS, TRIAL_FRACTION * count * _extrapolated(trials, operations(size)))
        larger = [other for other in candidates if _extent(other) > _extent(tried) and _floats(other) < TRIAL_BYTES / 4]
        affordable = [other for other in larger if _extrapolated(trials, operations(other)) < limit]
        if not affordable:
            break
        tried = max(affordable, key=_extent)
    fewer, whole = part(tried.rows // 4, tried.inputs), part(size.rows, tried.inputs)
    if fewer.rows < tried.rows < whole.rows:
        growth = max(0.0, taken - seconds(fewer)) / (tried.rows - fewer.rows)
        taken += min(growth, taken / tried.rows) * (size.rows - tried.rows)
    else:
        taken *= operations(whole) / operations(tried)
    return _extrapolated([trials[0], (operations(whole), taken)], operations(size))


def _extrapolated(trials: Sequence[tuple[float, float]], operations: float) -> float:
    """Seconds of so many operations, by the (operations, seconds) of the first and the last trial.

    Between the first and the last, the seconds of an operation fall, as fixed costs weigh less in larger matrices. From
    there on they may stay, or fall as before; the result is the geometric mean.
    """
    (first, before), (last, taken) = trials[0], trials[-1]
    seconds, span, ratio = taken * operations / last, last / first, operations / last
    if min(span, ratio) < LEAST_SPAN:
        return seconds
    fallen = min(1.0, taken / before / span)
    return seconds * fallen ** (0.5 * min(1.0, math.log(ratio) / math.log(span)))


def _extent(size: ProblemSize) -> tuple[int, int]:
    """The order of trials: all inputs are worth more than rows."""
    return size.inputs, size.rows


def _floats(size: ProblemSize) -> int:
    return size.inputs**2 + size.weights * max(1, size.samples)


def _smaller(solver: Solver, pattern: Pattern, size: ProblemSize, rows: int, d_in: int) -> ProblemSize:
    """A part of a matrix with at most so many rows and inputs, in whole groups of both."""
    width = size.column_block or pattern.width
    inputs = min(size.inputs, max(width, d_in // width * width))
    rows = min(size.rows, max(1, rows // size.groups) * size.groups)
    return dataclasses.replace(size, rows=rows, inputs=inputs, column_block=solver.column_block(inputs, pattern))


@torch.no_grad()
def _solve(solver: Solver, pattern: Pattern, size: ProblemSize) -> float:
    """Seconds to solve a random matrix and to measure its losses."""
    generator = torch.Generator(size.device).manual_seed(0)
    weight, statistics = random_problem(solver, size, generator)
    started = clock(size.device)
    try:
        objective = statistics.objective(weight, size.lam, size.column_block)
        result = on_grid(solver, objective, solver.solve(objective, pattern), pattern)
        weight_losses(objective, result.weight, result.keep, weight.dtype)
    except FactorizationError:
        pass  # after most of the time
    return clock(size.device) - started


def random_problem(solver: Solver, size: ProblemSize, generator: torch.Generator) -> tuple[Tensor, LayerStatistics]:
    """A random weight [d_out, d_in] and its statistics for a solver; the generator is on the device of `size`."""
    rows, d_in, device = size.rows, size.inputs, size.device

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    spectrum = torch.arange(1, d_in // 2 + 2, device=device) ** -DECAY
    covariance = torch.fft.irfft(spectrum, n=d_in)  # of a stationary process, whose Gram matrix is circulant
    gram = (covariance / covariance[0]).repeat(2).unfold(0, d_in, 1)[1:].flip(0).repeat(size.groups, 1, 1).squeeze(0)
    weight = normal(rows, d_in) / d_in**0.5
    if solver.objective.diagonal_only:
        squares = normal(rows, d_in).square_() if size.samples else None
        return weight, LayerStatistics(gram.diagonal(dim1=-2, dim2=-1).clone(), squares, size.samples, True)
    gradients: Fisher | None = None
    if size.samples:
        gradients = SampleGradients(normal(size.samples, rows, d_in))
        if size.compressed:
            values = gradients.column_blocks(size.size).gradients.transpose(0, 1)
            gradients = FisherMatrices(values.mT @ values, size.samples)
    return weight, LayerStatistics(gram, gradients, size.samples)
