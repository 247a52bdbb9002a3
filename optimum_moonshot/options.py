"""The options of a run: every field of `MoonshotConfig`, declared once, and the recipes.

The checks of the fields, their reference and the options of the command line are derived from the declarations. Nothing
here imports torch, so that `--help` is fast.
"""

import dataclasses
import math
import operator
import re
import textwrap
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from .errors import check_choice, check_number, check_path, check_whole, require

_BOUNDS = {
    "above": ("above", operator.gt),
    "least": ("at least", operator.ge),
    "most": ("at most", operator.le),
    "below": ("below", operator.lt),
}
C = TypeVar("C", bound=type[Any])
# Defaults of the paper, section 4.3: "λ = 0.5 for vision models and λ = 0.9 for LLMs".
DEFAULT_LAM = {"language": 0.9, "vision": 0.5}
# A shared Fisher matrix is as good as one per row for language models, and worse for ResNet-20 (docs/choosing.md).
DEFAULT_FISHER = {"language": "shared", "vision": "rows"}
# Of `recover_steps` and `recover_lr`; all parameters together need more steps, and smaller ones.
RECOVERY_DEFAULTS = {
    "blockwise": (150, 0.05),
    "gradual": (150, 0.05),
    "distill": (300, 0.003),
    "routers": (150, 0.03),
}


def option(default: Any, help: str, *, more: str = "", field: Mapping[str, Any] = {}, **declared: Any) -> Any:
    """Declare a field of `Options`.

    Args:
        default: of the field; where it is a number, the command line adds it to the help.
        help: for the command line and the reference.
        more: for the reference only.
        field: further arguments of `dataclasses.field`.
        declared: `group`, the title of the group that begins with this field; `metavar`; `choices`, of which an
            optional field has the first where the command line gives no value; the bounds `least`, `most`, `above` and
            `below`; `path`, if it is one; `experts`, why the field has no effect with pattern="experts"; `shared`, for
            a hyperparameter of several solvers, which check it.
    """
    return dataclasses.field(default=default, metadata={"help": help, "more": more, **declared}, **field)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The fields of `MoonshotConfig`, the most used first: the order of the help and of the reference."""

    pattern: str = option(
        "unstructured",
        '"unstructured" (the default), n:m such as 2:4: n of every m consecutive inputs survive, "structured": removes '
        'whole input columns, or "experts": removes whole experts; n:4, with the letter n, gives each layer 1:4, 2:4, '
        "3:4 or leaves it dense, with --allocation fisher and a --sparsity",
        more="Any other m works too. Not every solver supports every pattern. None, with `bits`, removes nothing.",
        group="Target",
    )
    sparsity: float | None = option(
        None,
        "fraction of the weights (or experts) to remove, 0 to 1; n:m implies it",
        more='For "n:4" it is an upper bound on the fraction over all layers, reached as closely as steps of a quarter '
        "of a layer allow.",
    )
    bits: int | None = option(
        None,
        "8, 4 or 3: also round the surviving weights, to this many bits; without a pattern or a sparsity, quantize a "
        "dense model. Default: none",
        more="The grid is symmetric, with 2^bits - 1 values, and the objective the same: SparseGPT rounds while it "
        "prunes, other solvers afterwards.",
    )
    bits_per_weight: float | None = option(
        None, "like --target-bytes, given as the mean bits per weight of the pruned layers", above=0
    )
    target_bytes: int | str | None = option(
        None,
        'size of the packed checkpoint, such as "500MB": --allocation fisher chooses sparsity and bits of each matrix',
        more="Bytes as a number too, in place of a sparsity. With `bits`, only the sparsities are chosen; else also 8, "
        "4, 3 or the bits of the model's dtype, at the least cost to the model.",
        metavar="SIZE",
    )
    targets: Sequence[str] | None = option(
        None,
        "prune the modules whose names match; default: every Linear and Conv2d of the repeated layers",
        more="A list of regular expressions, searched for in the names. Embeddings, patch embeddings, stems and heads "
        "are pruned only if one matches them. In a model without repeated layers (a plain `torch.nn.Module`), the "
        "default is all but the first and the last layer.",
        experts="removes equally many experts of every layer",
    )
    ignore: Sequence[str] = option(
        (),
        "modules that stay dense",
        more="A list of regular expressions, matched like `targets`.",
        experts="removes equally many experts of every layer",
    )
    group_size: int = option(
        1, "neurons that are removed together, with --pattern structured", more="Heads are removed whole.", least=1
    )
    quant_group: int = option(128, "consecutive inputs that share a scale with --bits", more="A multiple of 64.")
    embedding_bits: int | None = option(
        8,
        "bits of the word embeddings and the LM head, tied or not, with --bits or --target-bytes: 8, 4, or 16, which "
        "leaves them as they are",
        more="They are rounded to nearest after the run, with the scales of least error, one per `quant_group`. "
        "8 bits do not change the perplexity of SmolLM2-135M, 4 bits add 63%. Position embeddings are not rounded; a "
        "head that `targets` selects is pruned instead. None is 16.",
    )

    solver: str = option(
        "sparsegpt",
        "sparsegpt (the default), alps (loses much less, in more time), obc (removes one weight at a time), cap (the "
        "same, in blocks), osscar (columns, for --pattern structured): these update the surviving weights; wanda or "
        "magnitude (only choose). For --pattern experts: osscar, reap or frequency",
        more="Or the name of a solver registered with `register_solver`, or by an installed package through an entry "
        "point in the group `optimum_moonshot.solvers`.",
        group="Quality",
        metavar="NAME",
    )
    lam: float | None = option(
        None,
        "weight of the reconstruction term, 0 to 1; the Fisher loss has the remaining weight, and 1 needs no backward "
        f"pass. Default: {DEFAULT_LAM['language']} for language models, {DEFAULT_LAM['vision']} for vision",
        metavar="LAMBDA",
        least=0,
        most=1,
    )
    rotation: str | None = option(
        None,
        "learned: rotate the residual stream and the heads before pruning, by matrices learned on the calibration data "
        "and merged into the weights; heads: rotate the heads only. Default: none",
        more="The matrices are orthogonal, and the model's function stays the same; `heads` keeps tied embeddings "
        "tied. Both also compute a channel permutation for n:m and, for patterns with a sparsity, scale rows to units "
        "of the loss.",
        choices=("learned", "heads"),
        experts="removes experts as they are",
    )
    recover: str | None = option(
        None,
        "blockwise: tune the surviving weights of one decoder layer after another on the calibration data; gradual: "
        "also prune it in stages; distill: train the whole model to reproduce the dense model's predictions; routers: "
        "like distill, but train the routers of a mixture of experts alone; zeros stay zeros. Default: none",
        more="Tuning needs no labels: a layer reproduces its dense output. The stages are six, each from the weights "
        "and inputs of the previous one. A decoder layer that loses neurons, heads or experts has all of its "
        "parameters tuned; experts are not removed in stages.",
        choices=("blockwise", "gradual", "distill", "routers"),
    )
    allocation: str | dict[str, float | str] = option(
        "uniform",
        '"uniform" (the default), "fisher" (by what each weight matrix costs the model), "owl" or "alpha" '
        "(AlphaPruning): how the sparsity budget is divided between the layers; or a JSON file of layer names or "
        "regular expressions, each with a sparsity or n:m",
        more='All preserve the total `sparsity` of an unstructured pattern. "fisher" assigns a sparsity to every '
        "matrix and expert, and runs some of the calibration samples forwards and backwards once more, also at λ = 1; "
        'it has no effect with pattern="structured", as the report notes. "owl" and "alpha" assign one per decoder '
        "layer. In Python the entries are a dict: the one with the layer's name applies, else the first whose "
        "expression matches part of it, else `pattern` and `sparsity`.",
        metavar="HOW",
        field={"hash": False},  # a dict has none
    )
    recompute: bool | None = option(
        None,
        'the paper\'s "++": the statistics of each block on the pruned blocks before it. Default: where that takes one '
        "more forward pass: language models at --lam 1, or with a shared Fisher term",
        more='At λ = 1 every block runs once more; so it does with fisher="shared", whose token weights s_t come from '
        "the dense model, on half of the samples where there are 32 or more. With a Fisher term per row the gradients "
        "are recomputed too, and the passes grow with the square of the number of blocks. Several variants share the "
        "statistics of the dense model.",
        experts="computes all statistics on the dense model",
    )
    fisher: str | None = option(
        None,
        '"rows": every row of a matrix has a Fisher term of its own, as in the paper; "shared": the rows share their '
        "mean, at little more than the cost of --lam 1. "
        f"Default: {DEFAULT_FISHER['language']} for language models, {DEFAULT_FISHER['vision']} for vision",
        more="The mean assumes that the tokens' gradients are independent: Σ_t s_t x_t x_tᵀ, where s_t is the mean "
        "square of the gradient over the rows (GuidedQuant, arXiv 2505.07004).",
        choices=("rows", "shared"),
        experts="has one Fisher term",
    )
    fisher_layers: str = option(
        "all",
        'layers that use the Fisher loss: "all" (the default) or "attention"',
        more="The others have λ = 1. The paper uses the attention's for language models.",
        metavar="LAYERS",
        choices=("all", "attention"),
        experts="uses the Fisher loss of the experts",
    )
    under_calibrated_experts: str = option(
        "all",
        'statistics of experts with few routed tokens: "all" tokens (the default), the "routed" ones as they are, or '
        'none, for pruning by "magnitude"',
        more="Few are less than one per four inputs. The report lists these experts.",
        choices=("all", "magnitude", "routed"),
        experts="uses the tokens routed to each expert, however few",
    )

    calibration: Any = option(
        None,
        "the default data of `MoonshotPruner.prune`, also for pruning while loading: "
        '``from_pretrained(name, quantization_config=MoonshotConfig(…, calibration="c4"))``',
        more="Excluded from `to_dict` and from comparison.",
        group="Data",
        field={"compare": False, "repr": False},
    )
    num_samples: int = option(128, "calibration samples", more="Fewer in the data are an error.", least=1)
    sequence_length: int | None = option(
        None, "tokens per sample, also for --eval; default: the model's longest, at most 256 (--eval: 2048)", least=2
    )
    seed: int = option(
        0, "seed of the sampling of calibration data", more="Equal seeds give bit-identical models.", least=0
    )

    batch_size: int = option(8, "samples at a time; changes memory and speed, not the result", group="Cost", least=1)
    max_memory: int | str | None = option(
        None,
        'memory for statistics and caches on the device, such as "8GiB"; default: 60% of the free memory',
        more="The rest is stored in host memory. The run uses less after an out-of-memory error.",
        metavar="SIZE",
    )
    offload_dir: str | None = option(
        None,
        "folder for caches that exceed the host memory",
        more="Its files are removed at the end.",
        metavar="DIR",
        path=True,
    )

    solver_options: Mapping[str, Any] = option(
        dataclasses.MISSING,
        "a hyperparameter of the solver, such as block_size=64; may be repeated",
        more="In Python a dict of name → value. `damping` and `block_size` are moved to their fields.",
        group="Hyperparameters",
        field={"default_factory": dict, "hash": False},
    )
    damping: float | None = option(
        None,
        "fraction of the mean diagonal added to a Hessian before it is factored (0.01)",
        more="In (0, 1]. It grows tenfold, up to 1, for a layer that cannot be factored otherwise; the report notes "
        "it. None is the solver's default, which the field has afterwards. No effect on solvers without it.",
        shared=True,
    )
    block_size: int | None = option(
        None,
        "columns that SparseGPT prunes together (128), or inputs of CAP's blocks (192)",
        more="SparseGPT compares the weights of all rows in these columns. None is the solver's default.",
        shared=True,
    )
    recover_steps: int | None = option(
        None,
        f"maximum steps of --recover for each decoder layer ({RECOVERY_DEFAULTS['blockwise'][0]}), or in total with "
        f"distill ({RECOVERY_DEFAULTS['distill'][0]}) or routers ({RECOVERY_DEFAULTS['routers'][0]})",
        more='8 samples each, with early stopping. "gradual" takes a tenth of them after each of its first five '
        "stages, the others after the last.",
        least=1,
    )
    recover_lr: float | None = option(
        None,
        "initial learning rate of --recover, relative to the weights "
        f"({RECOVERY_DEFAULTS['blockwise'][1]}; distill: {RECOVERY_DEFAULTS['distill'][1]}; "
        f"routers: {RECOVERY_DEFAULTS['routers'][1]})",
        more="A fraction of the root mean square of a parameter's surviving weights, with cosine decay to 0.",
        above=0,
        below=1,
    )
    rotation_weights: str = option(
        "fisher",
        '"fisher" (the default) weights every matrix by its Fisher loss; "equal" needs no backward pass',
        more='"fisher" runs it at λ = 1 too; "equal" does not scale rows.',
        choices=("fisher", "equal"),
    )
    rotation_steps: int | None = option(
        None,
        "maximum steps of --rotation (100, or 50 for models with matrices wider than 1,024)",
        more="With early stopping.",
        least=1,
    )
    rotation_lr: float = option(
        0.02, "initial learning rate of --rotation, in radians", more="With cosine decay to 0.", above=0, below=1
    )
    rotation_rows: int | None = option(
        None,
        "rows of each matrix that a step of --rotation samples (all, or 256 for models with matrices wider than 1,024)",
        least=1,
    )
    owl_threshold: float = option(5.0, "OWL: an outlier exceeds M times the mean", metavar="M", above=0)
    owl_lambda: float = option(
        0.08, "OWL: the densities of layers differ by at most twice this", metavar="LAMBDA", least=0, below=1
    )
    alpha_tau: float = option(
        0.1,
        "AlphaPruning: sparsities in proportion to 1 ± TAU",
        more="The paper's value for Llama-3.2-3B; 0.05 for the 1B.",
        metavar="TAU",
        least=0,
        below=1,
    )


Field = dataclasses.Field[Any]
OPTIONS: dict[str, Field] = {field.name: field for field in dataclasses.fields(Options)}
OF_THE_MACHINE = ("batch_size", "max_memory", "offload_dir")  # they do not change the result
SHARED_OPTIONS = tuple(name for name, field in OPTIONS.items() if "shared" in field.metadata)
GROUPS: dict[str, list[Field]] = {}
for _field in OPTIONS.values():
    if "group" in _field.metadata:
        _members = GROUPS[_field.metadata["group"]] = []
    _members.append(_field)

# budget → (unstructured, n:m): fields beside pattern and sparsity (docs/choosing.md). At 2:4 ALPS takes 1.4 times as
# long with λ = 0.9 as with 1, and diverges from the dense model by 17% less on Gemma 3 270M, 2% on SmolLM2-135M. After
# distillation neither λ = 0.9 nor a rotation gains there: divergences of 0.502 and 0.512, not 0.503 and 0.512.
ALLOCATION, _DISTILLED = {"allocation": "fisher"}, {"recover": "distill", "recover_steps": 40}
_FIXED = {"solver": "alps", "lam": 1.0, "fisher": "shared"}
_BUDGETED = {**_FIXED, **ALLOCATION, "lam": 0.5}
RECIPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "paper": ({"fisher": "rows"}, {"fisher": "rows"}),
    "fast": (_BUDGETED, {**_FIXED, "lam": 0.9}),
    "one-shot": ({**_BUDGETED, "rotation": "learned"}, {**_FIXED, "rotation": "learned"}),
    "recovered": ({**_BUDGETED, **_DISTILLED}, {**_FIXED, **_DISTILLED}),
}


def kind_of(field: Field) -> tuple[Any, bool]:
    """The type of a field without None, and whether None is allowed."""
    union = typing.get_origin(field.type) in (typing.Union, types.UnionType)
    kinds = typing.get_args(field.type) if union else (field.type,)
    others = [kind for kind in kinds if kind is not type(None)]
    return others[0] if len(others) == 1 else field.type, len(others) < len(kinds)


def within(value: float, bounds: Mapping[str, Any]) -> bool:
    """Whether a number satisfies the bounds of a declaration."""
    return all(satisfied(value, bounds[name]) for name, (_, satisfied) in _BOUNDS.items() if name in bounds)


def limits(bounds: Mapping[str, Any]) -> str:
    """The bounds of a declaration in words, such as "above 0 and at most 1"."""
    return " and ".join(f"{words} {bounds[name]:g}" for name, (words, _) in _BOUNDS.items() if name in bounds)


def check_values(options: Options) -> None:
    """Raise `MoonshotError` for a field whose value has the wrong type, or is none of its choices or out of its bounds.

    Fields without choices or bounds, other than numbers and switches, are checked where they are parsed.
    """
    for name, field in OPTIONS.items():
        value, (kind, optional), declared = getattr(options, name), kind_of(field), field.metadata
        if "choices" in declared:
            check_choice(name, value, declared["choices"], optional)
        elif kind is bool:
            valid = isinstance(value, bool) or (value is None and optional)
            require(valid, "use True or False", field=name, value=value)
        elif "shared" in declared or (value is None and optional):
            continue
        elif "path" in declared:
            check_path(name, value)
            require(isinstance(value, str), "give the path as a string", field=name, value=value)
        elif kind is int and "least" in declared:
            check_whole(name, value, declared["least"])
        elif kind is float:
            check_number(name, value)
            closed = "least" in declared and "most" in declared
            words = f"from {declared['least']:g} to {declared['most']:g}" if closed else limits(declared)
            valid = not words or (math.isfinite(value) and within(value, declared))
            require(valid, f"give a number {words}", field=name, value=value)


def documented(cls: C) -> C:
    """Class decorator that inserts the options into the docstring of a class, before its `Raises:`."""

    def in_python(match: re.Match[str]) -> str:
        name = match[1].replace("-", "_")
        return f"`{name}`" if name in OPTIONS else match[0]

    lines = ["Args:"]
    for title, fields in GROUPS.items():
        lines.append(f"    [{title}]")
        for field in fields:
            help = re.sub(r"--(pattern|allocation) (\w+)", r'\1="\2"', field.metadata["help"])
            help = re.sub(r"--([a-z-]+)", in_python, help)
            text = f"{field.name}: {help}. {field.metadata['more']}".strip()
            lines += textwrap.wrap(text, 112, initial_indent=" " * 4, subsequent_indent=" " * 8)
    if cls.__doc__ is not None:  # python -OO removes docstrings
        cls.__doc__ = cls.__doc__.replace("    Raises:", textwrap.indent("\n".join([*lines, "", "Raises:"]), " " * 4))
    return cls
