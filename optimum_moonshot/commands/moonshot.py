"""`optimum-cli moonshot`: prune a model, measure its perplexity or accuracy, or convert it, from the shell.

`optimum-cli` imports this module on every call: torch and transformers wait for `run`.
"""

import argparse
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optimum.commands.base import BaseOptimumCLICommand, CommandInfo

from ..errors import MoonshotError

# One option per field of MoonshotConfig. There are no defaults here: an option that is not given is not passed on.
CONFIG_OPTIONS: dict[str, dict[str, Any]] = {
    "solver": {
        "metavar": "NAME",
        "help": "sparsegpt (the default), obc (removes one weight at a time), cap (the same, in blocks), osscar "
        "(removes one column at a time, for --pattern structured): these update the surviving weights; "
        "wanda or magnitude (only choose)",
    },
    "pattern": {
        "help": '"unstructured" (the default), n:m such as 2:4: n of every m consecutive inputs survive, '
        'or "structured": whole input columns go'
    },
    "sparsity": {"type": float, "help": "share of the weights to remove, 0 to 1; follows from n:m"},
    "group_size": {"type": int, "help": "neurons that go or stay together, with --pattern structured (1)"},
    "allocation": {
        "metavar": "HOW",
        "help": '"uniform" (the default), "owl" or "alpha" (AlphaPruning): how unstructured sparsity is divided '
        "between the layers; or a JSON file of layer names or regular expressions, each with a sparsity or n:m",
    },
    "owl_threshold": {"type": float, "metavar": "M", "help": "OWL: an outlier exceeds M times the mean (5)"},
    "owl_lambda": {"type": float, "metavar": "LAMBDA", "help": "OWL: densities spread over twice this (0.08)"},
    "alpha_tau": {"type": float, "metavar": "TAU", "help": "AlphaPruning: sparsities in proportion to 1 ± TAU (0.1)"},
    "recompute": {
        "action": "store_true",
        "help": 'the paper\'s "++": the statistics of each block on the pruned blocks before it (costs more passes)',
    },
    "lam": {
        "type": float,
        "metavar": "LAMBDA",
        "help": "weight of the reconstruction term, 0 to 1; the rest goes to the Fisher loss, and 1 needs no "
        "backward pass. Default: 0.9 for language models, 0.5 for vision",
    },
    "fisher": {"metavar": "LAYERS", "help": '"all" (the default) or "attention": the layers that use the Fisher loss'},
    "damping": {"type": float, "help": "share of the mean diagonal added to a Hessian before it is factored (0.01)"},
    "block_size": {
        "type": int,
        "help": "columns that SparseGPT prunes together (128), or inputs of CAP's blocks (192)",
    },
    "targets": {
        "nargs": "+",
        "action": "extend",
        "metavar": "REGEX",
        "help": "prune the modules whose names match; default: every Linear and Conv2d of the repeated layers",
    },
    "ignore": {"nargs": "+", "action": "extend", "metavar": "REGEX", "help": "modules that stay dense"},
    "num_samples": {"type": int, "help": "calibration samples (128)"},
    "sequence_length": {
        "type": int,
        "help": "tokens per sample, also for --eval; default: the model's longest, at most 2048",
    },
    "batch_size": {
        "type": int,
        "help": "samples at a time (8); memory and speed depend on it, the result does not",
    },
    "seed": {"type": int, "help": "of the choice of calibration samples (0)"},
    "max_memory": {
        "metavar": "SIZE",
        "help": 'what statistics and caches may take on the device, such as "8GiB"; default: 60%% of what is free',
    },
    "offload_dir": {"metavar": "DIR", "help": "folder for caches that exceed the host's memory too"},
    "recover": {
        "nargs": "?",
        "const": "blockwise",
        "metavar": "HOW",
        "help": "blockwise (also when no HOW is given): tune the surviving weights of one decoder layer after another "
        "on the calibration data; zeros stay zeros. Default: none",
    },
    "recover_steps": {"type": int, "help": "steps of that per decoder layer, at most (150)"},
    "recover_lr": {"type": float, "help": "their first learning rate, relative to the weights (0.05)"},
}

OUTPUT_HELP = "where the pruned model goes; a killed run leaves DIR.partial, and the same command goes on from there"
IMAGES_HELP = "Image models: a folder with one sub-folder of images per class, Parquet, or a data set on the Hub"
FORMAT_HELP = "dense loads anywhere; packed stores the weights that survive and one bit for each"
DTYPES = ("auto", "float32", "bfloat16", "float16")
FORMATS = ("dense", "packed")


class UsageError(MoonshotError):
    """A mistake in the command line, found before anything was loaded."""


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a language or image model: folder, or name on the Hub")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="of the loaded model; auto: as it was saved")
    parser.add_argument("--device", help="default: cuda if there is one, else cpu")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")


def add_prune_options(parser: argparse.ArgumentParser) -> None:
    """The options of `moonshot prune`."""
    _add_model_options(parser)
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
    group = parser.add_argument_group("method", "fields of MoonshotConfig, whose defaults hold for what is not given")
    for name, options in CONFIG_OPTIONS.items():
        group.add_argument(_flag(name), dest=name, default=argparse.SUPPRESS, **options)


def add_eval_options(parser: argparse.ArgumentParser) -> None:
    """The options of `moonshot eval`."""
    _add_model_options(parser)
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
    config = _config(args)
    structured = config.pattern == "structured"
    _usage(structured or not args.compact, "--compact: only --pattern structured leaves neurons and heads to remove")
    device = _device(args.device)
    output = _output_folder(args)
    calibration = _calibration(args, config)
    _check_data("--eval", args.eval)
    from optimum_moonshot import MoonshotPruner

    pruner = _load(lambda **kwargs: MoonshotPruner.from_pretrained(args.model, config, **kwargs), args)
    pruner.model.to(device)
    meter = _meter(pruner.model, pruner.tokenizer, pruner.processor, config.sequence_length, min(config.batch_size, 4))
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
        report.record_evaluation(_short_name(dataset), before, after, meter.metric)
        lines.append(f"{meter.metric:<12}{before:{meter.shown}} → {after:{meter.shown}} on {_short_name(dataset)}")
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
    device = _device(args.device)
    for name in ("sequence_length", "batch_size"):
        value = getattr(args, name)
        _usage(value is None or value >= 1, f"{_flag(name)} {value}: give a whole number of at least 1")
    _check_data("--dataset", args.dataset)
    model, tokenizer, processor = _load_for_evaluation(args)
    model.to(device).eval()
    meter = _meter(model, tokenizer, processor, args.sequence_length, args.batch_size)
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

    config = _load(lambda dtype, **kwargs: AutoConfig.from_pretrained(args.model, **kwargs), args)
    cls = model_class(config)
    if getattr(cls, "main_input_name", None) == "pixel_values":
        model = _load(lambda **kwargs: cls.from_pretrained(args.model, **kwargs), args)
        return model, None, load_processor(model, args.model, **_remote_code(args))
    model = _load(lambda **kwargs: AutoModelForCausalLM.from_pretrained(args.model, **kwargs), args)
    return model, _load(lambda dtype, **kwargs: AutoTokenizer.from_pretrained(args.model, **kwargs), args), None


@dataclass(frozen=True)
class Meter:
    """What a model is measured by: higher accuracy or lower perplexity is better."""

    metric: str
    shown: str  # how to format it
    measure: Callable[[str], float]


def _meter(model: Any, tokenizer: Any, processor: Any, sequence_length: int | None, batch_size: int) -> Meter:
    from optimum_moonshot import accuracy, perplexity
    from optimum_moonshot.images import takes_images

    if takes_images(model):
        options = {"batch_size": batch_size, "progress": True}
        return Meter("accuracy", ".2%", lambda data: accuracy(model, data, processor, **options).value)
    options = {"sequence_length": sequence_length, "batch_size": batch_size, "progress": True}
    return Meter("perplexity", ".3f", lambda data: perplexity(model, tokenizer, data, **options).value)


def convert(args: argparse.Namespace) -> None:
    """`moonshot convert`: the same weights in the other format."""
    _usage(Path(args.model).is_dir(), f"{args.model}: not a folder")
    args.output = args.output or f"{args.model.rstrip('/')}-{args.format}"
    _output_folder(args)
    from optimum_moonshot import convert as convert_checkpoint

    convert_checkpoint(args.model, args.output, args.format, **_remote_code(args))
    before, after = _weight_bytes(args.model), _weight_bytes(args.output)
    print(f"weights     {before / 2**20:.1f} → {after / 2**20:.1f} MiB")
    print(f"saved       {args.output}")


def _weight_bytes(folder: str) -> int:
    return sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))


def _config(args: argparse.Namespace):
    from optimum_moonshot import MoonshotConfig

    given = {name: getattr(args, name) for name in CONFIG_OPTIONS if hasattr(args, name)}
    given |= {"allocation": _allocation(given["allocation"])} if "allocation" in given else {}
    try:
        return MoonshotConfig(**given)
    except MoonshotError as error:
        raise UsageError(str(error)) from None


def _allocation(given: str) -> str | dict:
    """One of the methods, or what a JSON file says."""
    from optimum_moonshot.allocation import METHODS

    if given in METHODS:
        return given
    usage = f"--allocation {given}: neither one of {', '.join(METHODS)} nor a JSON file with an object of layers"
    try:
        rules = json.loads(Path(given).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{usage} ({_line(error)})") from None
    _usage(isinstance(rules, dict), usage)
    return rules


def _device(name: str | None):
    import torch

    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError):
        raise UsageError(f"--device {name}: not a device of this machine") from None
    return device


def _output_folder(args: argparse.Namespace) -> Path:
    output = Path(args.output).resolve()
    _usage(not output.exists() or output.is_dir(), f"--output {args.output}: not a folder")
    filled = output.is_dir() and any(output.iterdir())
    _usage(not filled or args.overwrite, f"--output {args.output}: it is not empty; --overwrite writes there anyway")
    same = Path(args.model).is_dir() and Path(args.model).resolve() == output
    _usage(not same, f"--output {args.output}: it is the model's own folder; choose another")
    return output


def _calibration(args: argparse.Namespace, config) -> str | None:
    from optimum_moonshot.solvers import solver_class

    if args.calibration is None:
        return "c4" if solver_class(config.solver).calibrated or config.allocation == "owl" else None
    _check_data("--calibration", [args.calibration])
    return args.calibration


def _check_data(flag: str, sources: list[str]) -> None:
    from optimum_moonshot.data import CORPORA, FORMATS

    for source in sources:
        # A name on the Hub has an owner; a file that is misspelt has a suffix.
        hub = re.fullmatch(r"[\w.-]+/[\w.-]+", source) is not None and not source.endswith(FORMATS)
        known = source in CORPORA or Path(source).expanduser().exists() or hub
        _usage(known, f"{flag} {source}: neither one of {', '.join(CORPORA)} nor a file, a folder or an owner/name")


def _load(load: Callable, args: argparse.Namespace):
    try:
        return load(dtype=args.dtype, **_remote_code(args))
    except MoonshotError:
        raise
    except Exception as error:  # transformers raises OSError, ValueError, KeyError, ImportError, … for a wrong model
        raise MoonshotError(f"{args.model}: cannot be loaded ({_first_line(error)})") from error


def _remote_code(args: argparse.Namespace) -> dict[str, Any]:
    return {"trust_remote_code": True} if args.trust_remote_code else {}


def _short_name(dataset: str) -> str:
    """The report may be published: a file or folder is known there by its name, not by its path."""
    return Path(dataset).resolve().name if os.path.exists(dataset) else dataset


def _usage(condition: bool, message: str) -> None:
    if not condition:
        raise UsageError(message)


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _guard(work: Callable[[argparse.Namespace], None], args: argparse.Namespace) -> None:
    """Do the work; what a user can mend is one line on stderr, without a traceback unless MOONSHOT_DEBUG=1."""
    try:
        work(args)
        return
    except (MoonshotError, OSError, KeyboardInterrupt) as error:
        if os.environ.get("MOONSHOT_DEBUG") == "1":
            raise
        if isinstance(error, KeyboardInterrupt):
            status, message = 130, "interrupted"
        else:
            status, message = 2 if isinstance(error, UsageError) else 1, _line(error)
    print(f"error: {message}", file=sys.stderr)
    sys.exit(status)


class PruneCommand(BaseOptimumCLICommand):
    COMMAND = CommandInfo(name="prune", help="Prune a language or image model in one shot and save it.")
    parse_args = staticmethod(add_prune_options)

    def run(self):
        _guard(prune, self.args)


class EvalCommand(BaseOptimumCLICommand):
    COMMAND = CommandInfo(name="eval", help="Measure a model's perplexity, or its accuracy on images.")
    parse_args = staticmethod(add_eval_options)

    def run(self):
        _guard(evaluate, self.args)


class ConvertCommand(BaseOptimumCLICommand):
    COMMAND = CommandInfo(name="convert", help="Pack the checkpoint of a pruned model, or unpack it.")
    parse_args = staticmethod(add_convert_options)

    def run(self):
        _guard(convert, self.args)


class MoonshotCommand(BaseOptimumCLICommand):
    COMMAND = CommandInfo(name="moonshot", help="Prune language and image models in one shot.")
    SUBCOMMANDS = tuple(
        CommandInfo(name=command.COMMAND.name, help=command.COMMAND.help, subcommand_class=command)
        for command in (PruneCommand, EvalCommand, ConvertCommand)
    )
