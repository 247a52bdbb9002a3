"""The predicted loss of every level: how far the predictions diverge from the dense model's on the calibration data.

The loss of a width is measured at a few levels, with OSSCAR's weights in all blocks, and interpolated monotonically
(PCHIP, Fritsch and Carlson 1980) between them. The loss of a set of blocks is measured without these blocks, which are
merged into the preceding ones where possible. All losses have one unit, nats for a language model, so their sum
predicts the loss of a combination, also of a model with a smaller hidden size: to measure the parts of the narrowed
model again gained nothing on the demo model. The share of a removed block in the loss of a width, measured at one
level, is subtracted.

The measured sets of blocks are the runs to merge with the least loss (merging.py). Where no run can be merged, they are
the sets with the least loss by either of the two objectives (blocks.py), up to the number of blocks that reaches the
target alone.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
from scipy.interpolate import PchipInterpolator
from torch import nn

from ..model.layers import PrunableLayer
from .blocks import BLOCKS
from .costs import Costs, count_entries
from .experts import ExpertCount, WithoutExperts
from .program import Dimension, Product, Program
from .widths import Width, trial_levels

# The largest fraction of the blocks that is removed.
MOST_BLOCKS = 0.5
# The most groups of consecutive blocks whose shares in the loss of a width are measured, in a trial; a group has equal
# shares. One for each of 30 blocks would take a quarter of the time of all measurements.
MOST_SHARES, SHARED_TRIAL = 4, 1
# The most numbers of removed blocks whose loss is measured.
MOST_SIZES = 4
HIDDEN = "hidden size"


class MeasurableModel(Protocol):
    """A dense model whose loss without some parts is measured: `Trials`."""

    def increase(self, key: str, changed: Callable[[], AbstractContextManager[None]], few: bool = False) -> float: ...

    def pruned(self, trial: int, layers: Sequence[PrunableLayer]) -> AbstractContextManager[None]: ...

    def without(self, blocks: Sequence[int]) -> AbstractContextManager[None]: ...

    def candidates(self, count: int, most: int) -> Sequence[tuple[int, ...]]: ...


@dataclass(frozen=True)
class WidthLosses:
    """The losses of every level of a width."""

    losses: tuple[float, ...]
    shares: tuple[float, ...]  # of each block, with the sum 1


@dataclass(frozen=True)
class BlockSets:
    """One set for each removable number of blocks, 0, 1, 2, …, with the loss of removing it."""

    sets: tuple[tuple[int, ...], ...]
    losses: tuple[float, ...]

    def without(self, blocks: tuple[int, ...]) -> "BlockSets":
        """All sets except one."""
        pairs = [pair for pair in zip(self.sets, self.losses, strict=True) if pair[0] != blocks]
        return BlockSets(*map(tuple, zip(*pairs, strict=True)))


def width_losses(model: MeasurableModel, width: Width, blocks: Sequence[Sequence[PrunableLayer]]) -> WidthLosses:
    """Measure the losses of a width, and the share of every block in them.

    Args:
        model: dense.
        width: with at least two levels.
        blocks: the layers of every block.
    """
    members, levels = [layer for layer, _ in width.members], trial_levels(width)
    losses = level_losses(model, width, lambda trial: model.pruned(trial, members))
    size = math.ceil(len(blocks) / MOST_SHARES)
    shares = list[float]()
    for start in range(0, len(blocks), size):
        inside = [[layer for layer in layers if layer in members] for layers in blocks[start : start + size]]
        stop, having = start + len(inside) - 1, sum(map(bool, inside))
        place = f"block {start}" if stop == start else f"blocks {start} to {stop}"
        change = partial(model.pruned, SHARED_TRIAL, [layer for layers in inside for layer in layers])
        key = f"{width.name} without {levels[SHARED_TRIAL]} in {place}"
        share = max(0.0, model.increase(key, change, few=True)) / having if having else 0.0
        shares += [share if layers else 0.0 for layers in inside]
    total = sum(shares)
    shares = [share / total for share in shares] if total else [1 / len(blocks)] * len(blocks)
    return WidthLosses(losses, tuple(shares))


def expert_losses(
    model: MeasurableModel, width: ExpertCount, without: WithoutExperts, blocks: Sequence[nn.Module]
) -> WidthLosses:
    """Measure the losses of fewer experts; all blocks with a mixture lose experts together, and have equal shares.

    Args:
        model: dense.
        width: with at least two levels.
        without: returns a context in which the model lacks the experts of a trial.
        blocks: all blocks of the model.
    """
    shares = [float(width.expert_cost(block, count_entries) > 0) for block in blocks]
    return WidthLosses(level_losses(model, width, without), tuple(share / sum(shares) for share in shares))


def level_losses(
    model: MeasurableModel, width: Width, changed: Callable[[int], AbstractContextManager[None]]
) -> tuple[float, ...]:
    """The loss of every level of a width.

    Args:
        model: dense.
        width: with at least two levels.
        changed: returns a context with the level of a trial in all blocks.
    """
    points = {0: 0.0}
    for trial, level in enumerate(trial_levels(width)):
        if level not in points:
            loss = model.increase(f"{width.name} without {level}", partial(changed, trial))
            points[level] = max(loss, *points.values())
    return interpolated(points, width.levels)


def interpolated(points: dict[int, float], levels: Sequence[int]) -> tuple[float, ...]:
    """Interpolate losses between ascending `points` (level → loss): monotone, and linear beyond the last point."""
    x, y = np.array(list(points), dtype=float), np.array(list(points.values()))
    at = np.array(levels, dtype=float)
    inside = PchipInterpolator(x, y)(at.clip(max=x[-1]))
    slope = (y[-1] - y[-2]) / (x[-1] - x[-2])
    return tuple(map(float, inside + slope * (at - x[-1]).clip(min=0)))


def block_sets(model: MeasurableModel, most: int) -> BlockSets:
    """Measure sets of at most `most` blocks: for each size, the candidate with the least loss on few samples.

    The losses of `MOST_SIZES` sizes are measured; the others are interpolated.
    """
    sets = list[tuple[int, ...]]([()])

    def without(blocks: tuple[int, ...], few: bool = False) -> float:
        return model.increase(f"without blocks {', '.join(map(str, blocks))}", partial(model.without, blocks), few)

    for size in range(1, most + 1):
        candidates = model.candidates(size, most)
        if candidates:
            best = candidates[0] if len(candidates) == 1 else min(candidates, key=lambda blocks: without(blocks, True))
            sets.append(best)
    points, last = {0: 0.0}, len(sets) - 1
    for index in sorted({round(step * last / MOST_SIZES) for step in range(1, MOST_SIZES + 1)} - {0}):
        points[index] = max(without(sets[index]), *points.values())
    losses = interpolated(points, range(len(sets))) if last else (0.0,)
    return BlockSets(tuple(sets), losses)


def build_program(costs: Costs, widths: Sequence[Width], losses: Sequence[WidthLosses], sets: BlockSets) -> Program:
    """The program of all combinations of a set of blocks and a level of every width."""
    savings_of_sets = [sum(costs.blocks[block] for block in blocks) for blocks in sets.sets]
    numbers = tuple(map(len, sets.sets))
    dimensions = [Dimension(BLOCKS, numbers, sets.losses, tuple(-saving for saving in savings_of_sets))]
    loss_pairs, cost_pairs = {}, {}
    for index, (width, loss) in enumerate(zip(widths, losses, strict=True), 1):
        savings = np.array(costs.savings[width.name])  # [blocks, levels]
        dimensions.append(Dimension(width.name, width.levels, loss.losses, tuple(map(float, -savings.sum(0)))))
        removed = [sum(loss.shares[block] for block in blocks) for blocks in sets.sets]
        loss_pairs[0, index] = -np.outer(removed, loss.losses)
        cost_pairs[0, index] = np.stack([savings[list(blocks)].sum(0) for blocks in sets.sets])
    places = {width.name: index for index, width in enumerate(widths, 1)}
    products = []
    for (first, second), by_block in costs.overlaps.items():
        remaining = [sum(by_block) - sum(by_block[block] for block in blocks) for blocks in sets.sets]
        products.append(Product(places[first], places[second], tuple(remaining)))
    return Program(tuple(dimensions), costs.dense, loss_pairs, cost_pairs, tuple(products))
