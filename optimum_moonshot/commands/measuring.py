"""Measure a model before and after a command changes it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Metric:
    """A metric of a model: higher accuracy or lower perplexity is better."""

    name: str
    format: str  # the format specification of its values
    measure: Callable[[str], Any]  # name of a data set → `Perplexity` or `Accuracy`


def make_metric(
    model: Any, tokenizer: Any, processor: Any, sequence_length: int | None, batch_size: int, limit: int | None = None
) -> Metric:
    """Return accuracy for image models, perplexity for the others.

    Args:
        model: a language or image model.
        tokenizer: of a language model.
        processor: of an image model.
        sequence_length: tokens per window; None is the model's longest, at most 2048.
        batch_size: windows or images at a time.
        limit: use only the first windows or images.
    """
    from .. import accuracy, perplexity
    from ..model.model_info import takes_images

    options: dict[str, Any] = {"batch_size": batch_size, "progress": True}
    if takes_images(model):
        return Metric("accuracy", ".2%", lambda data: accuracy(model, data, processor, max_images=limit, **options))
    options |= {"sequence_length": sequence_length, "max_windows": limit}
    return Metric("perplexity", ".3f", lambda data: perplexity(model, tokenizer, data, **options))


class BeforeAndAfter:
    """A metric on some data sets, before the model is changed and after.

    Args:
        metric: computed at once, for the values before.
        datasets: names of the data.
    """

    def __init__(self, metric: Metric, datasets: list[str]):
        self.metric = metric
        self.before = {dataset: metric.measure(dataset) for dataset in datasets}

    def lines(self, record: Callable[[Any, Any], object] = lambda after, before: None) -> list[str]:
        """Measure the model again and return one line per data set.

        Args:
            record: called for each data set with the results after and before.
        """
        from ..data.sources import short_name

        lines, spec = [], self.metric.format
        for dataset, before in self.before.items():
            after = self.metric.measure(dataset)
            record(after, before)
            change = f"{before.value:{spec}} → {after.value:{spec}}"
            lines.append(f"{self.metric.name:<12}{change} on {short_name(dataset)}")
        return lines
