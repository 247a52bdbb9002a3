"""A figure of a model, and what returns some."""

from typing import Any, NamedTuple, Protocol


class Measurement(NamedTuple):
    """One figure of a model."""

    metric: str  # "perplexity", or "accuracy", 0 to 1
    value: float
    settings: dict[str, Any]  # what must be equal for two values to compare, as JSON types


class Measured(Protocol):
    """What `perplexity`, `accuracy` and `zero_shot` return."""

    def measurements(self) -> dict[str, Measurement]:
        """By what it was measured on: a data set or a task."""
