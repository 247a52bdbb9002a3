"""Solve the layers of a model for one or several variants: allocation, then the loop."""

import dataclasses
import time
from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor
from tqdm.auto import tqdm

from ..allocation.allocate import allocate_sparsity
from ..calibration.layer_statistics import LayerStatistics
from ..devices import peak_bytes, reset_peak
from ..errors import FactorizationError, require
from ..model.layers import PrunableLayer
from ..objective.patterns import Pattern, PerExpert
from ..pipeline.exchange import share_results
from ..pipeline.inputs import Prepared
from ..pipeline.loop import StatisticsTask, run_pipeline, solve_parts
from ..pipeline.model_pipeline import ModelPipeline
from ..pipeline.partition import Part
from ..pipeline.solve import Statistics, solve_layer
from ..pipeline.spec import StatisticsSpec, solving_cost
from ..pipeline.stages import Stage
from ..pipeline.variant import Variant
from ..reports.prune_report import LayerReport, LossFields, loss_fields
from ..results.store import sparsity_of
from ..solvers import Solver


class Pruning(StatisticsTask):
    """Solves every layer for each variant that lacks it, from the statistics of one pass; `bar` counts layers."""

    def __init__(self, prepared: Prepared, variants: Sequence[Variant], bar: tqdm):
        selection = prepared.selection
        patterns = {layer.name: [each.pattern_of(layer) for each in variants] for layer in selection.layers}
        samples = 0 if prepared.data is None else prepared.data.num_samples
        spec = StatisticsSpec.of(selection, patterns, samples)
        super().__init__(spec, prepared.backoff, lambda: prepared.batches)
        self.prepared, self.variants, self.bar = prepared, variants, bar
        # Only a single variant may recompute its statistics on the pruned prefix.
        weight = variants[0].weight if selection.config.recompute else None
        self.pipeline = ModelPipeline(prepared, self, weight)

    def lacks(self, layer: PrunableLayer) -> bool:
        return any(variant.lacks(layer) for variant in self.variants)

    def skip(self, layer: PrunableLayer) -> None:
        """Leave the layer dense."""
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
    """As `Pruning`, for a solver without statistics."""

    def __init__(self, prepared: Prepared, variants: Sequence[Variant], bar: tqdm):
        super().__init__(prepared, variants, bar)
        self.collect = self._empty_statistics

    def partition(self, stage: Stage) -> list[Part]:
        """One part, whose layers are divided among the processes."""
        layers = tuple(layer for layer in stage.layers if self.lacks(layer))
        solver, patterns = self.prepared.selection.solver, self.spec.patterns
        costs = [solving_cost(solver, layer, patterns[layer.name]) for layer in layers]
        return [Part(layers, tuple(self.prepared.ranks.owners(costs)))] if layers else []

    def _empty_statistics(
        self, stage: Stage, part: Part, advance: bool
    ) -> Iterable[tuple[PrunableLayer, LayerStatistics]]:
        for layer, owner in zip(part.layers, part.owners, strict=True):
            if owner == self.prepared.ranks.rank:
                yield layer, LayerStatistics(torch.eye(layer.shape[1], device=layer.parameter.device), None, 0)


def prune_layers(prepared: Prepared, variants: Sequence[Variant], bar: tqdm) -> ModelPipeline:
    """Solve every layer for each variant that lacks it, with notes on the passes; `bar` counts layers.

    The model is dense and frozen; the variants have the same layers and solver. Returns the pipeline, with the losses
    of the dense model.

    Raises:
        MoonshotError: bad statistics, too little memory, or data that reached no layer.
        FactorizationError: a layer's quadratic stays singular at the largest damping; it names the layer.
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


def prune_layer(layer: PrunableLayer, statistics: Statistics, variants: Sequence[Variant]) -> None:
    """Solve a dense layer for several variants, all of one λ at once: one elimination serves several sparsities.

    Variants with the same λ and pattern share the result, for example if the layer is excluded from the Fisher loss.

    Raises:
        FactorizationError: as `prune_layers`.
    """
    for lam in dict.fromkeys(variant.selection.lam_of(layer) for variant in variants):
        by_pattern: dict[Pattern, list[Variant]] = {}
        for variant in variants:
            if variant.selection.lam_of(layer) == lam:
                by_pattern.setdefault(variant.pattern_of(layer), []).append(variant)
        solver = variants[0].selection.solver
        solved = solve(solver, layer, statistics, lam, list(by_pattern))
        for sharing, (report, weight) in zip(by_pattern.values(), solved, strict=True):
            for variant in sharing:
                variant.put(dataclasses.replace(report, seconds=report.seconds / len(sharing)), weight)


@torch.no_grad()
def solve(
    solver: Solver, layer: PrunableLayer, statistics: Statistics, lam: float, patterns: list[Pattern]
) -> list[tuple[LayerReport, Tensor]]:
    """The reports of a dense layer, and its weights [d_out, d_in] in its dtype, for several patterns.

    Statistics of no samples belong to a solver without data.

    Raises:
        FactorizationError: as `prune_layers`.
    """
    device = layer.parameter.device
    reset_peak(device)
    started = time.perf_counter()
    calibrated = not (isinstance(statistics, LayerStatistics) and statistics.samples == 0)
    try:
        solved = solve_layer(solver, layer, patterns, statistics, lam if calibrated else 1.0)
    except FactorizationError as error:
        raise error.within(layer.name) from None
    seconds = (time.perf_counter() - started) / len(patterns)
    results = []
    for pattern, each in zip(patterns, solved, strict=True):
        report = LayerReport(
            name=layer.name,
            shape=layer.shape,
            sparsity=sparsity_of(each.weight),
            damping=each.damping,
            seconds=seconds,
            peak_memory=peak_bytes(device),
            notes=each.notes if calibrated else (),
            target_sparsity=pattern.sparsity,
            expert_targets=(min(pattern.experts), max(pattern.experts)) if isinstance(pattern, PerExpert) else None,
            **(loss_fields(each.lam, each.masked, each.pruned) if calibrated else LossFields(lam=None)),
        )
        results.append((report, each.weight))
    return results
