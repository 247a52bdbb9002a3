"""`optimum-cli moonshot rotate`: change the basis of a model so that pruning loses less, without pruning it."""

import argparse
import time
from typing import TYPE_CHECKING, Any

from optimum.commands.base import BaseOptimumCLICommand, CommandInfo

from .calibration import add_calibration_options, calibration_source
from .common import add_model_options, add_offload_option, check_data, find_device, import_modules, load_pruner
from .launched import is_first
from .measuring import BeforeAndAfter, make_metric
from .messages import guard
from .method_options import add_method_options, make_config
from .output import Output, open_output

if TYPE_CHECKING:
    import torch

    from ..config import MoonshotConfig

# Options without an effect on a model that is not pruned.
WITHOUT = ("group_size", "recompute", "recover", "recover_steps", "recover_lr", "fisher", "block_size", "lam")


def add_rotate_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `moonshot rotate`."""
    add_model_options(parser)
    parser.add_argument(
        "--output",
        required=True,
        metavar="DIR",
        help="folder for the rotated model; a killed run leaves DIR.partial, and resumes when you rerun the command",
    )
    parser.add_argument("--overwrite", action="store_true", help="write to DIR although it holds files")
    add_calibration_options(parser, "the default")
    parser.add_argument(
        "--eval",
        nargs="+",
        action="extend",
        default=[],
        metavar="DATA",
        help="measure the model on these data sets before and after",
    )
    add_offload_option(parser)
    add_method_options(parser, without=WITHOUT)


def rotate(args: argparse.Namespace) -> None:
    """`moonshot rotate`: load, measure, rotate, measure, save.

    Raises:
        UsageError: invalid options, detected before the model is loaded.
        MoonshotError: a model or data that cannot be loaded, or that has nothing to rotate.
    """
    start = time.perf_counter()
    import_modules(args.imports)
    args.rotation = getattr(args, "rotation", "learned")
    config = make_config(args)
    device = find_device(args.device)
    calibration = calibration_source(args, config) or "c4"
    check_data("eval", args.eval)
    with open_output(args) as output:
        lines = _rotate(args, config, device, calibration, output)
    if is_first():
        print(*lines, f"seconds     {time.perf_counter() - start:.1f}", sep="\n")


def _rotate(
    args: argparse.Namespace, config: "MoonshotConfig", device: "torch.device", calibration: Any, output: Output
) -> list[str]:
    """Rotate and save the model, and return the lines to print."""
    pruner = load_pruner(args, config, device)
    size = min(config.batch_size, 4)
    metric = make_metric(pruner.model, pruner.tokenizer, pruner.processor, config.sequence_length, size)
    measured = BeforeAndAfter(metric, args.eval if is_first() else [])
    report = pruner.rotate(calibration, progress=True, resume_dir=output.work())
    lines = [report.line(), *measured.lines()]
    output.begin()
    pruner.save_pretrained(output.path)
    output.finish()
    return [*lines, f"saved       {args.output}"]


class RotateCommand(BaseOptimumCLICommand):
    COMMAND = CommandInfo(name="rotate", help="Change a model's basis so that pruning costs less, and save it.")
    parse_args = staticmethod(add_rotate_options)

    def run(self) -> None:
        guard(rotate, self.args, shared=True)
