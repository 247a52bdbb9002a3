"""The only loop over layers: statistics → objective → solve → result, for one variant or many."""

import dataclasses
import time
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from tqdm.auto import tqdm

from ..allocation.block_scores import allocate, block_scores
from ..allocation.fisher import fisher_patterns, gather_curves
from ..calibration.layer_statistics import LayerStatistics
from ..devices import peak_bytes, reset_peak
from ..errors import FactorizationError, require
from ..model.layers import PrunableLayer
from ..objective.patterns import Pattern, PerExpert
from ..pipeline.exchange import share_results
from ..pipeline.inputs import Prepared
from ..pipeline.solve import Statistics, solve_layer
from ..pipeline.statistics_source import StatisticsSource, input_squares, work_through
from ..pipeline.variant import Variant
from ..reports.prune_report import LayerReport, loss_fields
from ..results.store import sparsity_of
from ..solvers import Solver


def prune_layers(prepared: Prepared, variants: Sequence[Variant], bar: tqdm) -> StatisticsSource:
    """Solve every layer by every variant that lacks it; each has a note on how the data passed.

    Args:
        prepared: the model, dense and frozen, and the data.
        variants: of the same layers and solver.
        bar: advances with the layers.

    Returns:
        What gave the statistics, with what it saw on the way.

    Raises:
        MoonshotError: bad statistics, too little memory, or data that reached no layer.
        FactorizationError: a layer's quadratic stays singular at the largest damping, with the layer's name.
    """
    source = StatisticsSource(prepared, variants)
    bar.update(sum(not any(v.lacks(layer) for v in variants) for layer in prepared.selection.layers))
    _allocate(prepared, variants, source)

    def prune(layer: PrunableLayer, statistics: Statistics | None) -> None:
        prune_layer(layer, statistics, [variant for variant in variants if variant.lacks(layer)])

    for together in source.rounds():
        solved = work_through(prepared, together, prune, bar)
        bar.update(share_results(prepared, variants, solved))
    for variant in variants:
        variant.notes += source.notes
        require(bool(variant.layers), "no calibration data reached any chosen layer: give data of the kind they read")
    return source


def _allocate(prepared: Prepared, variants: Sequence[Variant], source: StatisticsSource) -> None:
    """Give every variant the patterns that follow from scores or curves of the dense model."""
    selection = prepared.selection
    if selection.config.allocation == "fisher":
        gather_curves(prepared, variants)
        for variant in variants:
            patterns, note = fisher_patterns(variant)
            variant.patterns |= patterns
            variant.notes.append(note)
        return
    wanted = source.unfinished() or selection.config.recover == "gradual"  # which prunes once more
    if selection.config.allocation not in ("owl", "alpha") or not wanted:
        return
    squares = input_squares(prepared) if selection.config.allocation == "owl" else {}
    reached = squares if squares else {layer.name for layer in selection.layers}

    def allocated() -> Iterator[tuple[PrunableLayer, ...]]:
        """Layers that get the same sparsity, their weights present; those that the data do not reach get none."""
        for block in selection.structure.blocks:
            layers = tuple(layer for layer in block.layers if layer.name in reached)
            if layers:
                with block.onloaded():
                    yield layers
        yield from ((layer,) for layer in selection.structure.outside if layer.name in reached)

    scores = block_scores(selection.config, allocated(), squares, prepared.subject.progress)
    for variant in variants:
        variant.patterns, note = allocate(variant.selection.config, list(allocated()), scores)
        variant.notes.append(note)


def prune_layer(layer: PrunableLayer, statistics: Statistics | None, variants: Sequence[Variant]) -> None:
    """Solve a layer by several variants: those that have one λ for it together, since some solvers then remove once.

    Variants that have one pattern for it too share the result, as those of all λ do where the Fisher loss is kept from
    a layer.

    Args:
        layer: at its dense weight.
        statistics: None without data.
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


@torch.no_grad()
def solve(
    solver: Solver, layer: PrunableLayer, statistics: Statistics | None, lam: float, patterns: list[Pattern]
) -> list[tuple[LayerReport, Tensor]]:
    """A layer's reports, and weights [d_out, d_in] in its dtype, by several patterns, which share the time it takes.

    Args:
        solver: by which algorithm.
        layer: at its dense weight.
        statistics: None without data.
        lam: λ in [0, 1].
        patterns: each once.

    Raises:
        FactorizationError: the layer's quadratic stays singular at the largest damping, with the layer's name.
    """
    device = layer.parameter.device
    reset_peak(device)
    started, known = time.perf_counter(), statistics is not None
    if statistics is None:
        statistics, lam = LayerStatistics(torch.eye(layer.shape[1], device=device), None, 0), 1.0
    try:
        solved = solve_layer(solver, layer, patterns, statistics, lam)
    except FactorizationError as error:
        raise FactorizationError(f"{layer.name}: {error}") from None
    seconds = (time.perf_counter() - started) / len(patterns)
    found = []
    for pattern, each in zip(patterns, solved, strict=True):
        report = LayerReport(
            name=layer.name,
            shape=layer.shape,
            sparsity=sparsity_of(each.weight),
            damping=each.damping,
            seconds=seconds,
            peak_memory=peak_bytes(device),
            notes=each.notes if known else (),
            target_sparsity=pattern.sparsity,
            expert_targets=(min(pattern.experts), max(pattern.experts)) if isinstance(pattern, PerExpert) else None,
            **(loss_fields(each.lam, each.masked, each.pruned) if known else {"lam": None}),
        )
        found.append((report, each.weight))
    return found
