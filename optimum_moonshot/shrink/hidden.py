"""A smaller hidden size: the sizes that a model may have, with their predicted losses, and the model of one size."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from ..errors import MoonshotError
from ..pipeline.inputs import Prepared
from ..reports.prune_report import PruneReport
from .costs import Costs, Narrowing, as_measured, dense_cost, model_latency, shape_costs
from .decision import Decision, Tables, alternatives
from .hidden_size import WidthReduction, cut_stream
from .losses import HIDDEN, MOST_BLOCKS, interpolated
from .report import Candidate, ShrinkReport, Target
from .request import Shrinking
from .stream import Stream, collect_moments, find_stream
from .trials import Trials
from .widths import Width

# Losses are measured at these sixteenths of the hidden size, and interpolated between them.
MEASURED = (15, 14, 12, 10, 8)
# Sizes are multiples of this fraction of the hidden size.
STEPS = 64
# Samples of a pass with gradients, whose activations are all in memory: with 8 of 256 tokens, 1.5 GB for SmolLM2-135M.
TOGETHER = 2
# λ of the directions' importance: equal exponents for both objectives.
LAM = 0.5


@dataclass
class HiddenSizes:
    """The sizes that a model may have, descending from its hidden size, with the predicted increases of its loss."""

    stream: Stream
    losses: dict[int, float]
    costs: dict[int, Costs]  # of a model with each size, in the unit of the target
    refused: dict[str, str] = dataclasses.field(default_factory=dict)
    prepared: Prepared | None = None  # with all samples; None once the stream has the statistics of all

    @property
    def width(self) -> int:
        """The hidden size of the model."""
        return max(self.losses)

    def use_all_samples(self) -> None:
        """Give the stream the statistics of all samples, by a pass with gradients."""
        if self.prepared is not None:
            self.stream.moments.clear()
            self.stream.fisher.clear()
            collect_moments(self.stream, self.prepared.batches, self.prepared.subject.loss, TOGETHER)
            self.prepared = None

    def refuse(self, size: int, reason: str) -> None:
        """Note that the architecture does not support a size."""
        self.refused[f"{HIDDEN} {size}"] = reason

    def least(self, tables: Tables) -> float:
        """The smallest cost of any combination, without sizes that the architecture does not support."""
        sizes = [size for size in self.losses if f"{HIDDEN} {size}" not in self.refused]
        return min(tables.program(self.costs[size]).least_cost().cost for size in sizes)

    def ranked(self, tables: Tables, target: Target) -> list[int]:
        """The sizes with which a combination reaches a target, in ascending order of the loss of all parts together.

        Among equal losses, the largest cost comes first.
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
    """Find the residual stream of a model, without statistics; None, and the reason, if its hidden size is fixed."""
    config, model = prepared.selection.config, prepared.model
    assert isinstance(model, PreTrainedModel)
    if config.targets is not None or config.ignore:
        return None, {HIDDEN: "it changes every layer, and targets or ignore exclude some"}
    try:
        return find_stream(model, prepared.probe, LAM), {}
    except MoonshotError as error:
        return None, {HIDDEN: str(error)}


def check_reachable(run: Shrinking, widths: Sequence[Width], stream: Stream | None, refused: Mapping[str, str]) -> None:
    """Raise `MoonshotError` before any measurement if a target in parameters or bytes is out of reach of all parts.

    `refused` has the parts that cannot be reduced, with the reasons, and `stream` is None where the hidden size cannot.
    """
    model, target = run.model, run.target
    if target.field == "latency":
        return
    narrowing = None if stream is None else _narrowing(stream, _sizes(stream, MEASURED[-1], run.hidden_multiple)[-1])
    costs = shape_costs(model, widths, target.unit, narrowing)
    least = costs.least(int(MOST_BLOCKS * len(costs.blocks)))
    dense = dense_cost(model, target.unit)
    if least > target.budget(dense):
        raise target.unreachable(least, dense, refused)


def hidden_sizes(run: Shrinking, prepared: Prepared, trials: Trials, stream: Stream, tables: Tables) -> HiddenSizes:
    """Measure the losses of smaller hidden sizes, by a pass with gradients and a forward pass for each, on few samples.

    The smallest size is the first one that loses more than the best choice among the other parts, of the `tables`, or
    that reaches a number of parameters or bytes alone. The statistics are added to the `stream`.
    """
    target, multiple = run.target, run.hidden_multiple
    collect_moments(stream, trials.fitting.batches, prepared.subject.loss, TOGETHER)
    hidden_size = stream.space.width
    points, relative, refused = {0: 0.0}, {0: 1.0}, dict[str, str]()  # by the number of removed directions
    sizes = _sizes(stream, MEASURED[-1], multiple)
    least, costs = 0, dict[int, Costs]()
    budget = target.budget(tables.costs_of(target).dense)
    others = tables.program(tables.costs_of(target)).best(budget)
    if target.field != "latency":
        narrowings = {size: _narrowing(stream, size) for size in sizes}
        costs = {
            size: shape_costs(run.model, tables.widths, target.unit, narrowing)
            for size, narrowing in narrowings.items()
        }
        least = next((size for size, cost in costs.items() if cost.dense <= budget), 0)
    for size in (hidden_size * sixteenths // 16 for sixteenths in MEASURED):
        if hidden_size - max(points) <= least or (others is not None and max(points.values()) > others.loss):
            break
        measured = trials.increase(f"{HIDDEN} {size}", partial(stream.narrowed, size))
        points[hidden_size - size] = max(*points.values(), measured)
        if target.field == "latency":
            try:
                relative[hidden_size - size] = _latency(stream, size, trials, run.batch_shape)
            except MoonshotError as error:  # the architecture may allow other sizes
                refused[f"{HIDDEN} {size}"] = str(error)
    most = max(relative if target.field == "latency" else points)
    sizes = [size for size in sizes if hidden_size - size <= most]
    if multiple is not None and len(sizes) == 1:
        refused[HIDDEN] = f"no multiple of {multiple} is from {hidden_size - most} to {hidden_size - 1}"
    removed = [hidden_size - size for size in sizes]
    losses = dict(zip(sizes, interpolated(points, removed), strict=True))
    if target.field == "latency":
        shares = np.minimum.accumulate(np.interp(removed, list(relative), list(relative.values())))
        costs = {size: tables.costs_of(target).scaled(float(share)) for size, share in zip(sizes, shares, strict=True)}
    return HiddenSizes(stream, losses, costs, refused, prepared)


def _sizes(stream: Stream, least: int, multiple: int | None) -> list[int]:
    """The sizes to consider, descending from the model's hidden size to `least` sixteenths of it."""
    width = stream.space.width
    start, step = (width, max(1, width // STEPS)) if multiple is None else (width // multiple * multiple, multiple)
    return list(dict.fromkeys((width, *range(start, width * least // 16 - 1, -step))))


def _narrowing(stream: Stream, size: int) -> Narrowing:
    return Narrowing(stream.space.width, size, stream.axes)


def _latency(stream: Stream, size: int, trials: Trials, batch_shape: tuple[int, int]) -> float:
    """The latency of a model with a hidden size, divided by the latency of the dense model."""

    def measure(size: int) -> float:
        return model_latency(cut_stream(stream, size)[0], batch_shape)

    keep = as_measured(trials.measurements.keep, stream.model, batch_shape)
    dense = keep("seconds", lambda: model_latency(stream.model, batch_shape))
    return keep(f"seconds of {HIDDEN} {size}", partial(measure, size)) / dense


@dataclasses.dataclass(frozen=True)
class Narrowed:
    """A model with a smaller hidden size, with the predicted increase of its loss."""

    model: PreTrainedModel
    reduction: WidthReduction
    loss: float
    refused: Mapping[str, str]
    basis: Tensor  # as in `DenseTeacher`

    def sufficient(self, unit: str, budget: float, cost: float) -> Decision:
        """The decision to remove nothing else, since the cost is within the budget."""
        count, size = (round(dense_cost(self.model, kind)) for kind in ("parameters", "bytes"))
        nothing = Candidate((), {}, 0.0, cost)
        report = ShrinkReport(unit, budget, cost, nothing, (), {}, (), {}, (count, count), (size, size))
        return Decision((), {}, count, report)

    def complete(self, report: PruneReport, tables: Tables, target: Target, measured: Mapping[str, float]) -> None:
        """Add the smaller hidden size to a report of the parts that were removed from the narrowed model.

        Args:
            report: the report to change.
            tables: of the dense model.
            target: of the run.
            measured: all measurements of the dense model.
        """
        shrunk, compaction, reduction = report.shrink, report.compaction, self.reduction
        assert shrunk is not None and compaction is not None
        costs, (width, size) = tables.costs_of(target), reduction.hidden_size
        chosen = Candidate(
            (HIDDEN, *shrunk.chosen.allowed),
            {HIDDEN: width - size, **shrunk.chosen.removed},
            self.loss + shrunk.chosen.loss,
            shrunk.chosen.cost,
        )
        after = {f"{HIDDEN} {size}, {name}": value for name, value in shrunk.measured.items()}
        parameters = round(tables.parameters.dense), shrunk.parameters[1]
        report.shrink = dataclasses.replace(
            shrunk,
            dense=costs.dense,
            chosen=chosen,
            hidden_size=reduction.hidden_size,
            seconds=None if shrunk.seconds is None else (costs.dense, shrunk.seconds[1]),
            considered=(*alternatives(tables.program(costs), target.budget(costs.dense)), chosen),
            measured={**measured, **after},
            parameters=parameters,
            bytes=(round(tables.bytes.dense), shrunk.bytes[1]),
            refused={**tables.refused, **self.refused, **shrunk.refused},
        )
        config = {**{name: list(change) for name, change in reduction.config.items()}, **compaction["config"]}
        report.compaction = {**compaction, "config": config, "parameters": list(parameters)}


def narrow(hidden: HiddenSizes, tables: Tables, target: Target) -> Narrowed | None:
    """Build the model with the hidden size of least predicted loss; None if the model's own size is best.

    Sizes that the architecture does not support are noted in `hidden`.

    Raises:
        MoonshotError: no combination reaches the target.
    """
    for size in hidden.ranked(tables, target):
        if size == hidden.width:
            return None
        hidden.use_all_samples()
        try:
            model, reduction = cut_stream(hidden.stream, size)
        except MoonshotError as error:
            hidden.refuse(size, str(error))
        else:
            return Narrowed(model, reduction, hidden.losses[size], hidden.refused, hidden.stream.projection(size))
    dense = tables.costs_of(target).dense
    raise target.unreachable(hidden.least(tables), dense, {**tables.refused, **hidden.refused})
