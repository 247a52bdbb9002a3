"""Quantization of pruned weights under the solver's own quadratic F_k.

The scales of a group minimise the rounding error weighted by the diagonal of F_k. Coordinate descent then changes one
code of every row at a time, and the scale of a group after its codes, to the grid point nearest to the minimiser of

    L_λ = Σ_k (w_k-ŵ_k)ᵀ F_k (w_k-ŵ_k)

along that coordinate, so that the loss never increases. The losses of the result count from the dense weight ŵ: the
codes compensate each other's rounding errors and the errors of pruning. λ < 1 weighs rounding errors by the Fisher loss
too; at λ = 1 this is QuantEase (Behdin et al., arXiv 2309.01885) with a mask and searched scales.
"""

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.library import find_library
from ..objective.grid import Grid
from ..objective.linalg import slices_within, split_range
from ..objective.patterns import Pattern
from ..objective.quadratic import DiagonalQuadratic, Objective, Quadratic
from .base import PrunedWeight, Solver

SWEEPS = 4  # a fixed number, so that the result of a row does not depend on the rows in its batch
STEP = 32  # columns whose gradients are updated after every change; the others are updated once, by a matrix product
# Factors of the Fisher term, or matrices, of the rows that are quantized together.
STATE_BYTES = 512 * 2**20
_TINY = torch.finfo(torch.float32).tiny
_ROWS = torch.contiguous_format


def quantize(objective: Objective, weight: Tensor, keep: Tensor, grid: Grid, scale: Tensor | None = None) -> Tensor:
    """Round the surviving weights of a solver to a grid; the loss is at most that of rounding to nearest.

    Args:
        objective: of the layer, or of some of its rows; where F_k is diagonal, rounding to nearest is its minimum.
        weight: [rows, d_in] in float32.
        keep: bool [rows, d_in].
        grid: with the dtype of the layer.
        scale: [rows, groups] where the weight is on the grid already; None searches the scales.

    Returns:
        [rows, d_in] in the dtype of the grid, on the grid, 0 where not `keep`.
    """
    weight, keep = torch.where(keep, weight.float(), 0).contiguous(), keep.contiguous()
    if isinstance(objective, DiagonalQuadratic):
        return grid.rounded(weight, grid.search(weight, objective.diagonal()) if scale is None else scale)
    rounded, descended = torch.empty_like(weight, dtype=grid.dtype), torch.empty_like(weight, dtype=grid.dtype)
    diagonal = _is_diagonal(objective)
    for rows in _slices(objective):
        problem = _Problem.of(objective, rows)
        row_scale = scale[rows] if scale is not None else grid.search(weight[rows], problem.importance(weight.shape[1]))
        rounded[rows] = grid.rounded(weight[rows], row_scale)
        if diagonal:
            continue
        descent = _Descent(problem, grid, rounded[rows].to(torch.float32, copy=True), row_scale.float(), keep[rows])
        descended[rows] = descent.run().to(grid.dtype)
    if diagonal:
        return rounded
    before, after = objective.losses(rounded, descended)
    return descended if after.total <= before.total else rounded


def on_grid(solver: Solver, objective: Objective, result: PrunedWeight, pattern: Pattern) -> PrunedWeight:
    """The result of a solver for a pattern, quantized if the pattern has a grid."""
    if pattern.grid is None or solver.quantizes:
        return result
    return dataclasses.replace(result, weight=quantize(objective, result.weight, result.keep, pattern.grid).float())


def from_unit(weight: Tensor, unit: float, grid: Grid | None) -> Tensor:
    """The inverse of `linalg.in_unit`, for a solver's weight, which stays on its grid."""
    if unit == 1:
        return weight
    if grid is None:
        return weight.double() * unit
    scale, d_in = grid.scales_of(weight.to(grid.dtype)), weight.shape[1]
    codes = grid.codes(weight, grid.per_weight(scale, d_in))  # a scale may lose bits below the normal numbers
    return grid.values(codes, grid.per_weight((scale.double() * unit).to(grid.dtype), d_in))


class ColumnRounding:
    """The scales of a sweep over columns from left to right, which rounds the survivors of each.

    Scales are searched where a comparison group begins, from the weights that its predecessors have updated.
    """

    def __init__(self, grid: Grid, weight: Tensor, scale: Tensor | None = None):
        self.grid = grid
        shape = len(weight), grid.groups(weight.shape[1])
        self.scale = torch.zeros(shape, dtype=grid.dtype, device=weight.device) if scale is None else scale

    def part(self, rows: slice) -> "ColumnRounding":
        """The part of some rows, in the same memory."""
        return ColumnRounding(self.grid, self.scale[rows], self.scale[rows])

    def begin_group(self, weight: Tensor, columns: slice, keep: Tensor, pivots: Tensor) -> None:
        """Search the scales of the groups of inputs that begin in a comparison group.

        `keep` [r, columns] is True for the weights that survive so far, `pivots` [r or 1, columns] their C_jj.
        """
        size = self.grid.group
        for start in range(-(-columns.start // size) * size, columns.stop, size):
            inputs = slice(start, min(start + size, weight.shape[1]))
            group, compared = weight[:, inputs].clone(), min(inputs.stop, columns.stop) - start
            group[:, :compared] *= keep[:, start - columns.start :][:, :compared]
            importance = torch.ones(1, inputs.stop - start, device=weight.device)
            if inputs.stop <= columns.stop:
                importance = pivots[:, start - columns.start : inputs.stop - columns.start].square().reciprocal()
            index = start // size
            self.scale[:, index : index + 1] = self.grid.search(group, importance)

    def step(self, columns: slice) -> Tensor:
        """The scale of each weight in some columns, [r, columns]."""
        groups = torch.arange(columns.start, columns.stop, device=self.scale.device) // self.grid.group
        return self.scale[:, groups]


def _slices(objective: Quadratic) -> list[slice]:
    """Rows of the weight whose factors or matrices are in memory together."""
    d_in, size = objective.weight.shape[1], objective.size
    matrices = 0 if _is_shared(objective) else size
    factors = objective.fisher_term.max_rank if objective.scales.b and not matrices else 0
    return slices_within(slice(0, len(objective.weight)), 4 * d_in * (8 + 2 * (matrices + factors)), STATE_BYTES)


def _is_diagonal(objective: Quadratic) -> bool:
    """Whether every F_k is diagonal, as without data: then codes cannot compensate each other."""
    gram = objective.gram
    return not objective.scales.b and bool(gram.count_nonzero() == gram.diagonal(dim1=-2, dim2=-1).count_nonzero())


def _is_shared(objective: Quadratic) -> bool:
    """Whether F_k is a matrix that all rows share, plus few factors of each row."""
    few = not objective.scales.b or objective.fisher_term.max_rank < objective.size
    return objective.gram.ndim == 2 and few


@dataclass(frozen=True)
class _Problem:
    """F_k = matrix + factorsᵀ·factors of some rows of the weight, or of their column blocks, in float32."""

    target: Tensor  # ŵ, [rows, size]
    matrix: Tensor  # [size, size], or [rows, size, size]
    factors: Tensor  # [rows, N, size]; N = 0 without any

    @classmethod
    def of(cls, objective: Quadratic, rows: slice) -> "_Problem":
        blocks = objective.weight.shape[1] // objective.size
        part = slice(rows.start * blocks, rows.stop * blocks)
        target, scales = objective.row_weights[part], objective.scales
        none = target.new_empty(len(target), 0, objective.size)
        if not _is_shared(objective):
            return cls(target, objective.row_hessians(part).float(), none)
        matrix = (scales.a * objective.gram).float()
        if not scales.b:
            return cls(target, matrix, none)
        return cls(target, matrix, objective.fisher_term.factors(part, target.device, torch.float32) * scales.b**0.5)

    def importance(self, d_in: int) -> Tensor:
        """The diagonals of F_k, [rows, d_in]; ones if all are 0, as for a matrix without loss."""
        diagonal = self.matrix.diagonal(dim1=-2, dim2=-1) + self.factors.square().sum(1)
        return (diagonal if diagonal.any() else torch.ones_like(diagonal)).reshape(-1, d_in)


class _Descent:
    """Coordinate descent over the codes of some rows, and over the scales unless rows are split into column blocks."""

    def __init__(self, problem: _Problem, grid: Grid, values: Tensor, scale: Tensor, keep: Tensor):
        self.problem, self.grid, shape = problem, grid, problem.target.shape
        self.out = values
        self.values, self.keep = values.view(shape), keep.reshape(shape)
        self.step = grid.per_weight(scale, values.shape[1]).reshape(shape)
        self.rescales = values.shape[1] == shape[1]
        self.products = _project(problem.factors, self.values - problem.target)  # factors · (w - ŵ), [rows, N]

    def run(self) -> Tensor:
        """The values, [rows, d_in]."""
        for _ in range(SWEEPS):
            for columns in split_range(0, self.values.shape[1], self.grid.group):
                self._sweep(columns)
        return self.out

    def _sweep(self, columns: slice) -> None:
        """Descend over the columns of a group."""
        problem, delta = self.problem, self.values - self.problem.target
        inner, factors = problem.matrix[..., columns, columns], problem.factors[:, :, columns]
        gradient = _apply(delta, problem.matrix[..., columns]) + _apply(self.products, factors)
        self._change_codes(columns, gradient, inner, factors)
        if self.rescales:
            self._rescale(columns, gradient, inner, factors)

    def _change_codes(self, columns: slice, gradient: Tensor, inner: Tensor, factors: Tensor) -> None:
        """Change one code of each row at a time, in blocks of columns; updates the gradient."""
        for block in split_range(0, columns.stop - columns.start, STEP):
            part = slice(columns.start + block.start, columns.start + block.stop)
            before = self.values[:, part].clone()
            self._change_block(part, gradient[:, block], inner[..., block, block], factors[:, :, block])
            changes = self.values[:, part] - before
            projected = _project(factors[:, :, block], changes)
            gradient += _apply(changes, inner[..., block, :]) + _apply(projected, factors)
            self.products += projected

    def _change_block(self, columns: slice, gradient: Tensor, inner: Tensor, factors: Tensor) -> None:
        """Like `_change_codes`, but for few columns, with contiguous copies of them as rows."""
        matrices, library = inner.ndim == 3, find_library() if self.values.device.type == "cpu" else None
        if library is not None and not matrices and not factors.shape[1]:
            values, keep, step = self.values[:, columns], self.keep[:, columns], self.step[:, columns]
            if library.descend(values, keep, gradient, inner, step, self.grid.top, self.grid.dtype):
                return
        # Cloned: for a single row, the transposed view is contiguous already, and would alias the matrix.
        values, slopes = (tensor.T.clone(memory_format=_ROWS) for tensor in (self.values[:, columns], gradient))
        step = self.step[:, columns].T.contiguous()
        removed, vectors = ~self.keep[:, columns].T.contiguous(), factors.permute(2, 0, 1).contiguous()
        diagonal = inner.diagonal(dim1=-2, dim2=-1)
        curvature = (diagonal.T if matrices else diagonal[:, None]) + vectors.square().sum(2)
        safe = curvature.clamp(min=_TINY)
        removed |= curvature <= 0
        projected = torch.zeros_like(self.products)
        for column in (~removed).any(1).nonzero()[:, 0].tolist():
            value, bend, slope = values[column], curvature[column], slopes[column]
            if vectors.shape[2]:
                slope = slope + (vectors[column] * projected).sum(1)
            candidate = self.grid.values(self.grid.codes(value - slope / safe[column], step[column]), step[column])
            candidate = candidate.float()
            change = (candidate - value).masked_fill_(removed[column], 0)
            stays = change * (2 * slope + change * bend) >= 0  # the change of the loss
            change.masked_fill_(stays, 0)
            value.copy_(torch.where(stays, value, candidate))  # value + change is rounded, and can miss the grid
            if matrices:
                slopes.addcmul_(inner[:, column].T, change[None])
            else:
                slopes.addr_(inner[column], change)
            if vectors.shape[2]:
                projected += vectors[column] * change[:, None]
        self.values[:, columns] = values.T

    def _rescale(self, columns: slice, gradient: Tensor, inner: Tensor, factors: Tensor) -> None:
        """Move the scale of a group to the minimum along its codes, if this lowers the loss on the grid."""
        values, step = self.values[:, columns], self.step[:, columns]
        codes = self.grid.codes(values, step)
        curvature = (_apply(codes, inner) * codes).sum(1) + _project(factors, codes).square().sum(1)
        move = -(codes * gradient).sum(1) / curvature.clamp(min=_TINY)
        scale = (step[:, 0] + move).clamp_(min=0).to(self.grid.dtype).float()
        moved = self.grid.values(codes, scale[:, None].expand_as(step)).float()
        change = moved - values
        projected = _project(factors, change)
        loss = ((2 * gradient + _apply(change, inner)) * change).sum(1) + projected.square().sum(1)
        better = (loss < 0) & (scale > 0)
        values.copy_(torch.where(better[:, None], moved, values))
        step.copy_(torch.where(better, scale, step[:, 0])[:, None].expand_as(step))
        self.products += projected.masked_fill_(~better[:, None], 0)


def _project(factors: Tensor, delta: Tensor) -> Tensor:
    """factors · δ of each row, [rows, N]."""
    return (factors @ delta[:, :, None])[:, :, 0]


def _apply(delta: Tensor, matrix: Tensor) -> Tensor:
    """δ M of each row; M [size, columns] or [rows, size, columns]."""
    return delta @ matrix if matrix.ndim == 2 else (delta[:, None] @ matrix)[:, 0]
