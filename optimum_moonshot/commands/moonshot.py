"""`optimum-cli moonshot`: its subcommands, of which `prune` and `convert` are in this file.

`optimum-cli` imports this module on every call, so torch and transformers are imported in `run`.
"""

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optimum.commands.base import BaseOptimumCLICommand, CommandInfo

from ..errors import MoonshotError, Option, Text
from .calibration import add_calibration_options, calibration_source
from .common import (
    FORMAT_HELP,
    FORMATS,
    OUTPUT_HELP,
    UsageError,
    add_model_options,
    add_offload_option,
    check_data,
    check_source,
    expect,
    find_device,
    import_modules,
    load_pruner,
    remote_code,
    whole_names,
)
from .evaluate import EvalCommand
from .launched import is_first
from .measuring import BeforeAndAfter, make_metric
from .messages import guard
from .method_options import add_method_options, make_config
from .output import Output, open_output
from .planning import add_plan_options, check_plan_options, make_plan
from .rotate import RotateCommand
from .sweep import SweepCommand
from .verify import VerifyCommand

if TYPE_CHECKING:
    import torch

    from ..config import MoonshotConfig
    from ..pruner import MoonshotPruner
    from ..reports.prune_report import PruneReport


def add_prune_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `moonshot prune`."""
    add_model_options(parser)
    parser.add_argument("--output", required=True, metavar="DIR", help=OUTPUT_HELP)
    parser.add_argument("--overwrite", action="store_true", help="write to DIR even if it is not empty")
    parser.add_argument("--format", choices=FORMATS, default="dense", help=FORMAT_HELP)
    add_calibration_options(parser, "the default; magnitude needs no data")
    parser.add_argument(
        "--eval",
        nargs="+",
        action="extend",
        default=[],
        metavar="DATA",
        help="measure perplexity, or top-1 accuracy of an image model, on these data sets before and after",
    )
    parser.add_argument(
        "--compact",
        action="store_true",
        help="after --pattern structured: remove the dead neurons and heads, for a smaller model; --pattern experts "
        "always does",
    )
    add_offload_option(parser)
    add_plan_options(parser)
    add_method_options(parser)


def add_convert_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `moonshot convert`."""
    whole_names(parser)
    parser.add_argument("model", metavar="DIR", help="folder of a pruned checkpoint, or name on the Hub")
    parser.add_argument("--format", choices=FORMATS, required=True, help=FORMAT_HELP)
    parser.add_argument(
        "--output",
        metavar="DIR",
        help="folder for the new checkpoint; default: DIR-FORMAT, for a name on the Hub its last part",
    )
    parser.add_argument("--overwrite", action="store_true", help="write to the output even if it is not empty")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")


def prune(args: argparse.Namespace) -> None:
    """`moonshot prune`: load, measure, prune, measure, save, report.

    Raises:
        UsageError: invalid options, detected before the model is loaded.
        MoonshotError: a model or data that cannot be loaded, pruned or saved.
    """
    start = time.perf_counter()
    import_modules(args.imports)
    config = make_config(args)
    compactable = config.pattern in ("structured", "experts")  # the latter always compacts
    message = Text("only {} leaves neurons and heads to remove", Option("pattern", "structured"))
    expect(compactable or not args.compact, message, field="compact")
    device = find_device(args.device)
    calibration = calibration_source(args, config)
    check_data("eval", args.eval)
    check_plan_options(args)
    if args.dry_run:
        print(make_plan(args, config, device, calibration))
        return
    with open_output(args) as output:
        lines = _prune(args, config, device, calibration, output)
    if is_first():
        print(*lines, f"seconds     {time.perf_counter() - start:.1f}", sep="\n")


def _prune(
    args: argparse.Namespace, config: "MoonshotConfig", device: "torch.device", calibration: Any, output: Output
) -> list[str]:
    """Prune and save the model, and return the lines to print."""
    pruner = load_pruner(args, config, device)
    size = min(config.batch_size, 4)
    metric = make_metric(pruner.model, pruner.tokenizer, pruner.processor, config.sequence_length, size)
    if metric.name == "accuracy" and calibration == "c4":
        hint = "an image model needs images, such as a folder with a sub-folder per class"
        raise UsageError(hint, field="calibration")
    measured = BeforeAndAfter(metric, args.eval if is_first() else [])
    report = pruner.prune(calibration, progress=True, resume_dir=output.work())
    lines = [f"sparsity    {report.headline}"]
    lines += [f"dense       {report.mostly_dense}"] if report.mostly_dense else []
    if args.compact or config.pattern == "experts":
        lines.append(_compact(pruner, report))
    lines += measured.lines(report.record)
    output.begin()
    pruner.save_pretrained(output.path, format=args.format)
    output.finish()
    return [report.table(), "", *lines, f"saved       {args.output}"]


def _compact(pruner: "MoonshotPruner", report: "PruneReport") -> str:
    """Compact the pruned model; if that fails, it is saved with its zeros."""
    try:
        before, after = pruner.compact().parameters
    except MoonshotError as error:
        report.notes.append(f"not compacted: {error}")
        return f"not compacted: {error}"
    return f"parameters  {before:,} → {after:,}"


def convert(args: argparse.Namespace) -> None:
    """`moonshot convert`: save the same weights in the other format.

    Raises:
        UsageError: a model that is neither a folder nor a name on the Hub, or an invalid output.
        MoonshotError: no pruned checkpoint, one that already has the format, or a damaged one.
    """
    check_source(args.model)
    name = args.model.rstrip("/") if Path(args.model).is_dir() else args.model.rpartition("/")[2]
    args.output = args.output or f"{name}-{args.format}"
    from .. import convert as convert_checkpoint
    from ..checkpoint.hub import local_folder

    folder = local_folder(args.model, whole=True)
    with open_output(args) as output:
        output.begin()
        convert_checkpoint(folder, args.output, args.format, **remote_code(args))
        output.finish()
    before, after = _weight_bytes(folder), _weight_bytes(args.output)
    print(f"weights     {before / 2**20:.1f} → {after / 2**20:.1f} MiB")
    print(f"saved       {args.output}")


def _weight_bytes(folder: str | Path) -> int:
    return sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))


class PruneCommand(BaseOptimumCLICommand):
    COMMAND = CommandInfo(name="prune", help="Prune a language or image model in one shot and save it.")
    parse_args = staticmethod(add_prune_options)

    def run(self) -> None:
        guard(prune, self.args, shared=True)


class ConvertCommand(BaseOptimumCLICommand):
    COMMAND = CommandInfo(name="convert", help="Pack the checkpoint of a pruned model, or unpack it.")
    parse_args = staticmethod(add_convert_options)

    def run(self) -> None:
        guard(convert, self.args)


class MoonshotCommand(BaseOptimumCLICommand):
    COMMAND = CommandInfo(name="moonshot", help="Prune language and image models in one shot.")
    SUBCOMMANDS = tuple(
        CommandInfo(name=command.COMMAND.name, help=command.COMMAND.help, subcommand_class=command)
        for command in (PruneCommand, SweepCommand, RotateCommand, EvalCommand, ConvertCommand, VerifyCommand)
    )
