"""Whether a run computes the statistics of a block behind the pruned blocks before it, and what it needs for that.

At λ = 1 a forward pass gives the inputs behind pruned blocks. The Fisher term that rows share needs one weight of every
token besides, and takes the weights from the dense model (calibration/accumulators.py). Both take one more forward
pass than statistics of the dense model, where all blocks follow each other. A Fisher term per row needs the gradients
behind every pruned block, by a number of passes that is quadratic in the number of blocks.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from torch import Tensor

from ..calibration.accumulators import GradientPlan, TokenWeights
from ..calibration.observer import Observer
from ..model.layer_kinds import LinearLayer, PrunableLayer
from ..pipeline.block_sequences import Extras
from ..pipeline.inputs import Prepared
from ..pipeline.loop import run_pipeline
from ..pipeline.model_pipeline import ModelPipeline, Results, extras_in_turn
from ..pipeline.selection import Selection
from ..pipeline.walk import Stage

NOTE = "token weights of the Fisher term from the dense model"


class Prefix(NamedTuple):
    """The source of a run's statistics."""

    recompute: bool = False  # whether it is the pruned prefix
    extras: Extras | None = None  # `extras_in_turn`, where the model has been probed
    weights: Mapping[str, TokenWeights] | None = None  # by layer, in place of the prefix's gradients
    losses: Sequence[Tensor | None] = ()  # ℓ_n of the dense model, by batch, where its backward pass gave the weights

    def pipeline(
        self, prepared: Prepared, results: Results, weight: Callable[[PrunableLayer], Tensor]
    ) -> ModelPipeline:
        """The stages of the run; `weight` is the pruned weight [d_out, d_in] of a layer that is done."""
        notes, gradients = ([], None) if self.weights is None else ([NOTE], False)
        return ModelPipeline(prepared, results, weight if self.recompute else None, gradients, self.extras, notes)


def runs_forward(selection: Selection) -> bool:
    """Whether forward passes behind pruned blocks give the statistics, if all blocks follow each other.

    With a Fisher term they do where its rows share it, and the inputs of all layers show the tokens.
    """
    if selection.recompute is False or selection.structure.outside:
        return False
    linear = all(isinstance(layer, LinearLayer) for layer in selection.layers)
    return not selection.needs_gradients or (selection.shares_fisher and linear)


def find_prefix(prepared: Prepared, lacks: Callable[[PrunableLayer], bool], several: bool = False) -> Prefix:
    """The source of the statistics of a dense, frozen model; `several` variants share those of the dense model.

    `lacks` says whether a layer has no result yet, and is to have one.
    """
    selection = prepared.selection
    wanted = bool(selection.recompute)
    lacking = any(map(lacks, selection.layers))
    if prepared.data is None or several or not lacking or not runs_forward(selection):
        return Prefix(wanted)
    probe = partial(extras_in_turn, prepared, False)
    extras = prepared.backoff.with_smaller_batches("the probe", probe, lambda: prepared.batches)
    if extras is None:
        return Prefix(wanted)
    if not selection.needs_gradients:
        return Prefix(True, extras)
    gathering = _Gathering(prepared)
    pipeline = ModelPipeline(prepared, gathering)
    try:
        run_pipeline(pipeline, gathering.visit, prepared.backoff, lambda: prepared.batches, lambda: NOTE)
    except _Routed:
        return Prefix(wanted)
    return Prefix(True, extras, gathering.weights, pipeline.losses)


class _Routed(Exception):
    """A layer does not read every token once, so that other tokens could reach it in the pruned model."""


class _Gathering:
    """Collects the token weights of all layers with a Fisher term, from the stages of the dense model."""

    def __init__(self, prepared: Prepared):
        self.prepared = prepared
        self.weights: dict[str, TokenWeights] = {}

    def lacks(self, layer: PrunableLayer) -> bool:
        return layer.name not in self.weights and self.prepared.selection.lam_of(layer) < 1

    def skip(self, layer: PrunableLayer) -> None:
        """Do nothing: the pruning that follows reports layers without data."""

    def visit(self, stage: Stage) -> None:
        layers = [layer for layer in stage.layers if self.lacks(layer)]
        if not layers:
            return
        names, storage = {layer.name for layer in layers}, self.prepared.storage
        samples, backoff = self.prepared.calibration.num_samples, self.prepared.backoff
        plans = dict.fromkeys(names, GradientPlan(nothing=True))
        extra, here = (TokenWeights,), self.prepared.samples_here
        # The diagonals of the Gram matrices come with the observer: the cheapest statistic of inputs.
        with backoff.passing(
            Observer(layers, True, names, samples, storage, plans, extra=extra, here=here)
        ) as observer:
            stage.observe(observer, advance=True)
        reached = [layer for layer in layers if observer.reached(layer)]
        self.weights |= {layer.name: observer.take(layer).extra[TokenWeights] for layer in reached}
        lengths = [list(map(len, self.weights[layer.name].roots)) for layer in reached]
        once = all(len(tokens) == here and tokens == lengths[0] for tokens in lengths)
        if not all(backoff.gather(once)):
            raise _Routed
