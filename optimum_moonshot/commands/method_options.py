"""The options of a method, derived from the fields of `MoonshotConfig` in options.py, and of its calibration data."""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import MoonshotError, one_line
from ..options import GROUPS, OPTIONS, RECIPES, Field, kind_of
from .common import IMAGES_HELP, UsageError, check_data, expect, usage_errors

if TYPE_CHECKING:
    from ..config import MoonshotConfig
    from ..data.text import SelfCalibration


def _argument(field: Field) -> dict[str, Any]:
    """The arguments of `add_argument` for a field of the configuration, whose default applies without the option."""
    (kind, optional), declared = kind_of(field), field.metadata
    text, semicolon, rest = declared["help"].replace("%", "%%").partition(";")
    choices, how = declared.get("choices"), "HOW" if "choices" in declared else None
    argument: dict[str, Any] = {"metavar": declared.get("metavar", how)}
    if kind is bool:
        argument = {"action": argparse.BooleanOptionalAction if optional else "store_true"}
    elif kind in (int, float):
        argument["type"] = kind
        text += f" ({field.default:g})" if field.default is not None else ""
    elif kind == Sequence[str]:
        argument = {"nargs": "+", "action": "extend", "metavar": "REGEX"}
    elif kind == Mapping[str, Any]:
        argument = {"action": "append", "metavar": "NAME=VALUE"}
    elif choices and optional:
        argument |= {"nargs": "?", "const": choices[0]}
        text = text.replace(":", " (also when no HOW is given):", 1)
    return {**argument, "help": text + semicolon + rest}


# Calibration data has options of its own, `add_calibration_options`.
CONFIG_OPTIONS = {name: _argument(field) for name, field in OPTIONS.items() if name != "calibration"}


def flag(name: str) -> str:
    """The option of a field, in the singular if it is repeated for each value."""
    return "--" + (name.removesuffix("s") if name in ("solver_options", "imports") else name).replace("_", "-")


def add_method_options(parser: argparse.ArgumentParser, without: tuple[str, ...] = ()) -> None:
    """Add `--import`, and an option for every field of MoonshotConfig that is not in `without`."""
    for title, fields in GROUPS.items():
        group = parser.add_argument_group(f"method: {title.lower()}")
        if title == "Target" and not without:
            group.add_argument(
                "--recipe",
                choices=tuple(RECIPES),
                help="recommended settings for a --sparsity or an n:m --pattern: paper, the paper's own; fast, a "
                "better solver and a sparsity budget for each layer; one-shot, also a learned basis; "
                "recovered, also tuned weights. Other options override them",
            )
        for name in (field.name for field in fields):
            if name in CONFIG_OPTIONS and name not in without:
                group.add_argument(flag(name), dest=name, default=argparse.SUPPRESS, **CONFIG_OPTIONS[name])
    parser.add_argument(
        "--import",
        dest="imports",
        action="append",
        default=[],
        metavar="MODULE",
        help="import a Python module first, such as one in this folder that registers a solver; may be repeated",
    )


def make_config(args: argparse.Namespace) -> "MoonshotConfig":
    """The configuration of a command; `UsageError` if its options do not make a valid one."""
    from .. import MoonshotConfig

    fields = {name: getattr(args, name) for name in CONFIG_OPTIONS if hasattr(args, name)}
    if "allocation" in fields:
        fields["allocation"] = _read_allocation(fields["allocation"])
    with usage_errors():
        if "solver_options" in fields:
            solver = fields.get("solver", MoonshotConfig.solver)
            fields["solver_options"] = _parse_options(solver, fields["solver_options"])
        budget = getattr(args, "recipe", None)
        if budget is None:
            return MoonshotConfig(**fields)
        pattern = "pattern" if "pattern" in fields else "sparsity"
        hint = "give a --sparsity, or a --pattern 2:4"
        expect(pattern in fields, hint, field="recipe", value=budget)
        return MoonshotConfig.recipe(fields.pop(pattern), budget, **fields)


def _read_allocation(value: str) -> str | dict[str, Any]:
    """The name of a method, or the contents of a JSON file."""
    from ..objective.allocation_rules import METHODS

    if value in METHODS:
        return value
    usage = f"neither one of {', '.join(METHODS)} nor a JSON file with an object of layers"
    try:
        rules = json.loads(Path(value).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{usage} ({one_line(error)})", field="allocation", value=value) from None
    expect(isinstance(rules, dict), usage, field="allocation", value=value)
    return rules


def _parse_options(solver: str, texts: list[str]) -> dict[str, Any]:
    """Parse hyperparameters of a solver, NAME=VALUE each, with the types that it declares."""
    from ..solvers.base import parse_option, solver_options

    options, values = solver_options(solver), {}
    for text in texts:
        name, sign, value = text.partition("=")
        expect(bool(name and sign), "give NAME=VALUE", field="solver_options", value=text)
        message = f"solver={solver!r} has {', '.join(options) or 'none'}"
        expect(name in options, message, field="solver_options", value=text)
        expect(name not in values, f"{name} is given twice", field="solver_options", value=text)
        try:
            values[name] = parse_option(options[name], value)
        except MoonshotError as error:
            raise error.within(f"solver_options={text!r}") from None
    return values


def add_calibration_options(parser: argparse.ArgumentParser, default: str = "the default") -> None:
    """Add `--calibration`, with a remark on its default, and the options of self-calibration."""
    parser.add_argument(
        "--calibration",
        metavar="DATA",
        help=f"c4 ({default}), wikitext2, ptb, a text, JSON, CSV or Parquet file, a data set of text or conversations "
        f"on the Hub, or self: text that the dense model generates first. {IMAGES_HELP}",
    )
    group = parser.add_argument_group("calibration on text that the model generates", "with --calibration self")
    group.add_argument(
        "--prompts",
        metavar="FILE",
        help="prompts, formatted by the model's chat template if it has one: one per line of a .txt file, or a column "
        "of a JSON, CSV or Parquet file; default: the BOS token alone",
    )
    group.add_argument("--temperature", type=float, metavar="T", help="sampling temperature (1)")
    group.add_argument(
        "--thinking",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="enable or disable thinking in the chat template; default: the template's own",
    )


def calibration_source(args: argparse.Namespace, config: "MoonshotConfig") -> "str | SelfCalibration | None":
    """The data of `--calibration`; by default C4 if the method needs data, else None."""
    from ..objective.allocation_rules import NEEDING_DATA
    from ..solvers import solver_class

    given = ((name, getattr(args, name)) for name in ("prompts", "temperature", "thinking"))
    options = {name: value for name, value in given if value is not None}
    if args.calibration == "self":
        from ..data.text import SelfCalibration

        with usage_errors():
            return SelfCalibration(**options)
    for name in options:
        raise UsageError("only for calibration='self'", field=name)
    if args.calibration is None:
        return "c4" if solver_class(config.solver).calibrated or config.allocation in NEEDING_DATA else None
    check_data("calibration", [args.calibration])
    return str(args.calibration)
