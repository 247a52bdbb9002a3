"""Magnitude pruning, the baseline without data: removes the smallest |w| of the whole layer.

The structured variant removes the columns with the smallest Σ|w| (the ℓ₁ norm of Li et al., arXiv 1608.08710).
"""

from dataclasses import dataclass
from typing import ClassVar

from ..objective.patterns import NM, Pattern, Structured, Unstructured
from ..objective.quadratic import ProblemSize, Quadratic
from .base import PrunedWeight, Solver, finish, register_solver


@register_solver("magnitude")
@dataclass(frozen=True)
class Magnitude(Solver):
    """No hyperparameters; the comparison group is the layer, and the surviving weights do not change."""

    patterns: ClassVar[tuple[type, ...]] = (Unstructured, NM, Structured)
    grouped: ClassVar[bool] = True
    calibrated: ClassVar[bool] = False

    def solve(self, objective: Quadratic, pattern: Pattern) -> PrunedWeight:
        return finish(objective, objective.weight, pattern.keep(objective.weight.abs()))

    def workspace(self, size: ProblemSize, pattern: Pattern) -> int:
        return 22 * size.weights
