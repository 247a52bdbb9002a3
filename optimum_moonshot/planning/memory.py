"""Where a run's bytes are at every moment, by walking through it without data: the caches, the rounds, the solver.

What is gathered together, in which form, and where it goes is not decided here: the run's own `StatisticsSchedule` and
`Storage` are asked, with the caches' bytes counted and not allocated.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import torch

from ..calibration.accumulators import STAGED, Plan
from ..calibration.storage import Storage
from ..model.layers import Block, PrunableLayer
from ..objective.row_slices import slice_bytes
from ..pipeline.schedule import StatisticsSchedule
from ..reports.plan import DISK, Bytes, Overflow, Snapshot
from .run_spec import CPU, RunSpec, pattern_of, solver_bytes, weight_bytes

AFTER = ("writing", "saving")  # phases without passes
SPILLED = "raise max_memory, set offload_dir to a folder on a fast disk, or lower num_samples or sequence_length"


@dataclasses.dataclass
class MemoryTrace:
    """Counts what is held, and notes the moments.

    Args:
        outline: of the run.
    """

    outline: RunSpec
    held: dict[str, Bytes] = dataclasses.field(default_factory=dict)
    moments: list[Snapshot] = dataclasses.field(default_factory=list)
    overflows: list[Overflow] = dataclasses.field(default_factory=list)

    @property
    def storage(self) -> Storage:
        return self.outline.storage

    def hold(self, what: str, size: int, where: str) -> str:
        """Keep bytes in the first place that has room, as `Storage.empty`; returns the place.

        Args:
            what: the item of a moment.
            size: bytes.
            where: for what does not fit.
        """
        found = self.storage.place(size)
        if found is None and self.outline.selection.config.offload_dir is None and not self.overflows:
            limits = self.storage.limits
            place, has = str(self.storage.device), limits[self.storage.device]
            self.overflows.append(Overflow(place, "calibration", f"{what} of {where}", size, has, SPILLED))
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
        kept = 0 if phase in AFTER else self.outline.kept
        for what, size in {**on_device, "allocator": kept}.items():
            mine = items.setdefault(what, {})
            place = str(self.storage.device)
            mine[place] = mine.get(place, 0) + size
            if not mine[place]:
                del mine[place]
        self.moments.append(Snapshot(phase, where, {what: found for what, found in items.items() if found}))

    def result(self, layer: PrunableLayer) -> None:
        """A layer's pruned weight is kept; on disk in the bytes that its zeros leave."""
        size, away = weight_bytes(layer), self.outline.away
        on_disk = self.outline.resumes or (away is not None and away.place == DISK)
        if on_disk:
            kept = 1 - pattern_of(self.outline.selection, layer).sparsity
            size = min(size, round(kept * size) + layer.shape[0] * layer.shape[1] // 8)
        self.add("results", DISK if on_disk else str(CPU), size)


@dataclasses.dataclass(frozen=True)
class Visit:
    """One round of a block's layers."""

    layers: tuple[PrunableLayer, ...]
    parts: tuple[slice, ...]  # where it is one layer that is not gathered whole
    passes: int
    shown: int = 0  # experts that all tokens are shown to

    @property
    def by_rows(self) -> bool:
        """Whether the parts are rows, not experts."""
        return bool(self.parts) and not self.layers[0].adapter.separate


def visits(outline: RunSpec, schedule: StatisticsSchedule, layers: Sequence[PrunableLayer]) -> list[Visit]:
    """The rounds of some layers, with the memory that is left now, and how often the data pass for each.

    Args:
        outline: of the run.
        schedule: its own, whose decisions these are.
        layers: of a block.
    """
    found, rounds = [], schedule.rounds(list(layers))
    for number, together in enumerate(rounds):
        parts = schedule.parts(together)
        separate = any(layer.adapter.separate for layer in together)
        passes = 1 if parts is None else len(parts) if separate else 2 * len(parts) - 1
        shown = max(map(outline.starved, together))
        passes *= 2 if shown else 1
        again = parts is not None or (separate and not schedule.experts.as_routed)
        passes += again and number == len(rounds) - 1  # on to the next block
        found.append(Visit(tuple(together), tuple(parts or ()), passes, shown))
    return found


def walk_blocks(
    walk: MemoryTrace, phase: str = "calibration", solves: bool = True
) -> Iterator[tuple[Block, list[Visit]]]:
    """Calibrate and solve block by block, as `StatisticsSource.layers` does; yields what every block takes.

    Args:
        walk: notes the moments.
        phase: of the passes.
        solves: whether the layers are solved; else their statistics are let go.
    """
    outline = walk.outline
    gradients = outline.selection.needs_gradients
    for chain in outline.sequential:
        wanted = [i for i, block in enumerate(chain) if block.layers]
        behind = outline.away is not None and gradients  # then the loss is that of the head alone
        span = chain[wanted[0] :] if behind else chain[wanted[0] : wanted[-1] + 1]
        caches = _capture(walk, phase, span, gradients)
        order = list(reversed(span)) if gradients else list(span)
        for block in order:
            if block.layers:
                yield block, _visit(walk, phase, block, block.layers, solves)
            for place, size in caches.pop(block.name, ()):
                walk.free("caches", place, size)
        for place, size in caches.pop("", ()):
            walk.free("caches", place, size)
        walk.add("caches", str(walk.storage.device), -outline.footprint.arguments)
    rest = [layer for block in outline.non_sequential for layer in block.layers] + list(
        outline.selection.structure.outside
    )
    if rest:
        whole = (
            Block("the whole model", outline.selection.structure.blocks[0].module, tuple(rest))
            if (outline.selection.structure.blocks)
            else Block("the whole model", rest[0].modules[0], tuple(rest))
        )
        yield whole, _visit(walk, phase, whole, rest, solves)


def _capture(walk: MemoryTrace, phase: str, span: Sequence[Block], gradients: bool) -> dict[str, list[tuple[str, int]]]:
    """The caches of block inputs, and of the gradient of the last output; by block, "" for what lasts to the end."""
    outline, footprint = walk.outline, walk.outline.footprint
    caches: dict[str, list[tuple[str, int]]] = {}
    for count in outline.sizes:
        size = footprint.hidden * count // outline.batch
        for block in span if gradients else span[:1]:
            owner = block.name if gradients else ""
            caches.setdefault(owner, []).append((walk.hold("caches", size, block.name), size))
        if gradients:
            caches.setdefault("", []).append((walk.hold("caches", size, "output gradients"), size))
    walk.add("caches", str(walk.storage.device), footprint.arguments)
    forward = max((each.forward for each in footprint.blocks.values()), default=0)
    if gradients:
        head = outline.logits_bytes() + 3 * footprint.hidden
        walk.moment(phase, f"{span[-1].name}: head and loss", logits=head)
    walk.moment(phase, span[-1].name, activations=forward)
    return caches


def _visit(walk: MemoryTrace, phase: str, block: Block, layers: Sequence[PrunableLayer], solves: bool) -> list[Visit]:
    schedule, outline = walk.outline.schedule, walk.outline
    found = visits(outline, schedule, layers)
    own = outline.footprint.blocks.get(block.name)
    activations = outline.footprint.whole if own is None else own.observed
    shared = [] if own is None else own.shared
    for visit in found:
        if visit.parts:
            _in_parts(walk, phase, visit, schedule, activations, solves)
            continue
        statistics = _Statistics(walk, schedule, visit.layers, shared)
        walk.moment(phase, block.name, activations=activations + max(map(statistics.temporary, visit.layers)))
        for layer in visit.layers:
            if solves:
                walk.moment("solver", layer.name, solver=solver_bytes(outline, layer))
                walk.result(layer)
            statistics.forget(layer)
    return found


def _in_parts(
    walk: MemoryTrace, phase: str, visit: Visit, schedule: StatisticsSchedule, activations: int, solves: bool
) -> None:
    """A layer whose statistics come in parts: the first of them, since all are alike."""
    (layer,), part = visit.layers, visit.parts[0]
    plan = schedule.plan(layer)
    if layer.adapter.separate:
        some, rows = dataclasses.replace(layer, span=(part.start, part.stop)), None
    else:
        some, rows = layer, part.stop - part.start
        plan = dataclasses.replace(plan, rows=part)
    statistics = _Statistics(walk, schedule, (some,), [], plan)
    totals = 0 if rows is None else 4 * (1 + walk.outline.batch) * layer.shape[0] * layer.shape[1]
    walk.moment(phase, layer.name, activations=activations + statistics.temporary(some) + totals)
    if solves:
        whole = 0 if rows is None else 8 * layer.shape[0] * layer.shape[1]
        walk.moment("solver", layer.name, solver=solver_bytes(walk.outline, layer, rows) + whole)
        walk.result(layer)
    statistics.forget(some)


class _Statistics:
    """Of a round's layers: Gram matrices, once for those that read the same tensor, and gradients.

    Args:
        walk: which holds them.
        schedule: how they are gathered.
        layers: of the round.
        shared: names of layers that read the same tensor.
        plan: of the only layer, where it differs from the schedule's.
    """

    def __init__(
        self,
        walk: MemoryTrace,
        schedule: StatisticsSchedule,
        layers: Sequence[PrunableLayer],
        shared: Sequence[tuple[str, ...]],
        plan: Plan | None = None,
    ):
        self.walk, self.schedule = walk, schedule
        self.readers = [{layer.name for layer in layers if layer.name in some} for some in shared]
        known = {name for some in self.readers for name in some}
        self.readers = [some for some in self.readers if some] + [
            {layer.name} for layer in layers if layer.name not in known
        ]
        self.gradients: dict[str, tuple[str, int]] = {}
        for layer in layers:
            size = schedule.gradient_bytes(layer, plan)
            if size:
                self.gradients[layer.name] = walk.hold("statistics", size, layer.name), size
        self.grams: dict[frozenset[str], tuple[str, int]] = {}
        for some in self.readers:
            layer = next(layer for layer in layers if layer.name in some)
            size = schedule.gram_bytes(layer)
            self.grams[frozenset(some)] = self._gram(layer, size), size

    def _gram(self, layer: PrunableLayer, size: int) -> str:
        """Where a Gram matrix is: on the model's device, in the budget or beyond it; on a CPU the disk may hold it."""
        place, device = self.walk.hold("statistics", size, layer.name), str(self.walk.storage.device)
        if place == device or self.walk.storage.device.type == "cpu":
            return place
        self.walk.free("statistics", place, size)
        self.walk.add("statistics", device, size)
        self.walk.storage.used[self.walk.storage.device] += size
        return device

    def forget(self, layer: PrunableLayer) -> None:
        """Let go of a layer's; a Gram matrix goes with the last that has it."""
        if layer.name in self.gradients:
            self.walk.free("statistics", *self.gradients.pop(layer.name))
        for some in self.readers:
            if layer.name in some:
                key = frozenset(some)
                some.discard(layer.name)
                held = self.grams.pop(key)
                if some:
                    self.grams[frozenset(some)] = held
                else:
                    self.walk.free("statistics", *held)

    def temporary(self, layer: PrunableLayer) -> int:
        """What adding a batch's gradients of a layer takes for a time."""
        d_out, d_in = layer.shape
        if self.schedule.lams[layer.name] == 1:
            return 0
        if self.schedule.diagonal:
            return 8 * d_out * d_in // layer.groups
        if self.schedule.plan(layer).column_block is None:
            return 0
        limit = slice_bytes(self.walk.storage.device)
        return min(limit, 8 * min(STAGED, self.schedule.samples) * d_out * d_in)
