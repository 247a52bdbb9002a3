"""Solvers that remove greedily to the end, rank the removals, and choose by the ranking: OBC and CAP.

Three steps that may work on some rows at a time, and of which the first serves every sparsity: `rank` gives each row
the order of its removals and their losses, `Ranking.keep` compares them across the layer, and `minimise` computes the
weights that survive,

    w_S = ŵ_S + F_SS⁻¹ F_SP ŵ_P        S what survives, P what went

which is what all the updates on the way would have added up to. A row's damping is ``μ_k = p · mean(diag F_k)``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..devices import free_bytes
from ..objective.linalg import check_factored, escalate
from ..objective.parallel import parallel_map
from ..objective.patterns import NM, Pattern, Unstructured
from ..objective.problem_size import ProblemSize, Work
from ..objective.quadratic import Quadratic
from ..objective.row_slices import row_slices, slice_bytes, slices_within
from .base import PrunedWeight, Solver, finish
from .greedy import STEPS, Elimination, removals, take_square
from .hyperparameters import damping_option

# Rows that are eliminated together: on a CPU so many that their waiting vectors stay in its cache, on a GPU as many as
# a share of its free memory holds.
CPU_INPUTS = 36 * 1024
GPU_SHARE = 0.25
# Largest [F⁻¹]_jj·F_jj of a row that is eliminated in float32. By that factor [F⁻¹]_jj shrinks until j goes, and with
# it grow the rounding errors of its start.
SINGLE_INFLATION = 1e3


@dataclass(frozen=True)
class Ranking:
    """The removals of some rows (blocks of rows): which input of each went when, and at what loss."""

    order: Tensor  # [rows, steps], inputs of the row
    losses: Tensor  # [rows, steps] float64: what the layer ranks by
    size: int  # inputs of a row

    @classmethod
    def join(cls, parts: list["Ranking"]) -> "Ranking":
        """One ranking of the rows of several."""
        return cls(torch.cat([part.order for part in parts]), torch.cat([part.losses for part in parts]), parts[0].size)

    def keep(self, pattern: Pattern) -> Tensor:
        """Bool [rows, size]: without the removals of least loss, of each row a first part of its order."""
        rows, steps = self.order.shape
        counts = torch.full((rows, 1), steps, device=self.order.device)
        if not isinstance(pattern, NM):
            counts = (~pattern.keep(self.losses)).sum(1, keepdim=True)
        late = torch.arange(steps, device=self.order.device) >= counts
        kept = torch.ones(rows, self.size, dtype=torch.bool, device=self.order.device)
        return kept.scatter_(1, self.order.long(), late)


@dataclass(frozen=True)
class Ranked(Solver):
    """A solver that ranks removals; whoever derives from it says by which losses.

    Another that declares ``ranks = True`` has the same methods, and `rank` and `minimise` work on an objective that
    holds some rows of a layer as on one that holds all.
    """

    damping: float = damping_option()

    patterns: ClassVar[tuple[type, ...]] = (Unstructured, NM)
    grouped: ClassVar[bool] = True
    ranks: ClassVar[bool] = True
    cumulative: ClassVar[bool]  # rank by all of a row's losses so far, not by the removal's own

    def solve(self, objective: Quadratic, pattern: Pattern) -> PrunedWeight:
        """The pruned weight at the smallest damping, of `damping` times a power of ten, at which all factors exist.

        Args:
            objective: of the whole layer.
            pattern: unstructured or n:m.

        Raises:
            FactorizationError: none up to 1 sufficed.
        """
        return self.solve_path(objective, [pattern])[0]

    def solve_path(self, objective: Quadratic, patterns: list[Pattern]) -> list[PrunedWeight]:
        """As `solve`, for several patterns, by one elimination.

        Args:
            objective: of the layer.
            patterns: unstructured ones, or a single n:m pattern.

        Returns:
            What `solve` returns for each.

        Raises:
            FactorizationError: no damping up to 1 sufficed.
        """
        ranking, damping = escalate(self.damping, lambda damping: self.rank(objective, patterns[0], damping))
        keeps = [ranking.keep(pattern).view_as(objective.weight) for pattern in patterns]
        weights = self.minimise(objective, keeps, damping)
        return [finish(objective, *pair, damping, self.damping) for pair in zip(weights, keeps, strict=True)]

    def trials(self, objective: Quadratic, patterns: Sequence[Pattern]) -> list[Tensor]:
        """As `Solver.trials`: one elimination serves the unstructured ones, and every n:m has its own.

        Args:
            objective: of the layer.
            patterns: of one class.

        Raises:
            FactorizationError: as `solve`.
        """
        families = [list(patterns)] if isinstance(patterns[0], Unstructured) else [[pattern] for pattern in patterns]
        return [result.weight for family in families for result in self.solve_path(objective, family)]

    def work(self, size: ProblemSize, pattern: Pattern) -> Work:
        """As `Solver.work`: the inverses of the rows that are eliminated together, and order and losses of all.

        Args:
            size, pattern: as said there.
        """
        d, count = size.size, size.weights // size.size
        cpu = size.device.type == "cpu"
        limit = slice_bytes(size.device)
        together = min(count, max(1, CPU_INPUTS // d if cpu else limit // (4 * d * d)))
        factored = min(together if size.rank else size.groups, max(1, limit // (24 * d * d)))
        inverses = 4 * together * d * d
        # Half of the inverses is copied as they shrink, with what waits; before that, they come from factors.
        eliminating = inverses * 25 // 16 + 7 * STEPS * together * d
        threads = max(1, min(size.threads if cpu else 1, count // together))
        peak = threads * max(eliminating, (inverses if size.rank else 0) + 32 * factored * d * d)
        return Work(max(peak + 16 * size.weights, 60 * size.weights), count * d * d * (d + size.rank))

    def rank(self, objective: Quadratic, pattern: Pattern, damping: float) -> Ranking:
        """Remove every weight (n:m: every one that may go) of the objective's rows, one by one.

        Args:
            objective: of a layer, or of some of its rows.
            pattern: unstructured or n:m; a sparsity plays no part.
            damping: p, in (0, 1].

        Raises:
            FactorizationError: a row's matrix is not positive definite at this damping.
        """
        weight = objective.row_weights
        rows, size = weight.shape
        order = torch.empty(rows, removals(size, pattern), dtype=torch.int32, device=weight.device)
        losses = torch.empty(order.shape, dtype=torch.float64, device=weight.device)
        inverses = Inverses(objective, damping)

        def eliminate(part: slice) -> None:
            order[part], losses[part] = _eliminate(inverses, weight, part, pattern)

        parallel_map(eliminate, _rows_together(rows, size, weight.device), weight.device)
        check_factored(torch.isfinite(losses))
        return Ranking(order, losses.cumsum_(1) if self.cumulative else losses, size)

    def minimise(self, objective: Quadratic, keeps: list[Tensor], damping: float) -> list[Tensor]:
        """The minimisers of the damped quadratic on several masks.

        Args:
            objective: of a layer, or of some of its rows.
            keeps: bool, [d_out, d_in] each, of the objective's rows.
            damping: at which the removals were ranked.

        Returns:
            For each mask, [d_out, d_in] in float32, 0 off the mask.
        """
        weight, device = objective.row_weights, objective.weight.device
        size = weight.shape[1]
        masks = [keep.reshape(weight.shape) for keep in keeps]
        found = [torch.zeros_like(weight) for _ in keeps]

        def minimise(part: slice) -> None:
            hessians = damped_rows(objective, part, damping)
            for mask, out in zip(masks, found, strict=True):
                _minimise(hessians, weight[part].double(), mask[part], out[part])

        parallel_map(minimise, row_slices(slice(0, len(weight)), 24 * size * size, device), device)
        return [out.view_as(objective.weight) for out in found]


def damped_rows(objective: Quadratic, rows: slice, damping: float) -> Tensor:
    """F_k + μ_k I of some rows, ``μ_k = p · mean(diag F_k)``, or p times the layer's mean where that is 0.

    Args:
        objective: of a layer, or of some of its rows.
        rows: of `row_weights`.
        damping: p.

    Returns:
        [r, size, size] in float64.
    """
    hessians = objective.row_hessians(rows)
    diagonal = hessians.diagonal(dim1=1, dim2=2)
    means = diagonal.mean(1, keepdim=True)
    if not means.all():
        means = torch.where(means == 0, objective.mean_diagonal() or 1.0, means)
    diagonal += damping * means
    return hessians


class Inverses:
    """(F_k + μ_k I)⁻¹ of rows on demand; at λ = 1 those with the same G share theirs.

    Args:
        objective: of a layer, or of some of its rows.
        damping: as for `damped_rows`.
    """

    def __init__(self, objective: Quadratic, damping: float):
        self.objective, self.damping = objective, damping
        self.shared = None if objective.scales.b else self._of_grams()

    def _of_grams(self) -> list[Tensor]:
        """The inverses of all the matrices in `gram`, each from the first row that has it."""
        which = self.objective.grams_of(slice(None))
        blocks = self.objective.weight.shape[1] // self.objective.size
        step = len(which) // (int(which[-1]) + 1) * blocks
        parts = [self._compute(slice(first, first + blocks)) for first in range(0, len(which), step)]
        return [torch.cat(tensors) for tensors in zip(*parts, strict=True)]

    def of(self, rows: slice) -> tuple[Tensor, Tensor]:
        """The inverses, [r, size, size] in float32, and a bool tensor [r], True where that is precise enough."""
        if self.shared is None:
            return self._compute(rows)
        which = self.objective.grams_of(rows)
        return self.shared[0][which], self.shared[1][which]

    def exactly(self, row: int) -> Tensor:
        """The inverse of one row, [1, size, size] in float64."""
        return torch.cholesky_inverse(self._factor(slice(row, row + 1))[0])

    def _compute(self, rows: slice) -> tuple[Tensor, Tensor]:
        size, device = self.objective.size, self.objective.weight.device
        inverse = torch.empty(rows.stop - rows.start, size, size, device=device)
        fits = torch.empty(len(inverse), dtype=torch.bool, device=device)
        for part in row_slices(rows, 24 * size * size, device):
            here = slice(part.start - rows.start, part.stop - rows.start)
            lower, diagonal = self._factor(part)
            # The factor is exact to float64: its inverse in float32 loses by its own condition, F's root, alone.
            inverse[here] = torch.cholesky_inverse(lower.float())
            fits[here] = (inverse[here].diagonal(dim1=1, dim2=2) * diagonal).amax(1) < SINGLE_INFLATION
        return inverse, fits

    def _factor(self, rows: slice) -> tuple[Tensor, Tensor]:
        """The lower Cholesky factors of F_k + μ_k I and its diagonals, in float64."""
        hessians = damped_rows(self.objective, rows, self.damping)
        lower, info = torch.linalg.cholesky_ex(hessians)
        check_factored(info == 0)
        return lower, hessians.diagonal(dim1=1, dim2=2)


def _eliminate(inverses: Inverses, weight: Tensor, part: slice, pattern: Pattern) -> tuple[Tensor, Tensor]:
    """Order and losses of some rows [r, steps]; the ill-conditioned ones again, in float64."""
    inverse, fits = inverses.of(part)
    order, losses = Elimination(inverse, weight[part], pattern).run()
    del inverse
    for row in (~fits).nonzero()[:, 0].tolist():
        here = part.start + row
        again = Elimination(inverses.exactly(here), weight[here : here + 1].double(), pattern).run()
        order[row], losses[row] = again[0][0], again[1][0]
    return order, losses


def _minimise(hessians: Tensor, weight: Tensor, keep: Tensor, out: Tensor) -> None:
    """Into `out` [r, size], the minimisers on `keep` [r, size]; `hessians` [r, size, size] and `weight` in float64."""
    count = int(keep.sum(1).max())
    chosen = torch.sort(~keep, dim=1, stable=True).indices[:, :count]
    surplus = ~keep.gather(1, chosen)  # of rows that keep fewer than the others: an identity takes their place
    pull = (hessians @ weight.masked_fill(keep, 0)[:, :, None])[:, :, 0].gather(1, chosen).masked_fill_(surplus, 0)
    matrices = take_square(hessians, chosen)
    matrices.masked_fill_(surplus[:, :, None] | surplus[:, None, :], 0)
    matrices.diagonal(dim1=1, dim2=2).add_(surplus)
    change = torch.cholesky_solve(pull[:, :, None], torch.linalg.cholesky(matrices))[:, :, 0]
    out.scatter_(1, chosen, (weight.gather(1, chosen) + change).masked_fill_(surplus, 0).to(out.dtype))


def _rows_together(rows: int, size: int, device: torch.device) -> list[slice]:
    matrix = 4 * size * size
    room = CPU_INPUTS // size * matrix if device.type == "cpu" else int(GPU_SHARE * free_bytes(device))
    return slices_within(slice(0, rows), matrix, room)
