"""Allocate the sparsity of variants to their layers, from scores or loss curves of the dense model."""

import itertools
from collections.abc import Iterator, Sequence

from torch import Tensor

from ..calibration.observer import Observer
from ..model.layers import PrunableLayer
from ..pipeline.inputs import Prepared
from ..pipeline.loop import run_pipeline
from ..pipeline.model_pipeline import block_sequences, walk_over
from ..pipeline.stages import FullModelPipeline, Stage
from ..pipeline.variant import Variant
from ..progress import progress_bar
from .block_scores import allocate, block_scores
from .byte_budget import byte_patterns
from .fisher import fisher_patterns, gather_curves


def allocate_sparsity(prepared: Prepared, variants: Sequence[Variant]) -> None:
    """Set the patterns of every variant, unless they are uniform or given by name; the model is dense and frozen."""
    selection = prepared.selection
    if selection.config.allocation == "fisher":
        gather_curves(prepared, variants)
        for variant in variants:
            budget = variant.selection.config.has_budget
            patterns, note = byte_patterns(variant, prepared.model) if budget else fisher_patterns(variant)
            variant.patterns |= patterns
            variant.notes.append(note)
        return
    lacking = any(variant.lacks(layer) for variant in variants for layer in selection.layers)
    if selection.config.allocation not in ("owl", "alpha") or not (lacking or selection.config.recover == "gradual"):
        return
    squares = input_squares(prepared) if selection.config.allocation == "owl" else {}
    reached = squares if squares else {layer.name for layer in selection.layers}

    def groups() -> Iterator[tuple[PrunableLayer, ...]]:
        """Layers with the same sparsity that the data reach; they are onloaded until the next ones are requested."""
        for block in selection.structure.blocks:
            layers = tuple(layer for layer in block.layers if layer.name in reached)
            if layers:
                with block.onloaded():
                    yield layers
        yield from ((layer,) for layer in selection.structure.outside if layer.name in reached)

    scores = block_scores(selection.config, groups(), squares, prepared.subject.progress)
    for variant in variants:
        by_layer, note = allocate(variant.selection.config, list(groups()), scores)
        variant.patterns = {**by_layer}
        variant.notes.append(note)


def input_squares(prepared: Prepared) -> dict[str, Tensor]:
    """Σ x² of the inputs of every layer that the data reach, [d_in] or [groups, d_in], by one forward pass."""
    squares: dict[str, Tensor] = {}
    samples, storage, backoff = prepared.calibration.num_samples, prepared.storage, prepared.backoff

    def visit(stage: Stage) -> None:
        with backoff.passing(Observer(stage.layers, True, set(), samples, storage, share=False)) as observer:
            stage.observe(observer, advance=True)
        squares.update({layer.name: observer.take(layer).inputs for layer in stage.layers if observer.reached(layer)})

    run_pipeline(_ForwardPass(prepared), visit, prepared.backoff, lambda: prepared.batches, lambda: "the outliers")
    return squares


class _ForwardPass:
    """A pipeline of one forward pass; offloaded blocks are onloaded in turn."""

    def __init__(self, prepared: Prepared):
        self.prepared = prepared

    def __iter__(self) -> Iterator[Stage]:
        prepared, structure = self.prepared, self.prepared.selection.structure
        offloaded = prepared.block_probe is not None
        layers = structure.outside if offloaded else prepared.selection.layers
        bar = progress_bar(prepared.batches, desc="outliers", unit="batch", shown=prepared.subject.progress)
        full = FullModelPipeline(prepared.model, structure.blocks, bar, False, prepared.subject.loss, layers)
        if not offloaded:
            return iter(full)
        (sequence,) = block_sequences(prepared, False).sequential
        walk = walk_over(prepared, sequence, prepared.batches, False)
        walk.capture()
        return itertools.chain(walk.stages(), full)
