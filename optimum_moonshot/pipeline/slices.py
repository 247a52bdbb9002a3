"""Layers that are solved slice by slice: their rows or experts exceed the memory, or several processes share them.

Experts are solved one by one in any case. The rows of a matrix compete with each other: its slices have in common
L_R(0) and L_F(0), the damping at which the factors of all rows exist, and the scores of the weights that compete. So
each slice is solved as a single process with enough memory would solve it.
"""

import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar, cast

import torch
from torch import Tensor

from ..calibration.observer import LayerStatistics
from ..distributed.ranks import Ranks
from ..errors import FactorizationError
from ..model.layers import PrunableLayer
from ..objective.fisher import Fisher
from ..objective.grid import Grid
from ..objective.linalg import escalate
from ..objective.patterns import Pattern, Unstructured
from ..objective.quadratic import Quadratic, RelativeLoss, Totals
from ..solvers.base import RowSolver, Solver, notes_of
from ..solvers.quantization import quantize
from ..solvers.ranked import Ranking, RankingSolver
from .backoff import Backoff
from .solve import ExpertStatistics, RowStatistics, SolvedLayer, Statistics, solve_matrix, total_losses, weight_losses

Value = TypeVar("Value")


@dataclass(eq=False)
class SlicedRows(RowStatistics):
    """The slices of the rows of a layer, a matrix or groups with their own inputs, that this process solves."""

    layer: PrunableLayer

    @abstractmethod
    def begin(self, lam: float, column_block: int | None) -> Quadratic:
        """Prepare a solution; returns an objective that has the scales of the whole matrix."""

    @abstractmethod
    def objectives(self, backward: bool = False) -> Iterator[tuple[slice, Quadratic]]:
        """The quadratic of every slice, with its rows, counted from the first row of this process."""

    def all_rows(self, pattern: Pattern) -> Pattern:
        """The pattern, whose scores compete with the scores of the rows that other processes solve."""
        return pattern

    def agreed(self, work: Callable[[], Value]) -> Value:
        """Work of this process on its slices.

        Raises:
            FactorizationError: in all processes, where a factorisation has failed in one.
        """
        return work()

    def combine(self, weight: Tensor, losses: list[list[RelativeLoss]]) -> tuple[Tensor, list[list[RelativeLoss]]]:
        """The weight [d_out, d_in] of all rows in the layer's dtype, and the losses of all slices."""
        return weight.to(self.layer.parameter.dtype), losses

    def solve(self, solver: Solver, patterns: list[Pattern], lam: float, column_block: int | None) -> list[SolvedLayer]:
        """Like `solve_matrix`, by a solver that ranks removals, or that attempts one damping after the other."""
        scales = self.begin(lam, column_block)
        competing = [self.all_rows(pattern) for pattern in patterns]
        if not solver.ranks_removals:  # it solves by rows: the others solve whole matrices
            return [self._attempt(cast(RowSolver, solver), scales, pattern) for pattern in competing]
        ranked = cast(RankingSolver, solver)

        def rank_removals(damping: float) -> Ranking:
            return self.agreed(
                lambda: Ranking.join(
                    [ranked.rank_removals(objective, patterns[0], damping) for _, objective in self.objectives()]
                )
            )

        ranking, damping = escalate(ranked.damping, rank_removals)
        keeps = [ranking.keep(pattern).view(-1, self.layer.shape[1]) for pattern in competing]
        results = self.agreed(partial(self._minimise, ranked, keeps, damping, competing[0].grid))
        return [self._solved(ranked, scales, weight, losses, damping) for weight, losses in results]

    def _attempt(self, solver: RowSolver, scales: Quadratic, pattern: Pattern) -> SolvedLayer:
        ((_, objective),) = self.objectives()
        attempt = lambda damping: self.agreed(partial(solver.attempt, objective, pattern, damping))  # noqa: E731
        (weight, keep), damping = escalate(solver.damping, attempt)
        weight = weight.masked_fill(~keep, 0)
        if pattern.grid is not None and not solver.quantizes:
            weight = self.agreed(partial(quantize, objective, weight, keep, pattern.grid)).float()
        losses = self.agreed(partial(weight_losses, objective, weight, keep, self.layer.parameter.dtype))
        return self._solved(solver, scales, weight, [losses], damping)

    def _minimise(
        self, solver: RankingSolver, keeps: list[Tensor], damping: float, grid: Grid | None
    ) -> list[tuple[Tensor, list[list[RelativeLoss]]]]:
        """The weight of each mask, and the losses of each slice."""
        results = [(torch.zeros(keep.shape, device=keep.device), list[list[RelativeLoss]]()) for keep in keeps]
        for rows, objective in self.objectives(backward=True):  # the last slice is in memory already
            survivors = solver.minimise(objective, [keep[rows] for keep in keeps], damping)
            for (weight, losses), keep, values in zip(results, keeps, survivors, strict=True):
                values.masked_fill_(~keep[rows], 0)
                weight[rows] = values if grid is None else quantize(objective, values, keep[rows], grid).float()
                losses.append(weight_losses(objective, weight[rows], keep[rows], self.layer.parameter.dtype))
        return results

    def _solved(
        self,
        solver: RankingSolver | RowSolver,
        scales: Quadratic,
        weight: Tensor,
        losses: list[list[RelativeLoss]],
        damping: float,
    ) -> SolvedLayer:
        whole, of_slices = self.combine(weight, losses)
        masked, pruned = (total_losses(slices) for slices in zip(*of_slices, strict=True))
        notes = notes_of(scales, damping, solver.damping)
        return SolvedLayer(whole, damping, notes, masked, pruned, scales.scales.lam, scales.losses_at_zero)


@dataclass(eq=False)
class CollectedRows(SlicedRows):
    """Rows whose statistics exceed the memory: one pass over the data for each slice, to rank and to minimise."""

    slices: Sequence[slice]
    # Passes the data for the gradients of some rows, with L_F(0) of all rows where a column block is given.
    collect: Callable[[slice, int | None], LayerStatistics]
    whole: dict[int, LayerStatistics] = field(default_factory=dict)  # inputs and totals, by inputs of a column block
    cached: tuple[int, Fisher] | None = None  # the gradients of a slice, freed before another one is collected
    scales: Quadratic | None = None

    def statistics(self, column_block: int | None) -> LayerStatistics:
        """The statistics of the whole layer without gradients; the totals come with the first slice."""
        size = column_block or self.layer.shape[1]
        if size not in self.whole:
            self.whole[size] = dataclasses.replace(self._collect(0, size), gradients=None)
        return self.whole[size]

    def _collect(self, index: int, totals: int | None) -> LayerStatistics:
        """The statistics of a slice, whose gradients replace the cached gradients of another slice."""
        self.cached = None
        statistics = self.collect(self.slices[index], totals)
        assert isinstance(statistics.gradients, Fisher)
        self.cached = (index, statistics.gradients)
        return statistics

    def solve(self, solver: Solver, patterns: list[Pattern], lam: float, column_block: int | None) -> list[SolvedLayer]:
        """Like `SlicedRows.solve`, but at λ = 1 there are no gradients, and all rows are solved at once."""
        if lam < 1:
            return super().solve(solver, patterns, lam, column_block)
        return solve_matrix(solver, self.layer, self.layer.matrix, patterns, self.statistics(column_block), lam)

    def begin(self, lam: float, column_block: int | None) -> Quadratic:
        whole, layer = self.statistics(column_block), self.layer
        self.scales = whole.layer_objective(layer.matrix, lam, column_block, layer.alive)
        return self.scales

    def objectives(self, backward: bool = False) -> Iterator[tuple[slice, Quadratic]]:
        assert self.scales is not None
        order = range(len(self.slices))
        for index in reversed(order) if backward else order:
            if self.cached is None or self.cached[0] != index:
                self._collect(index, None)
            assert self.cached is not None
            yield self.slices[index], self.scales.part(self.slices[index], self.cached[1])


class FailedElsewhere(FactorizationError):
    """A factorisation has failed in another process, for the same matrix."""


@dataclass(frozen=True)
class _OfAllRows(Unstructured):
    """The scores of a process's rows compete with the scores of all other rows."""

    shard: "ShardedRows" = field(kw_only=True, repr=False, compare=False)

    def keep(self, scores: Tensor, before: int = 0) -> Tensor:
        whole, rows = self.shard.all_scores(scores), self.shard.rows
        before = before // (rows.stop - rows.start) * len(whole)
        return super().keep(whole, before)[rows].view_as(scores)


@dataclass(eq=False)
class ShardedRows(SlicedRows):
    """The rows of a matrix that this process solves; all processes make the same calls."""

    statistics: LayerStatistics  # with the gradients of this process's rows alone
    rows: slice
    backoff: Backoff
    objective: Quadratic | None = None

    def __post_init__(self) -> None:
        self.ranks = self.backoff.ranks

    def begin(self, lam: float, column_block: int | None) -> Quadratic:
        """The losses at W = 0 of all rows are summed over the processes."""
        gradients, weight = self.statistics.gradients if lam < 1 else None, self.layer.matrix[self.rows]
        assert not isinstance(gradients, Tensor)
        alive = self.layer.alive
        build = partial(
            Quadratic.build,
            weight,
            self.statistics.inputs,
            gradients,
            lam,
            column_block=column_block,
            alive=None if alive is None else alive[self.rows],
        )

        def sums() -> tuple[float, float, float]:
            reconstruction, fisher = build().losses_at_zero
            squares = gradients.mean_square() if isinstance(gradients, Fisher) else 0.0
            return reconstruction, fisher or 0.0, squares * len(weight) / self.layer.shape[0]

        shards = self.ranks.all_gather_object(self._piece(sums))
        reconstruction, fisher, squares = (sum(values) for values in zip(*shards, strict=True))
        totals = Totals(reconstruction, None if gradients is None else fisher, squares, self.statistics.samples)
        self.objective = build(totals=totals)
        return self.objective

    def objectives(self, backward: bool = False) -> Iterator[tuple[slice, Quadratic]]:
        assert self.objective is not None
        yield slice(0, len(self.objective.weight)), self.objective

    def all_rows(self, pattern: Pattern) -> Pattern:
        """An n:m pattern compares inside of a row."""
        if not isinstance(pattern, Unstructured):
            return pattern
        return _OfAllRows(pattern.sparsity, pattern.exact, grid=pattern.grid, shard=self)

    def all_scores(self, scores: Tensor) -> Tensor:
        """The scores of all rows, [d_out, …], in all processes; `scores` are of this process's rows or column blocks.

        Raises:
            FailedElsewhere: another process has none.
        """
        self._raise_failures()
        return self._gather(scores.reshape(self.rows.stop - self.rows.start, -1))

    def _gather(self, shard: Tensor) -> Tensor:
        whole = shard.new_empty(self.layer.shape[0], shard.shape[1])
        self.ranks.gather_rows(shard, whole, self.ranks.shard_sizes(len(whole)))
        return whole

    def agreed(self, work: Callable[[], Value]) -> Value:
        try:
            value = self._piece(work)
        except FailedElsewhere:
            raise
        except FactorizationError as error:
            self.ranks.all_gather_object(str(error))
            raise
        self._raise_failures()
        return value

    def combine(self, weight: Tensor, losses: list[list[RelativeLoss]]) -> tuple[Tensor, list[list[RelativeLoss]]]:
        of_slices = [of_slice for shard in self.ranks.all_gather_object(losses) for of_slice in shard]
        return self._gather(weight.to(self.layer.parameter.dtype)), of_slices

    def _piece(self, work: Callable[[], Value]) -> Value:
        """Work between two collectives, repeated with smaller slices of rows where the memory does not suffice."""
        return self.backoff.with_smaller_slices(self.layer.name, work)

    def _raise_failures(self) -> None:
        """Raise the failure of another process, if any; all processes call this together."""
        for failure in self.ranks.all_gather_object(None):
            if failure is not None:
                raise FailedElsewhere(failure)


@dataclass(eq=False)
class CollectedExperts(ExpertStatistics):
    """Experts whose statistics exceed the memory together: one pass over the data for each slice of them."""

    layer: PrunableLayer
    slices: Sequence[slice]
    # Passes the data for a layer that is some of the experts; None where no token reaches them.
    collect: Callable[[PrunableLayer], LayerStatistics | None]
    samples: int  # N, calibration samples in all
    diagonal: bool

    def groups(self, count: int) -> Iterator[LayerStatistics]:
        """The statistics of each expert, like `LayerStatistics.groups`."""
        for part in self.slices:
            experts = dataclasses.replace(self.layer, span=(part.start, part.stop))
            statistics = self.collect(experts)
            yield from (statistics or self._empty(experts)).groups(experts.groups)

    def _empty(self, experts: PrunableLayer) -> LayerStatistics:
        """Of experts that no token reaches."""
        d_in = experts.shape[1]
        shape = (experts.groups, d_in) if self.diagonal else (experts.groups, d_in, d_in)
        inputs = torch.zeros(shape if experts.groups > 1 else shape[1:], device=experts.parameter.device)
        return LayerStatistics(inputs, None, self.samples, self.diagonal)


class ShardedExperts(ExpertStatistics):
    """The experts of a layer, `count` in all, that this process solves; `statistics` has its gradients alone."""

    def __init__(self, statistics: LayerStatistics, ranks: Ranks, count: int):
        self.ranks, self.count, self.shard = ranks, count, ranks.shard(count)
        experts = slice(self.shard.start, self.shard.stop)
        self.statistics = dataclasses.replace(
            statistics,
            inputs=statistics.inputs[experts],
            tokens=None if statistics.tokens is None else statistics.tokens[experts],
            unknown=frozenset(index - experts.start for index in statistics.unknown if index in self.shard),
        )

    def groups(self, count: int) -> Iterator[LayerStatistics | None]:
        """Like `LayerStatistics.groups`, but None for the experts of other processes."""
        yield from [None] * self.shard.start
        yield from self.statistics.groups(len(self.shard)) if self.shard else ()
        yield from [None] * (count - self.shard.stop)

    def gather(self, values: Sequence[Value], weight: Tensor | None = None) -> list[Value]:
        if weight is not None:
            solved = weight[self.shard.start : self.shard.stop]
            self.ranks.gather_rows(solved, weight, self.ranks.shard_sizes(self.count))
        return [value for shard in self.ranks.all_gather_object(list(values)) for value in shard]


def sharded(layer: PrunableLayer, statistics: LayerStatistics, rows: tuple[slice, ...], backoff: Backoff) -> Statistics:
    """The experts or rows of a layer that this process solves; `rows` are the rows of each process, by rank."""
    if layer.separate:
        return ShardedExperts(statistics, backoff.ranks, layer.groups)
    return ShardedRows(layer, statistics, rows[backoff.ranks.rank], backoff)
