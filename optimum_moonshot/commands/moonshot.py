"""`optimum-cli moonshot`: prune a model, measure its perplexity or accuracy, or convert it, from the shell.

`optimum-cli` imports this module on every call: torch and transformers wait for `run`.
"""

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

from optimum.commands.base import BaseOptimumCLICommand, CommandInfo

from ..errors import MoonshotError
from .common import (
    FORMAT_HELP,
    FORMATS,
    IMAGES_HELP,
    OUTPUT_HELP,
    UsageError,
    add_method_options,
    add_model_options,
    calibration_source,
    check_data,
    expect,
    find_device,
    flag,
    guard,
    load,
    make_config,
    make_meter,
    output_folder,
    remote_code,
    short_name,
)  # fmt: skip
from .sweep import SweepCommand


def add_prune_options(parser: argparse.ArgumentParser) -> None:
    """The options of `moonshot prune`."""
    add_model_options(parser)
    parser.add_argument("--output", required=True, metavar="DIR", help=OUTPUT_HELP)
    parser.add_argument("--overwrite", action="store_true", help="write to DIR although it holds files")
    parser.add_argument("--format", choices=FORMATS, default="dense", help=FORMAT_HELP)
    parser.add_argument(
        "--calibration",
        metavar="DATA",
        help=f"c4 (the default; magnitude needs none), wikitext2, ptb, or a text, JSON or Parquet file. {IMAGES_HELP}",
    )
    parser.add_argument(
        "--eval",
        nargs="+",
        action="extend",
        default=[],
        metavar="DATA",
        help="measure perplexity, or an image model's top-1 accuracy, on these before and after",
    )
    parser.add_argument(
        "--compact",
        action="store_true",
        help="after --pattern structured: remove the dead neurons and heads, so that the model is smaller",
    )
    add_method_options(parser)


def add_eval_options(parser: argparse.ArgumentParser) -> None:
    """The options of `moonshot eval`."""
    add_model_options(parser)
    parser.add_argument(
        "--dataset",
        nargs="+",
        action="extend",
        required=True,
        metavar="DATA",
        help=f"c4, wikitext2, ptb, or a text, JSON or Parquet file. {IMAGES_HELP}",
    )
    parser.add_argument(
        "--sequence-length", type=int, help="tokens per window; default: the model's longest, at most 2048"
    )
    parser.add_argument("--batch-size", type=int, default=4, help="windows or images at a time (4)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_convert_options(parser: argparse.ArgumentParser) -> None:
    """The options of `moonshot convert`."""
    parser.add_argument("model", metavar="DIR", help="folder of a pruned checkpoint")
    parser.add_argument("--format", choices=FORMATS, required=True, help=FORMAT_HELP)
    parser.add_argument("--output", metavar="DIR", help="where the new checkpoint goes; default: DIR-FORMAT")
    parser.add_argument("--overwrite", action="store_true", help="write to the output although it holds files")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")


def prune(args: argparse.Namespace) -> None:
    """`moonshot prune`: load, measure, prune, measure, save, report."""
    start = time.perf_counter()
    config = make_config(args)
    structured = config.pattern == "structured"
    expect(structured or not args.compact, "--compact: only --pattern structured leaves neurons and heads to remove")
    device = find_device(args.device)
    output = output_folder(args)
    calibration = calibration_source(args, config)
    check_data("--eval", args.eval)
    from optimum_moonshot import MoonshotPruner

    pruner = load(lambda **kwargs: MoonshotPruner.from_pretrained(args.model, config, **kwargs), args)
    pruner.model.to(device)
    meter = make_meter(
        pruner.model, pruner.tokenizer, pruner.processor, config.sequence_length, min(config.batch_size, 4)
    )
    if meter.metric == "accuracy" and calibration == "c4":
        raise UsageError("--calibration: an image model needs images, such as a folder with a sub-folder per class")
    dense = {dataset: meter.measure(dataset) for dataset in args.eval}
    partial = output.with_name(output.name + ".partial")
    report = pruner.prune(calibration, progress=True, resume_dir=str(partial))
    lines = [f"sparsity    {report.sparsity:.4f}"]
    if args.compact:
        lines.append(_compact(pruner))
    for dataset, before in dense.items():
        after = meter.measure(dataset)
        report.record_evaluation(short_name(dataset), before, after, meter.metric)
        lines.append(f"{meter.metric:<12}{before:{meter.shown}} → {after:{meter.shown}} on {short_name(dataset)}")
    pruner.save_pretrained(args.output, format=args.format)
    lines.append(f"saved       {args.output}")
    lines.append(f"seconds     {time.perf_counter() - start:.1f}")
    print(report.table(), "", *lines, sep="\n")


def _compact(pruner) -> str:
    """Make the pruned model smaller; where that fails, it is saved as it is."""
    try:
        before, after = pruner.compact().parameters
    except MoonshotError as error:
        pruner.report.notes.append(f"not compacted: {error}")
        return f"not compacted: {error}"
    return f"parameters  {before:,} → {after:,}"


def evaluate(args: argparse.Namespace) -> None:
    """`moonshot eval`: perplexity, or an image model's top-1 accuracy, per dataset."""
    device = find_device(args.device)
    for name in ("sequence_length", "batch_size"):
        value = getattr(args, name)
        expect(value is None or value >= 1, f"{flag(name)} {value}: give a whole number of at least 1")
    check_data("--dataset", args.dataset)
    model, tokenizer, processor = _load_for_evaluation(args)
    model.to(device).eval()
    meter = make_meter(model, tokenizer, processor, args.sequence_length, args.batch_size)
    values = {}
    for dataset in args.dataset:
        values[dataset] = meter.measure(dataset)
        if not args.json:
            print(f"{meter.metric:<12}{values[dataset]:{meter.shown}} on {dataset}", flush=True)
    if args.json:
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        print(json.dumps({"model": args.model, meter.metric: finite}))


def _load_for_evaluation(args: argparse.Namespace) -> tuple[Any, Any, Any]:
    """A model, and its tokenizer or its image processor."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from optimum_moonshot.pruner import load_processor, model_class

    config = load(lambda dtype, **kwargs: AutoConfig.from_pretrained(args.model, **kwargs), args)
    cls = model_class(config)
    if getattr(cls, "main_input_name", None) == "pixel_values":
        model = load(lambda **kwargs: cls.from_pretrained(args.model, **kwargs), args)
        return model, None, load_processor(model, args.model, **remote_code(args))
    model = load(lambda **kwargs: AutoModelForCausalLM.from_pretrained(args.model, **kwargs), args)
    return model, load(lambda dtype, **kwargs: AutoTokenizer.from_pretrained(args.model, **kwargs), args), None


def convert(args: argparse.Namespace) -> None:
    """`moonshot convert`: the same weights in the other format."""
    expect(Path(args.model).is_dir(), f"{args.model}: not a folder")
    args.output = args.output or f"{args.model.rstrip('/')}-{args.format}"
    output_folder(args)
    from optimum_moonshot import convert as convert_checkpoint

    convert_checkpoint(args.model, args.output, args.format, **remote_code(args))
    before, after = _weight_bytes(args.model), _weight_bytes(args.output)
    print(f"weights     {before / 2**20:.1f} → {after / 2**20:.1f} MiB")
    print(f"saved       {args.output}")


def _weight_bytes(folder: str) -> int:
    return sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))


class PruneCommand(BaseOptimumCLICommand):
    COMMAND = CommandInfo(name="prune", help="Prune a language or image model in one shot and save it.")
    parse_args = staticmethod(add_prune_options)

    def run(self):
        guard(prune, self.args)


class EvalCommand(BaseOptimumCLICommand):
    COMMAND = CommandInfo(name="eval", help="Measure a model's perplexity, or its accuracy on images.")
    parse_args = staticmethod(add_eval_options)

    def run(self):
        guard(evaluate, self.args)


class ConvertCommand(BaseOptimumCLICommand):
    COMMAND = CommandInfo(name="convert", help="Pack the checkpoint of a pruned model, or unpack it.")
    parse_args = staticmethod(add_convert_options)

    def run(self):
        guard(convert, self.args)


class MoonshotCommand(BaseOptimumCLICommand):
    COMMAND = CommandInfo(name="moonshot", help="Prune language and image models in one shot.")
    SUBCOMMANDS = tuple(
        CommandInfo(name=command.COMMAND.name, help=command.COMMAND.help, subcommand_class=command)
        for command in (PruneCommand, SweepCommand, EvalCommand, ConvertCommand)
    )
