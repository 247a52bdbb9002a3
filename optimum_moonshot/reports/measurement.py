"""Measurements of a model, such as its perplexity."""

from typing import Any, NamedTuple, Protocol


class Measurement(NamedTuple):
    """One measurement of a model."""

    metric: str  # such as "perplexity", or "accuracy", 0 to 1
    value: float
    settings: dict[str, Any]  # must be equal for comparable values; as JSON types


def metric_key(dataset: str, metric: str) -> str:
    """The name of one of several measurements on a data set; `data_name` is the inverse."""
    return f"{dataset} ({metric})"


def data_name(key: str, metric: str) -> str:
    """The data set, or the task, of a measurement."""
    return key.removesuffix(f" ({metric})")


class Measured(Protocol):
    """Results of `perplexity`, `accuracy`, `agreement` and `zero_shot`."""

    def measurements(self) -> dict[str, Measurement]:
        """The measurements, by their data set or task."""
