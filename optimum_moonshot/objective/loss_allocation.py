"""Sparsity divided between matrices so that their losses add up to the least: by curves, or in steps of n:m.

A matrix l of so many weights loses F_l(s) of the model at a sparsity s, in one unit for all matrices, such as the
Fisher loss. What is sought is

    min Σ_l F_l(s_l)   subject to   Σ_l size_l · s_l = sparsity · Σ_l size_l

Every matrix gives up weights for as long as the next ones cost no more than those of the others: with F_l's lower
convex hull in place of F_l, the sparsities at which all slopes (dF_l/ds)/size_l are equal are the minimum.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

# Sparsities that a curve is evaluated at, between the lowest and the highest that a matrix may get.
CELLS = 512
# How far a matrix's sparsity may lie from that of all, and the highest, beyond which curves say little.
REACH, HIGHEST = 0.25, 0.985
# Losses below this share of a curve's largest are as good as none; their logarithm is.
TINY = 1e-12
# Slopes that differ by this share are the same, up to rounding.
EQUAL = 1e-9


@dataclass(frozen=True)
class LossCurve:
    """What the loss of a matrix is at some sparsities; none at 0."""

    size: int  # weights of the matrix
    sparsities: tuple[float, ...]  # ascending, in (0, 1], two or more
    losses: tuple[float, ...]  # not negative
    experts: tuple["LossCurve", ...] = ()  # of each of its experts, whose losses add up to these; empty without any

    def values(self, sparsities: Sequence[float]) -> list[float]:
        """Losses at any sparsities, ascending: the logarithm is linear between two that are known, and before them."""
        least = TINY * max(self.losses)
        if least == 0:
            return [0.0] * len(sparsities)
        known = [max(loss, least) for loss in self.losses]
        found, segment = [], 0
        for sparsity in sparsities:
            while segment < len(known) - 2 and sparsity > self.sparsities[segment + 1]:
                segment += 1
            low, high = self.sparsities[segment : segment + 2]
            share = (sparsity - low) / (high - low)
            found.append(known[segment] ** (1 - share) * known[segment + 1] ** share)
        return found


def bounds(sparsity: float) -> tuple[float, float]:
    """The lowest and the highest sparsity that a matrix may get where all together have `sparsity`."""
    return max(0.0, sparsity - REACH), min(sparsity + REACH, max(HIGHEST, (1 + sparsity) / 2))


def divide_sparsity(curves: Mapping[str, LossCurve], sparsity: float) -> dict[str, float]:
    """Sparsities of matrices within `bounds` whose losses add up to the least; their mean over the weights is given.

    Matrices with the same slopes get the same sparsity.

    Args:
        curves: of every matrix, by its name.
        sparsity: of all together, in [0, 1].
    """
    low, high = bounds(sparsity)
    width = (high - low) / CELLS
    if width == 0:
        return dict.fromkeys(curves, sparsity)
    at = [low + cell * width for cell in range(CELLS + 1)]
    slopes = np.empty((len(curves), CELLS))
    for row, curve in zip(slopes, curves.values(), strict=True):
        values = [value / (curve.size * width) for value in curve.values(at)]
        row[:] = _ascending([after - before for before, after in pairwise(values)])
    sizes = np.array([curve.size for curve in curves.values()])
    order = slopes.argsort(axis=None)
    wanted = (sparsity - low) / width * int(sizes.sum())
    reached = sizes.repeat(CELLS)[order].cumsum().searchsorted(wanted)
    price = float(slopes.flat[order[min(int(reached), len(order) - 1)]])
    margin = EQUAL * abs(price)
    below = dict(zip(curves, (slopes < price - margin).sum(1).tolist(), strict=True))
    equal = dict(zip(curves, (abs(slopes - price) <= margin).sum(1).tolist(), strict=True))
    missing = wanted - sum(curves[name].size * cells for name, cells in below.items())
    share = missing / sum(curves[name].size * cells for name, cells in equal.items())
    return {name: min(1.0, max(0.0, low + width * (below[name] + share * equal[name]))) for name in curves}


def _ascending(slopes: list[float]) -> list[float]:
    """The slopes of the lower convex hull: neighbours in the wrong order have their mean."""
    pools: list[tuple[float, int]] = []  # mean, how many
    for slope in slopes:
        mean, count = slope, 1
        while pools and pools[-1][0] >= mean:
            other, more = pools.pop()
            mean, count = (mean * count + other * more) / (count + more), count + more
        pools.append((mean, count))
    return [mean for mean, count in pools for _ in range(count)]


def divide_steps(losses: Mapping[str, Sequence[float]], sizes: Mapping[str, int], budget: float) -> dict[str, int]:
    """How many steps of removal each matrix takes, such as 2 of 4 weights: the losses add up to the least.

    Steps go by their loss per weight, those of the lower convex hull first. One that would exceed the budget is left
    out, and with it all that follow in its matrix; what is missing then is filled with single steps that fit, the
    cheapest first. So never more than the budget goes, and no further step would fit.

    Args:
        losses: matrix → its losses after 0, 1, 2 … steps.
        sizes: matrix → the weights that a step removes.
        budget: weights that may go.
    """
    taken, left = dict.fromkeys(losses, 0), budget
    moves = []
    for index, (name, found) in enumerate(losses.items()):
        start, slopes = 0, _ascending([(after - before) / sizes[name] for before, after in pairwise(found)])
        while start < len(slopes):
            stop = start + slopes.count(slopes[start])
            moves.append((slopes[start], start, index, name, stop))
            start = stop
    for _, start, _, name, stop in sorted(moves):
        if taken[name] == start and (stop - start) * sizes[name] <= left:
            taken[name], left = stop, left - (stop - start) * sizes[name]
    while True:
        fitting = [
            ((losses[name][done + 1] - losses[name][done]) / sizes[name], index, name)
            for index, (name, done) in enumerate(taken.items())
            if done + 1 < len(losses[name]) and sizes[name] <= left
        ]
        if not fitting:
            return taken
        name = min(fitting)[2]
        taken[name], left = taken[name] + 1, left - sizes[name]
