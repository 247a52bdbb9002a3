"""One layer, its statistics and its patterns in; pruned weights and their losses out."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..calibration.layer_statistics import LayerStatistics
from ..model.layers import PrunableLayer
from ..objective.patterns import Pattern, Unstructured
from ..objective.quadratic import Objective, RelativeLoss
from ..solvers import PrunedWeight, Solver


class Solved(NamedTuple):
    """A layer's result, the losses of its mask alone and of the weight in the layer's dtype, and the λ used."""

    result: PrunedWeight
    masked: RelativeLoss
    pruned: RelativeLoss
    lam: float


class ChunkedStatistics(Protocol):
    """Statistics of a layer that do not fit in memory whole: `RowChunks`."""

    def statistics(self, column_block: int | None) -> LayerStatistics:
        """Those of the whole layer, without gradients; with the totals that stand for them."""

    def solve(self, solver: Solver, patterns: list[Pattern], lam: float, column_block: int | None) -> list[Solved]:
        """As `solve_layer`, for the patterns of one elimination.

        Args:
            solver: which ranks removals.
            patterns: all unstructured, or one of another kind.
            lam: λ in [0, 1).
            column_block: inputs of a column block of the solver's quadratic; None is all.

        Raises:
            FactorizationError: the layer's quadratic stays singular at the largest damping.
        """


Statistics = LayerStatistics | ChunkedStatistics


def solve_layer(
    solver: Solver,
    layer: PrunableLayer,
    patterns: Sequence[Pattern],
    statistics: Statistics,
    lam: float,
) -> list[Solved]:
    """Prune a layer by several patterns; those that one elimination serves have it together.

    Args:
        solver: by which algorithm.
        layer: at its dense weight.
        patterns: each of which the solver takes, and the layer's shape fits.
        statistics: of the layer; consistent with the dense weight, and with gradients where λ < 1.
        lam: λ in [0, 1].

    Returns:
        A result for every pattern, in their order.

    Raises:
        FactorizationError: the layer's quadratic stays singular at the largest damping.
    """
    together = [index for index, pattern in enumerate(patterns) if isinstance(pattern, Unstructured)]
    families = [together] if together and solver.ranks else [[index] for index in together]
    families += [[index] for index in range(len(patterns)) if index not in together]
    found: dict[int, Solved] = {}
    for family in families:
        some = [patterns[index] for index in family]
        found |= zip(family, _solve_family(solver, layer, some, statistics, lam), strict=True)
    return [found[index] for index in range(len(patterns))]


def _solve_family(
    solver: Solver,
    layer: PrunableLayer,
    patterns: list[Pattern],
    statistics: Statistics,
    lam: float,
) -> list[Solved]:
    column_block = solver.column_block(layer.shape[1], patterns[0])
    if not isinstance(statistics, LayerStatistics):
        if lam < 1:
            return statistics.solve(solver, patterns, lam, column_block)
        statistics = statistics.statistics(column_block)
    objective = statistics.objective(layer.matrix, lam, column_block)
    if solver.ranks:
        results = solver.solve_path(objective, patterns)
    else:
        results = [solver.solve(objective, pattern) for pattern in patterns]
    return [
        Solved(result, *weight_losses(objective, result.weight, result.keep, layer), objective.scales.lam)
        for result in results
    ]


def weight_losses(objective: Objective, weight: Tensor, keep: Tensor, layer: PrunableLayer) -> list[RelativeLoss]:
    """Relative losses of the mask alone, and of the weight as the layer will hold it.

    Args:
        objective: of the layer, or of some of its rows.
        weight: [rows, d_in], as the solver gives it.
        keep: bool [rows, d_in], True where a weight survives.
        layer: whose dtype the weight will have.
    """
    return objective.losses(torch.where(keep, objective.weight, 0), weight.to(layer.parameter.dtype))


def total_losses(parts: Iterable[RelativeLoss]) -> RelativeLoss:
    """The losses of a layer from those of its chunks."""
    return RelativeLoss(*map(sum, zip(*parts, strict=True)))
