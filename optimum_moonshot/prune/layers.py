"""Solves the layers of a model for one or several variants: allocation, then the loop.

The statistics of a block are those of the dense model, or of the model whose blocks before it are pruned. At λ = 1 a
forward pass gives the inputs behind pruned blocks. The Fisher term that rows share needs one weight of every token
besides, and takes the weights of some samples from the dense model (calibration/accumulators.py). Both take one more
forward pass than statistics of the dense model, where all blocks follow each other. A Fisher term per row needs the
gradients behind every pruned block, by a number of passes that is quadratic in the number of blocks.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from tqdm.auto import tqdm

from ..allocate.run import allocate_sparsity
from ..calibration.accumulators import GradientPlan, TokenWeights
from ..calibration.observer import LayerStatistics, Observer
from ..devices import peak_bytes, reset_peak, wait_for
from ..errors import FactorizationError, require
from ..model.layer_kinds import LinearLayer, PrunableLayer
from ..objective.patterns import NM, Pattern, PerExpert, sparsity_of
from ..packing import Bitmask, Quantized
from ..pipeline.loop import Task, run_pipeline, solve_parts
from ..pipeline.model_pipeline import ModelPipeline, Results, extras_in_turn
from ..pipeline.partition import StatisticsSpec
from ..pipeline.solve import Statistics, solve_layer
from ..pipeline.variant import Variant, share_results
from ..reports.prune_report import LayerReport, loss_fields

if TYPE_CHECKING:
    from ..pipeline.inputs import Prepared
    from ..pipeline.selection import Selection
    from ..pipeline.walk import Stage
    from ..solvers import Solver

NOTE = "token weights of the Fisher term from the dense model"
# One in SHARE samples has token weights, but at least LEAST have. KL divergence of SmolLM2-135M, SparseGPT, 64 samples:
# at 2:4, λ = 0.9, three seeds, 0.856 by all, in 297 CPU seconds, and 0.846 by half, in 188 (λ = 1: 0.888); at 0.6,
# λ = 0.5, two seeds, 0.751 and 0.756, by a quarter 0.775 (λ = 1: 0.958); at 0.7, one seed, 1.377 and 1.438 (1.681).
SHARE, LEAST = 2, 16


def prune_layer(layer: PrunableLayer, statistics: Statistics, variants: Sequence[Variant]) -> None:
    """Solve a dense layer for several variants, all variants of one λ together: one elimination serves them.

    Variants with the same λ and pattern share the result, for example if the layer is excluded from the Fisher loss.
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
                seconds = report.seconds / len(sharing)
                variant.solving += seconds
                variant.store.put(dataclasses.replace(report, seconds=seconds), weight)


@torch.no_grad()
def solve(
    solver: Solver, layer: PrunableLayer, statistics: Statistics, lam: float, patterns: list[Pattern]
) -> list[tuple[LayerReport, Tensor]]:
    """The reports and the weights [d_out, d_in], in the layer's dtype, of a dense layer for several patterns.

    A solver without data gets statistics of no samples.

    Raises:
        FactorizationError: the quadratic remains singular at the largest damping; it names the layer.
    """
    device = layer.parameter.device
    wait_for(device)  # so that the calibration pass is not counted as time of the solver
    reset_peak(device)
    started = time.perf_counter()
    calibrated = not (isinstance(statistics, LayerStatistics) and statistics.samples == 0)
    try:
        solved = solve_layer(solver, layer, patterns, statistics, lam if calibrated else 1.0)
    except FactorizationError as error:
        raise error.within(layer.name) from None
    wait_for(device)
    seconds = (time.perf_counter() - started) / len(patterns)
    results = []
    for pattern, result in zip(patterns, solved, strict=True):
        weight, codec = result.weight, Bitmask() if pattern.grid is None else Quantized.of(pattern.grid)
        report = LayerReport(
            name=layer.name,
            shape=layer.shape,
            sparsity=sparsity_of(weight),
            damping=result.damping,
            seconds=seconds,
            peak_memory=peak_bytes(device),
            notes=result.notes if calibrated else (),
            target_sparsity=pattern.sparsity,
            zeros_before=layer.matrix.numel() - int(torch.count_nonzero(layer.matrix)),
            bits=None if pattern.grid is None else pattern.grid.bits,
            packed_bytes=min(weight.nbytes, codec.packed_bytes(weight, pattern if isinstance(pattern, NM) else None)),
            expert_targets=(min(pattern.experts), max(pattern.experts)) if isinstance(pattern, PerExpert) else None,
            **(loss_fields(result.lam, result.masked, result.pruned) if calibrated else {"lam": None}),
        )
        results.append((report, weight))
    return results


class Source(NamedTuple):
    """The source of a run's statistics."""

    pipeline: ModelPipeline  # over the dense model, or behind the pruned prefix
    weights: Mapping[str, TokenWeights] = MappingProxyType({})  # by layer, in place of the prefix's gradients


def runs_forward(selection: Selection) -> bool:
    """Whether forward passes behind pruned blocks give the statistics, if all blocks follow each other.

    With a Fisher term they do where its rows share it, and the inputs of all layers show the tokens.
    """
    if selection.recompute is False or selection.structure.outside:
        return False
    linear = all(isinstance(layer, LinearLayer) for layer in selection.layers)
    return not selection.needs_gradients or (selection.shares_fisher and linear)


def weighted_samples(samples: int) -> int:
    """The number of calibration samples whose tokens have weights in the Fisher term that rows share."""
    return min(samples, max(LEAST, samples // SHARE))


def find_source(
    prepared: Prepared,
    results: Results,
    weight: Callable[[PrunableLayer], Tensor],
    several: bool = False,
    weighted: int | None = None,
) -> Source:
    """The source of the statistics of a dense, frozen model; `several` variants share those of the dense model.

    `weight` is the pruned weight [d_out, d_in] of a layer that has its result, and `weighted` the number of samples
    with token weights, None for `weighted_samples`.
    """
    selection = prepared.selection
    default = Source(ModelPipeline(prepared, results, weight if selection.recompute else None))
    lacking = any(map(results.lacks, selection.layers))
    if prepared.data is None or several or not lacking or not runs_forward(selection):
        return default
    probe = partial(extras_in_turn, prepared, False)
    extras = prepared.backoff.with_smaller_batches("the probe", probe, lambda: prepared.batches)
    if extras is None:
        return default
    if not selection.needs_gradients:
        return Source(ModelPipeline(prepared, results, weight, extras=extras))
    gathering = _Gathering(prepared, weighted or weighted_samples(prepared.calibration.num_samples))
    sampled, note = gathering.prepared, gathering.note
    try:
        pipeline = ModelPipeline(sampled, gathering)
        run_pipeline(pipeline, gathering.visit, sampled.backoff, lambda: sampled.batches, lambda: note)
    except _Routed:
        return default
    pipeline = ModelPipeline(prepared, results, weight, gradients=False, extras=extras, notes=[note])
    return Source(pipeline, gathering.weights)


class _Routed(Exception):
    """A layer does not read every token once, so that other tokens could reach it in the pruned model."""


class _Gathering:
    """Collects token weights of all layers with a Fisher term, on `count` samples, from stages of the dense model."""

    def __init__(self, prepared: Prepared, count: int):
        data = prepared.calibration
        self.prepared = dataclasses.replace(prepared, data=data.spread(count))
        # Of the samples, counted from the first of this process.
        self.numbers = [i * data.num_samples // count - prepared.first_sample for i in range(count)]
        self.note = NOTE if count == data.num_samples else f"{NOTE}, on {count} of {data.num_samples} samples"
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
        plans, extra = dict.fromkeys(names, GradientPlan(nothing=True)), (TokenWeights,)
        local_samples = self.prepared.local_samples
        # The diagonals of the Gram matrices come with the observer: the cheapest statistic of inputs.
        with backoff.passing(
            Observer(layers, True, names, samples, storage, plans, extra=extra, local_samples=local_samples)
        ) as observer:
            stage.observe(observer, advance=True)
        reached = [layer for layer in layers if observer.reached(layer)]
        weights = {layer.name: observer.take(layer).extra[TokenWeights] for layer in reached}
        lengths = [list(map(len, of_layer.roots.values())) for of_layer in weights.values()]
        once = all(len(tokens) == samples and tokens == lengths[0] for tokens in lengths)
        if not all(backoff.gather(once)):
            raise _Routed
        for of_layer in weights.values():
            of_layer.roots = dict(zip(self.numbers, of_layer.roots.values(), strict=True))
        self.weights |= weights


class Pruning(Task):
    """Solves every layer for each variant that lacks it, from the statistics of one pass; `bar` counts layers."""

    def __init__(self, prepared: Prepared, variants: Sequence[Variant], bar: tqdm):
        self.prepared, self.variants, self.bar, selection = prepared, variants, bar, prepared.selection
        bar.update(sum(not self.lacks(layer) for layer in selection.layers))
        source = find_source(prepared, self, variants[0].pruned_weight, several=len(variants) > 1)
        self.pipeline = source.pipeline
        patterns = {layer.name: [variant.pattern_of(layer) for variant in variants] for layer in selection.layers}
        samples = 0 if prepared.data is None else prepared.data.num_samples
        spec = StatisticsSpec.of(selection, patterns, samples, source.weights)
        super().__init__(spec, prepared.backoff, lambda: prepared.batches)

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


def prune_layers(prepared: Prepared, variants: Sequence[Variant], bar: tqdm) -> ModelPipeline:
    """Solve every layer for each variant that lacks it, with notes on the passes; `bar` counts layers.

    The model is dense and frozen; the variants have the same layers and solver. Returns the pipeline, which has the
    losses of the dense model.
    """
    if prepared.selection.config.allocation != "uniform":
        allocate_sparsity(prepared, variants)
    task = Pruning(prepared, variants, bar)
    run_pipeline(task.pipeline, partial(solve_parts, task), task.backoff, task.batches)
    for variant in variants:
        variant.notes += [*task.pipeline.notes, *task.notes]
        require(bool(variant.layers), "no calibration data reached any chosen layer: give data of the kind they read")
    return task.pipeline
