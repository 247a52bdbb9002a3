"""The baseline for whole experts: removes those to which the router sends the fewest tokens."""

from dataclasses import dataclass
from typing import ClassVar

from ..objective.patterns import Experts
from ..objective.removal import Removal
from .base import PrunedWeight, Solver, register_solver
from .subsets import expert_mask


@register_solver("frequency")
@dataclass(frozen=True)
class Frequency(Solver):
    """No hyperparameters; the comparison group is the mixture, or an expert group of its router."""

    patterns: ClassVar[tuple[type, ...]] = (Experts,)

    def solve(self, objective: Removal, pattern: Experts) -> PrunedWeight:
        return expert_mask(objective, pattern.keep(objective.tokens))
