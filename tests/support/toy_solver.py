"""A third-party solver with custom hyperparameters: Wanda with three visible changes."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from optimum_moonshot import register_solver
from optimum_moonshot.objective.patterns import NM, Pattern, Structured, Unstructured
from optimum_moonshot.objective.quadratic import DiagonalQuadratic
from optimum_moonshot.solvers.base import PrunedWeight, Solver, finish, hyperparameter


@register_solver("toy")
@dataclass(frozen=True)
class Toy(Solver):
    """The comparison group is one row, and the surviving weights do not change."""

    power: float = hyperparameter(1.0, help="exponent of the diagonal in a weight's score", least=0, most=2)
    spare: int = hyperparameter(0, help="first inputs that stay", least=0)
    largest: bool = hyperparameter(False, help="remove the largest scores")

    patterns: ClassVar[tuple[type, ...]] = (Unstructured, NM, Structured)
    objective: ClassVar[type] = DiagonalQuadratic
    grouped: ClassVar[bool] = True

    def solve(self, objective: DiagonalQuadratic, pattern: Pattern) -> PrunedWeight:
        scores = objective.weight.square() * objective.diagonal() ** self.power
        scores = -scores if self.largest else scores
        scores[:, : self.spare] = torch.inf
        return finish(objective, objective.weight, pattern.keep_per_row(scores))
