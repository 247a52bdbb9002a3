"""What the subcommands of `optimum-cli moonshot` share: the options of a method, loading, measuring, errors."""

import argparse
import importlib
import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import MoonshotError, reason

if TYPE_CHECKING:
    import torch

    from ..config import MoonshotConfig

BUDGETS = ("paper", "one-shot", "recovered")  # of `recipes`, which imports torch
RECIPE = (
    "the recommended settings for a --sparsity or an n:m --pattern: paper is the paper's own, one-shot adds a learned "
    "basis and sparsity where it is cheap, recovered tunes the weights besides; options that are given override it"
)
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
        'or "structured": whole input columns go; n:4, with the letter n, gives each layer 1:4, 2:4, 3:4 or leaves it '
        "dense, with --allocation fisher and a --sparsity"
    },
    "sparsity": {"type": float, "help": "share of the weights to remove, 0 to 1; follows from n:m"},
    "group_size": {"type": int, "help": "neurons that go or stay together, with --pattern structured (1)"},
    "allocation": {
        "metavar": "HOW",
        "help": '"uniform" (the default), "fisher" (by what each weight matrix costs the model), "owl" or "alpha" '
        "(AlphaPruning): how unstructured sparsity is divided between the layers; or a JSON file of layer names or "
        "regular expressions, each with a sparsity or n:m",
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
    "solver_options": {
        "action": "append",
        "metavar": "NAME=VALUE",
        "help": "a hyperparameter of the solver, such as block_size=64; repeat it for others",
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
        "on the calibration data; gradual: prune each in stages meanwhile; zeros stay zeros. Default: none",
    },
    "recover_steps": {"type": int, "help": "steps of that per decoder layer, at most (150)"},
    "rotation": {
        "nargs": "?",
        "const": "learned",
        "metavar": "HOW",
        "help": "learned (also when no HOW is given): rotate the residual stream and the heads before pruning, by "
        "matrices learned on the calibration data and merged into the weights; heads: these alone. Default: none",
    },
    "rotation_weights": {
        "metavar": "HOW",
        "help": '"fisher" (the default) weighs every matrix in that by its Fisher loss; "equal" needs no backward pass',
    },
    "rotation_steps": {"type": int, "help": "steps of that, at most (100)"},
    "rotation_lr": {"type": float, "help": "their first learning rate, in radians (0.02)"},
    "rotation_rows": {"type": int, "help": "rows of each matrix that it looks at (all); fewer are faster"},
    "recover_lr": {"type": float, "help": "their first learning rate, relative to the weights (0.05)"},
}

OUTPUT_HELP = "where the pruned model goes; a killed run leaves DIR.partial, and the same command goes on from there"
IMAGES_HELP = "Image models: a folder with one sub-folder of images per class, Parquet, or a data set on the Hub"
FORMAT_HELP = "dense loads anywhere; packed stores the weights that survive and one bit for each"
DTYPES = ("auto", "float32", "bfloat16", "float16")
FORMATS = ("dense", "packed")


# What the package calls the folders in which a command writes.
FOLDERS = ("output", "directory", "resume_dir", "work_dir")
SWITCHES = tuple(name for name, options in CONFIG_OPTIONS.items() if options.get("action") == "store_true")
# Fields that a sweep has several values of, and that the commands share with other functions.
_LISTS = ("lambdas", "sparsities", "patterns", "metric", "calibration", "format", "prompts", "temperature")
_NAMES = "|".join(sorted((*CONFIG_OPTIONS, *FOLDERS, *_LISTS), key=len, reverse=True))
_QUOTES = "'\""
_VALUE = r"""'[^']*'|"[^"]*"|\[[^]]*\]|\{[^}]*\}|[^\s:;,()]+"""
_FIELD = re.compile(rf"(?<![\w./-])(?P<name>{_NAMES})(?!\w)(?:=(?P<value>{_VALUE}))?")


class UsageError(MoonshotError):
    """A mistake in the command line, found before anything was loaded."""


def flag(name: str) -> str:
    """The option of a field; one that is given again and again has its name in the singular."""
    name = name.removesuffix("s") if CONFIG_OPTIONS.get(name, {}).get("action") == "append" else name
    return "--" + name.replace("_", "-")


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Which model, and how to load it."""
    parser.add_argument("model", metavar="MODEL", help="a language or image model: folder, or name on the Hub")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="of the loaded model; auto: as it was saved")
    parser.add_argument("--device", help="default: cuda if there is one, else cpu")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")


def add_method_options(parser: argparse.ArgumentParser, without: tuple[str, ...] = ()) -> None:
    """One option per field of MoonshotConfig, and `--import`.

    Args:
        parser: gets them.
        without: fields that the command has in another form.
    """
    group = parser.add_argument_group("method", "fields of MoonshotConfig, whose defaults hold for what is not given")
    if not without:
        group.add_argument("--recipe", choices=BUDGETS, help=RECIPE)
    for name, options in CONFIG_OPTIONS.items():
        if name not in without:
            group.add_argument(flag(name), dest=name, default=argparse.SUPPRESS, **options)
    parser.add_argument(
        "--import",
        dest="imports",
        action="append",
        default=[],
        metavar="MODULE",
        help="import a Python module first, such as one in this folder that registers a solver; repeat it for others",
    )


def import_modules(names: list[str]) -> None:
    """Import the modules of `--import`, which may lie in the current folder as for ``python -m``.

    Raises:
        UsageError: one that cannot be imported.
    """
    if names and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:  # whatever the code of a user raises
            kind = type(error).__name__
            raise UsageError(f"--import {name}: it cannot be imported ({kind}: {reason(error)})") from error


@dataclass(frozen=True)
class Meter:
    """What a model is measured by: higher accuracy or lower perplexity is better."""

    metric: str
    shown: str  # how to format it
    measure: Callable[[str], Any]  # a `Perplexity` or an `Accuracy` on the data of a name


def make_meter(
    model: Any, tokenizer: Any, processor: Any, sequence_length: int | None, batch_size: int, limit: int | None = None
) -> Meter:
    """What measures a model.

    Args:
        model, tokenizer, processor: as they were loaded; an image model has no tokenizer.
        sequence_length: tokens per window; None is the model's longest, at most 2048.
        batch_size: windows or images at a time.
        limit: the first so many windows or images alone.
    """
    from .. import accuracy, perplexity
    from ..model.facts import takes_images

    options: dict[str, Any] = {"batch_size": batch_size, "progress": True}
    if takes_images(model):
        return Meter("accuracy", ".2%", lambda data: accuracy(model, data, processor, max_images=limit, **options))
    options |= {"sequence_length": sequence_length, "max_windows": limit}
    return Meter("perplexity", ".3f", lambda data: perplexity(model, tokenizer, data, **options))


def make_config(args: argparse.Namespace) -> "MoonshotConfig":
    """The configuration that the options of a command are.

    Raises:
        UsageError: it is none.
    """
    from .. import MoonshotConfig

    given = {name: getattr(args, name) for name in CONFIG_OPTIONS if hasattr(args, name)}
    if "allocation" in given:
        given["allocation"] = read_allocation(given["allocation"])
    try:
        if "solver_options" in given:
            given["solver_options"] = read_options(given.get("solver", MoonshotConfig.solver), given["solver_options"])
        budget = getattr(args, "recipe", None)
        if budget is None:
            return MoonshotConfig(**given)
        wanted = "pattern" if "pattern" in given else "sparsity"
        expect(wanted in given, f"--recipe {budget}: give a --sparsity, or a --pattern such as 2:4")
        return MoonshotConfig.recipe(given.pop(wanted), budget, **given)
    except MoonshotError as error:
        raise UsageError(str(error)) from None


def read_allocation(given: str) -> str | dict[str, Any]:
    """One of the methods, or what a JSON file says.

    Raises:
        UsageError: neither of both.
    """
    from ..objective.allocation_rules import METHODS

    if given in METHODS:
        return given
    usage = f"--allocation {given}: neither one of {', '.join(METHODS)} nor a JSON file with an object of layers"
    try:
        rules = json.loads(Path(given).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{usage} ({_line(error)})") from None
    expect(isinstance(rules, dict), usage)
    return rules


def read_options(solver: str, given: list[str]) -> dict[str, Any]:
    """A solver's hyperparameters, of the types that it declares.

    Args:
        solver: its name.
        given: NAME=VALUE, as on the command line.

    Raises:
        MoonshotError: no such solver or hyperparameter, one that is given twice, or a value that it cannot have.
    """
    from ..solvers.base import parse_option, solver_options

    known, found = solver_options(solver), {}
    for text in given:
        name, sign, value = text.partition("=")
        usage = f"{flag('solver_options')} {text}"
        expect(bool(name and sign), f"{usage}: give NAME=VALUE")
        expect(name in known, f"{usage}: solver={solver!r} has {', '.join(known) or 'none'}")
        expect(name not in found, f"{usage}: {name} is given twice")
        try:
            found[name] = parse_option(known[name], value)
        except MoonshotError as error:
            raise UsageError(f"{usage}: {error}") from None
    return found


def find_device(name: str | None) -> "torch.device":
    """The device of this name; a GPU where there is one, else the CPU, without a name.

    Raises:
        UsageError: this machine has no such device.
    """
    import torch

    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError):
        raise UsageError(f"--device {name}: not a device of this machine") from None
    return device


def check_data(flag: str, sources: list[str]) -> None:
    """Raise `UsageError` for what is no data set, before anything is loaded.

    Args:
        flag: the option that the names came with.
        sources: names of corpora, paths, or names on the Hub.
    """
    from ..data.text import CORPORA, is_hub_name

    for source in sources:
        known = source in CORPORA or os.path.exists(os.path.expanduser(source)) or is_hub_name(source)
        expect(known, f"{flag} {source[:200]}: none of {', '.join(CORPORA)}, no file, no folder and no owner/name")


def check_source(name: str) -> None:
    """Raise `UsageError` for what is neither a folder nor may be a name on the Hub."""
    from ..data.text import is_hub_name

    known = Path(name).is_dir() or (is_hub_name(name) and not Path(name).exists())
    expect(known, f"{name}: not a folder, nor an owner/name on the Hub")


def load(loader: Callable[..., Any], args: argparse.Namespace) -> Any:
    """What `loader` loads, a model or a part of it.

    Args:
        loader: gets ``dtype`` and, where it was asked for, ``trust_remote_code``.
        args: of the command.

    Raises:
        MoonshotError: it cannot be loaded; it says why in one line.
    """
    try:
        return loader(dtype=args.dtype, **remote_code(args))
    except MoonshotError:
        raise
    except Exception as error:  # transformers raises OSError, ValueError, KeyError, ImportError, … for a wrong model
        raise MoonshotError(f"{args.model}: cannot be loaded ({reason(error)})") from error


def remote_code(args: argparse.Namespace) -> dict[str, Any]:
    """The option of `from_pretrained` that `--trust-remote-code` is."""
    return {"trust_remote_code": True} if args.trust_remote_code else {}


def expect(condition: bool, message: str) -> None:
    """Raise `UsageError(message)` unless `condition` holds."""
    if not condition:
        raise UsageError(message)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def as_options(message: str, plurals: Mapping[str, str], output: str | None) -> str:
    """What the package says of a field, said of the option that the field is on the command line.

    Args:
        message: such as ``lam=1.5: λ lies between 0 and 1``.
        plurals: fields whose option of this command has another name.
        output: what was given as `--output`, if the command has one; its folders have several names in the package.
    """

    def option(match: re.Match[str]) -> str:
        name, value = match["name"], match["value"]
        heads = match.start() == 0 and message[match.end() :][:1] in (":", "[")
        if value is None and "_" not in name and not heads:
            return match[0]  # a word of English
        if name in FOLDERS:
            return flag("output") if output is None or value is None else f"{flag('output')} {output}"
        shown = flag(plurals.get(name, name))
        if value is None or value == "None" or (name in SWITCHES and value == "True"):
            return shown
        items = re.sub(r"[\[\],'\"]+", "", value) if value.startswith("[") else value.strip(_QUOTES)
        return f"{shown} {items}"

    return _FIELD.sub(option, message)


def guard(
    work: Callable[[argparse.Namespace], None], args: argparse.Namespace, plurals: Mapping[str, str] | None = None
) -> None:
    """Do the work; what a user can mend is one line on stderr, without a traceback unless MOONSHOT_DEBUG=1.

    Args:
        work: what a command does.
        args: for it.
        plurals: as for `as_options`.

    Raises:
        SystemExit: the work failed: with status 2 for a `UsageError`, 130 for an interruption, else 1.
    """
    try:
        work(args)
        return
    except (MoonshotError, OSError, KeyboardInterrupt) as error:
        if os.environ.get("MOONSHOT_DEBUG") == "1":
            raise
        if isinstance(error, KeyboardInterrupt):
            status, message = 130, "interrupted"
        else:
            status = 2 if isinstance(error, UsageError) else 1
            message = as_options(_line(error), plurals or {}, getattr(args, "output", None))
    print(f"error: {message}", file=sys.stderr)
    sys.exit(status)
