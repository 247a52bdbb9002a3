"""Recommended settings for a pattern and a budget, by the measurements of `benchmarks/beyond.py` (docs/measured.md)."""

from typing import Any

from .errors import Text, check_choice, require, shown
from .objective.patterns import NM, Experts, MixedNM, Structured, Unstructured, parse_pattern

BUDGETS = ("paper", "one-shot", "recovered")
BASIS = {"solver": "alps", "rotation": "learned"}
ALLOCATION = {"allocation": "fisher"}
# budget → (unstructured, n:m): fields beside pattern and sparsity. Gradual recovery selects weights again by the
# reconstruction error alone, which would discard a selection by λ < 1; n:m has equal sparsity in every layer.
RECIPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "paper": ({}, {}),
    "one-shot": ({**BASIS, **ALLOCATION, "lam": 0.5}, {**BASIS, "lam": 0.9}),
    "recovered": (
        {**BASIS, **ALLOCATION, "lam": 1.0, "recover": "gradual"},
        {**BASIS, "lam": 0.9, "recover": "blockwise"},
    ),
}


def recipe(pattern: str | float, budget: str, changes: dict[str, Any]) -> dict[str, Any]:
    """The fields of a configuration for a sparsity or an n:m pattern, with changes; see `MoonshotConfig.recipe`.

    Raises:
        MoonshotError: an unknown budget, or a pattern without a recipe.
    """
    check_choice("budget", budget, BUDGETS)
    hint = Text('give a sparsity such as 0.7, "n:m" such as "2:4", or "n:4" with {}', "sparsity")
    number = isinstance(pattern, int | float) and not isinstance(pattern, bool)
    require(number or isinstance(pattern, str), f"no recipe of {shown(pattern)}", hint=hint)
    fields = {**({"sparsity": float(pattern)} if number else {"pattern": pattern}), **changes}
    parsed = parse_pattern(fields.get("pattern", Unstructured.kind), fields.get("sparsity"))
    require(not isinstance(parsed, Structured | Experts), f"no recipe of {shown(pattern)}", hint=hint)
    unstructured, fixed = RECIPES[budget]
    mixed = ALLOCATION if isinstance(parsed, MixedNM) else {}
    return {**(fixed if isinstance(parsed, NM) else unstructured), **mixed, **fields}
