"""Seam 2: a layer, its statistics and its patterns in; pruned weights and their losses out."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..calibration.observer import LayerStatistics
from ..model.isolation import plain_functions
from ..model.layers import PrunableLayer
from ..objective.linalg import in_unit
from ..objective.patterns import Pattern, PerExpert, Unstructured
from ..objective.quadratic import Objective, RelativeLoss
from ..solvers import Solver
from ..solvers.quantization import from_unit, on_grid

Value = TypeVar("Value")


class SolvedLayer(NamedTuple):
    """A layer's result, the losses of its mask alone and of the weight in the layer's dtype, and the λ used."""

    weight: Tensor  # [d_out, d_in] in the layer's dtype
    damping: float
    notes: tuple[str, ...]
    masked: RelativeLoss
    pruned: RelativeLoss
    lam: float
    at_zero: tuple[float, float | None]  # L_R(0), L_F(0)


class RowStatistics(ABC):
    """Statistics of a matrix by slices of its rows; see slices.py."""

    @abstractmethod
    def solve(self, solver: Solver, patterns: list[Pattern], lam: float, column_block: int | None) -> list[SolvedLayer]:
        """Like `solve_matrix`; `column_block` is the number of inputs of a block of the quadratic, None for all."""


class ExpertStatistics(ABC):
    """Statistics of experts, by slices; see slices.py."""

    @abstractmethod
    def groups(self, count: int) -> Iterator[LayerStatistics | None]:
        """The statistics of each of the E experts; None for an expert of another process."""

    def gather(self, values: Sequence[Value], weight: Tensor | None = None) -> list[Value]:
        """The values of all experts from those of this process; `weight` [E, …] gets the experts of other processes."""
        return list(values)


Statistics = LayerStatistics | RowStatistics | ExpertStatistics


def solve_layer(
    solver: Solver, layer: PrunableLayer, patterns: Sequence[Pattern], statistics: Statistics, lam: float
) -> list[SolvedLayer]:
    """Prune a dense layer by several patterns, each with a result; one elimination serves as many patterns as possible.

    Raises:
        FactorizationError: the layer's quadratic stays singular at the largest damping.
    """
    if layer.separate:
        return _solve_experts(solver, layer, patterns, statistics, lam)
    return _solve_families(solver, layer, layer.matrix, patterns, statistics, lam)


def _solve_experts(
    solver: Solver, layer: PrunableLayer, patterns: Sequence[Pattern], statistics: Statistics, lam: float
) -> list[SolvedLayer]:
    """Like `solve_layer`, but every group of rows is a separate matrix: an expert.

    The weights of all experts are in the layer's dtype; the solver works on one expert at a time.
    """
    assert not isinstance(statistics, RowStatistics)
    (d_out, d_in), like = layer.shape, layer.parameter
    shape = layer.groups, d_out // layer.groups, d_in
    weights = [torch.empty(shape, dtype=like.dtype, device=like.device) for _ in patterns]
    parts: list[list[SolvedLayer]] = [[] for _ in patterns]
    for index, of_expert in enumerate(statistics.groups(layer.groups)):
        if of_expert is None:
            continue  # another process solves it
        expert = layer.expert(index)
        matrix = expert.matrix.contiguous()
        budgets = [_of_expert(pattern, index, matrix.numel()) for pattern in patterns]
        solved = _solve_families(solver, expert, matrix, budgets, of_expert, lam)
        for weight, results, result in zip(weights, parts, solved, strict=True):
            weight[index] = result.weight
            results.append(result._replace(weight=weight[index]))
    if isinstance(statistics, ExpertStatistics):
        nothing = like.detach().new_empty(0)
        small = [[result._replace(weight=nothing) for result in results] for results in parts]
        parts = [statistics.gather(results, weight) for results, weight in zip(small, weights, strict=True)]
    return [join_experts(weight.flatten(0, 1), results) for weight, results in zip(weights, parts, strict=True)]


def _of_expert(pattern: Pattern, index: int, size: int) -> Pattern:
    """The pattern of one of a layer's equal matrices, whose counts add up to the layer's exact one."""
    if isinstance(pattern, PerExpert):
        return pattern.of(index)
    if not isinstance(pattern, Unstructured) or not pattern.exact:
        return pattern
    count = pattern.up_to((index + 1) * size) - pattern.up_to(index * size)
    return Unstructured(count / size, exact=True, grid=pattern.grid)


def join_experts(weight: Tensor, parts: Sequence[SolvedLayer]) -> SolvedLayer:
    """The result of a layer from the results of its experts, whose losses add up; `weight` is [d_out, d_in]."""
    lam = Counter(part.lam for part in parts).most_common(1)[0][0]
    noted: dict[str, list[int]] = {}
    for index, part in enumerate(parts):
        for note in part.notes:
            noted.setdefault(note, []).append(index)
    notes = tuple(f"{note} ({_named(experts)})" for note, experts in noted.items())
    zeros = [part.at_zero for part in parts]
    masked, pruned = (_sum([getattr(part, name) for part in parts], zeros, lam) for name in ("masked", "pruned"))
    total = sum(zero[0] for zero in zeros), _total([zero[1] for zero in zeros])
    return SolvedLayer(weight, max(part.damping for part in parts), notes, masked, pruned, lam, total)


def _named(experts: list[int]) -> str:
    """Such as "experts 3, 17"."""
    shown = ", ".join(map(str, experts[:8])) + (f" and {len(experts) - 8} more" if len(experts) > 8 else "")
    return f"expert{'s' if len(experts) > 1 else ''} {shown}"


def _total(values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return sum(numbers) if numbers else None


def _sum(losses: Sequence[RelativeLoss], zeros: Sequence[tuple[float, float | None]], lam: float) -> RelativeLoss:
    """The loss of all matrices together, relative to that of all at W = 0."""

    def relative(values: Sequence[float | None], at_zero: Sequence[float | None]) -> float | None:
        # Where nothing is lost at W = 0, the value is no fraction of it.
        total = _total([None if v is None else v * (z or 1.0) for v, z in zip(values, at_zero, strict=True)])
        return None if total is None else total / (_total(at_zero) or 1.0)

    reconstruction = relative([loss.reconstruction for loss in losses], [zero[0] for zero in zeros])
    fisher = relative([loss.fisher for loss in losses], [zero[1] for zero in zeros])
    assert reconstruction is not None
    if fisher is None:
        return RelativeLoss(reconstruction, None, reconstruction)
    return RelativeLoss(reconstruction, fisher, lam * reconstruction + (1 - lam) * fisher)


def _solve_families(
    solver: Solver,
    layer: PrunableLayer,
    weight: Tensor,
    patterns: Sequence[Pattern],
    statistics: Statistics,
    lam: float,
) -> list[SolvedLayer]:
    """The matrix [d_out, d_in] of a layer by families of patterns that one elimination serves."""
    families: dict[Any, list[int]] = {}
    for index, pattern in enumerate(patterns):
        families.setdefault(solver.family(pattern), []).append(index)
    results: dict[int, SolvedLayer] = {}
    for family in families.values():
        served = [patterns[index] for index in family]
        if isinstance(statistics, LayerStatistics):
            solved = solve_matrix(solver, layer, weight, served, statistics, lam)
        else:
            assert isinstance(statistics, RowStatistics)
            solved = statistics.solve(solver, served, lam, solver.column_block(weight.shape[1], served[0]))
        results |= zip(family, solved, strict=True)
    return [results[index] for index in range(len(patterns))]


@plain_functions()
def solve_matrix(
    solver: Solver,
    layer: PrunableLayer,
    weight: Tensor,
    patterns: list[Pattern],
    statistics: LayerStatistics,
    lam: float,
) -> list[SolvedLayer]:
    """Prune the matrix [d_out, d_in] of a layer by the statistics of all rows.

    The patterns are of one family of the solver.

    Raises:
        FactorizationError: the quadratic stays singular at the largest damping.
    """
    block, dtype = solver.column_block(weight.shape[1], patterns[0]), layer.parameter.dtype
    scaled, unit = in_unit(weight)
    objective = statistics.objective(scaled, lam, block, layer.alive)
    del scaled  # a copy, unless its unit is 1
    results = solver.solve_path(objective, patterns)
    solved, lam, at_zero = list[SolvedLayer](), objective.scales.lam, objective.losses_at_zero
    for result, pattern in zip(results, patterns, strict=True):
        result = on_grid(solver, objective, result, pattern)
        whole = from_unit(result.weight, unit, pattern.grid).to(dtype)
        masked, pruned = weight_losses(objective, result.weight, result.keep, dtype)
        solved.append(SolvedLayer(whole, result.damping, result.notes, masked, pruned, lam, at_zero))
    return solved


def weight_losses(objective: Objective, weight: Tensor, keep: Tensor, dtype: torch.dtype) -> list[RelativeLoss]:
    """Relative losses of the mask `keep` [rows, d_in] alone, and of a solver's weight as the layer will hold it."""
    return objective.losses(torch.where(keep, objective.weight, 0), weight.to(dtype))


def total_losses(parts: Iterable[RelativeLoss]) -> RelativeLoss:
    """The losses of a layer from the losses of its parts, relative to the loss of the whole layer at W = 0."""
    reconstruction, fisher, total = zip(*parts, strict=True)
    return RelativeLoss(sum(reconstruction), None if None in fisher else sum(fisher), sum(total))
