"""Seam 1: the calibration statistics of a part, by one pass over the data, or by one for each slice."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from ..calibration.accumulators import GradientPlan
from ..calibration.merging import merge_statistics
from ..calibration.observer import LayerStatistics, Observer
from ..data.batches import sample_count
from ..devices import trim_host_memory
from ..errors import MoonshotError, Text
from ..model.layers import PrunableLayer
from .backoff import Backoff
from .loop import PartitionedTask, Task
from .partition import Part
from .slices import CollectedExperts, CollectedRows, sharded
from .solve import Statistics
from .stages import Stage
from .under_calibrated_experts import UnderCalibratedExperts


@dataclass(frozen=True)
class Collected:
    """The statistics of a part after one pass, merged; iterating gives each layer's, which are freed here."""

    part: Part
    observer: Observer
    experts: UnderCalibratedExperts | None  # where some layers are experts
    backoff: Backoff

    def __iter__(self) -> Iterator[tuple[PrunableLayer, Statistics | None]]:
        """The layers that this process solves, and those that no data reached, with None.

        Those that all processes solve together are first: nobody waits for one that solves a layer alone.
        """
        owners = dict(zip(self.part.layers, self.part.owners, strict=True))
        for layer in sorted(owners, key=lambda layer: layer.separate or isinstance(owners[layer], int)):
            owner = owners[layer]
            if not self.observer.reached(layer):
                yield layer, None
            elif isinstance(owner, tuple):
                yield layer, sharded(layer, self.take(layer), owner, self.backoff)
            elif self.backoff.solves(owner):
                yield layer, self.take(layer)
            else:
                if self.experts is not None:
                    self.experts.note(layer)
                self.observer.forget(layer)

    def take(self, layer: PrunableLayer) -> LayerStatistics:
        """The statistics of a layer that data reached, freed here.

        Raises:
            MoonshotError: the data gave NaN or infinity.
        """
        statistics = self.observer.take(layer)
        return statistics if self.experts is None else self.experts.complete(layer, statistics)


class StatisticsTask(PartitionedTask, Task[Statistics]):
    """A `PartitionedTask` that collects the statistics by passes over the data."""

    def collect(self, stage: Stage, part: Part, advance: bool, /) -> Iterable[tuple[PrunableLayer, Statistics | None]]:
        """Like `Task.collect`, but a layer in slices has an object that collects them.

        Raises:
            MoonshotError: the data gave NaN or infinity, or there is no memory for the statistics.
        """
        once = partial(self._once, stage)
        return [(part.layers[0], self._in_slices(part, once))] if part.slices else once(part, advance=advance)

    def _once(
        self, stage: Stage, part: Part, plans: Mapping[str, GradientPlan] | None = None, advance: bool = False
    ) -> Collected:
        """One pass; `plans` has forms of the gradients in place of the spec's."""
        spec, backoff, layers = self.spec, self.backoff, part.layers
        separate = any(layer.separate for layer in layers)
        experts = UnderCalibratedExperts(spec, backoff, self.notes) if separate else None
        gradients = {layer.name for layer in layers if spec.needs_gradients(layer)}
        plans = {layer.name: spec.plan(layer) for layer in layers} if plans is None else plans
        here = sample_count(self.batches())
        owners = {layer.name: owner for layer, owner in zip(layers, part.owners, strict=True)}
        observer = Observer(layers, spec.diagonal, gradients, spec.samples, backoff.storage, plans, here=here)
        with backoff.passing(observer, partial(merge_statistics, owners=owners)):
            stage.observe(observer, advance and (not separate or spec.keeps_routing))
        if experts is not None:
            experts.observe(stage, layers, observer)
        trim_host_memory()
        return Collected(part, observer, experts, backoff)

    def _in_slices(self, part: Part, once: Callable[..., Collected]) -> Statistics:
        """The statistics of a layer by one pass for each slice; every process collects all of them."""
        (layer,), count, spec = part.layers, len(part.slices), self.spec

        def some_experts(experts: PrunableLayer) -> LayerStatistics | None:
            collected = once(Part((experts,), (None,)))
            return collected.take(experts) if collected.observer.reached(experts) else None

        def some_rows(rows: slice, totals: int | None) -> LayerStatistics:
            plan = dataclasses.replace(spec.plan(layer), rows=rows, totals=totals)
            collected = once(Part((layer,), (None,)), {layer.name: plan})
            if not collected.observer.reached(layer):
                hint = Text("add its name to {}", "ignore")
                raise MoonshotError("no calibration data reached it", hint=hint).within(layer.name)
            return collected.take(layer)

        if layer.separate:
            self.notes.append(f"{layer.name}: its experts solved in {count} parts to save memory")
            return CollectedExperts(layer, part.slices, some_experts, spec.samples, spec.diagonal)
        self.notes.append(f"{layer.name}: solved in {count} row chunks to save memory")
        return CollectedRows(layer, part.slices, some_rows)
