"""Checks of the fields of `MoonshotConfig`, alone and together."""

import math
from collections.abc import Mapping
from typing import Any

from .errors import Option, Text, check_choice, check_number, check_path, check_whole, require
from .objective.allocation_rules import PatternRules, check_allocation
from .objective.patterns import Experts, MixedNM
from .solvers.base import Solver, solver_names

# Fields that may be None.
_OPTIONAL = {"recover", "recover_steps", "recover_lr", "rotation", "sequence_length", "rotation_rows"}
# Field → its strings.
_CHOICES = {
    "fisher": ("all", "attention"),
    "under_calibrated_experts": ("all", "magnitude", "routed"),
    "rotation_weights": ("fisher", "equal"),
    "recover": ("blockwise", "gradual", "distill"),
    "rotation": ("learned", "heads"),
}
# Field → the smallest value.
_WHOLE = {
    "group_size": 1,
    "num_samples": 1,
    "batch_size": 1,
    "recover_steps": 1,
    "rotation_steps": 1,
    "seed": 0,
    "sequence_length": 2,
    "rotation_rows": 1,
}
# Field → why it has no effect with pattern="experts".
_NOT_WITH_EXPERTS = {
    "targets": "removes equally many experts of every layer",
    "ignore": "removes equally many experts of every layer",
    "under_calibrated_experts": "uses the tokens routed to each expert, however few",
    "fisher": "uses the Fisher loss of the experts",
    "recompute": "computes all statistics on the dense model",
    "rotation": "removes experts as they are",
}
# Field → the smallest value, whether it is allowed, and the limit, which is not.
_INTERVALS = {
    "owl_threshold": (0, False, math.inf),
    "owl_lambda": (0, True, 1),
    "alpha_tau": (0, True, 1),
    "recover_lr": (0, False, 1),
    "rotation_lr": (0, False, 1),
}


def check_values(values: Mapping[str, Any]) -> None:
    """Raise `MoonshotError` for a field with the wrong type, or out of range."""
    check_number("sparsity", values["sparsity"], optional=True)
    budget = values["bits_per_weight"]
    check_number("bits_per_weight", budget, optional=True)
    require(budget is None or 0 < budget < math.inf, "give a number above 0", field="bits_per_weight", value=budget)
    for field, least in _WHOLE.items():
        if values[field] is not None or field not in _OPTIONAL:
            check_whole(field, values[field], least)
    for field, choices in _CHOICES.items():
        check_choice(field, values[field], choices, optional=field in _OPTIONAL)
    for field, (least, closed, limit) in _INTERVALS.items():
        value = values[field]
        check_number(field, value, optional=field in _OPTIONAL)
        if value is None:
            continue
        bounds = f"{'at least' if closed else 'above'} {least}" + ("" if limit == math.inf else f" and below {limit}")
        inside = (least <= value if closed else least < value) and value < limit
        require(inside, f"give a number {bounds}", field=field, value=value)
    require(isinstance(values["recompute"], bool), "use True or False", field="recompute", value=values["recompute"])
    lam, folder = values["lam"], values["offload_dir"]
    check_number("lam", lam, optional=True)
    require(lam is None or 0 <= lam <= 1, "give a number from 0 to 1", field="lam", value=lam)
    if folder is not None:
        check_path("offload_dir", folder)
        require(isinstance(folder, str), "give the path as a string", field="offload_dir", value=folder)


def check_combinations(values: Mapping[str, Any]) -> None:
    """Raise `MoonshotError` for an allocation or a rotation that the pattern excludes."""
    allocation, pattern, rotation = values["allocation"], values["pattern"], values["rotation"]
    check_allocation(allocation)
    named = isinstance(allocation, dict)
    mixed = isinstance(pattern, str) and pattern.startswith("n:")
    message, hint = "its n:m of each layer is chosen by an allocation", "add {}, or give a number for n"
    fisher = Option("allocation", "fisher")
    require(not mixed or allocation == "fisher", message, field="pattern", value=pattern, hint=Text(hint, fisher))
    supported = mixed or named or (allocation == "fisher" and pattern == "structured")
    hint = 'use {} or "n:m"' if named else 'use {}, or a dict of layer → "n:m"'
    hint += ', or "n:4" for 1:4, 2:4 and 3:4 by layer' if allocation == "fisher" else ""
    allowed = allocation == "uniform" or pattern == "unstructured" or supported
    equal = Text("{} has equal sparsity in every layer", Option("pattern", pattern))
    dividable = Text(hint, Option("pattern", "unstructured"))
    require(allowed, equal, field="allocation", value=allocation, hint=dividable)
    rigid = Text("{} removes neurons and heads as they are; leave one of them out", Option("pattern", pattern))
    require(rotation is None or pattern != "structured", rigid, field="rotation", value=rotation)
    at_once = Text("{} removes experts at once; use {}", Option("pattern", pattern), Option("recover", "blockwise"))
    staged = values["recover"] in ("gradual", "distill") and pattern == Experts.kind
    require(not staged, at_once, field="recover", value=values["recover"])
    _check_budget(values)
    smaller = Text("{} removes weights from the groups that share a scale", Option("pattern", pattern))
    again = Text("quantize the smaller model in a second run, with {} alone", "bits")
    kept = values["bits"] is None or pattern not in ("structured", Experts.kind)
    require(kept, smaller, field="bits", value=values["bits"], hint=again)


def _check_budget(values: Mapping[str, Any]) -> None:
    """Raise `MoonshotError` unless a budget of bytes is alone, and an allocation can divide it."""
    budgets = [name for name in ("target_bytes", "bits_per_weight") if values[name] is not None]
    if not budgets:
        return
    field, value = budgets[-1], values[budgets[-1]]
    require(len(budgets) == 1, Text("give it or {}", budgets[0]), field=field, value=value)
    message = Text("{} divides it", Option("allocation", "fisher"))
    require(values["allocation"] == "fisher", message, field="allocation", value=values["allocation"])
    message = Text("{} determines the sparsity of each matrix; leave it out", Option(field, value))
    require(values["pattern"] == "unstructured", message, field="pattern", value=values["pattern"])
    require(not values["sparsity"], message, field="sparsity", value=values["sparsity"])


def check_supported(solver: type[Solver], rules: PatternRules, values: Mapping[str, Any]) -> None:
    """Raise `MoonshotError` for a pattern of a layer that the solver does not support."""
    takes = f" takes {' or '.join(kind.kind for kind in solver.patterns)}"
    message = Text("{}" + takes, Option("solver", values["solver"]))
    default = rules.default.choices[0] if isinstance(rules.default, MixedNM) else rules.default
    hint = "choose another pattern or solver"
    if isinstance(default, Experts):
        hint = "choose solver=" + " or ".join(f'"{name}"' for name in solver_names(Experts))
    supported = default is None or isinstance(default, solver.patterns)
    require(supported, message, field="pattern", value=values["pattern"], hint=hint)
    for key, rule in rules.rules.items():
        supported = isinstance(rule, solver.patterns)
        require(supported, message, field=f"allocation[{key!r}]", value=values["allocation"][key])


def check_experts(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Raise `MoonshotError` for a field that has no effect with whole experts, and is not at its default."""
    for field, why in _NOT_WITH_EXPERTS.items():
        value = values[field]
        unset = value == defaults[field] or (field == "ignore" and not value)
        message = Text("{} " + why + "; leave one of them out", Option("pattern", Experts.kind))
        require(unset, message, field=field, value=value)
