"""The widths of a model that its configuration can reduce: neurons, heads and neurons of experts, of every block.

Widths are found like those of a compaction (compaction.py): a configuration must describe exactly the remaining shapes,
in all blocks, since it has one number for them.
"""

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from ..data.batches import Batch
from ..model.compaction import Family, GroupSearch
from ..model.layers import PrunableLayer
from ..model.structured_groups import StructuredGroups

# The largest fraction of neurons to remove: beyond it, predictions are unreliable.
MOST = 0.75
# Fractions of the groups of a width at which its loss is measured.
TRIALS = (0.1, 0.25, 0.4, 0.55, 0.75)
# The most levels of a number of neurons, and a divisor of the remaining number, for fast kernels.
LEVELS, MULTIPLE = 64, 8
EXPERT_NEURONS = "neurons of experts"  # the name of a width


@dataclass(frozen=True, eq=False)
class Width:
    """The neurons, or the heads, of all blocks that one field of the configuration counts.

    Where the field counts multiples of groups, such as the neurons of several shared experts as one matrix, a member
    has a multiple of `count`, and loses the same fraction.
    """

    name: str
    count: int  # of groups of a layer
    members: tuple[tuple[PrunableLayer, StructuredGroups], ...]
    levels: tuple[int, ...]  # numbers of groups that can be removed, ascending from 0
    configs: Mapping[int, PreTrainedConfig]  # number removed → configuration of the model, of some levels

    def sparsity(self, removed: int) -> float:
        return removed / self.count


def trial_levels(width: Width) -> tuple[int, ...]:
    """The level of a width in each trial: the nearest to the fraction, at least the first."""
    smallest, *others = width.levels[1:]
    return tuple(min((smallest, *others), key=lambda level: abs(level - share * width.count)) for share in TRIALS)


def within(width: Width, savings: Sequence[float], excess: float) -> Width:
    """A width up to the first trial that saves an excess of cost alone, by the savings of its levels.

    To remove more would only add to the loss.
    """
    enough = (level for level in trial_levels(width) if savings[width.levels.index(level)] >= excess)
    last = next(enough, width.levels[-1])
    return dataclasses.replace(width, levels=tuple(level for level in width.levels if level <= last))


def find_widths(
    model: PreTrainedModel, inputs: Batch, layers: Collection[str], group_size: int
) -> tuple[list[Width], dict[str, str]]:
    """The widths of a model that can be reduced, and the reason for each that cannot.

    Args:
        model: dense; unchanged.
        inputs: a small batch, for probes.
        layers: names of the layers whose columns may be removed.
        group_size: neurons that are removed together.

    Returns:
        The widths, and name → reason.
    """
    search = GroupSearch(model, inputs, lambda layer, groups: torch.arange(groups.count).expand(layer.matrices, -1))
    widths, refused, counted = list[Width](), dict[str, str](), set[str]()
    for family in search.families:
        if family.name in counted:
            continue
        group = 1 if family.size > 1 else group_size
        excluded = [layer.name for layer, _, _ in family.members if layer.name not in layers]
        if excluded:
            refused[family.name] = f"{excluded[0]} is not selected"
            continue
        levels, shared = _levels(search, family, group)
        if not levels:
            refused[family.name] = search.reasons.get(family, "no configuration describes fewer in every block")
            continue
        counted |= {member.name for member in shared}
        refused = {other: reason for other, reason in refused.items() if other not in counted}
        members = tuple((layer, groups) for member in shared for layer, groups, _ in member.members)
        name = "heads" if family.size > 1 else "neurons"
        name = EXPERT_NEURONS if any(layer.separate for layer, _ in members) else name
        name = f"{name} of {family.name}" if any(width.name == name for width in widths) else name
        every = tuple(range(0, int(MOST * family.count) + 1, _step(family, group)))
        removed = every if family.size == 1 else (0, *levels)
        widths.append(Width(name, family.count, members, removed, levels))
    return widths, refused


def _step(family: Family, group: int) -> int:
    """Neurons between two levels."""
    multiple = math.lcm(MULTIPLE if family.count % MULTIPLE == 0 else family.multiple, group)
    return multiple * max(1, family.count // (multiple * LEVELS))


def _levels(search: GroupSearch, family: Family, group: int) -> tuple[dict[int, PreTrainedConfig], tuple[Family, ...]]:
    """Removable numbers of groups with their configurations, and the families that they are removed from together.

    Every number of heads is a candidate; for neurons a few numbers, which stand for all numbers between.
    """
    levels, shared = dict[int, PreTrainedConfig](), tuple[Family, ...]()
    step = _step(family, group)
    steps = int(MOST * family.count) // step
    candidates = sorted({max(1, round(share * steps)) * step for share in (0, 0.25, 0.5, 0.75, 1)}) if steps else []
    for removed in range(1, family.count) if family.size > 1 else candidates:
        config, explained = search.without(family, removed)
        alike = all(
            number * family.count == removed * other.count and other.count % family.count == 0
            for other, number in explained.items()
        )
        if config is not None and alike:
            shared, levels[removed] = shared or tuple(explained), config
            if tuple(explained) != shared:
                del levels[removed]
    return levels, shared
