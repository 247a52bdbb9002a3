"""The grammar of an allocation by name: layers or regular expressions, each with a sparsity or n:m."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from ..errors import MoonshotError, require
from .patterns import NM, MixedNM, Pattern, Unstructured, own_sparsity, parse_pattern

METHODS = ("uniform", "owl", "alpha", "fisher")
NEEDING_DATA = ("owl", "fisher")  # whatever the solver


@dataclass(frozen=True)
class PatternRules:
    """Every layer's pattern, as far as it is known before the model is: all but the shares that a method gives."""

    default: Pattern | MixedNM | None  # of the layers that no rule decides; None where all layers need one
    rules: Mapping[str, Pattern]  # layer or expression → pattern; empty without an allocation by name

    @classmethod
    def parse(
        cls,
        pattern: str,
        sparsity: float | None,
        group_size: int,
        allocation: str | dict[str, float | str],
        allocated: Mapping[str, float] | None = None,
    ) -> PatternRules:
        """From the four fields of a configuration that say it.

        Args:
            pattern: "unstructured", "structured", "n:m" or, with a literal n, "n:4".
            sparsity: share of the weights (of the groups of columns) to remove; follows from n:m.
            group_size: columns that go or stay together, where they are structured.
            allocation: a method's name, or a layer's name or expression → sparsity or "n:m".
            allocated: layer → the sparsity that a method gave it, once that is known; "n:4" says by it which layer has
                which n, and that all others are dense.

        Raises:
            MoonshotError: an unknown pattern or method, a sparsity outside [0, 1], or an entry that is neither of both.
        """
        check_allocation(allocation)
        rules = parse_rules(allocation) if isinstance(allocation, dict) else {}
        all_named = isinstance(allocation, dict) and pattern == Unstructured.kind and sparsity is None
        default = None if all_named else parse_pattern(pattern, sparsity, group_size)
        if isinstance(default, MixedNM) and allocated:
            given = {name: NM(round((1 - share) * default.m), default.m) for name, share in allocated.items()}
            return cls(default.choices[0], given)
        return cls(default, rules)

    def of(self, names: Iterable[str]) -> dict[str, Pattern | MixedNM]:
        """Every layer's pattern.

        Raises:
            MoonshotError: a layer without an entry or default, or an entry that decides no layer.
        """
        if self.rules:
            return apply_rules(self.rules, names, self.default)
        assert self.default is not None  # only an allocation by name goes without
        return dict.fromkeys(names, self.default)

    def nm(self) -> list[NM]:
        """The n:m patterns among them, short groups first."""
        found = {pattern for pattern in (self.default, *self.rules.values()) if isinstance(pattern, NM)}
        return sorted(found, key=lambda pattern: (pattern.m, pattern.n))


def check_allocation(allocation: object) -> None:
    """Raise `MoonshotError` unless this is a method's name or a dict with entries."""
    named = isinstance(allocation, dict)
    require(
        named or (isinstance(allocation, str) and allocation in METHODS),
        f'allocation={allocation!r}: use "uniform", "owl", "alpha", "fisher", or a dict of layer → sparsity or "n:m"',
    )
    require(not named or bool(allocation), f"allocation={allocation!r}: it has no entry; leave it out")


def parse_rules(rules: dict[str, Any]) -> dict[str, Pattern]:
    """The user's own allocation: layer or expression → sparsity or "n:m", as patterns.

    Raises:
        MoonshotError: an entry that is neither, or a key that is no regular expression.
    """
    parsed: dict[str, Pattern] = {}
    for key, value in rules.items():
        require(isinstance(key, str) and key != "", f"allocation: {key!r} is not the name of a layer or an expression")
        try:
            re.compile(key)
        except re.error as error:
            raise MoonshotError(f"allocation: {key!r} is not a regular expression ({error})") from None
        number = isinstance(value, int | float) and not isinstance(value, bool)
        usage = f'allocation[{key!r}]={value!r}: give a sparsity between 0 and 1, or "n:m"'
        require((number and 0 <= value <= 1) or own_sparsity(value), usage)
        try:
            parsed[key] = Unstructured(float(value)) if number else cast(Pattern, parse_pattern(value, None))
        except MoonshotError as error:
            raise MoonshotError(f"allocation[{key!r}]: {error}") from None
    return parsed


def apply_rules(
    rules: Mapping[str, Pattern], names: Iterable[str], default: Pattern | MixedNM | None
) -> dict[str, Pattern | MixedNM]:
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
    return {name: cast("Pattern | MixedNM", default) if key is None else rules[key] for name, key in chosen.items()}
