"""The solver interface: a frozen dataclass of hyperparameters that declares its capabilities, registered by name.

To add a solver, add a file with one class that overrides only the defaults of `Solver` it needs to:

    @register_solver("mine")
    @dataclass(frozen=True)
    class Mine(Solver):
        strength: float = hyperparameter(0.5, help="its effect", above=0)

        patterns: ClassVar[tuple[type, ...]] = (Unstructured,)

        def solve(self, objective: Quadratic, pattern: Unstructured) -> PrunedWeight:
            ...
            return finish(objective, weight, keep)

``MoonshotConfig(solver="mine")`` then accepts it, and its hyperparameters through `solver_options`. The rest of the
package never tests for a particular class: it reads the declared capabilities only.

An installed package can declare the module that registers a solver in its ``pyproject.toml``, under the solver's name.
The module is imported when a configuration names the solver:

    [project.entry-points."optimum_moonshot.solvers"]
    mine = "my_package.my_solver"
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import math
import types
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any, ClassVar, Protocol, TypeVar, get_args

import torch
from torch import Tensor

from ..errors import MAX_INT, MoonshotError, reason, require
from ..objective.linalg import MAX_DAMPING, escalate
from ..objective.patterns import NM, Pattern, Structured, Unstructured
from ..objective.quadratic import Objective, Quadratic
from ..options import kind_of, limits, within

# Types that both JSON and a command line can express; a hyperparameter may also be optional (`| None`).
KINDS = (bool, int, float, str)
_hints = functools.cache(typing.get_type_hints)  # by class: can take longer than solving a small layer


def hyperparameter(
    default: Any, *, help: str, least: float | None = None, most: float | None = None, above: float | None = None
) -> Any:
    """A field of a solver's dataclass, such as ``damping: float = hyperparameter(0.01, help="…", above=0, most=1)``.

    `help` is its description on the command line, without the default; `above` is an exclusive lower bound.
    """
    bounds = {"least": least, "most": most, "above": above}
    declared = {name: bound for name, bound in bounds.items() if bound is not None}
    return dataclasses.field(default=default, metadata={"help": help, **declared})


def damping_option() -> Any:
    """The field ``damping`` of a solver that factors its Hessians, with tenfold increase on failure."""
    help = "fraction of the mean diagonal added to a Hessian before it is factored; increased tenfold on failure"
    return hyperparameter(0.01, help=help, above=0, most=MAX_DAMPING)


def options_of(cls: type) -> dict[str, dataclasses.Field[Any]]:
    """The hyperparameters of a solver's dataclass by name, with ``type`` resolved and a ``metadata["help"]``.

    Raises:
        MoonshotError: the class is not a dataclass, or a field has no default, an unsupported type, or a default out of
            bounds.
    """
    usage = "put @dataclass(frozen=True) under @register_solver"
    require(dataclasses.is_dataclass(cls), f"{cls.__name__} is not a dataclass", hint=usage)
    try:
        hints = _hints(cls)
    except NameError as error:
        raise MoonshotError(f"{cls.__name__}: an annotation cannot be read ({error})") from None
    usage = f"use one of {', '.join(kind.__name__ for kind in KINDS)}, or one of these | None"
    options = {}
    for field in dataclasses.fields(cls):
        if not field.init:
            continue
        option = copy.copy(field)  # a copy: the class needs the field unchanged, and its type may be a string
        option.type, option.metadata = hints[field.name], types.MappingProxyType({"help": "", **field.metadata})
        name = f"{cls.__name__}.{field.name}"
        require(kind_of(option)[0] in KINDS, f"{name} has the type {option.type}", hint=usage)
        require(option.default is not dataclasses.MISSING, f"{name} has no default", hint="add one")
        try:
            check_option(option, option.default)
        except MoonshotError as error:
            raise error.within(f"{cls.__name__}: default") from None
        options[field.name] = option
    return options


def check_option(option: dataclasses.Field[Any], value: Any) -> None:
    """Raise `MoonshotError` unless a value is valid for one of `options_of`; an int is valid for a float."""
    (kind, optional), bounds = kind_of(option), option.metadata
    if value is None and optional:
        return
    valid = isinstance(value, int | float if kind is float else kind) and (kind is bool or not isinstance(value, bool))
    if valid and kind in (int, float):
        finite = math.isfinite(value) if isinstance(value, float) else abs(value) <= MAX_INT
        valid = finite and within(value, bounds)
    if valid:
        return
    nouns = {bool: "True or False", int: "a whole number", float: "a number", str: "a string"}
    words = limits(bounds)
    link = " of " if words.startswith("at ") else " " if words else ""
    usage = f"give {nouns[kind]}{link}{words}{', or None' if optional else ''}"
    raise MoonshotError(usage, field=option.name, value=value)


def check_options(cls: type, values: Mapping[str, Any], owner: str) -> None:
    """Raise `MoonshotError` unless a solver has hyperparameters of these names, and the values are valid.

    `owner` names the solver in the message: "solver='cap'".
    """
    options = options_of(cls)
    for name, value in values.items():
        if name not in options:
            hint = f"it has {', '.join(options) or 'none'}"
            raise MoonshotError(f"{owner} has no such hyperparameter", field=name, value=value, hint=hint)
        check_option(options[name], value)


def parse_option(option: dataclasses.Field[Any], text: str) -> Any:
    """Parse and check the value of a hyperparameter from a command line, "none" for None if the type allows it.

    Raises:
        MoonshotError: the value has another type or is out of bounds.
    """
    kind, optional = kind_of(option)
    value: Any = text
    if optional and text.lower() == "none":
        value = None
    elif kind is bool:
        value = {"true": True, "false": False}.get(text.lower(), text)
    elif kind in (int, float):
        with contextlib.suppress(ValueError):  # check_option then reports the text itself
            value = kind(text)
    check_option(option, value)
    return value


ENTRY_POINTS = "optimum_moonshot.solvers"
# Capabilities that are True or False.
FLAGS = ("grouped", "calibrated", "ranks_removals", "by_rows", "quantizes")


@dataclasses.dataclass(frozen=True)
class PrunedWeight:
    """One pruned matrix; `notes` are messages for the user, printed in the report."""

    weight: Tensor  # [d_out, d_in], zero wherever not keep
    keep: Tensor  # bool [d_out, d_in], True where the weight survives
    damping: float  # at which the factorisations succeeded; 0 for solvers without damping
    notes: tuple[str, ...] = ()


class Solver(ABC):
    """Base class of the solvers: the capabilities with their defaults. Subclasses add hyperparameters as fields."""

    # Supported classes of patterns: of `Unstructured`, `NM`, `Structured` and `Experts`.
    patterns: ClassVar[tuple[type[Pattern], ...]]
    # The class of the argument of `solve`. It determines the statistics that are collected: for `Quadratic`, G and the
    # Fisher term of the rows or their column blocks; for `DiagonalQuadratic`, only the diagonals.
    objective: ClassVar[type[Objective]] = Quadratic
    # Whether rows may be in groups with separate inputs, as in grouped convolutions.
    grouped: ClassVar[bool] = False
    # False where the mask depends on the weights alone, and data only affect losses in the report. Without data,
    # `solve` gets a `DiagonalQuadratic` of ones.
    calibrated: ClassVar[bool] = True
    # Whether it ranks removals: one elimination then yields every sparsity, and a layer whose statistics exceed memory
    # can be solved in chunks of rows. Requires the methods of `ranked.Ranked` and a field ``damping``.
    ranks_removals: ClassVar[bool] = False
    # Whether rows interact only through `Pattern.keep`: rows can then be solved in shards. Requires `attempt`, as in
    # `sparsegpt.SparseGPT`, and a field ``damping``.
    by_rows: ClassVar[bool] = False
    # Whether `solve` and `attempt` return weights on `Pattern.grid`, if there is one; others are quantized afterwards.
    quantizes: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name, option in options_of(type(self)).items():
            check_option(option, getattr(self, name))

    def column_block(self, d_in: int, pattern: Pattern) -> int | None:
        """Number of inputs in each diagonal block of the quadratic; None keeps the whole matrices.

        Args:
            d_in: inputs of the layer.
            pattern: the pruning pattern.

        Returns:
            A divisor of d_in, a multiple of the pattern's width; or None.
        """
        return None

    @abstractmethod
    def solve(self, objective: Any, pattern: Any) -> PrunedWeight:
        """Prune one layer.

        Args:
            objective: an instance of the class in `objective`, which includes the dense weight; for `Experts` a
                `Removal`, whose weight is one row, [1, experts].
            pattern: an instance of one of `patterns` that fits the weight.

        Raises:
            FactorizationError: the quadratic stays singular at the largest damping.
        """

    def family(self, pattern: Any) -> Any:
        """A key that is equal for patterns that one call of `solve_path` solves together."""
        return Unstructured if self.ranks_removals and isinstance(pattern, Unstructured) else pattern

    def solve_path(self, objective: Any, patterns: Sequence[Any]) -> list[PrunedWeight]:
        """Solve several patterns of one family; override this if they can share work."""
        return [self.solve(objective, pattern) for pattern in patterns]

    def trials(self, objective: Any, patterns: Sequence[Any]) -> list[Tensor]:
        """Prune by several patterns of one class, to compare their losses; override this if they can share work.

        Args:
            objective: the quadratic objective of the matrix, in the form that `solve` takes.
            patterns: one or more.

        Returns:
            The weight [d_out, d_in] for each pattern, as from `solve` up to rounding.
        """
        return [self.solve(objective, pattern).weight for pattern in patterns]


class RowSolver(Protocol):
    """The members that `Solver.by_rows` requires; `sparsegpt.SparseGPT` documents them."""

    @property
    def damping(self) -> float: ...

    @property
    def quantizes(self) -> bool: ...

    def attempt(self, objective: Quadratic, pattern: Pattern, damping: float) -> tuple[Tensor, Tensor]: ...


_SOLVERS: dict[str, type[Solver]] = {}
C = TypeVar("C", bound=type[Any])


def register_solver(name: str) -> Callable[[C], C]:
    """Class decorator that registers a solver for ``MoonshotConfig(solver=name)``.

    A class that does not derive from `Solver` receives the defaults of `Solver` for the capabilities it lacks.

    Raises:
        ValueError: the name is taken.
        MoonshotError: the class lacks a required member, or declares an invalid one.
    """

    def register(cls: C) -> C:
        if name in _SOLVERS:
            raise ValueError(f"solver {name!r} is already registered by {_SOLVERS[name].__name__}")
        for capability in ("objective", *FLAGS, "column_block", "family", "solve_path", "trials"):
            if not hasattr(cls, capability):
                setattr(cls, capability, getattr(Solver, capability))
        _check_declared(cls)
        _SOLVERS[name] = cls
        return cls

    return register


def _check_declared(cls: type[Any]) -> None:
    """Raise `MoonshotError` unless a class has all members that its capabilities require, each of a valid type."""
    owner, options, abstract = cls.__name__, options_of(cls), getattr(cls, "__abstractmethods__", ())
    needed, why = ["patterns", "solve"], ""
    if cls.ranks_removals:
        needed += ["rank_removals", "minimise"]
        why = ", which ranks_removals=True requires (solvers/ranked.py)"
    if cls.by_rows:
        needed, why = [*needed, "attempt"], why or ", which by_rows=True requires (solvers/sparsegpt.py)"
    lacks = [name for name in needed if not hasattr(cls, name) or name in abstract]
    lacks += ["the hyperparameter damping"] if why and "damping" not in options else []
    require(not lacks, f"{owner} lacks {', '.join(lacks)}{why}", hint="see `Solver` in solvers/base.py")
    kinds = {kind.__name__: kind for kind in get_args(Pattern)}
    valid = isinstance(cls.patterns, tuple) and all(kind in kinds.values() for kind in cls.patterns)
    usage = f"give a tuple of {', '.join(kinds)}"
    require(valid and bool(cls.patterns), usage, field=f"{owner}.patterns", value=cls.patterns)
    objectives = {kind.__name__: kind for kind in get_args(Objective)}
    usage, field = f"give {' or '.join(objectives)}", f"{owner}.objective"
    require(cls.objective in objectives.values(), usage, field=field, value=cls.objective)
    for flag in FLAGS:
        value = getattr(cls, flag)
        require(isinstance(value, bool), "give True or False", field=f"{owner}.{flag}", value=value)
        factors = value and flag in ("ranks_removals", "by_rows")
        valid = not (factors and cls.objective.diagonal_only)
        require(valid, f"{flag}=True requires a Quadratic", field=field, value=cls.objective)


def solver_names(*kinds: type[Pattern]) -> list[str]:
    """The names of the solvers registered so far that support one of these patterns; by default all except experts."""
    supported = kinds or (Unstructured, NM, Structured)
    return sorted(name for name, cls in _SOLVERS.items() if any(issubclass(kind, supported) for kind in cls.patterns))


def solver_class(name: str) -> type[Solver]:
    """The solver registered under a name; loads the entry point of that name if there is one.

    Raises:
        MoonshotError: no such solver, or one whose package cannot be imported.
    """
    if isinstance(name, str) and name in _SOLVERS:
        return _SOLVERS[name]
    points = entry_points(group=ENTRY_POINTS, name=name) if isinstance(name, str) else ()
    for point in points:
        try:
            point.load()
        except Exception as error:  # the package of another author may raise any exception
            message = f"the entry point {point.value!r} of an installed package cannot be imported ({reason(error)})"
            raise MoonshotError(message, field="solver", value=name) from error
    if not points:
        names = sorted({*_SOLVERS, *(point.name for point in entry_points(group=ENTRY_POINTS))})
        raise MoonshotError(f"use one of {', '.join(names)}", field="solver", value=name)
    message = "the entry point of this name in an installed package registers no solver of this name"
    require(name in _SOLVERS, message, field="solver", value=name)
    return _SOLVERS[name]


def solver_options(name: str) -> dict[str, dataclasses.Field[Any]]:
    """`options_of` a registered solver: each has ``type``, ``default`` and ``metadata["help"]``."""
    return options_of(solver_class(name))


def make_solver(name: str, options: Mapping[str, Any]) -> Solver:
    """Make a registered solver; hyperparameters that are not in `options` have their defaults.

    Raises:
        MoonshotError: no such solver or hyperparameter, or an invalid value, also where the solver's own constructor
            raises a `ValueError`.
    """
    cls = solver_class(name)
    check_options(cls, options, f"solver={name!r}")
    try:
        return cls(**options)
    except MoonshotError:
        raise
    except ValueError as error:
        raise MoonshotError(reason(error), field="solver", value=name) from error


def finish(
    objective: Objective, weight: Tensor, keep: Tensor, damping: float = 0.0, initial: float = 0.0
) -> PrunedWeight:
    """The `PrunedWeight` with exact zeros where `keep` or `alive` of the objective is False, and notes.

    Args:
        objective: of the layer.
        weight: [d_out, d_in].
        keep: bool [d_out, d_in].
        damping: at which the factorisations succeeded; 0 without damping.
        initial: the hyperparameter ``damping``.
    """
    keep = keep if objective.alive is None else keep & objective.alive
    return PrunedWeight(torch.where(keep, weight, 0.0), keep, damping, notes_of(objective, damping, initial))


def notes_of(objective: Objective, damping: float, initial: float) -> tuple[str, ...]:
    """The objective's notes, and a note if the damping was raised above the hyperparameter, `initial`."""
    raised = () if damping == initial else (f"damping raised from {initial:g} to {damping:g}",)
    return objective.scales.notes + raised


def damped(objective: Quadratic, initial: float, attempt: Callable[[float], tuple[Tensor, Tensor]]) -> PrunedWeight:
    """Solve at the smallest damping, `initial` times a power of ten up to 1, at which all factorisations succeed.

    Args:
        objective: of the layer.
        initial: the hyperparameter ``damping``, in (0, 1].
        attempt: called with the number to add to the diagonal of every F_k; returns the pruned weight and `keep`, both
            [d_out, d_in], or raises `FactorizationError`.

    Raises:
        FactorizationError: no damping up to 1 suffices.
    """
    unit = objective.damping_unit
    (weight, keep), damping = escalate(initial, lambda damping: attempt(damping * unit))
    return finish(objective, weight, keep, damping, initial)
