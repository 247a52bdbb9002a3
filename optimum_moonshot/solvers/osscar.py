"""OSSCAR (Meng et al., arXiv 2403.12983) with row-specific Hessians: removes the same input columns from all rows.

Greedy: remove the group g of columns with the smallest ``Σ_k w_kgᵀ ([F_k⁻¹]_gg)⁻¹ w_kg``, and update all rows. At the
end the remaining columns S are set to the quadratic's minimiser, ``w_S = ŵ_S + F_SS⁻¹ F_SP ŵ_P``. With ``S₀ = aG + μI``
and J = S₀⁻¹, restricted to the remaining columns,

    F_k⁻¹ = J - b P_k M_k⁻¹ P_kᵀ        P_k = J A_k,   M_k = I + b A_kᵀ J A_k

so no row needs a d_in × d_in matrix. Removing g with ``u = J_:g L⁻ᵀ`` and ``q_k = L⁻¹ P_k,g:``, where ``L Lᵀ = J_gg``,
subtracts u uᵀ from J, u q_k from P_k and b q_kᵀ q_k from M_k. The updates of J and P_k are deferred as U and Q_k and
applied in one matrix product every `WAITING` columns, as rank-1 updates are bound by memory bandwidth. A removal then
only reads P_k once. P_k is stored transposed, since x P_kᵀ is several times faster than P_k xᵀ for few rows x.

At b = 0 all rows share J, and the removals of least cost follow from the moments ``Σ_k w_kg w_kgᵀ`` of the groups. A
removal then only reads the weights once, for the change of the moments: 6 times as fast as an update of all weights
(576 × 1536, half of the columns, float64, one AVX2 core).

The removals are nested, so one elimination gives the result of every sparsity: `solve_path`.

For mixtures of experts, `experts` searches for the experts to remove.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..objective.linalg import check_factored, escalate, row_slices
from ..objective.patterns import Experts, Pattern, Structured
from ..objective.quadratic import Quadratic
from ..objective.removal import Removal
from .alps import System
from .base import PrunedWeight, Solver, damping_option, finish, hyperparameter, register_solver
from .experts import best_subset, expert_mask

# Columns whose updates are deferred.
WAITING = 64
# A step of `Draft` removes this fraction of the remaining groups.
DRAFT_STEP = 1 / 32
# Fraction of removed columns above which they are dropped from the state, which copies it.
DEAD = 0.25
# Largest bound on the condition number of an M_k for which float32 suffices for the state of the rows.
SINGLE_CONDITION = 256.0
# Largest residual of the minimiser's equations, relative to the right-hand side.
RESIDUAL = 1e-6
# The residual at which refinement ends: a thousandth of the rounding of the float32 result.
REFINED = 1e-10
# Most steps of conjugate gradients on the remaining weights, where some of the given ones are zero.
REFIT_STEPS = 100


@register_solver("osscar")
@dataclass(frozen=True)
class OSSCAR(Solver):
    """Comparison group: the layer's column groups. `damping` p adds μ = p·mean(diag G)/L_R(0) to F_k's diagonal.

    For experts, all subsets are evaluated if there are at most `exact`; damping has no effect.
    """

    damping: float = damping_option()
    exact: int = hyperparameter(5000, help="evaluate all subsets of experts if there are at most this many", least=0)

    patterns: ClassVar[tuple[type, ...]] = (Structured, Experts)

    def solve(self, objective: Quadratic | Removal, pattern: Structured | Experts) -> PrunedWeight:
        if isinstance(pattern, Experts):
            assert isinstance(objective, Removal)
            return expert_mask(objective, best_subset(objective, pattern, self.exact))
        return self.solve_path(objective, [pattern])[0]

    def family(self, pattern: Pattern) -> Any:
        return (Structured, pattern.group) if isinstance(pattern, Structured) else pattern

    def solve_path(self, objective: Quadratic | Removal, patterns: Sequence[Any]) -> list[PrunedWeight]:
        if not isinstance(objective, Quadratic):
            return super().solve_path(objective, patterns)
        inputs, unit = objective.weight.shape[1], objective.damping_unit
        counts = [round(pattern.sparsity * inputs / pattern.group) for pattern in patterns]

        def attempt(damping: float) -> dict[int, tuple[Tensor, Tensor]]:
            support = (RowSupport if objective.scales.b else Support)(objective, patterns[0].group, damping * unit)
            solutions, removed = dict[int, tuple[Tensor, Tensor]](), 0
            for count in sorted({*counts}):
                for _ in range(count - removed):
                    support.remove(support.cheapest())
                removed, solutions[count] = count, self._minimiser(objective, support, damping * unit)
            return solutions

        solutions, damping = escalate(self.damping, attempt)
        return [finish(objective, *solutions[count], damping, self.damping) for count in counts]

    def _minimiser(self, objective: Quadratic, support: "Support", ridge: float) -> tuple[Tensor, Tensor]:
        """The weight and `keep`, both [d_out, d_in]."""
        weight, groups = support.minimise(objective)
        columns = groups.repeat_interleave(support.group)
        keep = columns.expand_as(weight)
        if objective.alive is not None:  # rows with zeros from before the run have different inputs
            rows = (keep & ~objective.alive).any(1)
            keep = keep & objective.alive
            if not bool(rows.any()):
                return weight, keep
            if objective.scales.b:  # the Fisher term has all rows
                rows[:] = True
            part = replace(objective, weight=objective.weight[rows], alive=objective.alive[rows])
            system = System(part, ridge, torch.float64)
            weight[rows] = system.refit(weight[rows] * keep[rows] * system.scale, keep[rows], REFIT_STEPS, columns)
        return weight, keep


class Draft(OSSCAR):
    """OSSCAR in float32, several groups at a time and without refinement: for losses that are only compared.

    With 10% to 75% of the 1,536 inputs of three MLPs of SmolLM2-135M removed, the error of their outputs is at most
    0.05% larger than that of `OSSCAR`, in a fifth of the time (0.45 s of a core for the whole path).
    """

    def solve_path(self, objective: Quadratic | Removal, patterns: Sequence[Any]) -> list[PrunedWeight]:
        assert isinstance(objective, Quadratic) and not objective.scales.b
        group, inputs = patterns[0].group, objective.weight.shape[1]
        counts = [round(pattern.sparsity * inputs / group) for pattern in patterns]

        def attempt(damping: float) -> dict[int, PrunedWeight]:
            _, inverse = _shared_part(objective, damping * objective.damping_unit)
            inverse, weight = inverse.float(), objective.weight.clone()
            alive, solutions = torch.ones(inputs // group, dtype=torch.bool, device=weight.device), {}
            for count in sorted({*counts}):
                while (excess := count - int((~alive).sum())) > 0:
                    step = min(excess, math.ceil(int(alive.sum()) * DRAFT_STEP))
                    groups = _group_costs(inverse, weight, group, alive).topk(step, largest=False).indices
                    columns = (groups[:, None] * group + torch.arange(group, device=groups.device)).flatten()
                    half, lower = _half_solve(inverse[columns[:, None], columns], inverse[columns])
                    error = torch.linalg.solve_triangular(lower, weight[:, columns].T, upper=False)
                    weight.addmm_(error.T, half, alpha=-1)
                    inverse.addmm_(half.T, half, alpha=-1)
                    alive[groups] = False
                keep = alive.repeat_interleave(group).expand_as(weight)
                solutions[count] = finish(objective, weight, keep, damping, self.damping)
            return solutions

        solutions, _ = escalate(self.damping, attempt)
        return [solutions[count] for count in counts]


def _shared_part(objective: Quadratic, ridge: float) -> tuple[Tensor, Tensor]:
    """S₀ = aG + μI and its inverse, [d_in, d_in] in float64; `FactorizationError` if it is not positive definite."""
    shared = objective.scales.a * objective.gram.double()
    shared.diagonal().add_(ridge)
    lower, info = torch.linalg.cholesky_ex(shared)
    check_factored(info == 0, f"the quadratic of size {len(shared)}")
    return shared, torch.cholesky_inverse(lower)


def _group_costs(inverse: Tensor, weight: Tensor, group: int, alive: Tensor) -> Tensor:
    """Σ_k w_kgᵀ J_gg⁻¹ w_kg of every group, infinite for removed ones."""
    if group == 1:
        costs = weight.square().sum(0) / inverse.diagonal()
    else:
        blocks = inverse.unflatten(0, (-1, group)).unflatten(2, (-1, group)).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
        blocks = torch.where(alive[:, None, None], blocks, torch.eye(group, device=blocks.device))
        half, _ = _half_solve(blocks, weight.T.unflatten(0, (-1, group)))
        costs = half.square().sum((1, 2))
    return costs.masked_fill(~alive, torch.inf)


class Support:
    """F⁻¹ and the weights on the remaining columns, where all rows have one Hessian, F = aG + μI.

    Removed columns keep their position until they are a quarter of all; `groups` has the indices of those that are
    stored.

    `group` is the number of columns of a group, a divisor of d_in; `ridge` is added to the diagonal of every F_k. All
    methods raise `FactorizationError` where a matrix is not positive definite.
    """

    def __init__(self, objective: Quadratic, group: int, ridge: float):
        self.group, self.device = group, objective.weight.device
        self.shared, self.inverse = _shared_part(objective, ridge)  # S₀, and J as of the last flush
        self.groups = torch.arange(len(self.shared) // group, device=self.device)
        self.alive = torch.ones_like(self.groups, dtype=torch.bool)
        self.removed = self.inverse.new_empty(len(self.shared), 0)  # U
        self.weight = objective.weight.double()
        blocks = torch.stack(
            [self.inverse[columns, columns] for columns in map(self._columns, range(len(self.groups)))]
        )
        self._start(objective, blocks)

    def _start(self, objective: Quadratic, blocks: Tensor) -> None:
        """Start the state of the rows; `blocks` are the diagonal ones of J, [groups, group, group]."""
        self.blocks = blocks
        self.errors = self.weight.new_empty(len(self.weight), 0)  # E: the weights are `weight` - E Uᵀ
        self.moments = self._moments()

    def _moments(self) -> Tensor:
        """Σ_k w_kg w_kgᵀ of every group, [groups, group, group]."""
        if self.group == 1:
            return self.weight.square().sum(0)[:, None, None]
        weight = self.weight.T.unflatten(0, (-1, self.group))
        return weight @ weight.mT

    def _columns(self, group: int) -> slice:
        return slice(group * self.group, (group + 1) * self.group)

    def cheapest(self) -> int:
        """Position of the group with the smallest cost of removal; the first among ties."""
        return int(self._costs().masked_fill(~self.alive, torch.inf).argmin())

    def _costs(self) -> Tensor:
        """Σ_k w_kgᵀ J_gg⁻¹ w_kg of every group."""
        if self.group == 1:
            return (self.moments / self.blocks).flatten()
        lower, info = torch.linalg.cholesky_ex(self.blocks)
        check_factored(info == 0)
        return torch.cholesky_solve(self.moments, lower).diagonal(dim1=1, dim2=2).sum(1)

    def remove(self, group: int) -> None:
        """Remove the group of columns at a position from all rows."""
        columns = self._columns(group)
        inverse = self.inverse[:, columns] - self.removed @ self.removed[columns].T  # J_:g
        half, lower = _half_solve(inverse[columns], inverse.T)  # uᵀ, L
        self._eliminate(inverse.T, half, lower, columns)
        self.removed = torch.cat([self.removed, half.T], 1)
        self.alive[group] = False
        self.blocks[..., group, :, :] = torch.eye(self.group, dtype=self.blocks.dtype, device=self.device)
        if self.removed.shape[1] >= WAITING:
            self._flush()

    def _eliminate(self, inverse: Tensor, half: Tensor, lower: Tensor, columns: slice) -> None:
        """Update the state of the rows for the removal of `columns`.

        `inverse` is J_g:, [group, d], `lower` the factor L of J_gg, and `half` L⁻¹ J_g:.
        """
        current = self.weight[:, columns] - self.errors @ self.removed[columns].T
        error = torch.linalg.solve_triangular(lower, current.T, upper=False)  # [group, rows]
        product = error @ self.weight - (error @ self.errors) @ self.removed.T
        by_group = half.T.unflatten(0, (-1, self.group))
        # The weights of a group change from w to w - error·u.
        change = by_group @ product.T.unflatten(0, (-1, self.group)).mT
        self.moments += by_group @ (error @ error.T) @ by_group.mT - change - change.mT
        self.blocks -= by_group @ by_group.mT
        self.errors = torch.cat([self.errors, error.T], 1)

    def _flush(self) -> None:
        """Apply the deferred updates, and drop the removed columns once they are a quarter of the state."""
        self.inverse -= self.removed @ self.removed.T
        self._flush_rows()
        self.removed = self.removed[:, :0]
        if self.alive.sum() <= (1 - DEAD) * len(self.alive):
            self._drop()

    def _flush_rows(self) -> None:
        self.weight.addmm_(self.errors, self.removed.T, alpha=-1)
        self.errors, self.moments = self.errors[:, :0], self._moments()

    def _drop(self) -> None:
        remaining = self.alive.repeat_interleave(self.group).nonzero()[:, 0]
        self.inverse = self.inverse[remaining[:, None], remaining]
        self.removed, self.weight = self.removed[remaining], self.weight[:, remaining]
        self._drop_rows(remaining)
        self.groups, self.alive = self.groups[self.alive], self.alive[self.alive]

    def _drop_rows(self, remaining: Tensor) -> None:
        self.blocks, self.moments = self.blocks[self.alive], self.moments[self.alive]

    def minimise(self, objective: Quadratic) -> tuple[Tensor, Tensor]:
        """The minimiser on the remaining columns, [d_out, d_in] in float32, and bool [groups], True where they remain.

        The state is the inverse of F_SS up to rounding errors. At most three rounds of iterative refinement, with
        residuals in float64 from the statistics instead of the state, remove their effect; `FactorizationError` if they
        do not converge, because the state has lost its accuracy. More columns can be removed afterwards.
        """
        self._flush()
        self._drop()
        dense = objective.weight.double()
        groups = torch.zeros(dense.shape[1] // self.group, dtype=torch.bool, device=self.device)
        groups[self.groups] = True
        keep = groups.repeat_interleave(self.group)
        weight = torch.zeros_like(dense)
        if groups.all() or not groups.any():
            return dense.mul_(keep).float(), groups
        for rows in self._refined_together(objective):
            multiply = self._multiplication(objective, rows)
            right = multiply(dense[rows] * ~keep)[:, keep]
            change, residual, size = torch.zeros_like(weight[rows]), right, right.norm(dim=1)
            for _ in range(3):
                change[:, keep] += self._solve(rows, residual)
                residual = right - multiply(change)[:, keep]
                if bool((residual.norm(dim=1) <= REFINED * size).all()):
                    break
            check_factored(residual.norm(dim=1) <= RESIDUAL * size, "the state of a row's Hessian")
            weight[rows] = (dense[rows] + change) * keep
        return weight.float(), groups

    def _slices(self, numbers: int) -> list[slice]:
        """Rows in slices whose intermediates, `numbers` per input, fit `row_slices`."""
        return row_slices(slice(0, len(self.weight)), 8 * self.weight.shape[1] * numbers, self.device)

    def _refined_together(self, objective: Quadratic) -> list[slice]:
        return self._slices(3)

    def _multiplication(self, objective: Quadratic, rows: slice) -> Callable[[Tensor], Tensor]:
        """The function from w_k of some rows to F_k w_k, [r, d_in]."""
        return lambda weight: weight @ self.shared

    def _solve(self, rows: slice, right: Tensor) -> Tensor:
        """F_SS⁻¹ r of some rows, [rows, remaining columns], up to the rounding errors of the state."""
        return right @ self.inverse


class RowSupport(Support):
    """Like `Support`, but every row has a separate Hessian; `blocks` are [rows, groups, group, group].

    The state of the rows is in float32 unless the condition number of an M_k requires float64.
    """

    def _start(self, objective: Quadratic, blocks: Tensor) -> None:
        """P_kᵀ [rows, N, d_in], M_k⁻¹ [rows, N, N], and the diagonal blocks of F_k⁻¹."""
        self.scale = objective.scales.b
        fisher, (count, d_in) = objective.fisher_term, self.weight.shape
        samples = fisher.max_rank
        self.spread = torch.empty(count, samples, d_in, device=self.device)
        inner = torch.empty(len(self.weight), samples, samples, dtype=torch.float64, device=self.device)
        for rows in self._slices(3 * samples):
            factors = fisher.factors(rows, self.device)
            spread = factors @ self.inverse
            self.spread[rows] = spread
            inner[rows] = self.scale * spread @ factors.mT
        inner.diagonal(dim1=1, dim2=2).add_(1)
        # M_k ≥ I, so its norm bounds its condition number. All rows share one dtype: their products are batched.
        if inner.norm(dim=(1, 2)).amax() >= SINGLE_CONDITION:
            self.spread = self.spread.double()
            for rows in self._slices(3 * samples):
                self.spread[rows] = fisher.factors(rows, self.device) @ self.inverse
        lower, info = torch.linalg.cholesky_ex(inner)
        check_factored(info == 0)
        self.inner = torch.cholesky_inverse(lower).to(self.spread.dtype)
        self.waiting = self.spread.new_empty(len(self.spread), 0, samples)  # Q_k
        self.blocks = blocks.to(self.spread.dtype).repeat(len(self.weight), 1, 1, 1)
        for rows in self._slices(2 * samples):
            self.blocks[rows] -= self.scale * self._low_rank_blocks(rows)

    def _low_rank_blocks(self, rows: slice) -> Tensor:
        """The diagonal blocks of P_k M_k⁻¹ P_kᵀ, [r, groups, group, group]."""
        spread = self.spread[rows]
        solved = self.inner[rows] @ spread
        if self.group == 1:
            return (solved * spread).sum(1)[:, :, None, None]
        solved, spread = (tensor.mT.unflatten(1, (-1, self.group)) for tensor in (solved, spread))
        return solved @ spread.mT

    def _costs(self) -> Tensor:
        """Σ_k w_kgᵀ ([F_k⁻¹]_gg)⁻¹ w_kg of every group."""
        weight = self.weight.unflatten(1, (-1, self.group))
        if self.group == 1:
            return (weight.square() / self.blocks[..., 0]).sum((0, 2))
        costs = torch.zeros(len(self.groups), dtype=torch.float64, device=self.device)
        for rows in self._slices(2 * self.group):
            half, _ = _half_solve(self.blocks[rows].double(), weight[rows][..., None])
            costs += half.square().sum((0, 2, 3))
        return costs

    def _eliminate(self, inverse: Tensor, half: Tensor, lower: Tensor, columns: slice) -> None:
        """Update M_k⁻¹, weights and blocks of all rows for the removal of `columns`, and keep q_k for the flush."""
        dtype = self.spread.dtype
        inverse, lower, removed = inverse.to(dtype), lower.to(dtype), self.removed.to(dtype)
        eliminated = self.spread.new_empty(len(self.weight), self.group, self.spread.shape[1])
        for rows in self._slices(4 * self.group):
            spread, waiting, inner = self.spread[rows], self.waiting[rows], self.inner[rows]
            current = spread[:, :, columns].mT - removed[columns] @ waiting  # P_k,g: with the deferred updates
            q = torch.linalg.solve_triangular(lower.expand(len(current), -1, -1), current, upper=False)
            solved = q @ inner  # q M⁻¹
            coupling = solved @ spread - solved @ waiting.mT @ removed.T
            self._update(rows, inverse - self.scale * lower @ coupling, columns)
            # The inverse of M - b qᵀq by the Woodbury identity.
            remainder = torch.eye(self.group, dtype=dtype, device=self.device) - self.scale * q @ solved.mT
            half, _ = _half_solve(remainder, solved)
            inner.baddbmm_(half.mT, half, alpha=self.scale)
            eliminated[rows] = q
        self.waiting = torch.cat([self.waiting, eliminated], 1)
        self.weight[:, columns] = 0

    def _update(self, rows: slice, inverse: Tensor, columns: slice) -> None:
        """Update weights and blocks of some rows for the removal of `columns`; `inverse` [r, g, d]: [F_k⁻¹]_g:."""
        half, lower = _half_solve(inverse[:, :, columns], inverse)
        weight = self.weight[rows]
        error = torch.linalg.solve_triangular(lower.to(weight.dtype), weight[:, columns, None], upper=False)
        self.weight[rows] = weight - (half.mT.to(weight.dtype) @ error)[:, :, 0]
        by_group = half.mT.unflatten(1, (-1, self.group))
        self.blocks[rows] -= by_group @ by_group.mT

    def _flush_rows(self) -> None:
        removed = self.removed.to(self.spread.dtype)
        for row, waiting in zip(self.spread, self.waiting, strict=True):
            row.addmm_(waiting.T, removed.T, alpha=-1)
        self.waiting = self.waiting[:, :0]

    def _drop_rows(self, remaining: Tensor) -> None:
        self.blocks, self.spread = self.blocks[:, self.alive], self.spread[:, :, remaining]

    def _refined_together(self, objective: Quadratic) -> list[slice]:
        return self._slices(3 * objective.fisher_term.max_rank)

    def _multiplication(self, objective: Quadratic, rows: slice) -> Callable[[Tensor], Tensor]:
        factors = objective.fisher_term.factors(rows, self.device)

        def multiply(weight: Tensor) -> Tensor:
            return weight @ self.shared + self.scale * (weight[:, None] @ factors.mT @ factors)[:, 0]

        return multiply

    def _solve(self, rows: slice, right: Tensor) -> Tensor:
        spread = self.spread[rows]
        inside = right[:, None].to(spread.dtype) @ spread.mT @ self.inner[rows]
        return right @ self.inverse - self.scale * (inside @ spread)[:, 0].double()


def _half_solve(matrix: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """L⁻¹ right and L, for matrix = L Lᵀ."""
    lower, info = torch.linalg.cholesky_ex(matrix)
    check_factored(info == 0)
    return torch.linalg.solve_triangular(lower, right.to(lower.dtype), upper=False), lower
