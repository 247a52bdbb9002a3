"""The stages of a whole model: its sequential blocks, then the layers outside of them.

`ModelPipeline` observes the dense model. With ``recompute`` it observes the already pruned prefix: the paper's "++"
(MOONSHOT, arXiv 2604.13287, "Hessian Recomputation"). The blocks are then pruned first to last. The inputs of
a block's layers, and the gradients of their outputs, come from a model whose blocks before it are pruned and whose
blocks from it on are dense; all layers of a block are observed before one is pruned, as in SparseGPT. Pruned weights
are in the model only during a pass, while the device holds them beside the dense ones (of one block, or of the whole
prefix where the blocks are not sequential).

Cost over the calibration data, for L blocks: at λ = 1 every block runs twice, dense to be observed and pruned to
compute the next one's inputs. At λ < 1 every block needs the passes of itself and all blocks behind it, L(L+1)/2 block
passes backwards and twice as many forwards (a block is run again for its backward pass, so that one block's graph is
alive at a time), and L passes of the head; one-shot statistics need L backwards and 2L forwards. Where the token
weights of the Fisher term come from the dense model (prune/layers.py), the cost is the sum of that and of λ = 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Protocol

import torch
from torch import Tensor

from ..data.batches import Batch
from ..model.calls import frozen
from ..model.layers import PrunableLayer, all_onloaded
from ..progress import progress_bar
from .block_sequences import BlockSequence, BlockSequences, Extras, find_block_sequences, parameters_read
from .inputs import Prepared
from .walk import BlockStage, OpenStage, PassObserver, Stage, Walk, observe_model

Layers = tuple[PrunableLayer, ...]
UNREACHED = "no calibration data reached it: give data of the kind that it reads, or name it in ignore="
READ = (
    "its weight is read where its forward is not called, so that no inputs are seen: prune it alone by "
    "solver='magnitude' without data and targets=, or name it in ignore="
)


class Results(Protocol):
    """The results of a run that a pipeline depends on."""

    def lacks(self, layer: PrunableLayer) -> bool:
        """Whether a layer has no result yet, and is to have one."""

    def skip(self, layer: PrunableLayer) -> None:
        """Skip a layer that lacks a result and that no data reach; see `ModelPipeline.reason`."""


@dataclass(eq=False)
class ModelPipeline:
    """The stages of a model, whenever it is iterated; without data one per block, which observe nothing.

    Blocks that are not sequential, and layers outside of blocks, are observed by passes of the whole model. Behind
    pruned layers, each block of these and each layer outside is a stage of its own.
    """

    prepared: Prepared  # with a frozen model
    results: Results  # the layers that lack one are observed
    # The pruned weight [d_out, d_in] of a layer that has its result, for statistics recomputed on the pruned prefix;
    # None for statistics of the dense model.
    weight: Callable[[PrunableLayer], Tensor] | None = None
    gradients: bool | None = None  # whether backward passes are needed; None: where the selection needs gradients
    extras: Extras | None = None  # `extras_in_turn`, if the caller has probed the model
    notes: list[str] = field(default_factory=list)  # for the report, after the last stage
    # ℓ_n of the dense model, by batch of this process, where a backward pass starts from them; after the last stage.
    losses: list[Tensor | None] = field(default_factory=list)
    whole: int = 0  # passes of the whole model since the first stage

    def __iter__(self) -> Iterator[Stage]:
        self.losses, self.whole = [], 0
        self.backward = self.prepared.selection.needs_gradients if self.gradients is None else self.gradients
        if not any(map(self.results.lacks, self.prepared.selection.layers)):
            return iter(())
        if self.prepared.data is None:
            return self._without_data()
        return self._of_dense_model() if self.weight is None else self._behind_pruned(self.weight)

    def _without_data(self) -> Iterator[Stage]:
        structure = self.prepared.selection.structure
        for block in structure.blocks:
            if block.layers:
                yield OpenStage(block.layers, lambda observer: None, block.onloaded)
        yield OpenStage(structure.outside, lambda observer: None)

    def _of_dense_model(self) -> Iterator[Stage]:
        prepared, structure = self.prepared, self.prepared.selection.structure
        sequences = block_sequences(prepared, self.backward)
        for layer in (layer for block in sequences.unreached for layer in block.layers):
            if self.results.lacks(layer):
                self.results.skip(layer)
        for sequence in sequences.sequential:
            walk = walk_over(prepared, sequence, prepared.batches, self.backward)
            total, shown = len(walk.batches), prepared.subject.progress
            with progress_bar(total=total, desc="calibrating", unit="batch", shown=shown) as bar:
                walk.progress = bar.update
                stages = walk.capture()
            self.losses = self.losses or walk.losses
            for stage in stages:
                lacking = any(map(self.results.lacks, stage.layers))
                yield stage
                if lacking:  # else a restart has only passed through it
                    prepared.backoff.grow(stage.recut, lambda: prepared.batches)
        others = tuple(layer for block in sequences.non_sequential for layer in block.layers)
        if others or structure.outside:
            yield OpenStage(others + structure.outside, partial(self._observe_whole, ()))
        if others:
            cost = f"{self.whole} passes of the whole model, with all its activations in memory"
            self.notes.append(f"{len(sequences.non_sequential)} blocks are not sequential; their layers took {cost}")

    def _behind_pruned(self, weight: Callable[[PrunableLayer], Tensor]) -> Iterator[Stage]:
        prepared, structure = self.prepared, self.prepared.selection.structure
        inside, done, walk = [block.layers for block in structure.blocks if block.layers], Layers(), None
        extras = self.extras or extras_in_turn(prepared, self.backward)
        if inside and extras is not None:
            walk = walk_over(prepared, BlockSequence(structure.blocks, extras), prepared.batches, self.backward)
            observed = range(walk.lowest, 1 + max(i for i, block in enumerate(walk.blocks) if block.layers))
            walk.capture_arguments()
            for i in range(walk.lowest):
                with walk.blocks[i].onloaded():
                    walk.forward(i)
            kind = _DifferentiatedStage if self.backward else _PrefixStage
            for i in observed:
                stage = kind(walk, i, weight, has_following=i < observed[-1])
                yield stage
                prepared.backoff.grow(stage.recut, lambda: prepared.batches)
            inside, done = [], sum(inside, ())
        for layers in (*inside, *((layer,) for layer in structure.outside)):
            yield OpenStage(layers, partial(self._observe_whole, done))
            done += layers
        passes = [] if walk is None else [f"{walk.forwards} block passes forwards", f"{walk.backwards} backwards"]
        passes += [f"{self.whole} passes of the whole model"] if self.whole or not passes else []
        self.notes.append(f"statistics recomputed on the pruned prefix: {', '.join(passes)}")

    def _observe_whole(self, done: Layers, observer: PassObserver) -> None:
        """Observe a pass of the whole model, in which the layers that are done have their pruned weights."""
        prepared, gradients = self.prepared, self.backward and bool(observer.gradients)
        options = prepared.batches, observer, gradients, prepared.subject.loss
        with nullcontext() if self.weight is None else swapped_weights(done, self.weight):
            losses = observe_model(prepared.model, prepared.selection.structure.blocks, *options)
        if self.weight is None and not self.losses:
            self.losses = losses
        self.whole += 1

    def reason(self, layer: PrunableLayer) -> str:
        """The reason that no data reached a layer, for the report: as the end of "left dense: LAYER (…)"."""
        named = self.prepared.model.named_parameters(remove_duplicate=False)
        names = {name for name, parameter in named if parameter is layer.parameter}
        return READ if names & self._parameters_read else UNREACHED

    @cached_property
    def _parameters_read(self) -> set[str]:
        """By a separate pass, which only a layer that no data reach needs."""
        with frozen(self.prepared.model):
            return parameters_read(self.prepared.model, self.prepared.probe)


def block_sequences(prepared: Prepared, gradients: bool) -> BlockSequences:
    """The sequences of a model's blocks; offloaded ones, which were probed, are all in one."""
    blocks, probe = prepared.selection.structure.blocks, prepared.block_probe
    if probe is not None:
        return BlockSequences([BlockSequence(blocks, probe.extras)], (), ())
    with all_onloaded(blocks):
        return find_block_sequences(prepared.model, blocks, prepared.probe, gradients, prepared.subject.loss)


def extras_in_turn(prepared: Prepared, gradients: bool) -> Extras | None:
    """The extras of a model's blocks; None unless all are in one sequence, each with layers of its own."""
    blocks = prepared.selection.structure.blocks
    if any(len(layer.modules) > 1 for block in blocks for layer in block.layers):
        return None
    sequences = block_sequences(prepared, gradients).sequential
    return next((sequence.extras for sequence in sequences if sequence.blocks == blocks), None)


def walk_over(prepared: Prepared, sequence: BlockSequence, batches: Sequence[Batch], gradients: bool) -> Walk:
    """A walk over sequential blocks, backward where any layer needs gradients."""
    around = [block for block in prepared.selection.structure.blocks if block not in sequence.blocks]
    loss, storage = prepared.subject.loss, prepared.storage
    return Walk(prepared.model, sequence.blocks, batches, gradients, loss, storage, sequence.extras, around)


@contextmanager
def swapped_weights(layers: Layers, weight: Callable[[PrunableLayer], Tensor]) -> Iterator[None]:
    """Meanwhile the layers have other weights, `weight(layer)` [d_out, d_in]; their tensors are restored on exit."""
    original = []
    try:
        for layer in layers:
            parameter, matrix = layer.parameter, weight(layer)
            original.append((parameter, parameter.data))
            parameter.data = torch.empty_like(parameter.data)
            layer.assign(matrix)
        yield
    finally:
        for parameter, data in original:
            parameter.data = data


class _PrefixStage(BlockStage):
    """A block that is observed dense behind pruned ones, and advances with its pruned weights to the next, if any."""

    def __init__(self, walk: Walk, index: int, weight: Callable[[PrunableLayer], Tensor], has_following: bool):
        super().__init__(walk, index)
        self.weight, self.has_following = weight, has_following
        self.has_next = False  # no pass with dense weights advances

    def advance(self) -> None:
        if self.has_following:
            with swapped_weights(self.layers, self.weight):
                self.walk.forward(self.index)
            self.advanced = True
        self.walk.calls[self.index] = []


class _DifferentiatedStage(_PrefixStage):
    """The same for a walk with gradients, which come from the dense blocks behind this one."""

    def observe(self, observer: PassObserver | None, advance: bool = False) -> None:
        if observer is not None and observer.gradients:
            self.walk.run_from(self.index, observer)
        else:
            super().observe(observer)
