"""The work of a run on the layers of a model: which statistics it collects, and how it solves a layer with them."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from ..calibration.accumulators import GradientPlan
from ..calibration.merging import merge_statistics
from ..calibration.observer import LayerStatistics, Observer
from ..data.batches import Batch, sample_count
from ..devices import trim_host_memory
from ..errors import MoonshotError, Text
from ..model.layers import PrunableLayer
from .backoff import Backoff
from .partition import Part, partition
from .slices import CollectedExperts, CollectedRows, sharded
from .solve import Statistics
from .spec import StatisticsSpec
from .stages import Stage
from .under_calibrated_experts import UnderCalibratedExperts


class Task(ABC):
    """Solves layers with their statistics, in parts that fit in memory; see loop.py.

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
        """After a part, where there are several processes: give all of them the results of the others."""

    def partition(self, stage: Stage) -> list[Part]:
        """The parts of a stage: its layers that have no result yet, divided by the memory of all processes."""
        layers, backoff = [layer for layer in stage.layers if self.lacks(layer)], self.backoff
        if not layers:
            return []
        here = backoff.storage.available(), sample_count(self.batches())
        available, samples = zip(*backoff.ranks.all_gather_object(here), strict=True)
        return partition(layers, self.spec, min(available), backoff.ranks.size, max(samples))

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
        separate = any(layer.separate for layer in layers)
        experts = UnderCalibratedExperts(spec, backoff, self.notes) if separate else None
        gradients = {layer.name for layer in layers if spec.needs_gradients(layer)}
        plans = {layer.name: part.plan or spec.plan(layer) for layer in layers}
        here = sample_count(self.batches())
        owners = {layer.name: owner for layer, owner in zip(layers, part.owners, strict=True)}
        observer = Observer(layers, spec.diagonal, gradients, spec.samples, backoff.storage, plans, here=here)
        with backoff.passing(observer, partial(merge_statistics, owners=owners)):
            stage.observe(observer, advance and (not separate or spec.keeps_routing))
        if experts is not None:
            experts.observe(stage, layers, observer)
        trim_host_memory()

        def take(layer: PrunableLayer) -> LayerStatistics:
            statistics = observer.take(layer)
            return statistics if experts is None else experts.complete(layer, statistics)

        for layer in sorted(layers, key=lambda layer: layer.separate or isinstance(owners[layer.name], int)):
            owner = owners[layer.name]
            if not observer.reached(layer):
                yield layer, None
            elif isinstance(owner, tuple):
                yield layer, sharded(layer, take(layer), owner, backoff)
            elif backoff.solves(owner):
                yield layer, take(layer)
            else:
                if experts is not None:
                    experts.note(layer)
                observer.forget(layer)

    def _in_slices(self, stage: Stage, part: Part) -> Statistics:
        """The statistics of a layer by one pass for each slice; every process collects all of them."""
        (layer,), count, spec = part.layers, len(part.slices), self.spec

        def one(layer: PrunableLayer, plan: GradientPlan | None = None) -> LayerStatistics | None:
            ((_, statistics),) = self.collect(stage, Part((layer,), (None,), plan=plan), False)
            return statistics

        def some_rows(rows: slice, totals: int | None) -> LayerStatistics:
            statistics = one(layer, dataclasses.replace(spec.plan(layer), rows=rows, totals=totals))
            if statistics is None:
                hint = Text("add its name to {}", "ignore")
                raise MoonshotError("no calibration data reached it", hint=hint).within(layer.name)
            return statistics

        if layer.separate:
            self.notes.append(f"{layer.name}: its experts solved in {count} parts to save memory")
            return CollectedExperts(layer, part.slices, one, spec.samples, spec.diagonal)
        self.notes.append(f"{layer.name}: solved in {count} row chunks to save memory")
        return CollectedRows(layer, part.slices, some_rows)
