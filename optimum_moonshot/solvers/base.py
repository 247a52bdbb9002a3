"""What a solver is: a frozen dataclass of hyperparameters that declares what it can do, registered under one name.

A new solver is a file with one class, which states only what differs from the defaults of `Solver`:

    @register_solver("mine")
    @dataclass(frozen=True)
    class Mine(Solver):
        strength: float = hyperparameter(0.5, help="what it does", above=0)

        patterns: ClassVar[tuple[type, ...]] = (Unstructured,)

        def solve(self, objective: Quadratic, pattern: Unstructured) -> PrunedWeight:
            ...
            return finish(objective, weight, keep)

From then on ``MoonshotConfig(solver="mine")`` knows it and, through `solver_options`, its hyperparameters. Nothing in
the package asks which class a solver is: all it does for one follows from what the class declares.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar, get_args

import torch
from torch import Tensor

from ..errors import MoonshotError, reason, require
from ..objective.linalg import escalate
from ..objective.patterns import NM, Pattern, Structured, Unstructured
from ..objective.problem_size import ProblemSize, Work
from ..objective.quadratic import Objective, Quadratic
from .entry_points import entry_point_names, load_entry_point
from .hyperparameters import check_options, hyperparameter, options_of, parse_option

__all__ = [
    "PrunedWeight",
    "Solver",
    "damped",
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


class Solver(ABC):
    """What every solver declares, with the defaults; hyperparameters are the fields of its own dataclass."""

    # The classes of patterns that `solve` takes: of `Unstructured`, `NM`, `Structured` and `Experts`.
    patterns: ClassVar[tuple[type[Pattern], ...]]
    # What `solve` works on, and so what is gathered: `Quadratic`, from G and the Fisher term of the rows or of their
    # column blocks, or `DiagonalQuadratic`, from their diagonals alone.
    objective: ClassVar[type[Objective]] = Quadratic
    # Whether rows may come in groups that read inputs of their own, as in grouped convolutions.
    grouped: ClassVar[bool] = False
    # False: the weights alone decide, and calibration data only serve the report.
    calibrated: ClassVar[bool] = True
    # Whether it ranks removals: one elimination then serves every sparsity, and a layer whose statistics exceed the
    # memory is solved in chunks of rows. Such a solver has the methods of `ranked.Ranked`, and its ``damping``.
    ranks: ClassVar[bool] = False
    # Whether the rows of a matrix meet only in `Pattern.keep`: several processes may then solve some rows each. Such a
    # solver has `attempt`, as `sparsegpt.SparseGPT` has it, and a ``damping``.
    by_rows: ClassVar[bool] = False

    def __post_init__(self) -> None:
        values = {name: getattr(self, name) for name in options_of(type(self))}
        check_options(type(self), values, type(self).__name__)

    def column_block(self, d_in: int, pattern: Pattern) -> int | None:
        """Inputs of a column block of the quadratic: all others of its row are left out. None: all of d_in together.

        Args:
            d_in: inputs of the layer.
            pattern: that it is pruned by.

        Returns:
            A divisor of d_in, a multiple of the pattern's width; or None.
        """
        return None

    @abstractmethod
    def solve(self, objective: Any, pattern: Any) -> PrunedWeight:
        """One layer's pruned weight.

        Args:
            objective: of the class that `objective` names, with the layer's dense weight; of `Experts` a `Removal`, and
                the weight is one row, [1, experts].
            pattern: of one of the classes in `patterns`; it fits the weight.

        Raises:
            FactorizationError: the quadratic stays singular at the largest damping.
        """

    def work(self, size: ProblemSize, pattern: Pattern) -> Work:
        """What `solve` takes, for a plan made before there is any data; here a guess that suits most.

        A solver that holds more says so: bytes at the peak beside the statistics and the layer's own weight, but with
        the objective's float32 copy of it, and a number of operations that grows as its time does.

        Args:
            size: of the matrix and its statistics.
            pattern: that it is pruned by.
        """
        if self.objective.diagonal_only:
            return Work(24 * size.weights, size.weights)
        matrices, rows = 48 * size.inputs**2, size.weights * (24 + 4 * size.rank)
        return Work(matrices + rows, size.inputs**3 + size.weights * size.inputs * max(1, size.rank))

    def trials(self, objective: Any, patterns: Sequence[Any]) -> list[Tensor]:
        """Pruned weights by several patterns of one class, to compare their losses: those of `solve` up to rounding.

        A solver that can share work between them says how; here each is solved.

        Args:
            objective: as for `solve`.
            patterns: one or more.

        Returns:
            [d_out, d_in] for each.

        Raises:
            FactorizationError: as `solve`.
        """
        return [self.solve(objective, pattern).weight for pattern in patterns]


# The methods of a solver that ranks removals, as `ranked.Ranked` has them.
RANKING = ("rank", "minimise", "solve_path")
# That of one whose rows are solved apart.
BY_ROWS = ("attempt",)

_SOLVERS: dict[str, type[Solver]] = {}
C = TypeVar("C", bound=type[Any])


def register_solver(name: str) -> Callable[[C], C]:
    """Class decorator: makes a solver known to ``MoonshotConfig(solver=name)``.

    A class that does not derive from `Solver` has its defaults for whatever it leaves out.

    Raises:
        ValueError: the name is taken.
        MoonshotError: the class declares too little, or what no solver can have.
    """

    def register(cls: C) -> C:
        if name in _SOLVERS:
            raise ValueError(f"solver {name!r} is already registered by {_SOLVERS[name].__name__}")
        for capability in ("objective", "grouped", "calibrated", "ranks", "by_rows", "column_block", "work", "trials"):
            if not hasattr(cls, capability):
                setattr(cls, capability, getattr(Solver, capability))
        _check_declared(cls)
        _SOLVERS[name] = cls
        return cls

    return register


def _check_declared(cls: type[Any]) -> None:
    """Raise `MoonshotError` unless a class says everything that the package will ask of it."""
    own, options, abstract = cls.__name__, options_of(cls), getattr(cls, "__abstractmethods__", ())
    needed = ("patterns", "solve", *(RANKING if cls.ranks else ()), *(BY_ROWS if cls.by_rows else ()))
    lacks = [name for name in needed if not hasattr(cls, name) or name in abstract]
    lacks += ["the hyperparameter damping"] if (cls.ranks or cls.by_rows) and "damping" not in options else []
    why = ", which a solver with by_rows=True has (solvers/sparsegpt.py)" if cls.by_rows else ""
    why = ", which a solver with ranks=True has (solvers/ranked.py)" if cls.ranks else why
    require(not lacks, f"{own} lacks {', '.join(lacks)}{why}: declare it as `Solver` in solvers/base.py says")
    kinds = {kind.__name__: kind for kind in get_args(Pattern)}
    known = isinstance(cls.patterns, tuple) and all(kind in kinds.values() for kind in cls.patterns)
    require(known and bool(cls.patterns), f"{own}.patterns={cls.patterns!r}: give a tuple of {', '.join(kinds)}")
    objectives = {kind.__name__: kind for kind in get_args(Objective)}
    known = cls.objective in objectives.values()
    require(known, f"{own}.objective={cls.objective!r}: give {' or '.join(objectives)}")
    for name in ("grouped", "calibrated", "ranks", "by_rows"):
        value = getattr(cls, name)
        require(isinstance(value, bool), f"{own}.{name}={value!r}: give True or False")
    for name in ("ranks", "by_rows"):
        require(
            not (getattr(cls, name) and cls.objective.diagonal_only),
            f"{own}.objective={cls.objective.__name__}: a solver with {name}=True works on a Quadratic",
        )


def solver_names(*kinds: type[Pattern]) -> list[str]:
    """The solvers registered so far; those of other packages join when they are asked for.

    Args:
        kinds: classes of patterns, one of which the solvers take; none are those that choose weights of a matrix.
    """
    wanted = kinds or (Unstructured, NM, Structured)
    return sorted(name for name, cls in _SOLVERS.items() if any(issubclass(kind, wanted) for kind in cls.patterns))


def solver_class(name: str) -> type[Solver]:
    """The solver registered under a name, if need be by the package that names it as an entry point.

    Raises:
        MoonshotError: no such solver, or one whose package cannot be imported.
    """
    if isinstance(name, str) and name not in _SOLVERS and load_entry_point(name):
        told = f"solver={name!r}: it is an entry point of an installed package, which registers no solver of this name"
        require(name in _SOLVERS, told)
    if not isinstance(name, str) or name not in _SOLVERS:
        known = sorted({*_SOLVERS, *entry_point_names()})
        raise MoonshotError(f"solver={name!r}: use one of {', '.join(known)}")
    return _SOLVERS[name]


def solver_options(name: str) -> dict[str, dataclasses.Field[Any]]:
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


def finish(
    objective: Objective, weight: Tensor, keep: Tensor, damping: float = 0.0, asked: float = 0.0
) -> PrunedWeight:
    """A `PrunedWeight` with exact zeros off `keep`, the objective's own notes, and one on damping beyond the asked.

    Args:
        objective: that was solved.
        weight: [d_out, d_in].
        keep: bool [d_out, d_in].
        damping: that it took, 0 without one.
        asked: the hyperparameter.
    """
    return PrunedWeight(torch.where(keep, weight, 0.0), keep, damping, notes_of(objective, damping, asked))


def notes_of(objective: Objective, damping: float = 0.0, asked: float = 0.0) -> tuple[str, ...]:
    """The objective's own notes, and one on damping beyond the asked.

    Args:
        objective, damping, asked: as for `finish`.
    """
    raised = () if damping == asked else (f"damping raised from {asked:g} to {damping:g}",)
    return objective.scales.notes + raised


def damped(objective: Quadratic, asked: float, attempt: Callable[[float], tuple[Tensor, Tensor]]) -> PrunedWeight:
    """What `attempt` finds at the smallest damping, of the asked times a power of ten, at which all factors exist.

    Args:
        objective: that is solved.
        asked: the hyperparameter, in (0, 1].
        attempt: gets what is added to the diagonal of every F_k; it returns the pruned weight and `keep`, both
            [d_out, d_in], or raises `FactorizationError`.

    Raises:
        FactorizationError: no damping up to 1 sufficed.
    """
    unit = objective.damping_unit
    (weight, keep), damping = escalate(asked, lambda damping: attempt(damping * unit))
    return finish(objective, weight, keep, damping, asked)
