"""The layers of a model by one variant of a pruning, or by many: allocation, then the loop."""

import dataclasses
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
from tqdm.auto import tqdm

from ..allocation.block_scores import allocate, block_scores
from ..allocation.fisher import fisher_patterns, gather_curves
from ..allocation.outliers import input_squares
from ..calibration.observer import LayerStatistics
from ..devices import peak_bytes, reset_peak
from ..errors import FactorizationError, require
from ..model.layers import PrunableLayer
from ..objective.patterns import Pattern, PerExpert
from ..pipeline.inputs import Prepared
from ..pipeline.loop import StatisticsTask, run_pipeline, solve_parts
from ..pipeline.model_pipeline import ModelPipeline
from ..pipeline.partition import Part, assign
from ..pipeline.solve import Statistics, solve_layer
from ..pipeline.spec import StatisticsSpec, solving_cost
from ..pipeline.stages import Stage
from ..pipeline.variant import Variant, share_results
from ..reports.prune_report import LayerReport, loss_fields
from ..results.store import sparsity_of
from ..solvers import Solver


class Pruning(StatisticsTask):
    """Solves every layer by every variant that lacks it.

    Args:
        prepared: the model, dense and frozen, and the data.
        variants: of the same layers and solver; the statistics of one pass serve all of them.
        bar: advances with the layers.
    """

    def __init__(self, prepared: Prepared, variants: Sequence[Variant], bar: tqdm):
        selection = prepared.selection
        patterns = {layer.name: [each.pattern_of(layer) for each in variants] for layer in selection.layers}
        samples = 0 if prepared.data is None else prepared.data.num_samples
        spec = StatisticsSpec.of(selection, patterns, samples)
        super().__init__(spec, prepared.backoff, lambda: prepared.batches)
        self.prepared, self.variants, self.bar = prepared, variants, bar
        # Statistics recomputed on the pruned prefix belong to one variant: a sweep refuses to recompute.
        weight = variants[0].store.weight if selection.config.recompute else None
        self.pipeline = ModelPipeline(prepared, self, weight)

    def lacks(self, layer: PrunableLayer) -> bool:
        """As `Task.lacks`."""
        return any(variant.lacks(layer) for variant in self.variants)

    def skip(self, layer: PrunableLayer) -> None:
        """As `Task.skip`: the layer stays dense."""
        reason = self.pipeline.reason(layer)
        for variant in self.variants:
            if variant.lacks(layer):
                variant.skip(layer, reason)

    def solve(self, layer: PrunableLayer, statistics: Statistics) -> None:
        """As `Task.solve`."""
        self.bar.set_postfix_str(layer.name)
        prune_layer(layer, statistics, [variant for variant in self.variants if variant.lacks(layer)])
        self.bar.update(1)

    def exchange(self, solved: Sequence[PrunableLayer]) -> None:
        """As `Task.exchange`."""
        self.bar.update(share_results(self.prepared, self.variants, solved))


class PruningWithoutData(Pruning):
    """As `Pruning`, by a solver that needs no statistics."""

    def partition(self, stage: Stage) -> list[Part]:
        """As `Task.partition`: one part, of which each process solves some layers."""
        layers = tuple(layer for layer in stage.layers if self.lacks(layer))
        solver, patterns = self.prepared.selection.solver, self.spec.patterns
        costs = [solving_cost(solver, layer, patterns[layer.name]) for layer in layers]
        return [Part(layers, tuple(assign(costs, self.backoff.processes)))] if layers else []

    def collect(self, stage: Stage, part: Part, advance: bool) -> Iterable[tuple[PrunableLayer, LayerStatistics]]:
        for layer, owner in zip(part.layers, part.owners, strict=True):
            if self.backoff.solves(owner):
                inputs = torch.eye(layer.shape[1], device=layer.parameter.device)
                yield layer, LayerStatistics(inputs, None, 0, limit=self.backoff.limit)


def prune_layers(prepared: Prepared, variants: Sequence[Variant], bar: tqdm) -> ModelPipeline:
    """Solve every layer by every variant that lacks it; each has a note on how the data passed.

    Args:
        prepared: the model, dense and frozen, and the data.
        variants: of the same layers and solver.
        bar: advances with the layers.

    Returns:
        The pipeline, with the losses of the dense model.

    Raises:
        MoonshotError: bad statistics, too little memory, or data that reached no layer.
        FactorizationError: a layer's quadratic stays singular at the largest damping, with the layer's name.
    """
    bar.update(sum(not any(v.lacks(layer) for v in variants) for layer in prepared.selection.layers))
    allocate_sparsity(prepared, variants)
    task = (PruningWithoutData if prepared.data is None else Pruning)(prepared, variants, bar)
    run_pipeline(task.pipeline, partial(solve_parts, task), task.backoff, task.batches)
    for variant in variants:
        variant.notes += [*task.pipeline.notes, *task.notes]
        require(bool(variant.layers), "no calibration data reached any chosen layer: give data of the kind they read")
    return task.pipeline


def prune_layer(layer: PrunableLayer, statistics: Statistics, variants: Sequence[Variant]) -> None:
    """Solve a layer by several variants; those with one λ together, since one elimination serves several sparsities.

    Variants that have one pattern too share the result, as those of all λ do where the Fisher loss is kept from a
    layer.

    Args:
        layer: at its dense weight.
        statistics: of no samples without data.
        variants: which get the result.

    Raises:
        FactorizationError: the layer's quadratic stays singular at the largest damping, with the layer's name.
    """
    for lam in dict.fromkeys(variant.selection.lam_of(layer) for variant in variants):
        alike = [variant for variant in variants if variant.selection.lam_of(layer) == lam]
        patterns = list(dict.fromkeys(variant.pattern_of(layer) for variant in alike))
        solved = solve(alike[0].selection.solver, layer, statistics, lam, patterns)
        for pattern, (report, weight) in zip(patterns, solved, strict=True):
            sharing = [variant for variant in alike if variant.pattern_of(layer) == pattern]
            for variant in sharing:
                variant.put(dataclasses.replace(report, seconds=report.seconds / len(sharing)), weight)


def allocate_sparsity(prepared: Prepared, variants: Sequence[Variant]) -> None:
    """Give every variant the patterns that follow from scores or curves of the dense model.

    Args:
        prepared: the model, dense and frozen, and the data.
        variants: of the same layers and solver.

    Raises:
        MoonshotError: bad statistics, or too little memory.
    """
    selection = prepared.selection
    if selection.config.allocation == "fisher":
        gather_curves(prepared, variants)
        for variant in variants:
            patterns, note = fisher_patterns(variant)
            variant.patterns |= patterns
            variant.notes.append(note)
        return
    lacking = any(variant.lacks(layer) for variant in variants for layer in selection.layers)
    if selection.config.allocation not in ("owl", "alpha") or not (lacking or selection.config.recover == "gradual"):
        return
    squares = input_squares(prepared) if selection.config.allocation == "owl" else {}
    reached = squares if squares else {layer.name for layer in selection.layers}

    def allocated() -> Iterator[tuple[PrunableLayer, ...]]:
        """Layers that get the same sparsity, their weights onloaded; those that the data do not reach get none."""
        for block in selection.structure.blocks:
            layers = tuple(layer for layer in block.layers if layer.name in reached)
            if layers:
                with block.onloaded():
                    yield layers
        yield from ((layer,) for layer in selection.structure.outside if layer.name in reached)

    scores = block_scores(selection.config, allocated(), squares, prepared.subject.progress)
    for variant in variants:
        divided, note = allocate(variant.selection.config, list(allocated()), scores)
        variant.patterns = {**divided}
        variant.notes.append(note)


@torch.no_grad()
def solve(
    solver: Solver, layer: PrunableLayer, statistics: Statistics, lam: float, patterns: list[Pattern]
) -> list[tuple[LayerReport, Tensor]]:
    """A layer's reports, and weights [d_out, d_in] in its dtype, by several patterns, which share the time it takes.

    Args:
        solver: by which algorithm.
        layer: at its dense weight.
        statistics: of no samples without data.
        lam: λ in [0, 1].
        patterns: each once.

    Raises:
        FactorizationError: the layer's quadratic stays singular at the largest damping, with the layer's name.
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
            **(loss_fields(each.lam, each.masked, each.pruned) if calibrated else {"lam": None}),
        )
        results.append((report, each.weight))
    return results
