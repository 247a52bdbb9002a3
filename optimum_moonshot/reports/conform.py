"""Check the content of JSON files against the annotations of the dataclass that they are read into."""

import dataclasses
import types
from collections.abc import Mapping
from typing import Any, Union, get_args, get_origin, get_type_hints, is_typeddict

from ..errors import MoonshotError, require


def check_fields(cls: Any, values: Any, where: str = "") -> None:
    """Raise `MoonshotError` unless an object has the fields of a class, each of its type.

    Args:
        cls: a dataclass, for objects without other fields, or a `TypedDict`, for objects that may have others.
        values: the object, as JSON types; an int is accepted as a float.
        where: name of the object in messages.

    Raises:
        MoonshotError: a field that is missing, unknown or of another type.
    """
    hints = get_type_hints(cls)
    if is_typeddict(cls):
        required = set(cls.__required_keys__)
    else:
        fields = {field.name: field for field in dataclasses.fields(cls)}
        hints = {name: hints[name] for name in fields}
        missing = dataclasses.MISSING
        required = {n for n, field in fields.items() if field.default is missing and field.default_factory is missing}
    require(isinstance(values, Mapping), f"{where or 'it'} is not an object")
    prefix = f"{where}." if where else ""
    for name in sorted(required - set(values)):
        raise MoonshotError(f"{prefix}{name} is missing")
    for name, value in values.items():
        require(name in hints or is_typeddict(cls), f"{prefix}{name} is an unknown field")
        check_value(hints.get(name, Any), value, prefix + name)


def check_value(hint: Any, value: Any, where: str) -> None:
    """Raise `MoonshotError` unless a value, as JSON types, has the type of an annotation.

    Args:
        hint: a resolved annotation: a plain type, a union, a list, tuple or dict of such, or a class with fields.
        value: to check.
        where: its name in messages.
    """
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        kinds = [kind for kind in inner if kind is not type(None)]
        if value is not None or len(kinds) == len(inner):
            check_value(kinds[0], value, where)
    elif is_typeddict(hint) or dataclasses.is_dataclass(hint):
        check_fields(hint, value, where)
    elif origin is dict:
        require(isinstance(value, Mapping), "must be an object", field=where, value=value)
        for name, entry in value.items():
            check_value(inner[1], entry, f"{where}[{name!r}]")
    elif origin in (list, tuple):
        require(isinstance(value, list | tuple), "must be a list", field=where, value=value)
        fixed = origin is tuple and inner[-1] is not Ellipsis
        require(not fixed or len(value) == len(inner), f"must have {len(inner)} entries", field=where, value=value)
        for index, entry in enumerate(value):
            check_value(inner[index] if fixed else inner[0], entry, f"{where}[{index}]")
    elif hint is not Any:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        good = number if hint is float else isinstance(value, hint) and (hint is bool or not isinstance(value, bool))
        require(good, f"must be a {_NAMES.get(hint, hint.__name__)}", field=where, value=value)


_NAMES = {float: "number", int: "whole number", str: "string", bool: "boolean"}
