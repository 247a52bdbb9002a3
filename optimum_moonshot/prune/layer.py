"""Solves one layer for one or several variants."""

import dataclasses
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from ..calibration.observer import LayerStatistics
from ..devices import peak_bytes, reset_peak, wait_for
from ..errors import FactorizationError
from ..model.layers import PrunableLayer
from ..objective.patterns import NM, Pattern, PerExpert
from ..packing import Quantized, find_codec
from ..pipeline.solve import Statistics, solve_layer
from ..pipeline.store import sparsity_of
from ..pipeline.variant import Variant
from ..reports.prune_report import LayerReport, loss_fields
from ..solvers import Solver


def prune_layer(layer: PrunableLayer, statistics: Statistics, variants: Sequence[Variant]) -> None:
    """Solve a dense layer for several variants, all those of one λ together: one elimination serves several sparsities.

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
                variant.put(dataclasses.replace(report, seconds=report.seconds / len(sharing)), weight)


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
        report = LayerReport(
            name=layer.name,
            shape=layer.shape,
            sparsity=sparsity_of(result.weight),
            damping=result.damping,
            seconds=seconds,
            peak_memory=peak_bytes(device),
            notes=result.notes if calibrated else (),
            target_sparsity=pattern.sparsity,
            zeros_before=layer.matrix.numel() - int(torch.count_nonzero(layer.matrix)),
            bits=None if pattern.grid is None else pattern.grid.bits,
            packed_bytes=packed_bytes(result.weight, pattern),
            expert_targets=(min(pattern.experts), max(pattern.experts)) if isinstance(pattern, PerExpert) else None,
            **(loss_fields(result.lam, result.masked, result.pruned) if calibrated else {"lam": None}),
        )
        results.append((report, result.weight))
    return results


def packed_bytes(weight: Tensor, pattern: Pattern) -> int:
    """Bytes of a pruned weight [d_out, d_in] in a packed checkpoint, which stores it dense if that is smaller."""
    codec = find_codec("bitmask") if pattern.grid is None else Quantized.of(pattern.grid)
    return min(weight.nbytes, codec.packed_bytes(weight, pattern if isinstance(pattern, NM) else None))
