"""Configurations by one word each: what the measurements recommend for a pattern, and for what one is willing to spend.

The figures behind them are those of `benchmarks/beyond.py` (docs/measured.md).
"""

from typing import Any

from .errors import require, shown
from .objective.patterns import NM, Experts, MixedNM, Structured, Unstructured, parse_pattern

BUDGETS = ("paper", "one-shot", "recovered")
BASIS = {"solver": "alps", "rotation": "learned"}
SHARES = {"allocation": "fisher"}
# budget → (unstructured, n:m): fields of a configuration beside pattern and sparsity. Gradual recovery chooses the
# weights anew by the reconstruction error alone, so that λ < 1 before it would be lost; n:m is the same in every layer.
RECIPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "paper": ({}, {}),
    "one-shot": ({**BASIS, **SHARES, "lam": 0.5}, {**BASIS, "lam": 0.9}),
    "recovered": (
        {**BASIS, **SHARES, "lam": 1.0, "recover": "gradual"},
        {**BASIS, "lam": 0.9, "recover": "blockwise"},
    ),
}


def recipe(pattern: str | float, budget: str, changes: dict[str, Any]) -> dict[str, Any]:
    """The fields of a configuration; see `MoonshotConfig.recipe`.

    Args:
        pattern: a sparsity, or "n:m".
        budget: one of `BUDGETS`.
        changes: fields that are set otherwise.

    Raises:
        MoonshotError: an unknown budget, or a pattern that has no recipe.
    """
    known = ", ".join(f'"{name}"' for name in BUDGETS)
    require(budget in BUDGETS, f"budget={shown(budget)}: use one of {known}")
    mend = 'give a sparsity such as 0.7, "n:m" such as "2:4", or "n:4" with sparsity='
    number = isinstance(pattern, int | float) and not isinstance(pattern, bool)
    require(number or isinstance(pattern, str), f"recipe of {shown(pattern)}: {mend}")
    asked: dict[str, Any] = {"sparsity": float(pattern)} if number else {"pattern": pattern}
    fields = {**asked, **changes}
    parsed = parse_pattern(fields.get("pattern", Unstructured.kind), fields.get("sparsity"))
    require(not isinstance(parsed, Structured | Experts), f"recipe of {shown(pattern)}: {mend}")
    unstructured, fixed = RECIPES[budget]
    mixed = SHARES if isinstance(parsed, MixedNM) else {}
    return {**(fixed if isinstance(parsed, NM) else unstructured), **mixed, **fields}
