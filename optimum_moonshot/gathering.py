"""How the gradients of each layer are gathered, by what its solver needs and by the memory that is left.

With as many samples as a row's quadratic has inputs or more, the matrices of the rows are the smaller form, and as
exact. A layer whose statistics exceed the memory all the same is solved in chunks of rows, where its solver ranks
removals (`solvers/ranked.py`): the data pass again for each, first to rank, then to compute the weights that survive.
"""

from collections.abc import Callable, Iterator
from functools import cached_property

import torch
from torch import Tensor

from .accumulators import Plan, numbers_per_row
from .layers import PrunableLayer
from .linalg import escalate
from .objective import DiagonalQuadratic, Quadratic, RelativeLoss
from .passes import Visit
from .patterns import Pattern
from .slices import ranges
from .solvers import PrunedWeight, Solver
from .solvers.base import block_size, finish
from .solvers.ranked import Ranked, Ranking
from .statistics import Collector, LayerStatistics
from .storage import Storage


class Gatherer:
    """Gives every layer of a run its statistics, in as few passes over the data as the memory allows.

    Args:
        solver: which decides what statistics are.
        patterns: by layer.
        lams: λ by layer.
        samples: N.
        storage: where statistics live, within its budget.
    """

    def __init__(
        self, solver: Solver, patterns: dict[str, Pattern], lams: dict[str, float], samples: int, storage: Storage
    ):
        self.solver, self.patterns, self.lams = solver, patterns, lams
        self.samples, self.storage = samples, storage
        self.diagonal = solver.objective is DiagonalQuadratic
        self.notes: list[str] = []

    def statistics(
        self, visit: Visit, layers: list[PrunableLayer]
    ) -> Iterator[tuple[PrunableLayer, "LayerStatistics | RowChunks"]]:
        """Those of the layers of a visit, each forgotten here once it is given."""
        groups = self._groups(layers)
        if not groups:
            visit.run(None, True)
        while groups:
            group = groups.pop(0)
            chunks = self._chunks(group, visit)
            if chunks is None:
                yield from self._collected(group, visit, {layer.name: self._plan(layer) for layer in group}, not groups)
                continue
            yield group[0], chunks
            if not groups:
                visit.run(None, True)

    def _groups(self, layers: list[PrunableLayer]) -> list[list[PrunableLayer]]:
        """Layers whose statistics fit in half of what is left together: the other half is for the solver."""
        groups: list[list[PrunableLayer]] = []
        room = 0
        for layer in layers:
            size = self._bytes(layer)
            if not groups or size > room:
                groups.append([])
                room = self.storage.available() // 2
            groups[-1].append(layer)
            room -= size
        return groups

    def _collected(
        self, group: list[PrunableLayer], visit: Visit, plans: dict[str, Plan], last: bool
    ) -> Iterator[tuple[PrunableLayer, LayerStatistics]]:
        """Pass the data once, and give each layer of a group its statistics."""
        wanted = {layer.name for layer in group if self.lams[layer.name] < 1}
        with Collector(group, self.diagonal, wanted, self.samples, self.storage, plans) as collector:
            visit.run(collector, last)
        while group:
            layer = group.pop(0)
            yield layer, collector.take(layer)

    def _plan(self, layer: PrunableLayer) -> Plan:
        """The smaller form of a layer's gradients."""
        if self.diagonal:
            return Plan()
        size = self._block(layer) or layer.shape[1]
        return Plan(block=size if self.samples >= size else None)

    def _block(self, layer: PrunableLayer) -> int | None:
        return block_size(self.solver, layer.shape[1], self.patterns[layer.name])

    def _bytes(self, layer: PrunableLayer) -> int:
        """What a layer's statistics take."""
        d_out, d_in = layer.shape
        total = 4 * layer.groups * d_in * (1 if self.diagonal else d_in)
        if self.lams[layer.name] < 1:
            samples = 1 if self.diagonal else self.samples
            total += 4 * d_out * numbers_per_row(d_in, samples, self._plan(layer).block)
        return total

    def _chunks(self, group: list[PrunableLayer], visit: Visit) -> "RowChunks | None":
        """A single layer in chunks of rows, where it does not fit in memory as a whole and its solver can do that."""
        layer, room = group[0], self.storage.available() // 2
        lam, plan = self.lams[layer.name], self._plan(layer)
        if len(group) > 1 or lam == 1 or not isinstance(self.solver, Ranked) or self._bytes(layer) <= room:
            return None
        rows = chunk_rows(layer, plan, self.samples, room - 4 * layer.groups * layer.shape[1] ** 2)
        if len(rows) == 1:
            return None
        self.notes.append(f"{layer.name}: solved in {len(rows)} chunks of rows, for the sake of memory")

        def collect(plan: Plan) -> LayerStatistics:
            ((_, statistics),) = self._collected([layer], visit, {layer.name: plan}, False)
            return statistics

        return RowChunks(layer, rows, collect, lam, plan, self._block(layer))


def chunk_rows(layer: PrunableLayer, plan: Plan, samples: int, room: int) -> list[slice]:
    """Rows whose statistics fit in `room` bytes: whole groups of a grouped convolution, or a part of one."""
    d_out, d_in = layer.shape
    size, count = d_out // layer.groups, max(1, room // (4 * numbers_per_row(d_in, samples, plan.block)))
    if count >= size:
        return ranges(0, d_out, count // size * size)
    return [rows for first in range(0, d_out, size) for rows in ranges(first, first + size, count)]


class RowChunks:
    """A layer that is solved in chunks of rows.

    Args:
        layer: the layer.
        rows: its chunks.
        collect: passes the data and gathers by a plan; the chunk that was gathered before is freed first.
        lam: λ, below 1.
        plan: the form of the gradients.
        block: inputs per block of a block-diagonal objective.
    """

    def __init__(
        self,
        layer: PrunableLayer,
        rows: list[slice],
        collect: Callable[[Plan], LayerStatistics],
        lam: float,
        plan: Plan,
        block: int | None,
    ):
        self.layer, self.rows, self.collect = layer, rows, collect
        self.lam, self.plan, self.block = lam, plan, block
        self.held: tuple[int, Quadratic] | None = None

    @cached_property
    def whole(self) -> Quadratic:
        """The layer's quadratic without gradients: its first chunk was gathered together with the layer's totals."""
        statistics = self.collect(Plan(self.plan.block, self.rows[0], self.block or self.layer.shape[1]))
        whole = statistics.layer_objective(self.layer.matrix, self.lam, self.block)
        self.held = (0, whole.part(self.rows[0], statistics.gradients))
        return whole

    def part(self, index: int) -> Quadratic:
        """The quadratic of a chunk's rows."""
        whole = self.whole
        if self.held is None or self.held[0] != index:
            self.held = None
            statistics = self.collect(Plan(self.plan.block, self.rows[index]))
            self.held = (index, whole.part(self.rows[index], statistics.gradients))
        return self.held[1]

    def solve(self, solver: Ranked, pattern: Pattern, dtype: torch.dtype) -> tuple[PrunedWeight, list[RelativeLoss]]:
        """The layer's pruned weight, and the losses of its mask alone and of the weight as it is in `dtype`."""
        ranking, damping = escalate(solver.damping, lambda damping: self._rank(solver, pattern, damping))
        keep = ranking.keep(pattern).view(self.layer.shape)
        weight = torch.zeros_like(self.whole.weight)
        losses: list[list[RelativeLoss]] = []
        for index in reversed(range(len(self.rows))):  # the last chunk is there already
            rows, objective = self.rows[index], self.part(index)
            (weight[rows],) = solver.minimise(objective, [keep[rows]], damping)
            masked = torch.where(keep[rows], objective.weight, 0)
            losses.append(objective.losses(masked, torch.where(keep[rows], weight[rows], 0).to(dtype)))
        result = finish(self.whole, weight, keep, damping, solver.damping)
        return result, [RelativeLoss(*map(sum, zip(*parts, strict=True))) for parts in zip(*losses, strict=True)]

    def _rank(self, solver: Ranked, pattern: Pattern, damping: float) -> Ranking:
        return Ranking.join([solver.rank(self.part(index), pattern, damping) for index in range(len(self.rows))])


def solve_layer(
    solver: Solver, layer: PrunableLayer, pattern: Pattern, statistics: LayerStatistics | RowChunks, lam: float
) -> tuple[PrunedWeight, list[RelativeLoss], float]:
    """A layer's pruned weight; the losses of its mask alone and of the weight in the layer's dtype; and the λ used."""
    dtype = layer.parameter.dtype
    if isinstance(statistics, RowChunks):
        result, losses = statistics.solve(solver, pattern, dtype)
        return result, losses, statistics.whole.scales.lam
    objective = statistics.objective(layer.matrix, lam, block_size(solver, layer.shape[1], pattern))
    result = solver.solve(objective, pattern)
    masked: Tensor = torch.where(result.keep, objective.weight, 0)
    return result, objective.losses(masked, result.weight.to(dtype)), objective.scales.lam
