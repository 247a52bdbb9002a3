"""The steps of a command that changes a model: load, measure, change, measure, save, print."""

import argparse
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .common import check_data, find_device, load_pruner, pruner_metric
from .launch import is_first
from .method_options import calibration_source
from .output import Output, open_output

if TYPE_CHECKING:
    from ..config import MoonshotConfig
    from ..pruner import MoonshotPruner

Change = Callable[["MoonshotPruner", Any, Output], list[str]]


def change_and_save(args: argparse.Namespace, config: "MoonshotConfig", started: float, change: Change) -> None:
    """Load a model, change it, and save it, with `--eval` before and after.

    Args:
        args: of the command, with the options of a model, an output, calibration data and `--eval`.
        config: of the run.
        started: `time.perf_counter()` at the start of the command.
        change: changes the model of a pruner by calibration data, and returns the lines to print first.
    """
    device = find_device(args.device)
    calibration = calibration_source(args, config) or "c4"
    check_data("eval", args.eval)
    with open_output(args) as output:
        pruner = load_pruner(args, config, device)
        metric = pruner_metric(pruner)
        before = {dataset: metric.measure(dataset) for dataset in args.eval if is_first()}
        lines = change(pruner, calibration, output)
        record = {} if pruner.report is None else {"record": pruner.report.record}
        lines += pruner_metric(pruner).changes(before, **record)
        output.begin()
        pruner.save_pretrained(output.path)
        output.finish()
    if is_first():
        print(*lines, f"saved       {args.output}", f"seconds     {time.perf_counter() - started:.1f}", sep="\n")
