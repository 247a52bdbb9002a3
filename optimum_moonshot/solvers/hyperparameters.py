"""Hyperparameters of a solver: fields of its dataclass, each a number with optional bounds, a bool or a string.

The configuration and the command line read names, types, defaults, bounds and help from the fields, so each is declared
once.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import math
import types
import typing
from collections.abc import Mapping
from typing import Any

from ..errors import MAX_INT, MoonshotError, Option, Text, require
from ..objective.linalg import MAX_DAMPING
from ..options import kind_of, limits, within

# Types that both JSON and a command line can express; a hyperparameter may also be optional (`| None`).
KINDS = (bool, int, float, str)
_hints = functools.cache(typing.get_type_hints)  # of a class; reading them takes longer than many a small solve


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


def check_options(cls: type, values: Mapping[str, Any], owner: Option) -> None:
    """Raise `MoonshotError` unless a solver has hyperparameters of these names, and the values are valid.

    `owner` is the option that names the solver, for the message.
    """
    options = options_of(cls)
    for name, value in values.items():
        if name not in options:
            hint = f"it has {', '.join(options) or 'none'}"
            raise MoonshotError(Text("{} has no such hyperparameter", owner), field=name, value=value, hint=hint)
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
