"""A matrix that several processes solve together, each some of the rows, with the statistics of all samples.

What the rows of a matrix have in common is exchanged, so that each process finds for its rows what one process would
find: L_R(0) and L_F(0), the damping at which the factors of all rows exist, and the scores of the weights that compete.
An n:m pattern compares inside of a row, and needs no scores of others.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from torch import Tensor

from ..calibration.layer_statistics import LayerStatistics
from ..distributed.ranks import Ranks
from ..errors import FactorizationError
from ..model.layers import PrunableLayer
from ..objective.fisher import Fisher
from ..objective.linalg import escalate
from ..objective.patterns import NM, Pattern, Unstructured
from ..objective.quadratic import Quadratic, Totals
from ..solvers.base import Solver, notes_of
from ..solvers.ranked import Ranking
from .backoff import Backoff
from .solve import Solved, total_losses, weight_losses

# Weights of a matrix, fewer of which are solved in about the time that the exchanges take.
LEAST = 2**16
Value = TypeVar("Value")


def is_divisible(layer: PrunableLayer, solver: Solver, patterns: list[Pattern], ranks: Ranks) -> bool:
    """Whether the processes may divide a matrix by its rows.

    Args:
        layer: of one matrix, or of several.
        solver: which prunes it.
        patterns: all that it is pruned by.
        ranks: the processes.
    """
    d_out, d_in = layer.shape
    able = (solver.ranks or solver.by_rows) and all(isinstance(pattern, Unstructured | NM) for pattern in patterns)
    return able and layer.groups == 1 and d_out * d_in >= LEAST and d_out >= ranks.size > 1


def row_parts(layer: PrunableLayer, ranks: Ranks) -> list[slice]:
    """The rows of each process, by rank."""
    parts = [ranks.shard(layer.shape[0], rank) for rank in range(ranks.size)]
    return [slice(part.start, part.stop) for part in parts]


class FailedElsewhere(FactorizationError):
    """A factorisation has failed in another process, for the same matrix."""


@dataclass(frozen=True)
class _OfAllRows(Unstructured):
    """The scores of a process's rows compete with those of all others."""

    share: "RowShare" = field(kw_only=True, repr=False, compare=False)

    def keep(self, scores: Tensor, before: int = 0) -> Tensor:
        whole, rows = self.share.joined(scores), self.share.rows
        before = before // (rows.stop - rows.start) * len(whole)
        return super().keep(whole, before)[rows].view_as(scores)


class RowShare:
    """The statistics of this process's rows of a matrix.

    All processes make the same calls.

    Args:
        layer: of one matrix.
        statistics: of the layer; the gradients of this process's rows alone.
        ranks: the processes.
        backoff: of the run, for pieces of the work between two exchanges.
    """

    def __init__(self, layer: PrunableLayer, statistics: LayerStatistics, ranks: Ranks, backoff: Backoff):
        self.layer, self.statistics, self.ranks, self.backoff = layer, statistics, ranks, backoff
        self.rows = row_parts(layer, ranks)[ranks.rank]

    def solve(self, solver: Solver, patterns: list[Pattern], lam: float, column_block: int | None) -> list[Solved]:
        """As `PartedStatistics.solve` says; the results are those of all rows, the same in all processes."""
        objective = self._objective(lam, column_block)
        own = [self._of_all_rows(pattern) for pattern in patterns]
        find = self._ranked if solver.ranks else self._attempted
        return [self._of_all(objective, *each, solver.damping) for each in find(solver, objective, own)]

    def joined(self, scores: Tensor) -> Tensor:
        """The scores of all rows, [d_out, …], in all processes.

        Args:
            scores: of this process's rows, or of their column blocks.

        Raises:
            FailedElsewhere: another process has none.
        """
        self._check()
        own = scores.reshape(self.rows.stop - self.rows.start, -1)
        whole = own.new_empty(self.layer.shape[0], own.shape[1])
        self.ranks.gather_rows(own, whole, len(whole))
        return whole

    def _of_all_rows(self, pattern: Pattern) -> Pattern:
        if not isinstance(pattern, Unstructured):
            return pattern
        return _OfAllRows(pattern.sparsity, pattern.exact, share=self)

    def _objective(self, lam: float, column_block: int | None) -> Quadratic:
        """The quadratic of these rows, in proportion to what all rows lose at W = 0."""
        gradients, weight = self.statistics.gradients if lam < 1 else None, self.layer.matrix[self.rows]
        assert not isinstance(gradients, Tensor)
        build = partial(Quadratic.build, weight, self.statistics.inputs, gradients, lam, column_block=column_block)

        def sums() -> tuple[float, float, float]:
            reconstruction, fisher = build().losses_at_zero
            squares = gradients.mean_square() if isinstance(gradients, Fisher) else 0.0
            return reconstruction, fisher or 0.0, squares * len(weight) / self.layer.shape[0]

        found = self.ranks.all_gather_object(self._piece(sums))
        reconstruction, fisher, squares = (sum(values) for values in zip(*found, strict=True))
        known = None if gradients is None else fisher
        return build(totals=Totals(reconstruction, known, squares, self.statistics.samples))

    def _ranked(
        self, solver: Solver, objective: Quadratic, patterns: list[Pattern]
    ) -> list[tuple[Tensor, Tensor, float]]:
        """Weight, `keep` and damping by each pattern; one elimination serves all."""

        def rank(damping: float) -> Ranking:
            return self._agreed(partial(solver.rank, objective, patterns[0], damping))

        ranking, damping = escalate(solver.damping, rank)
        keeps = [ranking.keep(pattern).view_as(objective.weight) for pattern in patterns]
        weights = self._piece(partial(solver.minimise, objective, keeps, damping))
        return [(weight, keep, damping) for weight, keep in zip(weights, keeps, strict=True)]

    def _attempted(
        self, solver: Solver, objective: Quadratic, patterns: list[Pattern]
    ) -> list[tuple[Tensor, Tensor, float]]:
        """As `_ranked`, by one pattern after the other."""
        found = []
        for pattern in patterns:

            def attempt(damping: float, pattern: Pattern = pattern) -> tuple[Tensor, Tensor]:
                return self._agreed(partial(solver.attempt, objective, pattern, damping))

            pair, damping = escalate(solver.damping, attempt)
            found.append((*pair, damping))
        return found

    def _of_all(self, objective: Quadratic, weight: Tensor, keep: Tensor, damping: float, asked: float) -> Solved:
        """The result of the matrix, from those of the processes."""
        dtype = self.layer.parameter.dtype
        weight = weight.masked_fill(~keep, 0)
        found = self.ranks.all_gather_object(self._piece(partial(weight_losses, objective, weight, keep, dtype)))
        masked, pruned = (total_losses(losses) for losses in zip(*found, strict=True))
        own = weight.to(dtype)
        whole = own.new_empty(self.layer.shape)
        self.ranks.gather_rows(own, whole, len(whole))
        notes = notes_of(objective, damping, asked)
        return Solved(whole, damping, notes, masked, pruned, objective.scales.lam, objective.losses_at_zero)

    def _piece(self, work: Callable[[], Value]) -> Value:
        """Work of this process alone, again with smaller slices where there is too little memory."""
        return self.backoff.piece(self.layer.name, work)

    def _agreed(self, work: Callable[[], Value]) -> Value:
        """What all processes find, each for its rows.

        Raises:
            FactorizationError: in all, where a factorisation has failed in one.
        """
        try:
            found = self._piece(work)
        except FailedElsewhere:
            raise
        except FactorizationError as error:
            self._tell(str(error))
            raise
        self._check()
        return found

    def _check(self) -> None:
        """Raise `FailedElsewhere` where a process has failed meanwhile."""
        told = self._tell(None)
        if told:
            raise FailedElsewhere(told[0])

    def _tell(self, failure: str | None) -> list[str]:
        """The failures of all processes."""
        return [each for each in self.ranks.all_gather_object(failure) if each is not None]
