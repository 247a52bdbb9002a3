"""The memory of all phases of a run: rotation, allocation, calibration, recovery, writing, saving."""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn

from ..allocate.loss_curves import sampled_rows, trial_patterns
from ..model.layers import Block
from ..model.model_info import text_setting
from ..recover.run import Placement, TrainingBytes
from ..recover.student import changes_structure, trainable
from ..recover.tuning import part_size
from .memory import MemoryTrace, Visit, count_passes
from .report import HOST
from .spec import RunSpec, module_bytes, pattern_of, weight_bytes

# Bytes per trained weight: the float32 weight, gradient, two moments of Adam and two snapshots; and the mask.
TRAINED_BYTES = 4 * 6 + 1
# Bytes per weight of a matrix while a rotation is learned: the matrix, two rotated ones, the scores, their gradients.
LEARNED_BYTES = 4 * 7
# Bytes that `save_pretrained` copies to host memory at once, at most: of a resident model, and of an offloaded one.
SHARD_BYTES, STREAMED_BYTES = 50 * 10**9, 500 * 10**6


class Phase(NamedTuple):
    """A phase that passes over the data."""

    name: str
    run: RunSpec
    visits: list[Visit]


def count_phases(trace: MemoryTrace, model: nn.Module) -> Iterator[Phase]:
    """Count all phases, in the order of the run."""
    run, config = trace.run, trace.run.selection.config
    trace.add("weights of a block", str(run.device), run.offloaded.largest if run.offloaded else 0)
    if config.rotation is not None:
        yield _rotation(trace, model)
    if config.allocation == "fisher":
        yield _allocation(trace)
    yield Phase("calibration", run, count_passes(trace, "calibration"))
    if config.recover is not None and not (config.recover == "distill" and _distillation(trace, model)):
        _recovery(trace)
    _writing(trace)
    _saving(trace, model)


def _rotation(trace: MemoryTrace, model: nn.Module) -> Phase:
    """A pass, with an inverse for each group of layers that share their inputs, and the learning of the rotation.

    The dense weights are copied to host memory. Rotated weights of offloaded blocks stay beside the original ones until
    the run ends.
    """
    run, offloaded, selection = trace.run.of_rotation(), trace.run.offloaded, trace.run.selection
    dense = sum(map(weight_bytes, selection.layers))
    if offloaded is not None:
        trace.add("rotated weights", offloaded.place, offloaded.total)
    else:
        trace.add("dense weights", HOST, dense)
    width, heads = text_setting(model, "hidden_size"), max(1, text_setting(model, "num_attention_heads"))
    inverses = []
    for block in (block for block in selection.structure.blocks if block.name in run.footprint.blocks):
        for group in run.footprint.blocks[block.name].shared:
            d_in = block.layers[group[0]].shape[1]
            size = 4 * d_in * (d_in if d_in == width else max(1, d_in // heads))
            inverses.append(trace.allocate("inverses", size, block.name))
    visits = count_passes(dataclasses.replace(trace, run=run), "rotation", solves=False, whole=True)
    largest = max(layer.shape[0] * layer.shape[1] // layer.groups for layer in selection.layers)
    trace.snapshot("rotation", "learning", learning=LEARNED_BYTES * largest + 24 * width**2)
    trace.free(*inverses)
    if offloaded is None:
        trace.add("dense weights", HOST, -dense)
    return Phase("rotation", run, visits)


def _allocation(trace: MemoryTrace) -> Phase:
    """A pass of some samples, and eight solutions of some rows of every matrix."""
    run = trace.run.of_allocation()
    visits = count_passes(dataclasses.replace(trace, run=run), "allocation", solves=False)
    selection = trace.run.selection
    largest = max(selection.layers, key=lambda layer: layer.shape[0] * layer.shape[1] // layer.groups)
    rows = len(range(*sampled_rows(largest).indices(largest.shape[0])))
    rows *= len(trial_patterns(selection.patterns[largest.name]))
    size = dataclasses.replace(trace.run.problem_size(largest, rows), samples=0, lam=1.0)
    solver = selection.solver.workspace(size, pattern_of(selection, largest))
    trace.snapshot("allocation", largest.name, solver=solver)
    return Phase("allocation", run, visits)


def _recovery(trace: MemoryTrace) -> None:
    """Two streams of hidden states, and one block in training at a time."""
    run, config = trace.run, trace.run.selection.config
    samples = min(part_size(run.samples), run.batch)
    per_weight = TRAINED_BYTES + (0 if run.itemsize == 4 else run.itemsize + 4)  # with the rounded weight
    per_weight += 8 if config.bits or config.has_budget else 0  # the weight on the grid and its gradient
    streams = [trace.allocate("streams", run.footprint.hidden * n // run.batch, "recovery") for n in 2 * run.sizes]
    for block in (block for sequence in run.sequential for block in sequence if block.layers):
        footprint = run.footprint.blocks.get(block.name)
        activations = 0 if footprint is None else footprint.trained * samples * 4 // (run.batch * run.itemsize)
        others = _trained_beside(run, block)
        trained = sum(layer.shape[0] * layer.shape[1] for layer in block.layers) + sum(map(torch.numel, others))
        trace.snapshot("recovery", block.name, activations=activations, training=trained * per_weight)
        trace.add("results", trace.result_place, sum(each.nbytes for each in others))
    trace.free(*streams)


def _trained_beside(run: RunSpec, block: Block) -> list[nn.Parameter]:
    """The parameters of a block that a recovery trains besides the pruned matrices: all of a narrower block."""
    narrower = changes_structure(pattern_of(run.selection, each) for each in block.layers)
    pruned = {id(layer.parameter) for layer in block.layers}
    trained = trainable(block.module).values() if narrower and run.selection.config.recover is not None else ()
    return [parameter for parameter in trained if id(parameter) not in pruned]


def _distillation(trace: MemoryTrace, model: nn.Module) -> bool:
    """The teacher's hidden states, and a copy of the model with its optimizer; False where they do not fit."""
    run, config = trace.run, trace.run.selection.config
    size = TrainingBytes.of(model, config.bits is not None or config.has_budget)
    placement = Placement.within(size, run.storage)
    if not placement.trains:
        return False
    cache = trace.allocate("streams", run.footprint.hidden * run.samples // run.batch, "teacher")
    samples = min(part_size(run.samples), run.batch)
    passes = [each.trained for each in run.footprint.blocks.values()] or [run.footprint.whole]
    activations = sum(passes) * samples // run.batch + 3 * samples * (run.tokens or 0) * run.vocabulary * run.itemsize
    trace.add("training", HOST, size.host if placement.on_host else size.best)
    trace.add("training", str(run.device), size.copy + (0 if placement.on_host else size.state))
    trace.snapshot("recovery", "the model", activations=min(activations, run.storage.available()))
    trace.held.pop("training")
    trace.free(cache)
    return True


def _writing(trace: MemoryTrace) -> None:
    """The dense weights move to host memory while the pruned ones replace them; offloaded blocks are not written."""
    if trace.run.offloaded is not None:
        return
    sizes = list(map(weight_bytes, trace.run.selection.layers))
    for block in (block for sequence in trace.run.sequential for block in sequence):
        sizes += [parameter.nbytes for parameter in _trained_beside(trace.run, block)]
    dense = max(sizes) + (sum(sizes) if trace.run.resumes else 0)
    trace.add("dense weights", HOST, dense)
    trace.snapshot("writing", "the model")
    trace.add("dense weights", HOST, -dense)
    trace.held.pop("results", None)


def _saving(trace: MemoryTrace, model: nn.Module) -> None:
    """A model in host memory is saved in place; from a GPU or offloaded, the tensors of a file are copied first."""
    offloaded = trace.run.offloaded
    if offloaded is not None:
        trace.add("weights of a file", HOST, min(module_bytes(model), max(STREAMED_BYTES, offloaded.largest)))
    elif trace.run.device.type != "cpu":
        trace.add("weights of a file", HOST, min(module_bytes(model), SHARD_BYTES))
    trace.snapshot("saving", "the model")
