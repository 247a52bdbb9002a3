"""The number of experts of every mixture, as a width that a model's configuration can reduce."""

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from ..calibration.mixture_sums import MixtureStatistics
from ..config import MoonshotConfig
from ..data.batches import Batch
from ..errors import MoonshotError
from ..experts.choice import MixtureProblems
from ..experts.removal import ExpertRemoval
from ..model.calls import evaluation_mode
from ..model.layer_kinds import expert_parameters
from ..model.mixtures import Mixture, Mixtures, find_mixtures
from ..objective.patterns import Experts
from ..objective.removal import Removal
from ..pipeline.inputs import Prepared, with_samples_shown
from ..pipeline.selection import select_experts
from .report import Target
from .widths import TRIALS, Width, trial_levels

EXPERTS = "experts"  # the name of the width
WithoutExperts = Callable[[int], AbstractContextManager[None]]  # number of the trial → context


@dataclass(frozen=True, eq=False)
class ExpertCount(Width):
    """The number of experts of every mixture, as a width."""

    removals: tuple[ExpertRemoval, ...]  # one for each trial

    def expert_cost(self, block: nn.Module, size: Callable[[nn.Parameter, int], float]) -> float:
        """The cost of one expert of a block, with its share of the router."""
        modules = set(block.modules())
        parameters = [
            sliced.owner._parameters[sliced.key]
            for sliced in self.removals[0].sliced.values()
            if sliced.owner in modules and sliced.key in sliced.owner._parameters
        ]
        return sum(size(tensor, tensor.numel() // self.count) for tensor in parameters if tensor is not None)


def has_experts(model: nn.Module) -> bool:
    return any(map(expert_parameters, model.modules()))


def find_experts(model: PreTrainedModel, inputs: Batch) -> tuple[ExpertCount | None, dict[str, str]]:
    """Find the removable experts of a model in evaluation mode; else None, and the reason by name.

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
    """The largest removal among the trials that the architecture allows."""
    for sparsity in reversed(TRIALS[1:]):
        try:
            return ExpertRemoval.plan(model, mixtures, Experts(sparsity), inputs)
        except MoonshotError:
            continue
    return ExpertRemoval.plan(model, mixtures, Experts(TRIALS[0]), inputs)


def expert_config(config: MoonshotConfig, sparsity: float, recover: str | None = None) -> MoonshotConfig:
    """The configuration that removes a fraction of the experts.

    Raises:
        MoonshotError: the configuration has a field that whole experts do not support.
    """
    return dataclasses.replace(config, pattern=Experts.kind, sparsity=sparsity, recover=recover)


class ExpertTrials(MixtureProblems):
    """Measures the model with fewer experts, one trial for each of the `removals`, at a λ below 1."""

    def __init__(self, prepared: Prepared, removals: Sequence[ExpertRemoval]):
        super().__init__(prepared, tuple(removals[0].mixtures))
        self.removals, self.problems = removals, dict[str, Removal]()

    def lacks_mixture(self, name: str) -> bool:
        return name not in self.problems

    def use(self, mixture: Mixture, statistics: MixtureStatistics) -> None:
        self.problems[mixture.name] = self.problem(statistics)

    def without(self, trial: int) -> AbstractContextManager[None]:
        """A context in which the model lacks the experts of a trial."""
        if not self.problems:
            self.run()
        removal, solver = self.removals[trial], self.selection.solver
        keep = {
            name: solver.solve(problem, removal.pattern).keep[0].nonzero().flatten()
            for name, problem in self.problems.items()
        }
        return removal.removed(keep)


def expert_trials(
    prepared: Prepared, target: Target
) -> tuple[tuple[ExpertCount, WithoutExperts] | None, dict[str, str]]:
    """The removable experts with a context for each trial, or the reason why they cannot be removed."""
    model, config = prepared.model, prepared.selection.config
    assert isinstance(model, PreTrainedModel)
    if target.field == "latency":
        reason = "every token passes as many experts as before, so that the latency does not change"
        return None, {EXPERTS: reason} if has_experts(model) else {}
    with evaluation_mode(model):
        width, refused = find_experts(model, prepared.probe)
    if width is None:
        return None, refused
    try:
        selection = select_experts(model, expert_config(config, width.sparsity(width.levels[-1])))
    except MoonshotError as error:
        return None, {EXPERTS: str(error)}
    data = with_samples_shown(prepared.subject, selection, prepared.calibration)
    trials = ExpertTrials(dataclasses.replace(prepared, selection=selection, data=data), width.removals)
    return (width, trials.without), {}
