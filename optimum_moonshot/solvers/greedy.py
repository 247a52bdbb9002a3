"""Exact greedy OBS (Hassibi & Stork 1992; OBC, arXiv 2208.11580) in matrix products, many rows at a time.

A removal takes the weight with the smallest loss ``½ w_p²/[F⁻¹]_pp``, updates ``w -= w_p/[F⁻¹]_pp · [F⁻¹]_:p`` and
eliminates p from F⁻¹. The textbook does this by a rank-1 update of the whole matrix at every step, which is bound by
memory bandwidth. Here the updates are deferred as rows v = column/√pivot and applied to F⁻¹ in one matrix product every
`STEPS` steps; only the diagonal is updated at every step. A step needs a single column, ``F⁻¹_:p - Σ v v_p``. Inputs
that cannot be removed any more are dropped from the matrix once they are a quarter of it.

Only the order of the removals and their losses are stored: the weights after any number of removals are the quadratic's
minimiser on the remaining inputs (`Ranked.minimise`).
"""

import torch
from torch import Tensor

from ..objective.patterns import NM, Pattern

# Steps between two flushes (measured on a CPU for 192 to 2304 inputs: within 5% of the best throughout).
STEPS = 64
# Fraction of the inputs that must be dead before they are dropped: a copy costs as much as some flushes.
DEAD = 0.25
INFINITY = float("inf")


class Elimination:
    """The elimination of a batch of rows, one input of each row per step.

    `inverse`, F_k⁻¹ [r, d, d], is overwritten if it is contiguous; `weight`, ŵ_k [r, d], has the same dtype. n:m bars
    the rest of a group that has lost m - n weights; other patterns remove all inputs in the end.
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
        """Apply the deferred updates to the inverse, and drop dead inputs once that is worth a copy."""
        size = self.weight.shape[1]
        alive = int((self.barred == 0).sum(1).max())
        if size - alive >= DEAD * size:
            # Rows with fewer than `alive` live inputs are filled up with dead ones, to keep the batch rectangular.
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
