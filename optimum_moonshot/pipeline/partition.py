"""The statistics that a run collects, and the parts of a stage: what one pass collects, and who solves a layer.

`StatisticsSpec` gives the form and the bytes of each layer's statistics, by the solver, λ and the patterns.
A part is a value, made by one pure function of the layers, their bytes, the memory and the number of processes. It is
either some layers whose statistics fit in memory together, or a single layer that exceeds the memory, with the slices
of its rows or experts that are collected one pass at a time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from types import MappingProxyType
from typing import NamedTuple

from ..calibration.accumulators import GradientPlan, TokenWeights, numbers_per_row
from ..distributed.sharing import Owner, divide, rows_of_processes
from ..model.layers import PrunableLayer
from ..objective.linalg import split_range
from ..objective.patterns import NM, Pattern, Unstructured
from ..solvers import Solver
from .selection import Selection

# Weights of a matrix below which exchanging scores between processes takes about as long as solving it.
LEAST_SHARDED = 2**16


class Slicing(NamedTuple):
    """How the statistics of a layer can be collected some rows, or some experts, at a time."""

    pieces: int  # rows or experts; 1 where the layer cannot be sliced
    fixed: int  # bytes that every slice needs
    piece_bytes: int  # bytes of a row or an expert


@dataclass(eq=False)
class StatisticsSpec:
    """The statistics of a run."""

    solver: Solver  # whose objective they form
    patterns: Mapping[str, Sequence[Pattern]]  # of each layer, by its name, all that it will be pruned by
    lams: Mapping[str, float]  # λ by layer
    samples: int  # N, calibration samples in all
    under_calibrated_experts: str = "all"  # as in `MoonshotConfig`
    shared: bool = False  # whether the rows of a layer share its Fisher matrix
    token_weights: Mapping[str, TokenWeights] = field(default_factory=dict)  # of the dense model, by layer

    @classmethod
    def of(
        cls,
        selection: Selection,
        patterns: Mapping[str, Sequence[Pattern]],
        samples: int,
        token_weights: Mapping[str, TokenWeights] = MappingProxyType({}),
    ) -> "StatisticsSpec":
        """The statistics of a selection's layers, with its λ and solver."""
        lams = {layer.name: selection.lam_of(layer) for layer in selection.layers}
        config = selection.config
        under_calibrated, shared = config.under_calibrated_experts, selection.fisher == "shared"
        return cls(selection.solver, patterns, lams, samples, under_calibrated, shared, token_weights)

    @property
    def keeps_routing(self) -> bool:
        """Whether all experts keep the statistics of the model's routing, so that no second pass is needed."""
        return self.under_calibrated_experts == "routed"

    @property
    def diagonal(self) -> bool:
        """Whether the diagonals of G and the gradients' squares are enough."""
        return self.solver.objective.diagonal_only

    def needs_gradients(self, layer: PrunableLayer) -> bool:
        """Whether λ < 1."""
        return self.lams[layer.name] < 1

    def needs_rows(self, layer: PrunableLayer) -> bool:
        """Whether every row has a Fisher term of its own."""
        return self.needs_gradients(layer) and not self.plan(layer).shared

    def plan(self, layer: PrunableLayer) -> GradientPlan:
        """The smaller form of a layer's gradients: matrices of its rows, with as many samples as a row has inputs.

        That of the samples serves patterns whose column blocks differ. A matrix that all rows share is smaller still.
        """
        if self.shared and not self.diagonal:
            competing = any(isinstance(pattern, Unstructured) for pattern in self.patterns[layer.name])
            return GradientPlan(shared=True, squares=competing, weights=self.token_weights.get(layer.name))
        d_in = layer.shape[1]
        sizes = {self.solver.column_block(d_in, pattern) or d_in for pattern in self.patterns[layer.name]}
        compressed = not self.diagonal and len(sizes) == 1 and self.samples >= max(sizes)
        return GradientPlan(column_block=max(sizes) if compressed else None)

    def bytes_of(self, layer: PrunableLayer) -> int:
        """Bytes of a layer's statistics: its Gram matrices, or their diagonals, and its gradients."""
        inputs, (d_out, d_in) = self.gram_bytes(layer), layer.shape
        if not self.needs_gradients(layer):
            return inputs
        plan = self.plan(layer)
        if plan.shared:
            return 2 * inputs + 4 * d_out * d_in * plan.squares
        rows = d_out if plan.rows is None else len(range(*plan.rows.indices(d_out)))
        return inputs + 4 * rows * numbers_per_row(d_in, 1 if self.diagonal else self.samples, plan.column_block)

    def gram_bytes(self, layer: PrunableLayer) -> int:
        """Bytes of its Gram matrices, or of their diagonals."""
        d_in = layer.shape[1]
        return 4 * layer.groups * d_in * (1 if self.diagonal else d_in)

    def slicing(self, layer: PrunableLayer, size: int) -> Slicing:
        """How a layer, with statistics of `size` bytes in this process, can be collected in slices."""
        if layer.separate:
            return Slicing(layer.groups, 0, -(-size // layer.groups))
        if not self.needs_rows(layer) or not self.solver.ranks_removals:
            return Slicing(1, self.bytes_of(layer), 0)
        inputs = self.gram_bytes(layer)
        return Slicing(layer.shape[0], inputs, (self.bytes_of(layer) - inputs) // layer.shape[0])

    def slices(self, layer: PrunableLayer, size: int, memory: int) -> tuple[slice, ...]:
        """The rows or experts of each pass, for a layer that exceeds the memory; empty where one pass serves.

        `size` is the bytes of its statistics in this process, `memory` the bytes that may be used.
        """
        if layer.separate:
            if layer.groups == 1:
                return ()
            return tuple(split_range(0, layer.groups, max(1, memory * layer.groups // size)))
        if self.slicing(layer, size).pieces == 1:
            return ()
        rows = row_slices_within(layer, self.plan(layer), self.samples, memory - 4 * layer.groups * layer.shape[1] ** 2)
        return () if len(rows) == 1 else tuple(rows)

    def shards_rows(self, layer: PrunableLayer) -> bool:
        """Whether processes can solve a matrix together, some of the rows each."""
        d_out, d_in = layer.shape
        able = self.solver.ranks_removals or self.solver.by_rows
        able = able and all(isinstance(pattern, Unstructured | NM) for pattern in self.patterns[layer.name])
        return able and layer.groups == 1 and d_out * d_in >= LEAST_SHARDED

    def cost(self, layer: PrunableLayer, processes: int = 1) -> float:
        """The `solving_cost` of a layer with its own patterns and samples."""
        samples = self.samples if self.needs_rows(layer) else 0
        return solving_cost(self.solver, layer, self.patterns[layer.name], samples, processes)


def row_slices_within(layer: PrunableLayer, plan: GradientPlan, samples: int, memory: int) -> list[slice]:
    """Rows whose gradients of N samples fit in the memory: whole groups of a grouped convolution, or a part of one."""
    d_out, d_in = layer.shape
    size, count = d_out // layer.groups, max(1, memory // (4 * numbers_per_row(d_in, samples, plan.column_block)))
    if count >= size:
        return split_range(0, d_out, count // size * size)
    return [rows for first in range(0, d_out, size) for rows in split_range(first, first + size, count)]


def solving_cost(
    solver: Solver, layer: PrunableLayer, patterns: Sequence[Pattern], samples: int = 0, processes: int = 1
) -> float:
    """A rough estimate of the operations of a layer, to balance the load of processes.

    Every process factorizes a matrix in d_in³ operations; then a row takes d_in², with gradients of N `samples` that
    times N, at most d_in. Solvers that remove the weights of a row one by one take d_in³ for each row. One elimination
    serves a family of patterns. Each of the `processes` solves some of the rows.
    """
    d_out, d_in = layer.shape
    matrices = layer.groups if layer.separate else 1
    rows, samples = -(-d_out // (matrices * processes)), min(samples, d_in)
    if solver.objective.diagonal_only:
        operations = rows * d_in
    elif solver.ranks_removals:
        operations = rows * d_in**2 * (d_in + samples)
    else:
        operations = d_in**3 + rows * d_in**2 * max(1, samples)
    return float(matrices * operations * len({solver.family(pattern) for pattern in patterns}))


@dataclass(frozen=True)
class Part:
    """Layers that are collected and solved together."""

    layers: tuple[PrunableLayer, ...]
    owners: tuple[Owner, ...]  # who solves each layer: a process, several with some rows each, or (None) all
    slices: tuple[slice, ...] = ()  # rows or experts of the only layer, one pass each; () is all in one pass
    sizes: tuple[int, ...] = ()  # bytes of each layer's statistics in this process
    plan: GradientPlan | None = None  # of the gradients of the only layer; None for that of the spec

    @property
    def name(self) -> str:
        """For the report."""
        others = f" and {len(self.layers) - 1} more layers" if len(self.layers) > 1 else ""
        return self.layers[0].name + others


def partition(
    layers: Sequence[PrunableLayer], spec: StatisticsSpec, memory: int, processes: int = 1, most: int | None = None
) -> list[Part]:
    """Divide the layers of a stage into parts; `memory` is the bytes available, the same in all processes.

    `most` is the largest number of samples that a process observes; None is that of equal shards. A part may use half
    of the memory; the other half is for the solver.
    """
    budget = memory // 2
    most = -(-spec.samples // processes) if most is None else most
    sizes = [resident_bytes(layer, spec, budget, processes, most) for layer in layers]
    parts: list[Part] = []
    first = 0
    while first < len(layers):
        end, used = first + 1, sizes[first]
        while end < len(layers) and used + sizes[end] <= budget:
            used += sizes[end]
            end += 1
        together = tuple(layers[first:end])
        slices = spec.slices(layers[first], used, budget) if used > budget else ()
        owners = layer_owners(together, spec, budget, processes, most) if processes > 1 else (0,) * len(together)
        parts.append(Part(together, owners, slices, tuple(sizes[first:end])))
        first = end
    return parts


def halved(part: Part, spec: StatisticsSpec) -> tuple[int, int] | None:
    """The bytes that one pass collects for a part, and the bytes for half as many layers, rows or experts.

    None if a pass collects a single one already.
    """
    if not part.sizes:  # without data
        return None
    if len(part.layers) > 1:
        total = sum(part.sizes)
        return total, max(total // 2, *part.sizes)
    slicing = spec.slicing(part.layers[0], part.sizes[0])
    width = max((rows.stop - rows.start for rows in part.slices), default=slicing.pieces)
    if width == 1:
        return None
    return slicing.fixed + width * slicing.piece_bytes, slicing.fixed + -(-width // 2) * slicing.piece_bytes


def resident_bytes(layer: PrunableLayer, spec: StatisticsSpec, budget: int, processes: int, most: int) -> int:
    """Bytes of a layer's statistics in the process with the most samples, on average over the layers that it solves.

    It has its samples of every layer, and all samples of the layers that it solves. A layer that fills the memory
    counts whole, unless its experts or its rows are sharded.
    """
    whole = spec.bytes_of(layer)
    if processes <= 2 or spec.diagonal or not spec.needs_rows(layer) or spec.plan(layer).column_block is not None:
        return whole
    if whole > budget and not (_has_experts(layer) or shards_rows(layer, spec, processes)):
        return whole
    inputs = spec.gram_bytes(layer)
    gradients = whole - inputs
    return inputs + min(gradients, gradients * most // spec.samples + gradients // processes)


def layer_owners(
    layers: Sequence[PrunableLayer], spec: StatisticsSpec, budget: int, processes: int, most: int
) -> tuple[Owner, ...]:
    """Who of several processes solves each layer; a matrix whose statistics exceed one process is always sharded."""

    def cost(layer: PrunableLayer) -> float:
        whole = spec.bytes_of(layer)
        exceeds = shards_rows(layer, spec, processes) and whole > budget
        exceeds = exceeds and whole > resident_bytes(layer, spec, budget, processes, most)
        return inf if exceeds else spec.cost(layer)

    whole = [layer for layer in layers if not _has_experts(layer)]
    sharded = [spec.cost(layer, processes) if shards_rows(layer, spec, processes) else None for layer in whole]
    divided = divide([cost(layer) for layer in whole], sharded, processes)
    solvers = {layer.name: owner for layer, owner in zip(whole, divided, strict=True) if owner is not None}

    def owner(layer: PrunableLayer) -> Owner:
        if layer.name in solvers:
            return solvers[layer.name]
        rows = layer.shape[0]
        return rows_of_processes(rows, layer.groups if layer.separate else rows, processes)

    return tuple(map(owner, layers))


def _has_experts(layer: PrunableLayer) -> bool:
    return layer.separate and layer.groups > 1


def shards_rows(layer: PrunableLayer, spec: StatisticsSpec, processes: int) -> bool:
    """Whether several processes can solve a matrix together, some of its rows each."""
    return layer.shape[0] >= processes > 1 and spec.shards_rows(layer)
