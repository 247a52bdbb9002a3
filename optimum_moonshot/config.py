"""`MoonshotConfig`: every choice of a pruning run, checked when it is made, before any work can be lost."""

import dataclasses
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from .errors import MOST, MoonshotError, check_expressions, check_number, check_path, check_whole, require, shown
from .objective.allocation_rules import PatternRules, check_allocation
from .objective.patterns import NM, Experts, MixedNM, Pattern
from .recipes import recipe
from .solvers.base import Solver, make_solver, solver_class, solver_names
from .solvers.base import solver_options as options_of
from .solvers.hyperparameters import check_option, check_options

# Defaults of the paper, section 4.3: "λ = 0.5 for vision models and λ = 0.9 for LLMs".
DEFAULT_LAM = {"language": 0.9, "vision": 0.5}
# Hyperparameters that several solvers have, and that therefore are fields of a configuration too.
SHARED_OPTIONS = ("damping", "block_size")
RECOVERIES = ("blockwise", "gradual")
EXPERT_TOKENS, STARVED_EXPERTS = ("routed", "all"), ("all", "magnitude", "routed")
# What does not combine with pattern="experts", and what that does instead.
_NOT_OF_EXPERTS = {
    "targets": "removes as many experts of every layer",
    "ignore": "removes as many experts of every layer",
    "expert_tokens": "goes by the tokens that the router sends each expert",
    "under_calibrated_experts": "goes by the tokens that the router sends each expert, however few",
    "fisher": "has the Fisher loss of the experts",
    "recompute": "takes all statistics of the dense model",
    "recover": "leaves no zeros to recover around: prune the smaller model once more for that",
    "rotation": "removes experts as they are",
}
# In a dictionary of version 1, of every solver, also of one that has no damping.
_DAMPING_OF_VERSION_1 = 0.01


class _SolversOwn(float):
    """A hyperparameter that nobody gave, with the solver's own value: `dataclasses.replace` by another solver, which
    hands it on, takes that one's own."""


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class MoonshotConfig:
    """How to prune.

    Args:
        solver: "sparsegpt", "alps", "obc", "cap" and (structured) "osscar" update the surviving weights; "wanda" and
            "magnitude" only choose. Of whole experts, "osscar" chooses by the two objectives, "reap" and "frequency" by
            what they are named after. Or a name that `register_solver` got, also in an installed package that names it
            as an entry point of the group `optimum_moonshot.solvers`.
        pattern: "unstructured", "n:m" such as "2:4", which keeps 2 of every 4 consecutive inputs, "structured", which
            removes whole input columns, or "experts", which removes whole experts of every mixture, so that the model
            is smaller at once. Not every solver takes every pattern. With allocation="fisher" also
            "n:4" (or any m, with the letter n): each layer gets 1:4, 2:4, 3:4 or stays dense.
        sparsity: share of the weights (of the column groups, of the experts of every layer) to remove, in [0, 1];
            follows from n:m. Of "n:4" it is
            the most that all layers lose together, as closely as whole steps of a quarter of a layer allow.
        group_size: consecutive columns that go or stay together; pattern="structured" only. In a model these are
            neurons, so that widths stay multiples of it; attention heads go whole, whatever it is.
        allocation: "uniform"; "fisher", which gives every weight matrix, and every expert, a sparsity of its own, so
            that the Fisher loss of the whole model is least; "owl" or "alpha", which give one to every decoder layer.
            All keep the total `sparsity` of an unstructured pattern. "fisher" passes some of the calibration samples
            once more, forwards and backwards, also at λ = 1; with pattern="structured" it changes nothing, and the
            report says so: a compact model has one width in all its blocks. Or a dict of layer → sparsity or "n:m". Its
            keys are names of layers, or regular expressions searched for in them: a layer's name decides, else the
            first expression found in it, else `pattern` and `sparsity`.
        owl_threshold: OWL's M: an outlier exceeds M times the mean. 5 by OWL (arXiv 2310.05175) and the paper.
        owl_lambda: OWL's λ: densities spread over 2λ. 0.08, as above.
        alpha_tau: AlphaPruning's τ: sparsities in proportion to 1 - τ … 1 + τ. 0.1, the paper's value for
            Llama-3.2-3B (0.05 for the 1B).
        recompute: the paper's "++": block by block, statistics on the already pruned blocks before it. At λ = 1 every
            block runs once more; at λ < 1 the passes grow with the square of the number of blocks.
        expert_tokens: whose inputs the Gram matrix of an expert is of: "routed", of the tokens that the model sends it,
            or "all", of all tokens. Gradients are those of the model's own routing.
        under_calibrated_experts: what an expert goes by that reads fewer tokens than one for four inputs: "all" tokens,
            "magnitude", or "routed", the few that it has. The report names them.
        lam: λ in [0, 1], the weight of the reconstruction term; 1 - λ goes to the Fisher loss. None is the paper's
            default: 0.9 for language models, 0.5 for vision. 1 is the single-objective method: no backward pass.
        fisher: "all" gives every pruned layer the two objectives; "attention" only the attention's (the paper's
            setting for language models), the others then use λ = 1.
        damping: share of the mean diagonal added to a Hessian before it is factored, in (0, 1]. It grows tenfold, up
            to 1, for a layer that needs it; the report says so. None is the solver's own, 0.01 for those here, and
            afterwards reads as that. It has no effect on a solver without one, such as Wanda.
        block_size: SparseGPT: columns pruned together, with all rows its comparison group (128). CAP: the most inputs
            of a row that have a quadratic together (192). None is the solver's own, in brackets; without effect as
            above.
        solver_options: the solver's hyperparameters, name → value; those that are not given have its defaults. Of
            `damping` and `block_size`, which may be given here as well, the fields are what is kept.
        targets: regular expressions searched for in module names; None prunes every Linear and Conv2d of the repeated
            layers (decoder or encoder layers, stages). Embeddings, also of patches, stems and heads are pruned only if
            one of these names them. In a model without repeated layers (a plain `torch.nn.Module`), None prunes all
            but the first and the last layer.
        ignore: regular expressions searched for in module names that stay dense.
        num_samples: calibration samples N. Exactly so many: too little data is an error.
        sequence_length: tokens per sample; None is the model's longest, at most 2048.
        batch_size: samples that pass through a layer at a time. Memory and speed, not the result, depend on it.
        seed: of the choice of calibration samples. Equal seeds give bit-identical models.
        max_memory: bytes ("8GiB" works) that statistics and caches may take on the model's device; what exceeds it
            goes to host memory. None is 60% of what is free when pruning starts. Less of it is used from where the
            device is out of memory.
        offload_dir: a folder for caches that exceed host memory too; its files are removed at the end.
        recover: "blockwise" tunes the surviving weights of one decoder layer after another on the calibration samples,
            without labels, until it does again what it did dense. "gradual" prunes it once more meanwhile, in six
            stages, each from its weights and inputs as they are by then. None does neither. Zeros stay zeros.
        recover_steps: optimizer steps per decoder layer, 8 samples each; it ends earlier once it gains nothing.
            "gradual" takes a tenth of them after each of its first five stages, the others after the last.
        recover_lr: the learning rate that those steps begin with, as a share of the root mean square of a layer's
            surviving weights; it falls to 0 along a cosine.
        rotation: "learned" changes the basis of the residual stream and of what attention heads carry, before pruning,
            by orthogonal matrices that leave the model's function as it is and that are learned so that pruning removes
            little; they are merged into the weights. "heads" leaves the residual stream, and so tied embeddings, as
            they are. None does neither. Both give neurons an order for n:m, and rows that a solver compares units of
            the loss where the pattern is a share.
        rotation_weights: "fisher" weighs every matrix in what is learned by its absolute Fisher loss, which takes one
            backward pass of the data, at λ = 1 too; "equal" weighs all alike, and leaves rows in their units.
        rotation_steps: optimizer steps, at most; it ends earlier once it gains nothing.
        rotation_lr: the learning rate that those steps begin with, in radians; it falls to 0 along a cosine.
        rotation_rows: rows (or columns) of each matrix that the learning looks at, where its rotations allow; fewer are
            faster on wide models. None is all.
        calibration: the data that `MoonshotPruner.prune` takes where it is given none, and with which
            ``from_pretrained(name, quantization_config=MoonshotConfig(…, calibration="c4"))`` prunes while loading. It
            is no part of `to_dict`, nor of the equality of two configurations.

    Raises:
        MoonshotError: a value of the wrong type or out of range, or two that contradict each other; it names the field.
    """

    VERSION: ClassVar[int] = 2
    quant_method: ClassVar[str] = "moonshot"  # under which transformers finds the quantizer of integrations

    solver: str = "sparsegpt"
    pattern: str = "unstructured"
    sparsity: float | None = None
    group_size: int = 1
    # Equal configurations have equal hashes without it, and a dict has none.
    allocation: str | dict[str, float | str] = dataclasses.field(default="uniform", hash=False)
    owl_threshold: float = 5.0
    owl_lambda: float = 0.08
    alpha_tau: float = 0.1
    recompute: bool = False
    lam: float | None = None
    fisher: str = "all"
    expert_tokens: str = "routed"
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
    recover_steps: int = 150
    recover_lr: float = 0.05
    rotation: str | None = None
    rotation_weights: str = "fisher"
    rotation_steps: int = 100
    rotation_lr: float = 0.02
    rotation_rows: int | None = None
    calibration: Any = dataclasses.field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        solver = solver_class(self.solver)
        check_number("sparsity", self.sparsity, optional=True)
        check_whole("group_size", self.group_size, least=1)
        self._check_allocation()
        self._check_patterns(solver)
        self._check_experts()
        require(isinstance(self.recompute, bool), f"recompute={self.recompute!r}: use True or False")
        check_number("lam", self.lam, optional=True)
        require(self.lam is None or 0 <= self.lam <= 1, f"lam={self.lam}: λ lies between 0 and 1")
        require(self.fisher in ("all", "attention"), f'fisher={self.fisher!r}: use "all" or "attention"')
        for field, values in (("expert_tokens", EXPERT_TOKENS), ("under_calibrated_experts", STARVED_EXPERTS)):
            value = getattr(self, field)
            names = " or ".join(f'"{name}"' for name in values)
            require(value in values, f"{field}={value!r}: use {names}")
        self._settle_options(solver)
        known = " or ".join(f'"{name}"' for name in RECOVERIES)
        require(self.recover in (None, *RECOVERIES), f"recover={self.recover!r}: use {known}, or None for none")
        check_number("recover_lr", self.recover_lr)
        require(0 < self.recover_lr < 1, f"recover_lr={self.recover_lr}: it lies above 0 and below 1")
        self._check_rotation()
        for field in ("num_samples", "batch_size", "recover_steps", "rotation_steps"):
            check_whole(field, getattr(self, field), least=1)
        check_whole("seed", self.seed, least=0)
        if self.sequence_length is not None:
            check_whole("sequence_length", self.sequence_length, least=2)
        for field in ("targets", "ignore"):
            object.__setattr__(self, field, check_expressions(field, getattr(self, field)))
        _ = self.max_memory_bytes
        if self.offload_dir is not None:
            check_path("offload_dir", self.offload_dir)
            require(isinstance(self.offload_dir, str), f"offload_dir={self.offload_dir!r}: give the path as a string")

    def _check_rotation(self) -> None:
        how = self.rotation
        require(how in (None, "learned", "heads"), f'rotation={how!r}: use "learned" or "heads", or None for none')
        require(
            how is None or self.pattern != "structured",
            f"rotation={how!r}: pattern='structured' removes neurons and heads as they are; leave one of them out",
        )
        weights = self.rotation_weights
        require(weights in ("fisher", "equal"), f'rotation_weights={weights!r}: use "fisher" or "equal"')
        check_number("rotation_lr", self.rotation_lr)
        require(0 < self.rotation_lr < 1, f"rotation_lr={self.rotation_lr}: it lies above 0 and below 1")
        if self.rotation_rows is not None:
            check_whole("rotation_rows", self.rotation_rows, least=1)

    def _check_allocation(self) -> None:
        how = self.allocation
        check_allocation(how)
        named = isinstance(how, dict)
        mixed = isinstance(self.pattern, str) and self.pattern.startswith("n:")
        require(
            not mixed or how == "fisher",
            f"pattern={self.pattern!r}: which layer gets which of its patterns is an allocation's choice; add "
            'allocation="fisher", or give a number for n',
        )
        mend = 'pattern="unstructured"' + (' or "n:m"' if named else ', or a dict of layer → "n:m"')
        mend += ', or "n:4" for 1:4, 2:4 and 3:4 by layer' if how == "fisher" else ""
        takes = mixed or (how == "fisher" if self.pattern == "structured" else named)
        require(
            how == "uniform" or self.pattern == "unstructured" or takes,
            f"allocation={how!r}: pattern={self.pattern!r} takes the same share of every layer; use {mend}",
        )
        if isinstance(how, dict):
            object.__setattr__(self, "allocation", dict(how))
        for field, limit in (("owl_threshold", math.inf), ("owl_lambda", 1), ("alpha_tau", 1)):
            value = getattr(self, field)
            check_number(field, value)
            low = value > 0 if field == "owl_threshold" else value >= 0
            require(low and value < limit, f"{field}={value}: it lies between 0 and {limit:g}")

    def _settle_options(self, solver: type[Solver]) -> None:
        """Check the solver's hyperparameters, and keep each in one place: the shared ones in their fields."""
        require(
            isinstance(self.solver_options, Mapping) and all(isinstance(name, str) for name in self.solver_options),
            f"solver_options={self.solver_options!r}: give a dict of name → value",
        )
        known, given = options_of(self.solver), dict(self.solver_options)
        for name in SHARED_OPTIONS:
            short, long = self._given(name), given.get(name)
            require(
                name not in given or short is None or short == long,
                f"{name}={short!r} and solver_options[{name!r}]={long!r}: two values for one; give it once",
            )
            if short is not None:  # also what has no effect: with another solver it may have one
                check_option((known if name in known else options_of("sparsegpt"))[name], short)
        try:
            check_options(solver, given, f"solver={self.solver!r}")
        except MoonshotError as error:
            raise MoonshotError(f"solver_options: {error}") from None
        for name in SHARED_OPTIONS:
            value = self._given(name) if given.get(name) is None else given.pop(name)
            object.__setattr__(self, name, value)
        own = known["damping"].default if "damping" in known and "damping" not in given else None
        if self.damping is None and isinstance(own, float):
            object.__setattr__(self, "damping", _SolversOwn(own))
        object.__setattr__(self, "solver_options", {name: given[name] for name in known if name in given})
        self.make_solver()  # which may have something to say on its hyperparameters together

    def _given(self, name: str) -> Any:
        """A shared option's value; None where it is the solver's own."""
        value = getattr(self, name)
        return None if isinstance(value, _SolversOwn) else value

    def _check_patterns(self, solver: type[Solver]) -> None:
        """Every pattern that a layer may get is one that the solver takes."""
        takes, rules = " or ".join(kind.kind for kind in solver.patterns), self.pattern_rules
        default = rules.default.choices[0] if isinstance(rules.default, MixedNM) else rules.default
        others = " or ".join(f'"{name}"' for name in solver_names(Experts))
        mend = f"solver={others}" if isinstance(default, Experts) else "another pattern or solver"
        require(
            default is None or isinstance(default, solver.patterns),
            f"pattern={self.pattern!r}: solver={self.solver!r} takes {takes}; choose {mend}",
        )
        named = self.allocation if isinstance(self.allocation, dict) else {}
        for key, rule in rules.rules.items():
            require(
                isinstance(rule, solver.patterns),
                f"allocation[{key!r}]={named[key]!r}: solver={self.solver!r} takes {takes}",
            )

    def _check_experts(self) -> None:
        """Whole experts go by the model's own routing, as many of every layer, and leave a smaller model."""
        if self.pattern != Experts.kind:
            return
        fields = {field.name: field.default for field in dataclasses.fields(self)}
        for name, why in _NOT_OF_EXPERTS.items():
            value = getattr(self, name)
            empty = name == "ignore" and not value
            require(value == fields[name] or empty, f"{name}={value!r}: pattern='experts' {why}; leave one of them out")

    @property
    def pattern_rules(self) -> PatternRules:
        """Which pattern each layer gets."""
        return PatternRules.parse(self.pattern, self.sparsity, self.group_size, self.allocation)

    @property
    def parsed_pattern(self) -> Pattern | MixedNM | None:
        """`pattern`, `sparsity` and `group_size` as one object; None where an allocation by name is all there is."""
        return self.pattern_rules.default

    def layer_patterns(self, names: Iterable[str]) -> dict[str, Pattern | MixedNM]:
        """Every layer's pattern, as far as it is known before the model is: what OWL and others divide is not.

        Raises:
            MoonshotError: an allocation that leaves a layer out, or an entry that decides no layer.
        """
        return self.pattern_rules.of(names)

    def nm_patterns(self) -> list[NM]:
        """The n:m patterns that layers may get, short groups first."""
        return self.pattern_rules.nm()

    @property
    def max_memory_bytes(self) -> int | None:
        """`max_memory` in bytes."""
        return None if self.max_memory is None else memory_size("max_memory", self.max_memory)

    def make_solver(self) -> Solver:
        """The solver with the hyperparameters that were given, and its own defaults."""
        known = options_of(self.solver)
        shared = {name: self._given(name) for name in SHARED_OPTIONS if name in known}
        shared = {name: value for name, value in shared.items() if value is not None}
        return make_solver(self.solver, {**shared, **self.solver_options})

    def hyperparameters(self) -> dict[str, Any]:
        """Every hyperparameter of the solver with the value that it has."""
        solver = self.make_solver()
        return {name: getattr(solver, name) for name in options_of(self.solver)}

    def resolve_lam(self, kind: str = "language") -> float:
        """λ; where none was given, the default of the method for this kind of model ("language" or "vision").

        Magnitude pruning has no objective to balance: its λ is 1 unless one was asked for, for the report.
        """
        if self.lam is not None:
            return float(self.lam)
        return DEFAULT_LAM[kind] if solver_class(self.solver).calibrated else 1.0

    def __repr__(self) -> str:
        """What differs from the defaults."""
        shown = []
        for field in (field for field in dataclasses.fields(self) if field.repr):
            value, default = getattr(self, field.name), {} if field.name == "solver_options" else field.default
            if value != default and not isinstance(value, _SolversOwn):
                shown.append(f"{field.name}={value!r}")
        return f"{type(self).__name__}({', '.join(shown)})"

    def __deepcopy__(self, memo: dict[int, Any]) -> "MoonshotConfig":
        """Itself: nothing in it changes, and calibration data may be large, or an iterator that cannot be copied."""
        return self

    def to_dict(self) -> dict[str, Any]:
        """As JSON types, with the version of this format; without `calibration`."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.compare}
        values = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
        values["allocation"] = dict(self.allocation) if isinstance(self.allocation, dict) else self.allocation
        values["solver_options"] = dict(self.solver_options)
        values["damping"] = None if self.damping is None else float(self.damping)
        return {"version": self.VERSION, **values}

    def fingerprint(self) -> str:
        """All that results depend on, as text: equal where the settings are, in whatever way they were given."""
        values = {**self.to_dict(), "hyperparameters": self.hyperparameters()}
        for name in ("offload_dir", "max_memory", "solver_options", *SHARED_OPTIONS):
            del values[name]
        return json.dumps(_whole_numbers(values))

    @classmethod
    def recipe(cls, pattern: str | float, budget: str = "one-shot", **changes: Any) -> "MoonshotConfig":
        """What the measurements recommend (docs/choosing.md), in one word.

        Args:
            pattern: the share of the weights to remove, "n:m", or "n:4" with a `sparsity`.
            budget: "paper" is the paper's own setting, λ · reconstruction + (1 - λ) · Fisher in the same share of every
                layer. "one-shot" adds a learned basis and sparsity where it is cheap, without any training.
                "recovered" tunes the surviving weights layer by layer besides, several times as long.
            changes: fields that are set otherwise.

        Raises:
            MoonshotError: an unknown budget, a pattern without a recipe, or fields that contradict each other.
        """
        return cls(**recipe(pattern, budget, changes))

    @classmethod
    def check_version(cls, version: Any) -> None:
        """Raise `MoonshotError` unless this release reads dictionaries of this version."""
        known = version in range(1, cls.VERSION + 1)
        require(known, f"version={version}: this release reads configurations up to version {cls.VERSION}; update it")

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "MoonshotConfig":
        """The inverse of `to_dict`, also of earlier versions.

        Raises:
            MoonshotError: a newer version, an unknown field, or a value that is out of range.
        """
        values = dict(values)
        version = values.pop("version", cls.VERSION)
        cls.check_version(version)
        if version == 1 and values.get("damping") == _DAMPING_OF_VERSION_1:
            del values["damping"]
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(values) - known)
        require(not unknown, f"unknown field {', '.join(unknown)}: a MoonshotConfig has {', '.join(sorted(known))}")
        return cls(**values)


def _whole_numbers(values: Any) -> Any:
    """The same JSON, with 1 for 1.0."""
    if isinstance(values, dict):
        return {name: _whole_numbers(value) for name, value in values.items()}
    return int(values) if isinstance(values, float) and values.is_integer() else values


def memory_size(field: str, value: Any) -> int:
    """Bytes of a size.

    Args:
        field: the argument that it came with.
        value: bytes, or text such as "8GiB".

    Raises:
        MoonshotError: anything else, or less than one byte.
    """
    given = value if isinstance(value, str) else shown(value, most=400)
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(|[kmgt]i?b)\s*", given.lower())
    if match is None or isinstance(value, bool):
        raise MoonshotError(f'{field}={shown(value)}: give bytes or a size such as "8GiB"')
    unit = match[2]
    power = 0 if not unit else "kmgt".index(unit[0]) + 1
    size = float(match[1]) * (1024 if unit.endswith("ib") else 1000) ** power
    require(1 <= size <= MOST, f"{field}={shown(value)}: give between 1 and {MOST} bytes")
    return int(size)
