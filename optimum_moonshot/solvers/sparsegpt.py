"""SparseGPT (Frantar & Alistarh, arXiv 2301.00774) with row-specific Hessians (MOONSHOT, arXiv 2604.13287, Alg. 2).

The sweep runs over the columns from left to right, in comparison groups (all rows × some columns) that are split into
blocks. At the start of a comparison group (unstructured) or of every m columns (n:m), the weights with the smallest
w²/C_jj² are selected for removal. The error of a removed weight, err = w_j/C_jj, is compensated by the columns on its
right: w_j: -= err·C_j,j:. C_k is the upper Cholesky factor of F_k⁻¹; `sparsegpt_factors` has three ways to compute it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from ..objective.linalg import check_factored, escalate, inverse_factor
from ..objective.patterns import NM, Pattern, Unstructured, keep_alive, stacked
from ..objective.problem_size import ProblemSize
from ..objective.quadratic import Quadratic
from ..objective.row_slices import slices_within, split_range
from .base import PrunedWeight, Solver, finish, register_solver
from .hyperparameters import damping_option, hyperparameter
from .quantization import ColumnRounding, quantize
from .sparsegpt_factors import SLICE_BYTES, Factors, LowRankFactors, RowFactors, SharedFactor, Widths

# State of the rows that are pruned together. Rows can be split for n:m only: unstructured rows compete with each other.
STATE_BYTES = 4 * 2**30
# Below this many inputs per sample, F_k and its factor, O(d_in³ + N·d_in²) per row, cost less than Z and its state,
# O(N·d_in² + N²·d_in) (measured, N = 32 to 512: 1.6 to 2.2).
DENSE_BELOW = 1.7
# From this λ on, memory estimates assume that the states of rows are well conditioned, and so in float32.
SINGLE_LAM = 0.8


@register_solver("sparsegpt")
@dataclass(frozen=True)
class SparseGPT(Solver):
    """Comparison group: d_out × `block_size` columns. `damping` p adds μ = p·mean(diag G)/L_R(0) to F_k's diagonal."""

    damping: float = damping_option()
    block_size: int = hyperparameter(128, help="columns of a comparison group, which includes all rows", least=1)

    patterns: ClassVar[tuple[type, ...]] = (Unstructured, NM)
    grouped: ClassVar[bool] = True
    by_rows: ClassVar[bool] = True
    quantizes: ClassVar[bool] = True

    def solve(self, objective: Quadratic, pattern: Pattern) -> PrunedWeight:
        (weight, keep), damping = escalate(self.damping, lambda damping: self.attempt(objective, pattern, damping))
        return finish(objective, weight, keep, damping, self.damping)

    def attempt(self, objective: Quadratic, pattern: Pattern, damping: float) -> tuple[Tensor, Tensor]:
        """Prune at one damping.

        Args:
            objective: of a layer, or of some of its rows.
            pattern: unstructured or n:m; its `keep` compares the scores of these rows with those of the whole layer.
            damping: p, in (0, 1].

        Returns:
            The weight in float32 and `keep`, bool, both [rows, d_in].

        Raises:
            FactorizationError: a matrix is not positive definite at this damping.
        """
        ridge, widths = damping * objective.damping_unit, Widths.of(pattern, self.block_size)
        factor = None  # U, where all rows share G
        if objective.gram.ndim == 2:
            factor, ok = inverse_factor(objective.gram.to(torch.float64, copy=True).mul_(objective.scales.a), ridge)
            check_factored(ok, f"the quadratic of size {len(factor)}")
        weight, (count, d_in), grid = objective.weight.clone(), objective.weight.shape, pattern.grid
        keep = torch.empty_like(weight, dtype=torch.bool)
        rounding = None if grid is None else ColumnRounding(grid, weight)
        samples = objective.fisher_term.max_rank if objective.scales.b else 0
        dense = factor is None or d_in < DENSE_BELOW * samples
        dead, alive = None, objective.alive
        if isinstance(pattern, Unstructured) and pattern.exact and objective.gram.ndim == 2:
            # The exact count of a pattern includes all weights of inputs that are always 0, which may exceed its
            # sparsity in some comparison groups.
            zero = objective.gram.diagonal() == 0
            dead = zero if zero.any() and not zero.all() else None
        batches = [slice(0, count)]  # rows that are pruned together: all of them where they compete
        if isinstance(pattern, NM) and (dense or samples):
            state = 4 * d_in * samples + 8 * samples * samples + 8 * widths.compared * (samples + widths.block)
            batches = slices_within(slice(0, count), 4 * d_in * d_in if dense else state, STATE_BYTES)
        for rows in batches:
            factors: Factors
            if factor is None or dense:
                factors = RowFactors(objective, ridge, rows)
            elif samples:
                factors = LowRankFactors(objective, factor, rows, widths)
            else:
                factors = SharedFactor(factor)
            rounding_here, alive_here = rounding and rounding.part(rows), None if alive is None else alive[rows]
            importance = None if objective.importance is None else objective.importance[rows]
            arguments = pattern, widths, rounding_here, dead, alive_here, importance
            keep[rows] = prune_columns(weight[rows], factors, *arguments)
        if rounding is not None:
            weight = quantize(objective, weight, keep, rounding.grid, rounding.scale).float()
        return weight, keep

    def trials(self, objective: Quadratic, patterns: Sequence[Pattern]) -> list[Tensor]:
        # Where all rows share a factor, one sweep prunes a stacked copy of them per pattern.
        together = stacked(patterns)
        if together is None or objective.scales.b or objective.gram.ndim > 2:
            return super().trials(objective, patterns)
        alive = None if objective.alive is None else objective.alive.repeat(len(patterns), 1)
        importance = None if objective.importance is None else objective.importance.repeat(len(patterns), 1)
        weight = objective.weight.repeat(len(patterns), 1)
        copies = replace(objective, weight=weight, alive=alive, importance=importance)
        return list(self.solve(copies, together).weight.chunk(len(patterns)))

    def workspace(self, size: ProblemSize, pattern: Pattern) -> int:
        # The shared factor, and for every row either Z, P, R and Q or a matrix.
        rows, d_in, samples, widths = size.rows, size.inputs, size.max_rank, Widths.of(pattern, self.block_size)
        compared = min(widths.compared, d_in)
        shared = 0 if size.groups > 1 else 24 * d_in**2
        columns = 20 * rows * compared + 5 * size.weights
        if size.groups > 1 or d_in < DENSE_BELOW * samples:
            together = rows if not isinstance(pattern, NM) else min(rows, max(1, STATE_BYTES // (4 * d_in * d_in)))
            matrices = 4 * together * d_in**2 + 8 * d_in**2 + size.slices(24 * d_in**2, SLICE_BYTES)
            return max(shared, matrices) + columns
        if not samples:
            return max(shared + 4 * size.weights, 12 * d_in**2 + columns)
        item = 4 if size.lam >= SINGLE_LAM else 8
        row = (
            4 * d_in * samples
            + item * (samples**2 + compared * (samples + widths.block))
            + 8 * (samples + 2 * compared)
        )
        together = rows if not isinstance(pattern, NM) else min(rows, max(1, STATE_BYTES // row))
        slices = size.slices(8 * samples * (samples + widths.compared), SLICE_BYTES)
        state = together * row + 16 * d_in**2 + slices + columns
        return max(shared, state)


def prune_columns(
    weight: Tensor,
    factors: Factors,
    pattern: Pattern,
    widths: Widths,
    rounding: ColumnRounding | None = None,
    dead: Tensor | None = None,
    alive: Tensor | None = None,
    importance: Tensor | None = None,
) -> Tensor:
    """Prune rows [r, d_in] in place, by comparison groups of columns from left to right; returns `keep`.

    With `rounding`, the surviving weights are rounded as well (GPTQ, arXiv 2210.17323). The pattern's sparsity includes
    all weights at `dead` inputs, bool [d_in]; the others compete. Weights that are not `alive`, bool [r, d_in], are
    removed in any case; the errors that reach them are compensated like others. `importance`, [r, d_in], is that of the
    objective, for the competition between rows.
    """
    keep = torch.empty_like(weight, dtype=torch.bool)
    if dead is not None and isinstance(pattern, Unstructured):
        fraction = float(dead.double().mean())
        pattern = replace(pattern, sparsity=max(0.0, (pattern.sparsity - fraction) / (1 - fraction)))
    for columns in split_range(0, weight.shape[1], widths.compared):
        pivots = factors.begin_group(weight, columns)
        survivable = None if alive is None else alive[:, columns]
        if isinstance(pattern, Unstructured):
            select = partial(_keep_columns, pattern, start=columns.start, dead=dead)
            scores = (weight[:, columns] / pivots).square()
            scores = scores if importance is None else scores * importance[:, columns]
            keep[:, columns] = keep_alive(select, scores, survivable)
        if rounding is not None:
            unstructured = isinstance(pattern, Unstructured)
            expected = keep[:, columns]
            if not unstructured:
                expected = keep_alive(pattern.keep, (weight[:, columns] / pivots).square(), survivable)
            rounding.begin_group(weight, columns, expected, pivots)
        errors = torch.empty(len(weight), columns.stop - columns.start, device=weight.device)
        for block in split_range(columns.start, columns.stop, widths.block):
            factor = factors.begin_block(weight, columns, block, errors)
            inner = errors[:, block.start - columns.start : block.stop - columns.start]
            step = None if rounding is None else rounding.step(block)
            survivable = None if alive is None else alive[:, block]
            _prune_block(weight[:, block], factor, pattern, keep[:, block], inner, step, survivable)
        factors.end_group(weight, columns, errors)
    return keep


def _keep_columns(pattern: Unstructured, scores: Tensor, start: int, dead: Tensor | None) -> Tensor:
    """The mask of a comparison group, bool [r, columns], whose first column is `start`."""
    if dead is None:
        return pattern.keep(scores, before=start * len(scores))
    live, keep = ~dead[start : start + scores.shape[1]], torch.zeros_like(scores, dtype=torch.bool)
    if live.any():
        keep[:, live] = pattern.keep(scores[:, live], before=int((~dead[:start]).sum()) * len(scores))
    return keep


def _prune_block(
    weight: Tensor,
    factor: Tensor,
    pattern: Pattern,
    keep: Tensor,
    errors: Tensor,
    step: Tensor | None,
    alive: Tensor | None,
) -> None:
    """Prune a block column by column, and write its `errors` and (n:m) its `keep`.

    `weight`, `keep` and `errors` are [r, b], modified in place; `factor` is [r or 1, b, b]; `step`, [r, b], has the
    scales of survivors that are rounded.
    """
    pivots, grid = factor.diagonal(dim1=-2, dim2=-1), pattern.grid
    for column in range(weight.shape[1]):
        if isinstance(pattern, NM) and column % pattern.m == 0:
            group = slice(column, column + pattern.m)
            scores = (weight[:, group] / pivots[:, group]).square()
            keep[:, group] = keep_alive(pattern.keep, scores, None if alive is None else alive[:, group])
        lost = weight[:, column]
        if grid is not None and step is not None:
            rounded = grid.values(grid.codes(lost, step[:, column]), step[:, column]).float()
            lost = lost - rounded.masked_fill_(~keep[:, column], 0)
            errors[:, column] = lost / pivots[:, column]
        else:
            errors[:, column] = (lost / pivots[:, column]).masked_fill_(keep[:, column], 0)
        weight[:, column:] -= errors[:, column, None] * factor[:, column, column:]
