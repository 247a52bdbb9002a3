"""A dry run: the loop of a run, with stages, statistics and storage that count bytes instead of allocating them.

The loop, the partition and the statistics are those of the run itself (pipeline/); only the two seams differ: to
collect is to count the bytes of the statistics, to solve is to count those of the solver.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial

import torch

from ..calibration.accumulators import STAGED, GradientPlan
from ..calibration.storage import MORE_MEMORY, Storage
from ..model.layers import Block, PrunableLayer
from ..objective.row_slices import slice_bytes
from ..pipeline.backoff import Backoff
from ..pipeline.loop import PartitionedTask, run_pipeline, solve_parts
from ..pipeline.partition import Part
from ..pipeline.spec import StatisticsSpec
from ..pipeline.stages import PassObserver, Stage
from ..reports.plan import DISK, Bytes, Overflow, Snapshot
from .run_spec import CPU, RunSpec, pattern_of, solver_bytes, weight_bytes

AFTER = ("writing", "saving")  # phases without passes


@dataclasses.dataclass
class MemoryTrace:
    """Counts what is held, and notes the moments.

    Args:
        run: whose bytes they are.
    """

    run: RunSpec
    held: dict[str, Bytes] = dataclasses.field(default_factory=dict)
    moments: list[Snapshot] = dataclasses.field(default_factory=list)
    overflows: list[Overflow] = dataclasses.field(default_factory=list)

    @property
    def storage(self) -> Storage:
        return self.run.storage

    def hold(self, what: str, size: int, where: str) -> str:
        """Keep bytes in the first place that has room, as `Storage.empty`; returns the place.

        Args:
            what: the item of a moment.
            size: bytes.
            where: for what does not fit.
        """
        found = self.storage.place(size)
        if found is None and self.run.selection.config.offload_dir is None and not self.overflows:
            limits = self.storage.limits
            place, has = str(self.storage.device), limits[self.storage.device]
            self.overflows.append(Overflow(place, "calibration", f"{what} of {where}", size, has, str(MORE_MEMORY)))
        if found is not None:
            self.storage.used[found] += size
        place = DISK if found is None else str(found)
        self.add(what, place, size)
        return place

    def add(self, what: str, place: str, size: int) -> None:
        """Count bytes at a place.

        Args:
            what: the item of a moment.
            place: a device, or the disk.
            size: bytes; negative ones are let go.
        """
        found = self.held.setdefault(what, {})
        found[place] = found.get(place, 0) + size

    def free(self, what: str, place: str, size: int) -> None:
        """Let go of what `hold` kept.

        Args:
            what: as it was given there.
            place: as it was returned.
            size: as it was given.
        """
        self.add(what, place, -size)
        if place != DISK:
            self.storage.used[torch.device(place)] -= size

    def moment(self, phase: str, where: str, **on_device: int) -> None:
        """Note what is held now, and what the device holds beside that for a time.

        Args:
            phase: of the run.
            where: the block or the layer.
            on_device: item → bytes.
        """
        items = {what: {place: size for place, size in found.items() if size} for what, found in self.held.items()}
        kept = 0 if phase in AFTER else self.run.kept
        for what, size in {**on_device, "allocator": kept}.items():
            mine = items.setdefault(what, {})
            place = str(self.storage.device)
            mine[place] = mine.get(place, 0) + size
            if not mine[place]:
                del mine[place]
        self.moments.append(Snapshot(phase, where, {what: found for what, found in items.items() if found}))

    def result(self, layer: PrunableLayer) -> None:
        """A layer's pruned weight is kept; on disk in the bytes that its zeros leave."""
        size, away = weight_bytes(layer), self.run.away
        on_disk = self.run.resumes or (away is not None and away.place == DISK)
        if on_disk:
            kept = 1 - pattern_of(self.run.selection, layer).sparsity
            size = min(size, round(kept * size) + layer.shape[0] * layer.shape[1] // 8)
        self.add("results", DISK if on_disk else str(CPU), size)


@dataclasses.dataclass(frozen=True)
class Visit:
    """A part of a block, and how often the data pass for it."""

    layers: tuple[PrunableLayer, ...]
    slices: tuple[slice, ...]  # where it is one layer that is not collected whole
    passes: int
    shown: int = 0  # experts that all tokens are shown to

    @property
    def by_rows(self) -> bool:
        """Whether the slices are rows, not experts."""
        return bool(self.slices) and not self.layers[0].separate


Visits = list[tuple[Block, list[Visit]]]


def count_blocks(
    trace: MemoryTrace,
    phase: str = "calibration",
    solves: bool = True,
    whole: bool = False,
    done: Callable[[Block], None] = lambda block: None,
) -> Visits:
    """Calibrate and solve block by block, in a dry run; returns the visits of every block.

    Args:
        trace: notes the snapshots.
        phase: of the passes.
        solves: whether the layers are solved; else their statistics are freed.
        whole: collect all layers of a block in one pass, whatever the memory.
        done: called with every block whose layers have been counted.
    """
    task = CountedTask(trace, phase, solves, whole)

    def visit(stage: CountedStage) -> None:
        solve_parts(task, stage)
        if stage.layers:
            done(stage.block)

    run_pipeline(CountedPipeline(trace, phase), visit, task.backoff, task.batches)
    return task.visits


class CountedStage:
    """A block whose layers are counted.

    Args:
        block: with its layers.
        free: frees its caches.
    """

    advanced = False

    def __init__(self, block: Block, free: Callable[[], None]):
        self.block, self.layers, self.advance = block, block.layers, free
        self.onloaded = nullcontext

    def observe(self, observer: PassObserver, advance: bool = False) -> None:
        """As `Stage.observe`: there is nothing to observe."""


class CountedPipeline:
    """The stages of a run, whose caches are counted.

    Args:
        trace: notes the snapshots.
        phase: of the passes.
    """

    def __init__(self, trace: MemoryTrace, phase: str):
        self.trace, self.phase, self.run = trace, phase, trace.run

    def __iter__(self) -> Iterator[CountedStage]:
        run, gradients = self.run, self.run.selection.needs_gradients
        for sequence in run.sequential:
            observed = [i for i, block in enumerate(sequence) if block.layers]
            behind = run.away is not None and gradients  # then the loss is that of the head alone
            span = sequence[observed[0] :] if behind else sequence[observed[0] : observed[-1] + 1]
            caches = self._capture(span, gradients)
            for block in reversed(span) if gradients else span:
                yield CountedStage(block, partial(self._free, caches.pop(block.name, [])))
            self._free(caches.pop("", []))
            self.trace.add("caches", str(run.storage.device), -run.footprint.arguments)
        rest = [layer for block in run.non_sequential for layer in block.layers] + list(run.selection.structure.outside)
        if rest:
            blocks = run.selection.structure.blocks
            module = blocks[0].module if blocks else rest[0].modules[0]
            yield CountedStage(Block("the whole model", module, tuple(rest)), lambda: None)

    def _free(self, caches: list[tuple[str, int]]) -> None:
        for place, size in caches:
            self.trace.free("caches", place, size)

    def _capture(self, span: Sequence[Block], gradients: bool) -> dict[str, list[tuple[str, int]]]:
        """The caches of block inputs, and of the last output's gradient; by block, "" for those of the whole pass."""
        trace, run, footprint = self.trace, self.run, self.run.footprint
        caches: dict[str, list[tuple[str, int]]] = {}
        for count in run.sizes:
            size = footprint.hidden * count // run.batch
            for block in span if gradients else span[:1]:
                owner = block.name if gradients else ""
                caches.setdefault(owner, []).append((trace.hold("caches", size, block.name), size))
            if gradients:
                caches.setdefault("", []).append((trace.hold("caches", size, "output gradients"), size))
        trace.add("caches", str(trace.storage.device), footprint.arguments)
        forward = max((each.forward for each in footprint.blocks.values()), default=0)
        if gradients:
            head = run.logits_bytes() + 3 * footprint.hidden
            trace.moment(self.phase, f"{span[-1].name}: head and loss", logits=head)
        trace.moment(self.phase, span[-1].name, activations=forward)
        return caches


class CountedTask(PartitionedTask):
    """Counts the bytes of the statistics and of the solver.

    Args:
        trace: notes the snapshots.
        phase: of the passes.
        solves: whether the layers are solved; else their statistics are freed.
        whole: collect all layers of a block in one pass, whatever the memory.
    """

    def __init__(self, trace: MemoryTrace, phase: str, solves: bool, whole: bool):
        super().__init__(trace.run.statistics, Backoff(trace.storage), lambda: [])
        self.trace, self.phase, self.solves, self.whole, self.run = trace, phase, solves, whole, trace.run
        self.done: set[str] = set()
        self.visits: Visits = []

    def lacks(self, layer: PrunableLayer) -> bool:
        """As `Task.lacks`."""
        return layer.name not in self.done

    def partition(self, stage: Stage) -> list[Part]:
        """As `Task.partition`; notes the visits."""
        assert isinstance(stage, CountedStage)
        parts = super().partition(stage)
        if self.whole and parts:
            parts = [Part(tuple(stage.layers), (0,) * len(stage.layers))]
        if parts:
            last = len(parts) - 1
            self.visits.append((stage.block, [self._visit(part, index == last) for index, part in enumerate(parts)]))
        return parts

    def _visit(self, part: Part, last: bool) -> Visit:
        separate, routed = any(layer.separate for layer in part.layers), self.run.keeps_routing
        passes = 1 if not part.slices else len(part.slices) if separate else 2 * len(part.slices) - 1
        shown = max(map(self.run.under_calibrated, part.layers))
        passes *= 2 if shown else 1
        again = bool(part.slices) or (separate and not routed)
        return Visit(part.layers, part.slices, passes + (again and last), shown)  # on to the next block

    def collect(self, stage: Stage, part: Part, advance: bool) -> Iterator[tuple[PrunableLayer, "CountedStatistics"]]:
        """As `Task.collect`.

        Args:
            stage: a `CountedStage`.
            part: of its layers.
            advance: makes no difference.
        """
        assert isinstance(stage, CountedStage)
        footprint = self.run.footprint.blocks.get(stage.block.name)
        activations = self.run.footprint.whole if footprint is None else footprint.observed
        if part.slices:
            yield from self._collect_slice(part, activations)
            return
        shared = () if footprint is None else footprint.shared
        statistics = CountedStatistics(self.trace, self.spec, part.layers, shared)
        temporary = max(map(statistics.temporary, part.layers))
        self.trace.moment(self.phase, stage.block.name, activations=activations + temporary)
        for layer in part.layers:
            yield layer, statistics
            statistics.forget(layer)

    def _collect_slice(self, part: Part, activations: int) -> Iterator[tuple[PrunableLayer, "CountedStatistics"]]:
        """The first slice of a layer, since all are alike."""
        (layer,), first = part.layers, part.slices[0]
        plan, some = self.spec.plan(layer), layer
        if layer.separate:
            some = dataclasses.replace(layer, span=(first.start, first.stop))
        else:
            plan = dataclasses.replace(plan, rows=first)
        statistics = CountedStatistics(self.trace, self.spec, (some,), (), plan)
        totals = 0 if layer.separate else 4 * (1 + self.run.batch) * layer.shape[0] * layer.shape[1]
        self.trace.moment(self.phase, layer.name, activations=activations + statistics.temporary(some) + totals)
        yield layer, statistics
        statistics.forget(some)

    def solve(self, layer: PrunableLayer, statistics: "CountedStatistics") -> None:
        """As `Task.solve`."""
        self.done.add(layer.name)
        if not self.solves:
            return
        rows = None if statistics.plan is None or statistics.plan.rows is None else statistics.plan.rows
        size = solver_bytes(self.run, layer, None if rows is None else rows.stop - rows.start)
        whole = 0 if rows is None else 8 * layer.shape[0] * layer.shape[1]
        self.trace.moment("solver", layer.name, solver=size + whole)
        self.trace.result(layer)

    def skip(self, layer: PrunableLayer) -> None:
        """As `Task.skip`: there are no data."""


class CountedStatistics:
    """Of a part's layers: Gram matrices, once for those that read the same tensor, and gradients.

    Args:
        trace: which counts them.
        spec: the statistics.
        layers: of the part.
        shared: names of layers that read the same tensor.
        plan: of the only layer, where it differs from the spec's.
    """

    def __init__(
        self,
        trace: MemoryTrace,
        spec: StatisticsSpec,
        layers: Sequence[PrunableLayer],
        shared: Sequence[tuple[str, ...]],
        plan: GradientPlan | None = None,
    ):
        self.trace, self.spec, self.plan = trace, spec, plan
        self.readers = [{layer.name for layer in layers if layer.name in some} for some in shared]
        known = {name for some in self.readers for name in some}
        self.readers = [some for some in self.readers if some] + [
            {layer.name} for layer in layers if layer.name not in known
        ]
        self.gradients: dict[str, tuple[str, int]] = {}
        for layer in layers:
            size = spec.gradient_bytes(layer, plan)
            if size:
                self.gradients[layer.name] = trace.hold("statistics", size, layer.name), size
        self.grams: dict[frozenset[str], tuple[str, int]] = {}
        for some in self.readers:
            layer = next(layer for layer in layers if layer.name in some)
            size = spec.gram_bytes(layer)
            self.grams[frozenset(some)] = self._gram(layer, size), size

    def _gram(self, layer: PrunableLayer, size: int) -> str:
        """Where a Gram matrix is: on the model's device, in the budget or beyond it; on a CPU the disk may hold it."""
        place, device = self.trace.hold("statistics", size, layer.name), str(self.trace.storage.device)
        if place == device or self.trace.storage.device.type == "cpu":
            return place
        self.trace.free("statistics", place, size)
        self.trace.add("statistics", device, size)
        self.trace.storage.used[self.trace.storage.device] += size
        return device

    def forget(self, layer: PrunableLayer) -> None:
        """Let go of a layer's; a Gram matrix goes with the last that has it."""
        if layer.name in self.gradients:
            self.trace.free("statistics", *self.gradients.pop(layer.name))
        for some in self.readers:
            if layer.name in some:
                key = frozenset(some)
                some.discard(layer.name)
                held = self.grams.pop(key)
                if some:
                    self.grams[frozenset(some)] = held
                else:
                    self.trace.free("statistics", *held)

    def temporary(self, layer: PrunableLayer) -> int:
        """What adding a batch's gradients of a layer takes for a time."""
        d_out, d_in = layer.shape
        if self.spec.lams[layer.name] == 1:
            return 0
        if self.spec.diagonal:
            return 8 * d_out * d_in // layer.groups
        if self.spec.plan(layer).column_block is None:
            return 0
        limit = slice_bytes(self.trace.storage.device)
        return min(limit, 8 * min(STAGED, self.spec.samples) * d_out * d_in)
