"""The hidden size as a part of a model that may leave: its sizes, with their predicted losses."""

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers import PreTrainedModel

from ..errors import MoonshotError
from ..model.losses import Loss
from ..pipeline.inputs import Prepared
from ..rotation.stream import Stream, observe_stream
from .decision import Tables
from .losses import HIDDEN, interpolated
from .target import Target
from .trials import Trials

# Losses are measured at these sixteenths of the hidden size, and interpolated between them.
MEASURED = (15, 14, 13, 12, 11, 10, 9, 8)
# Sizes are multiples of this fraction of the hidden size.
STEPS = 64
# λ of the directions' importance: both objectives have the same exponent.
LAM = 0.5


@dataclass(frozen=True)
class HiddenSizes:
    """The sizes that a model may have, descending from its own, with the predicted increases of its loss."""

    stream: Stream | None  # None: the hidden size stays, for the reason in `refused`
    losses: dict[int, float]
    refused: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def width(self) -> int:
        """The hidden size of the model."""
        return max(self.losses)

    @property
    def least(self) -> float:
        """The smallest size, relative to that of the model."""
        return min(self.losses) / self.width

    def without(self, size: int, reason: str) -> "HiddenSizes":
        """Without a size that the architecture does not support."""
        losses = {other: loss for other, loss in self.losses.items() if other != size}
        return dataclasses.replace(self, losses=losses, refused={**self.refused, f"{HIDDEN} {size}": reason})

    def best(self, tables: Tables, target: Target) -> tuple[int, float] | None:
        """The size with which all parts together lose least, and its loss alone; None if no combination fits.

        All matrices become smaller in proportion to the size.
        """
        costs, choices = tables.costs_of(target), dict[int, float]()
        program, budget = tables.program(costs), target.budget(costs.dense)
        for size, loss in self.losses.items():
            within = budget * self.width / size
            rest = 0.0
            if within < costs.dense:
                choice = program.best(within)
                if choice is None:
                    continue
                rest = choice.loss
            choices[size] = loss + rest
        if not choices:
            return None
        size = min(choices, key=lambda each: (choices[each], -each))
        return size, self.losses[size]


def hidden_sizes(prepared: Prepared, trials: Trials, loss: Loss | None, target: Target) -> HiddenSizes:
    """Measure the losses of smaller hidden sizes, by one pass with gradients and a forward pass for each."""
    model = prepared.model
    assert isinstance(model, PreTrainedModel)
    embeddings: Any = model.get_input_embeddings()
    own = int(embeddings.weight.shape[1])
    nothing = {own: 0.0}
    if target.field == "latency":
        return HiddenSizes(None, nothing, {HIDDEN: "targets in seconds do not consider it"})
    config = prepared.selection.config
    if config.targets is not None or config.ignore:
        return HiddenSizes(None, nothing, {HIDDEN: "it changes every layer, and targets or ignore leave some out"})
    try:
        stream = observe_stream(model, prepared.batches, prepared.probe, LAM, loss)
    except MoonshotError as error:
        return HiddenSizes(None, nothing, {HIDDEN: str(error)})
    dense = trials.loss("dense")
    points = {own: 0.0}
    for sixteenths in MEASURED:
        size = own * sixteenths // 16
        measured = trials.loss(f"{HIDDEN} {size}", partial(stream.narrowed, size))
        points[size] = max(0.0, measured - dense)
    step = max(1, own // STEPS)
    sizes = tuple(range(own, own // 2 - 1, -step))
    removed = {own - size: loss for size, loss in points.items()}
    losses = interpolated(removed, [own - size for size in sizes])
    return HiddenSizes(stream, dict(zip(sizes, losses, strict=True)))
