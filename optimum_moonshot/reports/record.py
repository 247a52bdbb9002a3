"""`PruningRecord`: the entry "moonshot" of a pruned model's config.json, and the library versions in it."""

import copy
import dataclasses
import functools
import platform
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any, ClassVar

from torch import nn
from transformers import PreTrainedConfig

from ..config import MoonshotConfig, PatternRules
from ..errors import MoonshotError, check_expressions, check_number, check_whole, require
from ..objective.grid import Grid

KEY = "moonshot"  # of the record in a model's configuration
_version = functools.cache(version)  # parses a file on every call
NOT_PRUNED = f"config.json has no entry {KEY}: the model is not pruned"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PruningRecord:
    """How a model was pruned: enough to pack it, to train it, and to prune another in the same way.

    A record can be read without the solver, which may be in a package that is not installed.
    """

    VERSION: ClassVar[int] = 1

    config: Mapping[str, Any]  # `MoonshotConfig.to_dict`, without folders
    solver_options: Mapping[str, Any]  # every hyperparameter of the solver, with its value
    lam: float  # λ, in [0, 1]
    sparsity: float  # zeros among all weights of the pruned layers, in [0, 1]
    calibration: Mapping[str, Any] | None  # source, number and digest of the samples; None without any
    versions: Mapping[str, str]  # of the libraries
    compaction: Mapping[str, Any] | None = None  # `Compaction.to_dict`, if the model was compacted
    dense: Sequence[str] = ()  # layers that were selected but not pruned, because no data reached them
    rotation: Mapping[str, Any] | None = None  # `RotationReport.summary`, if the model was rotated
    shrink: Mapping[str, Any] | None = None  # `ShrinkReport.summary`, if the model was made smaller to a target
    allocated: Mapping[str, float] = dataclasses.field(default_factory=dict)  # layer → its sparsity by an allocation
    # Layer → bits of its surviving weights, if they differ between layers; layers without an entry are not quantized.
    # None: all layers have the bits of the configuration.
    bits: Mapping[str, int] | None = None
    embedding_bits: int | None = None  # of the word embeddings and the head, if they were rounded

    def _check(self) -> None:
        """Raise `MoonshotError`, with the name of the field, for another type or an invalid configuration."""
        with _explained():
            optional_objects = ("calibration", "compaction", "rotation", "shrink")
            for name in ("config", "solver_options", "versions", "allocated", *optional_objects):
                value, optional = getattr(self, name), name in optional_objects
                valid = isinstance(value, Mapping) or (optional and value is None)
                require(valid, f"must be an object{' or null' if optional else ''}", field=name, value=value)
            allocated = {f"allocated: {name}": sparsity for name, sparsity in self.allocated.items()}
            for name, value in {"lam": self.lam, "sparsity": self.sparsity, **allocated}.items():
                check_number(name, value)
                require(0 <= value <= 1, "must be between 0 and 1", field=name, value=value)
        with _explained("config."):
            config = self.config
            read = ("version", "sparsity", "group_size", "pattern", "allocation", "targets", "ignore")
            for name in (*read, "bits", "quant_group"):
                require(name in config, f"{name}: missing")
            MoonshotConfig.check_version(config["version"])
            check_number("sparsity", config["sparsity"], optional=True)
            check_whole("group_size", config["group_size"], least=1)
            _ = self.pattern_rules
            check_expressions("targets", config["targets"])
            check_expressions("ignore", config["ignore"])
        with _explained():
            listed = isinstance(self.dense, list | tuple) and all(isinstance(name, str) for name in self.dense)
            require(listed, "must be a list of names", field="dense", value=self.dense)
            valid = self.bits is None or isinstance(self.bits, Mapping)
            require(valid, "must be an object or null", field="bits", value=self.bits)
            _ = self.layer_grids(self.bits or ()), self.embedding_grid
        with _explained("config."):
            _ = self.layer_grids(("",))

    @property
    def targets(self) -> tuple[str, ...] | None:
        """Expressions for the modules to prune."""
        return check_expressions("targets", self.config["targets"])

    @property
    def ignore(self) -> tuple[str, ...]:
        """Expressions for the modules to skip."""
        return check_expressions("ignore", self.config["ignore"]) or ()

    @property
    def pattern_rules(self) -> PatternRules:
        """The rules for the pattern of each layer."""
        pattern, sparsity = self.config["pattern"], self.config["sparsity"]
        return PatternRules.parse(
            pattern, sparsity, self.config["group_size"], self.config["allocation"], self.allocated
        )

    def layer_grids(self, names: Iterable[str]) -> dict[str, Grid | None]:
        """The grid of every layer's weights, in float32; None where they are not quantized."""
        bits = {name: self.config["bits"] if self.bits is None else self.bits.get(name) for name in names}
        group = self.config["quant_group"]
        return {name: None if number is None else Grid(number, group) for name, number in bits.items()}

    @property
    def embedding_grid(self) -> Grid | None:
        """The grid of the word embeddings and the head, in float32; None where they are not rounded."""
        return None if self.embedding_bits is None else Grid(self.embedding_bits, self.config["quant_group"])

    @property
    def grids(self) -> tuple[Grid, ...]:
        """The grids of the layers' weights, in float32, fewest bits first; none if no layer is quantized."""
        grids = set(self.layer_grids(("",) if self.bits is None else self.bits).values())
        return tuple(sorted((grid for grid in grids if grid is not None), key=lambda grid: grid.bits))

    def to_dict(self) -> dict[str, Any]:
        """Convert the record to JSON types; `from_dict` is the inverse."""
        values = {field.name: copy.deepcopy(getattr(self, field.name)) for field in dataclasses.fields(self)}
        values["dense"] = list(self.dense)
        optional = ("compaction", "dense", "rotation", "shrink", "allocated", "embedding_bits")
        omitted = {name for name in optional if not values[name]}
        # Empty bits are kept if the configuration has bits: then no layer is quantized.
        omitted |= set() if self.bits or (self.bits is not None and self.config["bits"]) else {"bits"}
        values = {name: value for name, value in values.items() if name not in omitted}
        return {"version": self.VERSION, **values}

    @classmethod
    def from_dict(cls, values: Any) -> "PruningRecord":
        """The inverse of `to_dict`; raises `MoonshotError` with the name of a missing or damaged field."""
        fields = dataclasses.fields(cls)
        required = [field.name for field in fields if field.default is field.default_factory is dataclasses.MISSING]
        with _explained():
            require(isinstance(values, Mapping), f"it is {reprlib.repr(values)}, not an object")
            missing = [name for name in ("version", *required) if name not in values]
            require(not missing, f"{', '.join(missing)}: missing")
            check_whole("version", values["version"], least=1)
        newer = f"config.json, {KEY}: version={values['version']}: this release reads {cls.VERSION}; update it"
        require(values["version"] == cls.VERSION, newer)
        record = cls(**{field.name: copy.deepcopy(values[field.name]) for field in fields if field.name in values})
        record._check()
        return dataclasses.replace(record, dense=tuple(record.dense))

    @classmethod
    def read(cls, config: Any) -> "PruningRecord | None":
        """The record in a model's configuration; None if the model is not pruned."""
        values = getattr(config, KEY, None)
        return None if values is None else cls.from_dict(values)

    @classmethod
    def of(cls, model: nn.Module) -> "PruningRecord | None":
        """The record of a model; None if it is not pruned, or not a transformers model."""
        return cls.read(getattr(model, "config", None))

    @classmethod
    def require_of(cls, model: nn.Module) -> "PruningRecord":
        """The record of a model that must be pruned."""
        record = cls.of(model)
        if record is None:
            raise MoonshotError(NOT_PRUNED)
        return record

    def attach(self, model: nn.Module) -> None:
        """Store the record in a model's configuration; does nothing for a plain module."""
        if isinstance(getattr(model, "config", None), PreTrainedConfig):
            setattr(model.config, KEY, self.to_dict())


def versions() -> dict[str, str]:
    """The versions of Python and of the libraries."""
    installed = {"python": platform.python_version()}
    for name in ("optimum-moonshot", "torch", "transformers", "datasets", "safetensors"):
        with suppress(PackageNotFoundError):
            installed[name] = _version(name)
    return installed


@contextmanager
def _explained(prefix: str = "") -> Iterator[None]:
    """Add the location of the damaged field to errors."""
    try:
        yield
    except MoonshotError as error:
        raise MoonshotError(f"config.json is damaged: {KEY}: {prefix}{error}") from None
