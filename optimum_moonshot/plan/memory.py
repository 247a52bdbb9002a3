"""The bytes of a run, phase by phase: what a rehearsal has measured, or what the shapes of the layers say, times the
numbers of blocks and samples. The layers are divided by the run's own `partition`.
"""

import dataclasses
from collections.abc import Callable
from functools import cached_property
from itertools import dropwhile
from typing import Any, NamedTuple

import torch
from torch import nn

from ..allocate.loss_curves import SampledRows, sampled_count
from ..calibration.storage import MORE_MEMORY, Storage
from ..model.layers import Block, PrunableLayer
from ..model.model_info import text_setting, vocabulary_size
from ..objective.patterns import Pattern
from ..pipeline.partition import Part, StatisticsSpec, partition
from ..pipeline.selection import Selection
from ..pipeline.under_calibrated_experts import is_under_calibrated
from ..recover.run import Placement, TrainingBytes
from ..recover.student import changes_structure, trainable
from ..recover.tuning import part_size
from .report import DISK, HOST, BlockPlan, Bytes, Overflow, Snapshot

# Bytes per trained weight: the float32 weight, gradient, two moments of Adam and two snapshots; and the mask.
TRAINED_BYTES = 4 * 6 + 1
# Bytes per weight of a matrix while a rotation is learned: the matrix, two rotated ones, the scores, their gradients.
LEARNED_BYTES = 4 * 7
# Bytes that `save_pretrained` copies to host memory at once, at most: of a resident model, and of an offloaded one.
SHARD_BYTES, STREAMED_BYTES = 50 * 10**9, 500 * 10**6
# The freed memory that a C library retains within a phase, at most: glibc's trim threshold at the end of its heap,
# which is twice the largest tensor below 32 MiB, and as much in holes between tensors that live longer.
RETAINED_BYTES = 128 * 2**20


class Line(NamedTuple):
    """A size with a fixed part, and a part per unit."""

    fixed: float
    slope: float

    @classmethod
    def through(cls, one: tuple[int, float], two: tuple[int, float]) -> "Line":
        """The line through two points; through zero where they are one."""
        slope = max(0.0, two[1] - one[1]) / (two[0] - one[0]) if two[0] > one[0] else two[1] / two[0]
        return cls(max(0.0, two[1] - slope * two[0]), slope)

    def at(self, count: int) -> int:
        return int(self.fixed + self.slope * count)


class Trial(NamedTuple):
    """The solver of a matrix."""

    rows: int
    seconds: float
    size: Line  # bytes at its peak by the rows, besides the statistics


class Rehearsed(NamedTuple):
    """A phase that passes the data."""

    seconds: float  # of all its passes
    head: Line  # bytes by the samples of a batch before the first block is visited
    visit: Line  # and while it is; the fixed part are its statistics
    hidden: float  # bytes of a sample between two blocks
    trials: dict[Any, Trial]


def kind_of(block: Block) -> Any:
    """A key that is equal for blocks with the same memory and time."""
    layers = tuple((layer.name.removeprefix(block.name), layer.shape) for layer in block.layers)
    shapes = tuple((name, parameter.shape) for name, parameter in block.module.named_parameters())
    return type(block.module), shapes, layers


def module_bytes(module: nn.Module) -> int:
    """Bytes of all parameters and buffers, shared ones once."""
    return sum({id(tensor): tensor.nbytes for tensor in (*module.parameters(), *module.buffers())}.values())


def weight_bytes(layer: PrunableLayer) -> int:
    """Bytes of a layer's matrix in the model's dtype."""
    return layer.shape[0] * layer.shape[1] * layer.parameter.dtype.itemsize


class OffloadedBlocks(NamedTuple):
    """Bytes of the offloaded blocks; one at a time is onloaded."""

    largest: int
    total: int
    place: str  # "cpu" or "disk"


@dataclasses.dataclass(frozen=True)
class RunSpec:
    """A run, or a phase of one, before it starts."""

    model: nn.Module
    selection: Selection
    in_turn: tuple[Block, ...]  # blocks that follow each other; other layers need passes of the whole model
    sizes: tuple[int, ...]  # samples of each batch
    tokens: int  # of a sample; 0 if samples are not tokens
    storage: Storage
    resumes: bool  # results are written to a folder
    gradients: bool  # whether its passes run backward
    forward: bool = False  # whether its statistics are those of forward passes behind pruned blocks
    kind: type[StatisticsSpec] = StatisticsSpec
    offloaded: OffloadedBlocks | None = None

    @property
    def device(self) -> torch.device:
        return self.storage.device

    @property
    def samples(self) -> int:
        """N, in all batches."""
        return sum(self.sizes)

    @property
    def batch(self) -> int:
        """Samples of the largest batch."""
        return max(self.sizes)

    @property
    def itemsize(self) -> int:
        """Bytes of a number in the model's dtype."""
        return self.selection.layers[0].parameter.dtype.itemsize

    @property
    def differentiates(self) -> bool:
        """Whether every block has gradients behind pruned blocks, from a pass through all that follow."""
        return self.gradients and bool(self.selection.recompute) and not self.forward

    @property
    def result_place(self) -> str:
        """Where results wait for the end of the run."""
        on_disk = self.resumes or (self.offloaded is not None and self.offloaded.place == DISK)
        return DISK if on_disk else HOST

    @property
    def hidden(self) -> float:
        """Bytes of a sample of tokens between two blocks."""
        return self.tokens * text_setting(self.model, "hidden_size") * self.itemsize

    @property
    def backward(self) -> bool:
        """Whether the blocks are visited with gradients."""
        return self.gradients and not self.forward

    @cached_property
    def statistics(self) -> StatisticsSpec:
        patterns = {layer.name: [self.pattern(layer)] for layer in self.selection.layers}
        return self.kind.of(self.selection, patterns, self.samples)

    def dense(self, kind: type[StatisticsSpec], lam: float, gradients: bool, samples: int | None = None) -> "RunSpec":
        """Passes over the dense model, of some of its samples."""
        count, batch, selection = samples or self.samples, self.batch, self.selection.of_the_dense_model(lam)
        sizes = tuple(min(batch, count - first) for first in range(0, count, batch))
        changes: dict[str, Any] = dict(selection=selection, sizes=sizes, gradients=gradients, forward=False, kind=kind)
        return dataclasses.replace(self, **changes)

    def turns(self, blocks: int) -> int:
        """The passes through so many blocks; quadratic where every block has gradients behind pruned ones."""
        return blocks * (blocks + 1) // 2 if self.differentiates else blocks

    def pattern(self, layer: PrunableLayer) -> Pattern:
        return self.selection.pattern_of(layer)

    def key(self, layer: PrunableLayer) -> Any:
        """Equal for layers that take the solver as long."""
        return layer.shape, layer.groups, layer.separate, self.selection.lam_of(layer), self.pattern(layer)

    def all_token_experts(self, layer: PrunableLayer) -> int:
        """The number of experts that get all tokens, if the router sends the same number of tokens to each."""
        top_k = text_setting(self.model, "num_experts_per_tok") or 1
        if not layer.separate or self.selection.config.under_calibrated_experts != "all":
            return 0
        tokens = self.samples * self.tokens * top_k // layer.groups
        return layer.groups if is_under_calibrated(tokens, layer.shape[1]) else 0

    def result_bytes(self, layer: PrunableLayer) -> int:
        """Bytes of a layer's pruned weight; in a file only its survivors and a bit mask."""
        size = weight_bytes(layer)
        survivors = round((1 - self.pattern(layer).sparsity) * size)
        return min(size, survivors + layer.shape[0] * layer.shape[1] // 8) if self.result_place == DISK else size

    def by_shapes(self) -> Rehearsed:
        """The bytes of a phase without weights: inputs and outputs of the layers, logits, and usual solvers."""
        experts = text_setting(self.model, "num_experts_per_tok") or 1
        width, trials = 0, dict[Any, Trial]()
        for block in self.selection.structure.blocks:
            widths = (layer.shape[1] + layer.shape[0] // layer.groups for layer in block.layers if not layer.separate)
            routed = (layer.shape[1] + layer.shape[0] // layer.groups for layer in block.layers if layer.separate)
            width = max(width, sum(widths) + experts * sum(routed))
        for layer in self.selection.layers:
            rows, d_in = layer.shape[0] // (layer.groups if layer.separate else 1), layer.shape[1]
            factors = min(self.samples, d_in) if self.statistics.needs_rows(layer) else 0
            usual = Line(0, 24 * d_in) if self.statistics.diagonal else Line(24 * d_in**2, (30 + 4 * factors) * d_in)
            trials[self.key(layer)] = Trial(rows, 0.0, usual)
        visit = self.tokens * self.itemsize * width * (1 + self.gradients)
        return Rehearsed(0.0, Line(0, self.logits * self.gradients), Line(0, visit), self.hidden, trials)

    @property
    def logits(self) -> int:
        """Bytes of a sample's logits with their gradient, and of its largest float32 copies."""
        return self.tokens * vocabulary_size(self.model) * (2 * self.itemsize + 8)


class GramMatrices(StatisticsSpec):
    """The statistics of a rotation, whatever the solver: at λ = 1 Gram matrices alone."""

    diagonal = False


Rehearse = Callable[[RunSpec, str], Rehearsed]  # of a phase


@dataclasses.dataclass
class Trace:
    """The bytes that stay in memory at present, by item and place, and the snapshots so far."""

    run: RunSpec
    rehearse: Rehearse
    held: dict[str, Bytes] = dataclasses.field(default_factory=dict)
    snapshots: list[Snapshot] = dataclasses.field(default_factory=list)
    overflows: list[Overflow] = dataclasses.field(default_factory=list)
    phases: dict[str, Rehearsed] = dataclasses.field(default_factory=dict)

    @property
    def device(self) -> str:
        return str(self.run.device)

    def add(self, item: str, place: str, size: int) -> None:
        """Add bytes to an item at a place."""
        sizes = self.held.setdefault(item, {})
        sizes[place] = sizes.get(place, 0) + size

    def store(self, item: str, size: int, unit: int = 1) -> None:
        """Set the bytes of an item, in pieces of a unit, in the first places with room for them, like `Storage`."""
        self.held.pop(item, None)
        for place, room in self._room().items():
            here = min(size, room - room % max(1, unit))
            self.add(item, place, here)
            size -= here
        self.add(item, DISK, size)
        if size and self.run.selection.config.offload_dir is None and not self.overflows:
            has = self.run.storage.limits[self.run.device]
            self.overflows.append(Overflow(self.device, "calibration", item, size + has, has, MORE_MEMORY))

    def _room(self) -> Bytes:
        stored = [self.held[item] for item in ("caches", "inverses", "statistics") if item in self.held]
        limits = {str(place): limit for place, limit in self.run.storage.limits.items()}
        return {place: max(0, limit - sum(s.get(place, 0) for s in stored)) for place, limit in limits.items()}

    def snapshot(self, phase: str, where: str, retained: float = 0, **temporary: int) -> None:
        """Record the bytes in memory at a block or layer, with temporary ones (item → bytes) on the device."""
        if self.run.device.type == "cpu":
            temporary["allocator"] = min(RETAINED_BYTES, int(retained))
        items = {item: {place: size for place, size in sizes.items() if size} for item, sizes in self.held.items()}
        items |= {item: {self.device: size} for item, size in temporary.items() if size}
        self.snapshots.append(Snapshot(phase, where, {item: sizes for item, sizes in items.items() if sizes}))

    # Phases

    def all(self) -> tuple[BlockPlan, ...]:
        """Count all phases, in the order of the run; returns the passes of the calibration."""
        run, config = self.run, self.run.selection.config
        self.add("weights of a block", self.device, run.offloaded.largest if run.offloaded else 0)
        if config.rotation is not None:
            self._rotation()
        if config.allocation == "fisher":
            self._walk(run.dense(SampledRows, 0.0, True, sampled_count(run.samples)), "allocation", "allocation")
        plans = self._walk(run, "calibration", "solver")
        if config.recover is not None and not (config.distills and self._distillation()):
            self._recovery()
        self._writing()
        return plans

    def _walk(self, run: RunSpec, phase: str, solver: str | None = None, whole: bool = False) -> tuple[BlockPlan, ...]:
        """Count the passes of a phase over the model, in the order of the run, and the solver.

        With `whole`, one pass collects all layers of a block, whatever the memory.
        """
        self.phases[phase] = rehearsed = self.rehearse(run, phase)
        blocks = tuple(dropwhile(lambda block: not block.layers, run.in_turn))
        count, backward, plans = len(blocks), run.backward, list[BlockPlan]()
        cache, unit = int(rehearsed.hidden * run.samples), int(rehearsed.hidden * run.batch)
        head, visit = rehearsed.head.at(run.batch), rehearsed.visit.slope * run.batch
        if run.gradients and count:  # a pass of the dense model caches the inputs of all blocks
            weighed = sum(run.selection.lam_of(layer) < 1 for layer in run.selection.layers) * run.forward
            self.add("token weights", self.device, 4 * run.samples * run.tokens * weighed)
            self.store("caches", (count + 1) * cache, unit)
            self.snapshot(phase, "head and loss", max(head, visit), logits=int(head))
        turns = list(enumerate(blocks))
        for index, block in reversed(turns) if backward and not run.differentiates else turns:
            cached = count - index if run.differentiates else index + 1
            self.store("caches", (cached + 1 if backward else 1) * cache, unit)
            if block.layers:
                plans.append(self._block(run, phase, block, index, solver, whole))
        self.held.pop("caches", None)
        alone = (block for block in run.selection.structure.blocks if block not in run.in_turn)
        others = [*(layer for block in alone for layer in block.layers), *run.selection.structure.outside]
        if others:
            block = Block("the whole model", others[0].modules[0], tuple(others))
            plans.append(self._block(run, phase, block, 0, solver, whole))
        self.held.pop("token weights", None)
        return tuple(reversed(plans)) if backward and not run.differentiates and not others else tuple(plans)

    def _block(self, run: RunSpec, phase: str, block: Block, index: int, solver: str | None, whole: bool) -> BlockPlan:
        """Count all passes at a block, and the solver of its layers."""
        rehearsed, spec, layers = self.phases[phase], run.statistics, block.layers
        head, visit = rehearsed.head.at(run.batch), rehearsed.visit.slope * run.batch
        together = [Part(layers, (0,) * len(layers))]
        parts = together if whole else partition(layers, spec, max(1, self._room()[self.device]))
        statistics = max(_part_bytes(spec, part) for part in parts)
        self.store("statistics", min(statistics, int(rehearsed.visit.fixed or statistics)))
        self.snapshot(phase, block.name, max(visit, head * run.gradients), activations=int(visit))
        rows = {part.layers[0].name: part.slices[0].stop for part in parts if part.slices}
        for layer in layers if solver is not None else ():
            size = self._solver_bytes(rehearsed, run, layer, rows.get(layer.name))
            self.snapshot(solver or "", layer.name, max(visit, head * run.gradients), solver=size)
            self.add("results", run.result_place, run.result_bytes(layer) if solver == "solver" else 0)
        del self.held["statistics"]
        last, passes = parts[-1], sum(_passes_of(run, part) for part in parts)
        # Passes of slices or experts do not produce the input of the next block: one more pass does.
        passes += bool(last.slices) or (not spec.keeps_routing and any(layer.separate for layer in last.layers))
        pruned = run.forward or bool(run.selection.recompute)
        passes = passes * (index + 1) + 1 if run.differentiates else passes + pruned + (run.forward and run.gradients)
        slices = {part.layers[0].name: len(part.slices) for part in parts if part.slices}
        return BlockPlan(block.name, len(parts), passes, slices)

    def _solver_bytes(self, rehearsed: Rehearsed, run: RunSpec, layer: PrunableLayer, rows: int | None) -> int:
        trial = rehearsed.trials.get(run.key(layer))
        if trial is None:  # no sample of the rehearsal has reached it
            return 0
        if layer.separate or rows is None:
            return trial.size.at(trial.rows) + (weight_bytes(layer) if layer.separate else 0)
        return trial.size.at(rows) + 8 * layer.shape[0] * layer.shape[1]

    def _rotation(self) -> None:
        """Count a pass, with an inverse of every Gram matrix, and the learning of the rotation.

        The dense weights are copied to host memory. Rotated weights of offloaded blocks stay beside the original ones
        until the run ends.
        """
        offloaded, selection, model = self.run.offloaded, self.run.selection, self.run.model
        self.add("dense weights", HOST, 0 if offloaded is not None else sum(map(weight_bytes, selection.layers)))
        if offloaded is not None:
            self.add("rotated weights", offloaded.place, offloaded.total)
        width, heads = text_setting(model, "hidden_size"), max(1, text_setting(model, "num_attention_heads"))
        widths = [{layer.shape[1] for layer in block.layers} for block in selection.structure.blocks]
        sizes = (d_in * (d_in if d_in == width else max(1, d_in // heads)) for each in widths for d_in in each)
        self.store("inverses", 4 * sum(sizes))
        gradients = selection.rotates_by_gradients
        self._walk(self.run.dense(GramMatrices, 1.0, gradients), "rotation", whole=True)
        largest = max(layer.shape[0] * layer.shape[1] // layer.groups for layer in selection.layers)
        self.snapshot("rotation", "learning", learning=LEARNED_BYTES * largest + 24 * width**2)
        del self.held["inverses"], self.held["dense weights"]

    def _recovery(self) -> None:
        """Count two streams of hidden states, and one block in training at a time."""
        run, config = self.run, self.run.selection.config
        samples = min(part_size(run.samples), run.batch)
        per_weight = TRAINED_BYTES + (0 if run.itemsize == 4 else run.itemsize + 4)  # with the rounded weight
        per_weight += 8 if config.bits or config.has_budget else 0  # the weight on the grid and its gradient
        self.phases["recovery"] = rehearsed = self.rehearse(run.dense(GramMatrices, 1.0, True), "recovery")
        activations = int(rehearsed.visit.slope * samples * 4 / run.itemsize)
        self.store("streams", 2 * int(rehearsed.hidden * run.samples))
        for block in (block for block in run.in_turn if block.layers):
            others = _trained_beside(run, block)
            trained = sum(layer.shape[0] * layer.shape[1] for layer in block.layers) + sum(map(torch.numel, others))
            training = trained * per_weight
            self.snapshot("recovery", block.name, activations, activations=activations, training=training)
            self.add("results", run.result_place, sum(tensor.nbytes for tensor in others))
        del self.held["streams"]

    def _distillation(self) -> bool:
        """Count the teacher's hidden states, and a copy of the model with its optimizer; False if they do not fit."""
        run, config = self.run, self.run.selection.config
        size = TrainingBytes.of(run.model, config)
        placement = Placement.within(size, run.storage)
        if not placement.trains:
            return False
        self.phases["recovery"] = rehearsed = self.rehearse(run.dense(GramMatrices, 1.0, True), "recovery")
        samples = min(part_size(run.samples), run.batch)
        activations = int(samples * (rehearsed.visit.slope * len(run.in_turn) + 1.5 * run.logits))
        self.store("streams", int(rehearsed.hidden * run.samples))
        self.add("training", HOST, size.host if placement.on_host else size.best)
        self.add("training", self.device, size.copy + (0 if placement.on_host else size.state))
        self.snapshot("recovery", "the model", activations=min(activations, run.storage.available()))
        del self.held["training"], self.held["streams"]
        return True

    def _writing(self) -> None:
        """Count the dense weights, which are moved to host memory while pruned ones replace them; then the copied
        tensors of a saved file. A resident model in host memory is saved without copies.
        """
        run, offloaded, copied = self.run, self.run.offloaded, 0
        if offloaded is None:
            sizes = list(map(weight_bytes, run.selection.layers))
            sizes += [parameter.nbytes for block in run.in_turn for parameter in _trained_beside(run, block)]
            dense = max(sizes) + (sum(sizes) if run.resumes else 0)
            self.add("dense weights", HOST, dense)
            self.snapshot("writing", "the model")
            self.add("dense weights", HOST, -dense)
            self.held.pop("results", None)
            copied = 0 if run.device.type == "cpu" else SHARD_BYTES
        else:
            copied = max(STREAMED_BYTES, offloaded.largest)
        self.add("weights of a file", HOST, min(module_bytes(run.model), copied))
        self.snapshot("saving", "the model")


def _part_bytes(spec: StatisticsSpec, part: Part) -> int:
    """Bytes of the statistics that one pass collects."""
    layer = part.layers[0]
    if part.slices and layer.separate:
        return spec.bytes_of(layer) * (part.slices[0].stop - part.slices[0].start) // layer.groups
    if part.slices:
        plan = dataclasses.replace(spec.plan(layer), rows=part.slices[0])
        return spec.gram_bytes(layer) + spec.gradient_bytes(layer, plan)
    return sum(map(spec.bytes_of, part.layers))


def _passes_of(run: RunSpec, part: Part) -> int:
    """Passes over the data that collect a part: slices of rows once to rank them, again to solve all but the last."""
    slices, separate = len(part.slices), any(layer.separate for layer in part.layers)
    passes = 1 if not slices else slices if separate else 2 * slices - 1
    return passes * (2 if any(map(run.all_token_experts, part.layers)) else 1)


def _trained_beside(run: RunSpec, block: Block) -> list[nn.Parameter]:
    """The parameters of a block that a recovery trains besides the pruned matrices: all of a narrower block."""
    if run.selection.config.recover is None or not changes_structure(map(run.pattern, block.layers)):
        return []
    pruned = {id(layer.parameter) for layer in block.layers}
    return [parameter for parameter in trainable(block.module).values() if id(parameter) not in pruned]
