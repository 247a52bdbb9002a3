"""`optimum-cli moonshot`: its subcommands, of which `prune`, `convert` and `verify` are in this file.

`optimum-cli` imports this module on every call, so torch and transformers are imported in `run`.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optimum.commands.base import BaseOptimumCLICommand, CommandInfo

from ..errors import MoonshotError, Option, Text
from .common import (
    UsageError,
    add_data_option,
    add_format_option,
    add_model_options,
    add_offload_option,
    add_output_options,
    check_data,
    check_source,
    expect,
    find_device,
    import_modules,
    load,
    load_pruner,
    pruner_metric,
    remote_code,
)
from .evaluate import EvalCommand
from .launch import guard, is_first
from .method_options import add_calibration_options, add_method_options, calibration_source, make_config
from .output import RESUMED_HELP, Output, open_output
from .rotate import RotateCommand
from .sweep import SweepCommand

if TYPE_CHECKING:
    import torch

    from ..config import MoonshotConfig
    from ..pruner import MoonshotPruner
    from ..reports.prune_report import PruneReport

_MEMORY_OPTIONS = ("device_memory", "host_memory")


def add_prune_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `moonshot prune`."""
    add_model_options(parser)
    add_output_options(parser, f"folder for the pruned model; {RESUMED_HELP}")
    add_format_option(parser, default="dense")
    add_calibration_options(parser, "the default; magnitude needs no data")
    text = "measure perplexity, or top-1 accuracy of an image model, on these data sets before and after"
    add_data_option(parser, "--eval", text)
    parser.add_argument(
        "--compact",
        action="store_true",
        help="after --pattern structured: remove the dead neurons and heads, for a smaller model; --pattern experts "
        "always does",
    )
    add_offload_option(parser)
    group = parser.add_argument_group("estimate")
    group.add_argument(
        "--dry-run",
        action="store_true",
        help="estimate memory, passes over the data and time, and print what does not fit; nothing is pruned, "
        "downloaded (except config.json) or written. Time is measured if MODEL is a folder with weights",
    )
    for name, description in (("device", "total memory of the device"), ("host", "free host memory")):
        text = f"with --dry-run: {description}, such as 80GB; default: this machine's"
        group.add_argument(f"--{name}-memory", metavar="SIZE", help=text)
    add_method_options(parser)


def prune(args: argparse.Namespace) -> None:
    """`moonshot prune`: load, measure, prune, measure, save, report; with `--dry-run`, print the plan.

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
    for name in _MEMORY_OPTIONS:
        expect(args.dry_run or getattr(args, name) is None, Text("only for {}", "dry_run"), field=name)
    if args.dry_run:
        print(_plan(args, config, device, calibration))
        return
    with open_output(args) as output:
        lines = _prune(args, config, device, calibration, output)
    if is_first():
        print(*lines, f"seconds     {time.perf_counter() - start:.1f}", sep="\n")


def _plan(args: argparse.Namespace, config: "MoonshotConfig", device: "torch.device", calibration: Any) -> Any:
    from .. import MoonshotPruner

    check_source(args.model)
    options = {name: getattr(args, name) for name in _MEMORY_OPTIONS} | {"resume_dir": args.output + ".partial"}
    if any(Path(args.model).glob("*.safetensors")) or any(Path(args.model).glob("*.bin")):
        return load_pruner(args, config, device).plan(calibration, **options)
    options |= {"dtype": args.dtype, "offload": args.offload, **remote_code(args)}
    return load(lambda **_: MoonshotPruner.plan_for(args.model, config, **options), args)


def _prune(
    args: argparse.Namespace, config: "MoonshotConfig", device: "torch.device", calibration: Any, output: Output
) -> list[str]:
    """Prune and save the model, and return the lines to print."""
    pruner = load_pruner(args, config, device)
    metric = pruner_metric(pruner)
    if metric.name == "accuracy" and calibration == "c4":
        hint = "an image model needs images, such as a folder with a sub-folder per class"
        raise UsageError(hint, field="calibration")
    before = {dataset: metric.measure(dataset) for dataset in args.eval if is_first()}
    report = pruner.prune(calibration, progress=True, resume_dir=output.work())
    lines = [f"sparsity    {report.headline}"]
    lines += [f"dense       {report.mostly_dense}"] if report.mostly_dense else []
    if args.compact or config.pattern == "experts":
        lines.append(_compact(pruner, report))
    lines += metric.changes(before, report.record)
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


def add_convert_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `moonshot convert`."""
    add_model_options(parser, "DIR", "folder of a pruned checkpoint, or name on the Hub", loaded=False)
    add_format_option(parser, required=True)
    text = "folder for the new checkpoint; default: DIR-FORMAT, for a name on the Hub its last part"
    add_output_options(parser, text, required=False)


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
    from ..checkpoint.loading import local_folder

    folder = local_folder(args.model, whole=True)
    with open_output(args) as output:
        output.begin()
        convert_checkpoint(folder, args.output, args.format, **remote_code(args))
        output.finish()
    files = (Path(each).glob("*.safetensors") for each in (folder, args.output))
    before, after = (sum(path.stat().st_size for path in paths) / 2**20 for paths in files)
    print(f"weights     {before:.1f} → {after:.1f} MiB\nsaved       {args.output}")


def add_verify_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `moonshot verify`."""
    text = "folder of a pruned checkpoint, written by any program, or name on the Hub"
    add_model_options(parser, "DIR", text, loaded=False)
    parser.add_argument("--revision", help="branch, tag or commit of a name on the Hub")
    parser.add_argument("--json", action="store_true", help="print JSON")


def verify(args: argparse.Namespace) -> None:
    """`moonshot verify`: compare the weights with the declared metadata; exit status 1 if they do not match.

    Raises:
        UsageError: a model that is neither a folder nor a name on the Hub.
    """
    check_source(args.model)
    from .. import verify as verify_checkpoint

    revision = {} if args.revision is None or Path(args.model).is_dir() else {"revision": args.revision}
    result = verify_checkpoint(args.model, **remote_code(args), **revision)
    print(json.dumps(result.to_dict(), indent=2, ensure_ascii=False) if args.json else result.table())
    if not result:
        sys.exit(1)


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


class VerifyCommand(BaseOptimumCLICommand):
    COMMAND = CommandInfo(name="verify", help="Compare the weights of a pruned checkpoint with its metadata.")
    parse_args = staticmethod(add_verify_options)

    def run(self) -> None:
        guard(verify, self.args)


class MoonshotCommand(BaseOptimumCLICommand):
    COMMAND = CommandInfo(name="moonshot", help="Prune language and image models in one shot.")
    SUBCOMMANDS = tuple(
        CommandInfo(name=command.COMMAND.name, help=command.COMMAND.help, subcommand_class=command)
        for command in (PruneCommand, SweepCommand, RotateCommand, EvalCommand, ConvertCommand, VerifyCommand)
    )
