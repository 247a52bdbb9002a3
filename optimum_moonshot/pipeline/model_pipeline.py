"""The stages of a whole model: its sequential blocks, then the layers outside of them.

`ModelPipeline` observes the dense model. With ``recompute`` it observes the already pruned prefix: the paper's "++"
(MOONSHOT, arXiv 2604.13287, "Hessian Recomputation"), by `RecomputePipeline`. The blocks are then pruned first to last.
The inputs of a block's layers, and the gradients of their outputs, come from a model whose blocks before it are pruned
and whose blocks from it on are dense; all layers of a block are observed before one is pruned, as in SparseGPT. Pruned
weights are in the model only during a pass, while the device holds them beside the dense ones (of one block, or of the
whole prefix where the blocks are not sequential).

Cost over the calibration data, for L blocks: at λ = 1 every block runs twice, dense to be observed and pruned to
compute the next one's inputs. At λ < 1 every block needs the passes of itself and all blocks behind it, L(L+1)/2 block
passes backwards and twice as many forwards (a block is run again for its backward pass, so that one block's graph is
alive at a time), and L passes of the head; one-shot statistics need L backwards and 2L forwards. Where the token
weights of the Fisher term come from the dense model (prune/prefix.py), the cost is the sum of that and of λ = 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Protocol

import torch
from torch import Tensor, nn

from ..calibration.storage import Storage
from ..data.batches import Batch
from ..model.calls import frozen
from ..model.layers import PrunableLayer, Structure, all_onloaded
from ..model.losses import Loss
from ..progress import progress_bar
from .block_sequences import BlockSequence, BlockSequences, Extras, find_block_sequences, parameters_read
from .inputs import Prepared
from .walk import BlockStage, FullModelPipeline, OpenStage, PassObserver, Stage, Walk

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
    """The stages of a model, whenever it is iterated; without data one per block, which observe nothing."""

    prepared: Prepared
    results: Results  # the layers that lack one are observed
    # The pruned weight [d_out, d_in] of a layer that has its result, for statistics recomputed on the pruned prefix;
    # None for statistics of the dense model.
    weight: Callable[[PrunableLayer], Tensor] | None = None
    gradients: bool | None = None  # whether backward passes are needed; None: where the selection needs gradients
    extras: Extras | None = None  # `extras_in_turn`, if the caller has probed the model
    notes: list[str] = field(default_factory=list)  # for the report, after the last stage
    # ℓ_n of the dense model, by batch of this process, where a backward pass starts from them; after the last stage.
    losses: list[Tensor | None] = field(default_factory=list)

    def __iter__(self) -> Iterator[Stage]:
        self.losses = []
        if not any(map(self.results.lacks, self.prepared.selection.layers)):
            return iter(())
        if self.prepared.data is None:
            return self._without_data()
        return self._of_dense_model() if self.weight is None else self._behind_pruned(self.weight)

    def _of_dense_model(self) -> Iterator[Stage]:
        prepared, structure, gradients = self.prepared, self.prepared.selection.structure, self._needs_gradients
        sequences = block_sequences(prepared, gradients)
        for layer in (layer for block in sequences.unreached for layer in block.layers):
            if self.results.lacks(layer):
                self.results.skip(layer)
        for sequence in sequences.sequential:
            walk = walk_over(prepared, sequence, prepared.batches, gradients)
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
            layers, loss = others + structure.outside, prepared.subject.loss
            full = FullModelPipeline(prepared.model, structure.blocks, prepared.batches, gradients, loss, layers)
            yield from full
            self.losses = self.losses or full.losses
        if others:
            cost = f"{full.passes} passes of the whole model, with all its activations in memory"
            self.notes.append(f"{len(sequences.non_sequential)} blocks are not sequential; their layers took {cost}")

    @property
    def _needs_gradients(self) -> bool:
        return self.prepared.selection.needs_gradients if self.gradients is None else self.gradients

    def _without_data(self) -> Iterator[Stage]:
        structure = self.prepared.selection.structure
        for block in structure.blocks:
            if block.layers:
                yield OpenStage(block.layers, lambda observer: None, block.onloaded)
        yield OpenStage(structure.outside, lambda observer: None)

    def _behind_pruned(self, weight: Callable[[PrunableLayer], Tensor]) -> Iterator[Stage]:
        prepared, structure = self.prepared, self.prepared.selection.structure
        gradients, loss = self._needs_gradients, prepared.subject.loss
        extras = self.extras or extras_in_turn(prepared, gradients)
        options = prepared.storage, weight, gradients, extras
        pipeline = RecomputePipeline(prepared.model, structure, prepared.batches, loss, *options)
        pipeline.notes = self.notes
        pipeline.grow = lambda stage: prepared.backoff.grow(stage.recut, lambda: prepared.batches)
        return iter(pipeline)

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

    def __init__(self, recompute: RecomputePipeline, blocks: Walk, index: int, has_next: bool):
        super().__init__(blocks, index)
        self.recompute, self.has_following = recompute, has_next
        self.has_next = False  # no pass with dense weights advances

    def advance(self) -> None:
        self.recompute.forward += self.passes + self.has_following
        if self.has_following:
            with swapped_weights(self.layers, self.recompute.weight):
                self.walk.forward(self.index)
            self.advanced = True
        self.walk.calls[self.index] = []


class _DifferentiatedStage(_PrefixStage):
    """The same for a block with gradients, which come from the dense blocks behind it."""

    def observe(self, observer: PassObserver | None, advance: bool = False) -> None:
        assert observer is not None
        if not observer.gradients:
            super().observe(observer)
            return
        self.walk.run_from(self.index, observer)
        behind = self.recompute.last - self.index
        self.recompute.forward += 2 * (1 + behind)
        self.recompute.backward += 1 + behind


@dataclass(eq=False)
class RecomputePipeline:
    """Stages in the order of pruning; see the module's docstring.

    Blocks that are not sequential, and layers outside of blocks, are observed by passes of the whole model with the
    prefix pruned; every layer outside of blocks is a stage of its own, behind all blocks.
    """

    model: nn.Module  # frozen
    structure: Structure
    batches: Sequence[Batch]
    loss: Loss | None  # (output, batch) → [B] losses; None for the model's own
    storage: Storage  # of the caches
    weight: Callable[[PrunableLayer], Tensor]  # a layer's pruned weight [d_out, d_in], once its stage is solved
    gradients: bool  # whether any layer needs them
    extras: Extras | None  # `extras_in_turn`
    grow: Callable[[Stage], None] = lambda stage: None  # called after every block that is done
    notes: list[str] = field(default_factory=list)  # for the report: the passes that the stages took

    def __post_init__(self) -> None:
        self.blocks, self.last = self.structure.blocks, len(self.structure.blocks) - 1
        self.forward, self.backward, self.whole = 0, 0, 0  # passes over all data: of blocks, and of the whole model

    def __iter__(self) -> Iterator[Stage]:
        """One stage per block, from the first to the last with layers, then one per layer outside of blocks."""
        inside, done = [block.layers for block in self.blocks if block.layers], Layers()
        if inside and self.extras is not None:
            blocks = Walk(self.model, self.blocks, self.batches, self.gradients, self.loss, self.storage, self.extras)
            observed = range(blocks.lowest, 1 + max(i for i, block in enumerate(self.blocks) if block.layers))
            blocks.capture_arguments()
            for i in range(observed[0]):
                with self.blocks[i].onloaded():
                    blocks.forward(i)
            self.forward += observed[0]
            kind = _DifferentiatedStage if self.gradients else _PrefixStage
            for i in observed:
                stage = kind(self, blocks, i, i < observed[-1])
                yield stage
                self.grow(stage)
            inside, done = [], sum(inside, ())
        for layers in (*inside, *((layer,) for layer in self.structure.outside)):
            yield OpenStage(layers, partial(self._run_whole, done))
            done += layers
        parts = [f"{self.forward} block passes forwards", f"{self.backward} backwards"] if self.forward else []
        parts += [f"{self.whole} passes of the whole model"] if self.whole or not parts else []
        self.notes.append(f"statistics recomputed on the pruned prefix: {', '.join(parts)}")

    def _run_whole(self, done: Layers, observer: PassObserver) -> None:
        with swapped_weights(done, self.weight):
            full = FullModelPipeline(self.model, self.blocks, self.batches, bool(observer.gradients), self.loss)
            full.run(observer)
        self.whole += 1
