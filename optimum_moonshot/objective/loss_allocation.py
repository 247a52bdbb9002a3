"""Allocation of sparsity to matrices that minimises the sum of their losses: by curves, or in steps of n:m.

F_l(s) is the loss of matrix l at sparsity s, in one unit for all matrices, such as the Fisher loss. The allocation is

    min Σ_l F_l(s_l)   subject to   Σ_l size_l · s_l = sparsity · Σ_l size_l

With F_l replaced by its lower convex hull, the minimum has equal slopes (dF_l/ds)/size_l for all matrices (the KKT
condition), so it is found by sorting the slopes of small steps instead of by iteration.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from ..errors import require

# Intervals between the lowest and the highest sparsity of a matrix on which curves are evaluated.
CELLS = 512
# Largest deviation of a matrix's sparsity from the overall one, and the largest sparsity: curves are unreliable beyond.
REACH, HIGHEST = 0.25, 0.985
# Smallest loss, relative to the largest of a curve: the interpolation takes logarithms.
TINY = 1e-12
# Relative difference below which slopes count as equal despite rounding errors.
EQUAL = 1e-9


@dataclass(frozen=True)
class LossCurve:
    """The loss of a matrix at some sparsities; it is 0 at sparsity 0."""

    size: int  # weights of the matrix
    sparsities: tuple[float, ...]  # ascending, in (0, 1], two or more
    losses: tuple[float, ...]  # nonnegative
    experts: tuple["LossCurve", ...] = ()  # of its experts, whose losses sum to these; may be empty
    # Bits → losses of the survivors rounded to these, at sparsity 0 and at `sparsities`.
    quantized: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    # Fraction of the weights that every mask removes: zeros, and all weights of inputs that are always 0.
    dead: float = 0.0

    def of_bits(self, bits: int) -> "LossCurve":
        """The curve of survivors rounded to some bits, whose first point is at sparsity 0."""
        return LossCurve(self.size, (0.0, *self.sparsities), self.quantized[bits])

    def values(self, sparsities: Sequence[float]) -> list[float]:
        """Losses at ascending sparsities, by linear interpolation and extrapolation of the logarithm."""
        least = TINY * max(self.losses)
        if least == 0:
            return [0.0] * len(sparsities)
        losses = [max(loss, least) for loss in self.losses]
        values, segment = [], 0
        for sparsity in sparsities:
            while segment < len(losses) - 2 and sparsity > self.sparsities[segment + 1]:
                segment += 1
            low, high = self.sparsities[segment : segment + 2]
            fraction = (sparsity - low) / (high - low)
            values.append(losses[segment] ** (1 - fraction) * losses[segment + 1] ** fraction)
        return values


def bounds(sparsity: float) -> tuple[float, float]:
    """The lowest and the highest sparsity of a matrix for an overall `sparsity`."""
    return max(0.0, sparsity - REACH), min(sparsity + REACH, max(HIGHEST, (1 + sparsity) / 2))


def divide_sparsity(curves: Mapping[str, LossCurve], sparsity: float) -> dict[str, float]:
    """Sparsities within `bounds` that minimise the sum of the losses at a fixed overall sparsity in [0, 1].

    Matrices with equal slopes and no dead inputs get equal sparsities. No matrix has less than the fraction of its
    weights at dead inputs. If dead inputs force other matrices below the lower bound, the bound is 0; if they exceed
    the overall sparsity, every matrix loses only its dead inputs.
    """
    low, high = bounds(sparsity)
    sizes = np.array([curve.size for curve in curves.values()])
    dead = np.array([curve.dead for curve in curves.values()])
    target = sparsity * int(sizes.sum())
    if (sizes * np.maximum(dead, low)).sum() > target:
        low = 0.0
    lows = np.maximum(dead, low)
    widths = (np.maximum(dead, high) - lows) / CELLS
    free = target - float((sizes * lows).sum())  # weights to remove beyond the lowest sparsities
    if free <= 0 or not widths.any():
        return dict(zip(curves, lows.tolist(), strict=True))
    slopes = np.full((len(curves), CELLS), np.inf)
    for row, curve, lowest, width in zip(slopes, curves.values(), lows.tolist(), widths.tolist(), strict=True):
        if width > 0:
            values = [value / (curve.size * width) for value in curve.values(_points(lowest, width))]
            row[:] = _ascending([after - before for before, after in pairwise(values)])
    cells = sizes * widths  # weights in a cell
    order = slopes.argsort(axis=None)
    reached = cells.repeat(CELLS)[order].cumsum().searchsorted(free)
    price = float(slopes.flat[order[min(int(reached), len(order) - 1)]])
    margin = EQUAL * abs(price)
    below, equal = (slopes < price - margin).sum(1), (abs(slopes - price) <= margin).sum(1)
    fraction = (free - float((cells * below).sum())) / float((cells * equal).sum())
    sparsities = np.clip(lows + widths * (below + fraction * equal), lows, 1.0)
    return dict(zip(curves, sparsities.tolist(), strict=True))


def _points(low: float, width: float) -> list[float]:
    return [low + cell * width for cell in range(CELLS + 1)]


def divide_bytes(choices: Mapping[str, Sequence[tuple[float, float]]], budget: float) -> dict[str, int]:
    """The choice of each matrix, by its index, that approximately minimises the sum of the losses within a budget.

    A choice is (bytes, loss). Greedy by loss per byte along the lower convex hull of each matrix's choices, from the
    smallest ones on; the remainder of the budget is spent on the cheapest choices that fit. The result exceeds the
    minimum by at most one step of a hull.

    Raises:
        MoonshotError: the smallest choices exceed the budget.
    """
    chosen = {name: list(options).index(min(options)) for name, options in choices.items()}
    remaining = budget - sum(choices[name][index][0] for name, index in chosen.items())
    require(
        remaining >= 0,
        f"the smallest choices take {budget - remaining:.0f} bytes of {budget:.0f}",
        hint="raise the budget",
    )
    steps = []  # (slope, bytes of the hull's vertex, matrix, index)
    for name, points in choices.items():
        hull = _lower_hull(points)
        for before, after in pairwise(hull):
            slope = (points[after][1] - points[before][1]) / (points[after][0] - points[before][0])
            steps.append((slope, points[after][0], name, after))
    for _, _, name, index in sorted(steps):
        cost = choices[name][index][0] - choices[name][chosen[name]][0]
        if 0 < cost <= remaining:
            chosen[name], remaining = index, remaining - cost
    for name, points in choices.items():
        size, loss = points[chosen[name]]
        least, bytes_then, best = min(
            (other, more, i) for i, (more, other) in enumerate(points) if more - size <= remaining
        )
        if least < loss:
            chosen[name], remaining = best, remaining - (bytes_then - size)
    return chosen


def _lower_hull(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the points on the lower convex hull from the smallest one to the least loss, by ascending bytes."""
    hull: list[int] = []
    for index in sorted(range(len(points)), key=lambda i: points[i]):
        size, loss = points[index]
        if hull and (size == points[hull[-1]][0] or loss >= points[hull[-1]][1]):
            continue
        while len(hull) > 1:
            (x0, y0), (x1, y1) = points[hull[-2]], points[hull[-1]]
            if (y1 - y0) * (size - x0) < (loss - y0) * (x1 - x0):
                break
            hull.pop()
        hull.append(index)
    return hull


def _ascending(slopes: list[float]) -> list[float]:
    """The slopes of the lower convex hull, by pooling adjacent violators: descending neighbours get their mean."""
    pools: list[tuple[float, int]] = []  # mean, count
    for slope in slopes:
        mean, count = slope, 1
        while pools and pools[-1][0] >= mean:
            other, more = pools.pop()
            mean, count = (mean * count + other * more) / (count + more), count + more
        pools.append((mean, count))
    return [mean for mean, count in pools for _ in range(count)]


def divide_steps(losses: Mapping[str, Sequence[float]], sizes: Mapping[str, int], budget: float) -> dict[str, int]:
    """Number of removal steps, such as 3:4 → 2:4, of each matrix that approximately minimises the sum of the losses.

    `losses` are the losses after 0, 1, 2 … steps, and `sizes` the weights that a step removes; their sum is at most the
    `budget`, and no further step fits. Greedy by loss per weight, along the lower convex hulls. A segment of a hull
    that would exceed the budget is skipped, with all later ones of its matrix; the remaining budget is spent on single
    steps, the cheapest first.
    """
    steps, remaining = dict.fromkeys(losses, 0), budget
    moves = []
    for index, (name, curve) in enumerate(losses.items()):
        start, slopes = 0, _ascending([(after - before) / sizes[name] for before, after in pairwise(curve)])
        while start < len(slopes):
            stop = start + slopes.count(slopes[start])
            moves.append((slopes[start], start, index, name, stop))
            start = stop
    for _, start, _, name, stop in sorted(moves):
        if steps[name] == start and (stop - start) * sizes[name] <= remaining:
            steps[name], remaining = stop, remaining - (stop - start) * sizes[name]
    while True:
        fitting = [
            ((losses[name][done + 1] - losses[name][done]) / sizes[name], index, name)
            for index, (name, done) in enumerate(steps.items())
            if done + 1 < len(losses[name]) and sizes[name] <= remaining
        ]
        if not fitting:
            return steps
        name = min(fitting)[2]
        steps[name], remaining = steps[name] + 1, remaining - sizes[name]
