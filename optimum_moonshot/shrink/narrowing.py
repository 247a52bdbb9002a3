"""A model with a smaller hidden size, from which further parts may leave."""

import dataclasses
from collections.abc import Mapping

from torch import Tensor
from transformers import PreTrainedModel

from ..errors import MoonshotError
from ..pipeline.selection import DenseTeacher
from ..reports.prune_report import PruneReport
from .decision import Decision, Tables, alternatives
from .hidden import HiddenSizes
from .hidden_size import WidthReduction, cut_stream
from .latency import model_latency
from .losses import HIDDEN
from .report import Candidate, ShrinkReport
from .request import Shrinking
from .target import Target


@dataclasses.dataclass(frozen=True)
class Narrowed:
    """A model with a smaller hidden size, with the predicted increase of its loss."""

    model: PreTrainedModel
    reduction: WidthReduction
    loss: float
    refused: Mapping[str, str]
    basis: Tensor  # as in `DenseTeacher`

    @property
    def sizes(self) -> tuple[int, int]:
        """Parameters and their bytes."""
        parameters = list(self.model.parameters())
        return sum(each.numel() for each in parameters), sum(each.nbytes for each in parameters)

    def cost(self, run: Shrinking) -> float:
        """In the unit of the target."""
        if run.target.field == "latency":
            return model_latency(self.model, run.batch_shape)
        return self.sizes[run.target.field == "bytes"]

    def request(self, run: Shrinking, dense: float) -> Shrinking:
        """The request for the remaining parts of the narrowed model; `dense` is the cost of the dense one."""
        subject = dataclasses.replace(run.subject, model=self.model, teacher=DenseTeacher(run.teacher, (), self.basis))
        target = dataclasses.replace(run.target, dense=dense)
        return dataclasses.replace(run, subject=subject, target=target, resume_dir=run.folder("narrowed"))

    def sufficient(self, unit: str, budget: float, cost: float) -> Decision:
        """The decision to remove nothing else, since the cost is within the budget."""
        count, size = self.sizes
        nothing = Candidate((), {}, 0.0, cost)
        report = ShrinkReport(unit, budget, cost, nothing, (), {}, (), {}, (count, count), (size, size))
        return Decision((), {}, count, report)

    def complete(self, report: PruneReport, tables: Tables, target: Target, measured: Mapping[str, float]) -> None:
        """Add the smaller hidden size to a report of the parts that left the narrowed model.

        Args:
            report: changed.
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
    """The model with the hidden size of the least predicted loss; None if that is its own.

    Sizes that the architecture does not support are noted in `hidden`.

    Raises:
        MoonshotError: no combination reaches the target.
    """
    for size in hidden.ranked(tables, target):
        if size == hidden.width:
            return None
        try:
            model, reduction = cut_stream(hidden.stream, size)
        except MoonshotError as error:
            hidden.refuse(size, str(error))
        else:
            return Narrowed(model, reduction, hidden.losses[size], hidden.refused, hidden.stream.projection(size))
    dense = tables.costs_of(target).dense
    raise target.unreachable(hidden.least(tables), dense, {**tables.refused, **hidden.refused})
