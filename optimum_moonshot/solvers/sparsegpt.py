"""SparseGPT (Frantar & Alistarh, arXiv 2301.00774) with row-specific Hessians (MOONSHOT, arXiv 2604.13287, Alg. 2).

Columns go left to right in blocks. At the start of a block (unstructured) or of a group of m (n:m) the smallest
w²/C_jj² are chosen; a pruned weight's error err = w_j/C_jj is spread over the columns on its right, w_j: -= err·C_j,j:.
C_k is the upper Cholesky factor of F_k⁻¹. Three ways to have its block rows, all exact:

* `SharedFactor`: λ = 1, one factor for all rows;
* `LowRankFactors`: row-specific without a matrix of the rows' size. With S₀ = aG + μI = (Uᵀ U)⁻¹ and the whitened
  gradients Z = √b·U·A_k, C_k = R_k U for the upper factor R_k of (I + Z Zᵀ)⁻¹, and R_k's blocks come from a state of
  N×N + N numbers per row: P = (I + Zᵀ Z)⁻¹ and s;
* `RowFactors`: F_k itself, where N is not well below d_in and the matrix is the cheaper way.
"""

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from ..errors import FactorizationError
from ..linalg import MAX_DAMPING, damped_inverse_factor, inverse_factor
from ..objective import Quadratic
from ..patterns import NM, Pattern
from .base import PrunedWeight, finish, register_solver

# Float64 intermediates of one slice of rows; large enough for full-speed products, small against the gradients.
SLICE_BYTES = 4 * 2**20
# State of the rows that are pruned together. Only n:m rows can be split: unstructured rows compete with each other.
GROUP_BYTES = 4 * 2**30


@register_solver("sparsegpt")
@dataclass(frozen=True)
class SparseGPT:
    """Comparison group: d_out × `block_size` columns. `damping` p adds μ = p·mean(diag G)/L_R(0) to F_k's diagonal."""

    damping: float = 0.01
    block_size: int = 128

    objective: ClassVar[type] = Quadratic
    calibrated: ClassVar[bool] = True

    def solve(self, objective: Quadratic, pattern: Pattern) -> PrunedWeight:
        """The pruned weight at the smallest damping, of `damping` times a power of ten, at which all factors exist.

        Raises:
            FactorizationError: none up to 1 sufficed.
        """
        shared = objective.scales.a * objective.gram.double()
        damping, unit = self.damping, objective.damping_unit
        while True:
            factor, damping = damped_inverse_factor(shared, unit, damping)
            try:
                weight, keep = self._sweep(objective, pattern, factor, damping * unit)
                break
            except FactorizationError:
                if damping >= MAX_DAMPING:
                    raise
                damping = min(10 * damping, MAX_DAMPING)
        raised = () if damping == self.damping else (f"damping raised from {self.damping:g} to {damping:g}",)
        return finish(objective, weight, keep, damping, raised)

    def _sweep(self, objective: Quadratic, pattern: Pattern, factor: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
        weight = objective.weight.clone()
        keep = torch.empty_like(weight, dtype=torch.bool)
        block = self.block_size
        if isinstance(pattern, NM):
            block = max(1, block // pattern.m) * pattern.m
        for rows in _row_groups(objective, pattern, block):
            factors = _factors(objective, factor, ridge, rows, block)
            keep[rows] = prune_columns(weight[rows], factors, pattern, block)
        return weight, keep


class Factors(Protocol):
    """The Cholesky factors C_k of some rows, delivered block row by block row, left to right."""

    def enter(self, weight: Tensor, block: slice) -> Tensor:
        """Bring the block's weights up to date, in place, and return C_k[block, block]: [r or 1, B, B]."""

    def leave(self, weight: Tensor, block: slice, errors: Tensor) -> None:
        """Spread the block's errors [r, B] over the columns on its right, in place (or in the state)."""


def prune_columns(weight: Tensor, factors: Factors, pattern: Pattern, block_size: int) -> Tensor:
    """Prune `weight` [r, d_in] in place, block by block, and return `keep`."""
    keep = torch.empty_like(weight, dtype=torch.bool)
    for start in range(0, weight.shape[1], block_size):
        block = slice(start, min(start + block_size, weight.shape[1]))
        diagonal_block = factors.enter(weight, block)
        keep[:, block], errors = _prune_block(weight[:, block], diagonal_block, pattern)
        factors.leave(weight, block, errors)
    return keep


def _prune_block(weight: Tensor, factor: Tensor, pattern: Pattern) -> tuple[Tensor, Tensor]:
    """Choose and remove inside one block: `weight` [r, B] in place, `factor` [r or 1, B, B]. Returns keep, errors."""
    pivots = factor.diagonal(dim1=-2, dim2=-1)
    errors = torch.empty_like(weight)
    grouped = isinstance(pattern, NM)
    keep = torch.empty_like(weight, dtype=torch.bool) if grouped else pattern.keep((weight / pivots).square())
    for column in range(weight.shape[1]):
        if grouped and column % pattern.m == 0:
            group = slice(column, column + pattern.m)
            keep[:, group] = pattern.keep((weight[:, group] / pivots[:, group]).square())
        errors[:, column] = (weight[:, column] / pivots[:, column]).masked_fill_(keep[:, column], 0)
        weight[:, column:] -= errors[:, column, None] * factor[:, column, column:]
    return keep, errors


class SharedFactor:
    """λ = 1: C_k = U for every row."""

    def __init__(self, factor: Tensor):
        self.factor = factor.float()

    def enter(self, weight: Tensor, block: slice) -> Tensor:
        return self.factor[None, block, block]

    def leave(self, weight: Tensor, block: slice, errors: Tensor) -> None:
        weight[:, block.stop :].addmm_(errors, self.factor[block, block.stop :], alpha=-1)


class RowFactors:
    """C_k as matrices, [r, d_in, d_in] in float32: for few inputs."""

    def __init__(self, objective: Quadratic, ridge: float, rows: slice):
        device, d_in = objective.weight.device, objective.weight.shape[1]
        self.factor = torch.empty(rows.stop - rows.start, d_in, d_in, device=device)
        for part in _slices(rows, 4 * 8 * d_in * d_in):
            hessians = objective.rows(part, device)
            hessians.diagonal(dim1=-2, dim2=-1).add_(ridge)
            factor, ok = inverse_factor(hessians)
            _check(ok)
            self.factor[part.start - rows.start : part.stop - rows.start] = factor

    def enter(self, weight: Tensor, block: slice) -> Tensor:
        return self.factor[:, block, block]

    def leave(self, weight: Tensor, block: slice, errors: Tensor) -> None:
        weight[:, block.stop :] -= (errors[:, None] @ self.factor[:, block, block.stop :]).squeeze(1)


class LowRankFactors:
    """C_k = R_k U from P [r, N, N], s [r, N] in float64 and Zᵀ [r, N, d_in] in float32.

    The float64 state is needed: E's pivots fall to 4e-3 and far below on trained layers at small λ. Rows pass in slices,
    and every matrix is laid out as the next product or factorisation reads it, so that none is transposed in memory.
    """

    def __init__(self, objective: Quadratic, factor: Tensor, rows: slice, block_size: int):
        self.factor, self.single = factor, factor.float()
        self.count, samples = rows.stop - rows.start, len(objective.gradients)
        self.size = block_size
        self.parts = _slices(slice(0, self.count), 5 * 8 * max(samples, block_size) ** 2)
        self.whitened = self._whiten(objective, rows)
        identity = torch.eye(samples, dtype=torch.float64, device=factor.device)
        self.states = [identity.repeat(part.stop - part.start, 1, 1) for part in self.parts]  # P
        self.spread = torch.zeros(self.count, 1, samples, dtype=torch.float64, device=factor.device)  # s
        self.ok = torch.ones((), dtype=torch.bool, device=factor.device)
        for part, state in zip(self.parts, self.states, strict=True):
            for whitened in self.whitened:
                block = whitened[part].double()
                state.baddbmm_(block, block.mT)
            lower, info = torch.linalg.cholesky_ex(state.mT)
            self.ok &= (info == 0).all()
            state.copy_(torch.cholesky_inverse(lower))

    def _whiten(self, objective: Quadratic, rows: slice) -> list[Tensor]:
        """Zᵀ = √b·A_kᵀ·Uᵀ in column blocks, each [r, N, B]; U is triangular: a block needs the inputs from it on."""
        gradients = objective.gradients[:, rows]
        samples, count, d_in = gradients.shape
        blocks = [slice(start, min(start + self.size, d_in)) for start in range(0, d_in, self.size)]
        uppers = [(objective.scales.b**0.5 * self.factor[block, block.start :]).float() for block in blocks]
        whitened = [torch.empty(count, samples, len(upper), device=self.factor.device) for upper in uppers]
        for part in _slices(slice(0, count), 4 * samples * d_in):
            tail = gradients[:, part].to(self.factor.device, torch.float32).flatten(0, 1)
            for block, upper, out in zip(blocks, uppers, whitened, strict=True):
                product = tail[:, block.start :] @ upper.mT
                out[part] = product.view(samples, -1, len(upper)).transpose(0, 1)
        return whitened

    def enter(self, weight: Tensor, block: slice) -> Tensor:
        whitened, upper = self.whitened[block.start // self.size], self.factor[block, block]
        width = len(upper)
        self.block, self.pull = [], torch.empty(self.count, 1, width, dtype=torch.float64, device=weight.device)  # y
        diagonal_block = torch.empty(self.count, width, width, device=weight.device)
        for part, state in zip(self.parts, self.states, strict=True):
            z = whitened[part].double()
            product = state @ z  # (Z_b P)ᵀ
            remainder = torch.bmm(z.mT, product).neg_()
            remainder.diagonal(dim1=1, dim2=2).add_(1)  # E
            lower, info = torch.linalg.cholesky_ex(remainder.mT)
            self.ok &= (info == 0).all()
            carry = torch.linalg.solve_triangular(lower, product.mT, upper=False)  # Q
            self.pull[part] = -(self.spread[part] @ z)
            torch.matmul(lower.mT.float(), upper.float(), out=diagonal_block[part])
            self.block.append((lower, carry))
        weight[:, block] += (self.pull @ upper).squeeze(1).float()
        return diagonal_block

    def leave(self, weight: Tensor, block: slice, errors: Tensor) -> None:
        errors = errors.double()[:, None]
        for part, state, (lower, carry) in zip(self.parts, self.states, self.block, strict=True):
            self.pull[part] -= errors[part] @ lower.mT
            self.spread[part] -= errors[part] @ carry
            state.baddbmm_(carry.mT, carry)
        weight[:, block.stop :].addmm_(self.pull.squeeze(1).float(), self.single[block, block.stop :])
        if block.stop == weight.shape[1]:
            _check(self.ok)


def _factors(objective: Quadratic, factor: Tensor, ridge: float, rows: slice, block_size: int) -> Factors:
    if not objective.scales.b:
        return SharedFactor(factor)
    samples, d_in = len(objective.gradients), objective.weight.shape[1]
    if _dense_is_cheaper(samples, d_in, block_size):
        return RowFactors(objective, ridge, rows)
    return LowRankFactors(objective, factor, rows, block_size)


def _dense_is_cheaper(samples: int, d_in: int, block_size: int) -> bool:
    """Multiply-adds per weight, one in float64 counted as two: F_k with its factor, or Z with its state."""
    dense = 2 * (samples * d_in + d_in * d_in / 3) / d_in
    low_rank = samples / 2 + 2 * (3 * samples * samples + 1.5 * samples * block_size) / d_in
    return dense < low_rank


def _row_groups(objective: Quadratic, pattern: Pattern, block_size: int) -> list[slice]:
    """Rows pruned together: all where they compete, else as many as `GROUP_BYTES` hold."""
    everything = slice(0, len(objective.weight))
    if not isinstance(pattern, NM) or not objective.scales.b:
        return [everything]
    samples, d_in = len(objective.gradients), objective.weight.shape[1]
    width = max(samples, block_size)
    dense = _dense_is_cheaper(samples, d_in, block_size)
    return _slices(everything, 4 * d_in * (d_in if dense else samples) + 28 * width * width, GROUP_BYTES)


def _slices(rows: slice, bytes_per_row: int, limit: int = SLICE_BYTES) -> list[slice]:
    step = max(1, limit // bytes_per_row)
    return [slice(start, min(start + step, rows.stop)) for start in range(rows.start, rows.stop, step)]


def _check(ok: Tensor) -> None:
    if not ok.all():
        raise FactorizationError("a row's Hessian is not positive definite at this damping")
