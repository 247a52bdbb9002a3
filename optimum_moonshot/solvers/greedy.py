"""Exact greedy OBS (Hassibi & Stork 1992; OBC, arXiv 2208.11580) in matrix products, many rows at a time.

A removal takes the weight with the least loss ``½ w_p²/[F⁻¹]_pp``, updates ``w -= w_p/[F⁻¹]_pp · [F⁻¹]_:p`` and
eliminates p from F⁻¹, a rank-1 update of the whole matrix that the textbook makes at every step. Here F⁻¹ stays as of
the last flush, the removals since then wait as rows v = column/√pivot, and the diagonal is up to date on its own. So a
step needs one column, ``F⁻¹_:p - Σ v v_p``, and a flush, one matrix product, follows every `STEPS` steps. What can go
no more is dropped once it is a quarter of the matrix.

The order of the removals and their losses are all that is kept: the weights after any number of removals are the
quadratic's minimiser on what survives (`Ranked.minimise`).
"""

import torch
from torch import Tensor

from ..objective.patterns import NM, Pattern

# Steps between two flushes (measured on a CPU for 192 to 2304 inputs: best, or within 5% of it, everywhere).
STEPS = 64
# Share of the matrix that has to be dead before it is dropped.
DEAD = 0.25
INFINITY = float("inf")


class Elimination:
    """Some rows under elimination, all of one size, one removal of each at a time.

    Args:
        inverse: F_k⁻¹, [r, d, d]; its memory is used where it lies row by row.
        weight: ŵ_k, [r, d], of the same dtype.
        pattern: n:m bars what is left of a group that has lost m - n weights; otherwise everything goes in the end.
    """

    def __init__(self, inverse: Tensor, weight: Tensor, pattern: Pattern):
        rows, size = weight.shape
        device = weight.device
        self.inverse, self.weight = inverse.contiguous(), weight.clone()
        self.diagonal = inverse.diagonal(dim1=1, dim2=2).clone()
        self.barred = torch.zeros_like(weight)  # infinite where an input is gone or may not go
        self.inputs = torch.arange(size, device=device).repeat(rows, 1)  # what the columns were at first
        self.rows = torch.arange(rows, device=device)[:, None]
        self.waiting = weight.new_empty(rows, STEPS, size)
        self.count = 0
        self.steps = removals(size, pattern)
        self.m = 0
        if isinstance(pattern, NM):
            self.m, spare = pattern.m, pattern.m - pattern.n
            self.room = torch.full((rows, size // pattern.m), spare, device=device)

    def run(self) -> tuple[Tensor, Tensor]:
        """The inputs in the order of their removal and the loss of each removal, [r, steps]."""
        order = torch.empty(len(self.weight), self.steps, dtype=torch.int32, device=self.weight.device)
        losses = torch.empty(order.shape, dtype=torch.float64, device=self.weight.device)
        for step in range(self.steps):
            loss, gone = self._remove()
            order[:, step : step + 1], losses[:, step : step + 1] = gone, loss
        return order, losses.mul_(0.5)

    def _remove(self) -> tuple[Tensor, Tensor]:
        """Remove one input of each row. Returns twice the losses and the inputs, [r, 1]."""
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
        self.diagonal.scatter_(1, chosen, 1.0)
        self.barred.scatter_(1, chosen, INFINITY)
        gone = self.inputs.gather(1, chosen)
        if self.m:
            self._bar(gone // self.m)
        return loss, gone

    def _column(self, chosen: Tensor) -> Tensor:
        """Column `chosen` [r, 1] of the inverse as it is now, [r, d]."""
        size = self.weight.shape[1]
        column = self.inverse.view(-1, size).index_select(0, (self.rows * size + chosen)[:, 0])
        if not self.count:
            return column
        waiting = self.waiting[:, : self.count]
        share = waiting.gather(2, chosen[:, :, None].expand(-1, self.count, 1))
        return column[:, None].baddbmm_(share.mT, waiting, alpha=-1)[:, 0]

    def _bar(self, group: Tensor) -> None:
        """Count a removal from each row's `group` [r, 1], and bar the rest of those that are at their limit."""
        room = self.room.gather(1, group) - 1
        self.room.scatter_(1, group, room)
        self.barred.masked_fill_((self.inputs // self.m == group) & (room == 0), INFINITY)

    def _flush(self) -> None:
        """Bring the inverse up to date, without what can go no more once that is worth a copy."""
        size = self.weight.shape[1]
        alive = int((self.barred == 0).sum(1).max())
        if size - alive >= DEAD * size:
            self._keep(alive)
        self.inverse.baddbmm_(self.waiting.mT, self.waiting, alpha=-1)
        self.count = 0

    def _keep(self, alive: int) -> None:
        """Drop all but `alive` columns; where a row has fewer alive, dead ones stay behind them."""
        chosen = torch.sort(self.barred, dim=1, stable=True).indices[:, :alive]
        self.weight, self.diagonal, self.barred, self.inputs = (
            tensor.gather(1, chosen) for tensor in (self.weight, self.diagonal, self.barred, self.inputs)
        )
        self.waiting = self.waiting.gather(2, chosen[:, None].expand(-1, self.waiting.shape[1], -1))
        self.inverse = take_square(self.inverse, chosen)


def removals(size: int, pattern: Pattern) -> int:
    """How many weights a row can lose.

    Args:
        size: inputs of the row; n:m divides them.
        pattern: all may go but for n of every m of an n:m pattern.
    """
    return size // pattern.m * (pattern.m - pattern.n) if isinstance(pattern, NM) else size


def take_square(matrices: Tensor, chosen: Tensor) -> Tensor:
    """``matrices[k][chosen[k]][:, chosen[k]]`` of a batch.

    Args:
        matrices: [r, d, d].
        chosen: rows and columns of each, [r, s].

    Returns:
        [r, s, s].
    """
    if matrices.device.type == "cpu":  # three times as fast as `gather`
        taken = matrices.new_empty(*chosen.shape, chosen.shape[1])
        for matrix, index, out in zip(matrices, chosen, taken, strict=True):
            torch.index_select(matrix.index_select(0, index), 1, index, out=out)
        return taken
    rows = matrices.gather(1, chosen[:, :, None].expand(-1, -1, matrices.shape[2]))
    return rows.gather(2, chosen[:, None, :].expand(-1, chosen.shape[1], -1))
