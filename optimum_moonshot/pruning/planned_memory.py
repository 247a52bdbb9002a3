"""Where a run's bytes are at every moment, by walking through it without data: the caches, the rounds, the solver.

What is gathered together, in which form, and where it goes is not decided here: the run's own `StatisticsSchedule` and
`Storage` are asked, with the caches' bytes counted and not allocated.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import torch

from ..calibration.accumulators import STAGED, Plan
from ..calibration.block_footprint import ModelFootprint
from ..calibration.memory import Storage
from ..devices import is_gpu
from ..model.layers import Block, PrunableLayer
from ..objective.problem_size import ProblemSize, ruler_bytes
from ..objective.row_slices import slice_bytes
from ..reports.plan import DISK, Bytes, Misfit, Moment
from .planned_reading import Away
from .schedule import StatisticsSchedule
from .selection import Selection

CPU = torch.device("cpu")
# What a C library keeps of freed tensors within a phase, at most: those of up to 32 MiB, twice.
KEPT_BYTES = 64 * 2**20
AFTER = ("writing", "saving")  # phases without passes
SPILLED = "raise max_memory, set offload_dir to a folder on a fast disk, or lower num_samples or sequence_length"


@dataclasses.dataclass(frozen=True)
class Outline:
    """A run as far as it is known before it."""

    selection: Selection
    chains: tuple[tuple[Block, ...], ...]
    loose: tuple[Block, ...]
    footprint: ModelFootprint
    samples: int  # N
    sizes: tuple[int, ...]  # samples of each batch
    tokens: int | None  # of a sample
    vocabulary: int
    itemsize: int  # of the model's numbers
    storage: Storage
    resumes: bool  # results lie in a folder
    kind: type[StatisticsSchedule] = StatisticsSchedule  # which decides what is gathered together
    away: Away | None = None  # blocks that are elsewhere

    @property
    def kept(self) -> int:
        """What the C library keeps in host memory of what every batch allocates and frees."""
        passing = [each.observed for each in self.footprint.blocks.values()] or [self.footprint.whole]
        logits = self.logits_bytes() if self.selection.needs_gradients else 0
        return min(KEPT_BYTES, max(*passing, logits)) if self.storage.device.type == "cpu" else 0

    @property
    def batch(self) -> int:
        """Samples of the largest."""
        return max(self.sizes)

    @property
    def schedule(self) -> StatisticsSchedule:
        """The run's own."""
        selection, config = self.selection, self.selection.config
        lams = {layer.name: selection.lam_of(layer) for layer in selection.layers}
        patterns = {layer.name: [pattern_of(selection, layer)] for layer in selection.layers}
        experts = config.expert_tokens, config.starved_experts
        return self.kind(selection.solver, patterns, lams, self.samples, self.storage, *experts)

    def logits_bytes(self) -> int:
        """A batch's logits with their gradient, and one sample's in float32, three times."""
        if not self.tokens:
            return 0
        sample = self.tokens * self.vocabulary
        return 2 * self.batch * sample * self.itemsize + (12 if self.itemsize == 4 else 16) * sample


def pattern_of(selection: Selection, layer: PrunableLayer):
    """What a layer is pruned by, as far as it is known before an allocation divides."""
    pattern = selection.patterns[layer.name]
    return getattr(pattern, "nearest", pattern)


def problem_size(outline: Outline, layer: PrunableLayer, rows: int | None = None) -> ProblemSize:
    """What the solver is given of a layer: of one expert, where it is many.

    Args:
        outline: of the run.
        layer: any of it.
        rows: of a chunk; None is all.
    """
    selection, lam = outline.selection, outline.selection.lam_of(layer)
    d_out, d_in = layer.shape
    pattern, separate = pattern_of(selection, layer), layer.form.separate
    plan = outline.schedule.plan(layer)
    device = outline.storage.device
    return ProblemSize(
        rows=rows or (d_out // layer.groups if separate else d_out),
        inputs=d_in,
        samples=outline.samples if lam < 1 else 0,
        groups=1 if separate else layer.groups,
        column_block=selection.solver.column_block(d_in, pattern),
        compressed=plan.column_block is not None,
        lam=lam,
        sparsity=pattern.sparsity,
        device=device,
        threads=1 if is_gpu(device) else torch.get_num_threads(),
    )


def solver_bytes(outline: Outline, layer: PrunableLayer, rows: int | None = None) -> int:
    """What solving takes beside the statistics, with what measuring its losses takes.

    Args:
        outline, layer, rows: as for `problem_size`.
    """
    size = problem_size(outline, layer, rows)
    work = outline.selection.solver.work(size, pattern_of(outline.selection, layer))
    return max(work.bytes, ruler_bytes(size))


@dataclasses.dataclass
class Walk:
    """Counts what is held, and notes the moments.

    Args:
        outline: of the run.
    """

    outline: Outline
    held: dict[str, Bytes] = dataclasses.field(default_factory=dict)
    moments: list[Moment] = dataclasses.field(default_factory=list)
    misfits: list[Misfit] = dataclasses.field(default_factory=list)

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
        if found is None and self.outline.selection.config.offload_dir is None and not self.misfits:
            limits = self.storage.limits
            place, has = str(self.storage.device), limits[self.storage.device]
            self.misfits.append(Misfit(place, "calibration", f"{what} of {where}", size, has, SPILLED))
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
        self.moments.append(Moment(phase, where, {what: found for what, found in items.items() if found}))

    def result(self, layer: PrunableLayer) -> None:
        """A layer's pruned weight is kept; on disk in the bytes that its zeros leave."""
        size, away = weight_bytes(layer), self.outline.away
        on_disk = self.outline.resumes or (away is not None and away.place == DISK)
        if on_disk:
            kept = 1 - pattern_of(self.outline.selection, layer).sparsity
            size = min(size, round(kept * size) + layer.shape[0] * layer.shape[1] // 8)
        self.add("results", DISK if on_disk else str(CPU), size)


def weight_bytes(layer: PrunableLayer) -> int:
    """Of a layer's matrix in the model's dtype."""
    d_out, d_in = layer.shape
    return d_out * d_in * layer.parameter.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Visit:
    """One round of a block's layers."""

    layers: tuple[PrunableLayer, ...]
    parts: tuple[slice, ...]  # where it is one layer that is not gathered whole
    passes: int

    @property
    def by_rows(self) -> bool:
        """Whether the parts are rows, not experts."""
        return bool(self.parts) and not self.layers[0].form.separate


def visits(schedule: StatisticsSchedule, layers: Sequence[PrunableLayer]) -> list[Visit]:
    """The rounds of some layers, with the memory that is left now, and how often the data pass for each.

    Args:
        schedule: of the run, whose decisions these are.
        layers: of a block.
    """
    found, rounds = [], schedule.rounds(list(layers))
    for number, together in enumerate(rounds):
        parts = schedule.parts(together)
        separate = any(layer.form.separate for layer in together)
        passes = 1 if parts is None else len(parts) if separate else 2 * len(parts) - 1
        if separate and schedule.experts.everyone:
            passes *= 2
        again = parts is not None or (separate and not schedule.experts.as_routed)
        passes += again and number == len(rounds) - 1  # on to the next block
        found.append(Visit(tuple(together), tuple(parts or ()), passes))
    return found


def walk_blocks(walk: Walk, phase: str = "calibration", solves: bool = True) -> Iterator[tuple[Block, list[Visit]]]:
    """Calibrate and solve block by block, as `StatisticsSource.layers` does; yields what every block takes.

    Args:
        walk: notes the moments.
        phase: of the passes.
        solves: whether the layers are solved; else their statistics are let go.
    """
    outline = walk.outline
    gradients = outline.selection.needs_gradients
    for chain in outline.chains:
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
    rest = [layer for block in outline.loose for layer in block.layers] + list(outline.selection.structure.outside)
    if rest:
        whole = (
            Block("the whole model", outline.selection.structure.blocks[0].module, tuple(rest))
            if (outline.selection.structure.blocks)
            else Block("the whole model", rest[0].modules[0], tuple(rest))
        )
        yield whole, _visit(walk, phase, whole, rest, solves)


def _capture(walk: Walk, phase: str, span: Sequence[Block], gradients: bool) -> dict[str, list[tuple[str, int]]]:
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


def _visit(walk: Walk, phase: str, block: Block, layers: Sequence[PrunableLayer], solves: bool) -> list[Visit]:
    schedule, outline = walk.outline.schedule, walk.outline
    found = visits(schedule, layers)
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
    walk: Walk, phase: str, visit: Visit, schedule: StatisticsSchedule, activations: int, solves: bool
) -> None:
    """A layer whose statistics come in parts: the first of them, since all are alike."""
    (layer,), part = visit.layers, visit.parts[0]
    plan = schedule.plan(layer)
    if layer.form.separate:
        some, rows = dataclasses.replace(layer, span=(part.start, part.stop)), None
    else:
        some, rows = layer, part.stop - part.start
        plan = dataclasses.replace(plan, rows=part)
    statistics = _Statistics(walk, schedule, (some,), [], plan)
    totals = 0 if rows is None else 4 * (1 + walk.outline.batch) * layer.shape[0] * layer.shape[1]
    walk.moment(phase, layer.name, activations=activations + statistics.temporary(some) + totals)
    if solves:
        whole = 0 if rows is None else 8 * layer.shape[0] * layer.shape[1]
        walk.moment("solver", layer.name, solver=solver_bytes(walk.outline, some, rows) + whole)
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
        walk: Walk,
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
