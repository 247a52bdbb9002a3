"""The hyperparameters of a solver: fields of its dataclass, each a number, a truth value or a string with bounds.

A configuration and the command line read names, types, defaults, bounds and help from the fields alone, so that a
solver states each of them once.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from typing import Any

from ..errors import MoonshotError, require
from ..objective.linalg import MAX_DAMPING

# What a hyperparameter may be: what JSON and a command line can carry. Each may also be None, where its type says so.
KINDS = (bool, int, float, str)
NONE = "none"  # how a command line writes None


def hyperparameter(
    default: Any,
    *,
    help: str,
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
) -> Any:
    """A field of a solver's dataclass, such as ``damping: float = hyperparameter(0.01, help="…", above=0, most=1)``.

    Args:
        default: its value where none is given.
        help: what it is, for the command line; without the default.
        least: the smallest value.
        most: the largest value.
        above: what every value exceeds.
    """
    bounds = {"least": least, "most": most, "above": above}
    given = {name: bound for name, bound in bounds.items() if bound is not None}
    return dataclasses.field(default=default, metadata={"help": help, **given})


def damping_option() -> Any:
    """The field ``damping`` of a solver that factors its Hessians, and grows it where that fails."""
    help = "share of the mean diagonal added to a Hessian before it is factored; it grows tenfold where that fails"
    return hyperparameter(0.01, help=help, above=0, most=MAX_DAMPING)


def options_of(cls: type) -> dict[str, dataclasses.Field[Any]]:
    """The hyperparameters of a solver's dataclass by name; each has its type as ``type``, and ``metadata["help"]``.

    Raises:
        MoonshotError: the class is no dataclass, or a field of it has no default, a type that no command line can
            give, or a default that is out of its own bounds.
    """
    require(
        dataclasses.is_dataclass(cls), f"{cls.__name__} is no dataclass: put @dataclass(frozen=True) under its name"
    )
    try:
        hints = typing.get_type_hints(cls)
    except NameError as error:
        raise MoonshotError(f"{cls.__name__}: an annotation cannot be read ({error})") from None
    found = {}
    for field in dataclasses.fields(cls):
        if not field.init:
            continue
        option = copy.copy(field)  # the class keeps its own, where the type may be a string
        option.type = hints[field.name]
        option.metadata = types.MappingProxyType({"help": "", **field.metadata})
        _check_declaration(cls, option)
        found[field.name] = option
    return found


def _check_declaration(cls: type, option: dataclasses.Field[Any]) -> None:
    name = f"{cls.__name__}.{option.name}"
    kind, _ = _kind(option)
    allowed = ", ".join(kind.__name__ for kind in KINDS)
    require(kind in KINDS, f"{name} has the type {option.type}: use one of {allowed}, or one of these | None")
    require(option.default is not dataclasses.MISSING, f"{name} has no default: give it one")
    try:
        check_option(option, option.default)
    except MoonshotError as error:
        raise MoonshotError(f"{cls.__name__}: the default {error}") from None


def _kind(option: dataclasses.Field[Any]) -> tuple[Any, bool]:
    """The type of a hyperparameter without None, and whether it may be None."""
    union = typing.get_origin(option.type) in (typing.Union, types.UnionType)
    kinds = typing.get_args(option.type) if union else (option.type,)
    others = [kind for kind in kinds if kind is not type(None)]
    return others[0] if len(others) == 1 else option.type, len(others) < len(kinds)


def _wanted(option: dataclasses.Field[Any]) -> str:
    """What a value has to be, for a message."""
    kind, optional = _kind(option)
    nouns = {bool: "True or False", int: "a whole number", float: "a number", str: "a string"}
    words = {"above": "above", "least": "at least", "most": "at most"}
    bounds = [f"{word} {option.metadata[bound]:g}" for bound, word in words.items() if bound in option.metadata]
    link = " " if "above" in option.metadata else " of "
    return nouns[kind] + (link + " and ".join(bounds) if bounds else "") + (", or None" if optional else "")


def check_option(option: dataclasses.Field[Any], value: Any) -> None:
    """Raise `MoonshotError` unless a hyperparameter may have a value; the message names both, and what it may be.

    Args:
        option: one of `options_of`.
        value: of any type; a whole number serves where a number is asked for.
    """
    kind, optional = _kind(option)
    if value is None and optional:
        return
    ok = isinstance(value, int | float if kind is float else kind) and (kind is bool or not isinstance(value, bool))
    bounds = option.metadata
    if ok and kind in (int, float):
        ok = (
            math.isfinite(value)
            and bounds.get("least", -math.inf) <= value <= bounds.get("most", math.inf)
            and value > bounds.get("above", -math.inf)
        )
    require(ok, f"{option.name}={value!r}: give {_wanted(option)}")


def check_options(cls: type, values: Mapping[str, Any], owner: str) -> None:
    """Raise `MoonshotError` unless a solver has hyperparameters of these names and may have these values.

    Args:
        cls: the solver's dataclass.
        values: by name; not every hyperparameter needs one.
        owner: how a message calls the solver, such as ``solver='obc'``.
    """
    options = options_of(cls)
    for name, value in values.items():
        listed = ", ".join(options) or "none"
        require(name in options, f"{name}={value!r}: {owner} has no such hyperparameter; it has {listed}")
        check_option(options[name], value)


def parse_option(option: dataclasses.Field[Any], text: str) -> Any:
    """The value of a hyperparameter that a command line gives as text, checked.

    Args:
        option: one of `options_of`.
        text: a number, "true" or "false", any string; "none" for None, where the type allows it.

    Raises:
        MoonshotError: the text is no such value, or one out of bounds.
    """
    kind, optional = _kind(option)
    value: Any = text
    if optional and text.lower() == NONE:
        value = None
    elif kind is bool:
        value = {"true": True, "false": False}.get(text.lower(), text)
    elif kind in (int, float):
        with contextlib.suppress(ValueError):  # the text itself is what the message shows
            value = kind(text)
    check_option(option, value)
    return value
