"""SparseGPT (Frantar & Alistarh, arXiv 2301.00774) with row-specific Hessians (MOONSHOT, arXiv 2604.13287, Alg. 2).

Columns go left to right, in comparison groups of some columns and all rows, and column block by column block within.
At the start of a comparison group (unstructured) or of every m columns (n:m) the smallest w²/C_jj² are chosen; a pruned
weight's error err = w_j/C_jj is spread over the columns on its right, w_j: -= err·C_j,j:. C_k is the upper Cholesky
factor of F_k⁻¹. Three ways to have what this needs of it, all exact:

* `SharedFactor`: λ = 1, one factor for all rows;
* `LowRankFactors`: row-specific without a matrix of the rows' size. With S₀ = aG + μI = (Uᵀ U)⁻¹ and the whitened
  gradients Z = √b·U·A_k, C_k = R_k U for the upper factor R_k of (I + Z Zᵀ)⁻¹, which follows from a state of N×N + N
  numbers per row: P = (I + Zᵀ Z)⁻¹ and s;
* `RowFactors`: F_k itself, where N is not well below d_in and the matrix is the cheaper way, and in grouped
  convolutions, whose rows share no matrix and have few inputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from ..objective.linalg import check_factored, damped_inverse_factor, escalate, inverse_factor
from ..objective.parallel import parallel_map
from ..objective.patterns import NM, Pattern, Unstructured, stacked
from ..objective.problem_size import ProblemSize, Work
from ..objective.quadratic import Quadratic
from ..objective.row_slices import slices_within, split_range
from .base import PrunedWeight, Solver, finish, hyperparameter, register_solver
from .hyperparameters import damping_option

# Columns whose errors are settled together; the factors are needed as matrices on diagonal blocks of this size alone.
STEP = 32
# Intermediates of one slice of rows: on a CPU they stay in its cache, a GPU wants more rows at a time.
SLICE_BYTES = 4 * 2**20
GPU_SLICE_BYTES = 256 * 2**20
# State of the rows that are pruned together. Only n:m rows can be split: unstructured rows compete with each other.
STATE_BYTES = 4 * 2**30
# Largest condition number, by its bound, that the state of a row takes in float32: errors stay below about 1e-5.
SINGLE_CONDITION = 256.0
# From this λ on a plan takes most states of rows to be well conditioned.
SINGLE_LAM = 0.8
# Row-sized matrices are cheaper below this many inputs per sample (measured, N = 32 to 512: 1.6 to 2.2).
DENSE_BELOW = 1.7


@register_solver("sparsegpt")
@dataclass(frozen=True)
class SparseGPT(Solver):
    """Comparison group: d_out × `block_size` columns. `damping` p adds μ = p·mean(diag G)/L_R(0) to F_k's diagonal."""

    damping: float = damping_option()
    block_size: int = hyperparameter(128, help="columns pruned together: with all rows the comparison group", least=1)

    patterns: ClassVar[tuple[type, ...]] = (Unstructured, NM)
    grouped: ClassVar[bool] = True
    by_rows: ClassVar[bool] = True

    def solve(self, objective: Quadratic, pattern: Pattern) -> PrunedWeight:
        """The pruned weight at the smallest damping, of `damping` times a power of ten, at which all factors exist.

        Args:
            objective: of the whole layer.
            pattern: unstructured or n:m.

        Raises:
            FactorizationError: none up to 1 sufficed.
        """
        (weight, keep), damping = escalate(self.damping, lambda damping: self.attempt(objective, pattern, damping))
        return finish(objective, weight, keep, damping, self.damping)

    def attempt(self, objective: Quadratic, pattern: Pattern, damping: float) -> tuple[Tensor, Tensor]:
        """The pruned weight at one damping.

        Args:
            objective: of a layer, or of some of its rows.
            pattern: unstructured or n:m; its `keep` compares the scores of the objective's rows with those of all.
            damping: p, in (0, 1].

        Returns:
            The weight, [d_out, d_in] in float32, and `keep`, bool, of the objective's rows.

        Raises:
            FactorizationError: a matrix is not positive definite at this damping.
        """
        return self._sweep(objective, pattern, damping * objective.damping_unit)

    def trials(self, objective: Quadratic, patterns: Sequence[Pattern]) -> list[Tensor]:
        """As `Solver.trials`: where all rows share a factor, a copy of them for each pattern passes the columns once.

        Args:
            objective: of the whole layer.
            patterns: of one class.

        Raises:
            FactorizationError: as `solve`.
        """
        together = stacked(patterns)
        if together is None or objective.scales.b or objective.gram.ndim > 2:
            return super().trials(objective, patterns)
        copies = replace(objective, weight=objective.weight.repeat(len(patterns), 1))
        return list(self.solve(copies, together).weight.chunk(len(patterns)))

    def work(self, size: ProblemSize, pattern: Pattern) -> Work:
        """As `Solver.work`: the shared factor; of every row Z, P, R and Q, or a matrix.

        Args:
            size, pattern: as said there.
        """
        rows, d_in, rank, widths = size.rows, size.inputs, size.rank, Widths.of(pattern, self.block_size)
        compared = min(widths.compared, d_in)
        shared = 0 if size.groups > 1 else 24 * d_in**2
        columns = 20 * rows * compared + 5 * size.weights
        if size.groups > 1 or (rank and _dense_is_cheaper(rank, d_in)):
            together = rows if not isinstance(pattern, NM) else min(rows, max(1, STATE_BYTES // (4 * d_in * d_in)))
            matrices = 4 * together * d_in**2 + 8 * d_in**2 + size.slices(24 * d_in**2, SLICE_BYTES)
            return Work(max(shared, matrices) + columns, rows * d_in**2 * (d_in + rank))
        if not rank:
            return Work(max(shared + 4 * size.weights, 12 * d_in**2 + columns), 1.5 * d_in**3 + rows * d_in**2)
        item = 4 if size.lam >= SINGLE_LAM else 8
        row = 4 * d_in * rank + item * (rank**2 + compared * (rank + widths.block)) + 8 * (rank + 2 * compared)
        together = rows if not isinstance(pattern, NM) else min(rows, max(1, STATE_BYTES // row))
        slices = size.slices(8 * rank * (rank + widths.compared), SLICE_BYTES)
        state = together * row + 16 * d_in**2 + slices + columns
        return Work(max(shared, state), 1.5 * d_in**3 + rows * rank * d_in * (d_in + 4 * rank))

    def _sweep(self, objective: Quadratic, pattern: Pattern, ridge: float) -> tuple[Tensor, Tensor]:
        """Pruned weight and `keep`, with `ridge` on every diagonal."""
        factor = None
        if objective.gram.ndim == 2:  # all rows share it
            factor = damped_inverse_factor(
                objective.gram.to(torch.float64, copy=True).mul_(objective.scales.a), 1.0, ridge
            )
        weight = objective.weight.clone()
        keep = torch.empty_like(weight, dtype=torch.bool)
        widths = Widths.of(pattern, self.block_size)
        for rows in _row_batches(objective, pattern, widths):
            factors = _factors(objective, factor, ridge, rows, widths)
            keep[rows] = prune_columns(weight[rows], factors, pattern, widths)
        return weight, keep


class Widths(NamedTuple):
    """How many columns a comparison group has, and a column block inside it; multiples of m for n:m."""

    compared: int
    block: int

    @classmethod
    def of(cls, pattern: Pattern, block_size: int) -> "Widths":
        """Those of a run.

        Args:
            pattern: its m divides both widths.
            block_size: columns of a comparison group, brought down to a multiple of m, and at least to m.
        """
        m = pattern.m if isinstance(pattern, NM) else 1
        compared, block = (max(1, size // m) * m for size in (block_size, STEP))
        return cls(compared, min(compared, block))


class Factors(Protocol):
    """The Cholesky factors C_k of some rows, delivered by comparison groups of columns, and block by block within.

    Every method is given `weight`, all columns of these rows, [r, d_in] in float32, and `columns`, those of the
    comparison group.
    """

    def enter(self, weight: Tensor, columns: slice) -> Tensor:
        """Bring the columns' weights up to date with those before them, in place.

        Args:
            weight, columns: as said above.

        Returns:
            C_jj of the columns, [r or 1, columns].
        """

    def step(self, weight: Tensor, columns: slice, block: slice, errors: Tensor) -> Tensor:
        """Bring a block's weights up to date with the blocks before it among these columns, in place.

        Args:
            weight, columns: as said above.
            block: columns of the matrix, `widths.block` of them or what is left.
            errors: [r, columns], known for the blocks before.

        Returns:
            C_k[block, block], [r or 1, block, block].
        """

    def leave(self, weight: Tensor, columns: slice, errors: Tensor) -> None:
        """Spread the columns' errors over all on their right, in place (or in the state).

        Args:
            weight, columns: as said above.
            errors: [r, columns].

        Raises:
            FactorizationError: after the last columns, a factor that did not exist.
        """


def prune_columns(weight: Tensor, factors: Factors, pattern: Pattern, widths: Widths) -> Tensor:
    """Prune rows in place, one comparison group of columns after another.

    Args:
        weight: [r, d_in] in float32, changed here.
        factors: of these rows.
        pattern: unstructured or n:m.
        widths: of comparison groups and column blocks.

    Returns:
        keep, bool [r, d_in].
    """
    keep = torch.empty_like(weight, dtype=torch.bool)
    for columns in split_range(0, weight.shape[1], widths.compared):
        pivots = factors.enter(weight, columns)
        if isinstance(pattern, Unstructured):
            keep[:, columns] = pattern.keep((weight[:, columns] / pivots).square(), before=columns.start * len(weight))
        errors = torch.empty(len(weight), columns.stop - columns.start, device=weight.device)
        for block in split_range(columns.start, columns.stop, widths.block):
            factor = factors.step(weight, columns, block, errors)
            _prune_block(weight[:, block], factor, pattern, keep[:, block], errors[:, _within(columns, block)])
        factors.leave(weight, columns, errors)
    return keep


def _prune_block(weight: Tensor, factor: Tensor, pattern: Pattern, keep: Tensor, errors: Tensor) -> None:
    """Remove, column by column: `weight`, `errors` and (n:m) `keep` in place, [r, b]; `factor` [r or 1, b, b]."""
    pivots = factor.diagonal(dim1=-2, dim2=-1)
    for column in range(weight.shape[1]):
        if isinstance(pattern, NM) and column % pattern.m == 0:
            these = slice(column, column + pattern.m)
            keep[:, these] = pattern.keep((weight[:, these] / pivots[:, these]).square())
        errors[:, column] = (weight[:, column] / pivots[:, column]).masked_fill_(keep[:, column], 0)
        weight[:, column:] -= errors[:, column, None] * factor[:, column, column:]


class SharedFactor:
    """λ = 1: C_k = U for every row."""

    def __init__(self, factor: Tensor):
        self.factor = factor.float()

    def enter(self, weight: Tensor, columns: slice) -> Tensor:
        return self.factor.diagonal()[None, columns]

    def step(self, weight: Tensor, columns: slice, block: slice, errors: Tensor) -> Tensor:
        before = slice(columns.start, block.start)
        weight[:, block].addmm_(errors[:, _within(columns, before)], self.factor[before, block], alpha=-1)
        return self.factor[None, block, block]

    def leave(self, weight: Tensor, columns: slice, errors: Tensor) -> None:
        weight[:, columns.stop :].addmm_(errors, self.factor[columns, columns.stop :], alpha=-1)


class RowFactors:
    """C_k as matrices, [r, d_in, d_in] in float32: for few inputs.

    Args:
        objective: of the whole layer.
        ridge: what is added to the diagonal of every F_k.
        rows: r of the layer's.

    Raises:
        FactorizationError: a matrix is not positive definite with it.
    """

    def __init__(self, objective: Quadratic, ridge: float, rows: slice):
        device, d_in = objective.weight.device, objective.weight.shape[1]
        self.factor = torch.empty(rows.stop - rows.start, d_in, d_in, device=device)
        for part in _slices(rows, 4 * 8 * d_in * d_in, device):
            hessians = objective.row_hessians(part)
            hessians.diagonal(dim1=-2, dim2=-1).add_(ridge)
            factor, ok = inverse_factor(hessians)
            check_factored(ok)
            self.factor[part.start - rows.start : part.stop - rows.start] = factor

    def enter(self, weight: Tensor, columns: slice) -> Tensor:
        return self.factor.diagonal(dim1=1, dim2=2)[:, columns]

    def step(self, weight: Tensor, columns: slice, block: slice, errors: Tensor) -> Tensor:
        before = slice(columns.start, block.start)
        weight[:, block] -= (errors[:, None, _within(columns, before)] @ self.factor[:, before, block]).squeeze(1)
        return self.factor[:, block, block]

    def leave(self, weight: Tensor, columns: slice, errors: Tensor) -> None:
        weight[:, columns.stop :] -= (errors[:, None] @ self.factor[:, columns, columns.stop :]).squeeze(1)


class LowRankFactors:
    """C_k = R_k U from P [r, N, N] and s [r, N], with Z [r, d_in, N] in float32.

    P does not depend on the weights, so it passes a whole comparison group, block b by block, before any of its weights
    is chosen:

        E = I - Z_b P Z_bᵀ = Rᵀ R,   Q = R⁻ᵀ Z_b P,   P += Qᵀ Q

    where R is the diagonal block of R_k. The weights follow as y = -Z_b s, and after the block's errors y -= err R,
    s -= err Q: all that y does to them, w += y U, is a product that the rows share. Rows pass in slices.

    What E loses to cancellation grows with the condition of I + ZᵀZ, whose smallest eigenvalue is at least 1 and whose
    largest its Frobenius norm bounds. Slices below `SINGLE_CONDITION` therefore keep P, R and Q in float32 without loss
    (λ = 0.9 has conditions of 2 to 60 on trained layers), and the others, mostly of small λ, in float64.

    Args:
        objective: of the whole layer.
        factor: U with ``(a·G + μI)⁻¹ = Uᵀ U``, [d_in, d_in] in float64.
        rows: r of the layer's.
        widths: of comparison groups and column blocks.

    Raises:
        FactorizationError: (by the last `leave`) a state was not positive definite.
    """

    def __init__(self, objective: Quadratic, factor: Tensor, rows: slice, widths: Widths):
        device, samples, d_in = factor.device, objective.known_fisher.rank, len(factor)
        self.factor, self.single = factor, factor.float()
        self.count, self.widths = rows.stop - rows.start, widths
        self.parts = _slices(slice(0, self.count), 8 * samples * (samples + widths.compared), device)
        self.whitened = torch.empty(self.count, d_in, samples, device=device)  # Z
        self.spread = torch.zeros(self.count, 1, samples, dtype=torch.float64, device=device)  # s
        self.failed = torch.zeros(self.count, dtype=torch.int32, device=device)
        self._whiten(objective, rows)
        self.states = parallel_map(self._invert, self.parts, device)  # P
        self.uppers = [
            state.new_empty(len(state), widths.compared, widths.block) for state in self.states
        ]  # R of a comparison group
        self.carries = [
            state.new_empty(len(state), widths.compared, samples) for state in self.states
        ]  # Q of a comparison group

    def _whiten(self, objective: Quadratic, rows: slice) -> None:
        """Z = √b·U·A_k, some columns at a time: U is triangular, so that they need the inputs from them on."""
        fisher, device = objective.known_fisher.part(rows), self.factor.device
        samples, d_in = fisher.rank, fisher.size
        cuts = split_range(0, d_in, self.widths.compared)
        uppers = [(objective.scales.b**0.5 * self.factor[columns, columns.start :]).float() for columns in cuts]

        def whiten(part: slice) -> None:
            tail = fisher.factors(part, device, torch.float32).flatten(0, 1)
            for columns, upper in zip(cuts, uppers, strict=True):
                product = upper @ tail[:, columns.start :].mT
                self.whitened[part, columns] = product.view(len(upper), -1, samples).transpose(0, 1)

        parallel_map(whiten, _slices(slice(0, self.count), 4 * samples * d_in, device), device)

    def _invert(self, part: slice) -> Tensor:
        """P of a slice of rows, in the precision that its condition asks for."""
        total = self._information(part, torch.float32)
        if not total.norm(dim=(1, 2)).amax() < SINGLE_CONDITION:
            total = self._information(part, torch.float64)
        upper, info = torch.linalg.cholesky_ex(total.mT, upper=True)
        self.failed[part] |= info
        return torch.cholesky_inverse(upper, upper=True)

    def _information(self, part: slice, dtype: torch.dtype) -> Tensor:
        """I + ZᵀZ of a slice of rows."""
        count, d_in, samples = self.whitened[part].shape
        total = torch.eye(samples, dtype=dtype, device=self.whitened.device).repeat(count, 1, 1)
        for some in split_range(0, d_in, 4 * samples):
            z = self.whitened[part, some].to(dtype)
            total.baddbmm_(z.mT, z)
        return total

    def enter(self, weight: Tensor, columns: slice) -> Tensor:
        blocks = split_range(0, columns.stop - columns.start, self.widths.block)
        upper = self.factor[columns, columns]
        self.pull = weight.new_empty(self.count, 1, columns.stop - columns.start, dtype=torch.float64)  # y
        pivots = weight.new_empty(self.count, columns.stop - columns.start)

        def advance(index: int) -> None:
            part, state, uppers, carries = (
                self.parts[index],
                self.states[index],
                self.uppers[index],
                self.carries[index],
            )
            z = self.whitened[part, columns].to(state.dtype)
            self.pull[part] = -(self.spread[part].to(z.dtype) @ z.mT)
            for block in blocks:
                root = self._advance(part, state, z[:, block], carries[:, block])
                uppers[:, block, : root.shape[-1]] = root
                pivots[part, block] = root.diagonal(dim1=1, dim2=2) * upper.diagonal()[block]

        parallel_map(advance, range(len(self.parts)), weight.device)
        self.change, self.turn = (
            torch.zeros_like(self.pull),
            torch.zeros_like(self.spread),
        )  # of y and s, by these columns
        weight[:, columns] += (self.pull @ upper).squeeze(1).float()
        return pivots

    def _advance(self, part: slice, state: Tensor, z: Tensor, kept: Tensor) -> Tensor:
        """Take P of a slice of rows past a block, in place; Q goes to `kept`. Returns R, [rows, b, b]."""
        carry = z @ state
        remainder = torch.bmm(carry, z.mT).neg_()
        remainder.diagonal(dim1=1, dim2=2).add_(1)  # E
        lower, info = torch.linalg.cholesky_ex(remainder.mT)
        self.failed[part] |= info
        torch.linalg.solve_triangular(lower, carry, upper=False, out=carry)  # several copies, were it not contiguous
        state.baddbmm_(carry.mT, carry)
        kept.copy_(carry)
        return lower.mT

    def step(self, weight: Tensor, columns: slice, block: slice, errors: Tensor) -> Tensor:
        inner = _within(columns, block)
        width = inner.stop - inner.start
        if inner.start:
            self._absorb(slice(inner.start - self.widths.block, inner.start), errors)
            for part, state in zip(self.parts, self.states, strict=True):
                turn = self.turn[part].to(state.dtype)
                self.change[part, :, inner] = -(turn @ self.whitened[part, block].to(state.dtype).mT)
            upper = self.factor[columns.start : block.stop, block]
            weight[:, block] += (self.change[:, 0, : inner.stop] @ upper).float()
        corner = self.single[block, block]
        return torch.cat([uppers[:, inner, :width].float() @ corner for uppers in self.uppers])

    def _absorb(self, inner: slice, errors: Tensor) -> None:
        errors = errors[:, None, inner]
        for part, uppers, carries in zip(self.parts, self.uppers, self.carries, strict=True):
            error = errors[part].to(carries.dtype)
            self.change[part, :, inner] -= error @ uppers[:, inner, : error.shape[-1]]
            self.turn[part] -= error @ carries[:, inner]

    def leave(self, weight: Tensor, columns: slice, errors: Tensor) -> None:
        self._absorb(split_range(0, errors.shape[1], self.widths.block)[-1], errors)
        self.spread += self.turn
        weight[:, columns.stop :].addmm_(
            (self.pull + self.change).squeeze(1).float(), self.single[columns, columns.stop :]
        )
        if columns.stop == weight.shape[1]:
            check_factored(self.failed == 0)


def _factors(objective: Quadratic, factor: Tensor | None, ridge: float, rows: slice, widths: Widths) -> Factors:
    if _needs_matrices(objective):
        return RowFactors(objective, ridge, rows)
    assert factor is not None  # the rows share G
    if not objective.scales.b:
        return SharedFactor(factor)
    return LowRankFactors(objective, factor, rows, widths)


def _needs_matrices(objective: Quadratic) -> bool:
    if objective.gram.ndim == 3:  # the rows share nothing
        return True
    return bool(objective.scales.b) and _dense_is_cheaper(objective.known_fisher.rank, objective.weight.shape[1])


def _dense_is_cheaper(samples: int, d_in: int) -> bool:
    """Whether F_k and its factor, O(d_in³ + N·d_in²) per row, cost less than Z and its state, O(N·d_in² + N²·d_in).

    N factors of a row, no more than it has inputs: so they do wherever there are as many samples as that.
    """
    return d_in < DENSE_BELOW * samples


def _row_batches(objective: Quadratic, pattern: Pattern, widths: Widths) -> list[slice]:
    """Rows pruned together: all where they compete, else as many as `STATE_BYTES` hold."""
    count, d_in = objective.weight.shape
    if not isinstance(pattern, NM):
        return [slice(0, count)]
    if _needs_matrices(objective):
        row = 4 * d_in * d_in
    elif objective.scales.b:
        samples = objective.known_fisher.rank
        row = 4 * d_in * samples + 8 * samples * samples + 8 * widths.compared * (samples + widths.block)
    else:
        return [slice(0, count)]
    return slices_within(slice(0, count), row, STATE_BYTES)


def _slices(rows: slice, bytes_per_row: int, device: torch.device) -> list[slice]:
    """Rows whose intermediates pass together."""
    limit = SLICE_BYTES if device.type == "cpu" else GPU_SLICE_BYTES
    return slices_within(rows, bytes_per_row, limit)


def _within(columns: slice, some: slice) -> slice:
    """Some of the columns, counted from the first of them."""
    return slice(some.start - columns.start, some.stop - columns.start)
