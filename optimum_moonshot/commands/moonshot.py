"""`optimum-cli moonshot`: its subcommands; `prune`, `convert`, `export` and `verify` are in this file.

`optimum-cli` imports this module on every call, so torch and transformers are imported when a command runs. Commands
raise a `UsageError` for invalid options before a model is loaded, and a `MoonshotError` for other input.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optimum.commands.base import BaseOptimumCLICommand, CommandInfo

from ..errors import MoonshotError
from ..rotate.command import add_rotate_options, rotate
from ..shrink.command import add_shrink_options, shrink
from ..sweep.command import SWEPT, add_sweep_options, sweep
from .common import (
    UsageError,
    add_calibration_options,
    add_data_option,
    add_format_option,
    add_method_options,
    add_model_options,
    add_output_options,
    calibration_source,
    check_data,
    check_source,
    expect,
    find_device,
    import_modules,
    is_gguf,
    load_pruner,
    loading,
    loading_options,
    make_config,
    pruner_metric,
    remote_code,
)
from .evaluate import add_eval_options, evaluate
from .launch import guard, is_first
from .output import RESUMED_HELP, Output, open_output

if TYPE_CHECKING:
    import torch

    from ..config import MoonshotConfig
    from ..plan.report import Plan
    from ..pruner import MoonshotPruner
    from ..reports.prune_report import PruneReport

_MEMORY_OPTIONS = ("device_memory", "host_memory")


def add_prune_options(parser: argparse.ArgumentParser) -> None:
    add_model_options(parser, by_layer=True)
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
    """`moonshot prune`: load, measure, prune, measure, save, report; with `--dry-run`, print the plan."""
    start = time.perf_counter()
    import_modules(args.imports)
    config = make_config(args)
    compactable = config.pattern in ("structured", "experts")  # the latter always compacts
    message = "only pattern='structured' prunes neurons and heads, which can be removed"
    expect(compactable or not args.compact, message, field="compact")
    device = find_device(args.device)
    calibration = calibration_source(args, config)
    check_data("eval", args.eval)
    for name in _MEMORY_OPTIONS:
        expect(args.dry_run or getattr(args, name) is None, "only for --dry-run", field=name)
    if args.dry_run:
        print(_plan(args, config, device, calibration))
        return
    with open_output(args) as output:
        lines = _prune(args, config, device, calibration, output)
    if is_first():
        print(*lines, f"seconds     {time.perf_counter() - start:.1f}", sep="\n")


def _plan(args: argparse.Namespace, config: "MoonshotConfig", device: "torch.device", calibration: Any) -> "Plan":
    from .. import MoonshotPruner

    check_source(args.model)
    options = {name: getattr(args, name) for name in _MEMORY_OPTIONS} | {"resume_dir": args.output + ".partial"}
    patterns = ("*.safetensors", "*.bin")
    if is_gguf(args.model) or any(any(Path(args.model).glob(pattern)) for pattern in patterns):
        return load_pruner(args, config, device).plan(calibration, **options)
    with loading(args.model):
        return MoonshotPruner.plan_for(args.model, config, **options, **loading_options(args))


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
    add_model_options(parser, "DIR", "folder of a pruned checkpoint, or name on the Hub", loaded=False)
    add_format_option(parser, required=True)
    text = "folder for the new checkpoint; default: DIR-FORMAT, for a name on the Hub its last part"
    add_output_options(parser, text, required=False)


def convert(args: argparse.Namespace) -> None:
    """`moonshot convert`: save the same weights in another format."""
    check_source(args.model)
    name = args.model.rstrip("/") if Path(args.model).is_dir() else args.model.rpartition("/")[2]
    args.output = args.output or f"{name}-{args.format}"
    from .. import convert as convert_checkpoint
    from ..checkpoint.folder import local_folder

    folder = local_folder(args.model, whole=True)
    with open_output(args) as output:
        output.begin()
        convert_checkpoint(folder, args.output, args.format, **remote_code(args))
        output.finish()
    folders = (Path(folder), Path(args.output))
    before, after = (sum(path.stat().st_size for path in saved.glob("*.safetensors")) / 2**20 for saved in folders)
    print(f"weights     {before:.1f} → {after:.1f} MiB\nsaved       {args.output}")


def add_export_options(parser: argparse.ArgumentParser) -> None:
    add_model_options(parser, "DIR", "folder of a dense or packed checkpoint, or name on the Hub", loaded=False)
    parser.add_argument("file", metavar="FILE", help="the GGUF file, such as model.gguf")
    text = "f32, f16, bf16, q8_0 (default), or one that llama-cpp-python quantizes to, such as q6_k, q5_k_m or q4_0"
    parser.add_argument("--type", default="q8_0", help=text)
    text = "llama.cpp's convert_hf_to_gguf.py; default: $LLAMA_CPP_CONVERTER, else the one on the PATH"
    parser.add_argument("--converter", metavar="PATH", help=text)
    parser.add_argument("--python", metavar="PATH", help="the interpreter that runs the converter; default: this one")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing file")


def export(args: argparse.Namespace) -> None:
    """`moonshot export`: write the GGUF file of a checkpoint."""
    check_source(args.model)
    from .. import export_gguf

    names = ("type", "converter", "python", "overwrite", "trust_remote_code")
    notes = export_gguf(args.model, args.file, **{name: getattr(args, name) for name in names})
    print(f"size        {Path(args.file).stat().st_size / 2**20:.1f} MiB", *notes, f"saved       {args.file}", sep="\n")


def add_verify_options(parser: argparse.ArgumentParser) -> None:
    text = "folder of a pruned checkpoint, written by any program, or name on the Hub"
    add_model_options(parser, "DIR", text, loaded=False)
    parser.add_argument("--revision", help="branch, tag or commit of a name on the Hub")
    parser.add_argument("--json", action="store_true", help="print JSON")


def verify(args: argparse.Namespace) -> None:
    """`moonshot verify`: compare the weights with the declared metadata; exit status 1 if they do not match."""
    check_source(args.model)
    from .. import verify as verify_checkpoint

    revision = {} if args.revision is None or Path(args.model).is_dir() else {"revision": args.revision}
    result = verify_checkpoint(args.model, **remote_code(args), **revision)
    print(json.dumps(result.to_dict(), indent=2, ensure_ascii=False) if args.json else result.table())
    if not result:
        sys.exit(1)


def _subcommand(
    name: str,
    work: Callable[[argparse.Namespace], None],
    options: Callable[[argparse.ArgumentParser], None],
    help: str,
) -> CommandInfo:
    class Subcommand(BaseOptimumCLICommand):
        COMMAND = CommandInfo(name=name, help=help)
        parse_args = staticmethod(options)

        def run(self) -> None:
            for name, value in vars(self.args).items():
                if isinstance(value, str) and value.startswith("~/"):  # a shell does not expand --output=~/DIR
                    setattr(self.args, name, os.path.expanduser(value))
            guard(work, self.args, shared=work in (prune, sweep, rotate), plurals=SWEPT if work is sweep else {})

    return CommandInfo(name=name, help=help, subcommand_class=Subcommand)


class MoonshotCommand(BaseOptimumCLICommand):
    COMMAND = CommandInfo(name="moonshot", help="Prune language and image models in one shot.")
    SUBCOMMANDS = (
        _subcommand("prune", prune, add_prune_options, "Prune a language or image model in one shot and save it."),
        _subcommand("sweep", sweep, add_sweep_options, "Find the best λ, at several sparsities, on one calibration."),
        _subcommand("rotate", rotate, add_rotate_options, "Rotate a model so that pruning loses less, and save it."),
        _subcommand("shrink", shrink, add_shrink_options, "Make a model smaller, to a number of parameters or bytes."),
        _subcommand("eval", evaluate, add_eval_options, "Measure perplexity, zero-shot accuracy, or top-1 accuracy."),
        _subcommand("convert", convert, add_convert_options, "Pack the checkpoint of a pruned model, or unpack it."),
        _subcommand("export", export, add_export_options, "Export a model as a GGUF file for llama.cpp."),
        _subcommand("verify", verify, add_verify_options, "Compare a pruned checkpoint's weights with its metadata."),
    )
