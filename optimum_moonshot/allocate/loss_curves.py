"""The loss of a layer at several sparsities, estimated on some rows and samples of the dense model."""

import dataclasses
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..calibration.accumulators import GradientPlan
from ..calibration.observer import LayerStatistics
from ..errors import FactorizationError
from ..model.layers import PrunableLayer
from ..objective.fisher import Fisher
from ..objective.grid import Grid
from ..objective.loss_allocation import LossCurve
from ..objective.patterns import MixedNM, Pattern, Unstructured
from ..objective.quadratic import of_rows
from ..pipeline.partition import Slicing, StatisticsSpec
from ..pipeline.solve import ExpertStatistics, RowStatistics, Statistics
from ..pipeline.under_calibrated_experts import is_under_calibrated
from ..solvers import Solver

# The sparsities of a curve's points; `loss_allocation.bounds` limits the sparsity of a matrix accordingly.
SPARSITIES = (0.2, 0.4, 0.6, 0.7, 0.8, 0.9, 0.95, 0.985)
# One in SHARE samples and one in SHARE rows are used, but at least SAMPLES and ROWS.
SHARE, SAMPLES, ROWS = 8, 16, 256


def trial_patterns(pattern: Pattern | MixedNM) -> tuple[Pattern, ...]:
    """The patterns of a curve's points in order of sparsity, by the class of the configured pattern."""
    if isinstance(pattern, MixedNM):
        return pattern.choices[1:]
    return tuple(Unstructured(sparsity) for sparsity in SPARSITIES)


def sampled_rows(layer: PrunableLayer) -> slice:
    """The rows on which a curve is measured; all rows of experts and grouped convolutions."""
    d_out = layer.shape[0]
    step = 1 if layer.groups > 1 or layer.separate else min(SHARE, max(1, d_out // ROWS))
    return slice(step // 2, d_out, step)


@torch.no_grad()
def loss_curve(
    solver: Solver,
    layer: PrunableLayer,
    statistics: Statistics,
    patterns: Sequence[Pattern],
    grids: Sequence[Grid] = (),
) -> LossCurve:
    """The estimated losses of a dense layer at `trial_patterns`, and at sparsity 1 if these are unstructured.

    The statistics are G, and the gradients A_n of `sampled_rows`. Each expert has a separate curve. Survivors are also
    rounded to nearest on each of the `grids`.

    Raises:
        FactorizationError: a matrix's quadratic stays singular at the largest damping; it names the layer.
    """
    rows, alive = sampled_rows(layer), layer.alive
    weight, mask = layer.matrix[rows].float(), None if alive is None else alive[rows]
    try:
        if layer.separate:
            assert not isinstance(statistics, RowStatistics)
            experts = layer.groups, -1
            masks = None if mask is None else mask.unflatten(0, experts)
            return _expert_curves(solver, weight.unflatten(0, experts), masks, statistics, patterns, grids)
        assert isinstance(statistics, LayerStatistics)
        curve = matrix_curve(solver, weight, statistics, patterns, grids, mask)
    except FactorizationError as error:
        raise error.within(layer.name) from None
    scale = layer.shape[0] / len(weight)
    losses = tuple(scale * loss for loss in curve.losses)
    quantized = {bits: tuple(scale * loss for loss in of_bits) for bits, of_bits in curve.quantized.items()}
    size, removed = layer.shape[0] * layer.shape[1], _removed(layer.shape[0], alive, statistics)
    return dataclasses.replace(curve, size=size, losses=losses, quantized=quantized, dead=removed)


def _expert_curves(
    solver: Solver,
    weights: Tensor,
    alive: Tensor | None,
    statistics: LayerStatistics | ExpertStatistics,
    patterns: Sequence[Pattern],
    grids: Sequence[Grid],
) -> LossCurve:
    """The curve of a layer of experts [E, d_out, d_in], with the curve of each; `alive` is False where weights are 0.

    An under-calibrated expert has the mean curve of the other experts, and so no extreme sparsity.
    """
    size, points = weights[0].numel(), _points(patterns)
    measured: list[tuple[LossCurve | None, bool]] = []  # with whether the expert is under-calibrated
    for index, expert in enumerate(statistics.groups(len(weights))):
        if expert is None:
            continue  # in another process
        mask = None if alive is None else alive[index]
        curve = (
            None if expert.gradients is None else matrix_curve(solver, weights[index], expert, patterns, grids, mask)
        )
        few = expert.tokens is not None and is_under_calibrated(int(expert.tokens), expert.inputs.shape[-1])
        measured.append((curve, curve is None or few))
    if isinstance(statistics, ExpertStatistics):
        measured = statistics.gather(measured)
    reliable = [curve for curve, few in measured if curve is not None and not few]
    reliable = reliable or [curve for curve, _ in measured if curve is not None]
    nothing = LossCurve(size, points, (0.0,) * len(points), (), {g.bits: (0.0,) * (len(points) + 1) for g in grids})
    mean = _total(reliable or [nothing], size, 1 / max(1, len(reliable)))
    experts = tuple(
        curve if curve is not None and not few else dataclasses.replace(mean, dead=0.0 if curve is None else curve.dead)
        for curve, few in measured
    )
    return dataclasses.replace(_total(experts, weights.numel()), experts=experts)


def _total(curves: Sequence[LossCurve], size: int, factor: float = 1.0) -> LossCurve:
    """The sum of curves with the same points, times a factor."""

    def total(losses: Iterable[tuple[float, ...]]) -> tuple[float, ...]:
        return tuple(factor * sum(point) for point in zip(*losses, strict=True))

    quantized = {bits: total(curve.quantized[bits] for curve in curves) for bits in curves[0].quantized}
    return LossCurve(size, curves[0].sparsities, total(curve.losses for curve in curves), (), quantized)


def matrix_curve(
    solver: Solver,
    weight: Tensor,
    statistics: LayerStatistics,
    patterns: Sequence[Pattern],
    grids: Sequence[Grid],
    alive: Tensor | None = None,
) -> LossCurve:
    """The curve of a matrix [d_out, d_in], or of some rows of one, as `loss_curve` measures it."""
    gradients = statistics.gradients
    assert isinstance(gradients, Fisher)
    if solver.objective.diagonal_only:
        statistics = LayerStatistics(_squares(statistics), None, statistics.samples, diagonal=True)
    objective = statistics.objective(weight, 1.0, solver.column_block(weight.shape[1], patterns[0]), alive)
    trials = solver.trials(objective, patterns)
    if isinstance(patterns[-1], Unstructured):
        trials = [*trials, torch.zeros_like(weight)]
    squares = _squares(statistics)
    importance = squares[None] if squares.ndim == 1 else of_rows(squares, len(weight))

    def losses(weights: Sequence[Tensor]) -> tuple[float, ...]:
        deltas = torch.stack([pruned - weight for pruned in weights])
        return tuple(gradients.losses(deltas).tolist())

    points = (weight, *trials)
    quantized = {
        grid.bits: losses([grid.rounded(point, grid.search(point, importance)) for point in points]) for grid in grids
    }
    dead = _removed(len(weight), alive, statistics)
    return LossCurve(weight.numel(), _points(patterns), losses(trials), (), quantized, dead)


def _squares(statistics: LayerStatistics) -> Tensor:
    """Σ x², [d_in] or [groups, d_in]."""
    return statistics.inputs if statistics.diagonal else statistics.inputs.diagonal(dim1=-2, dim2=-1)


def _removed(d_out: int, alive: Tensor | None, statistics: LayerStatistics) -> float:
    """The fraction of a matrix that every mask removes: zeros, and weights at inputs that are always 0.

    If all inputs are 0, magnitude decides, so that weights remain.
    """
    dead = _squares(statistics) == 0
    dead = dead.logical_and(~dead.all())
    if alive is None:
        return float(dead.double().mean())
    return float((~alive | (dead if dead.ndim == 1 else of_rows(dead, d_out))).double().mean())


def _points(patterns: Sequence[Pattern]) -> tuple[float, ...]:
    """The sparsities of a curve's points."""
    end = (1.0,) if isinstance(patterns[-1], Unstructured) else ()
    return (*(pattern.sparsity for pattern in patterns), *end)


class SampledRows(StatisticsSpec):
    """G of every layer and the gradients of `sampled_rows`, for any solver; only experts are sliced."""

    diagonal = False

    def plan(self, layer: PrunableLayer) -> GradientPlan:
        return GradientPlan(rows=sampled_rows(layer))

    def slicing(self, layer: PrunableLayer, size: int) -> Slicing:
        return super().slicing(layer, size) if layer.separate else Slicing(1, self.bytes_of(layer), 0)

    def shards_rows(self, layer: PrunableLayer) -> bool:
        return False


def sampled_count(samples: int) -> int:
    """The number of calibration samples for the curves."""
    return min(samples, max(SAMPLES, samples // SHARE))
