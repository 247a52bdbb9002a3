"""Seconds of the solver, measured on one random matrix of every shape.

Where all rows would take more than a few seconds, the time lies on the line through two trials with fewer rows: a fixed
part, such as a factorization, and a part per row.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor

from ..allocate.byte_budget import allocated_bits
from ..allocate.loss_curves import matrix_curve, sampled_count, sampled_rows, trial_patterns
from ..calibration.accumulators import numbers_per_row
from ..calibration.observer import LayerStatistics
from ..devices import is_gpu, wait_for
from ..errors import FactorizationError
from ..objective.fisher import Fisher, FisherMatrices, SampleGradients
from ..objective.grid import Grid
from ..objective.patterns import Pattern
from ..objective.quadratic import ProblemSize
from ..pipeline.solve import weight_losses
from ..solvers import Solver
from ..solvers.quantization import on_grid
from .spec import RunSpec

# The first trial has FIRST_ROWS, each of the others GROWTH times as many. The last one takes more than MATRIX_SECONDS,
# and VISIBLE times as long as the one before: from less, noise would be extrapolated to thousands of rows.
FIRST_ROWS, GROWTH, MATRIX_SECONDS, VISIBLE = 4, 8, 1.0, 1.5
# Bytes of the gradients in a trial, at most.
TRIAL_BYTES = 2**29
# Eigenvalues of a random Gram matrix decay as i^-DECAY: solvers that iterate until they converge, such as ALPS, take
# about as many steps then as with the inputs of trained models. White inputs would take half as many.
DECAY = 1.25

Problem = tuple[ProblemSize, tuple[Pattern, ...]]


def clock(device: torch.device) -> float:
    """CPU seconds of this process if a single thread does all the work, so that other processes do not count; else
    seconds of wall time.
    """
    if not is_gpu(device) and torch.get_num_threads() == 1:
        return time.process_time()
    wait_for(device)
    return time.perf_counter()


def solving_seconds(run: RunSpec) -> dict[str, float]:
    """Seconds in the solver of every layer."""
    layers = run.selection.layers
    problems = {layer.name: (run.problem_size(layer), (run.pattern(layer),)) for layer in layers}
    return _by_layer(run, problems, partial(_solve, run.selection.solver))


def curve_seconds(run: RunSpec) -> dict[str, float]:
    """Seconds to measure the loss curve of every layer, for an allocation."""
    selection, problems = run.selection, dict[str, Problem]()
    grids = [Grid(bits, selection.config.quant_group) for bits in allocated_bits(selection.config)]
    for layer in selection.layers:
        patterns = trial_patterns(selection.patterns[layer.name])
        rows = len(range(*sampled_rows(layer).indices(layer.shape[0])))
        size = run.problem_size(layer, rows // layer.groups if layer.separate else rows)
        size = dataclasses.replace(size, samples=sampled_count(run.samples), compressed=False)
        problems[layer.name] = size, patterns
    return _by_layer(run, problems, partial(_curve, selection.solver, grids))


def _by_layer(
    run: RunSpec, problems: Mapping[str, Problem], solve: Callable[[tuple[Pattern, ...], ProblemSize], float]
) -> dict[str, float]:
    """Seconds of every layer; layers with the same problem share a trial."""
    seconds = {problem: matrix_seconds(partial(solve, problem[1]), problem[0]) for problem in {*problems.values()}}
    layers = run.selection.layers
    return {layer.name: seconds[problems[layer.name]] * (layer.groups if layer.separate else 1) for layer in layers}


def matrix_seconds(solve: Callable[[ProblemSize], float], size: ProblemSize) -> float:
    """Seconds to solve a matrix, extrapolated from trials of `solve` with some rows."""
    floats = numbers_per_row(size.inputs, size.samples, size.size if size.compressed else None)
    most = min(size.rows, max(1, TRIAL_BYTES // (4 * max(1, floats))))
    rows, before = min(most, FIRST_ROWS), (0, 0.0)
    while True:
        rows = max(1, rows // size.groups) * size.groups  # whole groups
        tried = dataclasses.replace(size, rows=rows)
        taken = solve(tried)
        if before == (0, 0.0):  # the first one has costs of the process
            taken = min(taken, solve(tried)) if taken < MATRIX_SECONDS else taken
        if rows > most - size.groups or taken > MATRIX_SECONDS and 0 < VISIBLE * before[1] < taken:
            break
        before, rows = (rows, taken), min(most, GROWTH * rows)
    growth = max(0.0, taken - before[1]) / (rows - before[0])
    return taken + min(growth, taken / rows) * (size.rows - rows)


@torch.no_grad()
def _solve(solver: Solver, patterns: tuple[Pattern, ...], size: ProblemSize) -> float:
    """Seconds to solve a random matrix by one pattern and to measure its losses."""
    weight, statistics = random_problem(size, solver.objective.diagonal_only)
    started = clock(size.device)
    with suppress(FactorizationError):  # raised after most of the time
        objective = statistics.objective(weight, size.lam, size.column_block)
        result = on_grid(solver, objective, solver.solve(objective, patterns[0]), patterns[0])
        weight_losses(objective, result.weight, result.keep, weight.dtype)
    return clock(size.device) - started


@torch.no_grad()
def _curve(solver: Solver, grids: list[Grid], patterns: tuple[Pattern, ...], size: ProblemSize) -> float:
    """Seconds to measure the loss curve of a random matrix."""
    weight, statistics = random_problem(size)
    started = clock(size.device)
    with suppress(FactorizationError):
        matrix_curve(solver, weight, statistics, patterns, grids)
    return clock(size.device) - started


def random_problem(size: ProblemSize, diagonal: bool = False) -> tuple[Tensor, LayerStatistics]:
    """A random weight [d_out, d_in] and its statistics."""
    rows, d_in, device = size.rows, size.inputs, size.device
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    spectrum = torch.arange(1, d_in // 2 + 2, device=device) ** -DECAY
    covariance = torch.fft.irfft(spectrum, n=d_in)  # of a stationary process, whose Gram matrix is circulant
    gram = (covariance / covariance[0]).repeat(2).unfold(0, d_in, 1)[1:].flip(0).repeat(size.groups, 1, 1).squeeze(0)
    weight = normal(rows, d_in) / d_in**0.5
    if diagonal:
        squares = normal(rows, d_in).square_() if size.samples else None
        return weight, LayerStatistics(gram.diagonal(dim1=-2, dim2=-1).clone(), squares, size.samples, True)
    gradients: Fisher | None = None
    if size.samples:
        gradients = SampleGradients(normal(size.samples, rows, d_in))
        if size.compressed:
            values = gradients.column_blocks(size.size).gradients.transpose(0, 1)
            gradients = FisherMatrices(values.mT @ values, size.samples)
    return weight, LayerStatistics(gram, gradients, size.samples)
