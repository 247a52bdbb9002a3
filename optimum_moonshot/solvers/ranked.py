"""OBC and CAP, which eliminate all weights greedily and choose the mask by the ranking of the removals.

OBC (Frantar & Alistarh, arXiv 2208.11580, "ExactOBS") eliminates whole rows, and ranks the removals of the layer by
their individual losses. CAP (Kuznedelev et al., arXiv 2210.09223) splits each row into blocks of consecutive inputs,
each with a separate quadratic, and ranks the removals of all blocks by cumulative loss. Here both work with
row-specific Hessians.

Three steps: `rank_removals` computes the order of the removals of each row and their losses, once for all sparsities;
`Ranking.keep` compares the losses across the layer; `minimise` computes the remaining weights,

    w_S = ŵ_S + F_SS⁻¹ F_SP ŵ_P        S the remaining inputs, P the removed ones

which is the sum of all updates during the elimination. The first and the last work on any subset of the rows. A row's
damping is ``μ_k = p · mean(diag F_k)``.

`Elimination` is exact greedy OBS (Hassibi & Stork 1992) in matrix products, many rows at a time. A removal selects the
weight with the smallest loss ``½ w_p²/[F⁻¹]_pp``, updates ``w -= w_p/[F⁻¹]_pp · [F⁻¹]_:p`` and eliminates p from F⁻¹.
The textbook does this by a rank-1 update of the whole matrix at every step, bound by memory bandwidth. Here the
updates are deferred as rows v = column/√pivot and applied to F⁻¹ in one matrix product every `STEPS` steps; only the
diagonal is updated at every step. A step needs a single column, ``F⁻¹_:p - Σ v v_p``. Inputs that can no longer be
removed are dropped from the matrix once they are a quarter of it. Only the order of the removals and their losses are
stored.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from ..devices import free_bytes
from ..objective.linalg import check_factored, escalate, parallel_map, row_slices, slices_within
from ..objective.patterns import NM, Pattern, Unstructured
from ..objective.quadratic import Quadratic
from .base import PrunedWeight, Solver, damping_option, finish, hyperparameter, register_solver

# Steps between two flushes (measured on a CPU for 192 to 2304 inputs: within 5% of the best throughout).
STEPS = 64
# Fraction of dead inputs above which they are dropped: the copy costs as much as a few flushes.
DEAD = 0.25
INFINITY = float("inf")


class Elimination:
    """The elimination of a batch of rows, one input of each row per step.

    `inverse`, F_k⁻¹ [r, d, d], is overwritten if it is contiguous; `weight`, ŵ_k [r, d], has the same dtype. For n:m, a
    group that has lost m - n weights loses no other; for other patterns, all inputs are removed in the end.
    """

    def __init__(self, inverse: Tensor, weight: Tensor, pattern: Pattern):
        rows, size = weight.shape
        device = weight.device
        self.inverse, self.weight = inverse.contiguous(), weight.clone()
        self.diagonal = inverse.diagonal(dim1=1, dim2=2).clone()
        self.barred = torch.zeros_like(weight)  # infinite where an input is removed or must remain
        self.inputs = torch.arange(size, device=device).repeat(rows, 1)  # original indices of the columns
        self.rows = torch.arange(rows, device=device)[:, None]
        self.waiting = weight.new_empty(rows, STEPS, size)
        self.count = 0
        self.steps = removals(size, pattern)
        self.m = 0
        if isinstance(pattern, NM):
            self.m = pattern.m
            self.removable = torch.full((rows, size // pattern.m), pattern.m - pattern.n, device=device)

    def run(self) -> tuple[Tensor, Tensor]:
        """The inputs in the order of their removal, and the loss of each removal, both [r, steps]."""
        order = torch.empty(len(self.weight), self.steps, dtype=torch.int32, device=self.weight.device)
        losses = torch.empty(order.shape, dtype=torch.float64, device=self.weight.device)
        for step in range(self.steps):
            losses[:, step : step + 1], order[:, step : step + 1] = self._remove()
        return order, losses.mul_(0.5)

    def _remove(self) -> tuple[Tensor, Tensor]:
        """Remove one input of each row. Returns twice the losses, and the inputs, both [r, 1]."""
        if self.count == self.waiting.shape[1]:
            self._flush()
        score = torch.addcdiv(self.barred, self.weight.square(), self.diagonal)
        loss, chosen = score.min(dim=1, keepdim=True)
        column = self._column(chosen)
        scale = column.gather(1, chosen).rsqrt_()
        vector = torch.mul(column, scale, out=self.waiting[:, self.count])
        self.count += 1
        self.weight.addcmul_(vector, self.weight.gather(1, chosen) * scale, value=-1)
        self.diagonal.addcmul_(vector, vector, value=-1)
        self.diagonal.scatter_(1, chosen, 1.0)  # avoids 0/0 in later scores
        self.barred.scatter_(1, chosen, INFINITY)
        removed = self.inputs.gather(1, chosen)
        if self.m:  # bar the rest of the groups that have reached their limit
            group = removed // self.m
            removable = self.removable.gather(1, group) - 1
            self.removable.scatter_(1, group, removable)
            self.barred.masked_fill_((self.inputs // self.m == group) & (removable == 0), INFINITY)
        return loss, removed

    def _column(self, chosen: Tensor) -> Tensor:
        """Column `chosen` [r, 1] of the inverse with the deferred updates, [r, d]."""
        size = self.weight.shape[1]
        column = self.inverse.view(-1, size).index_select(0, (self.rows * size + chosen)[:, 0])
        if not self.count:
            return column
        waiting = self.waiting[:, : self.count]
        factors = waiting.gather(2, chosen[:, :, None].expand(-1, self.count, 1))  # v_p
        return column[:, None].baddbmm_(factors.mT, waiting, alpha=-1)[:, 0]

    def _flush(self) -> None:
        """Apply the deferred updates to the inverse, and drop dead inputs once they are a quarter of it."""
        size = self.weight.shape[1]
        alive = int((self.barred == 0).sum(1).max())
        if size - alive >= DEAD * size:
            # Rows with fewer live inputs than others keep some dead ones, so that the batch stays rectangular.
            chosen = torch.sort(self.barred, dim=1, stable=True).indices[:, :alive]
            self.weight, self.diagonal, self.barred, self.inputs = (
                tensor.gather(1, chosen) for tensor in (self.weight, self.diagonal, self.barred, self.inputs)
            )
            self.waiting = self.waiting.gather(2, chosen[:, None].expand(-1, self.waiting.shape[1], -1))
            self.inverse = take_square(self.inverse, chosen)
        self.inverse.baddbmm_(self.waiting.mT, self.waiting, alpha=-1)
        self.count = 0


def removals(size: int, pattern: Pattern) -> int:
    """Number of weights that can be removed from a row with `size` inputs: n:m retains n of every m."""
    return size // pattern.m * (pattern.m - pattern.n) if isinstance(pattern, NM) else size


def take_square(matrices: Tensor, chosen: Tensor) -> Tensor:
    """``matrices[k][chosen[k]][:, chosen[k]]`` of a batch: [r, d, d] and [r, s] → [r, s, s]."""
    if matrices.device.type == "cpu":  # copies whole rows: three times as fast as `gather`
        squares = matrices.new_empty(*chosen.shape, chosen.shape[1])
        for matrix, index, out in zip(matrices, chosen, squares, strict=True):
            torch.index_select(matrix.index_select(0, index), 1, index, out=out)
        return squares
    rows = matrices.gather(1, chosen[:, :, None].expand(-1, -1, matrices.shape[2]))
    return rows.gather(2, chosen[:, None, :].expand(-1, chosen.shape[1], -1))


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
    alive: Tensor | None = None  # bool [rows, size], True for the weights that may survive; None: all

    @classmethod
    def join(cls, parts: list["Ranking"]) -> "Ranking":
        """The rows of several rankings."""
        alive = [part.alive for part in parts if part.alive is not None]
        order, losses = (torch.cat([getattr(part, name) for part in parts]) for name in ("order", "losses"))
        return cls(order, losses, parts[0].size, torch.cat(alive) if alive else None)

    def keep(self, pattern: Pattern) -> Tensor:
        """Bool [rows, size]: False for the removals of smallest loss, as a prefix of each row's order."""
        rows, steps = self.order.shape
        counts = torch.full((rows, 1), steps, device=self.order.device)
        if not isinstance(pattern, NM):
            counts = (~pattern.keep(self.losses)).sum(1, keepdim=True)
        late = torch.arange(steps, device=self.order.device) >= counts
        keep = torch.ones(rows, self.size, dtype=torch.bool, device=self.order.device)
        keep.scatter_(1, self.order.long(), late)
        return keep if self.alive is None else keep.logical_and_(self.alive)


class RankingSolver(Protocol):
    """The members that `Solver.ranks_removals` requires; `Ranked` documents them."""

    @property
    def damping(self) -> float: ...

    def rank_removals(self, objective: Quadratic, pattern: Pattern, damping: float) -> Ranking: ...

    def minimise(self, objective: Quadratic, keeps: list[Tensor], damping: float) -> list[Tensor]: ...

    def solve_path(self, objective: Quadratic, patterns: Sequence[Pattern]) -> list[PrunedWeight]: ...


@dataclass(frozen=True)
class Ranked(Solver):
    """A solver that ranks removals, by the losses that its subclass defines. The comparison group is the layer.

    Other solvers with ``ranks_removals = True`` implement the same methods. `rank_removals` and `minimise` accept some
    rows of a layer as well as all of them.
    """

    damping: float = damping_option()

    patterns: ClassVar[tuple[type, ...]] = (Unstructured, NM)
    grouped: ClassVar[bool] = True
    ranks_removals: ClassVar[bool] = True
    cumulative: ClassVar[bool]  # rank by the sum of a row's losses so far, not by the loss of the removal alone

    def solve(self, objective: Quadratic, pattern: Pattern) -> PrunedWeight:
        return self.solve_path(objective, [pattern])[0]

    def solve_path(self, objective: Quadratic, patterns: Sequence[Pattern]) -> list[PrunedWeight]:
        """The result of `solve` for each of several patterns, unstructured ones or a single n:m, by one elimination.

        Raises:
            FactorizationError: no damping up to 1 suffices.
        """
        ranking, damping = escalate(self.damping, lambda damping: self.rank_removals(objective, patterns[0], damping))
        keeps = [ranking.keep(pattern).view_as(objective.weight) for pattern in patterns]
        weights = self.minimise(objective, keeps, damping)
        return [finish(objective, *pair, damping, self.damping) for pair in zip(weights, keeps, strict=True)]

    def trials(self, objective: Quadratic, patterns: Sequence[Pattern]) -> list[Tensor]:
        # One elimination serves all unstructured patterns, but a single n:m pattern.
        families = [list(patterns)] if isinstance(patterns[0], Unstructured) else [[pattern] for pattern in patterns]
        return [result.weight for family in families for result in self.solve_path(objective, family)]

    def rank_removals(self, objective: Quadratic, pattern: Pattern, damping: float) -> Ranking:
        """Remove the weights of each row one by one, all of them or (n:m) as many as the pattern allows.

        The sparsity of the pattern is ignored.

        Raises:
            FactorizationError: a row's matrix is not positive definite at this damping.
        """
        weight = objective.row_weights
        rows, size = weight.shape
        order = torch.empty(rows, removals(size, pattern), dtype=torch.int32, device=weight.device)
        losses = torch.empty(order.shape, dtype=torch.float64, device=weight.device)
        inverses = Inverses(objective, damping)

        def eliminate(part: slice) -> None:
            inverse, fits = inverses.of(part)
            order[part], losses[part] = Elimination(inverse, weight[part], pattern).run()
            del inverse
            for index in (~fits).nonzero()[:, 0].tolist():  # ill-conditioned rows are repeated in float64
                row = slice(part.start + index, part.start + index + 1)
                exact = Elimination(inverses.exactly(row), weight[row].double(), pattern)
                order[row], losses[row] = exact.run()

        matrix, cpu = 4 * size * size, weight.device.type == "cpu"
        most = CPU_INPUTS // size * matrix if cpu else int(GPU_FRACTION * free_bytes(weight.device))
        parallel_map(eliminate, slices_within(slice(0, rows), matrix, most), weight.device)
        check_factored(torch.isfinite(losses))
        alive = None if objective.alive is None else objective.alive.reshape(-1, size)
        return Ranking(order, losses.cumsum_(1) if self.cumulative else losses, size, alive)

    def minimise(self, objective: Quadratic, keeps: list[Tensor], damping: float) -> list[Tensor]:
        """The minimisers of the quadratic, with the damping of the ranking, on several masks, bool [rows, d_in] each.

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

        parts = row_slices(slice(0, len(weight)), 24 * size * size, device)
        parallel_map(minimise, parts, device)
        return [out.view_as(objective.weight) for out in minimisers]


@register_solver("obc")
@dataclass(frozen=True)
class OBC(Ranked):
    """`damping` p adds ``μ_k = p·mean(diag F_k)`` to the diagonal of F_k."""

    cumulative: ClassVar[bool] = False


@register_solver("cap")
@dataclass(frozen=True)
class CAP(Ranked):
    """`damping` p adds ``p·mean(diag)`` to the diagonal of every block's matrix.

    `block_size` bounds the inputs of a column block, which has the largest divisor of d_in up to that size (for n:m,
    among the multiples of m).
    """

    # 192 is the value of the original implementation, for DeiT.
    block_size: int = hyperparameter(192, help="largest number of inputs in a column block", least=1)

    cumulative: ClassVar[bool] = True

    def column_block(self, d_in: int, pattern: Pattern) -> int:
        most = max(self.block_size, pattern.width)
        sizes = range(pattern.width, min(most, d_in) + 1, pattern.width)
        return max(size for size in sizes if d_in % size == 0)


def damped_rows(objective: Quadratic, rows: slice, damping: float) -> Tensor:
    """F_k + μ_k I of some `row_weights`, [rows, size, size] in float64; where F_k is 0, μ_k is p × the layer's mean.

    Weights that are not `alive` are decoupled from the others, so their removal costs nothing and changes nothing.
    """
    hessians = objective.row_hessians(rows)
    diagonal = hessians.diagonal(dim1=1, dim2=2)
    means = diagonal.mean(1, keepdim=True)
    if not means.all():
        means = torch.where(means == 0, objective.mean_diagonal() or 1.0, means)
    diagonal += damping * means
    if objective.alive is not None:
        removed = ~objective.alive.reshape(-1, objective.size)[rows]
        hessians.masked_fill_(removed[:, :, None] | removed[:, None, :], 0).diagonal(dim1=1, dim2=2).add_(removed)
    return hessians


class Inverses:
    """(F_k + μ_k I)⁻¹ of rows on demand; at λ = 1 rows with the same G share one, unless some weights are not alive."""

    def __init__(self, objective: Quadratic, damping: float):
        self.objective, self.damping = objective, damping
        self.shared: list[Tensor] | None = None
        if (
            not objective.scales.b and objective.alive is None
        ):  # the inverses for all matrices in `gram`, each computed for the first of its rows
            which = objective.grams_of(slice(None))
            blocks = objective.weight.shape[1] // objective.size
            step = len(which) // (int(which[-1]) + 1) * blocks
            parts = [self._compute(slice(first, first + blocks)) for first in range(0, len(which), step)]
            self.shared = [torch.cat(tensors) for tensors in zip(*parts, strict=True)]

    def of(self, rows: slice) -> tuple[Tensor, Tensor]:
        """The inverses, [r, size, size] in float32, and bool [r], True where float32 is precise enough."""
        if self.shared is None:
            return self._compute(rows)
        which = self.objective.grams_of(rows)
        return self.shared[0][which], self.shared[1][which]

    def exactly(self, rows: slice) -> Tensor:
        """The inverses, [r, size, size] in float64."""
        return torch.cholesky_inverse(self._factor(rows)[0])

    def _compute(self, rows: slice) -> tuple[Tensor, Tensor]:
        size, device = self.objective.size, self.objective.weight.device
        inverse = torch.empty(rows.stop - rows.start, size, size, device=device)
        fits = torch.empty(len(inverse), dtype=torch.bool, device=device)
        for part in row_slices(rows, 24 * size * size, device):
            place = slice(part.start - rows.start, part.stop - rows.start)
            lower, diagonal = self._factor(part)
            # The factor is accurate to float64, so inverting it in float32 loses accuracy by its own condition number
            # only, the square root of F's.
            inverse[place] = torch.cholesky_inverse(lower.float())
            fits[place] = (inverse[place].diagonal(dim1=1, dim2=2) * diagonal).amax(1) < SINGLE_INFLATION
        return inverse, fits

    def _factor(self, rows: slice) -> tuple[Tensor, Tensor]:
        """The lower Cholesky factors of F_k + μ_k I and its diagonals, in float64."""
        hessians = damped_rows(self.objective, rows, self.damping)
        lower, info = torch.linalg.cholesky_ex(hessians)
        check_factored(info == 0)
        return lower, hessians.diagonal(dim1=1, dim2=2)


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
