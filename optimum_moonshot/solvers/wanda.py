"""Solvers that remove the weights with the smallest scores and leave the others unchanged.

Magnitude pruning is the baseline without data: the smallest |w| of the whole layer. Its structured variant removes the
columns with the smallest Σ|w| (the ℓ₁ norm of Li et al., arXiv 1608.08710).

Wanda (Sun et al., arXiv 2306.11695) on the multi-objective diagonal removes the smallest w² · F_jj of each row. At λ =
1 the score is w² · Σ x², the square of Wanda's |w| · ‖x‖₂. The structured variant sums the scores over the rows.
"""

from dataclasses import dataclass
from typing import ClassVar

from ..objective.patterns import NM, Pattern, Structured, Unstructured
from ..objective.quadratic import DiagonalQuadratic, Quadratic
from .base import PrunedWeight, Solver, finish, register_solver


@register_solver("magnitude")
@dataclass(frozen=True)
class Magnitude(Solver):
    """No hyperparameters; the comparison group is the layer."""

    patterns: ClassVar[tuple[type, ...]] = (Unstructured, NM, Structured)
    grouped: ClassVar[bool] = True
    calibrated: ClassVar[bool] = False

    def solve(self, objective: Quadratic, pattern: Pattern) -> PrunedWeight:
        return finish(objective, objective.weight, pattern.keep(objective.weight.abs()))


@register_solver("wanda")
@dataclass(frozen=True)
class Wanda(Solver):
    """No hyperparameters; the comparison group is one row."""

    patterns: ClassVar[tuple[type, ...]] = (Unstructured, NM, Structured)
    objective: ClassVar[type] = DiagonalQuadratic
    grouped: ClassVar[bool] = True

    def solve(self, objective: DiagonalQuadratic, pattern: Pattern) -> PrunedWeight:
        scores = objective.weight.square().mul_(objective.diagonal())
        return finish(objective, objective.weight, pattern.keep_per_row(scores))
