"""Σ x² of the inputs of every layer in the dense model, by one forward pass: the activations that OWL scores."""

import itertools
from collections.abc import Iterator

from torch import Tensor

from ..calibration.observer import Observer
from ..pipeline.inputs import Prepared
from ..pipeline.loop import run_pipeline
from ..pipeline.model_pipeline import streamed
from ..pipeline.stages import FullModelPipeline, Stage
from ..progress import progress_bar


def input_squares(prepared: Prepared) -> dict[str, Tensor]:
    """Σ x² of the inputs of every layer that the data reach, [d_in] or [groups, d_in] each.

    Args:
        prepared: the model, dense and frozen, and the data.

    Raises:
        MoonshotError: NaN or infinity in the activations.
    """
    squares: dict[str, Tensor] = {}
    samples, storage, backoff = prepared.calibration.num_samples, prepared.storage, prepared.backoff

    def visit(stage: Stage) -> None:
        here = backoff.samples_here(samples)
        with backoff.passing(Observer(stage.layers, True, set(), samples, storage, share=False, here=here)) as observer:
            stage.observe(observer, advance=True)
        squares.update({each.name: observer.take(each).inputs for each in stage.layers if observer.reached(each)})

    run_pipeline(_Forward(prepared), visit, prepared.backoff, lambda: prepared.batches, lambda: "the outliers")
    return squares


class _Forward:
    """One forward pass of the whole model; of offloaded blocks one after the other."""

    def __init__(self, prepared: Prepared):
        self.prepared = prepared

    def __iter__(self) -> Iterator[Stage]:
        prepared, structure = self.prepared, self.prepared.selection.structure
        offloaded = prepared.block_probe is not None
        layers = structure.outside if offloaded else prepared.selection.layers
        bar = progress_bar(prepared.batches, desc="outliers", unit="batch", shown=prepared.subject.progress)
        full = FullModelPipeline(prepared.model, structure.blocks, bar, False, prepared.subject.loss, layers)
        return itertools.chain(streamed(prepared, prepared.batches, False) if offloaded else (), full)
