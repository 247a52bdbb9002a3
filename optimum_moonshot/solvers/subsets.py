"""Which experts go: a subset of a fixed size with the least ``zᵀ F z``, by trying all or by local search.

OSSCAR's problem (arXiv 2403.12983) with one row and no update of what stays. The local search removes greedily, then
exchanges one that goes for one that stays, the best exchange first, until none gains.
"""

import math
from collections.abc import Iterator
from itertools import combinations, product

import torch
from torch import Tensor

from ..objective.patterns import Experts
from ..objective.removal import Removal, mean_norms
from .base import PrunedWeight

# Subsets that are tried together.
TOGETHER = 4096
# An exchange gains more than this share of the trace of F, or rounding could go round in circles.
LEAST_GAIN = 1e-12


def best_subset(removal: Removal, pattern: Experts, exact: int) -> Tensor:
    """Which experts stay, bool [E].

    Args:
        removal: the quadratic.
        pattern: how many go, and of which groups.
        exact: where there are no more choices than that, all are tried. Otherwise the best of local searches that begin
            with the greedy choice, with REAP's and with that of the frequency, so that it is no worse than these.
    """
    matrix = removal.matrix.cpu()
    size, gone = len(matrix) // pattern.groups, pattern.removed(len(matrix)) // pattern.groups
    if math.comb(size, gone) ** pattern.groups <= exact:
        return ~_of_all(matrix, pattern.groups, gone).to(removal.gram.device)
    starts = [_greedy(matrix, pattern.groups, gone)]
    starts += [~pattern.keep(scores).cpu() for scores in (mean_norms(removal), removal.tokens)]
    found = [exchange(matrix, start, pattern.groups) for start in starts]
    return ~min(found, key=lambda subset: _value(matrix, subset)).to(removal.gram.device)


def chosen(removal: Removal, keep: Tensor) -> PrunedWeight:
    """What a solver says of a mixture: one row, a 1 for each expert that stays.

    Args:
        removal: that was solved.
        keep: bool [E].
    """
    return PrunedWeight(keep.float()[None], keep[None], 0.0, removal.scales.notes)


def _value(matrix: Tensor, subset: Tensor) -> float:
    return float(matrix[subset][:, subset].sum())


def _subsets(size: int, groups: int, gone: int) -> Iterator[list[int]]:
    """Every choice of so many of each group, in the order of their numbers."""
    within = [[[group * size + i for i in some] for some in combinations(range(size), gone)] for group in range(groups)]
    for chosen in product(*within):
        yield [expert for some in chosen for expert in some]


def _of_all(matrix: Tensor, groups: int, gone: int) -> Tensor:
    """The best of all subsets, bool [E], the first of equals."""
    subsets = torch.tensor(list(_subsets(len(matrix) // groups, groups, gone)))
    values = []
    for some in subsets.split(TOGETHER):
        chosen = torch.zeros(len(some), len(matrix), dtype=matrix.dtype).scatter_(1, some, 1.0)
        values.append((chosen @ matrix * chosen).sum(1))
    best = torch.zeros(len(matrix), dtype=torch.bool)
    best[subsets[torch.cat(values).argmin()]] = True
    return best


def _greedy(matrix: Tensor, groups: int, gone: int) -> Tensor:
    """One after another goes, each time the one that costs least, bool [E]."""
    subset = torch.zeros(len(matrix), dtype=torch.bool)
    size = len(matrix) // groups
    for _ in range(groups * gone):
        full = (subset.view(groups, size).sum(1) >= gone).repeat_interleave(size)
        costs = matrix.diagonal() + 2 * matrix @ subset.to(matrix)
        subset[costs.masked_fill(subset | full, torch.inf).argmin()] = True
    return subset


def exchange(matrix: Tensor, subset: Tensor, groups: int) -> Tensor:
    """A subset with the best exchanges of one in it for one outside of it, until none gains.

    Args:
        matrix: F, symmetric, [E, E].
        subset: bool [E].
        groups: equal runs of consecutive experts, inside of which is exchanged.

    Returns:
        Bool [E], as many of each group.
    """
    subset = subset.clone()
    group = torch.arange(len(matrix)) // (len(matrix) // groups)
    apart = group[:, None] != group
    least = LEAST_GAIN * float(matrix.trace())
    while subset.any() and not subset.all():
        reach, own = matrix @ subset.to(matrix), matrix.diagonal()
        change = (own - 2 * reach)[:, None] + (own + 2 * reach) - 2 * matrix  # of taking i out and j in
        change = change.masked_fill(apart | ~subset[:, None] | subset, torch.inf)
        best = int(change.argmin())
        if not float(change.flatten()[best]) < -least:
            break
        subset[best // len(matrix)], subset[best % len(matrix)] = False, True
    return subset
