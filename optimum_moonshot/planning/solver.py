"""How long a solver takes, by trying it on one random matrix of every shape.

A matrix that would take more than a moment is tried smaller, with fewer rows and inputs, and counted up by the
operations that its solver states.
"""

import dataclasses
import time
from typing import Any

import torch
from torch import Tensor

from ..calibration.layer_statistics import LayerStatistics
from ..devices import is_gpu, wait_for
from ..errors import FactorizationError
from ..objective.fisher import Fisher, FisherMatrices, SampleGradients
from ..objective.patterns import Pattern
from ..objective.problem_size import ProblemSize
from ..pipeline.solve import weight_losses
from ..solvers import Solver
from .run_spec import RunSpec, pattern_of, problem_size

# Seconds that a try may take by what a smaller one took; or a share of what it says that the run will take.
MATRIX_SECONDS, TRY_SHARE = 0.7, 0.02
# What a plan allocates for a try, at most.
TRY_BYTES = 2**29
FIRST_SIZE = 128


def clock(device: torch.device) -> float:
    """Seconds: of this process where one thread does all the work, so that others do not count; else of the wall."""
    if not is_gpu(device) and torch.get_num_threads() == 1:
        return time.process_time()
    wait_for(device)
    return time.perf_counter()


def solving_seconds(outline: RunSpec) -> dict[str, float]:
    """Seconds in the solver of every layer; those alike are tried once.

    Args:
        outline: of the run.
    """
    layers, solver = outline.selection.layers, outline.selection.solver
    kinds = {layer.name: (problem_size(outline, layer), pattern_of(outline.selection, layer)) for layer in layers}
    parts = {layer.name: layer.groups if layer.separate else 1 for layer in layers}
    counts: dict[Any, int] = {}
    for name, kind in kinds.items():
        counts[kind] = counts.get(kind, 0) + parts[name]
    known = {kind: solver_seconds(solver, kind[1], kind[0], count) for kind, count in counts.items()}
    return {name: known[kind] * parts[name] for name, kind in kinds.items()}


def solver_seconds(solver: Solver, pattern: Pattern, size: ProblemSize, count: int = 1) -> float:
    """How long a matrix takes, by random ones: of its size, if that takes no more than `MATRIX_SECONDS`.

    Args:
        solver: by which algorithm.
        pattern: that it is pruned by.
        size: of the matrix.
        count: of such matrices in the run, of whose time a try may take `TRY_SHARE`.
    """
    tried, taken = _smaller(solver, pattern, size, FIRST_SIZE, FIRST_SIZE), 0.0
    while True:
        taken = _solve(solver, pattern, tried)
        if taken < MATRIX_SECONDS:  # the first time has what a process needs once
            taken = min(taken, _solve(solver, pattern, tried))
        larger = [size, *(_smaller(solver, pattern, size, rows, d_in) for rows, d_in in _SIZES)]
        operations = solver.work(tried, pattern).operations
        limit = max(MATRIX_SECONDS, TRY_SHARE * count * taken * solver.work(size, pattern).operations / operations)
        more = {other: solver.work(other, pattern).operations / operations for other in larger}
        more = {other: ratio for other, ratio in more.items() if ratio > 1 and other != tried and _fits(other)}
        affordable = [other for other, ratio in more.items() if taken * ratio < limit]
        if not affordable and more and taken < limit / 5:  # what is small says too much
            affordable = [min(more, key=lambda other: more[other])]
        if not affordable:
            return taken * solver.work(size, pattern).operations / operations
        tried = max(affordable, key=lambda other: more[other])


_SIZES = (
    (2048, 2048),
    (512, 2048),
    (1024, 1024),
    (256, 1024),
    (64, 1024),
    (512, 512),
    (64, 512),
    (256, 256),
    (64, 256),
)


def _fits(size: ProblemSize) -> bool:
    return 4 * (size.inputs**2 + size.weights * max(1, size.samples)) < TRY_BYTES


def _smaller(solver: Solver, pattern: Pattern, size: ProblemSize, rows: int, d_in: int) -> ProblemSize:
    """A part of a matrix, with at most so many rows and inputs; whole groups of both."""
    width = size.column_block or pattern.width
    inputs = min(size.inputs, max(width, d_in // width * width))
    rows = min(size.rows, max(1, rows // size.groups) * size.groups)
    return dataclasses.replace(size, rows=rows, inputs=inputs, column_block=solver.column_block(inputs, pattern))


@torch.no_grad()
def _solve(solver: Solver, pattern: Pattern, size: ProblemSize) -> float:
    """Seconds of a random matrix, with the losses of its result."""
    generator = torch.Generator(size.device).manual_seed(0)
    weight, statistics = random_problem(solver, size, generator)
    started = clock(size.device)
    try:
        objective = statistics.objective(weight, size.lam, size.column_block)
        result = solver.solve(objective, pattern)
        weight_losses(objective, result.weight, result.keep, weight.dtype)
    except FactorizationError:
        pass  # it has taken its time
    return clock(size.device) - started


def random_problem(solver: Solver, size: ProblemSize, generator: torch.Generator) -> tuple[Tensor, LayerStatistics]:
    """A random weight [d_out, d_in] and statistics of it.

    Args:
        solver: which decides what statistics are.
        size: of the matrix.
        generator: on the device of `size`.
    """
    rows, d_in, device = size.rows, size.inputs, size.device

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    inputs = normal(size.groups, min(2 * d_in, 512), d_in)
    gram = (inputs.mT @ inputs + torch.eye(d_in, device=device)).squeeze(0)
    weight = normal(rows, d_in) / d_in**0.5
    if solver.objective.diagonal_only:
        squares = normal(rows, d_in).square_() if size.samples else None
        return weight, LayerStatistics(gram.diagonal(dim1=-2, dim2=-1).clone(), squares, size.samples, True)
    gradients: Fisher | None = None
    if size.samples:
        gradients = SampleGradients(normal(size.samples, rows, d_in))
        if size.compressed:
            found = gradients.column_blocks(size.size)
            values = found.gradients.transpose(0, 1)
            gradients = FisherMatrices(values.mT @ values, size.samples)
    return weight, LayerStatistics(gram, gradients, size.samples)
