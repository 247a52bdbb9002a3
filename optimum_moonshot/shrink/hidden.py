"""The hidden size as a part of a model that may leave: its sizes, with their predicted losses."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from transformers import PreTrainedModel

from ..errors import MoonshotError
from ..model.layers import find_structure
from ..pipeline.inputs import Prepared
from .costs import Costs, Narrowing, dense_cost, shape_costs
from .decision import Tables
from .hidden_size import cut_stream
from .latency import as_measured, model_latency
from .losses import HIDDEN, MOST_BLOCKS, interpolated
from .stream import Stream, collect_moments, find_stream
from .target import Target
from .trials import Trials
from .widths import Width

# Losses are measured at these sixteenths of the hidden size, and interpolated between them.
MEASURED = (15, 14, 13, 12, 11, 10, 9, 8)
# Sizes are multiples of this fraction of the hidden size.
STEPS = 64
# λ of the directions' importance: both objectives have the same exponent.
LAM = 0.5


@dataclass(frozen=True)
class HiddenSizes:
    """The sizes that a model may have, descending from its hidden size, with the predicted increases of its loss."""

    stream: Stream
    losses: dict[int, float]
    costs: dict[int, Costs]  # of a model with each size, in the unit of the target
    refused: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def width(self) -> int:
        """The hidden size of the model."""
        return max(self.losses)

    def refuse(self, size: int, reason: str) -> None:
        """Note that the architecture does not support a size."""
        self.refused[f"{HIDDEN} {size}"] = reason

    def least(self, tables: Tables) -> float:
        """The smallest cost of any combination, without sizes that the architecture does not support."""
        sizes = [size for size in self.losses if f"{HIDDEN} {size}" not in self.refused]
        return min(tables.program(self.costs[size]).least_cost().cost for size in sizes)

    def ranked(self, tables: Tables, target: Target) -> list[int]:
        """The sizes with which some combination reaches a target, by the loss of all parts together.

        Of equal losses the one with the largest cost is first.
        """
        keys, budget = dict[int, tuple[float, float]](), target.budget(tables.costs_of(target).dense)
        for size, loss in self.losses.items():
            costs = self.costs[size]
            if costs.dense <= budget:
                keys[size] = loss, -costs.dense
            elif (choice := tables.program(costs).best(budget)) is not None:
                keys[size] = loss + choice.loss, -choice.cost
        return sorted(keys, key=lambda size: keys[size])


def find_hidden(prepared: Prepared) -> tuple[Stream | None, dict[str, str]]:
    """The residual stream of a model whose hidden size may shrink, without statistics; else the reason by its name."""
    config, model = prepared.selection.config, prepared.model
    assert isinstance(model, PreTrainedModel)
    if config.targets is not None or config.ignore:
        return None, {HIDDEN: "it changes every layer, and targets or ignore leave some out"}
    try:
        return find_stream(model, prepared.probe, LAM), {}
    except MoonshotError as error:
        return None, {HIDDEN: str(error)}


def check_reachable(
    model: PreTrainedModel,
    widths: Sequence[Width],
    stream: Stream | None,
    target: Target,
    refused: Mapping[str, str],
    multiple: int | None = None,
) -> None:
    """Check before any measurement that a target in parameters or bytes is reachable if every part may leave.

    Args:
        model: dense.
        widths: that can be reduced.
        stream: None if the hidden size stays.
        target: of the run.
        refused: parts that stay, with the reasons.
        multiple: as for `hidden_sizes`.

    Raises:
        MoonshotError: it is not.
    """
    if target.field == "latency":
        return
    narrowing = None if stream is None else _narrowing(stream, _sizes(stream, MEASURED[-1], multiple)[-1])
    structure = find_structure(model)
    layers = {layer.name: layer for layer in structure.layers()}
    least = shape_costs(model, layers, widths, target.unit, narrowing).least(int(MOST_BLOCKS * len(structure.blocks)))
    dense = dense_cost(model, target.unit)
    if least > target.budget(dense):
        raise target.unreachable(least, dense, refused)


def hidden_sizes(
    prepared: Prepared,
    trials: Trials,
    stream: Stream,
    tables: Tables,
    target: Target,
    batch_shape: tuple[int, int],
    multiple: int | None = None,
) -> HiddenSizes:
    """Measure the losses of smaller hidden sizes, by one pass with gradients and a forward pass for each.

    Args:
        prepared: the dense model and its data.
        trials: measure its losses.
        stream: of the model; its statistics are added.
        tables: of the model.
        target: determines whether latencies are measured, of a model of each size.
        batch_shape: samples and tokens of a forward pass, for latencies.
        multiple: of which smaller sizes are multiples; None: of a 64th of the model's.
    """
    collect_moments(stream, prepared.batches, prepared.subject.loss)
    hidden_size, dense = stream.space.width, trials.loss("dense")
    points, relative, refused = {0: 0.0}, {0: 1.0}, dict[str, str]()  # by the number of removed directions
    for sixteenths in MEASURED:
        size = hidden_size * sixteenths // 16
        measured = trials.loss(f"{HIDDEN} {size}", partial(stream.narrowed, size))
        points[hidden_size - size] = max(0.0, measured - dense)
        if target.field == "latency":
            try:
                relative[hidden_size - size] = _latency(stream, size, trials, batch_shape)
            except MoonshotError as error:  # the architecture may allow other sizes
                refused[f"{HIDDEN} {size}"] = str(error)
    most = max(relative if target.field == "latency" else points)
    sizes = [size for size in _sizes(stream, MEASURED[-1], multiple) if hidden_size - size <= most]
    if multiple is not None and len(sizes) == 1:
        refused[HIDDEN] = f"no multiple of {multiple} is from {hidden_size - most} to {hidden_size - 1}"
    removed = [hidden_size - size for size in sizes]
    losses = dict(zip(sizes, interpolated(points, removed), strict=True))
    if target.field == "latency":
        shares = np.minimum.accumulate(np.interp(removed, list(relative), list(relative.values())))
        costs = {size: tables.costs_of(target).scaled(float(share)) for size, share in zip(sizes, shares, strict=True)}
    else:
        model, layers = stream.model, {layer.name: layer for layer in find_structure(stream.model).layers()}
        costs = {
            size: shape_costs(model, layers, tables.widths, target.unit, _narrowing(stream, size)) for size in sizes
        }
    return HiddenSizes(stream, losses, costs, refused)


def _sizes(stream: Stream, least: int, multiple: int | None) -> list[int]:
    """The sizes to consider, descending from that of the model to `least` sixteenths of it."""
    width = stream.space.width
    start, step = (width, max(1, width // STEPS)) if multiple is None else (width // multiple * multiple, multiple)
    return list(dict.fromkeys((width, *range(start, width * least // 16 - 1, -step))))


def _narrowing(stream: Stream, size: int) -> Narrowing:
    return Narrowing(stream.space.width, size, stream.axes)


def _latency(stream: Stream, size: int, trials: Trials, batch_shape: tuple[int, int]) -> float:
    """The latency of a model with a hidden size, relative to that of the dense model."""

    def measure(size: int) -> float:
        return model_latency(cut_stream(stream, size)[0], batch_shape)

    keep = as_measured(trials.measurements.keep, stream.model, batch_shape)
    dense = keep("seconds", lambda: model_latency(stream.model, batch_shape))
    return keep(f"seconds of {HIDDEN} {size}", partial(measure, size)) / dense
