"""The bytes of the phases before and after calibration: rotation, allocation, recovery, committing, saving."""

import dataclasses

import torch
from torch import nn

from ..allocate.loss_curves import SampledRows, sampled_count, sampled_rows, trial_patterns
from ..calibration.accumulators import GradientPlan
from ..model.layers import Block, PrunableLayer
from ..model.model_info import text_setting
from ..pipeline.spec import StatisticsSpec
from ..recover.run import Placement, TrainingBytes
from ..recover.student import changes_structure, trainable
from ..recover.tuning import part_size
from .memory import Allocation, MemoryTrace, count_blocks
from .report import DISK, HOST
from .run_spec import RunSpec, module_bytes, pattern_of, problem_size, weight_bytes

# Bytes per trained weight: the float32 weight, gradient, two moments of Adam and two snapshots; and the mask.
TRAINED_BYTES = 4 * 6 + 1
# Bytes per weight of a matrix while a rotation is learned: the matrix, two rotated ones, the scores, their gradients.
LEARNED_BYTES = 4 * 7
# Bytes that `save_pretrained` copies to host memory at once, at most: of a resident model, and of an offloaded one.
SHARD_BYTES, STREAMED_BYTES = 50 * 10**9, 500 * 10**6


def rotation_run(run: RunSpec) -> RunSpec:
    """The pass of a rotation over the dense model."""
    selection = run.selection.of_the_dense_model(0.5 if run.selection.rotates_by_gradients else 1.0)
    return dataclasses.replace(run, selection=selection, kind=GramStatistics)


def allocation_run(run: RunSpec) -> RunSpec:
    """The pass of a Fisher allocation over the dense model: part of the samples, always with gradients."""
    count, selection = sampled_count(run.samples), run.selection.of_the_dense_model(lam=0.0)
    sizes = tuple(min(run.batch, count - done) for done in range(0, count, run.batch))
    return dataclasses.replace(run, selection=selection, samples=sum(sizes), sizes=sizes, kind=SampledRows)


def rotation(trace: MemoryTrace, model: nn.Module) -> None:
    """One pass over the data, which leaves an inverse for each group of layers with the same inputs.

    The dense weights are copied to host memory. Rotated weights of offloaded blocks stay beside the original ones until
    the run ends.
    """
    run, offloaded, selection = trace.run, trace.run.offloaded, trace.run.selection
    dense = sum(map(weight_bytes, selection.layers))
    if offloaded is not None:
        trace.add("rotated weights", offloaded.place, offloaded.total)
    else:
        trace.add("dense weights", HOST, dense)
    width, heads = text_setting(model, "hidden_size"), max(1, text_setting(model, "num_attention_heads"))
    inverses: list[Allocation] = []

    def allocate_inverses(block: Block) -> None:
        footprint = run.footprint.blocks.get(block.name)
        for group in footprint.shared if footprint else ():
            layer = block.layers[min(group)]
            d_in = layer.shape[1]
            size = 4 * d_in * (d_in if d_in == width else max(1, d_in // heads))
            inverses.append(trace.allocate("inverses", size, layer.name))

    passing = dataclasses.replace(trace, run=rotation_run(run))
    count_blocks(passing, "rotation", solves=False, whole=True, done=allocate_inverses)
    largest = max(layer.shape[0] * layer.shape[1] // layer.groups for layer in selection.layers)
    trace.snapshot("rotation", "learning", learning=LEARNED_BYTES * largest + 24 * width**2)
    for inverse in inverses:
        trace.free("inverses", inverse)
    if offloaded is None:
        trace.add("dense weights", HOST, -dense)


class GramStatistics(StatisticsSpec):
    """The statistics of a rotation, whatever the solver: Gram matrices, and no gradients of weights."""

    diagonal = False

    def plan(self, layer: PrunableLayer) -> GradientPlan:
        return GradientPlan(nothing=True)

    def gradient_bytes(self, layer: PrunableLayer, plan: GradientPlan | None = None) -> int:
        return 0


def allocation(trace: MemoryTrace) -> None:
    """Fisher allocation: a pass of some samples, and eight solutions of some rows of every matrix."""
    run = trace.run
    count_blocks(dataclasses.replace(trace, run=allocation_run(run)), "allocation", solves=False)
    largest = max(run.selection.layers, key=lambda layer: layer.shape[0] * layer.shape[1] // layer.groups)
    rows = len(range(*sampled_rows(largest).indices(largest.shape[0])))
    rows *= len(trial_patterns(run.selection.patterns[largest.name]))
    size = dataclasses.replace(problem_size(run, largest, rows), samples=0, lam=1.0)
    solver = run.selection.solver.work(size, pattern_of(run.selection, largest)).bytes
    trace.snapshot("allocation", largest.name, solver=solver)


def recovery(trace: MemoryTrace) -> None:
    """Two streams of hidden states, and one block in training at a time."""
    run = trace.run
    samples = min(part_size(run.samples), run.batch)
    per_weight = TRAINED_BYTES + (0 if run.itemsize == 4 else run.itemsize + 4)  # with the rounded weight
    config = run.selection.config
    per_weight += 8 if config.bits or config.has_budget else 0  # the weight on the grid and its gradient
    streams = [
        trace.allocate("streams", run.footprint.hidden * count // run.batch, "recovery") for count in 2 * run.sizes
    ]
    for block in (block for sequence in run.sequential for block in sequence if block.layers):
        footprint = run.footprint.blocks.get(block.name)
        activations = 0 if footprint is None else footprint.trained * samples * 4 // (run.batch * run.itemsize)
        others = _others(run, block)
        trained = sum(layer.shape[0] * layer.shape[1] for layer in block.layers) + sum(map(torch.numel, others))
        trace.snapshot("recovery", block.name, activations=activations, training=trained * per_weight)
        trace.add("results", DISK if trace.stores_on_disk else HOST, sum(each.nbytes for each in others))
    for stream in streams:
        trace.free("streams", stream)


def _others(run: RunSpec, block: Block) -> list[nn.Parameter]:
    """The parameters of a block that a recovery trains besides the pruned matrices."""
    if run.selection.config.recover is None or not changes_structure(
        pattern_of(run.selection, each) for each in block.layers
    ):
        return []
    pruned = {id(layer.parameter) for layer in block.layers}
    return [parameter for parameter in trainable(block.module).values() if id(parameter) not in pruned]


def distillation(trace: MemoryTrace, model: nn.Module) -> None:
    """The teacher's cached hidden states; a copy of the model with its optimizer, where the run places them."""
    run, config = trace.run, trace.run.selection.config
    size = TrainingBytes.of(model, config.bits is not None or config.has_budget)
    placement = Placement.within(size, run.storage)
    if not placement.trains:
        recovery(trace)
        return
    cache = trace.allocate("streams", sum(run.footprint.hidden * count // run.batch for count in run.sizes), "teacher")
    samples = min(part_size(run.samples), run.batch)
    passes = [each.trained for each in run.footprint.blocks.values()] or [run.footprint.whole]
    activations = sum(passes) * samples // run.batch + 3 * samples * (run.tokens or 0) * run.vocabulary * run.itemsize
    device, host = str(run.device), size.host if placement.on_host else size.best
    trace.add("training", HOST, host)
    trace.add("training", device, size.copy + (0 if placement.on_host else size.state))
    trace.snapshot("recovery", "the model", activations=min(activations, run.storage.available()))
    trace.held.pop("training")
    trace.free("streams", cache)


def committing(trace: MemoryTrace) -> None:
    """The dense weights move to host memory while the pruned ones replace them; offloaded blocks are not written."""
    if trace.run.offloaded is not None:
        return
    sizes = list(map(weight_bytes, trace.run.selection.layers))
    for block in (block for sequence in trace.run.sequential for block in sequence):
        sizes += [parameter.nbytes for parameter in _others(trace.run, block)]
    dense = max(sizes) + (sum(sizes) if trace.run.resumes else 0)
    trace.add("dense weights", HOST, dense)
    trace.snapshot("writing", "the model")
    trace.add("dense weights", HOST, -dense)
    trace.held.pop("results", None)


def saving(trace: MemoryTrace, model: nn.Module) -> None:
    """A model in host memory is saved in place; from a GPU or offloaded, the tensors of a file are copied first."""
    offloaded = trace.run.offloaded
    if offloaded is not None:
        trace.add("weights of a file", HOST, min(module_bytes(model), max(STREAMED_BYTES, offloaded.largest)))
    elif trace.run.device.type != "cpu":
        trace.add("weights of a file", HOST, min(module_bytes(model), SHARD_BYTES))
    trace.snapshot("saving", "the model")
