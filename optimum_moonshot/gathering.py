"""How the gradients of each layer are gathered, by what its solver needs and by the memory that is left.

With as many samples as a row's quadratic has inputs or more, the matrices of the rows are the smaller form, and as
exact. A layer whose statistics exceed the memory all the same is solved in chunks of rows, where its solver ranks
removals (`solvers/ranked.py`): the data pass again for each, first to rank, then to compute the weights that survive.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .accumulators import Plan, numbers_per_row
from .layers import PrunableLayer
from .linalg import escalate
from .objective import DiagonalQuadratic, Quadratic, RelativeLoss, RowFisher
from .passes import Visit
from .patterns import Pattern, Unstructured
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
        patterns: those that a layer will be pruned by, by its name.
        lams: λ by layer.
        samples: N.
        storage: where statistics live, within its budget.
    """

    def __init__(
        self, solver: Solver, patterns: dict[str, list[Pattern]], lams: dict[str, float], samples: int, storage: Storage
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
        """The smaller form of a layer's gradients; that of the samples serves patterns with unequal blocks too."""
        d_in = layer.shape[1]
        sizes = {block_size(self.solver, d_in, pattern) or d_in for pattern in self.patterns[layer.name]}
        compressed = not self.diagonal and len(sizes) == 1 and self.samples >= max(sizes)
        return Plan(block=max(sizes) if compressed else None)

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

        return RowChunks(layer, rows, collect, plan)


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
        plan: the form of the gradients.
    """

    def __init__(self, layer: PrunableLayer, rows: list[slice], collect: Callable[[Plan], LayerStatistics], plan: Plan):
        self.layer, self.rows, self.collect, self.plan = layer, rows, collect, plan
        self.whole: dict[int, LayerStatistics] = {}  # inputs and totals, by inputs per block of the objective
        self.held: tuple[int, Tensor | RowFisher] | None = None  # the gradients of a chunk

    def statistics(self, block: int | None) -> LayerStatistics:
        """Those of the layer, without gradients; the totals come with the first chunk."""
        size = block or self.layer.shape[1]
        if size not in self.whole:
            self.held = None
            found = self.collect(dataclasses.replace(self.plan, rows=self.rows[0], totals=size))
            self.held = (0, found.gradients)
            self.whole[size] = dataclasses.replace(found, gradients=None)
        return self.whole[size]

    def part(self, whole: Quadratic, index: int) -> Quadratic:
        """A chunk of rows of the layer's quadratic."""
        if self.held is None or self.held[0] != index:
            self.held = None
            found = self.collect(dataclasses.replace(self.plan, rows=self.rows[index]))
            self.held = (index, found.gradients)
        return whole.part(self.rows[index], self.held[1])

    def solve(self, solver: Ranked, patterns: list[Pattern], lam: float, block: int | None) -> list["Solved"]:
        """As `solve_layer`, for the patterns of one elimination."""
        whole = self.statistics(block).layer_objective(self.layer.matrix, lam, block)
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
                losses.append(_losses(objective, weight[rows], keep[rows], self.layer))
        return [
            Solved(
                finish(whole, weight, keep, damping, solver.damping),
                *map(_total, zip(*losses, strict=True)),
                whole.scales.lam,
            )
            for weight, keep, losses in zip(weights, keeps, lost, strict=True)
        ]


class Solved(NamedTuple):
    """A layer's result, the losses of its mask alone and of the weight in the layer's dtype, and the λ used."""

    result: PrunedWeight
    masked: RelativeLoss
    pruned: RelativeLoss
    lam: float


def solve_layer(
    solver: Solver,
    layer: PrunableLayer,
    patterns: Sequence[Pattern],
    statistics: LayerStatistics | RowChunks,
    lam: float,
) -> list[Solved]:
    """Prune a layer by several patterns; those that one elimination serves have it together.

    Raises:
        FactorizationError: the layer's quadratic stays singular at the largest damping.
    """
    together = [index for index, pattern in enumerate(patterns) if isinstance(pattern, Unstructured)]
    families = [together] if together and isinstance(solver, Ranked) else [[index] for index in together]
    families += [[index] for index in range(len(patterns)) if index not in together]
    found: dict[int, Solved] = {}
    for family in families:
        some = [patterns[index] for index in family]
        found |= zip(family, _solve_family(solver, layer, some, statistics, lam), strict=True)
    return [found[index] for index in range(len(patterns))]


def _solve_family(
    solver: Solver, layer: PrunableLayer, patterns: list[Pattern], statistics: LayerStatistics | RowChunks, lam: float
) -> list[Solved]:
    block = block_size(solver, layer.shape[1], patterns[0])
    if isinstance(statistics, RowChunks):
        if lam < 1:
            return statistics.solve(solver, patterns, lam, block)
        statistics = statistics.statistics(block)
    objective = statistics.objective(layer.matrix, lam, block)
    if isinstance(solver, Ranked):
        results = solver.solve_path(objective, patterns)
    else:
        results = [solver.solve(objective, pattern) for pattern in patterns]
    return [
        Solved(result, *_losses(objective, result.weight, result.keep, layer), objective.scales.lam)
        for result in results
    ]


def _losses(
    objective: Quadratic | DiagonalQuadratic, weight: Tensor, keep: Tensor, layer: PrunableLayer
) -> list[RelativeLoss]:
    """Of the mask alone, and of the weight as the layer will hold it."""
    return objective.losses(torch.where(keep, objective.weight, 0), weight.to(layer.parameter.dtype))


def _total(parts: Iterable[RelativeLoss]) -> RelativeLoss:
    """The losses of a layer from those of its chunks."""
    return RelativeLoss(*map(sum, zip(*parts, strict=True)))
