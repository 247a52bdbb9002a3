"""The only loop over the layers of a model.

    for stage in pipeline:                      # a block (walk.py), or the whole model (stages.py)
        with stage.onloaded():
            for part in task.partition(stage):  # layers that fit in memory, or slices of one (partition.py)
                for layer, statistics in task.collect(stage, part):     # seam 1: a pass over the data (task.py)
                    task.solve(layer, statistics)                       # seam 2 (solve.py), and its result is stored
            stage.advance()

Below the same, with backoff around the two seams (backoff.py), and the results of all processes after every part.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

from ..calibration.observer import LayerStatistics
from ..data.batches import Batch
from ..devices import trim_host_memory
from ..model.layers import PrunableLayer
from .backoff import Backoff, PassTooLarge, Restart
from .partition import halvings
from .stages import PipelineStage, Stage
from .task import Task

Visited = TypeVar("Visited", bound=PipelineStage)


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
            stages = iter(pipeline)
            while True:
                with backoff.together():  # the passes of all processes before the next stage
                    stage = next(stages, None)
                if stage is None:
                    return
                with stage.onloaded():
                    visit(stage)
                    with backoff.together():
                        stage.advance()
                trim_host_memory()  # so freed memory is not counted against the next stage
        except PassTooLarge as error:
            backoff.pass_failed(error, where(), batches())
        except Restart:
            pass
        backoff.release()


def solve_parts(task: Task, stage: Stage) -> None:
    """Solve the layers of an onloaded stage, part by part.

    Raises:
        Restart: too little memory for a part, and the stage cannot repeat it.
    """
    parts, backoff = task.partition(stage), task.backoff
    while parts:
        part, noted = parts.pop(0), len(task.notes)
        solved: list[PrunableLayer] = []
        try:
            for layer, statistics in task.collect(stage, part, not parts):
                if statistics is None:
                    task.skip(layer)
                    continue
                alone = isinstance(statistics, LayerStatistics)  # no other process and no pass take part
                if backoff.solved(layer.name, partial(task.solve, layer, statistics), alone):
                    solved.append(layer)
                del statistics  # before the next one is taken
        except Exception as error:
            backoff.part_failed(error)
        if backoff.ranks.size > 1:
            task.exchange(solved)
        if backoff.must_repeat():
            repeated = tuple(f"{layer.name}: " for layer in part.layers if task.lacks(layer))
            task.notes[noted:] = [note for note in task.notes[noted:] if not note.startswith(repeated)]
            backoff.shrink(part.name, task.batches(), *halvings(part, task.spec), advanced=stage.advanced)
            parts = task.partition(stage)
