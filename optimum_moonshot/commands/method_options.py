"""The options of a method, one for each field of `MoonshotConfig`, and of its calibration data."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import MoonshotError, Option, Text, one_line
from .common import IMAGES_HELP, UsageError, check_data, expect, usage_errors

if TYPE_CHECKING:
    from ..config import MoonshotConfig
    from ..data.self_calibration import SelfCalibration

BUDGETS = ("paper", "one-shot", "recovered")  # of `recipes`, which imports torch
# Every field of MoonshotConfig by purpose, the most used first: the order of the help and of the reference.
GROUPS: dict[str, tuple[str, ...]] = {
    "Target": (
        *("pattern", "sparsity", "bits", "bits_per_weight", "target_bytes", "targets", "ignore", "group_size"),
        "quant_group",
    ),
    "Quality": (
        *("solver", "lam", "rotation", "recover", "allocation", "recompute", "fisher"),
        "under_calibrated_experts",
    ),
    "Data": ("calibration", "num_samples", "sequence_length", "seed"),
    "Cost": ("batch_size", "max_memory", "offload_dir"),
    "Hyperparameters": (
        *("solver_options", "damping", "block_size", "recover_steps", "recover_lr", "rotation_weights"),
        *("rotation_steps", "rotation_lr", "rotation_rows", "owl_threshold", "owl_lambda", "alpha_tau"),
    ),
}
# One option per field of MoonshotConfig. The defaults are those of the fields: only the options given are passed on.
CONFIG_OPTIONS: dict[str, dict[str, Any]] = {
    "solver": {
        "metavar": "NAME",
        "help": "sparsegpt (the default), alps (loses much less, in more time), obc (removes one weight at a time), "
        "cap (the same, in blocks), osscar (columns, for --pattern structured): these update the surviving weights; "
        "wanda or magnitude (only choose). For --pattern experts: osscar, reap or frequency",
    },
    "pattern": {
        "help": '"unstructured" (the default), n:m such as 2:4: n of every m consecutive inputs survive, '
        '"structured": removes whole input columns, or "experts": removes whole experts; n:4, with the letter n, '
        "gives each layer 1:4, 2:4, 3:4 or leaves it dense, with --allocation fisher and a --sparsity"
    },
    "sparsity": {"type": float, "help": "fraction of the weights (of the experts) to remove, 0 to 1; follows from n:m"},
    "bits": {
        "type": int,
        "help": "8, 4 or 3: also round the surviving weights, to this many bits; without a pattern or a sparsity, "
        "quantize a dense model. Default: none",
    },
    "quant_group": {"type": int, "help": "consecutive inputs that share a scale with --bits (128)"},
    "target_bytes": {
        "metavar": "SIZE",
        "help": 'size of the packed checkpoint, such as "500MB": --allocation fisher chooses sparsity and bits of each '
        "matrix",
    },
    "bits_per_weight": {"type": float, "help": "as --target-bytes, by the mean bits per weight of the pruned layers"},
    "group_size": {"type": int, "help": "neurons that are removed together, with --pattern structured (1)"},
    "allocation": {
        "metavar": "HOW",
        "help": '"uniform" (the default), "fisher" (by what each weight matrix costs the model), "owl" or "alpha" '
        "(AlphaPruning): how the sparsity budget is divided between the layers; or a JSON file of layer names or "
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
        "help": "weight of the reconstruction term, 0 to 1; the Fisher loss has the remaining weight, and 1 needs no "
        "backward pass. Default: 0.9 for language models, 0.5 for vision",
    },
    "fisher": {"metavar": "LAYERS", "help": '"all" (the default) or "attention": the layers that use the Fisher loss'},
    "under_calibrated_experts": {
        "metavar": "HOW",
        "help": "experts with few routed tokens: all tokens instead (the default), magnitude, or routed as they are",
    },
    "damping": {"type": float, "help": "fraction of the mean diagonal added to a Hessian before it is factored (0.01)"},
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
    "batch_size": {"type": int, "help": "samples at a time (8); changes memory and speed, not the result"},
    "seed": {"type": int, "help": "seed of the sampling of calibration data (0)"},
    "max_memory": {
        "metavar": "SIZE",
        "help": 'memory for statistics and caches on the device, such as "8GiB"; default: 60%% of the free memory',
    },
    "offload_dir": {"metavar": "DIR", "help": "folder for caches that exceed the host memory"},
    "recover": {
        "nargs": "?",
        "const": "blockwise",
        "metavar": "HOW",
        "help": "blockwise (also when no HOW is given): tune the surviving weights of one decoder layer after another "
        "on the calibration data; gradual: also prune each in stages; distill: train the whole model to reproduce the "
        "dense model's predictions; zeros stay zeros. Default: none",
    },
    "recover_steps": {
        "type": int,
        "help": "maximum steps of --recover per decoder layer (150), of distill: in all (300)",
    },
    "rotation": {
        "nargs": "?",
        "const": "learned",
        "metavar": "HOW",
        "help": "learned (also when no HOW is given): rotate the residual stream and the heads before pruning, by "
        "matrices learned on the calibration data and merged into the weights; heads: these alone. Default: none",
    },
    "rotation_weights": {
        "metavar": "HOW",
        "help": '"fisher" (the default) weights every matrix by its Fisher loss; "equal" needs no backward pass',
    },
    "rotation_steps": {"type": int, "help": "maximum steps of --rotation (100)"},
    "rotation_lr": {"type": float, "help": "initial learning rate of --rotation, in radians (0.02)"},
    "rotation_rows": {"type": int, "help": "rows of each matrix that --rotation uses (all); fewer are faster"},
    "recover_lr": {
        "type": float,
        "help": "initial learning rate of --recover, relative to the weights (0.05; distill: 0.003)",
    },
}


def flag(name: str) -> str:
    """The option of a field; one that is repeated for each value has its name in the singular."""
    return "--" + (name.removesuffix("s") if name in ("solver_options", "imports") else name).replace("_", "-")


def add_method_options(parser: argparse.ArgumentParser, without: tuple[str, ...] = ()) -> None:
    """Add `--import`, and one option per field of MoonshotConfig, except those `without` one."""
    for title, names in GROUPS.items():
        group = parser.add_argument_group(f"method: {title.lower()}")
        if not without and title == "Target":
            _add_recipe_option(group)
        for name in names:
            if name in CONFIG_OPTIONS and name not in without:
                group.add_argument(flag(name), dest=name, default=argparse.SUPPRESS, **CONFIG_OPTIONS[name])
    parser.add_argument(
        "--import",
        dest="imports",
        action="append",
        default=[],
        metavar="MODULE",
        help="import a Python module first, such as one in this folder that registers a solver; repeat it for others",
    )


def _add_recipe_option(group: Any) -> None:
    group.add_argument(
        "--recipe",
        choices=BUDGETS,
        help="the recommended settings for a --sparsity or an n:m --pattern: paper is the paper's own, one-shot adds a "
        "better solver, a learned basis and a sparsity budget for each layer, recovered also tunes the weights; other "
        "options override it",
    )


def make_config(args: argparse.Namespace) -> "MoonshotConfig":
    """The configuration of a command; `UsageError` if its options do not make a valid one."""
    from .. import MoonshotConfig

    fields = {name: getattr(args, name) for name in CONFIG_OPTIONS if hasattr(args, name)}
    if "allocation" in fields:
        fields["allocation"] = _read_allocation(fields["allocation"])
    with usage_errors():
        if "solver_options" in fields:
            solver = fields.get("solver", MoonshotConfig.solver)
            fields["solver_options"] = _parse_options(solver, fields["solver_options"])
        budget = getattr(args, "recipe", None)
        if budget is None:
            return MoonshotConfig(**fields)
        pattern = "pattern" if "pattern" in fields else "sparsity"
        hint = Text("give a {}, or a {}", "sparsity", Option("pattern", "2:4"))
        expect(pattern in fields, hint, field="recipe", value=budget)
        return MoonshotConfig.recipe(fields.pop(pattern), budget, **fields)


def _read_allocation(value: str) -> str | dict[str, Any]:
    """The name of a method, or the contents of a JSON file."""
    from ..objective.allocation_rules import METHODS

    if value in METHODS:
        return value
    usage = f"neither one of {', '.join(METHODS)} nor a JSON file with an object of layers"
    try:
        rules = json.loads(Path(value).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{usage} ({one_line(error)})", field="allocation", value=value) from None
    expect(isinstance(rules, dict), usage, field="allocation", value=value)
    return rules


def _parse_options(solver: str, texts: list[str]) -> dict[str, Any]:
    """Parse hyperparameters of a solver, NAME=VALUE each, with the types that it declares."""
    from ..solvers.base import solver_options
    from ..solvers.hyperparameters import parse_option

    options, values = solver_options(solver), {}
    for text in texts:
        name, sign, value = text.partition("=")
        expect(bool(name and sign), "give NAME=VALUE", field="solver_options", value=text)
        message = Text(f"{{}} has {', '.join(options) or 'none'}", Option("solver", solver))
        expect(name in options, message, field="solver_options", value=text)
        expect(name not in values, f"{name} is given twice", field="solver_options", value=text)
        try:
            values[name] = parse_option(options[name], value)
        except MoonshotError as error:
            raise error.within(Option("solver_options", text)) from None
    return values


def add_calibration_options(parser: argparse.ArgumentParser, default: str = "the default") -> None:
    """Add `--calibration`, with a remark on its default, and the options of self-calibration."""
    parser.add_argument(
        "--calibration",
        metavar="DATA",
        help=f"c4 ({default}), wikitext2, ptb, a text, JSON, CSV or Parquet file, a data set of text or conversations "
        f"on the Hub, or self: text that the dense model generates first. {IMAGES_HELP}",
    )
    group = parser.add_argument_group("calibration on text that the model generates", "with --calibration self")
    group.add_argument(
        "--prompts",
        metavar="FILE",
        help="prompts, formatted by its chat template if it has one: one per line of a .txt file, or a column of a "
        "JSON, CSV or Parquet file; default: its BOS token alone",
    )
    group.add_argument("--temperature", type=float, metavar="T", help="sampling temperature (1)")
    group.add_argument(
        "--thinking",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="enable or disable thinking in the chat template; default: the template's own",
    )


def calibration_source(args: argparse.Namespace, config: "MoonshotConfig") -> "str | SelfCalibration | None":
    """The data of `--calibration`; by default C4 if the method needs data, else None."""
    from ..objective.allocation_rules import NEEDING_DATA
    from ..solvers import solver_class

    given = ((name, getattr(args, name)) for name in ("prompts", "temperature", "thinking"))
    options = {name: value for name, value in given if value is not None}
    if args.calibration == "self":
        from ..data.self_calibration import SelfCalibration

        with usage_errors():
            return SelfCalibration(**options)
    for name in options:
        raise UsageError(Text("only for {}", Option("calibration", "self")), field=name)
    if args.calibration is None:
        return "c4" if solver_class(config.solver).calibrated or config.allocation in NEEDING_DATA else None
    check_data("calibration", [args.calibration])
    return str(args.calibration)
