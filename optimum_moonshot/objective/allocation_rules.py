"""The grammar of an allocation by name: layers or regular expressions, each with a sparsity or n:m."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ..errors import MoonshotError, require
from .patterns import Pattern, Unstructured, parse_pattern

METHODS = ("uniform", "owl", "alpha")


def parse_rules(rules: dict) -> dict[str, Pattern]:
    """The user's own allocation: layer or expression → sparsity or "n:m", as patterns.

    Raises:
        MoonshotError: an entry that is neither, or a key that is no regular expression.
    """
    parsed = {}
    for key, value in rules.items():
        require(isinstance(key, str) and key != "", f"allocation: {key!r} is not the name of a layer or an expression")
        try:
            re.compile(key)
        except re.error as error:
            raise MoonshotError(f"allocation: {key!r} is not a regular expression ({error})") from None
        number = isinstance(value, int | float) and not isinstance(value, bool)
        usage = f'allocation[{key!r}]={value!r}: give a sparsity between 0 and 1, or "n:m"'
        require((number and 0 <= value <= 1) or isinstance(value, str) and ":" in value, usage)
        try:
            parsed[key] = Unstructured(float(value)) if number else parse_pattern(value, None)
        except MoonshotError as error:
            raise MoonshotError(f"allocation[{key!r}]: {error}") from None
    return parsed


def apply_rules(rules: dict[str, Pattern], names: Iterable[str], default: Pattern | None) -> dict[str, Pattern]:
    """Every layer's pattern: of the entry with its exact name, else of the first whose expression is found in it.

    A layer's whole name is no expression: it speaks of that layer alone.

    Args:
        rules: name or regular expression → pattern, in the order in which expressions decide.
        names: of all layers.
        default: for those without an entry; None where there is to be none.

    Raises:
        MoonshotError: a layer without an entry or default, or an entry that decides no layer.
    """
    names = list(names)
    expressions = [key for key in rules if key not in names]
    chosen = {
        name: name if name in rules else next((key for key in expressions if re.search(key, name)), None)
        for name in names
    }
    uncovered = [name for name, key in chosen.items() if key is None and default is None]
    require(
        not uncovered,
        f"allocation: no entry for {', '.join(uncovered[:3])}{'…' if len(uncovered) > 3 else ''}; add one, or set "
        "sparsity for what has none",
    )
    deciding = set(chosen.values())
    for key in (key for key in rules if key not in deciding):
        found = any(re.search(key, name) for name in names)
        why = "every layer that it is found in has an earlier entry" if found else "it is found in no pruned layer"
        raise MoonshotError(f"allocation: {key!r} decides nothing: {why}, such as {', '.join(names[:3])}")
    return {name: default if key is None else rules[key] for name, key in chosen.items()}
