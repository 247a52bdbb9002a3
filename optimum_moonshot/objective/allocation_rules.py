"""Allocation by name: rules that map layers or regular expressions to a sparsity or n:m."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from ..errors import MoonshotError, require
from .patterns import NM, MixedNM, Pattern, Structured, Unstructured, implies_sparsity, parse_pattern

METHODS = ("uniform", "owl", "alpha", "fisher")
NEEDING_DATA = ("owl", "fisher")  # with any solver


@dataclass(frozen=True)
class PatternRules:
    """The patterns of the layers as the configuration declares them, before an allocation method sets sparsities."""

    default: Pattern | MixedNM | None  # of layers without a rule; None if every layer needs one
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
        """Parse four fields of a configuration.

        With "n:4", the sparsities `allocated` by a method determine n for each of these layers, and others are dense.

        Raises:
            MoonshotError: an unknown pattern or method, a sparsity outside [0, 1], or an invalid entry.
        """
        check_allocation(allocation)
        rules = parse_rules(allocation) if isinstance(allocation, dict) else {}
        all_named = isinstance(allocation, dict) and pattern == Unstructured.kind and sparsity is None
        default = None if all_named else parse_pattern(pattern, sparsity, group_size)
        if isinstance(default, MixedNM) and allocated:
            patterns = {name: NM(round((1 - removed) * default.m), default.m) for name, removed in allocated.items()}
            return cls(default.choices[0], patterns)
        if isinstance(default, Structured):
            rules = {key: _structured(key, rule, default) for key, rule in rules.items()}
        return cls(default, rules)

    def of(self, names: Iterable[str]) -> dict[str, Pattern | MixedNM]:
        """The pattern of each layer, by name: the rule with its exact name, else the first whose expression matches.

        An expression may match a part of the name. A key that is the whole name of a layer applies to that layer only.

        Raises:
            MoonshotError: a layer without a rule or default, or a rule without effect.
        """
        names, rules, default = list(names), self.rules, self.default
        expressions = [key for key in rules if key not in names]
        keys = {
            name: name if name in rules else next((key for key in expressions if re.search(key, name)), None)
            for name in names
        }
        uncovered = [name for name, key in keys.items() if key is None and default is None]
        if uncovered:
            raise MoonshotError(
                f"no entry for {', '.join(uncovered[:3])}{'…' if len(uncovered) > 3 else ''}",
                field="allocation",
                hint="add one, or set `sparsity` for layers without one",
            )
        for key in (key for key in rules if key not in keys.values()):
            matches = any(re.search(key, name) for name in names)
            why = "each layer it matches has an earlier entry" if matches else "it matches no pruned layer"
            raise MoonshotError(f"{key!r} has no effect: {why}, such as {', '.join(names[:3])}", field="allocation")
        return {name: cast("Pattern | MixedNM", default) if key is None else rules[key] for name, key in keys.items()}

    def nm(self) -> list[NM]:
        """The n:m patterns among them, in order of m and n."""
        patterns = {pattern for pattern in (self.default, *self.rules.values()) if isinstance(pattern, NM)}
        return sorted(patterns, key=lambda pattern: (pattern.m, pattern.n))


def check_allocation(allocation: object) -> None:
    """Raise `MoonshotError` unless `allocation` is the name of a method or a dict with entries."""
    if isinstance(allocation, dict):
        require(bool(allocation), "it has no entry", field="allocation", value=allocation, hint="leave it out")
    elif not isinstance(allocation, str) or allocation not in METHODS:
        usage = 'use "uniform", "owl", "alpha", "fisher", or a dict of layer → sparsity or "n:m"'
        raise MoonshotError(usage, field="allocation", value=allocation)


def parse_rules(rules: dict[str, Any]) -> dict[str, Pattern]:
    """Parse an allocation by name: layer or expression → sparsity or "n:m"."""
    parsed: dict[str, Pattern] = {}
    for key, value in rules.items():
        named = isinstance(key, str) and key != ""
        require(named, f"{key!r} is not the name of a layer or an expression", field="allocation")
        try:
            re.compile(key)
        except re.error as error:
            raise MoonshotError(f"{key!r} is not a regular expression ({error})", field="allocation") from None
        number = isinstance(value, int | float) and not isinstance(value, bool)
        entry, usage = f"allocation[{key!r}]", 'give a sparsity between 0 and 1, or "n:m"'
        require((number and 0 <= value <= 1) or implies_sparsity(value), usage, field=entry, value=value)
        try:
            parsed[key] = Unstructured(float(value)) if number else cast(Pattern, parse_pattern(value, None))
        except MoonshotError as error:
            raise error.within(entry) from None
    return parsed


def _structured(key: str, rule: Pattern, default: Structured) -> Structured:
    """The rule of a structured pattern; raises `MoonshotError` for n:m."""
    usage, field = "give a sparsity between 0 and 1 with structured pruning", f"allocation[{key!r}]"
    require(isinstance(rule, Unstructured), usage, field=field, value=str(rule))
    return replace(default, sparsity=rule.sparsity)
