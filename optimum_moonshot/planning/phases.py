"""The bytes of what a run does before and after its calibration: rotation, allocation, recovery, writing, saving."""

import dataclasses
import itertools
from typing import Any

from torch import nn

from ..allocation.fisher import SampledRows, sampled_count, sampled_rows, trial_patterns
from ..calibration.accumulators import Plan
from ..model.layers import Block, PrunableLayer
from ..pipeline.schedule import StatisticsSchedule
from ..recovery.tuning import part_size
from ..reports.plan import DISK
from .memory import MemoryTrace, walk_blocks
from .run_spec import CPU, RunSpec, pattern_of, problem_size, weight_bytes

# Of the weights that a block trains, in float32: itself, its gradient, Adam's moments, two snapshots; and its mask.
TRAINED_BYTES = 4 * 6 + 1
# The same of a matrix that a rotation is learned for: itself, rotated twice, its scores, and their gradients.
LEARNED_BYTES = 4 * 7
# What `save_pretrained` puts in one file at most, and what it does of a model whose blocks are elsewhere.
SHARD_BYTES, STREAMED_BYTES = 50 * 10**9, 500 * 10**6


def rotation(walk: MemoryTrace, model: nn.Module) -> None:
    """A pass of its own; an inverse of the inputs of each group of layers stays; the dense weights go to host memory.

    Of weights that are elsewhere, the rotated ones are put beside them, and stay there for the rest of the run.

    Args:
        walk: notes the moments.
        model: that is rotated.
    """
    outline, away = walk.outline, walk.outline.away
    dense = sum(weight_bytes(layer) for layer in outline.selection.layers)
    if away is not None:
        walk.add("rotated weights", away.place, away.total)
    else:
        walk.add("dense weights", str(CPU), dense)
    selection = outline.selection.of_the_dense_model(0.5 if outline.selection.rotates_by_gradients else 1.0)
    some = dataclasses.replace(outline, selection=selection, kind=GramsAlone)
    inner = MemoryTrace(some, walk.held, walk.moments, walk.overflows)
    kept: list[tuple[str, int]] = []
    width = _width(model)
    for block, _ in walk_blocks(inner, "rotation", solves=False):
        own = outline.footprint.blocks.get(block.name)
        for some in own.shared if own else ():
            layer = next(layer for layer in block.layers if layer.name in some)
            d_in = layer.shape[1]
            size = 4 * d_in * (d_in if d_in == width else max(1, d_in // max(1, _heads(model))))
            kept.append((walk.hold("inverses", size, layer.name), size))
    largest = max(layer.shape[0] * layer.shape[1] // layer.groups for layer in outline.selection.layers)
    walk.moment("rotation", "learning", learning=LEARNED_BYTES * largest + 24 * width**2)
    for place, size in kept:
        walk.free("inverses", place, size)
    if away is None:
        walk.add("dense weights", str(CPU), -dense)


class GramsAlone(StatisticsSchedule):
    """What a rotation gathers: a block's Gram matrices in one pass, and no gradients of weights."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.diagonal = False

    def rounds(self, layers: list[PrunableLayer]) -> list[list[PrunableLayer]]:
        return [layers]

    def parts(self, together: list[PrunableLayer]) -> list[slice] | None:
        return None

    def gradient_bytes(self, layer: PrunableLayer, plan: Plan | None = None) -> int:
        return 0


def _width(model: nn.Module) -> int:
    config = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    return getattr(config, "hidden_size", None) or 0


def _heads(model: nn.Module) -> int:
    config = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    return getattr(config, "num_attention_heads", None) or 1


def allocation(walk: MemoryTrace) -> None:
    """Some samples pass once more, forwards and backwards; of every matrix some rows are solved, eight times."""
    outline = walk.outline
    count = sampled_count(outline.samples)
    sizes = _first(outline.sizes, count)
    selection = outline.selection.of_the_dense_model(lam=0.0)
    some = dataclasses.replace(outline, selection=selection, samples=sum(sizes), sizes=sizes, kind=SampledRows)
    inner = MemoryTrace(some, walk.held, walk.moments, walk.overflows)
    for _ in walk_blocks(inner, "allocation", solves=False):
        pass
    largest = max(outline.selection.layers, key=lambda layer: layer.shape[0] * layer.shape[1] // layer.groups)
    pattern = pattern_of(outline.selection, largest)
    tried = trial_patterns(outline.selection.patterns[largest.name])
    rows = len(range(*sampled_rows(largest).indices(largest.shape[0])))
    size = dataclasses.replace(problem_size(outline, largest, rows * len(tried)), samples=0, lam=1.0)
    walk.moment("allocation", largest.name, solver=outline.selection.solver.work(size, pattern).bytes)


def _first(sizes: tuple[int, ...], count: int) -> tuple[int, ...]:
    """The sizes of batches of so many samples in all."""
    most = max(sizes)
    return tuple(min(most, count - done) for done in range(0, count, most))


def recovery(walk: MemoryTrace) -> None:
    """Two streams of hidden states, and one block that learns at a time."""
    outline = walk.outline
    part = min(part_size(outline.samples), outline.batch)
    streams = [
        walk.hold("streams", outline.footprint.hidden * count // outline.batch, "recovery")
        for _, count in itertools.product(range(2), outline.sizes)
    ]
    sizes = [outline.footprint.hidden * count // outline.batch for _ in range(2) for count in outline.sizes]
    for block in (block for chain in outline.sequential for block in chain if block.layers):
        own = outline.footprint.blocks.get(block.name)
        activations = 0 if own is None else own.observed * part * 4 // (outline.batch * outline.itemsize)
        walk.moment("recovery", block.name, activations=activations, training=trained_bytes(block, outline))
    for place, size in zip(streams, sizes, strict=True):
        walk.free("streams", place, size)


def trained_bytes(block: Block, outline: RunSpec) -> int:
    """What tuning a block's weights holds beside activations.

    Args:
        block: with its layers.
        outline: of the run.
    """
    trained = sum(layer.shape[0] * layer.shape[1] for layer in block.layers)
    rounded = 0 if outline.itemsize == 4 else outline.itemsize + 4
    return trained * (TRAINED_BYTES + rounded)


def writing(walk: MemoryTrace) -> None:
    """Each pruned weight gives its place to the dense one, in host memory; those that are elsewhere stay there."""
    if walk.outline.away is not None:
        return
    layers = walk.outline.selection.layers
    largest = max(map(weight_bytes, layers))
    dense = sum(map(weight_bytes, layers)) if walk.outline.resumes else 0
    walk.add("dense weights", str(CPU), largest + dense)
    walk.moment("writing", "the model")
    walk.add("dense weights", str(CPU), -largest - dense)
    for place in (str(CPU), DISK):
        walk.held.get("results", {}).pop(place, None)


def saving(walk: MemoryTrace, model_bytes: int) -> None:
    """A model in host memory is written as it lies there; from a device, a file's tensors come to the host.

    Args:
        walk: notes the moments.
        model_bytes: of the model.
    """
    away = walk.outline.away
    if away is not None:
        walk.add("weights of a file", str(CPU), min(model_bytes, max(STREAMED_BYTES, away.largest)))
    elif walk.storage.device.type != "cpu":
        walk.add("weights of a file", str(CPU), min(model_bytes, SHARD_BYTES))
    walk.moment("saving", "the model")
