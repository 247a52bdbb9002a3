"""The options of a method: one for each field of `MoonshotConfig`, and the configuration that they are."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import MoonshotError
from .common import UsageError, expect, one_line

if TYPE_CHECKING:
    from ..config import MoonshotConfig

BUDGETS = ("paper", "one-shot", "recovered")  # of `recipes`, which imports torch
RECIPE = (
    "the recommended settings for a --sparsity or an n:m --pattern: paper is the paper's own, one-shot takes a "
    "better solver, a learned basis and sparsity where it is cheap, recovered tunes the weights besides; options that "
    "are given override it"
)
# One option per field of MoonshotConfig. There are no defaults here: an option that is not given is not passed on.
CONFIG_OPTIONS: dict[str, dict[str, Any]] = {
    "solver": {
        "metavar": "NAME",
        "help": "sparsegpt (the default), alps (loses much less, in more time), obc (removes one weight at a time), "
        "cap (the same, in blocks), osscar (columns, for --pattern structured): these update the surviving weights; "
        "wanda or magnitude (only choose). For --pattern experts: osscar, reap or frequency",
    },
    "pattern": {
        "help": '"unstructured" (the default), n:m such as 2:4: n of every m consecutive inputs survive, '
        '"structured": whole input columns go, or "experts": whole experts of a mixture go; n:4, with the letter n, '
        "gives each layer 1:4, 2:4, 3:4 or leaves it dense, with --allocation fisher and a --sparsity"
    },
    "sparsity": {"type": float, "help": "share of the weights (of the experts) to remove, 0 to 1; follows from n:m"},
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
    "expert_tokens": {
        "metavar": "HOW",
        "help": "routed (the default): an expert's statistics are of the tokens that the model sends it; all: of all",
    },
    "under_calibrated_experts": {
        "metavar": "HOW",
        "help": "experts that few tokens reach have all tokens instead (the default), go by magnitude, or stay routed",
    },
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


def flag(name: str) -> str:
    """The option of a field; one that is given again and again has its name in the singular."""
    name = name.removesuffix("s") if CONFIG_OPTIONS.get(name, {}).get("action") == "append" else name
    return "--" + name.replace("_", "-")


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
        raise UsageError(f"{usage} ({one_line(error)})") from None
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
