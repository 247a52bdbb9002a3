"""`optimum-cli moonshot prune --dry-run`: what the command would take, without doing it."""

import argparse
from pathlib import Path
from typing import Any

from .common import check_source, expect, load, load_pruner, remote_code

_OF_PLANS = ("device_memory", "host_memory")


def add_plan_options(parser: argparse.ArgumentParser) -> None:
    """`--dry-run`, and the memory of another machine."""
    group = parser.add_argument_group("an estimate first")
    group.add_argument(
        "--dry-run",
        action="store_true",
        help="print what the command would take of memory, passes over the data and time, and what would not fit; "
        "nothing is pruned, downloaded (but config.json) or written. Time is measured where MODEL is a folder with "
        "weights",
    )
    for name, what in (("device", "memory of the device in all"), ("host", "host memory that is free")):
        group.add_argument(
            f"--{name}-memory", metavar="SIZE", help=f"with --dry-run: {what}, such as 80GB; default: this machine's"
        )


def check_plan_options(args: argparse.Namespace) -> None:
    """Raise `UsageError` for the memory of another machine, where this one is going to work."""
    for name in _OF_PLANS:
        flag = "--" + name.replace("_", "-")
        expect(args.dry_run or getattr(args, name) is None, f"{flag}: it is for --dry-run alone")


def make_plan(args: argparse.Namespace, config: Any, device: Any, calibration: Any) -> Any:
    """The `Plan` of a command.

    Args:
        args: of `moonshot prune`.
        config: the `MoonshotConfig` that they make.
        device: where the model would be.
        calibration: what it would be calibrated on, which is not read.

    Raises:
        UsageError: a model that is neither a folder nor a name on the Hub.
        MoonshotError: a model that cannot be loaded, or of which no plan can be made.
    """
    from .. import MoonshotPruner

    check_source(args.model)
    memory = {name: getattr(args, name) for name in _OF_PLANS}
    folder = args.output + ".partial"
    if any(Path(args.model).glob("*.safetensors")) or any(Path(args.model).glob("*.bin")):
        return load_pruner(args, config, device).plan(calibration, resume_dir=folder, **memory)
    options = {"dtype": args.dtype, "offload": args.offload, **remote_code(args)}
    return load(lambda **_: MoonshotPruner.plan_for(args.model, config, resume_dir=folder, **memory, **options), args)
