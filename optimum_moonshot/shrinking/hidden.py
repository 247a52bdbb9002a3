"""The hidden size as a part of a model that may leave: its sizes, with their predicted losses."""

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from ..errors import MoonshotError
from ..model.losses import Loss
from ..pipeline.inputs import Prepared
from ..rotation.stream import Stream, observe_stream
from ..rotation.width import cut_stream
from .decision import Tables
from .latency import model_latency
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
    costs: dict[int, float]  # of a model with each size, relative to that of the model
    refused: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def width(self) -> int:
        """The hidden size of the model."""
        return max(self.losses)

    @property
    def least(self) -> float:
        """The smallest relative cost."""
        return min(self.costs[size] for size in self.losses)

    def without(self, size: int, reason: str) -> "HiddenSizes":
        """Without a size that the architecture does not support."""
        losses = {other: loss for other, loss in self.losses.items() if other != size}
        return dataclasses.replace(self, losses=losses, refused={**self.refused, f"{HIDDEN} {size}": reason})

    def best(self, tables: Tables, target: Target) -> tuple[int, float] | None:
        """The size with which all parts together lose least, and its loss alone; None if no combination fits.

        All other parts become cheaper in proportion.
        """
        costs, choices = tables.costs_of(target), dict[int, float]()
        program, budget = tables.program(costs), target.budget(costs.dense)
        for size, loss in self.losses.items():
            within = budget / self.costs[size]
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


def hidden_sizes(
    prepared: Prepared,
    trials: Trials,
    loss: Loss | None,
    target: Target,
    batch_shape: tuple[int, int],
    multiple: int | None = None,
) -> HiddenSizes:
    """Measure the losses of smaller hidden sizes, by one pass with gradients and a forward pass for each.

    Args:
        prepared: the dense model and its data.
        trials: measure its losses.
        loss: of the model, as for `MoonshotPruner`.
        target: determines whether latencies are measured, of a model of each size.
        batch_shape: samples and tokens of a forward pass, for latencies.
        multiple: of which smaller sizes are multiples; None: of a 64th of the model's.
    """
    model = prepared.model
    assert isinstance(model, PreTrainedModel)
    embeddings: Any = model.get_input_embeddings()
    own = int(embeddings.weight.shape[1])
    nothing, same = {own: 0.0}, {own: 1.0}
    config = prepared.selection.config
    if config.targets is not None or config.ignore:
        reason = "it changes every layer, and targets or ignore leave some out"
        return HiddenSizes(None, nothing, same, {HIDDEN: reason})
    try:
        stream = observe_stream(model, prepared.batches, prepared.probe, LAM, loss)
    except MoonshotError as error:
        return HiddenSizes(None, nothing, same, {HIDDEN: str(error)})
    dense = trials.loss("dense")
    points, costs, refused = {0: 0.0}, {0: 1.0}, dict[str, str]()  # by the number of removed directions
    for sixteenths in MEASURED:
        size = own * sixteenths // 16
        measured = trials.loss(f"{HIDDEN} {size}", partial(stream.narrowed, size))
        points[own - size] = max(0.0, measured - dense)
        if target.field != "latency":
            costs[own - size] = size / own
            continue
        try:
            costs[own - size] = _latency(stream, size, trials, batch_shape)
        except MoonshotError as error:  # the architecture may allow other sizes
            refused[f"{HIDDEN} {size}"] = str(error)
    if len(costs) == 1:
        return HiddenSizes(None, nothing, same, refused)
    start, step = (own, max(1, own // STEPS)) if multiple is None else (own // multiple * multiple, multiple)
    sizes = tuple(dict.fromkeys((own, *range(start, own - max(costs) - 1, -step))))
    if len(sizes) == 1:
        refused[HIDDEN] = f"no multiple of {multiple} is from {own - max(costs)} to {own - 1}"
        return HiddenSizes(None, nothing, same, refused)
    removed = [own - size for size in sizes]
    losses = dict(zip(sizes, interpolated(points, removed), strict=True))
    relative = np.minimum.accumulate(np.interp(removed, list(costs), list(costs.values())))
    return HiddenSizes(stream, losses, dict(zip(sizes, map(float, relative), strict=True)))


def _latency(stream: Stream, size: int, trials: Trials, batch_shape: tuple[int, int]) -> float:
    """The latency of a model with a hidden size, relative to that of the dense model."""

    def measure(size: int) -> float:
        return model_latency(cut_stream(stream, size)[0], batch_shape)

    keep = trials.measurements.keep
    dense = keep("seconds", lambda: model_latency(stream.model, batch_shape))
    return keep(f"seconds of {HIDDEN} {size}", partial(measure, size)) / dense
