"""The bytes of a run, counted phase by phase in its order instead of being allocated.

The partition of the layers and the form of their statistics are computed as in the run (`pipeline/partition.py`),
activations are those of `footprint.py`, and a solver's bytes are those that it states itself (`Solver.workspace`).
"""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn

from ..allocate.loss_curves import SampledRows, sampled_count, sampled_rows, trial_patterns
from ..calibration.accumulators import STAGED
from ..calibration.storage import MORE_MEMORY
from ..model.layers import Block, PrunableLayer
from ..model.model_info import text_setting
from ..objective.linalg import slice_bytes
from ..pipeline.partition import Part, StatisticsSpec, partition
from ..recover.run import Placement, TrainingBytes
from ..recover.student import changes_structure, trainable
from ..recover.tuning import part_size
from .report import DISK, HOST, Bytes, Overflow, Snapshot
from .spec import RunSpec, module_bytes, weight_bytes

# Bytes per trained weight: the float32 weight, gradient, two moments of Adam and two snapshots; and the mask.
TRAINED_BYTES = 4 * 6 + 1
# Bytes per weight of a matrix while a rotation is learned: the matrix, two rotated ones, the scores, their gradients.
LEARNED_BYTES = 4 * 7
# Bytes that `save_pretrained` copies to host memory at once, at most: of a resident model, and of an offloaded one.
SHARD_BYTES, STREAMED_BYTES = 50 * 10**9, 500 * 10**6
WHOLE = "the whole model"  # the name of the block of all layers outside of sequential blocks
Allocation = tuple[str, str, int]  # item, place and bytes


class Visit(NamedTuple):
    """The passes over the data at a block, or over the whole model for the layers outside of sequential blocks."""

    block: Block
    parts: list[Part]
    passes: int


class Phase(NamedTuple):
    """A phase that passes over the data."""

    name: str
    run: RunSpec
    visits: list[Visit]


class GramMatrices(StatisticsSpec):
    """The statistics of a rotation, whatever the solver: at λ = 1 Gram matrices alone."""

    diagonal = False


@dataclasses.dataclass
class MemoryTrace:
    """The bytes in memory at present, by item and place, and the snapshots so far."""

    run: RunSpec
    held: dict[str, Bytes] = dataclasses.field(default_factory=dict)
    snapshots: list[Snapshot] = dataclasses.field(default_factory=list)
    overflows: list[Overflow] = dataclasses.field(default_factory=list)

    def allocate(self, item: str, size: int, where: str) -> Allocation:
        """Count bytes at the first place with enough memory, like `Storage.empty`; `where` is for an `Overflow`."""
        storage = self.run.storage
        device = storage.place(size)
        if device is not None:
            storage.used[device] += size
        elif self.run.selection.config.offload_dir is None and not self.overflows:
            limit, item_there = storage.limits[storage.device], f"{item} of {where}"
            overflow = Overflow(str(storage.device), "calibration", item_there, size, limit, MORE_MEMORY)
            self.overflows.append(overflow)
        place = DISK if device is None else str(device)
        self.add(item, place, size)
        return item, place, size

    def free(self, *allocations: Allocation) -> None:
        """Undo `allocate`."""
        for item, place, size in allocations:
            self.add(item, place, -size)
            if place != DISK:
                self.run.storage.used[torch.device(place)] -= size

    def add(self, item: str, place: str, size: int) -> None:
        """Count bytes at a place, without a limit; a negative size frees them."""
        sizes = self.held.setdefault(item, {})
        sizes[place] = sizes.get(place, 0) + size

    def snapshot(self, phase: str, where: str, **temporary: int) -> None:
        """Record the bytes in memory at a block or layer, with temporary ones (item → bytes) on the device."""
        device = str(self.run.device)
        if phase not in ("writing", "saving"):  # which have no passes
            temporary["allocator"] = self.run.retained
        for item, size in temporary.items():
            self.add(item, device, size)
        present = {item: {place: size for place, size in sizes.items() if size} for item, sizes in self.held.items()}
        self.snapshots.append(Snapshot(phase, where, {item: sizes for item, sizes in present.items() if sizes}))
        for item, size in temporary.items():
            self.add(item, device, -size)


def count_phases(trace: MemoryTrace, model: nn.Module) -> Iterator[Phase]:
    """Count all phases, in the order of the run; those that pass over the data are returned."""
    run, config = trace.run, trace.run.selection.config
    trace.add("weights of a block", str(run.device), run.offloaded.largest if run.offloaded else 0)
    if config.rotation is not None:
        yield _rotation(trace, model)
    if config.allocation == "fisher":
        yield _allocation(trace)
    yield Phase("calibration", run, count_passes(trace, "calibration"))
    if config.recover is not None and not (config.distills and _distillation(trace, model)):
        _recovery(trace)
    _writing(trace, model)


def count_passes(trace: MemoryTrace, phase: str, solves: bool = True, whole: bool = False) -> list[Visit]:
    """Count the passes of a phase over the model, in the order of the run.

    Unless it `solves`, the statistics are freed unused. With `whole`, one pass collects all layers of a block, whatever
    the memory.
    """
    run, visits = trace.run, list[Visit]()
    for sequence in run.sequential:
        observed = [index for index, block in enumerate(sequence.blocks) if block.layers]
        to_head = run.gradients and (run.offloaded is not None or sequence.extras is not None)
        blocks = sequence.blocks[observed[0] : None if to_head else observed[-1] + 1]
        # Backward, the inputs of every block are cached, and the gradient of the current output; forward, the inputs.
        cached = [block.name for block in blocks] if run.gradients else [blocks[0].name]
        caches = [trace.allocate("caches", run.hidden_bytes, name) for name in cached]
        if run.gradients:
            caches.insert(0, trace.allocate("caches", run.hidden_bytes, "output gradients"))
            logits = run.logits_bytes() + 3 * run.footprint.hidden
            trace.snapshot(phase, f"{blocks[-1].name}: head and loss", logits=logits)
        for block in reversed(blocks) if run.gradients else blocks:
            if block.layers:
                visit = _count_block(trace, phase, block, solves, whole)
                visits.append(visit._replace(passes=visit.passes + run.recomputes))
            if run.gradients:
                trace.free(caches.pop())
        trace.free(*caches)
    structure = run.selection.structure
    others = [layer for block in run.non_sequential for layer in block.layers] + list(structure.outside)
    if others:
        block = Block(WHOLE, others[0].modules[0], tuple(others))
        visits.append(_count_block(trace, phase, block, solves, whole))
    return visits


def _count_block(trace: MemoryTrace, phase: str, block: Block, solves: bool, whole: bool) -> Visit:
    """Count all passes at a block, and the solver of its layers."""
    spec, layers = trace.run.statistics, block.layers
    parts = [Part(layers, (0,) * len(layers))] if whole else partition(layers, spec, trace.run.storage.available())
    for part in parts:
        _count_part(trace, phase, block, part, solves)
    last = parts[-1]
    # Passes of slices or experts do not produce the input of the next block: one more pass does.
    advance = bool(last.slices) or (not spec.keeps_routing and any(layer.separate for layer in last.layers))
    return Visit(block, parts, sum(passes_of(trace.run, part) for part in parts) + advance)


def passes_of(run: RunSpec, part: Part) -> int:
    """Passes over the data that collect a part: slices of rows once to rank them, again to solve all but the last."""
    slices, separate = len(part.slices), any(layer.separate for layer in part.layers)
    passes = 1 if not slices else slices if separate else 2 * slices - 1
    return passes * (2 if any(map(run.all_token_experts, part.layers)) else 1)


def _count_part(trace: MemoryTrace, phase: str, block: Block, part: Part, solves: bool) -> None:
    """Count one pass (of slices the first, since all are alike) and the solver of the layers."""
    run, spec = trace.run, trace.run.statistics
    footprint = run.footprint.blocks.get(block.name)
    activations = run.footprint.whole if footprint is None else footprint.observed
    layers, plan, rows, where = part.layers, None, 0, block.name
    if part.slices:
        layer, first = part.layers[0], part.slices[0]
        where = layer.name
        if layer.separate:
            layers = (dataclasses.replace(layer, span=(first.start, first.stop)),)
        else:
            rows, plan = first.stop - first.start, dataclasses.replace(spec.plan(layer), rows=first)
            activations += 4 * (1 + run.batch) * layer.shape[0] * layer.shape[1]  # sums over all slices
    statistics: dict[str, list[Allocation]] = {layer.name: [] for layer in layers}  # freed when this one is solved
    for layer in layers:
        if size := spec.gradient_bytes(layer, plan):
            statistics[layer.name].append(trace.allocate("statistics", size, layer.name))
    shared = () if footprint is None or part.slices else footprint.shared
    groups = [[block.layers[i] for i in group if block.layers[i] in layers] for group in shared]
    for readers in filter(None, groups or [[layer] for layer in layers]):
        size = spec.gram_bytes(readers[0])
        statistics[readers[-1].name].append(trace.allocate("statistics", size, readers[0].name))
    trace.snapshot(phase, where, activations=activations + max(_staging_bytes(run, layer) for layer in layers))
    for layer in part.layers:
        if solves:
            unsliced = 8 * layer.shape[0] * layer.shape[1] if rows else 0
            trace.snapshot("solver", layer.name, solver=run.solver_bytes(layer, rows) + unsliced)
            trace.add("results", run.result_place, run.result_bytes(layer))
        trace.free(*statistics[layer.name])


def _staging_bytes(run: RunSpec, layer: PrunableLayer) -> int:
    """Temporary bytes while a batch's gradients are added."""
    spec, weights = run.statistics, layer.shape[0] * layer.shape[1]
    if not spec.needs_rows(layer):
        return 0
    if spec.diagonal:
        return 8 * weights // layer.groups
    compressed = spec.plan(layer).column_block is not None
    return min(slice_bytes(run.device), 8 * min(STAGED, run.samples) * weights) if compressed else 0


def _rotation(trace: MemoryTrace, model: nn.Module) -> Phase:
    """Count a pass, with an inverse for each group of layers that share their inputs, and the learning of the rotation.

    The dense weights are copied to host memory. Rotated weights of offloaded blocks stay beside the original ones until
    the run ends.
    """
    offloaded, selection, blocks = trace.run.offloaded, trace.run.selection, trace.run.footprint.blocks
    dense_model, gradients = selection.of_the_dense_model(lam=1.0), selection.rotates_by_gradients
    run = dataclasses.replace(trace.run, selection=dense_model, gradients=gradients, kind=GramMatrices)
    dense = 0 if offloaded is not None else sum(map(weight_bytes, selection.layers))
    trace.add("dense weights", HOST, dense)
    if offloaded is not None:
        trace.add("rotated weights", offloaded.place, offloaded.total)
    width, heads = text_setting(model, "hidden_size"), max(1, text_setting(model, "num_attention_heads"))
    inverses = []
    for block in (block for block in selection.structure.blocks if block.name in blocks):
        for group in blocks[block.name].shared:
            d_in = block.layers[group[0]].shape[1]
            size = 4 * d_in * (d_in if d_in == width else max(1, d_in // heads))
            inverses.append(trace.allocate("inverses", size, block.name))
    visits = count_passes(dataclasses.replace(trace, run=run), "rotation", solves=False, whole=True)
    largest = max(layer.shape[0] * layer.shape[1] // layer.groups for layer in selection.layers)
    trace.snapshot("rotation", "learning", learning=LEARNED_BYTES * largest + 24 * width**2)
    trace.free(*inverses)
    trace.add("dense weights", HOST, -dense)
    return Phase("rotation", run, visits)


def _allocation(trace: MemoryTrace) -> Phase:
    """Count a pass of some samples, and the trial solutions of some rows of every matrix."""
    selection, batch, count = trace.run.selection, trace.run.batch, sampled_count(trace.run.samples)
    sizes = tuple(min(batch, count - first) for first in range(0, count, batch))
    dense_model = selection.of_the_dense_model(lam=0.0)
    run = dataclasses.replace(trace.run, selection=dense_model, sizes=sizes, gradients=True, kind=SampledRows)
    visits = count_passes(dataclasses.replace(trace, run=run), "allocation", solves=False)
    largest = max(selection.layers, key=lambda layer: layer.shape[0] * layer.shape[1] // layer.groups)
    rows = len(range(*sampled_rows(largest).indices(largest.shape[0])))
    rows *= len(trial_patterns(selection.patterns[largest.name]))
    size = dataclasses.replace(trace.run.problem_size(largest, rows), samples=0, lam=1.0)
    trace.snapshot("allocation", largest.name, solver=selection.solver.workspace(size, trace.run.pattern(largest)))
    return Phase("allocation", run, visits)


def _recovery(trace: MemoryTrace) -> None:
    """Count two streams of hidden states, and one block in training at a time."""
    run, config = trace.run, trace.run.selection.config
    samples = min(part_size(run.samples), run.batch)
    per_weight = TRAINED_BYTES + (0 if run.itemsize == 4 else run.itemsize + 4)  # with the rounded weight
    per_weight += 8 if config.bits or config.has_budget else 0  # the weight on the grid and its gradient
    streams = [trace.allocate("streams", run.hidden_bytes, "recovery") for _ in range(2)]
    for block in (block for sequence in run.sequential for block in sequence.blocks if block.layers):
        footprint = run.footprint.blocks.get(block.name)
        activations = 0 if footprint is None else footprint.trained * samples * 4 // (run.batch * run.itemsize)
        others = _trained_beside(run, block)
        trained = sum(layer.shape[0] * layer.shape[1] for layer in block.layers) + sum(map(torch.numel, others))
        trace.snapshot("recovery", block.name, activations=activations, training=trained * per_weight)
        trace.add("results", run.result_place, sum(tensor.nbytes for tensor in others))
    trace.free(*streams)


def _trained_beside(run: RunSpec, block: Block) -> list[nn.Parameter]:
    """The parameters of a block that a recovery trains besides the pruned matrices: all of a narrower block."""
    if run.selection.config.recover is None or not changes_structure(map(run.pattern, block.layers)):
        return []
    pruned = {id(layer.parameter) for layer in block.layers}
    return [parameter for parameter in trainable(block.module).values() if id(parameter) not in pruned]


def _distillation(trace: MemoryTrace, model: nn.Module) -> bool:
    """Count the teacher's hidden states, and a copy of the model with its optimizer; False if they do not fit."""
    run, config = trace.run, trace.run.selection.config
    size = TrainingBytes.of(model, config)
    placement = Placement.within(size, run.storage)
    if not placement.trains:
        return False
    cache = trace.allocate("streams", run.hidden_bytes, "teacher")
    samples = min(part_size(run.samples), run.batch)
    passes = [block.trained for block in run.footprint.blocks.values()] or [run.footprint.whole]
    activations = sum(passes) * samples // run.batch + 3 * samples * run.tokens * run.vocabulary * run.itemsize
    trace.add("training", HOST, size.host if placement.on_host else size.best)
    trace.add("training", str(run.device), size.copy + (0 if placement.on_host else size.state))
    trace.snapshot("recovery", "the model", activations=min(activations, run.storage.available()))
    trace.held.pop("training")
    trace.free(cache)
    return True


def _writing(trace: MemoryTrace, model: nn.Module) -> None:
    """Count the dense weights, which are moved to host memory while pruned ones replace them; then the copied tensors
    of a saved file. A resident model in host memory is saved without copies.
    """
    run, offloaded, copied = trace.run, trace.run.offloaded, 0
    if offloaded is None:
        sizes = list(map(weight_bytes, run.selection.layers))
        for block in (block for sequence in run.sequential for block in sequence.blocks):
            sizes += [parameter.nbytes for parameter in _trained_beside(run, block)]
        dense = max(sizes) + (sum(sizes) if run.resumes else 0)
        trace.add("dense weights", HOST, dense)
        trace.snapshot("writing", "the model")
        trace.add("dense weights", HOST, -dense)
        trace.held.pop("results", None)
        copied = 0 if run.device.type == "cpu" else SHARD_BYTES
    else:
        copied = max(STREAMED_BYTES, offloaded.largest)
    trace.add("weights of a file", HOST, min(module_bytes(model), copied))
    trace.snapshot("saving", "the model")
