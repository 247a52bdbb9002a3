"""The baseline for whole experts: those that the router sends the fewest tokens go."""

from dataclasses import dataclass
from typing import ClassVar

from ..objective.patterns import Experts
from ..objective.removal import Removal
from .base import PrunedWeight, Solver, register_solver
from .subsets import chosen


@register_solver("frequency")
@dataclass(frozen=True)
class Frequency(Solver):
    """No hyperparameters; the comparison group is the mixture, or a group of its router."""

    patterns: ClassVar[tuple[type, ...]] = (Experts,)

    def solve(self, objective: Removal, pattern: Experts) -> PrunedWeight:
        return chosen(objective, pattern.keep(objective.tokens))
