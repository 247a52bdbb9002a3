"""What the commands measure a model by, before and after."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Meter:
    """What a model is measured by: higher accuracy or lower perplexity is better."""

    metric: str
    shown: str  # how to format it
    measure: Callable[[str], Any]  # a `Perplexity` or an `Accuracy` on the data of a name


def make_meter(
    model: Any, tokenizer: Any, processor: Any, sequence_length: int | None, batch_size: int, limit: int | None = None
) -> Meter:
    """What measures a model.

    Args:
        model, tokenizer, processor: as they were loaded; an image model has no tokenizer.
        sequence_length: tokens per window; None is the model's longest, at most 2048.
        batch_size: windows or images at a time.
        limit: the first so many windows or images alone.
    """
    from .. import accuracy, perplexity
    from ..model.model_info import takes_images

    options: dict[str, Any] = {"batch_size": batch_size, "progress": True}
    if takes_images(model):
        return Meter("accuracy", ".2%", lambda data: accuracy(model, data, processor, max_images=limit, **options))
    options |= {"sequence_length": sequence_length, "max_windows": limit}
    return Meter("perplexity", ".3f", lambda data: perplexity(model, tokenizer, data, **options))


class BeforeAndAfter:
    """A model on some data sets, before it is changed and after.

    Args:
        meter: what measures it; it does so now.
        datasets: names of the data.
    """

    def __init__(self, meter: Meter, datasets: list[str]):
        self.meter = meter
        self.before = {dataset: meter.measure(dataset) for dataset in datasets}

    def lines(self, record: Callable[[Any, Any], object] = lambda after, before: None) -> list[str]:
        """What is told of the change; the model is measured again.

        Args:
            record: called for each data set with what was measured after and before.
        """
        from ..data.corpora import short_name

        found, shown = [], self.meter.shown
        for dataset, before in self.before.items():
            after = self.meter.measure(dataset)
            record(after, before)
            change = f"{before.value:{shown}} → {after.value:{shown}}"
            found.append(f"{self.meter.metric:<12}{change} on {short_name(dataset)}")
        return found
