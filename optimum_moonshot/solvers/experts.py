"""Solvers that remove whole experts of a mixture, and the subset search by which OSSCAR selects them.

The search minimises ``zᵀ F z`` over subsets z of fixed size: OSSCAR's problem (arXiv 2403.12983) with one row and no
update of the remaining weights. It is exhaustive for few subsets. Otherwise it is a local search: it removes
greedily, then exchanges a removed expert for a remaining one as long as this reduces the loss.
"""

import math
from dataclasses import dataclass
from itertools import combinations, product
from typing import ClassVar

import torch
from torch import Tensor

from ..objective.patterns import Experts
from ..objective.removal import Removal, mean_norms
from .base import PrunedWeight, Solver, register_solver

# Subsets evaluated in one batch.
BATCH = 4096
# Smallest gain of an exchange, relative to the trace of F: rounding errors could otherwise make the search cycle.
LEAST_GAIN = 1e-12


@register_solver("frequency")
@dataclass(frozen=True)
class Frequency(Solver):
    """The baseline: removes the experts to which the router sends the fewest tokens.

    No hyperparameters; the comparison group is the mixture, or an expert group of its router.
    """

    patterns: ClassVar[tuple[type, ...]] = (Experts,)

    def solve(self, objective: Removal, pattern: Experts) -> PrunedWeight:
        return expert_mask(objective, pattern.keep(objective.tokens))


@register_solver("reap")
@dataclass(frozen=True)
class REAP(Solver):
    """REAP (Lasby et al., arXiv 2510.13999): removes the experts with the smallest mean norm of gated outputs.

    No hyperparameters; the comparison group is the mixture, or an expert group of its router.
    """

    patterns: ClassVar[tuple[type, ...]] = (Experts,)

    def solve(self, objective: Removal, pattern: Experts) -> PrunedWeight:
        return expert_mask(objective, pattern.keep(mean_norms(objective)))


def expert_mask(removal: Removal, keep: Tensor) -> PrunedWeight:
    """The result of a solver for a mixture: one row with a 1 for each expert of `keep`, bool [E]."""
    return PrunedWeight(keep.float()[None], keep[None], 0.0, removal.scales.notes)


def best_subset(removal: Removal, pattern: Experts, exact: int) -> Tensor:
    """The experts that remain, bool [E].

    All subsets are evaluated if there are at most `exact`. Otherwise, the result is the best of three local searches,
    which start from the greedy, the REAP and the frequency subset, so it is never worse than these.
    """
    matrix = removal.matrix.cpu()  # the matrix is small and the search sequential: a GPU would only add latency
    size, count = len(matrix) // pattern.groups, pattern.removed(len(matrix)) // pattern.groups
    if math.comb(size, count) ** pattern.groups <= exact:
        return ~_exhaustive(matrix, pattern.groups, count).to(removal.gram.device)
    starts = [_greedy(matrix, pattern.groups, count)]
    starts += [~pattern.keep(scores).cpu() for scores in (mean_norms(removal), removal.tokens)]
    subsets = [exchange(matrix, start, pattern.groups) for start in starts]
    return ~min(subsets, key=lambda subset: float(matrix[subset][:, subset].sum())).to(removal.gram.device)


def _exhaustive(matrix: Tensor, groups: int, count: int) -> Tensor:
    """The best of all subsets with `count` experts of each group, bool [E]; lexicographically first among ties."""
    size = len(matrix) // groups
    of_groups = [combinations(range(group * size, (group + 1) * size), count) for group in range(groups)]
    subsets = torch.tensor([[expert for part in parts for expert in part] for parts in product(*of_groups)])
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
    """Improve a subset, bool [E], by the best exchange of a member for a non-member, until none reduces the loss.

    `matrix` is F, symmetric, [E, E]. Exchanges stay within one of `groups` equal runs of consecutive experts, so every
    run keeps its number of members.
    """
    subset = subset.clone()
    group = torch.arange(len(matrix)) // (len(matrix) // groups)
    across = group[:, None] != group
    least = LEAST_GAIN * float(matrix.trace())
    while subset.any() and not subset.all():
        coupling, diagonal = matrix @ subset.to(matrix), matrix.diagonal()
        # The change of the loss if j replaces i in the subset.
        change = (diagonal - 2 * coupling)[:, None] + (diagonal + 2 * coupling) - 2 * matrix
        change = change.masked_fill(across | ~subset[:, None] | subset, torch.inf)
        best = int(change.argmin())
        if not float(change.flatten()[best]) < -least:
            break
        subset[best // len(matrix)], subset[best % len(matrix)] = False, True
    return subset
