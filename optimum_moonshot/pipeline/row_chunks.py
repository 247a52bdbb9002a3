"""A layer whose statistics exceed the memory, solved in chunks of rows."""

import dataclasses
from collections.abc import Callable

import torch

from ..calibration.accumulators import Plan, numbers_per_row
from ..calibration.layer_statistics import LayerStatistics
from ..model.layers import PrunableLayer
from ..objective.fisher import Fisher
from ..objective.linalg import escalate
from ..objective.patterns import Pattern
from ..objective.quadratic import Quadratic, RelativeLoss
from ..objective.row_slices import split_range
from ..solvers.base import Solver, finish
from ..solvers.ranked import Ranking
from .solve import Solved, solve_whole, total_losses, weight_losses


def chunk_rows(layer: PrunableLayer, plan: Plan, samples: int, room: int) -> list[slice]:
    """Rows whose statistics fit in the memory: whole groups of a grouped convolution, or a part of one.

    Args:
        layer: the layer.
        plan: the form of its gradients.
        samples: N, calibration samples in all.
        room: bytes that a chunk's gradients may take.
    """
    d_out, d_in = layer.shape
    size, count = d_out // layer.groups, max(1, room // (4 * numbers_per_row(d_in, samples, plan.column_block)))
    if count >= size:
        return split_range(0, d_out, count // size * size)
    return [rows for first in range(0, d_out, size) for rows in split_range(first, first + size, count)]


class RowChunks:
    """A layer that is solved in chunks of rows.

    Args:
        layer: the layer.
        rows: its chunks.
        collect: passes the data and gathers by a plan; the chunk that was gathered before is freed first.
        plan: the form of the gradients.
    """

    def __init__(self, layer: PrunableLayer, rows: list[slice], collect: Callable[[Plan], LayerStatistics], plan: Plan):
        self.layer, self.rows, self.collect, self.plan = layer, rows, collect, plan
        self.whole: dict[int, LayerStatistics] = {}  # inputs and totals, by inputs of a column block
        self.held: tuple[int, Fisher] | None = None  # the gradients of a chunk

    def statistics(self, column_block: int | None) -> LayerStatistics:
        """Those of the layer, without gradients; the totals come with the first chunk."""
        size = column_block or self.layer.shape[1]
        if size not in self.whole:
            self.held = None
            found = self.collect(dataclasses.replace(self.plan, rows=self.rows[0], totals=size))
            self.held = (0, found.gradients)
            self.whole[size] = dataclasses.replace(found, gradients=None)
        return self.whole[size]

    def part(self, whole: Quadratic, index: int) -> Quadratic:
        """A chunk of rows of the layer's quadratic; the data pass again where another one was asked for last.

        Args:
            whole: the layer's quadratic, without gradients.
            index: which chunk.
        """
        if self.held is None or self.held[0] != index:
            self.held = None
            found = self.collect(dataclasses.replace(self.plan, rows=self.rows[index]))
            self.held = (index, found.gradients)
        return whole.part(self.rows[index], self.held[1])

    def solve(self, solver: Solver, patterns: list[Pattern], lam: float, column_block: int | None) -> list[Solved]:
        """As `PartedStatistics.solve` says; at λ = 1 there are no gradients, and all rows are solved at once."""
        dtype, known = self.layer.parameter.dtype, self.statistics(column_block)
        if lam == 1:
            return solve_whole(solver, self.layer.matrix, dtype, patterns, known, lam)
        whole = known.layer_objective(self.layer.matrix, lam, column_block)
        parts = range(len(self.rows))

        def rank(damping: float) -> Ranking:
            return Ranking.join([solver.rank(self.part(whole, index), patterns[0], damping) for index in parts])

        ranking, damping = escalate(solver.damping, rank)
        keeps = [ranking.keep(pattern).view(self.layer.shape) for pattern in patterns]
        weights = [torch.zeros_like(whole.weight) for _ in patterns]
        lost: list[list[list[RelativeLoss]]] = [[] for _ in patterns]
        for index in reversed(parts):  # the last chunk is there already
            rows, objective = self.rows[index], self.part(whole, index)
            found = solver.minimise(objective, [keep[rows] for keep in keeps], damping)
            for weight, keep, values, losses in zip(weights, keeps, found, lost, strict=True):
                weight[rows] = values.masked_fill_(~keep[rows], 0)
                losses.append(weight_losses(objective, weight[rows], keep[rows], dtype))
        results = [finish(whole, *each, damping, solver.damping) for each in zip(weights, keeps, strict=True)]
        return [
            Solved(
                result.weight.to(dtype),
                result.damping,
                result.notes,
                *map(total_losses, zip(*losses, strict=True)),
                whole.scales.lam,
                whole.losses_at_zero,
            )
            for result, losses in zip(results, lost, strict=True)
        ]
