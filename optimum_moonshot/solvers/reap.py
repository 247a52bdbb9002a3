"""REAP (Lasby et al., arXiv 2510.13999): removes the experts with the smallest mean norm of gated outputs."""

from dataclasses import dataclass
from typing import ClassVar

from ..objective.patterns import Experts
from ..objective.removal import Removal, mean_norms
from .base import PrunedWeight, Solver, register_solver
from .subsets import expert_mask


@register_solver("reap")
@dataclass(frozen=True)
class REAP(Solver):
    """No hyperparameters; the comparison group is the mixture, or an expert group of its router."""

    patterns: ClassVar[tuple[type, ...]] = (Experts,)

    def solve(self, objective: Removal, pattern: Experts) -> PrunedWeight:
        return expert_mask(objective, pattern.keep(mean_norms(objective)))
