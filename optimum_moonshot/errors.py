"""Errors that users can fix: each names the field, its value and a hint."""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any

MAX_INT = 2**63 - 1  # the largest integer that torch accepts
_PLAIN = (bool, int, float, str, type(None))


class Unset(Enum):
    """A field without a value; pickling and copying return the same object."""

    UNSET = "unset"


UNSET = Unset.UNSET


class _Repr(str):
    """The representation of a value that remains of it in a pickled error."""

    __repr__ = str.__str__


class MoonshotError(ValueError):
    """Input that cannot be pruned as requested. The model is unchanged.

    Reads ``field=value: message; hint``. Other fields are mentioned in the same form, such as batch_size or lam=1;
    the command line shows them as its options.

    Args:
        message: the reason.
        field: the argument or the field of `MoonshotConfig` that is wrong, if it is one.
        value: of the field.
        hint: the fix.
    """

    def __init__(self, message: str = "", *, field: str | None = None, value: Any = UNSET, hint: str = ""):
        super().__init__(message)
        self.message, self.field, self.value, self.hint = message, field, value, hint
        self.prefixes: tuple[str, ...] = ()

    @classmethod
    def of(cls, error: "MoonshotError") -> "MoonshotError":
        """Return an error of this class with the structure of another."""
        copy = cls(error.message, field=error.field, value=error.value, hint=error.hint)
        copy.prefixes = error.prefixes
        return copy

    def within(self, name: str) -> "MoonshotError":
        """Return this error with a layer, a file or a field prepended."""
        self.prefixes = (name, *self.prefixes)
        return self

    def render(self, field: Callable[[str, Any], str], text: Callable[[str], str] = str) -> str:
        """Return the whole message: `field` formats the field with its value, `text` the prefixes, message and hint."""
        heads = [*map(text, self.prefixes), *([field(self.field, self.value)] if self.field else [])]
        return ": ".join(filter(None, [*heads, "; ".join(filter(None, map(text, (self.message, self.hint))))]))

    def __str__(self) -> str:
        return self.render(field_text)

    def __reduce__(self) -> tuple[Any, ...]:
        # The value may be anything that a user passed: a model, a generator, a lambda.
        items = self.value if isinstance(self.value, list | tuple) else [self.value]
        plain = self.value is UNSET or all(isinstance(item, _PLAIN) for item in items)
        value = self.value if plain else _Repr(truncated_repr(self.value))
        return type(self), (self.message,), {**self.__dict__, "value": value}


class FactorizationError(MoonshotError):
    """A layer's quadratic stayed singular at the largest damping tried."""


# The hints where something forbids a backward pass, and where values are NaN or infinite.
NO_BACKWARD = "set lam=1, without allocation='fisher'"
NOT_FINITE = "check the model's weights and dtype (float16 overflows; use bfloat16)"


def field_text(name: str, value: Any) -> str:
    """Format a field as in Python: its name, and its value unless that is `UNSET`."""
    return name if value is UNSET else f"{name}={truncated_repr(value)}"


def truncated_repr(value: Any, most: int = 80) -> str:
    """Return the representation of a value for a message, cut to `most` characters; paths are not cut."""
    if isinstance(value, os.PathLike):
        return repr(str(value))
    try:
        text = repr(value)
    except Exception:  # an integer of thousands of digits, or an object whose `__repr__` fails
        return f"a {type(value).__name__}"
    return text if len(text) <= most else f"{text[: most - 1]}…"


def require(condition: bool, message: str, *, field: str | None = None, value: Any = UNSET, hint: str = "") -> None:
    """Raise a `MoonshotError`, with these arguments, unless a condition holds."""
    if not condition:
        raise MoonshotError(message, field=field, value=value, hint=hint)


def check_whole(name: str, value: Any, least: int) -> None:
    """Raise `MoonshotError` unless a value is an integer of at least `least` that 64 bits hold."""
    ok = isinstance(value, int) and not isinstance(value, bool)
    require(ok and value >= least, f"give a whole number of at least {least}", field=name, value=value)
    require(value <= MAX_INT, f"give a whole number of at most {MAX_INT}", field=name, value=value)


def check_number(name: str, value: Any, optional: bool = False) -> None:
    """Raise `MoonshotError` unless a value is a number, and not NaN."""
    if value is None and optional:
        return
    ok = isinstance(value, int | float) and not isinstance(value, bool) and value == value
    require(ok, "give a number", field=name, value=value)
    fits = isinstance(value, float) or abs(value) <= MAX_INT  # larger integers are no floats
    require(fits, f"give a number of at most {MAX_INT}", field=name, value=value)


def check_choice(name: str, value: Any, choices: Sequence[str], optional: bool = False) -> None:
    """Raise `MoonshotError` unless a value is one of some strings."""
    ok = (isinstance(value, str) and value in choices) or (value is None and optional)
    names = " or ".join(f'"{choice}"' for choice in choices)
    require(ok, f"use {names}{', or None' if optional else ''}", field=name, value=value)


def check_expressions(field: str, value: Any) -> tuple[str, ...] | None:
    """Return a list of regular expressions as a tuple, for "targets" also None; `MoonshotError` for anything else."""
    if value is None and field == "targets":
        return None
    listed = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    such = f", such as [{value!r}]" if isinstance(value, str) else ""
    require(listed, f"give a list of expressions{such}", field=field, value=value)
    expressions = tuple(value)
    for expression in expressions:
        require(isinstance(expression, str), f"{truncated_repr(expression)} is not a string", field=field)
        try:
            re.compile(expression)
        except re.error as error:
            raise MoonshotError(f"{expression!r} is not a regular expression ({error})", field=field) from None
    return expressions


def check_path(name: str, value: Any) -> None:
    """Raise `MoonshotError` unless a value is a path, or another string that is not empty."""
    ok = isinstance(value, str | os.PathLike) and value != "" and "\0" not in str(value)
    require(ok, "give a path", field=name, value=value)


def reason(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its type."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def one_line(error: BaseException) -> str:
    """Return the message of an error without line breaks, or the name of its type."""
    return " ".join(str(error).split()) or type(error).__name__


@contextmanager
def error_context(name: str) -> Iterator[None]:
    """Prepend the name of a layer, also given as that of its weight, to every `MoonshotError` raised inside."""
    try:
        yield
    except MoonshotError as error:
        raise error.within(name.removesuffix(".weight")) from None
