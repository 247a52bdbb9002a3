"""The options of `moonshot prune`, `sweep` and `rotate` that select the calibration data."""

import argparse
from typing import TYPE_CHECKING

from ..errors import Option, Text
from .common import IMAGES_HELP, UsageError, check_data, usage_errors

if TYPE_CHECKING:
    from ..config import MoonshotConfig
    from ..data.self_calibration import SelfCalibration

SELF = "self"
_SELF_OPTIONS = ("prompts", "temperature", "thinking")


def add_calibration_options(parser: argparse.ArgumentParser, default: str) -> None:
    """Add `--calibration`, and the options of self-calibration.

    Args:
        parser: of the command.
        default: the remark on the default in the help.
    """
    parser.add_argument(
        "--calibration",
        metavar="DATA",
        help=f"c4 ({default}), wikitext2, ptb, a text, JSON or Parquet file, or self: text that the dense model "
        f"generates first. {IMAGES_HELP}",
    )
    group = parser.add_argument_group("calibration on text that the model generates", "with --calibration self")
    group.add_argument(
        "--prompts",
        metavar="FILE",
        help="prompts, formatted by its chat template if it has one: one per line of a .txt file, or a column of a "
        "JSON or Parquet file; default: its BOS token alone",
    )
    group.add_argument("--temperature", type=float, metavar="T", help="sampling temperature (1)")
    group.add_argument(
        "--thinking",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="enable or disable thinking in the chat template; default: the template's own",
    )


def calibration_source(args: argparse.Namespace, config: "MoonshotConfig") -> "str | SelfCalibration | None":
    """Return the data of `--calibration`; by default C4 if the method needs data, else None.

    Args:
        args: of the command.
        config: the configuration of the command.

    Raises:
        UsageError: there is no such data, or an option that belongs to another kind of data.
    """
    from ..objective.allocation_rules import NEEDING_DATA
    from ..solvers import solver_class

    options = {name: getattr(args, name) for name in _SELF_OPTIONS if getattr(args, name) is not None}
    if args.calibration == SELF:
        from ..data.self_calibration import SelfCalibration

        with usage_errors():
            return SelfCalibration(**options)
    for name in options:
        raise UsageError(Text("only for {}", Option("calibration", SELF)), field=name)
    if args.calibration is None:
        return "c4" if solver_class(config.solver).calibrated or config.allocation in NEEDING_DATA else None
    check_data("calibration", [args.calibration])
    return str(args.calibration)
