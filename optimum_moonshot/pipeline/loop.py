"""The only loop over the layers of a model, and the interface of the work that it does.

    for stage in pipeline:                      # a block, or the whole model (walk.py)
        with stage.onloaded():
            for part in task.partition(stage):  # layers that fit in memory, or slices of one (partition.py)
                for layer, statistics in task.collect(stage, part):     # seam 1: a pass over the data
                    task.solve(layer, statistics)                       # seam 2 (solve.py), and its result is stored
            stage.advance()

`run_pipeline` and `solve_parts` are this loop with backoff around the two seams (backoff.py); processes exchange their
results after every part. A `Task` says which layers lack a result, and solves a layer by its statistics.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from ..calibration.accumulators import GradientPlan
from ..calibration.observer import LayerStatistics, Observer, merge_statistics
from ..data.batches import Batch, sample_count
from ..devices import trim_host_memory
from ..distributed.sharing import assign
from ..errors import MoonshotError
from ..model.layers import PrunableLayer
from .backoff import Backoff, PassTooLarge, Restart
from .partition import Part, StatisticsSpec, halved, partition
from .slices import CollectedExperts, CollectedRows, sharded
from .solve import Statistics
from .under_calibrated_experts import UnderCalibratedExperts
from .walk import PipelineStage, Stage

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
            with backoff.together():  # a probe, or the passes before the first stage
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
        except PassTooLarge:
            backoff.shrink(where(), batches())
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
        task.exchange(solved)
        if backoff.must_repeat():
            repeated = tuple(f"{layer.name}: " for layer in part.layers if task.lacks(layer))
            task.notes[noted:] = [note for note in task.notes[noted:] if not note.startswith(repeated)]
            kind = backoff.shrink(part.name, task.batches(), halved(part, task.spec))
            backoff.release()
            with backoff.together():
                repeatable = not stage.advanced and (kind != "samples" or stage.recut(task.batches()))
            if not all(backoff.gather(repeatable and kind != "caches")):
                raise Restart
            parts = task.partition(stage)


class Task(ABC):
    """Solves layers with their statistics, in parts that fit in memory; see the module's docstring.

    Args:
        spec: of the statistics.
        backoff: repeats with smaller pieces what did not fit.
        batches: the calibration batches, as small as backoff has made them.
    """

    def __init__(self, spec: StatisticsSpec, backoff: Backoff, batches: Callable[[], Sequence[Batch]]):
        self.spec, self.backoff, self.batches = spec, backoff, batches
        self.notes: list[str] = []  # for the report

    @abstractmethod
    def lacks(self, layer: PrunableLayer) -> bool:
        """Whether a layer has no result yet, and is to have one."""

    @abstractmethod
    def solve(self, layer: PrunableLayer, statistics: Any) -> None:
        """Seam 2: solve an onloaded, dense layer and store the result; the statistics do not change."""

    @abstractmethod
    def skip(self, layer: PrunableLayer) -> None:
        """Skip a layer that no data reached."""

    def exchange(self, solved: Sequence[PrunableLayer]) -> None:  # noqa: B027 optional
        """After a part, give all processes the results of the others."""

    def partition(self, stage: Stage) -> list[Part]:
        """The parts of a stage: its layers that have no result yet, divided by the memory of all processes."""
        layers, backoff = [layer for layer in stage.layers if self.lacks(layer)], self.backoff
        if not layers:
            return []
        resources = backoff.storage.available(), sample_count(self.batches())
        available, samples = zip(*backoff.gather(resources), strict=True)
        processes = len(available)
        if not self.spec.samples:  # no statistics
            return [Part(tuple(layers), tuple(assign([self.spec.cost(layer) for layer in layers], processes)))]
        return partition(layers, self.spec, min(available), processes, max(samples))

    def collect(self, stage: Stage, part: Part, advance: bool) -> Iterator[tuple[PrunableLayer, Any]]:
        """Seam 1: one pass over the data, then the statistics of every layer that this process solves, freed in turn.

        A layer that no data reached has None, and a layer in slices an object that collects them. Layers that all
        processes solve together are first: nobody waits for one that solves a layer alone.

        Args:
            stage: where the layers are observed.
            part: of its layers.
            advance: whether no other pass follows at this stage, so that this one may also advance it.

        Raises:
            MoonshotError: the data gave NaN or infinity, or there is no memory for the statistics.
        """
        if part.slices:
            yield part.layers[0], self._in_slices(stage, part)
            return
        spec, backoff, layers = self.spec, self.backoff, part.layers
        if not spec.samples:  # the solver needs no data: the diagonal of the identity stands for them
            for layer, owner in zip(layers, part.owners, strict=True):
                if backoff.solves(owner):
                    ones = torch.ones(layer.shape[1], device=layer.parameter.device)
                    yield layer, LayerStatistics(ones, None, 0, diagonal=True)
            return
        separate = any(layer.separate for layer in layers)
        experts = UnderCalibratedExperts(spec, backoff, self.notes) if separate else None
        gradients = {layer.name for layer in layers if spec.needs_gradients(layer)}
        plans = {layer.name: part.plan or spec.plan(layer) for layer in layers}
        local_samples = sample_count(self.batches())
        owners = {layer.name: owner for layer, owner in zip(layers, part.owners, strict=True)}
        observer = Observer(
            layers, spec.diagonal, gradients, spec.samples, backoff.storage, plans, local_samples=local_samples
        )
        with backoff.passing(observer, partial(merge_statistics, owners=owners)):
            stage.observe(observer, advance and (not separate or spec.keeps_routing))
        if experts is not None:
            experts.observe(stage, layers, observer)
        trim_host_memory()
        for layer in sorted(layers, key=lambda layer: layer.separate or isinstance(owners[layer.name], int)):
            owner = owners[layer.name]
            if not observer.reached(layer):
                yield layer, None
                continue
            if not backoff.solves(owner):
                if experts is not None:
                    experts.note(layer)
                observer.forget(layer)
                continue
            statistics = observer.take(layer)
            if experts is not None:
                statistics = experts.complete(layer, statistics)
            yield layer, sharded(layer, statistics, owner, backoff) if isinstance(owner, tuple) else statistics
            del statistics  # before the next ones are taken

    def _in_slices(self, stage: Stage, part: Part) -> Statistics:
        """The statistics of a layer by one pass for each slice; every process collects all of them."""
        (layer,), count, spec = part.layers, len(part.slices), self.spec

        def one(layer: PrunableLayer, plan: GradientPlan | None = None) -> LayerStatistics | None:
            ((_, statistics),) = self.collect(stage, Part((layer,), (None,), plan=plan), False)
            return statistics

        def some_rows(rows: slice, totals: int | None) -> LayerStatistics:
            statistics = one(layer, dataclasses.replace(spec.plan(layer), rows=rows, totals=totals))
            if statistics is None:
                hint = "add its name to `ignore`"
                raise MoonshotError("no calibration data reached it", hint=hint).within(layer.name)
            return statistics

        if layer.separate:
            self.notes.append(f"{layer.name}: its experts solved in {count} parts to save memory")
            return CollectedExperts(layer, part.slices, one, spec.samples, spec.diagonal)
        self.notes.append(f"{layer.name}: solved in {count} row chunks to save memory")
        return CollectedRows(layer, part.slices, some_rows)
