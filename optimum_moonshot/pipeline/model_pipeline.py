"""The stages of a whole model: those of its sequential blocks, then the layers outside of them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from torch import Tensor

from ..data.batches import Batch
from ..model.calls import frozen
from ..model.layers import PrunableLayer, all_onloaded
from ..progress import progress_bar
from .block_sequences import BlockSequence, BlockSequences, find_block_sequences, parameters_read
from .inputs import Prepared
from .recompute import RecomputePipeline
from .stages import FullModelPipeline, OpenStage, Stage
from .walk import BlockStage, Walk

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
    # None for those of the dense model.
    weight: Callable[[PrunableLayer], Tensor] | None = None
    notes: list[str] = field(default_factory=list)  # for the report, after the last stage
    # ℓ_n of the dense model, by batch of this process, where a backward pass starts from them; after the last stage.
    losses: list[Tensor | None] = field(default_factory=list)

    def __iter__(self) -> Iterator[Stage]:
        prepared, selection, self.losses = self.prepared, self.prepared.selection, []
        structure, gradients = selection.structure, selection.needs_gradients
        if not any(map(self.results.lacks, selection.layers)):
            return
        if prepared.data is None:
            yield from self._without_data()
        elif self.weight is not None:
            yield from self._recomputed(self.weight)
        else:
            sequences = block_sequences(prepared, gradients)
            for layer in (layer for block in sequences.unreached for layer in block.layers):
                if self.results.lacks(layer):
                    self.results.skip(layer)
            for sequence in sequences.sequential:
                yield from self._captured(walk_over(prepared, sequence, prepared.batches, gradients))
            others = tuple(layer for block in sequences.non_sequential for layer in block.layers)
            if others or structure.outside:
                full = self._full_model(others + structure.outside)
                yield from full
                self.losses = self.losses or full.losses
            if others:
                cost = f"{full.passes} passes of the whole model, with all its activations in memory"
                self.notes.append(
                    f"{len(sequences.non_sequential)} blocks are not sequential; their layers took {cost}"
                )

    def _without_data(self) -> Iterator[Stage]:
        structure = self.prepared.selection.structure
        for block in structure.blocks:
            if block.layers:
                yield OpenStage(block.layers, lambda observer: None, block.onloaded)
        yield OpenStage(structure.outside, lambda observer: None)

    def _recomputed(self, weight: Callable[[PrunableLayer], Tensor]) -> Iterator[Stage]:
        prepared, structure = self.prepared, self.prepared.selection.structure
        gradients, loss = prepared.selection.needs_gradients, prepared.subject.loss
        sequences = block_sequences(prepared, gradients).sequential
        extras = next((sequence.extras for sequence in sequences if sequence.blocks == structure.blocks), None)
        pipeline = RecomputePipeline(
            prepared.model, structure, prepared.batches, loss, prepared.storage, weight, gradients, extras
        )
        yield from pipeline
        self.notes.append(pipeline.cost)

    def _full_model(self, layers: Sequence[PrunableLayer]) -> FullModelPipeline:
        prepared, selection = self.prepared, self.prepared.selection
        blocks, loss = selection.structure.blocks, prepared.subject.loss
        return FullModelPipeline(prepared.model, blocks, prepared.batches, selection.needs_gradients, loss, layers)

    def _captured(self, walk: Walk) -> list[BlockStage]:
        """The stages of a walk; a bar shows the passes before the first one."""
        total, shown = len(walk.batches), self.prepared.subject.progress
        with progress_bar(total=total, desc="calibrating", unit="batch", shown=shown) as bar:
            walk.progress = bar.update
            walk.capture()
        self.losses = self.losses or walk.losses
        return walk.stages()

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


def walk_over(prepared: Prepared, sequence: BlockSequence, batches: Sequence[Batch], gradients: bool) -> Walk:
    """A walk over sequential blocks, backward where any layer needs gradients."""
    around = [block for block in prepared.selection.structure.blocks if block not in sequence.blocks]
    loss, storage = prepared.subject.loss, prepared.storage
    return Walk(prepared.model, sequence.blocks, batches, gradients, loss, storage, sequence.extras, around)
