"""What a solver is: a frozen dataclass of hyperparameters with one method, registered under one name."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from ..errors import MoonshotError, reason, require
from ..objective.patterns import Pattern
from ..objective.quadratic import BlockQuadratic, DiagonalQuadratic, Quadratic
from .entry_points import entry_point_names, load_entry_point
from .hyperparameters import check_options, hyperparameter, options_of, parse_option

__all__ = [
    "PrunedWeight",
    "Solver",
    "block_size",
    "finish",
    "hyperparameter",
    "make_solver",
    "parse_option",
    "register_solver",
    "solver_class",
    "solver_names",
    "solver_options",
]


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
    patterns: ClassVar[tuple[type, ...]]  # the classes of patterns that `solve` takes
    grouped: ClassVar[bool]  # whether rows may read inputs of their own, as in grouped convolutions
    calibrated: ClassVar[bool]  # False: the weights alone decide, and calibration data only serve the report

    def solve(self, objective: Any, pattern: Pattern) -> PrunedWeight: ...


def block_size(solver: Solver, d_in: int, pattern: Pattern) -> int | None:
    """Inputs per block of the objective that a solver works on; None where it is not block-diagonal."""
    return solver.block(d_in, pattern) if solver.objective is BlockQuadratic else None


_SOLVERS: dict[str, type] = {}


def register_solver(name: str) -> Callable[[type], type]:
    """Class decorator: makes a solver known to ``MoonshotConfig(solver=name)``. A name is taken once."""

    def register(cls: type) -> type:
        if name in _SOLVERS:
            raise ValueError(f"solver {name!r} is already registered by {_SOLVERS[name].__name__}")
        options_of(cls)
        _SOLVERS[name] = cls
        return cls

    return register


def solver_names() -> list[str]:
    """The solvers registered so far; those of other packages join when they are asked for."""
    return sorted(_SOLVERS)


def solver_class(name: str) -> type:
    """The solver registered under a name, if need be by the package that names it as an entry point.

    Raises:
        MoonshotError: no such solver, or one whose package cannot be imported.
    """
    if isinstance(name, str) and name not in _SOLVERS and load_entry_point(name):
        found = (
            f"solver={name!r}: an installed package names it as an entry point, and registers no solver of this name"
        )
        require(name in _SOLVERS, found)
    if not isinstance(name, str) or name not in _SOLVERS:
        known = sorted({*solver_names(), *entry_point_names()})
        raise MoonshotError(f"solver={name!r}: use one of {', '.join(known)}")
    return _SOLVERS[name]


def solver_options(name: str) -> dict[str, dataclasses.Field]:
    """The hyperparameters of a registered solver, by name: ``type``, ``default`` and ``metadata["help"]`` of each.

    Raises:
        MoonshotError: no such solver.
    """
    return options_of(solver_class(name))


def make_solver(name: str, options: Mapping[str, Any]) -> Solver:
    """A registered solver with some of its hyperparameters; the others have their defaults.

    Args:
        name: of the solver.
        options: hyperparameter → value.

    Raises:
        MoonshotError: no such solver or hyperparameter, or a value that it cannot have; also where the solver itself
            refuses them with a `ValueError`.
    """
    cls = solver_class(name)
    check_options(cls, options, f"solver={name!r}")
    try:
        return cls(**options)
    except MoonshotError:
        raise
    except ValueError as error:
        raise MoonshotError(f"solver={name!r}: {reason(error)}") from error


def finish(objective: Any, weight: Tensor, keep: Tensor, damping: float = 0.0, asked: float = 0.0) -> PrunedWeight:
    """A `PrunedWeight` with exact zeros off `keep`, the objective's own notes, and one on damping beyond the asked."""
    raised = () if damping == asked else (f"damping raised from {asked:g} to {damping:g}",)
    return PrunedWeight(torch.where(keep, weight, 0.0), keep, damping, objective.scales.notes + raised)
