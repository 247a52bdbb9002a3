"""The options of `moonshot prune` and `sweep` that say on which data a model is calibrated."""

import argparse
from typing import Any

from ..errors import MoonshotError
from .common import IMAGES_HELP, UsageError, check_data, expect

SELF = "self"
_OF_SELF = ("prompts", "temperature", "thinking")


def add_calibration_options(parser: argparse.ArgumentParser, default: str) -> None:
    """`--calibration`, and how a model writes its own.

    Args:
        parser: gets them.
        default: what is said of doing without.
    """
    parser.add_argument(
        "--calibration",
        metavar="DATA",
        help=f"c4 ({default}), wikitext2, ptb, a text, JSON or Parquet file, or self: what the dense model writes "
        f"first. {IMAGES_HELP}",
    )
    own = parser.add_argument_group("calibration on what the model writes", "with --calibration self")
    own.add_argument(
        "--prompts",
        metavar="FILE",
        help="what it answers, by its chat template if it has one: a prompt on every line of a .txt file, or a JSON or "
        "Parquet file with a column of them; default: its BOS token alone",
    )
    own.add_argument("--temperature", type=float, metavar="T", help="of its sampling (1)")
    own.add_argument(
        "--thinking",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="whether the chat template is told to think; default: the template's own",
    )


def calibration_source(args: argparse.Namespace, config: Any) -> Any:
    """What `--calibration` says, or C4 where the method needs data.

    Args:
        args: of the command.
        config: the `MoonshotConfig` that they make.

    Raises:
        UsageError: there is no such data, or an option of another kind of data.
    """
    from ..objective.allocation_rules import NEEDING_DATA
    from ..solvers import solver_class

    given = {name: getattr(args, name) for name in _OF_SELF if getattr(args, name) is not None}
    if args.calibration == SELF:
        return _own(given)
    for name in given:
        expect(False, f"--{name}: it is for --calibration {SELF} alone")
    if args.calibration is None:
        return "c4" if solver_class(config.solver).calibrated or config.allocation in NEEDING_DATA else None
    check_data("--calibration", [args.calibration])
    return args.calibration


def _own(given: dict[str, Any]) -> Any:
    from ..data.self_calibration import SelfCalibration

    try:
        return SelfCalibration(**given)
    except MoonshotError as error:
        raise UsageError(str(error)) from None
