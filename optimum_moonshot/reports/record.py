"""`PruningRecord`: what was done to a model, as its config.json keeps it under "moonshot"."""

import copy
import dataclasses
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from torch import nn
from transformers import PreTrainedConfig

from ..config import MoonshotConfig
from ..errors import MoonshotError, check_expressions, check_number, check_whole, require
from ..objective.allocation_rules import PatternRules
from ..objective.patterns import NM, MixedNM, Pattern

KEY = "moonshot"  # of the record in a model's configuration
NOT_PRUNED = f"config.json has no entry {KEY}: the model is not pruned"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PruningRecord:
    """What was done to a model, and with what: enough to pack it, to train it and to prune another in the same way.

    Reading one needs no solver: that of another package may not be there any more.

    Args:
        config: `MoonshotConfig.to_dict`, without folders.
        solver_options: every hyperparameter of the solver, with the value that it had; empty where a release before
            this field wrote the record.
        lam: λ used, in [0, 1].
        sparsity: zeros among all weights of the pruned layers, in [0, 1].
        calibration: source, number and digest of the samples; None without any.
        versions: of the libraries it was made with.
        compaction: what a `Compaction` says; None unless the model was made smaller.
        rotation: what a `RotationReport` says in short; None where the model has the basis that it had.
        dense: names of layers that were chosen and stayed dense all the same: no data reached them.
        allocated: layer → the sparsity that a method of `allocation` gave it; empty where none did.

    Raises:
        MoonshotError: a field of another type, or a configuration that is none; it names the field.
    """

    VERSION: ClassVar[int] = 1

    config: Mapping[str, Any]
    solver_options: Mapping[str, Any]
    lam: float
    sparsity: float
    calibration: Mapping[str, Any] | None
    versions: Mapping[str, str]
    compaction: Mapping[str, Any] | None = None
    dense: Sequence[str] = ()
    rotation: Mapping[str, Any] | None = None
    allocated: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        with _explained():
            for name in ("config", "solver_options", "versions", "calibration", "compaction", "rotation", "allocated"):
                value, optional = getattr(self, name), name in ("calibration", "compaction", "rotation")
                good = isinstance(value, Mapping) or (optional and value is None)
                require(good, f"{name}={reprlib.repr(value)}: it must be an object{' or null' if optional else ''}")
            for name in ("lam", "sparsity"):
                check_number(name, getattr(self, name))
                require(0 <= getattr(self, name) <= 1, f"{name}={getattr(self, name)}: it lies between 0 and 1")
            for name, share in self.allocated.items():
                check_number(f"allocated: {name}", share)
                require(0 <= share <= 1, f"allocated: {name}={share}: it lies between 0 and 1")
        with _explained("config."):
            MoonshotConfig.check_version(self.config.get("version", MoonshotConfig.VERSION))
            check_number("sparsity", self._setting("sparsity"), optional=True)
            check_whole("group_size", self._setting("group_size"), least=1)
            _ = self.pattern_rules, self.targets, self.ignore
        with _explained():
            listed = isinstance(self.dense, list | tuple) and all(isinstance(name, str) for name in self.dense)
            require(listed, f"dense={reprlib.repr(self.dense)}: it must be a list of names")
            object.__setattr__(self, "dense", tuple(self.dense))

    def _setting(self, name: str) -> Any:
        """A field of the configuration; the default of one that came later."""
        return self.config.get(name, getattr(MoonshotConfig, name))

    @property
    def targets(self) -> tuple[str, ...] | None:
        """Expressions for the modules that were to be pruned; a damaged field is a `MoonshotError`."""
        return check_expressions("targets", self._setting("targets"))

    @property
    def ignore(self) -> tuple[str, ...]:
        """Expressions for the modules that were to stay dense; a damaged field is a `MoonshotError`."""
        return check_expressions("ignore", self._setting("ignore")) or ()

    @property
    def pattern_rules(self) -> PatternRules:
        """Which pattern each layer got."""
        pattern, sparsity, size, how = map(self._setting, ("pattern", "sparsity", "group_size", "allocation"))
        return PatternRules.parse(pattern, sparsity, size, how, self.allocated)

    def layer_patterns(self, names: Iterable[str]) -> dict[str, Pattern | MixedNM]:
        """The pattern of every layer; of a method's shares, what all layers have in common.

        Raises:
            MoonshotError: an allocation that leaves a layer out, or an entry that decides no layer.
        """
        return self.pattern_rules.of(names)

    def nm_patterns(self) -> list[NM]:
        """The n:m patterns that layers were pruned to, short groups first."""
        return self.pattern_rules.nm()

    def to_dict(self) -> dict[str, Any]:
        """As JSON types, with the version of this format; `from_dict` is its inverse."""
        values = {field.name: copy.deepcopy(getattr(self, field.name)) for field in dataclasses.fields(self)}
        for name in ("compaction", "rotation"):
            if values[name] is None:
                del values[name]
        values["dense"] = list(self.dense)
        for name in ("dense", "allocated"):
            if not values[name]:
                del values[name]
        return {"version": self.VERSION, **values}

    @classmethod
    def from_dict(cls, values: Any) -> "PruningRecord":
        """From what `to_dict` gave, or from the dictionary without a version that earlier releases wrote.

        Raises:
            MoonshotError: a newer version, a field that is missing, or one that is damaged; it names the field.
        """
        with _explained():
            require(isinstance(values, Mapping), f"it is {reprlib.repr(values)}, no object")
        values = {"version": 0, "solver_options": {}, **copy.deepcopy(values)}
        version = values["version"]
        with _explained():
            check_whole("version", version, least=0)
        newer = f"config.json, {KEY}: version={version}: this release reads up to {cls.VERSION}; update it"
        require(version <= cls.VERSION, newer)
        fields = dataclasses.fields(cls)
        needed = [field.name for field in fields if field.default is field.default_factory is dataclasses.MISSING]
        missing = [name for name in needed if name not in values]
        with _explained():
            require(not missing, f"{', '.join(missing)}: missing")
        return cls(**{field.name: values[field.name] for field in fields if field.name in values})

    @classmethod
    def read(cls, config: Any) -> "PruningRecord | None":
        """The record in a model's configuration; None where there is none: the model is not pruned.

        Raises:
            MoonshotError: as `from_dict`.
        """
        values = getattr(config, KEY, None)
        return None if values is None else cls.from_dict(values)

    @classmethod
    def of(cls, model: nn.Module) -> "PruningRecord | None":
        """The record of a model; None where there is none: it is not pruned, or no transformers model.

        Raises:
            MoonshotError: as `from_dict`.
        """
        return cls.read(getattr(model, "config", None))

    @classmethod
    def require_of(cls, model: nn.Module) -> "PruningRecord":
        """The record of a pruned model.

        Raises:
            MoonshotError: as `from_dict`, and where there is none.
        """
        record = cls.of(model)
        if record is None:
            raise MoonshotError(NOT_PRUNED)
        return record

    def attach(self, model: nn.Module) -> None:
        """Put the record into a model's configuration, in place of one that is there; a plain module has no place."""
        if isinstance(getattr(model, "config", None), PreTrainedConfig):
            setattr(model.config, KEY, self.to_dict())


@contextmanager
def _explained(prefix: str = "") -> Iterator[None]:
    """Errors inside say where the damaged field is."""
    try:
        yield
    except MoonshotError as error:
        raise MoonshotError(f"config.json is damaged: {KEY}: {prefix}{error}") from None
