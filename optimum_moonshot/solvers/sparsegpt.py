"""SparseGPT (Frantar & Alistarh, arXiv 2301.00774) with row-specific Hessians (MOONSHOT, arXiv 2604.13287, Alg. 2).

The sweep runs over the columns from left to right, in comparison groups (all rows × some columns) that are split into
blocks. At the start of a comparison group (unstructured) or of every m columns (n:m), the weights with the smallest
w²/C_jj² are selected for removal. The error of a removed weight, err = w_j/C_jj, is compensated by the columns on its
right: w_j: -= err·C_j,j:. C_k is the upper Cholesky factor of F_k⁻¹; `sparsegpt_factors` has three ways to compute it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from ..objective.linalg import damped_inverse_factor, escalate
from ..objective.patterns import NM, Pattern, Unstructured, stacked
from ..objective.problem_size import ProblemSize, Work
from ..objective.quadratic import Quadratic
from ..objective.row_slices import slices_within, split_range
from .base import PrunedWeight, Solver, finish, hyperparameter, register_solver
from .hyperparameters import damping_option
from .sparsegpt_factors import SLICE_BYTES, Factors, Widths, dense_is_cheaper, make_factors, needs_matrices, within

# State of the rows that are pruned together. Rows can be split for n:m only: unstructured rows compete with each other.
STATE_BYTES = 4 * 2**30
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

    def solve(self, objective: Quadratic, pattern: Pattern) -> PrunedWeight:
        """Prune at the smallest damping, `damping` times a power of ten up to 1, at which all factors exist.

        Args:
            objective: of the whole layer.
            pattern: unstructured or n:m.

        Raises:
            FactorizationError: no damping up to 1 suffices.
        """
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
        return self._sweep(objective, pattern, damping * objective.damping_unit)

    def trials(self, objective: Quadratic, patterns: Sequence[Pattern]) -> list[Tensor]:
        """As `Solver.trials`; where all rows share a factor, one sweep prunes a stacked copy of them per pattern.

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
        """As `Solver.work`: the shared factor, and for every row either Z, P, R and Q or a matrix."""
        rows, d_in, samples, widths = size.rows, size.inputs, size.max_rank, Widths.of(pattern, self.block_size)
        compared = min(widths.compared, d_in)
        shared = 0 if size.groups > 1 else 24 * d_in**2
        columns = 20 * rows * compared + 5 * size.weights
        if size.groups > 1 or (samples and dense_is_cheaper(samples, d_in)):
            together = rows if not isinstance(pattern, NM) else min(rows, max(1, STATE_BYTES // (4 * d_in * d_in)))
            matrices = 4 * together * d_in**2 + 8 * d_in**2 + size.slices(24 * d_in**2, SLICE_BYTES)
            return Work(max(shared, matrices) + columns, rows * d_in**2 * (d_in + samples))
        if not samples:
            return Work(max(shared + 4 * size.weights, 12 * d_in**2 + columns), 1.5 * d_in**3 + rows * d_in**2)
        item = 4 if size.lam >= SINGLE_LAM else 8
        row = (
            4 * d_in * samples
            + item * (samples**2 + compared * (samples + widths.block))
            + 8 * (samples + 2 * compared)
        )
        together = rows if not isinstance(pattern, NM) else min(rows, max(1, STATE_BYTES // row))
        slices = size.slices(8 * samples * (samples + widths.compared), SLICE_BYTES)
        state = together * row + 16 * d_in**2 + slices + columns
        return Work(max(shared, state), 1.5 * d_in**3 + rows * samples * d_in * (d_in + 4 * samples))

    def _sweep(self, objective: Quadratic, pattern: Pattern, ridge: float) -> tuple[Tensor, Tensor]:
        """Pruned weight and `keep`, both [rows, d_in], with `ridge` added to every diagonal."""
        factor = None
        if objective.gram.ndim == 2:  # one Gram matrix for all rows
            factor = damped_inverse_factor(
                objective.gram.to(torch.float64, copy=True).mul_(objective.scales.a), 1.0, ridge
            )
        weight = objective.weight.clone()
        keep = torch.empty_like(weight, dtype=torch.bool)
        widths = Widths.of(pattern, self.block_size)
        for rows in _row_batches(objective, pattern, widths):
            factors = make_factors(objective, factor, ridge, rows, widths)
            keep[rows] = prune_columns(weight[rows], factors, pattern, widths)
        return weight, keep


def prune_columns(weight: Tensor, factors: Factors, pattern: Pattern, widths: Widths) -> Tensor:
    """Prune rows in place, by comparison groups of columns from left to right.

    Args:
        weight: [r, d_in] in float32, modified in place.
        factors: of these rows.
        pattern: unstructured or n:m.
        widths: of comparison groups and column blocks.

    Returns:
        keep, bool [r, d_in].
    """
    keep = torch.empty_like(weight, dtype=torch.bool)
    for columns in split_range(0, weight.shape[1], widths.compared):
        pivots = factors.begin_group(weight, columns)
        if isinstance(pattern, Unstructured):
            keep[:, columns] = pattern.keep((weight[:, columns] / pivots).square(), before=columns.start * len(weight))
        errors = torch.empty(len(weight), columns.stop - columns.start, device=weight.device)
        for block in split_range(columns.start, columns.stop, widths.block):
            factor = factors.begin_block(weight, columns, block, errors)
            _prune_block(weight[:, block], factor, pattern, keep[:, block], errors[:, within(columns, block)])
        factors.end_group(weight, columns, errors)
    return keep


def _prune_block(weight: Tensor, factor: Tensor, pattern: Pattern, keep: Tensor, errors: Tensor) -> None:
    """Prune a block column by column, and write its `errors` and (n:m) its `keep`.

    `weight`, `keep` and `errors` are [r, b], modified in place; `factor` is [r or 1, b, b].
    """
    pivots = factor.diagonal(dim1=-2, dim2=-1)
    for column in range(weight.shape[1]):
        if isinstance(pattern, NM) and column % pattern.m == 0:
            group = slice(column, column + pattern.m)
            keep[:, group] = pattern.keep((weight[:, group] / pivots[:, group]).square())
        errors[:, column] = (weight[:, column] / pivots[:, column]).masked_fill_(keep[:, column], 0)
        weight[:, column:] -= errors[:, column, None] * factor[:, column, column:]


def _row_batches(objective: Quadratic, pattern: Pattern, widths: Widths) -> list[slice]:
    """Rows pruned together: all where they compete with each other, else as many as fit `STATE_BYTES`."""
    count, d_in = objective.weight.shape
    if not isinstance(pattern, NM):
        return [slice(0, count)]
    if needs_matrices(objective):
        row = 4 * d_in * d_in
    elif objective.scales.b:
        samples = objective.fisher_term.max_rank
        row = 4 * d_in * samples + 8 * samples * samples + 8 * widths.compared * (samples + widths.block)
    else:
        return [slice(0, count)]
    return slices_within(slice(0, count), row, STATE_BYTES)
