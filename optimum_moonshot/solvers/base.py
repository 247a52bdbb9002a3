"""What a solver is: a frozen dataclass of hyperparameters with one method, registered under one name."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Protocol, cast

import torch
from torch import Tensor

from ..errors import MoonshotError
from ..objective.patterns import Pattern
from ..objective.quadratic import BlockQuadratic, DiagonalQuadratic, Quadratic


@dataclasses.dataclass(frozen=True)
class PrunedWeight:
    """One pruned matrix. `notes` say everything about the run that a user should know."""

    weight: Tensor  # [d_out, d_in], zero wherever not keep
    keep: Tensor  # bool [d_out, d_in], True = survives
    damping: float  # the damping it took, 0 where a solver uses none
    notes: tuple[str, ...] = ()


class Solver(Protocol):
    """Hyperparameters are dataclass fields; `objective` says which statistics `solve` works on."""

    objective: ClassVar[type[Quadratic] | type[DiagonalQuadratic]]
    patterns: ClassVar[tuple[type[Pattern], ...]]  # the classes of patterns that `solve` takes
    grouped: ClassVar[bool]  # whether rows may read inputs of their own, as in grouped convolutions
    calibrated: ClassVar[bool]  # False: the weights alone decide, and calibration data only serve the report

    def solve(self, objective: Any, pattern: Any) -> PrunedWeight: ...


def block_size(solver: Solver, d_in: int, pattern: Pattern) -> int | None:
    """Inputs per block of the objective that a solver works on; None where it is not block-diagonal."""
    return cast(Any, solver).block(d_in, pattern) if solver.objective is BlockQuadratic else None


_SOLVERS: dict[str, type[Solver]] = {}


def register_solver(name: str) -> Callable[[type], type]:
    """Class decorator: makes a solver known to ``MoonshotConfig(solver=name)``. A name is taken once."""

    def register(cls: type) -> type:
        if name in _SOLVERS:
            raise ValueError(f"solver {name!r} is already registered by {_SOLVERS[name].__name__}")
        _SOLVERS[name] = cls
        return cls

    return register


def solver_names() -> list[str]:
    """The names `MoonshotConfig.solver` accepts."""
    return sorted(_SOLVERS)


def solver_class(name: str) -> type[Solver]:
    """The solver registered under a name.

    Raises:
        MoonshotError: no such solver.
    """
    if not isinstance(name, str) or name not in _SOLVERS:
        raise MoonshotError(f"solver={name!r}: use one of {', '.join(solver_names())}")
    return _SOLVERS[name]


def finish(objective: Any, weight: Tensor, keep: Tensor, damping: float = 0.0, asked: float = 0.0) -> PrunedWeight:
    """A `PrunedWeight` with exact zeros off `keep`, the objective's own notes, and one on damping beyond the asked."""
    raised = () if damping == asked else (f"damping raised from {asked:g} to {damping:g}",)
    return PrunedWeight(torch.where(keep, weight, 0.0), keep, damping, objective.scales.notes + raised)
