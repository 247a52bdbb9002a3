"""A model without several numbers of its experts, for measurements."""

import dataclasses
from collections.abc import Sequence
from contextlib import AbstractContextManager

from transformers import PreTrainedModel

from ..calibration.mixture_sums import MixtureStatistics
from ..errors import MoonshotError
from ..model.calls import evaluation_mode
from ..model.expert_removal import ExpertRemoval
from ..model.mixtures import Mixture
from ..objective.removal import Removal
from ..pipeline.inputs import Prepared, with_samples_shown
from ..pipeline.selection import select_experts
from ..shrinking.experts import EXPERTS, ExpertCount, expert_config, find_experts, has_experts
from ..shrinking.losses import WithoutExperts
from ..shrinking.target import Target
from .mixture_problems import MixtureProblems


class ExpertTrials(MixtureProblems):
    """The model without several numbers of experts, one for each of `removals`, for measurements; its λ is < 1."""

    def __init__(self, prepared: Prepared, removals: Sequence[ExpertRemoval]):
        super().__init__(prepared, tuple(removals[0].mixtures))
        self.removals, self.problems = removals, dict[str, Removal]()

    def lacks_mixture(self, name: str) -> bool:
        return name not in self.problems

    def take(self, mixture: Mixture, statistics: MixtureStatistics) -> None:
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
    """The experts that may leave with a context for each trial, or the reason why they stay."""
    model, config = prepared.model, prepared.selection.config
    assert isinstance(model, PreTrainedModel)
    if target.field == "latency":
        reason = "every token passes as many experts as before, so that its latency stays"
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
