"""One layer, its statistics and its patterns in; pruned weights and their losses out."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..calibration.layer_statistics import LayerStatistics
from ..model.layers import PrunableLayer
from ..objective.patterns import Pattern, PerExpert, Unstructured
from ..objective.quadratic import Objective, RelativeLoss
from ..solvers import Solver
from .expert_chunks import ExpertChunks
from .expert_share import ExpertShare


class Solved(NamedTuple):
    """A layer's result, the losses of its mask alone and of the weight in the layer's dtype, and the λ used."""

    weight: Tensor  # [d_out, d_in] in the layer's dtype
    damping: float
    notes: tuple[str, ...]
    masked: RelativeLoss
    pruned: RelativeLoss
    lam: float
    at_zero: tuple[float, float | None]  # L_R(0), L_F(0)


class PartedStatistics(Protocol):
    """Statistics of a matrix by parts of its rows: `RowChunks`, for the sake of memory, and `RowShare`, of time."""

    def solve(self, solver: Solver, patterns: list[Pattern], lam: float, column_block: int | None) -> list[Solved]:
        """As `solve_layer`, for the patterns of one elimination.

        Args:
            solver: which ranks removals.
            patterns: all unstructured, or one of another kind.
            lam: λ in [0, 1].
            column_block: inputs of a column block of the solver's quadratic; None is all.

        Raises:
            FactorizationError: the layer's quadratic stays singular at the largest damping.
        """


Statistics = LayerStatistics | PartedStatistics | ExpertChunks | ExpertShare


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
    if layer.adapter.separate:
        assert isinstance(statistics, LayerStatistics | ExpertChunks | ExpertShare)
        return _solve_groups(solver, layer, patterns, statistics, lam)
    return _solve_matrix(solver, layer.matrix, layer.parameter.dtype, patterns, statistics, lam)


def _solve_groups(
    solver: Solver,
    layer: PrunableLayer,
    patterns: Sequence[Pattern],
    statistics: "LayerStatistics | ExpertChunks | ExpertShare",
    lam: float,
) -> list[Solved]:
    """As `solve_layer`, where every group of rows is a matrix of its own: an expert.

    What is of all experts is in the layer's dtype; the solver's own numbers are those of one expert at a time.
    """
    (d_out, d_in), like = layer.shape, layer.parameter
    shape = layer.groups, d_out // layer.groups, d_in
    weights = [torch.empty(shape, dtype=like.dtype, device=like.device) for _ in patterns]
    parts: list[list[Solved]] = [[] for _ in patterns]
    for index, own in enumerate(statistics.groups(layer.groups)):
        if own is None:
            continue  # another process solves it
        matrix = layer.expert(index).matrix.contiguous()
        some = [_share(pattern, index, matrix.numel()) for pattern in patterns]
        found = _solve_matrix(solver, matrix, like.dtype, some, own, lam)
        for weight, own_parts, solved in zip(weights, parts, found, strict=True):
            weight[index] = solved.weight
            own_parts.append(solved._replace(weight=weight[index]))
    if isinstance(statistics, ExpertShare):
        parts = [_of_all(statistics, *each) for each in zip(weights, parts, strict=True)]
    return [joined(weight.flatten(0, 1), each) for weight, each in zip(weights, parts, strict=True)]


def _of_all(share: ExpertShare, weight: Tensor, own: list[Solved]) -> list[Solved]:
    """What all experts lose by one pattern, from that of this process's; `weight` [E, …] gets those of the others."""
    share.ranks.gather_rows(weight[share.part.start : share.part.stop], weight, share.count)
    nothing = weight.new_empty(0)
    return share.complete([each._replace(weight=nothing) for each in own])


def _share(pattern: Pattern, index: int, size: int) -> Pattern:
    """What one of a layer's equal matrices gets of an exact share."""
    if isinstance(pattern, PerExpert):
        return pattern.of(index)
    if not isinstance(pattern, Unstructured) or not pattern.exact:
        return pattern
    return Unstructured((pattern.up_to((index + 1) * size) - pattern.up_to(index * size)) / size, exact=True)


def joined(weight: Tensor, parts: Sequence[Solved]) -> Solved:
    """The result of a layer from those of its experts: their losses add up.

    Args:
        weight: of all, one below the other, [d_out, d_in].
        parts: of each expert.
    """
    lam = Counter(part.lam for part in parts).most_common(1)[0][0]
    found: dict[str, list[int]] = {}
    for index, part in enumerate(parts):
        for note in part.notes:
            found.setdefault(note, []).append(index)
    notes = tuple(f"{note} ({_named(experts)})" for note, experts in found.items())
    zeros = [part.at_zero for part in parts]
    masked, pruned = (_sum([getattr(part, name) for part in parts], zeros, lam) for name in ("masked", "pruned"))
    total = sum(zero[0] for zero in zeros), _total([zero[1] for zero in zeros])
    return Solved(weight, max(part.damping for part in parts), notes, masked, pruned, lam, total)


def _named(experts: list[int]) -> str:
    """Such as "experts 3, 17"."""
    shown = ", ".join(map(str, experts[:8])) + (f" and {len(experts) - 8} more" if len(experts) > 8 else "")
    return f"expert{'s' if len(experts) > 1 else ''} {shown}"


def _total(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _sum(losses: Sequence[RelativeLoss], zeros: Sequence[tuple[float, float | None]], lam: float) -> RelativeLoss:
    """Of all matrices together, relative to what all lose at W = 0."""

    def relative(values: Sequence[float | None], at_zero: Sequence[float | None]) -> float | None:
        # Where nothing is lost at W = 0, the value is none of a share.
        lost = _total([None if v is None else v * (z or 1.0) for v, z in zip(values, at_zero, strict=True)])
        return None if lost is None else lost / (_total(at_zero) or 1.0)

    reconstruction = relative([loss.reconstruction for loss in losses], [zero[0] for zero in zeros])
    fisher = relative([loss.fisher for loss in losses], [zero[1] for zero in zeros])
    assert reconstruction is not None
    if fisher is None:
        return RelativeLoss(reconstruction, None, reconstruction)
    return RelativeLoss(reconstruction, fisher, lam * reconstruction + (1 - lam) * fisher)


def _solve_matrix(
    solver: Solver, weight: Tensor, dtype: torch.dtype, patterns: Sequence[Pattern], statistics: Statistics, lam: float
) -> list[Solved]:
    """One matrix [d_out, d_in], which will be of `dtype`."""
    together = [index for index, pattern in enumerate(patterns) if isinstance(pattern, Unstructured)]
    families = [together] if together and solver.ranks else [[index] for index in together]
    families += [[index] for index in range(len(patterns)) if index not in together]
    found: dict[int, Solved] = {}
    for family in families:
        some = [patterns[index] for index in family]
        found |= zip(family, _solve_family(solver, weight, dtype, some, statistics, lam), strict=True)
    return [found[index] for index in range(len(patterns))]


def _solve_family(
    solver: Solver, weight: Tensor, dtype: torch.dtype, patterns: list[Pattern], statistics: Statistics, lam: float
) -> list[Solved]:
    assert not isinstance(statistics, ExpertChunks | ExpertShare)
    if isinstance(statistics, LayerStatistics):
        return solve_whole(solver, weight, dtype, patterns, statistics, lam)
    return statistics.solve(solver, patterns, lam, solver.column_block(weight.shape[1], patterns[0]))


def solve_whole(
    solver: Solver, weight: Tensor, dtype: torch.dtype, patterns: list[Pattern], statistics: LayerStatistics, lam: float
) -> list[Solved]:
    """Prune a matrix by patterns that one elimination serves, or by one.

    Args:
        solver: by which algorithm.
        weight: [d_out, d_in].
        dtype: that it will have.
        patterns: all unstructured, where the solver ranks removals; or one.
        statistics: of all rows.
        lam: λ in [0, 1].

    Raises:
        FactorizationError: the quadratic stays singular at the largest damping.
    """
    column_block = solver.column_block(weight.shape[1], patterns[0])
    objective = statistics.objective(weight, lam, column_block)
    if solver.ranks:
        results = solver.solve_path(objective, patterns)
    else:
        results = [solver.solve(objective, pattern) for pattern in patterns]
    return [
        Solved(
            result.weight.to(dtype),
            result.damping,
            result.notes,
            *weight_losses(objective, result.weight, result.keep, dtype),
            objective.scales.lam,
            objective.losses_at_zero,
        )
        for result in results
    ]


def weight_losses(objective: Objective, weight: Tensor, keep: Tensor, dtype: torch.dtype) -> list[RelativeLoss]:
    """Relative losses of the mask alone, and of the weight as the layer will hold it.

    Args:
        objective: of the layer, or of some of its rows.
        weight: [rows, d_in], as the solver gives it.
        keep: bool [rows, d_in], True where a weight survives.
        dtype: that the weight will have.
    """
    return objective.losses(torch.where(keep, objective.weight, 0), weight.to(dtype))


def total_losses(parts: Iterable[RelativeLoss]) -> RelativeLoss:
    """The losses of a layer from those of its parts, all in proportion to what the whole layer loses at W = 0."""
    reconstruction, fisher, total = zip(*parts, strict=True)
    return RelativeLoss(sum(reconstruction), None if None in fisher else sum(fisher), sum(total))
