"""The Cholesky factors C_k of F_k⁻¹ that `sparsegpt` sweeps over: shared, in low-rank form, or as matrices.

C_k is upper triangular with ``F_k⁻¹ = C_kᵀ C_k``. The sweep reads its diagonal in a whole comparison group of columns,
but all entries only in small diagonal blocks, so it need not exist as a matrix:

* `SharedFactor`: λ = 1, one factor U for all rows;
* `LowRankFactors`: with ``S₀ = aG + μI = (Uᵀ U)⁻¹`` and the whitened gradients ``Z = √b·U·A_k``,
  ``F_k⁻¹ = Uᵀ (I + Z Zᵀ)⁻¹ U``. So C_k = R_k U for the upper factor R_k of (I + Z Zᵀ)⁻¹, whose blocks are computed from
  a state of N×N + N numbers per row, P = (I + Zᵀ Z)⁻¹ and s;
* `RowFactors`: C_k itself, [d_in, d_in] per row: cheaper where N is not well below d_in, and for grouped convolutions,
  whose rows share no matrix and have few inputs.

All three are exact. N is the rank of the Fisher term of a row: the number of samples, at most d_in.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..objective.linalg import check_factored, inverse_factor, parallel_map
from ..objective.patterns import NM, Pattern
from ..objective.quadratic import Quadratic
from ..objective.row_slices import slices_within, split_range

# Columns in a block: errors spread to later columns once per block, by matrix products. C_k is needed as a matrix only
# on diagonal blocks of this size.
STEP = 32
# Intermediates of a slice of rows: small enough for the caches of a CPU, large enough to occupy a GPU.
SLICE_BYTES = 4 * 2**20
GPU_SLICE_BYTES = 256 * 2**20
# Largest bound on the condition number of a row's state for which float32 suffices: errors stay below about 1e-5.
SINGLE_CONDITION = 256.0


class Widths(NamedTuple):
    """Numbers of columns in a comparison group and in a block of it; multiples of m for n:m."""

    compared: int
    block: int

    @classmethod
    def of(cls, pattern: Pattern, block_size: int) -> "Widths":
        """The widths for a pattern, where a comparison group may have `block_size` columns."""
        m = pattern.m if isinstance(pattern, NM) else 1
        compared, block = (max(1, size // m) * m for size in (block_size, STEP))
        return cls(compared, min(compared, block))


class Factors(Protocol):
    """The factors C_k of some rows, read from left to right by comparison groups of columns and their blocks.

    All methods update the weights `weight`, [r, d_in] in float32, in place, such that most of the work is matrix
    products. `errors`, [r, columns], are those of a comparison group, final in the blocks before the current one.
    """

    def begin_group(self, weight: Tensor, columns: slice) -> Tensor:
        """Apply the errors of earlier groups to the weights of this one; returns its C_jj, [r or 1, columns]."""

    def begin_block(self, weight: Tensor, columns: slice, block: slice, errors: Tensor) -> Tensor:
        """Apply the errors of the group's earlier blocks to the weights of this block, columns of the matrix.

        Returns:
            C_k[block, block], [r or 1, block, block].
        """

    def end_group(self, weight: Tensor, columns: slice, errors: Tensor) -> None:
        """Apply the errors of the group to all columns on its right, or record them in the state.

        Raises:
            FactorizationError: after the last columns, if a factor does not exist.
        """


class SharedFactor:
    """λ = 1: C_k = U for every row; [d_in, d_in], stored in float32."""

    def __init__(self, factor: Tensor):
        self.factor = factor.float()

    def begin_group(self, weight: Tensor, columns: slice) -> Tensor:
        return self.factor.diagonal()[None, columns]

    def begin_block(self, weight: Tensor, columns: slice, block: slice, errors: Tensor) -> Tensor:
        before = slice(columns.start, block.start)
        weight[:, block].addmm_(errors[:, : block.start - columns.start], self.factor[before, block], alpha=-1)
        return self.factor[None, block, block]

    def end_group(self, weight: Tensor, columns: slice, errors: Tensor) -> None:
        weight[:, columns.stop :].addmm_(errors, self.factor[columns, columns.stop :], alpha=-1)


class RowFactors:
    """C_k as matrices, [r, d_in, d_in], factored in float64, with `ridge` on the diagonal, and stored in float32."""

    def __init__(self, objective: Quadratic, ridge: float, rows: slice):
        device, d_in = objective.weight.device, objective.weight.shape[1]
        self.factor = torch.empty(rows.stop - rows.start, d_in, d_in, device=device)
        for part in _slices(objective, rows, 4 * 8 * d_in * d_in):  # up to four float64 matrices per row
            hessians = objective.row_hessians(part)
            hessians.diagonal(dim1=-2, dim2=-1).add_(ridge)
            factor, ok = inverse_factor(hessians)
            check_factored(ok)
            self.factor[part.start - rows.start : part.stop - rows.start] = factor

    def begin_group(self, weight: Tensor, columns: slice) -> Tensor:
        return self.factor.diagonal(dim1=1, dim2=2)[:, columns]

    def begin_block(self, weight: Tensor, columns: slice, block: slice, errors: Tensor) -> Tensor:
        before = slice(columns.start, block.start)
        done = errors[:, None, : block.start - columns.start]
        weight[:, block] -= (done @ self.factor[:, before, block]).squeeze(1)
        return self.factor[:, block, block]

    def end_group(self, weight: Tensor, columns: slice, errors: Tensor) -> None:
        weight[:, columns.stop :] -= (errors[:, None] @ self.factor[:, columns, columns.stop :]).squeeze(1)


class LowRankFactors:
    """C_k = R_k U from P [r, N, N] and s [r, N], with Z [r, d_in, N] in float32.

    P does not depend on the weights, so it advances over all blocks b of a comparison group at once, before the group's
    mask is chosen, which needs all its C_jj:

        E = I - Z_b P Z_bᵀ = Rᵀ R,   Q = R⁻ᵀ Z_b P,   P += Qᵀ Q

    where R is the diagonal block of R_k. The weights depend on s: y = -Z_b s at the start of a block, then y -= err R
    and s -= err Q with the block's errors. They change by w += y U, one product with a matrix that all rows share.

    The cancellation in E grows with the condition number of I + ZᵀZ, whose smallest eigenvalue is at least 1 and whose
    largest is bounded by the Frobenius norm. Slices of rows below `SINGLE_CONDITION` therefore store P, R and Q in
    float32 (at λ = 0.9, trained layers have conditions of 2 to 60), the others, mostly at small λ, in float64. The sums
    s and y over all columns are always in float64.

    `factor` is U with ``(a·G + μI)⁻¹ = Uᵀ U``, [d_in, d_in] in float64.
    """

    def __init__(self, objective: Quadratic, factor: Tensor, rows: slice, widths: Widths):
        fisher, device = objective.fisher_term.part(rows), factor.device
        samples = fisher.max_rank
        # Most products with U have float32 results, for which its float32 copy suffices.
        self.factor, self.single, self.widths = factor, factor.float(), widths
        self.whitened = torch.empty(fisher.count, fisher.size, samples, device=device)  # Z
        self.spread = torch.zeros(fisher.count, 1, samples, dtype=torch.float64, device=device)  # s
        # Checked once, at the end: a check per block would synchronise with the GPU each time.
        self.failed = torch.zeros(fisher.count, dtype=torch.int32, device=device)
        # Z = √b·U·A_k by column ranges: U is triangular, so each range skips the inputs on its left.
        cuts, scale = split_range(0, fisher.size, widths.compared), objective.scales.b**0.5
        ranges = [(scale * factor[columns, columns.start :]).float() for columns in cuts]

        def whiten(rows: slice) -> None:
            vectors = fisher.factors(rows, device, torch.float32).flatten(0, 1)
            for columns, upper in zip(cuts, ranges, strict=True):
                product = upper @ vectors[:, columns.start :].mT
                self.whitened[rows, columns] = product.view(len(upper), -1, samples).transpose(0, 1)

        all_rows = slice(0, fisher.count)
        parallel_map(whiten, _slices(objective, all_rows, 4 * samples * fisher.size), device)
        ranges.clear()  # half of U, freed before the states are allocated
        self.parts = _slices(objective, all_rows, 8 * samples * (samples + widths.compared))
        self.states = parallel_map(self._invert, self.parts, device)  # P
        # R and Q of one comparison group, reused by all.
        self.uppers = [state.new_empty(len(state), widths.compared, widths.block) for state in self.states]
        self.carries = [state.new_empty(len(state), widths.compared, samples) for state in self.states]

    def _invert(self, part: slice) -> Tensor:
        """P = (I + ZᵀZ)⁻¹ of a slice of rows, in the precision that its condition number requires."""
        count, d_in, samples = self.whitened[part].shape
        for dtype in (torch.float32, torch.float64):
            total = torch.eye(samples, dtype=dtype, device=self.whitened.device).repeat(count, 1, 1)
            for columns in split_range(0, d_in, 4 * samples):  # bounds the float64 copy to four times the result
                z = self.whitened[part, columns].to(dtype)
                total.baddbmm_(z.mT, z)
            if total.norm(dim=(1, 2)).amax() < SINGLE_CONDITION:  # False for NaN
                break
        # Symmetric: the transpose is the same matrix in LAPACK's column-major order, and so needs no transposing copy.
        upper, info = torch.linalg.cholesky_ex(total.mT, upper=True)
        self.failed[part] |= info
        return torch.cholesky_inverse(upper, upper=True)

    def begin_group(self, weight: Tensor, columns: slice) -> Tensor:
        count, width = len(weight), columns.stop - columns.start
        upper = self.factor[columns, columns]
        self.pull = weight.new_empty(count, 1, width, dtype=torch.float64)  # y
        pivots = weight.new_empty(count, width)

        def advance(index: int) -> None:
            part, state, carries = self.parts[index], self.states[index], self.carries[index]
            z = self.whitened[part, columns].to(state.dtype)
            self.pull[part] = -(self.spread[part].to(z.dtype) @ z.mT)
            for block in split_range(0, width, self.widths.block):
                carry = z[:, block] @ state
                remainder = torch.bmm(carry, z[:, block].mT).neg_()
                remainder.diagonal(dim1=1, dim2=2).add_(1)  # E
                lower, info = torch.linalg.cholesky_ex(remainder.mT)
                self.failed[part] |= info
                # `carry` is contiguous: for another layout, torch would copy it several times.
                torch.linalg.solve_triangular(lower, carry, upper=False, out=carry)
                state.baddbmm_(carry.mT, carry)
                carries[:, block] = carry
                self.uppers[index][:, block, : lower.shape[-1]] = lower.mT
                pivots[part, block] = lower.diagonal(dim1=1, dim2=2) * upper.diagonal()[block]

        parallel_map(advance, range(len(self.parts)), weight.device)
        # The changes of y and s by the errors in this group.
        self.pull_change, self.spread_change = torch.zeros_like(self.pull), torch.zeros_like(self.spread)
        weight[:, columns] += (self.pull @ upper).squeeze(1).float()
        return pivots

    def begin_block(self, weight: Tensor, columns: slice, block: slice, errors: Tensor) -> Tensor:
        inner = slice(block.start - columns.start, block.stop - columns.start)
        if inner.start:
            self._absorb(slice(inner.start - self.widths.block, inner.start), errors)
            for part, state in zip(self.parts, self.states, strict=True):
                spread = self.spread_change[part].to(state.dtype)
                self.pull_change[part, :, inner] = -(spread @ self.whitened[part, block].to(state.dtype).mT)
            upper = self.factor[columns.start : block.stop, block]
            weight[:, block] += (self.pull_change[:, 0, : inner.stop] @ upper).float()
        corner = self.single[block, block]
        return torch.cat([uppers[:, inner, : len(corner)].float() @ corner for uppers in self.uppers])

    def _absorb(self, inner: slice, errors: Tensor) -> None:
        """Add the errors of a block, columns `inner` of the group, to the changes of y and s."""
        errors = errors[:, None, inner]
        for part, uppers, carries in zip(self.parts, self.uppers, self.carries, strict=True):
            error = errors[part].to(carries.dtype)
            self.pull_change[part, :, inner] -= error @ uppers[:, inner, : error.shape[-1]]
            self.spread_change[part] -= error @ carries[:, inner]

    def end_group(self, weight: Tensor, columns: slice, errors: Tensor) -> None:
        self._absorb(split_range(0, errors.shape[1], self.widths.block)[-1], errors)
        self.spread += self.spread_change
        weight[:, columns.stop :].addmm_(
            (self.pull + self.pull_change).squeeze(1).float(), self.single[columns, columns.stop :]
        )
        if columns.stop == weight.shape[1]:
            check_factored(self.failed == 0)


def _slices(objective: Quadratic, rows: slice, bytes_per_row: int) -> list[slice]:
    """Rows in slices whose intermediates fit `SLICE_BYTES` or `GPU_SLICE_BYTES`."""
    most = SLICE_BYTES if objective.weight.device.type == "cpu" else GPU_SLICE_BYTES
    return slices_within(rows, bytes_per_row, most)
