"""`optimum-cli moonshot rotate`: a model in a basis that loses less when it is pruned, without pruning it."""

import argparse
import time
from typing import Any

from optimum.commands.base import BaseOptimumCLICommand, CommandInfo

from .calibration import add_calibration_options, calibration_source
from .common import add_model_options, add_offload_option, check_data, find_device, import_modules, load_pruner
from .launched import is_first
from .measuring import BeforeAndAfter, make_meter
from .messages import guard
from .method_options import add_method_options, make_config
from .output import Output, open_output

# Options that a model which is not pruned has no use for.
WITHOUT = ("group_size", "recompute", "recover", "recover_steps", "recover_lr", "fisher", "block_size", "lam")


def add_rotate_options(parser: argparse.ArgumentParser) -> None:
    """The options of `moonshot rotate`."""
    add_model_options(parser)
    parser.add_argument(
        "--output",
        required=True,
        metavar="DIR",
        help="where the rotated model goes; a killed run leaves DIR.partial, and the same command goes on from there",
    )
    parser.add_argument("--overwrite", action="store_true", help="write to DIR although it holds files")
    add_calibration_options(parser, "the default")
    parser.add_argument(
        "--eval", nargs="+", action="extend", default=[], metavar="DATA", help="measure it on these before and after"
    )
    add_offload_option(parser)
    add_method_options(parser, without=WITHOUT)


def rotate(args: argparse.Namespace) -> None:
    """`moonshot rotate`: load, measure, rotate, measure, save.

    Raises:
        UsageError: options that make no sense, before the model is loaded.
        MoonshotError: a model or data that cannot be loaded, or nothing that can be rotated.
    """
    start = time.perf_counter()
    import_modules(args.imports)
    args.rotation = getattr(args, "rotation", "learned")
    config = make_config(args)
    device = find_device(args.device)
    calibration = calibration_source(args, config) or "c4"
    check_data("--eval", args.eval)
    with open_output(args) as output:
        lines = _rotate(args, config, device, calibration, output)
    if is_first():
        print(*lines, f"seconds     {time.perf_counter() - start:.1f}", sep="\n")


def _rotate(args: argparse.Namespace, config: Any, device: Any, calibration: Any, output: Output) -> list[str]:
    """The work of `rotate`, and what to tell of it."""
    pruner = load_pruner(args, config, device)
    size = min(config.batch_size, 4)
    meter = make_meter(pruner.model, pruner.tokenizer, pruner.processor, config.sequence_length, size)
    measured = BeforeAndAfter(meter, args.eval if is_first() else [])
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
