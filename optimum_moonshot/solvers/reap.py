"""REAP (Lasby et al., arXiv 2510.13999): the experts go whose gated outputs are shortest, a mean over their tokens."""

from dataclasses import dataclass
from typing import ClassVar

from ..objective.patterns import Experts
from ..objective.removal import Removal, mean_norms
from .base import PrunedWeight, Solver, register_solver
from .subsets import chosen


@register_solver("reap")
@dataclass(frozen=True)
class REAP(Solver):
    """No hyperparameters; the comparison group is the mixture, or a group of its router."""

    patterns: ClassVar[tuple[type, ...]] = (Experts,)

    def solve(self, objective: Removal, pattern: Experts) -> PrunedWeight:
        return chosen(objective, pattern.keep(mean_norms(objective)))
