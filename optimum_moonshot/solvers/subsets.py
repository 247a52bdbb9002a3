"""The search for the experts to remove: a subset of fixed size with the smallest ``zᵀ F z``, exhaustive or local.

This is OSSCAR's problem (arXiv 2403.12983) with one row and no update of the remaining weights. The local search
removes greedily, then applies the best exchange of a removed expert for a remaining one until none reduces the loss.
"""

import math
from collections.abc import Iterator
from itertools import combinations, product

import torch
from torch import Tensor

from ..objective.patterns import Experts
from ..objective.removal import Removal, mean_norms
from .base import PrunedWeight

# Subsets evaluated in one batch.
BATCH = 4096
# Smallest gain of an exchange, relative to the trace of F: rounding errors could otherwise make the search cycle.
LEAST_GAIN = 1e-12


def best_subset(removal: Removal, pattern: Experts, exact: int) -> Tensor:
    """The experts that remain, bool [E].

    Args:
        removal: the quadratic.
        pattern: how many experts to remove, and their groups.
        exact: number of subsets up to which all are evaluated. Beyond it, the result is the best of three local
            searches, which start from the greedy, the REAP and the frequency subset, so it is never worse than these.
    """
    matrix = removal.matrix.cpu()  # small, and the search is sequential: a GPU would only add latency
    size, count = len(matrix) // pattern.groups, pattern.removed(len(matrix)) // pattern.groups
    if math.comb(size, count) ** pattern.groups <= exact:
        return ~_exhaustive(matrix, pattern.groups, count).to(removal.gram.device)
    starts = [_greedy(matrix, pattern.groups, count)]
    starts += [~pattern.keep(scores).cpu() for scores in (mean_norms(removal), removal.tokens)]
    subsets = [exchange(matrix, start, pattern.groups) for start in starts]
    return ~min(subsets, key=lambda subset: _value(matrix, subset)).to(removal.gram.device)


def expert_mask(removal: Removal, keep: Tensor) -> PrunedWeight:
    """The result of a solver for a mixture: one row with a 1 for each expert that remains.

    Args:
        removal: the quadratic.
        keep: bool [E].
    """
    return PrunedWeight(keep.float()[None], keep[None], 0.0, removal.scales.notes)


def _value(matrix: Tensor, subset: Tensor) -> float:
    return float(matrix[subset][:, subset].sum())


def _subsets(size: int, groups: int, count: int) -> Iterator[list[int]]:
    """Every subset with `count` experts of each group, in lexicographic order."""
    within = [
        [[group * size + i for i in subset] for subset in combinations(range(size), count)] for group in range(groups)
    ]
    for subsets in product(*within):
        yield [expert for subset in subsets for expert in subset]


def _exhaustive(matrix: Tensor, groups: int, count: int) -> Tensor:
    """The best of all subsets, bool [E]; the first among ties."""
    subsets = torch.tensor(list(_subsets(len(matrix) // groups, groups, count)))
    values = []
    for batch in subsets.split(BATCH):
        members = torch.zeros(len(batch), len(matrix), dtype=matrix.dtype).scatter_(1, batch, 1.0)
        values.append((members @ matrix * members).sum(1))
    best = torch.zeros(len(matrix), dtype=torch.bool)
    best[subsets[torch.cat(values).argmin()]] = True
    return best


def _greedy(matrix: Tensor, groups: int, count: int) -> Tensor:
    """Remove one expert at a time, each time the one with the smallest cost; bool [E], True for the removed."""
    subset = torch.zeros(len(matrix), dtype=torch.bool)
    size = len(matrix) // groups
    for _ in range(groups * count):
        full = (subset.view(groups, size).sum(1) >= count).repeat_interleave(size)
        costs = matrix.diagonal() + 2 * matrix @ subset.to(matrix)
        subset[costs.masked_fill(subset | full, torch.inf).argmin()] = True
    return subset


def exchange(matrix: Tensor, subset: Tensor, groups: int) -> Tensor:
    """Improve a subset by the best exchange of a member for a non-member, until none reduces the loss.

    Args:
        matrix: F, symmetric, [E, E].
        subset: bool [E].
        groups: number of equal runs of consecutive experts; exchanges stay within a run.

    Returns:
        Bool [E], with the same number of members in each group.
    """
    subset = subset.clone()
    group = torch.arange(len(matrix)) // (len(matrix) // groups)
    across = group[:, None] != group
    least = LEAST_GAIN * float(matrix.trace())
    while subset.any() and not subset.all():
        coupling, diagonal = matrix @ subset.to(matrix), matrix.diagonal()
        # Of the loss, by removing i from the subset and adding j.
        change = (diagonal - 2 * coupling)[:, None] + (diagonal + 2 * coupling) - 2 * matrix
        change = change.masked_fill(across | ~subset[:, None] | subset, torch.inf)
        best = int(change.argmin())
        if not float(change.flatten()[best]) < -least:
            break
        subset[best // len(matrix)], subset[best % len(matrix)] = False, True
    return subset
