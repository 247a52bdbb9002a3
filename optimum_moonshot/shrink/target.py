"""The target of a smaller model: a number of parameters, bytes or seconds."""

import math
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..config import memory_size
from ..errors import MoonshotError, check_number, check_whole, require

UNITS = {"parameters": "parameters", "bytes": "bytes", "latency": "seconds"}
# The most parts that an error gives reasons for, and the characters of each reason.
REASONS, LONGEST = 4, 100


@dataclass(frozen=True)
class Target:
    """One of "parameters", "bytes" and "latency", with its value.

    A value of at most 1 is a fraction of the dense model's, another a number of parameters, bytes or milliseconds.
    """

    field: str
    value: float
    dense: float | None = None  # cost of the dense model, where the model is smaller already

    @classmethod
    def of(cls, **values: Any) -> "Target":
        """The target by the only keyword argument that is not None, whose name is the kind of the target.

        Raises:
            MoonshotError: no or several values, or a value that is not positive; bytes may also be text such as "2GB".
        """
        given = {name: value for name, value in values.items() if value is not None}
        message = "give exactly one of `parameters`, `bytes` and `latency`"
        require(len(given) == 1, message, field=None if not given else list(given)[-1])
        ((field, value),) = given.items()
        if field == "bytes" and isinstance(value, str):
            return cls(field, memory_size(field, value))
        check_number(field, value)
        hint = "give a fraction of the dense model's, or a number"
        require(0 < value < math.inf, hint, field=field, value=value)
        return cls(field, value)

    @classmethod
    def optional(cls, required: bool, **values: Any) -> "Target | None":
        """Like `of`, but None without a value, unless one is required."""
        return cls.of(**values) if required or any(value is not None for value in values.values()) else None

    @property
    def unit(self) -> str:
        return UNITS[self.field]

    def budget(self, dense: float) -> float:
        """The target in its `unit`, by the cost of the dense model; parameters and bytes are rounded down.

        Raises:
            MoonshotError: the target is not below the dense model's cost.
        """
        dense, timed = self._dense(dense), self.field == "latency"
        budget = self.value * dense if self.value <= 1 else self.value / (1000 if timed else 1)
        budget = budget if timed else math.floor(budget)
        hint = f"the dense model has {self.with_unit(dense)}"
        require(budget < dense, "the model is small enough", field=self.field, value=self.value, hint=hint)
        return budget

    def unreachable(self, least: float, dense: float, refused: Mapping[str, str]) -> MoonshotError:
        """The error for a target below the least reachable cost; `refused` has irreducible parts with the reasons."""
        share = least / self._dense(dense)
        message = f"the smallest configuration has {self.with_unit(least)}, {share:.4f} of the dense model"
        reasons = [f"{name} ({textwrap.shorten(why, LONGEST, placeholder='…')})" for name, why in refused.items()]
        reasons[REASONS:] = [f"{len(reasons) - REASONS} more"] if len(reasons) > REASONS else []
        because = f", since these cannot be reduced: {', '.join(reasons)}" if reasons else ""
        return MoonshotError(message + because, field=self.field, value=self.value, hint="give at least that")

    def _dense(self, cost: float) -> float:
        return cost if self.dense is None else self.dense

    def with_unit(self, cost: float) -> str:
        return f"{1e3 * cost:.4g} ms" if self.field == "latency" else f"{cost:,.0f} {self.unit}"


def check_batch_shape(batch_shape: tuple[int, int]) -> None:
    """Raise `MoonshotError` unless this is a pair of a number of samples and one of tokens."""
    pair = isinstance(batch_shape, tuple | list) and len(batch_shape) == 2
    require(pair, "give samples and tokens", field="batch_shape", value=batch_shape)
    for size in batch_shape:
        check_whole("batch_shape", size, 1)
