"""`optimum-cli moonshot prune --dry-run`: an estimate of memory and time, without pruning."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import Text
from .common import check_source, expect, load, load_pruner, remote_code

if TYPE_CHECKING:
    import torch

    from ..config import MoonshotConfig

_MEMORY_OPTIONS = ("device_memory", "host_memory")


def add_plan_options(parser: argparse.ArgumentParser) -> None:
    """Add `--dry-run`, and the options for the memory of another machine."""
    group = parser.add_argument_group("estimate")
    group.add_argument(
        "--dry-run",
        action="store_true",
        help="estimate memory, passes over the data and time, and print what does not fit; nothing is pruned, "
        "downloaded (except config.json) or written. Time is measured if MODEL is a folder with weights",
    )
    for name, description in (("device", "total memory of the device"), ("host", "free host memory")):
        group.add_argument(
            f"--{name}-memory",
            metavar="SIZE",
            help=f"with --dry-run: {description}, such as 80GB; default: this machine's",
        )


def check_plan_options(args: argparse.Namespace) -> None:
    """Raise `UsageError` if the memory of another machine is given without `--dry-run`."""
    for name in _MEMORY_OPTIONS:
        expect(args.dry_run or getattr(args, name) is None, Text("only for {}", "dry_run"), field=name)


def make_plan(args: argparse.Namespace, config: "MoonshotConfig", device: "torch.device", calibration: Any) -> Any:
    """Return the `Plan` of a command.

    Args:
        args: of `moonshot prune`.
        config: the configuration of the command.
        device: of the model.
        calibration: the calibration data, which are not read.

    Raises:
        UsageError: a model that is neither a folder nor a name on the Hub.
        MoonshotError: a model that cannot be loaded, or that cannot be planned.
    """
    from .. import MoonshotPruner

    check_source(args.model)
    memory = {name: getattr(args, name) for name in _MEMORY_OPTIONS}
    folder = args.output + ".partial"
    if any(Path(args.model).glob("*.safetensors")) or any(Path(args.model).glob("*.bin")):
        return load_pruner(args, config, device).plan(calibration, resume_dir=folder, **memory)
    options = {"dtype": args.dtype, "offload": args.offload, **remote_code(args)}
    return load(lambda **_: MoonshotPruner.plan_for(args.model, config, resume_dir=folder, **memory, **options), args)
