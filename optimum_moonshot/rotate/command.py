"""`optimum-cli moonshot rotate`: change the basis of a model so that a later pruning loses less."""

import argparse
import time

from ..commands.common import (
    add_data_option,
    add_model_options,
    add_offload_option,
    add_output_options,
    check_data,
    find_device,
    import_modules,
    load_pruner,
    pruner_metric,
)
from ..commands.launch import is_first
from ..commands.method_options import add_calibration_options, add_method_options, calibration_source, make_config
from ..commands.output import RESUMED_HELP, open_output

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
    add_model_options(parser)
    add_output_options(parser, f"folder for the rotated model; {RESUMED_HELP}")
    add_calibration_options(parser)
    add_data_option(parser, "--eval", "measure the model on these data sets before and after")
    add_offload_option(parser)
    add_method_options(parser, without=WITHOUT)


def rotate(args: argparse.Namespace) -> None:
    """`moonshot rotate`: load, measure, rotate, measure, save."""
    start = time.perf_counter()
    import_modules(args.imports)
    args.rotation = getattr(args, "rotation", "learned")
    config = make_config(args)
    device = find_device(args.device)
    calibration = calibration_source(args, config) or "c4"
    check_data("eval", args.eval)
    with open_output(args) as output:
        pruner = load_pruner(args, config, device)
        metric = pruner_metric(pruner)
        before = {dataset: metric.measure(dataset) for dataset in args.eval if is_first()}
        report = pruner.rotate(calibration, progress=True, resume_dir=output.work())
        lines = [report.line(), *metric.changes(before)]
        output.begin()
        pruner.save_pretrained(output.path)
        output.finish()
    if is_first():
        print(*lines, f"saved       {args.output}", f"seconds     {time.perf_counter() - start:.1f}", sep="\n")
