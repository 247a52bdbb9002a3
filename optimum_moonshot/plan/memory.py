"""A dry run: the loop of a run, with stages, statistics and storage that count bytes instead of allocating them.

The loop, the partition and the form of the statistics are those of the run itself (`pipeline/`). Only the two seams
differ: `collect` counts the bytes of the statistics, `solve` those of the solver.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial

import torch

from ..calibration.accumulators import STAGED, GradientPlan
from ..calibration.storage import MORE_MEMORY
from ..model.layers import Block, PrunableLayer
from ..objective.row_slices import slice_bytes
from ..pipeline.backoff import Backoff
from ..pipeline.loop import run_pipeline, solve_parts
from ..pipeline.partition import Part
from ..pipeline.stages import PassObserver, Stage
from ..pipeline.task import Task
from .report import DISK, HOST, Bytes, Overflow, Snapshot
from .run_spec import RunSpec, pattern_of, solver_bytes, weight_bytes

Allocation = tuple[str, int]  # place and bytes
Visit = tuple[Block, list[Part], int]  # a block with its parts, and the number of passes over the data


@dataclasses.dataclass
class MemoryTrace:
    """The bytes in memory at present, by item and place, and the snapshots so far."""

    run: RunSpec
    held: dict[str, Bytes] = dataclasses.field(default_factory=dict)
    snapshots: list[Snapshot] = dataclasses.field(default_factory=list)
    overflows: list[Overflow] = dataclasses.field(default_factory=list)

    def allocate(self, item: str, size: int, where: str) -> Allocation:
        """Count bytes at the first place with enough memory, as `Storage.empty`; `where` is for an `Overflow`."""
        storage = self.run.storage
        device = storage.place(size)
        if device is None and self.run.selection.config.offload_dir is None and not self.overflows:
            limit = storage.limits[storage.device]
            overflow = str(storage.device), "calibration", f"{item} of {where}", size, limit, str(MORE_MEMORY)
            self.overflows.append(Overflow(*overflow))
        if device is not None:
            storage.used[device] += size
        place = DISK if device is None else str(device)
        self.add(item, place, size)
        return place, size

    def add(self, item: str, place: str, size: int) -> None:
        """Count bytes at a place, without a limit; a negative size frees them."""
        sizes = self.held.setdefault(item, {})
        sizes[place] = sizes.get(place, 0) + size

    def free(self, item: str, allocation: Allocation) -> None:
        """Undo `allocate`."""
        place, size = allocation
        self.add(item, place, -size)
        if place != DISK:
            self.run.storage.used[torch.device(place)] -= size

    def snapshot(self, phase: str, where: str, **temporary: int) -> None:
        """Record the bytes in memory at a block or layer, with temporary ones (item → bytes) on the device."""
        items = {item: dict(sizes) for item, sizes in self.held.items()}
        retained = 0 if phase in ("writing", "saving") else self.run.retained  # these have no passes
        device = str(self.run.device)
        for item, size in {**temporary, "allocator": retained}.items():
            sizes = items.setdefault(item, {})
            sizes[device] = sizes.get(device, 0) + size
        items = {item: {place: size for place, size in sizes.items() if size} for item, sizes in items.items()}
        self.snapshots.append(Snapshot(phase, where, {item: sizes for item, sizes in items.items() if sizes}))

    def store_result(self, layer: PrunableLayer) -> None:
        """Count a layer's pruned weight; on disk only its survivors and a bit mask."""
        size = weight_bytes(layer)
        if self.stores_on_disk:
            dense = 1 - pattern_of(self.run.selection, layer).sparsity
            size = min(size, round(dense * size) + layer.shape[0] * layer.shape[1] // 8)
        self.add("results", DISK if self.stores_on_disk else HOST, size)

    @property
    def stores_on_disk(self) -> bool:
        """Whether results are written to files."""
        offloaded = self.run.offloaded
        return self.run.resumes or (offloaded is not None and offloaded.place == DISK)


def count_blocks(
    trace: MemoryTrace,
    phase: str = "calibration",
    solves: bool = True,
    whole: bool = False,
    done: Callable[[Block], None] = lambda block: None,
) -> list[Visit]:
    """The dry run of the passes of a phase, which calls `done` after every block.

    Unless `solves`, the statistics are freed unused. With `whole`, one pass collects all layers of a block, whatever
    the memory.
    """
    task = CountedTask(trace, phase, solves, whole)

    def visit(stage: CountedStage) -> None:
        solve_parts(task, stage)
        if stage.layers:
            done(stage.block)

    run_pipeline(counted_stages(trace, phase), visit, task.backoff, task.batches)
    return task.visits


class CountedStage:
    """A block with layers to count, as a `Stage`; to advance is to free its caches."""

    advanced = False

    def __init__(self, block: Block, free: Callable[[], None]):
        self.block, self.layers, self.advance = block, block.layers, free
        self.onloaded = nullcontext

    def observe(self, observer: PassObserver, advance: bool = False) -> None:
        """There is nothing to observe."""


def counted_stages(trace: MemoryTrace, phase: str) -> Iterator[CountedStage]:
    """The stages of a run; their caches are counted."""
    run, gradients = trace.run, trace.run.selection.needs_gradients

    def free(caches: Sequence[Allocation]) -> None:
        for allocation in caches:
            trace.free("caches", allocation)

    for sequence in run.sequential:
        observed = [i for i, block in enumerate(sequence) if block.layers]
        to_head = run.offloaded is not None and gradients  # the head alone computes the loss
        blocks = sequence[observed[0] :] if to_head else sequence[observed[0] : observed[-1] + 1]
        caches = _capture(trace, phase, blocks, gradients)
        for block in reversed(blocks) if gradients else blocks:
            yield CountedStage(block, partial(free, caches.pop(block.name, [])))
        free(caches.pop("", []))
        trace.add("caches", str(run.device), -run.footprint.arguments)
    structure = run.selection.structure
    others = [layer for block in run.non_sequential for layer in block.layers] + list(structure.outside)
    if others:
        module = structure.blocks[0].module if structure.blocks else others[0].modules[0]
        yield CountedStage(Block("the whole model", module, tuple(others)), lambda: None)


def _capture(trace: MemoryTrace, phase: str, blocks: Sequence[Block], gradients: bool) -> dict[str, list[Allocation]]:
    """The caches of the blocks' inputs and of the last output's gradient, by block; "" for those of all stages."""
    run, footprint = trace.run, trace.run.footprint
    caches: dict[str, list[Allocation]] = {}
    for count in run.sizes:
        size = footprint.hidden * count // run.batch
        for block in blocks if gradients else blocks[:1]:
            caches.setdefault(block.name if gradients else "", []).append(trace.allocate("caches", size, block.name))
        if gradients:
            caches.setdefault("", []).append(trace.allocate("caches", size, "output gradients"))
    trace.add("caches", str(run.device), footprint.arguments)
    if gradients:
        trace.snapshot(phase, f"{blocks[-1].name}: head and loss", logits=run.logits_bytes() + 3 * footprint.hidden)
    forward = max((each.forward for each in footprint.blocks.values()), default=0)
    trace.snapshot(phase, blocks[-1].name, activations=forward)
    return caches


class CountedTask(Task):
    """Counts the bytes of the statistics and of the solver; the parameters are those of `count_blocks`."""

    def __init__(self, trace: MemoryTrace, phase: str, solves: bool, whole: bool):
        super().__init__(trace.run.statistics, Backoff(trace.run.storage), lambda: [])
        self.trace, self.phase, self.solves, self.whole, self.run = trace, phase, solves, whole, trace.run
        self.done: set[str] = set()
        self.visits: list[Visit] = []

    def lacks(self, layer: PrunableLayer) -> bool:
        return layer.name not in self.done

    def partition(self, stage: Stage) -> list[Part]:
        """Partition a stage like the run, and record the visit."""
        assert isinstance(stage, CountedStage)
        parts = super().partition(stage)
        if self.whole and parts:
            parts = [Part(tuple(stage.layers), (0,) * len(stage.layers))]
        if parts:
            last, routed = parts[-1], self.spec.keeps_routing
            advance = (
                bool(last.slices) or not routed and any(layer.separate for layer in last.layers)
            )  # by one more pass
            self.visits.append((stage.block, list(parts), sum(map(self._passes, parts)) + advance))
        return parts

    def _passes(self, part: Part) -> int:
        """Slices of rows are collected to rank them, and again to solve them, except for the last one."""
        slices, separate = len(part.slices), any(layer.separate for layer in part.layers)
        passes = 1 if not slices else slices if separate else 2 * slices - 1
        return passes * (2 if any(map(self.run.all_token_experts, part.layers)) else 1)

    def collect(self, stage: Stage, part: Part, advance: bool) -> Iterator[tuple[PrunableLayer, int]]:
        """Each layer with the rows that are collected at once, 0 for all; of slices the first, since all are alike."""
        assert isinstance(stage, CountedStage)
        footprint = self.run.footprint.blocks.get(stage.block.name)
        activations = self.run.footprint.whole if footprint is None else footprint.observed
        layers, where, rows, plan, shared = part.layers, stage.block.name, 0, None, list[set[str]]()
        if part.slices:
            layer, first, where = layers[0], part.slices[0], layers[0].name
            if layer.separate:
                layers = (dataclasses.replace(layer, span=(first.start, first.stop)),)
            else:
                rows, plan = first.stop - first.start, dataclasses.replace(self.spec.plan(layer), rows=first)
                activations += 4 * (1 + self.run.batch) * layer.shape[0] * layer.shape[1]  # sums over all slices
        elif footprint is not None:
            shared = [{stage.layers[index].name for index in group} for group in footprint.shared]
        statistics = self._allocate(layers, shared, plan)
        self.trace.snapshot(self.phase, where, activations=activations + max(map(self._temporary, layers)))
        for layer in part.layers:
            yield layer, rows
            for names, allocation in statistics:
                if layer.name in names:
                    names.remove(layer.name)
                    if not names:
                        self.trace.free("statistics", allocation)

    def _allocate(
        self, layers: Sequence[PrunableLayer], shared: Sequence[set[str]], plan: GradientPlan | None
    ) -> list[tuple[set[str], Allocation]]:
        """Gradients, and one Gram matrix for all layers that read the same tensor (`shared`), with these layers."""
        trace, device, statistics = self.trace, self.run.device, list[tuple[set[str], Allocation]]()
        for layer in layers:
            size = self.spec.gradient_bytes(layer, plan)
            if size:
                statistics.append(({layer.name}, trace.allocate("statistics", size, layer.name)))
        by_name = {layer.name: layer for layer in layers}
        groups = [readers for group in shared if (readers := group & by_name.keys())]
        groups += [{name} for name in by_name if not any(name in readers for readers in groups)]
        for readers in groups:
            layer = next(layer for layer in layers if layer.name in readers)
            allocation = trace.allocate("statistics", self.spec.gram_bytes(layer), layer.name)
            if allocation[0] != str(device) and device.type != "cpu":  # on a GPU even beyond its limit
                trace.free("statistics", allocation)
                allocation = str(device), allocation[1]
                trace.add("statistics", *allocation)
                self.run.storage.used[device] += allocation[1]
            statistics.append((readers, allocation))
        return statistics

    def _temporary(self, layer: PrunableLayer) -> int:
        """Temporary bytes while a batch's gradients are added."""
        d_out, d_in = layer.shape
        if not self.spec.needs_gradients(layer):
            return 0
        if self.spec.diagonal:
            return 8 * d_out * d_in // layer.groups
        if self.spec.plan(layer).column_block is None:
            return 0
        return min(slice_bytes(self.run.device), 8 * min(STAGED, self.spec.samples) * d_out * d_in)

    def solve(self, layer: PrunableLayer, statistics: int) -> None:
        self.done.add(layer.name)
        if self.solves:
            whole = 8 * layer.shape[0] * layer.shape[1] if statistics else 0
            size = solver_bytes(self.run, layer, statistics)
            self.trace.snapshot("solver", layer.name, solver=size + whole)
            self.trace.store_result(layer)

    def skip(self, layer: PrunableLayer) -> None:
        """There are no data that could miss a layer."""
