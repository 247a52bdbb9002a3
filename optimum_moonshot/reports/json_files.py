"""JSON files of reports, read into dataclasses and checked against their annotations."""

import dataclasses
import functools
import json
import os
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints, is_typeddict

from ..errors import MAX_INT, MoonshotError, check_path, require
from ..files import read_json, replace_file

Report = TypeVar("Report")
# Numbers with their least and largest value; a plain float may be NaN or infinite, like a loss.
Fraction = Annotated[float, 0, 1]
Amount = Annotated[float, 0, float(MAX_INT)]
Count = Annotated[int, 0, MAX_INT]
Size = Annotated[int, 1, MAX_INT]
# Cached because a report has one object per layer.
_hints = functools.cache(functools.partial(get_type_hints, include_extras=True))
_NAMES = {float: "number", int: "whole number", str: "string", bool: "boolean"}


def save_json(values: Any, path: str | os.PathLike[str], name: str = "") -> Path:
    """Write JSON to a file, or to the file of that name in a folder; returns the path of the file."""
    check_path("path", path)
    path = Path(path)
    path = path / name if path.is_dir() else path
    replace_file(path, json.dumps(values, indent=2, ensure_ascii=False) + "\n")
    return path


def load_json(from_dict: Callable[[Any], Report], subject: str, path: str | os.PathLike[str], name: str = "") -> Report:
    """Read the report of a `subject` from a file, or from the file of that name in a folder.

    Raises:
        MoonshotError: there is no such file, or it is damaged.
    """
    check_path("path", path)
    path = Path(path)
    path = path / name if path.is_dir() else path
    try:
        return from_dict(read_json(path))
    except MoonshotError as error:
        raise MoonshotError(f"{path} is damaged: it is not the report of {subject} ({error})") from None


class JsonFields:
    """A dataclass that is written as JSON, and read from it."""

    def to_dict(self) -> dict[str, Any]:
        """Convert the fields to JSON types; `from_dict` is the inverse."""
        return dataclasses.asdict(cast(Any, self))

    @classmethod
    def from_dict(cls: type[Report], values: Mapping[str, Any]) -> Report:
        """The inverse of `to_dict`.

        Raises:
            MoonshotError: a field that is missing, unknown, or of another type.
        """
        return cast(Report, check_fields(cls, values))


def check_fields(cls: Any, values: Any, where: str = "") -> Any:
    """Read an object with the fields of a class, each of its type.

    Args:
        cls: a dataclass, for objects without other fields, or a `TypedDict`, for objects that may have others.
        values: the object, as JSON types; an int is accepted as a float.
        where: name of the object in messages.

    Returns:
        The instance of the dataclass; for a `TypedDict` the unchanged object.

    Raises:
        MoonshotError: a field that is missing, unknown or of another type.
    """
    hints = _hints(cls)
    if is_typeddict(cls):
        required = set(cls.__required_keys__)
    else:
        fields = {field.name: field for field in dataclasses.fields(cls)}
        hints = {name: hints[name] for name in fields}
        required = {n for n, f in fields.items() if f.default is f.default_factory is dataclasses.MISSING}
    require(isinstance(values, Mapping), f"{where or 'it'} is not an object")
    prefix = f"{where}." if where else ""
    for name in sorted(required - set(values)):
        raise MoonshotError(f"{prefix}{name} is missing")
    read: dict[str, Any] = {}
    for name, value in values.items():
        unknown = name if name.isidentifier() else repr(name)
        require(name in hints or is_typeddict(cls), f"{prefix}{unknown} is an unknown field")
        read[name] = check_value(hints.get(name, Any), value, prefix + name)
    return values if is_typeddict(cls) else cls(**read)


def check_value(hint: Any, value: Any, where: str) -> Any:
    """Read a value, as JSON types, of the type of an annotation; `where` is its name in messages.

    The annotation is a plain type, one with bounds, literals, a union, a list, tuple or dict of such, or a class with
    fields.
    """
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        check_value(inner[0], value, where)
        least, largest = inner[1:]
        require(least <= value <= largest, f"must be from {least} to {largest}", field=where, value=value)
    elif origin is Literal:
        require(value in inner, f"must be one of {', '.join(inner)}", field=where, value=value)
    elif origin in (Union, types.UnionType):
        kinds = [kind for kind in inner if kind is not type(None)]
        if value is not None or len(kinds) == len(inner):
            return check_value(kinds[0], value, where)
    elif is_typeddict(hint) or dataclasses.is_dataclass(hint):
        return check_fields(hint, value, where)
    elif origin is dict:
        require(isinstance(value, Mapping), "must be an object", field=where, value=value)
        return {name: check_value(inner[1], entry, f"{where}[{name!r}]") for name, entry in value.items()}
    elif origin in (list, tuple):
        require(isinstance(value, list | tuple), "must be a list", field=where, value=value)
        fixed = origin is tuple and inner[-1] is not Ellipsis
        require(not fixed or len(value) == len(inner), f"must have {len(inner)} entries", field=where, value=value)
        hints = inner if fixed else inner[:1] * len(value)
        numbered = enumerate(zip(hints, value, strict=True))
        entries = [check_value(hint, entry, f"{where}[{index}]") for index, (hint, entry) in numbered]
        return tuple(entries) if origin is tuple else entries
    elif hint is not Any:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        valid = number if hint is float else isinstance(value, hint) and (hint is bool or not isinstance(value, bool))
        require(valid, f"must be a {_NAMES.get(hint, hint.__name__)}", field=where, value=value)
        fits = not isinstance(value, int) or abs(value) <= MAX_INT
        require(fits, f"must be at most {MAX_INT}", field=where, value=value)
    return value
