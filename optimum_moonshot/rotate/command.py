"""`optimum-cli moonshot rotate`: change the basis of a model so that a later pruning has a smaller loss."""

import argparse
import time
from typing import TYPE_CHECKING, Any

from ..commands.common import (
    add_calibration_options,
    add_data_option,
    add_method_options,
    add_model_options,
    add_output_options,
    import_modules,
    make_config,
)
from ..commands.output import RESUMED_HELP, Output, change_and_save

if TYPE_CHECKING:
    from ..pruner import MoonshotPruner

# Options that have no effect without pruning.
WITHOUT = (
    "group_size",
    "bits",
    "quant_group",
    "recompute",
    "recover",
    "recover_steps",
    "recover_lr",
    "fisher",
    "block_size",
    "lam",
)


def add_rotate_options(parser: argparse.ArgumentParser) -> None:
    add_model_options(parser, by_layer=True)
    add_output_options(parser, f"folder for the rotated model; {RESUMED_HELP}")
    add_calibration_options(parser)
    add_data_option(parser, "--eval", "measure the model on these data sets before and after")
    add_method_options(parser, without=WITHOUT)


def rotate(args: argparse.Namespace) -> None:
    """`moonshot rotate`: load, measure, rotate, measure, save."""
    start = time.perf_counter()
    import_modules(args.imports)
    args.rotation = getattr(args, "rotation", "learned")
    config = make_config(args)

    def change(pruner: "MoonshotPruner", calibration: Any, output: Output) -> list[str]:
        return [pruner.rotate(calibration, progress=True, resume_dir=output.work()).line()]

    change_and_save(args, config, start, change)
