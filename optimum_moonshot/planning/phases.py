"""The bytes of what a run does before and after its calibration: rotation, allocation, recovery, writing, saving."""

import dataclasses
import itertools
from typing import Any

from torch import nn

from ..allocation.loss_curves import SampledRows, sampled_count, sampled_rows, trial_patterns
from ..calibration.accumulators import GradientPlan
from ..model.layers import Block, PrunableLayer
from ..pipeline.spec import StatisticsSpec
from ..recovery.tuning import part_size
from ..reports.plan import DISK
from .memory import MemoryTrace, count_blocks
from .run_spec import CPU, RunSpec, pattern_of, problem_size, weight_bytes

# Of the weights that a block trains, in float32: itself, its gradient, Adam's moments, two snapshots; and its mask.
TRAINED_BYTES = 4 * 6 + 1
# The same of a matrix that a rotation is learned for: itself, rotated twice, its scores, and their gradients.
LEARNED_BYTES = 4 * 7
# What `save_pretrained` puts in one file at most, and what it does of a model whose blocks are elsewhere.
SHARD_BYTES, STREAMED_BYTES = 50 * 10**9, 500 * 10**6


def rotation(trace: MemoryTrace, model: nn.Module) -> None:
    """A pass of its own; an inverse of the inputs of each group of layers stays; the dense weights go to host memory.

    Of weights that are elsewhere, the rotated ones are put beside them, and stay there for the rest of the run.

    Args:
        trace: notes the moments.
        model: that is rotated.
    """
    run, away = trace.run, trace.run.away
    dense = sum(weight_bytes(layer) for layer in run.selection.layers)
    if away is not None:
        trace.add("rotated weights", away.place, away.total)
    else:
        trace.add("dense weights", str(CPU), dense)
    selection = run.selection.of_the_dense_model(0.5 if run.selection.rotates_by_gradients else 1.0)
    some = dataclasses.replace(run, selection=selection, kind=GramsAlone)
    inner = MemoryTrace(some, trace.held, trace.moments, trace.overflows)
    kept: list[tuple[str, int]] = []
    width = _width(model)

    def hold_inverses(block: Block) -> None:
        footprint = run.footprint.blocks.get(block.name)
        for names in footprint.shared if footprint else ():
            layer = next(layer for layer in block.layers if layer.name in names)
            d_in = layer.shape[1]
            size = 4 * d_in * (d_in if d_in == width else max(1, d_in // max(1, _heads(model))))
            kept.append((trace.hold("inverses", size, layer.name), size))

    count_blocks(inner, "rotation", solves=False, whole=True, done=hold_inverses)
    largest = max(layer.shape[0] * layer.shape[1] // layer.groups for layer in run.selection.layers)
    trace.moment("rotation", "learning", learning=LEARNED_BYTES * largest + 24 * width**2)
    for place, size in kept:
        trace.free("inverses", place, size)
    if away is None:
        trace.add("dense weights", str(CPU), -dense)


class GramsAlone(StatisticsSpec):
    """The statistics of a rotation: Gram matrices, and no gradients of weights."""

    diagonal = False  # whatever the solver

    def gradient_bytes(self, layer: PrunableLayer, plan: GradientPlan | None = None) -> int:
        return 0


def _width(model: nn.Module) -> int:
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    return getattr(config, "hidden_size", None) or 0


def _heads(model: nn.Module) -> int:
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    return getattr(config, "num_attention_heads", None) or 1


def allocation(trace: MemoryTrace) -> None:
    """Some samples pass once more, forwards and backwards; of every matrix some rows are solved, eight times."""
    run = trace.run
    count = sampled_count(run.samples)
    sizes = _first(run.sizes, count)
    selection = run.selection.of_the_dense_model(lam=0.0)
    some = dataclasses.replace(run, selection=selection, samples=sum(sizes), sizes=sizes, kind=SampledRows)
    inner = MemoryTrace(some, trace.held, trace.moments, trace.overflows)
    count_blocks(inner, "allocation", solves=False)
    largest = max(run.selection.layers, key=lambda layer: layer.shape[0] * layer.shape[1] // layer.groups)
    pattern = pattern_of(run.selection, largest)
    tried = trial_patterns(run.selection.patterns[largest.name])
    rows = len(range(*sampled_rows(largest).indices(largest.shape[0])))
    size = dataclasses.replace(problem_size(run, largest, rows * len(tried)), samples=0, lam=1.0)
    trace.moment("allocation", largest.name, solver=run.selection.solver.work(size, pattern).bytes)


def _first(sizes: tuple[int, ...], count: int) -> tuple[int, ...]:
    """The sizes of batches of so many samples in all."""
    most = max(sizes)
    return tuple(min(most, count - done) for done in range(0, count, most))


def recovery(trace: MemoryTrace) -> None:
    """Two streams of hidden states, and one block that learns at a time."""
    run = trace.run
    part = min(part_size(run.samples), run.batch)
    streams = [
        trace.hold("streams", run.footprint.hidden * count // run.batch, "recovery")
        for _, count in itertools.product(range(2), run.sizes)
    ]
    sizes = [run.footprint.hidden * count // run.batch for _ in range(2) for count in run.sizes]
    for block in (block for chain in run.sequential for block in chain if block.layers):
        own = run.footprint.blocks.get(block.name)
        activations = 0 if own is None else own.observed * part * 4 // (run.batch * run.itemsize)
        trace.moment("recovery", block.name, activations=activations, training=trained_bytes(block, run))
    for place, size in zip(streams, sizes, strict=True):
        trace.free("streams", place, size)


def trained_bytes(block: Block, run: RunSpec) -> int:
    """What tuning a block's weights holds beside activations.

    Args:
        block: with its layers.
        run: of the run.
    """
    trained = sum(layer.shape[0] * layer.shape[1] for layer in block.layers)
    rounded = 0 if run.itemsize == 4 else run.itemsize + 4
    return trained * (TRAINED_BYTES + rounded)


def writing(trace: MemoryTrace) -> None:
    """Each pruned weight gives its place to the dense one, in host memory; those that are elsewhere stay there."""
    if trace.run.away is not None:
        return
    layers = trace.run.selection.layers
    largest = max(map(weight_bytes, layers))
    dense = sum(map(weight_bytes, layers)) if trace.run.resumes else 0
    trace.add("dense weights", str(CPU), largest + dense)
    trace.moment("writing", "the model")
    trace.add("dense weights", str(CPU), -largest - dense)
    for place in (str(CPU), DISK):
        trace.held.get("results", {}).pop(place, None)


def saving(trace: MemoryTrace, model_bytes: int) -> None:
    """A model in host memory is written as it lies there; from a device, a file's tensors come to the host.

    Args:
        trace: notes the moments.
        model_bytes: of the model.
    """
    away = trace.run.away
    if away is not None:
        trace.add("weights of a file", str(CPU), min(model_bytes, max(STREAMED_BYTES, away.largest)))
    elif trace.storage.device.type != "cpu":
        trace.add("weights of a file", str(CPU), min(model_bytes, SHARD_BYTES))
    trace.moment("saving", "the model")
