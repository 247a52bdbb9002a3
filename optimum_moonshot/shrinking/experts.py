"""The number of experts of every mixture, as a width that a model's configuration can reduce."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from ..config import MoonshotConfig
from ..data.batches import Batch
from ..errors import MoonshotError
from ..model.expert_removal import ExpertRemoval
from ..model.experts import expert_parameters
from ..model.mixtures import Mixtures, find_mixtures
from ..objective.patterns import Experts
from .widths import TRIALS, Width, trial_levels

EXPERTS = "experts"  # the name of their width


@dataclass(frozen=True, eq=False)
class ExpertCount(Width):
    """A width of mixtures instead of layers."""

    removals: tuple[ExpertRemoval, ...]  # of every trial

    def expert_cost(self, block: nn.Module, size: Callable[[nn.Parameter, int], float]) -> float:
        """The cost of one expert of a block, with its share of the router."""
        modules = set(block.modules())
        parameters = [
            each.owner._parameters[each.key]
            for each in self.removals[0].sliced.values()
            if each.owner in modules and each.key in each.owner._parameters
        ]
        return sum(size(each, each.numel() // self.count) for each in parameters if each is not None)


def has_experts(model: nn.Module) -> bool:
    return any(map(expert_parameters, model.modules()))


def find_experts(model: PreTrainedModel, inputs: Batch) -> tuple[ExpertCount | None, dict[str, str]]:
    """The experts of a model in evaluation mode, if it has any that can leave; else the reason by the name.

    Args:
        model: dense; unchanged.
        inputs: a small batch, for probes.
    """
    if not has_experts(model):
        return None, {}
    try:
        mixtures = find_mixtures(model, inputs)
        largest = _largest(model, mixtures, inputs)
        levels = tuple(range(0, largest.pattern.removed(mixtures.count) + 1, largest.pattern.groups))
        width = ExpertCount(EXPERTS, mixtures.count, (), levels, {}, ())
        plans = {
            level: ExpertRemoval.plan(model, mixtures, Experts(width.sparsity(level)), inputs)
            for level in set(trial_levels(width))
        }
    except MoonshotError as error:
        return None, {EXPERTS: str(error)}
    removals = tuple(plans[level] for level in trial_levels(width))
    return ExpertCount(EXPERTS, mixtures.count, (), levels, {}, removals), {}


def _largest(model: PreTrainedModel, mixtures: Mixtures, inputs: Batch) -> ExpertRemoval:
    """The removal of the most experts that a trial considers and the architecture allows."""
    for part in reversed(TRIALS[1:]):
        try:
            return ExpertRemoval.plan(model, mixtures, Experts(part), inputs)
        except MoonshotError:
            continue
    return ExpertRemoval.plan(model, mixtures, Experts(TRIALS[0]), inputs)


def expert_config(config: MoonshotConfig, sparsity: float, recover: str | None = None) -> MoonshotConfig:
    """The configuration that removes a fraction of the experts.

    Raises:
        MoonshotError: the configuration has a field that whole experts do not support.
    """
    return dataclasses.replace(config, pattern=Experts.kind, sparsity=sparsity, recover=recover)
