"""OSSCAR (Meng et al., arXiv 2403.12983) with row-specific Hessians: whole input columns go, the same for all rows.

Greedy: remove the group g of columns with the least ``Σ_k w_kgᵀ ([F_k⁻¹]_gg)⁻¹ w_kg`` and update all rows; at the end
the survivors are the quadratic's minimiser, ``w_S = ŵ_S + F_SS⁻¹ F_SP ŵ_P``. With ``S₀ = aG + μI`` and J = S₀⁻¹,

    F_k⁻¹ = J - b P_k M_k⁻¹ P_kᵀ        P_k = J A_k,   M_k = I + b A_kᵀ J A_k

on what survives, so that no row needs a matrix of d_in². Removing g with ``u = J_:g L⁻ᵀ`` and ``q_k = L⁻¹ P_k,g:``,
where ``L Lᵀ = J_gg``, takes u uᵀ off J, u q_k off P_k and b q_kᵀ q_k off M_k. The first two wait as U and Q_k, and
follow in one product every `WAITING` columns. What is left of a removal is one reading of P_k, which therefore lies in
memory as its transpose: x P_kᵀ for a few rows x is several times faster than P_k xᵀ.

Of a mixture, whole experts go; subsets.py has the search.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..objective.linalg import check_factored
from ..objective.patterns import Experts, Pattern, Structured
from ..objective.problem_size import ProblemSize, Work
from ..objective.quadratic import Quadratic
from ..objective.removal import Removal
from ..objective.row_slices import row_slices
from .base import PrunedWeight, Solver, damped, register_solver
from .hyperparameters import damping_option, hyperparameter
from .sparsegpt import SINGLE_LAM
from .subsets import best_subset, chosen

# Columns whose removal waits, and the share of dead ones that is worth a copy without them.
WAITING = 64
DEAD = 0.25
# Largest condition number of an M_k, by its bound, that takes its row's state in float32.
SINGLE_CONDITION = 256.0
# The survivors solve their equations up to this share of the right-hand side.
RESIDUAL = 1e-6


@register_solver("osscar")
@dataclass(frozen=True)
class OSSCAR(Solver):
    """Comparison group: the layer's column groups. `damping` p adds μ = p·mean(diag G)/L_R(0) to F_k's diagonal.

    Of experts, all choices are tried where there are at most `exact`; damping has no effect on them.
    """

    damping: float = damping_option()
    exact: int = hyperparameter(5000, help="all choices of experts are tried where there are at most so many", least=0)

    patterns: ClassVar[tuple[type, ...]] = (Structured, Experts)

    def solve(self, objective: Quadratic | Removal, pattern: Structured | Experts) -> PrunedWeight:
        """The pruned weight at the smallest damping, of `damping` times a power of ten, at which all factors exist.

        Args:
            objective: of the whole layer; of experts a `Removal`.
            pattern: how many columns go together, and the share of them to remove; or which share of experts.

        Raises:
            FactorizationError: none up to 1 sufficed.
        """
        if isinstance(pattern, Experts):
            assert isinstance(objective, Removal)
            return chosen(objective, best_subset(objective, pattern, self.exact))
        assert isinstance(objective, Quadratic)

        def attempt(ridge: float) -> tuple[Tensor, Tensor]:
            weight, groups = remove_columns(objective, pattern, ridge)
            return weight, pattern.columns(groups).expand_as(weight).clone()

        return damped(objective, self.damping, attempt)

    def work(self, size: ProblemSize, pattern: Pattern) -> Work:
        """As `Solver.work`: the shared inverse; of every row P_k, in both precisions for a time, and M_k.

        Args:
            size, pattern: as said there.
        """
        rows, d_in, rank = size.rows, size.inputs, size.rank
        shared, gone = 18 * d_in**2 + 50 * size.weights, max(1.0, pattern.sparsity * d_in)
        if not rank:
            return Work(shared, d_in**3 + gone * size.weights)
        single = size.lam >= SINGLE_LAM and 2 * rank <= d_in
        spread, inner = (4 if single else 8) * rank * size.weights, 8 * rows * rank**2
        state = spread + inner + size.slices(24 * rank * d_in) * 2 // 3 + (0 if single else spread // 2)
        operations = size.weights * rank * (d_in + 4 * gone) + gone * rows * rank**2
        return Work(shared + max(state, spread + 3 * inner), d_in**3 + operations)


def remove_columns(objective: Quadratic, pattern: Structured, ridge: float) -> tuple[Tensor, Tensor]:
    """Remove column groups one by one, each time the one that costs least.

    Args:
        objective: of the whole layer.
        pattern: how many columns a group has, and the share of groups to remove.
        ridge: what is added to the diagonal of every F_k.

    Returns:
        The pruned weight [d_out, d_in], and which column groups survive, bool [d_in / group].

    Raises:
        FactorizationError: a matrix is not positive definite with `ridge` on its diagonal.
    """
    support = Support(objective, pattern.group, ridge)
    for _ in range(round(pattern.sparsity * objective.weight.shape[1] / pattern.group)):
        support.remove(support.cheapest())
    return support.minimise(objective)


class Support:
    """F_k⁻¹ on the columns that survive, and the weights there.

    Columns stay in place until a quarter is dead; `groups` says which ones are left. The state of the rows is in
    float32, unless the condition of an M_k asks for more.

    Args:
        objective: of the whole layer.
        group: columns that go together, a divisor of d_in.
        ridge: what is added to the diagonal of every F_k.

    Raises:
        FactorizationError: a matrix is not positive definite with it.
    """

    def __init__(self, objective: Quadratic, group: int, ridge: float):
        self.scale, self.ridge, self.group = objective.scales.b, ridge, group
        self.device = objective.weight.device
        shared = objective.scales.a * objective.gram.double()
        shared.diagonal().add_(ridge)
        lower, info = torch.linalg.cholesky_ex(shared)
        check_factored(info == 0, f"the quadratic of size {len(shared)}")
        self.shared, self.inverse = shared, torch.cholesky_inverse(lower)  # S₀, and J as of the last flush
        self.groups = torch.arange(len(shared) // group, device=self.device)
        self.alive = torch.ones_like(self.groups, dtype=torch.bool)
        self.removed = self.inverse.new_empty(len(shared), 0)  # U
        self.weight = objective.weight.double()
        if self.scale:
            self._start_rows(objective)
        blocks = torch.stack([self.inverse[some, some] for some in map(self._columns, range(len(self.groups)))])
        self.blocks = blocks[None]  # [F_k⁻¹]_gg, [rows or 1, groups, group, group]
        if self.scale:
            self.blocks = blocks.to(self.spread.dtype).repeat(len(self.weight), 1, 1, 1)
            for rows in self._slices(2 * self.spread.shape[1]):
                self.blocks[rows] -= self.scale * self._low_rank_blocks(rows)

    def _low_rank_blocks(self, rows: slice) -> Tensor:
        """The diagonal blocks of P_k M_k⁻¹ P_kᵀ, [r, groups, group, group]."""
        spread = self.spread[rows]
        solved = self.inner[rows] @ spread
        if self.group == 1:
            return (solved * spread).sum(1)[:, :, None, None]
        solved, spread = (x.mT.unflatten(1, (-1, self.group)) for x in (solved, spread))
        return solved @ spread.mT

    def _start_rows(self, objective: Quadratic) -> None:
        """P_kᵀ [rows, N, d_in] and M_k⁻¹ [rows, N, N]."""
        fisher, (count, d_in) = objective.known_fisher, self.weight.shape
        samples = fisher.rank
        self.spread = torch.empty(count, samples, d_in, device=self.device)
        inner = torch.empty(len(self.weight), samples, samples, dtype=torch.float64, device=self.device)
        for rows in self._slices(3 * samples):
            factors = fisher.factors(rows, self.device)
            spread = factors @ self.inverse
            self.spread[rows] = spread
            inner[rows] = self.scale * spread @ factors.mT
        inner.diagonal(dim1=1, dim2=2).add_(1)
        if inner.norm(dim=(1, 2)).amax() >= SINGLE_CONDITION:
            self.spread = self.spread.double()
            for rows in self._slices(3 * samples):
                self.spread[rows] = fisher.factors(rows, self.device) @ self.inverse
        lower, info = torch.linalg.cholesky_ex(inner)
        check_factored(info == 0)
        self.inner = torch.cholesky_inverse(lower).to(self.spread.dtype)
        self.waiting = self.spread.new_empty(len(self.spread), 0, samples)  # Q_k

    def _slices(self, numbers: int) -> list[slice]:
        """Rows whose intermediates, of so many numbers per input, pass together."""
        return row_slices(slice(0, len(self.weight)), 8 * self.weight.shape[1] * numbers, self.device)

    def _columns(self, group: int) -> slice:
        return slice(group * self.group, (group + 1) * self.group)

    def cheapest(self) -> int:
        """The place of the group whose removal costs least, the first of equals."""
        weight = self.weight.unflatten(1, (-1, self.group))
        if self.group == 1:
            scores = (weight.square() / self.blocks[..., 0]).sum((0, 2))
        else:
            scores = torch.zeros(len(self.groups), dtype=torch.float64, device=self.device)
            for rows in self._slices(2 * self.group):
                blocks = self.blocks[rows if len(self.blocks) > 1 else slice(None)].double()
                half, _ = _half_solve(blocks, weight[rows][..., None])
                scores += half.square().sum((0, 2, 3))
        return int(scores.masked_fill(~self.alive, torch.inf).argmin())

    def remove(self, group: int) -> None:
        """Remove the group of columns at a place, from every row."""
        some = self._columns(group)
        column = self.inverse[:, some] - self.removed @ self.removed[some].T  # J_:g
        half, lower = _half_solve(column[some], column.T)  # uᵀ, L
        if not self.scale:
            self._update(slice(None), column.T[None], some)
        else:
            self.waiting = torch.cat([self.waiting, self._take_off(column.T, lower, some)], 1)
        self.removed = torch.cat([self.removed, half.T], 1)
        self.alive[group] = False
        self.weight[:, some] = 0
        self.blocks[:, group] = torch.eye(self.group, dtype=self.blocks.dtype, device=self.device)
        if self.removed.shape[1] >= WAITING:
            self._flush()

    def _take_off(self, column: Tensor, lower: Tensor, some: slice) -> Tensor:
        """Bring M_k⁻¹, weights and blocks of all rows up to date, and return q_k, [rows, group, N].

        `column` is J_g: [group, d] and `lower` its factor L.
        """
        kind = self.spread.dtype
        column, lower, removed = column.to(kind), lower.to(kind), self.removed.to(kind)
        taken = self.spread.new_empty(len(self.weight), self.group, self.spread.shape[1])
        for rows in self._slices(4 * self.group):
            spread, waiting, inner = self.spread[rows], self.waiting[rows], self.inner[rows]
            now = spread[:, :, some].mT - removed[some] @ waiting
            q = torch.linalg.solve_triangular(lower.expand(len(now), -1, -1), now, upper=False)
            solved = q @ inner  # q M⁻¹
            reach = solved @ spread - solved @ waiting.mT @ removed.T
            self._update(rows, column - self.scale * lower @ reach, some)
            rest = torch.eye(self.group, dtype=kind, device=self.device) - self.scale * q @ solved.mT
            half, _ = _half_solve(rest, solved)
            inner.baddbmm_(half.mT, half, alpha=self.scale)
            taken[rows] = q
        return taken

    def _update(self, rows: slice, columns: Tensor, some: slice) -> None:
        """Weights and blocks of some rows after the removal of `some`, the rows [F_k⁻¹]_g: are [rows or 1, g, d]."""
        half, lower = _half_solve(columns[:, :, some], columns)
        weight = self.weight[rows]
        error = torch.linalg.solve_triangular(lower.to(weight.dtype), weight[:, some, None], upper=False)
        self.weight[rows] = weight - (half.mT.to(weight.dtype) @ error)[:, :, 0]
        by_group = half.mT.unflatten(1, (-1, self.group))
        self.blocks[rows] -= by_group @ by_group.mT

    def _flush(self) -> None:
        """Bring J and P_k up to date, without the dead columns once they are worth a copy."""
        self.inverse -= self.removed @ self.removed.T
        if self.scale:
            removed = self.removed.to(self.spread.dtype)
            for row, waiting in zip(self.spread, self.waiting, strict=True):
                row.addmm_(waiting.T, removed.T, alpha=-1)
            self.waiting = self.waiting[:, :0]
        self.removed = self.removed[:, :0]
        if self.alive.sum() <= (1 - DEAD) * len(self.alive):
            self._drop()

    def _drop(self) -> None:
        kept = self.alive.repeat_interleave(self.group).nonzero()[:, 0]
        self.inverse = self.inverse[kept[:, None], kept]
        self.removed, self.weight = self.removed[kept], self.weight[:, kept]
        self.blocks = self.blocks[:, self.alive]
        if self.scale:
            self.spread = self.spread[:, :, kept]
        self.groups, self.alive = self.groups[self.alive], self.alive[self.alive]

    def minimise(self, objective: Quadratic) -> tuple[Tensor, Tensor]:
        """The minimiser on what survives, [d_out, d_in] in float32, and the groups that do, bool [all groups].

        The state is the inverse of F_SS up to rounding: three rounds of refinement, with residuals from the statistics
        themselves in float64, make the solution exact.

        Raises:
            FactorizationError: it is not, so rounding has spoilt the state.
        """
        self._flush()
        self._drop()
        dense = objective.weight.double()
        groups = torch.zeros(dense.shape[1] // self.group, dtype=torch.bool, device=self.device)
        groups[self.groups] = True
        kept = groups.repeat_interleave(self.group)
        weight = torch.zeros_like(dense)
        if groups.all() or not groups.any():
            return dense.mul_(kept).float(), groups
        for rows in self._slices(3 * objective.known_fisher.rank if self.scale else 3):
            factors = objective.known_fisher.factors(rows, self.device) if self.scale else None
            multiply = lambda w, factors=factors: self._multiply(w, factors)  # noqa: E731
            pull = multiply(dense[rows] * ~kept)[:, kept]
            change = torch.zeros_like(weight[rows])
            for _ in range(3):
                change[:, kept] += self._solve(rows, pull - multiply(change)[:, kept])
            left = (pull - multiply(change)[:, kept]).norm(dim=1)
            check_factored(left <= RESIDUAL * pull.norm(dim=1), "what the row's state stands for")
            weight[rows] = (dense[rows] + change) * kept
        return weight.float(), groups

    def _multiply(self, weight: Tensor, factors: Tensor | None) -> Tensor:
        """F_k w_k of some rows, [r, d_in]."""
        product = weight @ self.shared
        if factors is not None:
            product += self.scale * (weight[:, None] @ factors.mT @ factors)[:, 0]
        return product

    def _solve(self, rows: slice, right: Tensor) -> Tensor:
        """F_SS⁻¹ r of some rows, [r, survivors], up to the rounding errors of the state."""
        solution = right @ self.inverse
        if self.scale:
            spread = self.spread[rows]
            inside = right[:, None].to(spread.dtype) @ spread.mT @ self.inner[rows]
            solution -= self.scale * (inside @ spread)[:, 0].double()
        return solution


def _half_solve(matrix: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """L⁻¹ right, and L, for matrix = L Lᵀ."""
    lower, info = torch.linalg.cholesky_ex(matrix)
    check_factored(info == 0)
    return torch.linalg.solve_triangular(lower, right.to(lower.dtype), upper=False), lower
