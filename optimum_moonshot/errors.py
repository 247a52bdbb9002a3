"""Errors a user can act on: each names the field, the value and a hint."""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

UNSET: Any = type("Unset", (), {"__repr__": lambda self: "UNSET"})()


@dataclass(frozen=True)
class Option:
    """A field of the public API, with the value to set it to: `lam=1` in Python, `--lam 1` on the command line."""

    name: str
    value: Any = UNSET

    def __str__(self) -> str:
        return self.name if self.value is UNSET else f"{self.name}={shown(self.value)}"


@dataclass(frozen=True)
class Text:
    """A message that mentions fields: a `str.format` template whose `{}` stand for them.

    Args:
        template: such as "raise {}, or lower {}".
        options: the fields, in order; a name stands for one without a value.
    """

    template: str
    options: tuple["Option | str", ...]

    def __init__(self, template: str, *options: "Option | str"):
        object.__setattr__(self, "template", template)
        object.__setattr__(self, "options", options)

    def render(self, option: Callable[[Option], str]) -> str:
        """The message, with each field as `option` writes it."""
        fields = (Option(each) if isinstance(each, str) else each for each in self.options)
        return self.template.format(*map(option, fields))

    def __str__(self) -> str:
        return self.render(str)


class MoonshotError(ValueError):
    """Input that cannot be pruned as asked. The model is left as it was.

    Reads ``field=value: message; hint``; `render` writes the fields in another form, as the command line does.

    Args:
        message: the reason, with the layer or file in front where there is one.
        field: the argument or the field of `MoonshotConfig` that is wrong, if it is one.
        value: of the field.
        hint: the fix.
    """

    def __init__(
        self, message: str | Text = "", *, field: str | None = None, value: Any = UNSET, hint: str | Text = ""
    ):
        super().__init__(message)
        self.message, self.field, self.value, self.hint = message, field, value, hint
        self.prefixes: tuple[str, ...] = ()

    def within(self, name: str) -> "MoonshotError":
        """The same error with the name of a layer or file in front."""
        self.prefixes = (name, *self.prefixes)
        return self

    def render(self, option: Callable[[Option], str] = str) -> str:
        """The whole message, with each field as `option` writes it."""
        texts = [each.render(option) if isinstance(each, Text) else each for each in (self.message, self.hint)]
        body = "; ".join(filter(None, texts))
        heads = [*self.prefixes, *([option(Option(self.field, self.value))] if self.field else [])]
        return ": ".join([*heads, *([body] if body else [])])

    def __str__(self) -> str:
        return self.render()


# The mend where something forbids a backward pass.
NO_BACKWARD = 'set lam=1, without allocation="fisher"'
MOST = 2**63 - 1  # the largest whole number that torch takes


def shown(value: Any, most: int = 80) -> str:
    """What a value looks like in a message, cut to `most` characters."""
    try:
        text = repr(value)
    except Exception:  # a whole number of thousands of digits, or an object of a user's
        return f"a {type(value).__name__}"
    return text if len(text) <= most else f"{text[: most - 1]}…"


def check_whole(name: str, value: Any, least: int) -> None:
    """Raise `MoonshotError` unless a field's value is a whole number that 64 bits hold.

    Args:
        name: of the field.
        value: what was given for it.
        least: it may have.
    """
    ok = isinstance(value, int) and not isinstance(value, bool)
    require(ok and value >= least, f"{name}={shown(value)}: give a whole number of at least {least}")
    require(value <= MOST, f"{name}={shown(value)}: give a whole number of at most {MOST}")


def check_number(name: str, value: Any, optional: bool = False) -> None:
    """Raise `MoonshotError` unless a field's value is a number, and not NaN.

    Args:
        name: of the field.
        value: what was given for it.
        optional: whether None will do.
    """
    if value is None and optional:
        return
    ok = isinstance(value, int | float) and not isinstance(value, bool) and value == value
    require(ok, f"{name}={shown(value)}: give a number")


def check_expressions(field: str, value: Any) -> tuple[str, ...] | None:
    """Regular expressions, checked.

    Args:
        field: the argument that they came with, "targets" or "ignore".
        value: a sequence of strings; for "targets" also None.

    Returns:
        A tuple of them; None where "targets" are not given.

    Raises:
        MoonshotError: another type, such as a string alone, or one that is no regular expression.
    """
    if value is None and field == "targets":
        return None
    listed = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    such = f", such as [{value!r}]" if isinstance(value, str) else ""
    require(listed, f"{field}={value!r}: give a list of expressions{such}")
    expressions = tuple(value)
    for expression in expressions:
        require(isinstance(expression, str), f"{field}: {expression!r} is not a string")
        try:
            re.compile(expression)
        except re.error as error:
            raise MoonshotError(f"{field}: {expression!r} is not a regular expression ({error})") from None
    return expressions


def check_path(name: str, value: Any) -> None:
    """Raise `MoonshotError` unless a field's value is a path, or something else in a string that is not empty.

    Args:
        name: of the field.
        value: what was given for it.
    """
    ok = isinstance(value, str | os.PathLike) and value != "" and "\0" not in str(value)
    require(ok, f"{name}={shown(value)}: give a path")


def reason(error: BaseException) -> str:
    """The first line of what an error says, or its name."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class FactorizationError(MoonshotError):
    """A layer's quadratic stayed singular at the largest damping tried."""


def require(
    condition: bool, message: str | Text, *, field: str | None = None, value: Any = UNSET, hint: str | Text = ""
) -> None:
    """Raise a `MoonshotError` unless a condition holds.

    Args:
        condition: to hold.
        message, field, value, hint: of the error.
    """
    if not condition:
        raise MoonshotError(message, field=field, value=value, hint=hint)


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Each `MoonshotError` inside begins with the layer's name, also given as that of its weight."""
    try:
        yield
    except MoonshotError as error:
        raise error.within(name.removesuffix(".weight")) from None
