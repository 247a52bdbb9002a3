"""The bytes of a run, phase by phase: what a rehearsal has measured, or what the shapes of the layers say, times the
numbers of blocks and samples. The layers are divided by the run's own `partition`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import dropwhile
from math import inf
from typing import Any, NamedTuple

import torch
from torch import nn

from ..allocate.loss_curves import SampledRows, sampled_count
from ..calibration.storage import MORE_MEMORY
from ..data.batches import batch_size
from ..model.layers import Block, PrunableLayer
from ..model.model_info import text_setting, vocabulary_size
from ..pipeline.block_sequences import Extras
from ..pipeline.inputs import Prepared
from ..pipeline.partition import Part, StatisticsSpec, partition
from ..pipeline.under_calibrated_experts import is_under_calibrated
from ..recover.student import changes_structure, trainable
from ..recover.tuning import part_size
from .report import DISK, HOST, BlockPlan, Bytes, Overflow, Snapshot

# Bytes per trained weight: the float32 weight, gradient, two moments of Adam and two snapshots; and the mask.
TRAINED_BYTES = 4 * 6 + 1
# Bytes that `save_pretrained` copies to host memory at once, at most: of a resident model, and of an offloaded one.
SHARD_BYTES, STREAMED_BYTES = 50 * 10**9, 500 * 10**6
# The freed memory that a C library retains within a phase, at most: glibc's trim threshold at the end of its heap,
# which is twice the largest tensor below 32 MiB, and as much in holes between tensors that live longer.
RETAINED_BYTES = 128 * 2**20

Point = tuple[int, float]  # a count, and the seconds or bytes of so many


def extrapolated(points: Sequence[Point], count: int) -> float:
    """The value at a count on the line through the last two points, or through zero and a single one.

    It neither falls with the count nor grows faster than the count does.
    """
    (few, less), (more, most) = [(0, 0.0), *points][-2:]
    return most + min(max(0.0, most - less) / (more - few), most / more) * (count - more)


class Trial(NamedTuple):
    """The solver of a matrix."""

    rows: int
    seconds: float
    sizes: Sequence[Point]  # bytes at its peak by the rows, besides the statistics


class Rehearsed(NamedTuple):
    """The needs of a phase that passes the data."""

    seconds: float  # of all its passes
    around: float  # seconds of those that do not depend on the blocks
    head: float  # bytes of a batch before the first block is visited
    visit: float  # bytes of a batch while a block is visited, besides the statistics
    statistics: float  # bytes of those of a pass, at most
    hidden: float  # bytes of a sample between two blocks
    trials: dict[Any, Trial]  # by `RunSpec.key`


class OffloadedBlocks(NamedTuple):
    """Bytes of the offloaded blocks; one at a time is onloaded."""

    largest: int = 0
    total: int = 0  # 0: all blocks are resident
    place: str | None = None  # "cpu" or "disk"


def module_bytes(module: nn.Module) -> int:
    """Bytes of all parameters and buffers, shared ones once."""
    return sum({id(tensor): tensor.nbytes for tensor in (*module.parameters(), *module.buffers())}.values())


def weight_bytes(layer: PrunableLayer) -> int:
    """Bytes of a layer's matrix in the model's dtype."""
    return layer.shape[0] * layer.shape[1] * layer.parameter.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class RunSpec(Prepared):
    """A run, or a phase of one, before it starts; its storage has the memory that the plan assumes."""

    in_turn: tuple[Block, ...] = ()  # blocks that follow each other; other layers need passes of the whole model
    extras: Extras | None = None  # with which blocks can return their input; None: all have to run
    offloaded: OffloadedBlocks = OffloadedBlocks()
    resumes: bool = False  # results are written to a folder
    gradients: bool = False  # whether its passes run backward
    forward: bool = False  # whether its statistics are those of forward passes behind pruned blocks
    kind: type[StatisticsSpec] = StatisticsSpec

    def describe_model(self, weights: bool) -> dict[str, Any]:
        """The model, which may have no weights, for the report of the plan."""
        return {
            "class": type(self.model).__name__,
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "bytes": module_bytes(self.model),
            "weights": weights,
            "offloaded": self.offloaded._asdict() if self.offloaded.total else None,
        }

    @property
    def resident_bytes(self) -> int:
        """Bytes of the model that are on its device all the time."""
        return module_bytes(self.model) - self.offloaded.total

    @property
    def count(self) -> int:
        """N, the samples in all batches."""
        return self.calibration.num_samples

    @property
    def batch(self) -> int:
        """Samples of the largest batch."""
        return max(map(batch_size, self.calibration.batches))

    @property
    def tokens(self) -> int:
        """Of a sample; 0 if samples are not tokens."""
        return self.calibration.sequence_length or 0

    @property
    def itemsize(self) -> int:
        """Bytes of a number in the model's dtype."""
        return self.selection.layers[0].parameter.dtype.itemsize

    @property
    def backward(self) -> bool:
        """Whether the blocks are visited with gradients."""
        return self.gradients and not self.forward

    @property
    def differentiates(self) -> bool:
        """Whether every block has gradients behind pruned blocks, from a pass through all that follow."""
        return self.backward and bool(self.selection.recompute)

    def turns(self, blocks: int) -> int:
        """The passes through so many blocks; quadratic where every block has gradients behind pruned ones."""
        return blocks * (blocks + 1) // 2 if self.differentiates else blocks

    @cached_property
    def statistics(self) -> StatisticsSpec:
        patterns = {layer.name: [self.selection.pattern_of(layer)] for layer in self.selection.layers}
        return self.kind.of(self.selection, patterns, self.count)

    def dense(self, kind: type[StatisticsSpec], lam: float, gradients: bool, samples: int | None = None) -> "RunSpec":
        """Passes over the dense model, of some of its samples."""
        selection, data = self.selection.of_the_dense_model(lam), self.calibration.spread(samples or self.count)
        changes: dict[str, Any] = dict(selection=selection, data=data, gradients=gradients, forward=False, kind=kind)
        return dataclasses.replace(self, **changes)

    def key(self, layer: PrunableLayer) -> Any:
        """Equal for layers that take the solver as long."""
        selection = self.selection
        return layer.shape, layer.groups, layer.separate, selection.lam_of(layer), selection.pattern_of(layer)

    def reads_all_tokens(self, layer: PrunableLayer) -> bool:
        """Whether experts get all tokens in a second pass, if the router sends the same number of tokens to each."""
        if not layer.separate or self.selection.config.under_calibrated_experts != "all":
            return False
        routed = self.count * self.tokens * (text_setting(self.model, "num_experts_per_tok") or 1)
        return is_under_calibrated(routed // layer.groups, layer.shape[1])

    @property
    def result_place(self) -> str:
        """Where results wait for the end of the run."""
        return DISK if self.resumes or self.offloaded.place == DISK else HOST

    def result_bytes(self, layer: PrunableLayer) -> int:
        """Bytes of a layer's pruned weight; in a file only its survivors and a bit mask."""
        size, density = weight_bytes(layer), 1 - self.selection.pattern_of(layer).sparsity
        bits = layer.shape[0] * layer.shape[1]
        return min(size, round(density * size) + bits // 8) if self.result_place == DISK else size

    def trained_beside(self, block: Block) -> list[nn.Parameter]:
        """The parameters of a block that a recovery trains besides the pruned matrices: all of a narrower block."""
        selection = self.selection
        if selection.config.recover is None or not changes_structure(map(selection.pattern_of, block.layers)):
            return []
        pruned = {id(layer.parameter) for layer in block.layers}
        return [parameter for parameter in trainable(block.module).values() if id(parameter) not in pruned]

    def by_shapes(self) -> Rehearsed:
        """The bytes of a phase without weights: inputs and outputs of the layers, logits, and usual solvers."""
        experts, itemsize = text_setting(self.model, "num_experts_per_tok") or 1, self.itemsize
        widths, trials = [0], dict[Any, Trial]()
        for block in self.selection.structure.blocks:
            wide = ((layer, layer.shape[1] + layer.shape[0] // layer.groups) for layer in block.layers)
            widths.append(sum(width * (experts if layer.separate else 1) for layer, width in wide))
        for layer in self.selection.layers:
            rows, d_in = layer.shape[0] // (layer.groups if layer.separate else 1), layer.shape[1]
            factors = min(self.count, d_in) if self.statistics.needs_rows(layer) else 0
            fixed, row = (0, 24 * d_in) if self.statistics.diagonal else (24 * d_in**2, (30 + 4 * factors) * d_in)
            trials[self.key(layer)] = Trial(rows, 0.0, [(1, fixed + row), (2, fixed + 2 * row)])
        # The logits with their gradient, and their largest float32 copies.
        head = self.tokens * vocabulary_size(self.model) * (2 * itemsize + 8)
        visit = self.tokens * itemsize * max(widths) * (1 + self.gradients)
        hidden = self.tokens * text_setting(self.model, "hidden_size") * itemsize
        return Rehearsed(0.0, 0.0, self.batch * head, self.batch * visit, inf, hidden, trials)


class GramMatrices(StatisticsSpec):
    """The statistics of a rotation, whatever the solver: at λ = 1 Gram matrices alone."""

    diagonal = False


@dataclasses.dataclass
class Trace:
    """The bytes that stay in memory at present, by item and place, and the snapshots so far."""

    run: RunSpec
    rehearse: Callable[[RunSpec, str], Rehearsed]  # a phase
    held: dict[str, Bytes] = dataclasses.field(default_factory=dict)
    snapshots: list[Snapshot] = dataclasses.field(default_factory=list)
    overflows: list[Overflow] = dataclasses.field(default_factory=list)
    phases: dict[str, Rehearsed] = dataclasses.field(default_factory=dict)
    freed: float = 0  # bytes that the passes of the present phase free again and again

    def __post_init__(self) -> None:
        self.device = str(self.run.storage.device)

    def add(self, item: str, place: str, size: int) -> None:
        """Add bytes to an item at a place."""
        sizes = self.held.setdefault(item, {})
        sizes[place] = sizes.get(place, 0) + size

    def store(self, item: str, size: int) -> None:
        """Set the bytes of an item, in the first places with room for them, like `Storage`."""
        self.held.pop(item, None)
        for place, room in self._room().items():
            self.add(item, place, min(size, room))
            size -= min(size, room)
        self.add(item, DISK, size)
        if size and self.run.selection.config.offload_dir is None and not self.overflows:
            has = self.run.storage.limits[self.run.storage.device]
            self.overflows.append(Overflow(self.device, "calibration", item, size + has, has, MORE_MEMORY))

    def _room(self) -> Bytes:
        stored = [self.held[item] for item in ("caches", "statistics") if item in self.held]
        limits = {str(place): limit for place, limit in self.run.storage.limits.items()}
        return {place: max(0, limit - sum(s.get(place, 0) for s in stored)) for place, limit in limits.items()}

    def snapshot(self, phase: str, where: str, **temporary: float) -> None:
        """Record the bytes in memory at a block or layer, with temporary ones (item → bytes) on the device."""
        if self.device == HOST:
            temporary["allocator"] = min(RETAINED_BYTES, self.freed)
        items = self.held | {item: {self.device: int(size)} for item, size in temporary.items()}
        present = {item: {place: size for place, size in sizes.items() if size} for item, sizes in items.items()}
        self.snapshots.append(Snapshot(phase, where, {item: sizes for item, sizes in present.items() if sizes}))

    # Phases

    def all(self) -> tuple[BlockPlan, ...]:
        """Count all phases, in the order of the run; returns the passes of the calibration."""
        run, config = self.run, self.run.selection.config
        self.add("weights of a block", self.device, run.offloaded.largest)
        if config.rotation is not None:
            self._rotation()
        if config.allocation == "fisher":
            self._walk(run.dense(SampledRows, 0.0, True, sampled_count(run.count)), "allocation", "allocation")
        plans = self._walk(run, "calibration", "solver")
        if config.recover is not None:
            self._recovery()
        self._writing()
        return plans

    def _start(self, run: RunSpec, phase: str) -> Rehearsed:
        self.phases[phase] = rehearsed = self.rehearse(run, phase)
        self.freed = max(rehearsed.visit, rehearsed.head * run.gradients)
        return rehearsed

    def _walk(self, run: RunSpec, phase: str, solver: str | None = None) -> tuple[BlockPlan, ...]:
        """Count the passes of a phase over the model, in the order of the run, and the solver."""
        rehearsed = self._start(run, phase)
        blocks = tuple(dropwhile(lambda block: not block.layers, run.in_turn))
        count, cache, plans = len(blocks), int(rehearsed.hidden * run.count), list[BlockPlan]()
        if run.gradients and count:  # a pass of the dense model caches the inputs of all blocks
            self.store("caches", (count + 1) * cache)
            self.snapshot(phase, "head and loss", logits=rehearsed.head)
        back = run.backward and not run.differentiates
        for index in reversed(range(count)) if back else range(count):
            cached = count - index if run.differentiates else index + 1
            self.store("caches", (cached + 1 if run.backward else 1) * cache)
            if blocks[index].layers:
                plans.append(self._block(run, phase, blocks[index], index, solver))
        self.held.pop("caches", None)
        alone = (block for block in run.selection.structure.blocks if block not in run.in_turn)
        others = (*(layer for block in alone for layer in block.layers), *run.selection.structure.outside)
        if others:
            block = Block("the whole model", others[0].modules[0], others)
            plans.append(self._block(run, phase, block, 0, solver))
        return tuple(reversed(plans)) if back and not others else tuple(plans)

    def _block(self, run: RunSpec, phase: str, block: Block, index: int, solver: str | None) -> BlockPlan:
        """Count all passes at a block, and the solver of its layers; without a solver one pass collects all layers."""
        rehearsed, spec, layers = self.phases[phase], run.statistics, block.layers
        parts = partition(layers, spec, max(1, self._room()[self.device]) if solver else 2**60)
        self.store("statistics", int(min(max(_part_bytes(spec, part) for part in parts), rehearsed.statistics)))
        self.snapshot(phase, block.name, activations=rehearsed.visit)
        sliced = {part.layers[0].name: part.slices for part in parts if part.slices}
        for layer in layers if solver else ():
            size = _solver_bytes(rehearsed.trials.get(run.key(layer)), layer, sliced.get(layer.name))
            self.snapshot(solver or "", layer.name, solver=size)
            self.add("results", run.result_place, run.result_bytes(layer) if solver == "solver" else 0)
        del self.held["statistics"]
        last, passes = parts[-1], sum(_passes_of(run, part) for part in parts)
        # Passes of slices or experts do not produce the input of the next block: one more pass does.
        passes += bool(last.slices) or (not spec.keeps_routing and any(layer.separate for layer in last.layers))
        pruned = run.forward or bool(run.selection.recompute)
        passes = passes * (index + 1) + 1 if run.differentiates else passes + pruned + (run.forward and run.gradients)
        return BlockPlan(block.name, len(parts), passes, {name: len(slices) for name, slices in sliced.items()})

    def _rotation(self) -> None:
        """Count a pass beside a copy of the dense weights in host memory, or rotated weights of offloaded blocks, which
        stay until the run ends.
        """
        run, selection = self.run, self.run.selection
        if run.offloaded.place is None:
            self.add("dense weights", HOST, sum(map(weight_bytes, selection.layers)))
        else:
            self.add("rotated weights", run.offloaded.place, run.offloaded.total)
        self._walk(run.dense(GramMatrices, 1.0, selection.config.rotation_weights == "fisher"), "rotation")
        self.held.pop("dense weights", None)

    def _recovery(self) -> None:
        """Count two streams of hidden states, and one block in training at a time."""
        run, config, itemsize = self.run, self.run.selection.config, self.run.itemsize
        rehearsed = self._start(run.dense(GramMatrices, 1.0, True), "recovery")
        per_weight = TRAINED_BYTES + (0 if itemsize == 4 else itemsize + 4)  # with the rounded weight
        per_weight += 8 if config.bits or config.has_budget else 0  # the weight on the grid and its gradient
        activations = rehearsed.visit * min(1, part_size(run.count) / run.batch) * 4 / itemsize
        self.freed = activations
        self.store("streams", int(2 * rehearsed.hidden * run.count))
        for block in (block for block in run.in_turn if block.layers):
            others = run.trained_beside(block)
            trained = sum(layer.shape[0] * layer.shape[1] for layer in block.layers) + sum(map(torch.numel, others))
            self.snapshot("recovery", block.name, activations=activations, training=trained * per_weight)
            self.add("results", run.result_place, sum(tensor.nbytes for tensor in others))
        del self.held["streams"]

    def _writing(self) -> None:
        """Count the dense weights, which are moved to host memory while pruned ones replace them; then the copied
        tensors of a saved file. A resident model in host memory is saved without copies.
        """
        run, offloaded, self.freed = self.run, self.run.offloaded, 0
        copied = max(STREAMED_BYTES, offloaded.largest) if offloaded.total else SHARD_BYTES * (self.device != HOST)
        if not offloaded.total:
            sizes = list(map(weight_bytes, run.selection.layers))
            sizes += [parameter.nbytes for block in run.in_turn for parameter in run.trained_beside(block)]
            self.add("dense weights", HOST, max(sizes) + (sum(sizes) if run.resumes else 0))
            self.snapshot("writing", "the model")
            del self.held["dense weights"], self.held["results"]
        self.add("weights of a file", HOST, min(module_bytes(run.model), copied))
        self.snapshot("saving", "the model")


def _part_bytes(spec: StatisticsSpec, part: Part) -> int:
    """Bytes of the statistics that one pass collects."""
    if not part.slices:
        return sum(part.sizes)
    slicing = spec.slicing(part.layers[0], part.sizes[0])
    return slicing.fixed + slicing.piece_bytes * (part.slices[0].stop - part.slices[0].start)


def _passes_of(run: RunSpec, part: Part) -> int:
    """Passes over the data that collect a part: slices of rows once to rank them, again to solve all but the last."""
    slices, separate = len(part.slices), any(layer.separate for layer in part.layers)
    passes = 1 if not slices else slices if separate else 2 * slices - 1
    return passes * (2 if any(map(run.reads_all_tokens, part.layers)) else 1)


def _solver_bytes(trial: Trial | None, layer: PrunableLayer, slices: tuple[slice, ...] | None) -> float:
    """Bytes of the solver of a layer, or of its first slice."""
    if trial is None:  # no sample of the rehearsal has reached it
        return 0
    if layer.separate:
        return extrapolated(trial.sizes, trial.rows) + weight_bytes(layer)
    rows, ranking = (trial.rows, 0) if slices is None else (slices[0].stop, 8 * layer.shape[0] * layer.shape[1])
    return extrapolated(trial.sizes, rows) + ranking
