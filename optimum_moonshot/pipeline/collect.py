"""Seam 1: the calibration statistics of a part, by one pass over the data, or by one for each slice."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from ..calibration.accumulators import GradientPlan
from ..calibration.layer_statistics import LayerStatistics
from ..calibration.observer import Observer
from ..devices import trim_host_memory
from ..errors import MoonshotError, Text
from ..model.layers import PrunableLayer
from .backoff import Backoff
from .partition import Part
from .slices import CollectedExperts, CollectedRows, ShardedExperts, ShardedRows
from .solve import Statistics
from .spec import StatisticsSpec
from .stages import Stage
from .under_calibrated_experts import UnderCalibratedExperts


class Collected:
    """The statistics of a part by one pass; iterating gives each layer's, which are freed here.

    Args:
        part: whose statistics they are.
        observer: of the pass, merged.
        experts: of the pass, under-calibrated ones.
        backoff: of the run.
    """

    def __init__(self, part: Part, observer: Observer, experts: UnderCalibratedExperts, backoff: Backoff):
        self.part, self.observer, self.experts, self.backoff = part, observer, experts, backoff

    def __iter__(self) -> Iterator[tuple[PrunableLayer, Statistics | None]]:
        """The layers that this process solves, and those that no data reached, with None.

        Those that all processes solve together are first: nobody waits for one that solves a layer alone.
        """
        ranks, owners = self.backoff.ranks, dict(zip(self.part.layers, self.part.owners, strict=True))
        for layer in sorted(owners, key=lambda layer: layer.adapter.separate or isinstance(owners[layer], int)):
            owner = owners[layer]
            if self.observer.reached(layer) and isinstance(owner, int) and owner != ranks.rank:
                self.experts.note(layer)
                self.observer.forget(layer)
            elif not self.observer.reached(layer) or owner is None or isinstance(owner, int):
                yield layer, self.take(layer)
            elif layer.adapter.separate:
                yield layer, ShardedExperts(self._reached(layer), ranks, layer.groups)
            else:
                yield layer, ShardedRows(layer, self._reached(layer), owner[ranks.rank], ranks, self.backoff)

    def take(self, layer: PrunableLayer) -> LayerStatistics | None:
        """The statistics of a layer, freed here; None where no data reached it.

        Raises:
            MoonshotError: the data gave NaN or infinity.
        """
        return self._reached(layer) if self.observer.reached(layer) else None

    def _reached(self, layer: PrunableLayer) -> LayerStatistics:
        self.experts.note(layer)
        return self.experts.complete(layer, self.observer.take(layer))


def collect(
    stage: Stage,
    part: Part,
    advance: bool,
    *,
    spec: StatisticsSpec,
    backoff: Backoff,
    notes: list[str],
    plans: Mapping[str, GradientPlan] | None = None,
) -> Collected | list[tuple[PrunableLayer, Statistics]]:
    """The statistics of a part of a stage; of a layer in slices, what collects them.

    Args:
        stage: onloaded.
        part: of its layers.
        advance: no other pass follows at this stage, so that this one also advances it.
        spec: the statistics.
        backoff: of the run; it has the storage of the statistics and the processes.
        notes: for the report; those on slices and under-calibrated experts are added.
        plans: forms of the gradients in place of the spec's.

    Raises:
        MoonshotError: the data gave NaN or infinity, or there is no memory for the statistics.
    """
    layers = part.layers
    if part.slices:
        once = partial(collect, stage, advance=False, spec=spec, backoff=backoff, notes=notes)
        return [(layers[0], _in_slices(part, spec, notes, once))]
    experts = UnderCalibratedExperts(spec, backoff, notes)
    gradients = {layer.name for layer in layers if spec.needs_gradients(layer)}
    plans = {layer.name: spec.plan(layer) for layer in layers} if plans is None else plans
    here = backoff.samples_here(spec.samples)
    observer = Observer(layers, spec.diagonal, gradients, spec.samples, backoff.storage, plans, here=here)
    with backoff.passing(observer, dict(zip((layer.name for layer in layers), part.owners, strict=True))):
        stage.observe(observer, advance and not experts.observes_again(layers))
    experts.observe(stage, layers, observer)
    trim_host_memory()
    return Collected(part, observer, experts, backoff)


def _in_slices(
    part: Part,
    spec: StatisticsSpec,
    notes: list[str],
    once: Callable[..., Collected | list[tuple[PrunableLayer, Statistics]]],
) -> Statistics:
    """The statistics of a layer by one pass for each slice; every process collects all of them."""
    (layer,) = part.layers
    if layer.adapter.separate:
        notes.append(f"{layer.name}: its experts solved in {len(part.slices)} parts, for the sake of memory")

        def some(experts: PrunableLayer) -> LayerStatistics | None:
            collected = once(Part((experts,), (None,)))
            assert isinstance(collected, Collected)
            return collected.take(experts)

        return CollectedExperts(layer, part.slices, some, spec.samples, spec.diagonal)
    notes.append(f"{layer.name}: solved in {len(part.slices)} chunks of rows, for the sake of memory")

    def rows(some: slice, totals: int | None) -> LayerStatistics:
        plan = dataclasses.replace(spec.plan(layer), rows=some, totals=totals)
        collected = once(Part((layer,), (None,)), plans={layer.name: plan})
        assert isinstance(collected, Collected)
        statistics = collected.take(layer)
        if statistics is None:
            hint = Text("add its name to {}", "ignore")
            raise MoonshotError("no calibration data reached it", hint=hint).within(layer.name)
        return statistics

    return CollectedRows(layer, part.slices, rows)
