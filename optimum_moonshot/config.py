"""`MoonshotConfig`: all settings of a pruning run, validated on construction."""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

from .config_checks import check_combinations, check_experts, check_supported, check_values
from .errors import MAX_INT, MoonshotError, Option, Text, check_expressions, require, shown
from .objective.allocation_rules import PatternRules
from .objective.grid import Grid
from .objective.patterns import Experts, MixedNM, Pattern, Unstructured, parse_pattern
from .recipes import recipe
from .solvers.base import Solver, make_solver, solver_class
from .solvers.base import solver_options as options_of
from .solvers.hyperparameters import check_option, check_options

# Defaults of the paper, section 4.3: "λ = 0.5 for vision models and λ = 0.9 for LLMs".
DEFAULT_LAM = {"language": 0.9, "vision": 0.5}
# Hyperparameters that several solvers have, and that are fields of a configuration for that reason.
SHARED_OPTIONS = ("damping", "block_size")
# Defaults of `recover_steps` and `recover_lr`; all parameters together need more steps, and smaller ones.
RECOVERY_DEFAULTS = {"blockwise": (150, 0.05), "gradual": (150, 0.05), "distill": (300, 0.003)}


class _SolverDefault(float):
    """A hyperparameter with the solver's default: `dataclasses.replace` with another solver uses that one's default."""


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class MoonshotConfig:
    """The settings of a pruning run.

    Args:
        [Target]
        pattern: "unstructured"; "n:m" such as "2:4", which keeps 2 of every 4 consecutive inputs; "structured", which
            removes whole input columns; or "experts", which removes whole experts of every mixture, so that the model
            is smaller at once. With allocation="fisher" also "n:4" (or any m, with the letter n): each layer gets 1:4,
            2:4 or 3:4, or stays dense. Not every solver supports every pattern. None, with `bits`, removes nothing.
        sparsity: fraction of the weights (of the column groups, of the experts of every layer) to remove, in [0, 1];
            implied by n:m. For "n:4" it is an upper bound on the fraction over all layers, reached as closely as steps
            of a quarter of a layer allow.
        bits: 8, 4 or 3 also rounds the surviving weights to a symmetric grid of 2^bits - 1 values, by the same
            objective: SparseGPT while it prunes, other solvers afterwards. ``MoonshotConfig(bits=4)``, without a
            pattern or a sparsity, quantizes a dense model. None does not.
        bits_per_weight: as `target_bytes`, by the mean number of bits per weight of the pruned layers.
        target_bytes: bytes (or "500MB") of the packed checkpoint of the whole model, in place of a sparsity: with
            allocation="fisher" each matrix gets the sparsity, and unless `bits` are given also the bits of its
            survivors (8, 4, 3 or those of the model's dtype), that cost the model least. None sets no such target.
        targets: regular expressions searched for in module names; None prunes every Linear and Conv2d of the repeated
            layers (decoder or encoder layers, stages). Embeddings, patch embeddings, stems and heads are pruned only if
            an expression matches them. In a model without repeated layers (a plain `torch.nn.Module`), None prunes all
            but the first and the last layer.
        ignore: regular expressions searched for in the names of modules that stay dense.
        group_size: consecutive columns that are removed together; pattern="structured" only. In a model these are
            neurons, so that widths remain multiples of it; attention heads are always removed whole.
        quant_group: consecutive inputs of a row that share one scale of the grid, a multiple of 64.
        [Quality]
        solver: "sparsegpt", "alps", "obc", "cap" and (structured) "osscar" update the surviving weights; "wanda" and
            "magnitude" only select them. For whole experts: "osscar" minimizes both objectives, "reap" and "frequency"
            rank by the criteria of these names. Or the name of a solver registered with `register_solver`, or by an
            installed package through an entry point in the group `optimum_moonshot.solvers`.
        lam: λ in [0, 1], the weight of the reconstruction term; the Fisher loss has 1 - λ. None is the paper's default:
            0.9 for language models, 0.5 for vision. 1 is the single-objective method, without a backward pass.
        rotation: "learned" changes the basis of the residual stream and of the attention heads before pruning, by
            orthogonal matrices that preserve the function of the model, are learned to reduce the loss of pruning, and
            are merged into the weights. "heads" keeps the residual stream, and so tied embeddings. None does neither.
            Both also compute a channel permutation for n:m and, for patterns with a sparsity, scale rows to units of
            the loss.
        recover: "blockwise" tunes the surviving weights of one decoder layer after another on the calibration samples,
            without labels, to reproduce its dense output. "gradual" also prunes the layer once more, in six stages,
            each from the weights and inputs of the previous one. "distill" trains all parameters of the model together
            to reproduce the dense model's predictions. None does none of these. Zeros stay zeros. A decoder layer that
            loses neurons, heads or experts has all of its parameters tuned; experts are not removed in stages.
        allocation: how the sparsity budget is divided between layers. "uniform"; "fisher", which assigns every weight
            matrix, and every expert, the sparsity that minimizes the Fisher loss of the whole model; "owl" or "alpha",
            which assign one sparsity per decoder layer. All preserve the total `sparsity` of an unstructured pattern.
            "fisher" runs some of the calibration samples forwards and backwards once more, also at λ = 1; with
            pattern="structured" it has no effect, which the report notes: a compact model has one width in all its
            blocks. Or a dict of layer → sparsity or "n:m", whose keys are names of layers, or regular expressions
            searched for in them: the entry with the layer's name applies, else the first matching expression, else
            `pattern` and `sparsity`.
        recompute: the paper's "++": block by block, statistics on the already pruned blocks before it. At λ = 1 every
            block runs once more; at λ < 1 the calibration passes grow with the square of the number of blocks.
        fisher: "all" applies both objectives to every pruned layer; "attention" only to the attention's (the paper's
            setting for language models), and λ = 1 to the others.
        under_calibrated_experts: the statistics of an expert with fewer tokens than one per four inputs: "all" tokens,
            "magnitude", or "routed", the few that it has. The report lists these experts.
        [Data]
        calibration: the default data of `MoonshotPruner.prune`, also for pruning while loading:
            ``from_pretrained(name, quantization_config=MoonshotConfig(…, calibration="c4"))``. Excluded from `to_dict`
            and from comparison.
        num_samples: the exact number of calibration samples N; fewer in the data are an error.
        sequence_length: tokens per sample; None is the model's longest, at most 2048.
        seed: of the sampling of calibration data. Equal seeds give bit-identical models.
        [Cost]
        batch_size: samples per forward pass of a layer. It changes memory and speed, and the result by rounding only.
        max_memory: bytes (or "8GiB") for statistics and caches on the model's device; the rest is stored in host
            memory. None is 60% of the free memory at the start. The run reduces it after an out-of-memory error.
        offload_dir: a folder for caches that exceed host memory; its files are removed at the end.
        [Hyperparameters]
        solver_options: the solver's hyperparameters, name → value; the others have its defaults. `damping` and
            `block_size` may be given here as well, and are moved to their fields.
        damping: fraction of the mean diagonal added to a Hessian before it is factored, in (0, 1]. It grows tenfold, up
            to 1, for a layer that cannot be factored otherwise; the report notes it. None is the solver's default
            (0.01), which the field has afterwards. No effect on a solver without damping, such as Wanda.
        block_size: SparseGPT: columns pruned together, with all rows as their comparison group (128). CAP: the largest
            number of inputs of a row with a joint quadratic (192). None is the solver's default; without effect as
            above.
        recover_steps: maximum optimizer steps per decoder layer, or of the whole model, 8 samples each, with early
            stopping. "gradual" takes a tenth of them after each of its first five stages, the others after the last.
            None is 150, for "distill" 300.
        recover_lr: initial learning rate of these steps, as a fraction of the root mean square of a parameter's
            surviving weights, with cosine decay to 0. None is 0.05, for "distill" 0.003.
        rotation_weights: "fisher" weights every matrix in the rotation's objective by its absolute Fisher loss, which
            takes one backward pass of the data, also at λ = 1; "equal" weights all equally, and does not scale rows.
        rotation_steps: maximum optimizer steps, with early stopping.
        rotation_lr: initial learning rate of these steps, in radians, with cosine decay to 0.
        rotation_rows: rows (or columns) of each matrix in the rotation's objective, where its rotations allow; fewer
            are faster on wide models. None is all.
        owl_threshold: OWL's M: an outlier exceeds M times the mean. 5 in OWL (arXiv 2310.05175) and the paper.
        owl_lambda: OWL's λ: densities vary by 2λ. 0.08, as above.
        alpha_tau: AlphaPruning's τ: sparsities are proportional to 1 - τ … 1 + τ. 0.1, the paper's value for
            Llama-3.2-3B (0.05 for the 1B).

    Raises:
        MoonshotError: a value of the wrong type or out of range, or two contradictory values.
    """

    VERSION: ClassVar[int] = 2  # of `to_dict`
    quant_method: ClassVar[str] = "moonshot"  # the name of the quantizer that transformers selects

    solver: str = "sparsegpt"
    pattern: str = "unstructured"
    sparsity: float | None = None
    bits: int | None = None
    quant_group: int = 128
    target_bytes: int | str | None = None
    bits_per_weight: float | None = None
    group_size: int = 1
    # Excluded from the hash, because a dict has none.
    allocation: str | dict[str, float | str] = dataclasses.field(default="uniform", hash=False)
    owl_threshold: float = 5.0
    owl_lambda: float = 0.08
    alpha_tau: float = 0.1
    recompute: bool = False
    lam: float | None = None
    fisher: str = "all"
    under_calibrated_experts: str = "all"
    damping: float | None = None
    block_size: int | None = None
    solver_options: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    targets: Sequence[str] | None = None
    ignore: Sequence[str] = ()
    num_samples: int = 128
    sequence_length: int | None = None
    batch_size: int = 8
    seed: int = 0
    max_memory: int | str | None = None
    offload_dir: str | None = None
    recover: str | None = None
    recover_steps: int | None = None
    recover_lr: float | None = None
    rotation: str | None = None
    rotation_weights: str = "fisher"
    rotation_steps: int = 100
    rotation_lr: float = 0.02
    rotation_rows: int | None = None
    calibration: Any = dataclasses.field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        solver = solver_class(self.solver)
        for field in ("targets", "ignore"):
            object.__setattr__(self, field, check_expressions(field, getattr(self, field)))
        self._set_dense_pattern()
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        check_values(values)
        _ = self.target_bytes_number, Grid(8 if self.bits is None else self.bits, self.quant_group)
        check_combinations(values)
        if isinstance(self.allocation, dict):
            object.__setattr__(self, "allocation", dict(self.allocation))
        check_supported(solver, self.pattern_rules, values)
        if self.pattern == Experts.kind:
            check_experts(values, {field.name: field.default for field in dataclasses.fields(self)})
        self._set_solver_options(solver)
        _ = (
            self.max_memory_bytes,
            self.target_bytes_number,
            Grid(8 if self.bits is None else self.bits, self.quant_group),
        )

    def _set_dense_pattern(self) -> None:
        """Without a pattern, or without anything to remove, `bits` quantizes all weights."""
        without = cast(str | None, self.pattern) is None
        require(not without or self.bits is not None, "give a pattern, or bits", field="pattern", value=None)
        require(not without or not self.sparsity, "give a pattern", field="sparsity", value=self.sparsity)
        if not without and not isinstance(self.pattern, str):
            parse_pattern(self.pattern, None)  # raises
        if without:
            object.__setattr__(self, "pattern", Unstructured.kind)
        nothing = self.pattern == Unstructured.kind and self.sparsity is None
        if nothing and (self.has_budget or (self.bits is not None and self.allocation == "uniform")):
            object.__setattr__(self, "sparsity", 0.0)

    @property
    def has_budget(self) -> bool:
        """Whether an allocation divides a number of bytes."""
        return self.target_bytes is not None or self.bits_per_weight is not None

    def _set_solver_options(self, solver: type[Solver]) -> None:
        """Check the solver's hyperparameters, and store each once: the shared ones in their fields."""
        options = self.solver_options
        named = isinstance(options, Mapping) and all(isinstance(name, str) for name in options)
        require(named, "give a dict of name → value", field="solver_options", value=options)
        declared, values = options_of(self.solver), dict(options)
        for name in SHARED_OPTIONS:
            shared = self._explicit(name)
            if name in values and shared is not None and shared != values[name]:
                other = Option(f"solver_options[{name!r}]", values[name])
                raise MoonshotError(Text("{} is another value; give it once", other), field=name, value=shared)
            if shared is not None:  # checked without effect too: the next solver may use it
                check_option((declared if name in declared else options_of("sparsegpt"))[name], shared)
        try:
            check_options(solver, values, Option("solver", self.solver))
        except MoonshotError as error:
            raise error.within(Option("solver_options")) from None
        for name in SHARED_OPTIONS:
            object.__setattr__(self, name, self._explicit(name) if values.get(name) is None else values.pop(name))
        default = declared["damping"].default if "damping" in declared and "damping" not in values else None
        if self.damping is None and isinstance(default, float):
            object.__setattr__(self, "damping", _SolverDefault(default))
        object.__setattr__(self, "solver_options", {name: values[name] for name in declared if name in values})
        self.make_solver()  # raises for hyperparameters that do not fit together

    def _explicit(self, name: str) -> Any:
        """Return a shared option's value; None for the solver's default."""
        value = getattr(self, name)
        return None if isinstance(value, _SolverDefault) else value

    @property
    def pattern_rules(self) -> PatternRules:
        """The pattern of each layer."""
        return PatternRules.parse(self.pattern, self.sparsity, self.group_size, self.allocation)

    @property
    def parsed_pattern(self) -> Pattern | MixedNM | None:
        """`pattern`, `sparsity` and `group_size` as one object; None if only an allocation by name is given."""
        return self.pattern_rules.default

    @property
    def grid(self) -> Grid | None:
        """`bits` and `quant_group` as one object; None without bits."""
        return None if self.bits is None else Grid(self.bits, self.quant_group)

    @property
    def target_bytes_number(self) -> int | None:
        """`target_bytes` as a number."""
        return None if self.target_bytes is None else memory_size("target_bytes", self.target_bytes)

    @property
    def max_memory_bytes(self) -> int | None:
        """`max_memory` in bytes."""
        return None if self.max_memory is None else memory_size("max_memory", self.max_memory)

    @property
    def recovery_steps(self) -> int:
        """`recover_steps`, or the default."""
        return RECOVERY_DEFAULTS[self.recover or "blockwise"][0] if self.recover_steps is None else self.recover_steps

    @property
    def recovery_lr(self) -> float:
        """`recover_lr`, or the default."""
        return RECOVERY_DEFAULTS[self.recover or "blockwise"][1] if self.recover_lr is None else self.recover_lr

    def make_solver(self) -> Solver:
        """Build the solver with its hyperparameters."""
        shared = {name: self._explicit(name) for name in SHARED_OPTIONS if name in options_of(self.solver)}
        explicit = {name: value for name, value in shared.items() if value is not None}
        return make_solver(self.solver, {**explicit, **self.solver_options})

    def hyperparameters(self) -> dict[str, Any]:
        """Return all hyperparameters of the solver with their values."""
        solver = self.make_solver()
        return {name: getattr(solver, name) for name in options_of(self.solver)}

    def resolve_lam(self, kind: str = "language") -> float:
        """Return λ, by default the paper's for this kind of model ("language" or "vision").

        Magnitude pruning has no objective to balance: the default in its report is 1.
        """
        if self.lam is not None:
            return float(self.lam)
        return DEFAULT_LAM[kind] if solver_class(self.solver).calibrated else 1.0

    def __repr__(self) -> str:
        """The fields that differ from the defaults."""
        changed = []
        for field in (field for field in dataclasses.fields(self) if field.repr):
            value, default = getattr(self, field.name), {} if field.name == "solver_options" else field.default
            if value != default and not isinstance(value, _SolverDefault):
                changed.append(f"{field.name}={value!r}")
        return f"{type(self).__name__}({', '.join(changed)})"

    def __deepcopy__(self, memo: dict[int, Any]) -> "MoonshotConfig":
        """Return this object: it is immutable, and its data may be large, or an iterator that cannot be copied."""
        return self

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON types, with the version of this format, without `calibration`."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.compare}
        values = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
        values["allocation"] = dict(self.allocation) if isinstance(self.allocation, dict) else self.allocation
        values["solver_options"] = dict(self.solver_options)
        values["damping"] = None if self.damping is None else float(self.damping)
        return {"version": self.VERSION, **values}

    def fingerprint(self) -> str:
        """Return all settings that change the result, as text: equal for equal settings, however they were given."""
        values = self.to_dict()
        for name in ("offload_dir", "max_memory", "batch_size", "solver_options", *SHARED_OPTIONS):
            del values[name]
        for name, value in self.hyperparameters().items():
            values[name if name in SHARED_OPTIONS else f'solver_options["{name}"]'] = value
        return json.dumps(_whole_numbers(values))

    @classmethod
    def recipe(cls, pattern: str | float, budget: str = "one-shot", **changes: Any) -> "MoonshotConfig":
        """Return the settings that the measurements recommend (docs/choosing.md).

        Args:
            pattern: the fraction of the weights to remove, "n:m", or "n:4" with a `sparsity`.
            budget: "paper" is the paper's own setting, λ · reconstruction + (1 - λ) · Fisher with equal sparsity in
                every layer. "one-shot" adds a learned basis and a sparsity budget for each layer, without training.
                "recovered" also tunes the surviving weights layer by layer, and takes several times as long.
            changes: fields with other values.

        Raises:
            MoonshotError: an unknown budget, a pattern without a recipe, or contradictory fields.
        """
        return cls(**recipe(pattern, budget, changes))

    @classmethod
    def check_version(cls, version: Any) -> None:
        """Raise `MoonshotError` unless this release reads dictionaries of this version."""
        hint = f"this release reads configurations of version {cls.VERSION}"
        require(version == cls.VERSION, hint, field="version", value=version)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "MoonshotConfig":
        """Return the configuration of `to_dict`; `MoonshotError` for another version or an unknown field."""
        values = dict(values)
        cls.check_version(values.pop("version", cls.VERSION))
        names = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(values) - names)
        require(not unknown, f"unknown field {', '.join(unknown)}: a MoonshotConfig has {', '.join(sorted(names))}")
        return cls(**values)


def _whole_numbers(values: Any) -> Any:
    """Replace 1.0 by 1, so that equal settings have equal text."""
    if isinstance(values, dict):
        return {name: _whole_numbers(value) for name, value in values.items()}
    return int(values) if isinstance(values, float) and values.is_integer() else values


def memory_size(field: str, value: Any) -> int:
    """Parse a size, bytes or text such as "8GiB"; `MoonshotError` for anything else, or less than one byte."""
    text = value if isinstance(value, str) else shown(value, most=400)
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(|[kmgt]i?b)\s*", text.lower())
    if match is None or isinstance(value, bool):
        raise MoonshotError('give bytes or a size such as "8GiB"', field=field, value=value)
    unit = match[2]
    power = 0 if not unit else "kmgt".index(unit[0]) + 1
    size = float(match[1]) * (1024 if unit.endswith("ib") else 1000) ** power
    require(1 <= size <= MAX_INT, f"give between 1 and {MAX_INT} bytes", field=field, value=value)
    return int(size)
