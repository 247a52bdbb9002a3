"""`MoonshotConfig`: every choice of a pruning run, checked when it is made, before any work can be lost."""

import dataclasses
import math
import re
from collections.abc import Iterable
from typing import Any, ClassVar

from .errors import MoonshotError, check_expressions, check_number, check_whole, require
from .objective.allocation_rules import METHODS, apply_rules, parse_rules
from .objective.patterns import Pattern, parse_pattern
from .solvers import Solver, solver_class

# Defaults of the paper, section 4.3: "λ = 0.5 for vision models and λ = 0.9 for LLMs".
DEFAULT_LAM = {"language": 0.9, "vision": 0.5}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoonshotConfig:
    """How to prune.

    Args:
        solver: "sparsegpt", "obc", "cap" and (structured) "osscar" update the surviving weights; "wanda" and
            "magnitude" only choose.
        pattern: "unstructured", "n:m" such as "2:4", which keeps 2 of every 4 consecutive inputs, or "structured",
            which removes whole input columns. Not every solver takes every pattern.
        sparsity: share of the weights (of the column groups) to remove, in [0, 1]; follows from n:m.
        group_size: consecutive columns that go or stay together; pattern="structured" only. In a model these are
            neurons, so that widths stay multiples of it; attention heads go whole, whatever it is.
        allocation: "uniform"; "owl" or "alpha", which give the decoder layers sparsities of their own around the total
            `sparsity` of an unstructured pattern; or a dict of layer → sparsity or "n:m". Its keys are names of
            layers, or regular expressions searched for in them: a layer's name decides, else the first expression
            found in it, else `pattern` and `sparsity`.
        owl_threshold: OWL's M: an outlier exceeds M times the mean. 5 by OWL (arXiv 2310.05175) and the paper.
        owl_lambda: OWL's λ: densities spread over 2λ. 0.08, as above.
        alpha_tau: AlphaPruning's τ: sparsities in proportion to 1 - τ … 1 + τ. 0.1, the paper's value for
            Llama-3.2-3B (0.05 for the 1B).
        recompute: the paper's "++": block by block, statistics on the already pruned blocks before it. At λ = 1 every
            block runs once more; at λ < 1 the passes grow with the square of the number of blocks.
        lam: λ in [0, 1], the weight of the reconstruction term; 1 - λ goes to the Fisher loss. None is the paper's
            default: 0.9 for language models, 0.5 for vision. 1 is the single-objective method: no backward pass.
        fisher: "all" gives every pruned layer the two objectives; "attention" only the attention's (the paper's
            setting for language models), the others then use λ = 1.
        damping: share of the mean diagonal added to a Hessian before it is factored. It grows tenfold, up to 1, for a
            layer that needs it; the report says so. Wanda and magnitude use none.
        block_size: SparseGPT: columns pruned together, with all rows its comparison group (128). CAP: the most inputs
            of a row that have a quadratic together (192). None is the solver's own, in brackets.
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
            goes to host memory. None is 60% of what is free when pruning starts.
        offload_dir: a folder for caches that exceed host memory too; its files are removed at the end.
        recover: "blockwise" tunes the surviving weights of one decoder layer after another on the calibration samples,
            without labels, until it does again what it did dense; None does not. Zeros stay zeros.
        recover_steps: optimizer steps per decoder layer, 8 samples each; it ends earlier once it gains nothing.
        recover_lr: the learning rate that those steps begin with, as a share of the root mean square of a layer's
            surviving weights; it falls to 0 along a cosine.
        calibration: the data that `MoonshotPruner.prune` takes where it is given none, and with which
            ``from_pretrained(name, quantization_config=MoonshotConfig(…, calibration="c4"))`` prunes while loading. It
            is no part of `to_dict`, nor of the equality of two configurations.
    """

    VERSION: ClassVar[int] = 1
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
    damping: float = 0.01
    block_size: int | None = None
    targets: tuple[str, ...] | None = None
    ignore: tuple[str, ...] = ()
    num_samples: int = 128
    sequence_length: int | None = None
    batch_size: int = 8
    seed: int = 0
    max_memory: int | str | None = None
    offload_dir: str | None = None
    recover: str | None = None
    recover_steps: int = 150
    recover_lr: float = 0.05
    calibration: Any = dataclasses.field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        solver = solver_class(self.solver)
        check_number("sparsity", self.sparsity, optional=True)
        check_whole("group_size", self.group_size, least=1)
        self._check_allocation()
        self._check_patterns(solver)
        require(isinstance(self.recompute, bool), f"recompute={self.recompute!r}: use True or False")
        check_number("lam", self.lam, optional=True)
        require(self.lam is None or 0 <= self.lam <= 1, f"lam={self.lam}: λ lies between 0 and 1")
        require(self.fisher in ("all", "attention"), f'fisher={self.fisher!r}: use "all" or "attention"')
        check_number("damping", self.damping)
        require(0 < self.damping <= 1, f"damping={self.damping}: it lies above 0 and at most at 1")
        require(self.recover in (None, "blockwise"), f'recover={self.recover!r}: use "blockwise", or None for none')
        check_number("recover_lr", self.recover_lr)
        require(0 < self.recover_lr < 1, f"recover_lr={self.recover_lr}: it lies above 0 and below 1")
        for field in ("block_size", "num_samples", "batch_size", "recover_steps"):
            if field != "block_size" or self.block_size is not None:
                check_whole(field, getattr(self, field), least=1)
        check_whole("seed", self.seed, least=0)
        if self.sequence_length is not None:
            check_whole("sequence_length", self.sequence_length, least=2)
        for field in ("targets", "ignore"):
            object.__setattr__(self, field, check_expressions(field, getattr(self, field)))
        _ = self.max_memory_bytes
        require(
            self.offload_dir is None or isinstance(self.offload_dir, str),
            f"offload_dir={self.offload_dir!r}: give the path of a folder",
        )

    def _check_allocation(self) -> None:
        how = self.allocation
        named = isinstance(how, dict)
        require(
            named or (isinstance(how, str) and how in METHODS),
            f'allocation={how!r}: use "uniform", "owl", "alpha", or a dict of layer → sparsity or "n:m"',
        )
        require(not named or bool(how), f"allocation={how!r}: it has no entry; leave it out")
        mend = 'pattern="unstructured"' + (' or "n:m"' if named else ', or a dict of layer → "n:m"')
        require(
            how == "uniform" or self.pattern == "unstructured" or (named and self.pattern != "structured"),
            f"allocation={how!r}: pattern={self.pattern!r} takes the same share of every layer; use {mend}",
        )
        if isinstance(how, dict):
            object.__setattr__(self, "allocation", dict(how))
        for field, limit in (("owl_threshold", math.inf), ("owl_lambda", 1), ("alpha_tau", 1)):
            value = getattr(self, field)
            check_number(field, value)
            low = value > 0 if field == "owl_threshold" else value >= 0
            require(low and value < limit, f"{field}={value}: it lies between 0 and {limit:g}")

    def _check_patterns(self, solver: type[Solver]) -> None:
        """Every pattern that a layer may get is one that the solver takes."""
        takes = " or ".join(kind.kind for kind in solver.patterns)
        if self.parsed_pattern is not None:
            require(
                isinstance(self.parsed_pattern, solver.patterns),
                f"pattern={self.pattern!r}: solver={self.solver!r} takes {takes}; choose another pattern or solver",
            )
        named = self.allocation if isinstance(self.allocation, dict) else {}
        for key, rule in parse_rules(named).items():
            require(
                isinstance(rule, solver.patterns),
                f"allocation[{key!r}]={named[key]!r}: solver={self.solver!r} takes {takes}",
            )

    @property
    def parsed_pattern(self) -> Pattern | None:
        """`pattern`, `sparsity` and `group_size` as one object; None where an allocation by name is all there is."""
        if isinstance(self.allocation, dict) and self.pattern == "unstructured" and self.sparsity is None:
            return None
        return parse_pattern(self.pattern, self.sparsity, self.group_size)

    def layer_patterns(self, names: Iterable[str]) -> dict[str, Pattern]:
        """Every layer's pattern, as far as it is known before the model is (all but OWL's and AlphaPruning's).

        Raises:
            MoonshotError: an allocation that leaves a layer out, or an entry that decides no layer.
        """
        pattern = self.parsed_pattern
        if isinstance(self.allocation, dict):
            return apply_rules(parse_rules(self.allocation), names, pattern)
        assert pattern is not None  # only an allocation by name goes without
        return dict.fromkeys(names, pattern)

    @property
    def max_memory_bytes(self) -> int | None:
        """`max_memory` in bytes."""
        return None if self.max_memory is None else _bytes(self.max_memory)

    def make_solver(self) -> Solver:
        """The solver with those of its hyperparameters that this configuration has."""
        cls: Any = solver_class(self.solver)
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in given.items() if value is not None})

    def resolve_lam(self, kind: str = "language") -> float:
        """λ; where none was given, the default of the method for this kind of model ("language" or "vision").

        Magnitude pruning has no objective to balance: its λ is 1 unless one was asked for, for the report.
        """
        if self.lam is not None:
            return float(self.lam)
        return DEFAULT_LAM[kind] if solver_class(self.solver).calibrated else 1.0

    def __deepcopy__(self, memo: dict[int, Any]) -> "MoonshotConfig":
        """Itself: nothing in it changes, and calibration data may be large, or an iterator that cannot be copied."""
        return self

    def to_dict(self) -> dict[str, Any]:
        """As JSON types, with the version of this format; without `calibration`."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.compare}
        values = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
        values["allocation"] = dict(self.allocation) if isinstance(self.allocation, dict) else self.allocation
        return {"version": self.VERSION, **values}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "MoonshotConfig":
        """The inverse of `to_dict`.

        Raises:
            MoonshotError: a newer version, an unknown field, or a value that is out of range.
        """
        values = dict(values)
        version = values.pop("version", cls.VERSION)
        require(version == cls.VERSION, f"version={version}: this release reads version {cls.VERSION} configurations")
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(values) - known)
        require(not unknown, f"unknown field {', '.join(unknown)}: a MoonshotConfig has {', '.join(sorted(known))}")
        return cls(**values)


def _bytes(value: Any) -> int:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(|[kmgt]i?b)\s*", str(value).lower())
    if match is None or isinstance(value, bool):
        raise MoonshotError(f'max_memory={value!r}: give bytes or a size such as "8GiB"')
    unit = match[2]
    power = 0 if not unit else "kmgt".index(unit[0]) + 1
    return int(float(match[1]) * (1024 if unit.endswith("ib") else 1000) ** power)
