"""Whether a run computes the statistics of a block behind the pruned blocks before it, and what it needs for that.

At λ = 1 a forward pass gives the inputs behind pruned blocks. The Fisher term that rows share needs one weight of every
token besides, and takes the weights from the dense model (calibration/token_weights.py). Both take one more forward
pass than statistics of the dense model, where all blocks follow each other. A Fisher term per row needs the gradients
behind every pruned block, by a number of passes that is quadratic in the number of blocks.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from torch import Tensor

from ..calibration.accumulators import GradientPlan
from ..calibration.observer import Observer
from ..calibration.token_weights import TokenWeights
from ..model.layer_kinds import LinearLayer, PrunableLayer
from ..pipeline.inputs import Prepared
from ..pipeline.loop import run_pipeline
from ..pipeline.model_pipeline import ModelPipeline, Results, block_sequences
from ..pipeline.variant import Variant
from ..pipeline.walk import Stage

NOTE = "token weights of the Fisher term from the dense model"


class Prefix(NamedTuple):
    """The source of a run's statistics."""

    recompute: bool = False  # whether it is the pruned prefix
    weights: Mapping[str, TokenWeights] | None = None  # by layer, in place of the prefix's gradients
    losses: Sequence[Tensor | None] = ()  # ℓ_n of the dense model, by batch, where its backward pass gave the weights

    def pipeline(
        self, prepared: Prepared, results: Results, weight: Callable[[PrunableLayer], Tensor]
    ) -> ModelPipeline:
        """The stages of the run; `weight` is the pruned weight [d_out, d_in] of a layer that is done."""
        notes, gradients = ([], None) if self.weights is None else ([NOTE], False)
        return ModelPipeline(prepared, results, weight if self.recompute else None, gradients, notes)


def find_prefix(prepared: Prepared, variants: Sequence[Variant]) -> Prefix:
    """The source of the statistics of a dense, frozen model; several variants share those of the dense model."""
    selection = prepared.selection
    wanted = selection.recompute
    lacking = any(variant.lacks(layer) for variant in variants for layer in selection.layers)
    if wanted is False or prepared.data is None or len(variants) > 1 or not lacking:
        return Prefix(bool(wanted))
    probe = partial(_in_turn, prepared)
    in_turn = prepared.backoff.with_smaller_batches("the probe", probe, lambda: prepared.batches)
    if not in_turn or not selection.needs_gradients:
        return Prefix(in_turn if wanted is None else wanted)
    if selection.fisher == "shared" and not selection.solver.objective.diagonal_only:
        gathering = _Gathering(prepared)
        pipeline = ModelPipeline(prepared, gathering)
        try:
            run_pipeline(pipeline, gathering.visit, prepared.backoff, lambda: prepared.batches, lambda: NOTE)
            return Prefix(True, gathering.weights, pipeline.losses)
        except _Routed:
            pass
    return Prefix(bool(wanted))


def _in_turn(prepared: Prepared) -> bool:
    """Whether all layers belong to blocks that follow each other, so that every block runs twice."""
    structure = prepared.selection.structure
    layers = [layer for block in structure.blocks for layer in block.layers]
    if structure.outside or any(len(layer.modules) > 1 for layer in layers):
        return False
    if prepared.selection.needs_gradients and not all(isinstance(layer, LinearLayer) for layer in layers):
        return False  # the shapes of inputs do not show the tokens
    sequences = block_sequences(prepared, False).sequential
    return len(sequences) == 1 and sequences[0].blocks == structure.blocks and sequences[0].extras is not None


class _Routed(Exception):
    """A layer does not read every token once, so that other tokens could reach it in the pruned model."""


class _Gathering:
    """Collects the token weights of all layers with a Fisher term, from the stages of the dense model."""

    def __init__(self, prepared: Prepared):
        self.prepared = prepared
        self.weights: dict[str, TokenWeights] = {}
        self.unreached: set[str] = set()

    def lacks(self, layer: PrunableLayer) -> bool:
        missing = layer.name not in self.weights and layer.name not in self.unreached
        return missing and self.prepared.selection.lam_of(layer) < 1

    def skip(self, layer: PrunableLayer) -> None:
        """Do nothing more: the pruning that follows reports layers without data."""
        self.unreached.add(layer.name)

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
        for layer in layers:
            if observer.reached(layer):
                self.weights[layer.name] = observer.take(layer).extra[TokenWeights]
            else:
                self.skip(layer)
        read = [self.weights[name] for name in names if name in self.weights]
        alike = all(weights.most_calls <= 1 and weights.lengths == read[0].lengths for weights in read)
        if not all(backoff.gather(alike)):
            raise _Routed
