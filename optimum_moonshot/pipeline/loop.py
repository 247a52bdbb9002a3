"""The only loop over the layers of a model.

    for stage in pipeline:                      # a block, or the model as a whole (stages.py)
        with stage.onloaded():
            for part in task.partition(stage):  # layers that fit in memory, or slices of one (partition.py)
                for layer, statistics in task.collect(stage, part):     # seam 1: a pass over the data (collect.py)
                    task.solve(layer, statistics)                       # seam 2 (solve.py), and its result is stored
            stage.advance()

Below the same, with backoff around the two seams (backoff.py), and the results of all processes after every part.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol, TypeVar

from ..calibration.observer import LayerStatistics
from ..data.batches import Batch, sample_count
from ..devices import trim_host_memory
from ..model.layers import PrunableLayer
from .backoff import Backoff, PassTooLarge, Restart
from .partition import Part, halvings, partition
from .spec import StatisticsSpec
from .stages import PipelineStage, Stage

Value = TypeVar("Value")  # the statistics of a layer
Visited = TypeVar("Visited", bound=PipelineStage)


class Task(Protocol[Value]):
    """The work of a run on the layers of a model."""

    spec: StatisticsSpec
    backoff: Backoff
    notes: list[str]  # for the report

    def batches(self) -> Sequence[Batch]:
        """The calibration batches, as small as backoff has made them."""

    def partition(self, stage: Stage) -> list[Part]:
        """The parts of a stage: its layers that have no result yet."""

    def collect(self, stage: Stage, part: Part, advance: bool, /) -> Iterable[tuple[PrunableLayer, Value | None]]:
        """Seam 1: the statistics of the layers that this process solves; None where no data reached a layer.

        With `advance` no other pass follows at this stage, so that this one may also advance it.
        """

    def solve(self, layer: PrunableLayer, statistics: Value) -> None:
        """Seam 2: solve an onloaded, dense layer and store the result; the statistics do not change."""

    def skip(self, layer: PrunableLayer) -> None:
        """Skip a layer that no data reached."""

    def lacks(self, layer: PrunableLayer) -> bool:
        """Whether a layer has no result yet, and is to have one."""

    def exchange(self, solved: Sequence[PrunableLayer]) -> None:
        """After a part, where there are several processes: give all of them the results of the others."""


def run_pipeline(
    pipeline: Iterable[Visited],
    visit: Callable[[Visited], None],
    backoff: Backoff,
    batches: Callable[[], Sequence[Batch]],
    where: Callable[[], str] = lambda: "the passes over the data",
) -> None:
    """Visit the stages of a pipeline, each with its weights onloaded; again from the first where memory runs out.

    The pipeline passes the data anew whenever it is iterated; `visit`, such as `solve_parts`, skips work that has been
    done. Backoff halves the batches, and `where` names the present pass in the report.

    Raises:
        MoonshotError: bad data or statistics.
        torch.OutOfMemoryError: too little memory for the smallest piece.
    """
    while True:
        try:
            for stage in backoff.stages(pipeline):
                with stage.onloaded():
                    visit(stage)
                    with backoff.together():
                        stage.advance()
                trim_host_memory()  # else the next stage is charged with the memory that this one has freed
            return
        except PassTooLarge as error:
            backoff.pass_failed(error, where(), batches())
        except Restart:
            pass
        backoff.release()


def solve_parts(task: Task[Value], stage: Stage) -> None:
    """Solve the layers of an onloaded stage, part by part.

    Raises:
        Restart: too little memory for a part, and the stage cannot repeat it.
    """
    parts, backoff = task.partition(stage), task.backoff
    while parts:
        part, noted = parts.pop(0), len(task.notes)
        solved: list[PrunableLayer] = []
        with backoff.attempt():
            for layer, statistics in task.collect(stage, part, not parts):
                if statistics is None:
                    task.skip(layer)
                    continue
                alone = isinstance(statistics, LayerStatistics)  # no other process and no pass take part
                if backoff.solved(layer.name, partial(task.solve, layer, statistics), alone):
                    solved.append(layer)
                del statistics  # before the next one is taken
        if backoff.processes > 1:
            task.exchange(solved)
        if backoff.lost():
            repeated = tuple(f"{layer.name}: " for layer in part.layers if task.lacks(layer))
            task.notes[noted:] = [note for note in task.notes[noted:] if not note.startswith(repeated)]
            backoff.shrink(part.name, task.batches(), *halvings(part, task.spec), advanced=stage.advanced)
            parts = task.partition(stage)


class PartitionedTask:
    """A task with the statistics of a spec, divided by the memory that is available."""

    def __init__(self, spec: StatisticsSpec, backoff: Backoff, batches: Callable[[], Sequence[Batch]]):
        self.spec, self.backoff, self.batches, self.notes = spec, backoff, batches, list[str]()

    def lacks(self, layer: PrunableLayer) -> bool:
        raise NotImplementedError

    def partition(self, stage: Stage) -> list[Part]:
        layers, backoff = [layer for layer in stage.layers if self.lacks(layer)], self.backoff
        if not layers:
            return []
        here = backoff.storage.available(), sample_count(self.batches())
        available, samples = zip(*backoff.ranks.all_gather_object(here), strict=True)
        return partition(layers, self.spec, min(available), backoff.processes, max(samples))

    def exchange(self, solved: Sequence[PrunableLayer]) -> None:
        """Nothing to do for a single process."""
