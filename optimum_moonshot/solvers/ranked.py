"""Solvers that eliminate all weights greedily and choose the mask by the ranking of the removals: OBC and CAP.

Three steps: `rank_removals` computes the order of the removals of each row and their losses, once for all sparsities;
`Ranking.keep` compares the losses across the layer; `minimise` computes the remaining weights,

    w_S = ŵ_S + F_SS⁻¹ F_SP ŵ_P        S the remaining inputs, P the removed ones

which is the sum of all updates during the elimination. The first and the last work on any subset of the rows. A row's
damping is ``μ_k = p · mean(diag F_k)``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

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

# Rows that are eliminated together: on a CPU, as many as keep their deferred updates in its cache; on a GPU, as many as
# fit a fraction of its free memory.
CPU_INPUTS = 36 * 1024
GPU_FRACTION = 0.25
# Largest [F⁻¹]_jj·F_jj for which a row is eliminated in float32. [F⁻¹]_jj decreases by up to this factor until j is
# removed, and its relative rounding error increases by it.
SINGLE_INFLATION = 1e3


@dataclass(frozen=True)
class Ranking:
    """The removals of some rows or column blocks: the inputs in order, and the losses that rank them in the layer."""

    order: Tensor  # [rows, steps], inputs of the row
    losses: Tensor  # [rows, steps] in float64
    size: int  # inputs of a row

    @classmethod
    def join(cls, parts: list["Ranking"]) -> "Ranking":
        """Concatenate the rows of several rankings."""
        return cls(torch.cat([part.order for part in parts]), torch.cat([part.losses for part in parts]), parts[0].size)

    def keep(self, pattern: Pattern) -> Tensor:
        """Bool [rows, size]: False for the removals of smallest loss, as a prefix of each row's order."""
        rows, steps = self.order.shape
        counts = torch.full((rows, 1), steps, device=self.order.device)
        if not isinstance(pattern, NM):
            counts = (~pattern.keep(self.losses)).sum(1, keepdim=True)
        late = torch.arange(steps, device=self.order.device) >= counts
        keep = torch.ones(rows, self.size, dtype=torch.bool, device=self.order.device)
        return keep.scatter_(1, self.order.long(), late)


class RankingSolver(Protocol):
    """The members that `Solver.ranks_removals` requires; `Ranked` documents them."""

    @property
    def damping(self) -> float: ...

    def rank_removals(self, objective: Quadratic, pattern: Pattern, damping: float) -> Ranking: ...

    def minimise(self, objective: Quadratic, keeps: list[Tensor], damping: float) -> list[Tensor]: ...

    def solve_path(self, objective: Quadratic, patterns: list[Pattern]) -> list[PrunedWeight]: ...


@dataclass(frozen=True)
class Ranked(Solver):
    """A solver that ranks removals; subclasses define by which losses.

    Other solvers with ``ranks_removals = True`` implement the same methods. `rank_removals` and `minimise` accept some
    rows of a layer as well as all of them.
    """

    damping: float = damping_option()

    patterns: ClassVar[tuple[type, ...]] = (Unstructured, NM)
    grouped: ClassVar[bool] = True
    ranks_removals: ClassVar[bool] = True
    cumulative: ClassVar[bool]  # rank by the sum of a row's losses so far, not by the loss of the removal alone

    def solve(self, objective: Quadratic, pattern: Pattern) -> PrunedWeight:
        """Prune at the smallest damping, `damping` times a power of ten up to 1, at which all factors exist.

        Args:
            objective: of the whole layer.
            pattern: unstructured or n:m.

        Raises:
            FactorizationError: no damping up to 1 suffices.
        """
        return self.solve_path(objective, [pattern])[0]

    def solve_path(self, objective: Quadratic, patterns: list[Pattern]) -> list[PrunedWeight]:
        """As `solve`, for several patterns by one elimination.

        Args:
            objective: of the whole layer.
            patterns: unstructured ones, or a single n:m pattern.

        Returns:
            The result of `solve` for each pattern.

        Raises:
            FactorizationError: no damping up to 1 suffices.
        """
        ranking, damping = escalate(self.damping, lambda damping: self.rank_removals(objective, patterns[0], damping))
        keeps = [ranking.keep(pattern).view_as(objective.weight) for pattern in patterns]
        weights = self.minimise(objective, keeps, damping)
        return [finish(objective, *pair, damping, self.damping) for pair in zip(weights, keeps, strict=True)]

    def trials(self, objective: Quadratic, patterns: Sequence[Pattern]) -> list[Tensor]:
        """As `Solver.trials`: one elimination for all unstructured patterns, and one for each n:m pattern.

        Args:
            objective: of the whole layer.
            patterns: of one class.

        Raises:
            FactorizationError: as `solve`.
        """
        families = [list(patterns)] if isinstance(patterns[0], Unstructured) else [[pattern] for pattern in patterns]
        return [result.weight for family in families for result in self.solve_path(objective, family)]

    def work(self, size: ProblemSize, pattern: Pattern) -> Work:
        """As `Solver.work`: the inverses of the rows that are eliminated together, and the ranking of all rows."""
        d, count = size.size, size.weights // size.size
        cpu = size.device.type == "cpu"
        limit = slice_bytes(size.device)
        together = min(count, max(1, CPU_INPUTS // d if cpu else limit // (4 * d * d)))
        factored = min(together if size.max_rank else size.groups, max(1, limit // (24 * d * d)))
        inverses = 4 * together * d * d
        # Dropping dead inputs copies (3/4)² of the inverses; before that, factors are held next to the inverses.
        eliminating = inverses * 25 // 16 + 7 * STEPS * together * d
        threads = max(1, min(size.threads if cpu else 1, count // together))
        peak = threads * max(eliminating, (inverses if size.max_rank else 0) + 32 * factored * d * d)
        return Work(max(peak + 16 * size.weights, 60 * size.weights), count * d * d * (d + size.max_rank))

    def rank_removals(self, objective: Quadratic, pattern: Pattern, damping: float) -> Ranking:
        """Remove the weights of each row one by one, all of them or (n:m) as many as the pattern allows.

        Args:
            objective: of a layer, or of some of its rows.
            pattern: unstructured or n:m; its sparsity is ignored.
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
            keeps: masks of the objective's rows, bool [rows, d_in] each.
            damping: p, at which the removals were ranked.

        Returns:
            A weight for each mask, [rows, d_in] in float32, 0 where the mask is False.
        """
        weight, device = objective.row_weights, objective.weight.device
        size = weight.shape[1]
        masks = [keep.reshape(weight.shape) for keep in keeps]
        minimisers = [torch.zeros_like(weight) for _ in keeps]

        def minimise(part: slice) -> None:
            hessians = damped_rows(objective, part, damping)
            for mask, out in zip(masks, minimisers, strict=True):
                _minimise(hessians, weight[part].double(), mask[part], out[part])

        parallel_map(minimise, row_slices(slice(0, len(weight)), 24 * size * size, device), device)
        return [out.view_as(objective.weight) for out in minimisers]


def damped_rows(objective: Quadratic, rows: slice, damping: float) -> Tensor:
    """F_k + μ_k I of some rows; ``μ_k = p · mean(diag F_k)``, or p times the layer's mean where that is 0.

    Args:
        objective: of a layer, or of some of its rows.
        rows: of `row_weights`.
        damping: p.

    Returns:
        [rows, size, size] in float64.
    """
    hessians = objective.row_hessians(rows)
    diagonal = hessians.diagonal(dim1=1, dim2=2)
    means = diagonal.mean(1, keepdim=True)
    if not means.all():
        means = torch.where(means == 0, objective.mean_diagonal() or 1.0, means)
    diagonal += damping * means
    return hessians


class Inverses:
    """(F_k + μ_k I)⁻¹ of rows on demand; at λ = 1 rows with the same G share one, which is computed once.

    Args:
        objective: of a layer, or of some of its rows.
        damping: p, as for `damped_rows`.
    """

    def __init__(self, objective: Quadratic, damping: float):
        self.objective, self.damping = objective, damping
        self.shared = None if objective.scales.b else self._of_grams()

    def _of_grams(self) -> list[Tensor]:
        """The inverses for all matrices in `gram`, each computed for the first of its rows."""
        which = self.objective.grams_of(slice(None))
        blocks = self.objective.weight.shape[1] // self.objective.size
        step = len(which) // (int(which[-1]) + 1) * blocks
        parts = [self._compute(slice(first, first + blocks)) for first in range(0, len(which), step)]
        return [torch.cat(tensors) for tensors in zip(*parts, strict=True)]

    def of(self, rows: slice) -> tuple[Tensor, Tensor]:
        """The inverses, [r, size, size] in float32, and bool [r], True where float32 is precise enough."""
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
            # The factor is accurate to float64, so inverting it in float32 loses accuracy by its own condition number
            # only, the square root of F's.
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
    """Order and losses of some rows, [r, steps]; ill-conditioned rows are repeated in float64."""
    inverse, fits = inverses.of(part)
    order, losses = Elimination(inverse, weight[part], pattern).run()
    del inverse
    for row in (~fits).nonzero()[:, 0].tolist():
        here = part.start + row
        exact = Elimination(inverses.exactly(here), weight[here : here + 1].double(), pattern).run()
        order[row], losses[row] = exact[0][0], exact[1][0]
    return order, losses


def _minimise(hessians: Tensor, weight: Tensor, keep: Tensor, out: Tensor) -> None:
    """Write the minimisers on `keep` [r, size] to `out` [r, size]; `hessians` [r, size, size], `weight` in float64."""
    # The rows retain different numbers of inputs. To solve them in one batch, shorter systems are padded with identity.
    count = int(keep.sum(1).max())
    chosen = torch.sort(~keep, dim=1, stable=True).indices[:, :count]
    surplus = ~keep.gather(1, chosen)
    right = (hessians @ weight.masked_fill(keep, 0)[:, :, None])[:, :, 0].gather(1, chosen).masked_fill_(surplus, 0)
    matrices = take_square(hessians, chosen)
    matrices.masked_fill_(surplus[:, :, None] | surplus[:, None, :], 0)
    matrices.diagonal(dim1=1, dim2=2).add_(surplus)
    change = torch.cholesky_solve(right[:, :, None], torch.linalg.cholesky(matrices))[:, :, 0]
    out.scatter_(1, chosen, (weight.gather(1, chosen) + change).masked_fill_(surplus, 0).to(out.dtype))


def _rows_together(rows: int, size: int, device: torch.device) -> list[slice]:
    matrix = 4 * size * size
    limit = CPU_INPUTS // size * matrix if device.type == "cpu" else int(GPU_FRACTION * free_bytes(device))
    return slices_within(slice(0, rows), matrix, limit)
