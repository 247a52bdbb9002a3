"""`MoonshotConfig`: all settings of a pruning run, validated on construction; `options.py` declares its fields.

An allocation by name maps layers or regular expressions to a sparsity or n:m: `PatternRules`.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, cast

from .errors import MAX_INT, MoonshotError, check_choice, check_expressions, check_number, require, truncated_repr
from .objective.grid import BITS, Grid
from .objective.patterns import (
    NM,
    Experts,
    MixedNM,
    Pattern,
    Structured,
    Unstructured,
    implies_sparsity,
    parse_pattern,
)
from .options import (
    ALLOCATION,
    DEFAULT_FISHER,
    DEFAULT_LAM,
    OF_THE_MACHINE,
    OPTIONS,
    RECIPES,
    RECOVERY_DEFAULTS,
    SHARED_OPTIONS,
    Options,
    check_values,
    documented,
)
from .solvers.base import Solver, check_option, check_options, make_solver, options_of, solver_class, solver_names

UNROUNDED = 16  # `embedding_bits` of embeddings that stay as they are
EMBEDDING_BITS = (8, 4, UNROUNDED)
ALLOCATIONS = ("uniform", "owl", "alpha", "fisher")
NEEDING_DATA = ("owl", "fisher")  # with any solver


@dataclasses.dataclass(frozen=True)
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
    ) -> "PatternRules":
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
    elif not isinstance(allocation, str) or allocation not in ALLOCATIONS:
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
    return dataclasses.replace(default, sparsity=rule.sparsity)


class _SolverDefault(float):
    """A hyperparameter with the solver's default: `dataclasses.replace` with another solver uses that one's default."""


@documented
@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class MoonshotConfig(Options):
    """The settings of a pruning run.

    Raises:
        MoonshotError: a value of the wrong type or out of range, or two contradictory values.
    """

    VERSION: ClassVar[int] = 2  # of `to_dict`
    quant_method: ClassVar[str] = "moonshot"  # the name of the quantizer that transformers selects

    def __post_init__(self) -> None:
        solver = solver_class(self.solver)
        for field in ("targets", "ignore"):
            object.__setattr__(self, field, check_expressions(field, getattr(self, field)))
        self._set_dense_pattern()
        check_values(self)
        _ = self.target_bytes_number, Grid(8 if self.bits is None else self.bits, self.quant_group)  # raise if invalid
        if self.embedding_bits is None:
            object.__setattr__(self, "embedding_bits", UNROUNDED)
        bits = self.embedding_bits
        self._require(type(bits) is int and bits in EMBEDDING_BITS, "embedding_bits", "give 8, 4, or 16 for none")
        check_allocation(self.allocation)
        self._check_combinations()
        if isinstance(self.allocation, dict):
            object.__setattr__(self, "allocation", dict(self.allocation))
        self._check_pattern(solver)
        self._set_solver_options(solver)
        _ = self.max_memory_bytes  # raises if invalid

    def _set_dense_pattern(self) -> None:
        """Without a pattern, or without anything to remove, `bits` quantizes all weights."""
        if cast(str | None, self.pattern) is None:
            self._require(self.bits is not None, "pattern", "give a pattern, or bits")
            self._require(not self.sparsity, "sparsity", "give a pattern")
            object.__setattr__(self, "pattern", Unstructured.kind)
        elif not isinstance(self.pattern, str):
            parse_pattern(self.pattern, None)  # raises
        nothing = self.pattern == Unstructured.kind and self.sparsity is None
        if nothing and (self.has_budget or (self.bits is not None and self.allocation == "uniform")):
            object.__setattr__(self, "sparsity", 0.0)

    def _require(self, condition: bool, field: str, message: str, hint: str = "") -> None:
        require(condition, message, field=field, value=getattr(self, field), hint=hint)

    def _check_combinations(self) -> None:
        """Raise `MoonshotError` for options that exclude each other."""
        pattern = f"pattern={self.pattern!r}"
        structured, experts = self.pattern == Structured.kind, self.pattern == Experts.kind
        by_fisher, mixed = self.allocation == "fisher", self.pattern.startswith("n:")
        hint = "add allocation='fisher', or give a number for n"
        self._require(by_fisher or not mixed, "pattern", "its n:m of each layer is chosen by an allocation", hint)
        divides = self.allocation == "uniform" or isinstance(self.allocation, dict)
        divides |= self.pattern == Unstructured.kind or (by_fisher and (mixed or structured))
        by_layer = ', or "n:4" for 1:4, 2:4 and 3:4 by layer' if by_fisher else ""
        hint = f'use pattern={Unstructured.kind!r}, or a dict of layer → "n:m"{by_layer}'
        self._require(divides, "allocation", f"{pattern} has equal sparsity in every layer", hint)
        message = f"{pattern} removes neurons and heads as they are; leave one of them out"
        self._require(self.rotation is None or not structured, "rotation", message)
        message = f"{pattern} removes experts at once; use recover='blockwise'"
        self._require(self.recover != "gradual" or not experts, "recover", message)
        if self.has_budget:
            budget = "target_bytes" if self.bits_per_weight is None else "bits_per_weight"
            self._require(None in (self.target_bytes, self.bits_per_weight), budget, "give it or target_bytes")
            size = f"{budget}={getattr(self, budget)!r}"
            message = f"{size} determines the sparsity of each matrix; leave it out"
            self._require(self.pattern == Unstructured.kind, "pattern", message)
            self._require(not self.sparsity, "sparsity", message)
            self._require(by_fisher, "allocation", f"only allocation='fisher' divides {size} among the matrices")
        rounds = self.bits is not None or self.has_budget or self.embedding_bits != 4
        message = "only a model with quantized layers has quantized embeddings; give `bits` too"
        self._require(rounds, "embedding_bits", message)
        message = f"{pattern} removes weights from the groups that share a scale"
        hint = "quantize the smaller model in a second run, with `bits` alone"
        self._require(self.bits is None or not (structured or experts), "bits", message, hint)

    def _check_pattern(self, solver: type[Solver]) -> None:
        """Raise `MoonshotError` if the solver does not support a pattern, or an option has no effect on experts."""
        rules = self.pattern_rules
        message = f"solver={self.solver!r} takes {' or '.join(kind.kind for kind in solver.patterns)}"
        default = rules.default.choices[0] if isinstance(rules.default, MixedNM) else rules.default
        hint = "choose another pattern or solver"
        if isinstance(default, Experts):
            hint = "choose solver=" + " or ".join(f'"{name}"' for name in solver_names(Experts))
        self._require(default is None or isinstance(default, solver.patterns), "pattern", message, hint)
        for key, rule in rules.rules.items():
            entry = cast(dict[str, Any], self.allocation)[key]
            require(isinstance(rule, solver.patterns), message, field=f"allocation[{key!r}]", value=entry)
        for name, field in OPTIONS.items():
            why = field.metadata.get("experts")
            valid = why is None or self.pattern != Experts.kind or getattr(self, name) in (field.default, False)
            self._require(valid, name, f"pattern={self.pattern!r} {why}; leave one of them out")

    def _set_solver_options(self, solver: type[Solver]) -> None:
        """Check the solver's hyperparameters, and store each once: the shared ones in their fields."""
        options = self.solver_options
        named = isinstance(options, Mapping) and all(isinstance(name, str) for name in options)
        self._require(named, "solver_options", "give a dict of name → value")
        declared, values = options_of(solver), dict(options)
        for name in SHARED_OPTIONS:
            explicit = self._explicit(name)
            if explicit is None:
                continue
            if name in values and explicit != values[name]:
                message = f"solver_options[{name!r}]={truncated_repr(values[name])} is another value; give it once"
                raise MoonshotError(message, field=name, value=explicit)
            # Checked without effect too: the next solver may use it.
            check_option((declared if name in declared else options_of(solver_class("sparsegpt")))[name], explicit)
        try:
            check_options(solver, values, f"solver={self.solver!r}")
        except MoonshotError as error:
            raise error.within("solver_options") from None
        for name in SHARED_OPTIONS:
            object.__setattr__(self, name, self._explicit(name) if values.get(name) is None else values.pop(name))
        default = declared["damping"].default if "damping" in declared and "damping" not in values else None
        if self.damping is None and isinstance(default, float):
            object.__setattr__(self, "damping", _SolverDefault(default))
        object.__setattr__(self, "solver_options", {name: values[name] for name in declared if name in values})
        _ = self._hyperparameters  # raises for hyperparameters that do not fit together

    def _explicit(self, name: str) -> Any:
        """Return a shared option's value; None for the solver's default."""
        value = getattr(self, name)
        return None if isinstance(value, _SolverDefault) else value

    @property
    def has_budget(self) -> bool:
        """Whether an allocation divides a number of bytes."""
        return self.target_bytes is not None or self.bits_per_weight is not None

    @cached_property
    def pattern_rules(self) -> PatternRules:
        """The pattern of each layer."""
        return PatternRules.parse(self.pattern, self.sparsity, self.group_size, self.allocation)

    @property
    def parsed_pattern(self) -> Pattern | MixedNM | None:
        """`pattern`, `sparsity` and `group_size` as one object; None if only an allocation by name is given."""
        return self.pattern_rules.default

    @cached_property
    def grid(self) -> Grid | None:
        """`bits` and `quant_group` as one object; None without bits."""
        return None if self.bits is None else Grid(self.bits, self.quant_group)

    @property
    def embedding_grid(self) -> Grid | None:
        """The grid of the word embeddings and the head, in float32; None if they are not rounded."""
        rounds = (self.bits is not None or self.has_budget) and self.embedding_bits in BITS
        return Grid(cast(int, self.embedding_bits), self.quant_group) if rounds else None

    @cached_property
    def target_bytes_number(self) -> int | None:
        """`target_bytes` as a number."""
        return None if self.target_bytes is None else memory_size("target_bytes", self.target_bytes)

    @cached_property
    def max_memory_bytes(self) -> int | None:
        """`max_memory` in bytes."""
        return None if self.max_memory is None else memory_size("max_memory", self.max_memory)

    @property
    def distills(self) -> bool:
        """Whether a recovery trains the model end to end."""
        return self.recover in ("distill", "routers")

    @property
    def recovery_steps(self) -> int:
        """`recover_steps`, or the default."""
        return RECOVERY_DEFAULTS[self.recover or "blockwise"][0] if self.recover_steps is None else self.recover_steps

    @property
    def recovery_lr(self) -> float:
        """`recover_lr`, or the default."""
        return RECOVERY_DEFAULTS[self.recover or "blockwise"][1] if self.recover_lr is None else self.recover_lr

    def make_solver(self) -> Solver:
        """Return the solver with its hyperparameters."""
        return self._made_solver

    @cached_property
    def _made_solver(self) -> Solver:
        """The solver, made once: it is immutable."""
        declared = options_of(solver_class(self.solver))
        shared = {name: self._explicit(name) for name in SHARED_OPTIONS if name in declared}
        explicit = {name: value for name, value in shared.items() if value is not None}
        return make_solver(self.solver, {**explicit, **self.solver_options})

    def hyperparameters(self) -> dict[str, Any]:
        """Return all hyperparameters of the solver with their values."""
        return dict(self._hyperparameters)

    @cached_property
    def _hyperparameters(self) -> dict[str, Any]:
        return {name: getattr(self._made_solver, name) for name in options_of(type(self._made_solver))}

    def resolve_lam(self, kind: str = "language") -> float:
        """Return λ, by default the paper's for this kind of model ("language" or "vision").

        Magnitude pruning has no objective to balance: the default in its report is 1.
        """
        if self.lam is not None:
            return float(self.lam)
        return DEFAULT_LAM[kind] if solver_class(self.solver).calibrated else 1.0

    def resolve_fisher(self, kind: str = "language") -> str:
        """Return `fisher`, by default that of this kind of model ("language" or "vision")."""
        return DEFAULT_FISHER[kind] if self.fisher is None else self.fisher

    def __repr__(self) -> str:
        """The fields that differ from the defaults."""
        changed = []
        for name, field in OPTIONS.items():
            value, default = getattr(self, name), {} if name == "solver_options" else field.default
            if field.repr and value != default and not isinstance(value, _SolverDefault):
                changed.append(f"{name}={value!r}")
        return f"{type(self).__name__}({', '.join(changed)})"

    def __deepcopy__(self, memo: dict[int, Any]) -> "MoonshotConfig":
        """Return this object: it is immutable, and its data may be large, or an iterator that cannot be copied."""
        return self

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON types, with the version of this format, without `calibration`."""
        values = {name: getattr(self, name) for name, field in OPTIONS.items() if field.compare}
        copied: dict[type, Callable[[Any], Any]] = {tuple: list, dict: dict}
        values = {name: copied.get(type(value), lambda value: value)(value) for name, value in values.items()}
        values["damping"] = None if self.damping is None else float(self.damping)
        return {"version": self.VERSION, **values}

    def fingerprint(self) -> str:
        """Return all settings that change the result, as text: equal for equal settings, however they were given."""
        values = self.to_dict()
        for name in (*OF_THE_MACHINE, "solver_options", *SHARED_OPTIONS):
            del values[name]
        for name, value in self.hyperparameters().items():
            values[name if name in SHARED_OPTIONS else f'solver_options["{name}"]'] = value
        return json.dumps(_whole_numbers(values))

    @classmethod
    def recipe(cls, pattern: str | float | None = None, budget: str = "fast", **changes: Any) -> "MoonshotConfig":
        """Return the settings that the measurements recommend (docs/choosing.md).

        Args:
            pattern: the fraction of the weights to remove, "n:m", or "n:4" with a `sparsity`; None with a size.
            budget: "fast" is the solver ALPS with a Fisher term that the rows share: at a sparsity or a size with λ =
                0.5 and a sparsity for each layer; for n:m with λ = 0.9. "one-shot" is "fast" in a learned basis,
                for n:m with λ = 1: it gains much on models of a few million parameters, 2% to 5% of the perplexity of
                SmolLM2-135M, at two to four times the cost. "recovered" is "fast", for n:m with λ = 1, and 40 steps of
                distillation from the dense model where 16 to 20 bytes per parameter fit, else block by block. "paper"
                is the paper's setting: SparseGPT, λ = 0.9, a Fisher term per row, equal sparsity in every layer.
            changes: fields with other values.

        Raises:
            MoonshotError: an unknown budget, a pattern without a recipe, or contradictory fields.
        """
        check_choice("budget", budget, tuple(RECIPES))
        message = f"no recipe of {truncated_repr(pattern)}"
        hint = 'give a sparsity such as 0.7, "n:m" such as "2:4", "n:4" with `sparsity`, or a size'
        if pattern is None and (changes.get("bits_per_weight") or changes.get("target_bytes")):
            pattern = 0.0  # the size determines it
        number = isinstance(pattern, int | float) and not isinstance(pattern, bool)
        require(number or isinstance(pattern, str), message, hint=hint)
        fields = {"sparsity" if number else "pattern": pattern, **changes}
        parsed = parse_pattern(fields.get("pattern", Unstructured.kind), fields.get("sparsity"))
        require(not isinstance(parsed, Structured | Experts), message, hint=hint)
        unstructured, fixed = RECIPES[budget]
        mixed = ALLOCATION if isinstance(parsed, MixedNM) else {}
        return cls(**{**(fixed if isinstance(parsed, NM) else unstructured), **mixed, **fields})

    @classmethod
    def check_version(cls, version: Any) -> None:
        """Raise `MoonshotError` unless this release reads dictionaries of this version."""
        hint = f"this release reads configurations of version {cls.VERSION}"
        require(version == cls.VERSION, hint, field="version", value=version)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "MoonshotConfig":
        """Return the configuration of `to_dict`; `MoonshotError` for another version or an unknown field."""
        values = dict(values)
        cls.check_version(values.pop("version", cls.VERSION))
        _check_names(values)
        return cls(**values)

    def changed(self, values: Mapping[str, Any]) -> "MoonshotConfig":
        """Return a configuration with other values of some fields; `MoonshotError` for an unknown field."""
        _check_names(values)
        return dataclasses.replace(self, **values)


def _check_names(values: Mapping[str, Any]) -> None:
    unknown = sorted(set(values) - set(OPTIONS))
    require(not unknown, f"unknown field {', '.join(unknown)}: a MoonshotConfig has {', '.join(sorted(OPTIONS))}")


def _whole_numbers(values: Any) -> Any:
    """Replace 1.0 by 1, so that equal settings have equal text."""
    if isinstance(values, dict):
        return {name: _whole_numbers(value) for name, value in values.items()}
    return int(values) if isinstance(values, float) and values.is_integer() else values


def memory_size(field: str, value: Any) -> int:
    """Parse a size, bytes or text such as "8GiB"; `MoonshotError` for anything else, or less than one byte."""
    text = value if isinstance(value, str) else truncated_repr(value, most=400)
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(|[kmgt]i?b)\s*", text.lower())
    if match is None or isinstance(value, bool):
        raise MoonshotError('give bytes or a size such as "8GiB"', field=field, value=value)
    unit = match[2]
    power = 0 if not unit else "kmgt".index(unit[0]) + 1
    size = float(match[1]) * (1024 if unit.endswith("ib") else 1000) ** power
    require(1 <= size <= MAX_INT, f"give between 1 and {MAX_INT} bytes", field=field, value=value)
    return int(size)


def check_ranked(config: MoonshotConfig, sparsities: Sequence[float]) -> None:
    """Raise `MoonshotError` unless the solver ranks removals, the pattern is unstructured, the sparsities distinct."""
    ranking = [name for name in solver_names() if solver_class(name).ranks_removals]
    require(
        config.solver in ranking,
        "it does not support several sparsities",
        field="solver",
        value=config.solver,
        hint=f"use one of {', '.join(ranking)}, or prune for each sparsity",
    )
    if config.pattern != Unstructured.kind:
        hint = f"set pattern={Unstructured.kind!r}"
        raise MoonshotError("it implies a single sparsity", field="pattern", value=config.pattern, hint=hint)
    listed = isinstance(sparsities, Sequence) and not isinstance(sparsities, str) and len(sparsities) > 0
    require(listed, "give a list of numbers", field="sparsities", value=sparsities)
    for sparsity in sparsities:
        check_number("sparsities", sparsity)
    require(
        len(set(sparsities)) == len(sparsities), "a value is given twice", field="sparsities", value=list(sparsities)
    )
