"""Wanda (Sun et al., arXiv 2306.11695) on the multi-objective diagonal: score w² · F_jj within each row, no update.

At λ = 1 the score is w² · Σ x², the square of Wanda's |w| · ‖x‖₂. The structured variant sums the scores over the rows.
"""

from dataclasses import dataclass
from typing import ClassVar

from ..objective.patterns import NM, Pattern, Structured, Unstructured
from ..objective.quadratic import DiagonalQuadratic, ProblemSize
from .base import PrunedWeight, Solver, finish, register_solver


@register_solver("wanda")
@dataclass(frozen=True)
class Wanda(Solver):
    """No hyperparameters; the comparison group is one row, and the surviving weights do not change."""

    patterns: ClassVar[tuple[type, ...]] = (Unstructured, NM, Structured)
    objective: ClassVar[type] = DiagonalQuadratic
    grouped: ClassVar[bool] = True

    def solve(self, objective: DiagonalQuadratic, pattern: Pattern) -> PrunedWeight:
        scores = objective.weight.square().mul_(objective.diagonal())
        return finish(objective, objective.weight, pattern.keep_per_row(scores))

    def workspace(self, size: ProblemSize, pattern: Pattern) -> int:
        return 9 * size.weights + size.slices(24 * size.inputs)
