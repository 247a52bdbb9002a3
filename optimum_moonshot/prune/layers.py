"""Solves the layers of a model for one or several variants: allocation, then the loop."""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from tqdm.auto import tqdm

from ..allocate.run import allocate_sparsity
from ..calibration.observer import LayerStatistics
from ..errors import require
from ..model.layers import PrunableLayer
from ..pipeline.inputs import Prepared
from ..pipeline.loop import run_pipeline, solve_parts
from ..pipeline.model_pipeline import ModelPipeline
from ..pipeline.partition import Part, assign
from ..pipeline.solve import Statistics
from ..pipeline.spec import StatisticsSpec, solving_cost
from ..pipeline.stages import Stage
from ..pipeline.task import Task
from ..pipeline.variant import Variant, share_results
from .layer import prune_layer


class Pruning(Task):
    """Solves every layer for each variant that lacks it, from the statistics of one pass; `bar` counts layers."""

    def __init__(self, prepared: Prepared, variants: Sequence[Variant], bar: tqdm):
        selection = prepared.selection
        patterns = {layer.name: [variant.pattern_of(layer) for variant in variants] for layer in selection.layers}
        samples = 0 if prepared.data is None else prepared.data.num_samples
        spec = StatisticsSpec.of(selection, patterns, samples)
        super().__init__(spec, prepared.backoff, lambda: prepared.batches)
        self.prepared, self.variants, self.bar = prepared, variants, bar
        # Only a single variant can recompute its statistics on the pruned prefix.
        weight = variants[0].store.weight if selection.config.recompute else None
        self.pipeline = ModelPipeline(prepared, self, weight)

    def lacks(self, layer: PrunableLayer) -> bool:
        return any(variant.lacks(layer) for variant in self.variants)

    def skip(self, layer: PrunableLayer) -> None:
        """Keep the layer dense."""
        reason = self.pipeline.reason(layer)
        for variant in self.variants:
            if variant.lacks(layer):
                variant.skip(layer, reason)

    def solve(self, layer: PrunableLayer, statistics: Statistics) -> None:
        self.bar.set_postfix_str(layer.name)
        prune_layer(layer, statistics, [variant for variant in self.variants if variant.lacks(layer)])
        self.bar.update(1)

    def exchange(self, solved: Sequence[PrunableLayer]) -> None:
        self.bar.update(share_results(self.prepared, self.variants, solved))


class PruningWithoutData(Pruning):
    """Like `Pruning`, for a solver without statistics."""

    def partition(self, stage: Stage) -> list[Part]:
        """One part, whose layers are divided among the processes."""
        layers = tuple(layer for layer in stage.layers if self.lacks(layer))
        solver, patterns = self.prepared.selection.solver, self.spec.patterns
        costs = [solving_cost(solver, layer, patterns[layer.name]) for layer in layers]
        return [Part(layers, tuple(assign(costs, self.backoff.ranks.size)))] if layers else []

    def collect(self, stage: Stage, part: Part, advance: bool) -> Iterator[tuple[PrunableLayer, LayerStatistics]]:
        for layer, owner in zip(part.layers, part.owners, strict=True):
            if self.backoff.solves(owner):
                inputs = torch.ones(layer.shape[1], device=layer.parameter.device)  # the diagonal of the identity
                yield layer, LayerStatistics(inputs, None, 0, diagonal=True)


def prune_layers(prepared: Prepared, variants: Sequence[Variant], bar: tqdm) -> ModelPipeline:
    """Solve every layer for each variant that lacks it, with notes on the passes; `bar` counts layers.

    The model is dense and frozen; the variants have the same layers and solver. Returns the pipeline, which has the
    losses of the dense model.
    """
    bar.update(sum(not any(v.lacks(layer) for v in variants) for layer in prepared.selection.layers))
    if prepared.selection.config.allocation != "uniform":
        allocate_sparsity(prepared, variants)
    task = (PruningWithoutData if prepared.data is None else Pruning)(prepared, variants, bar)
    run_pipeline(task.pipeline, partial(solve_parts, task), task.backoff, task.batches)
    for variant in variants:
        variant.notes += [*task.pipeline.notes, *task.notes]
        require(bool(variant.layers), "no calibration data reached any chosen layer: give data of the kind they read")
    return task.pipeline
