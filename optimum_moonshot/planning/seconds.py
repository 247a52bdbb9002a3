"""How long a run takes, by trying a little of it: one batch through the model, and one matrix of every shape.

What would take more than a few seconds is tried smaller: fewer tokens, fewer rows, fewer inputs; and counted up, tokens
by the line through two tries, since some of a batch's time does not grow with them (an expert's Gram matrix is read and
written for a single token too), matrices by the operations that their solver states. The memory of statistics is made
once in a round, whatever the batches.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..allocation.loss_curves import ROWS, SHARE, SPARSITIES, sampled_count
from ..calibration.accumulators import STAGED, GradientPlan, numbers_per_row
from ..calibration.observer import Observer
from ..calibration.storage import Storage
from ..data.batches import TOKEN_INPUTS, Batch, batch_size, take
from ..data.text import CalibrationData
from ..model.calls import frozen
from ..model.layers import Block, PrunableLayer
from ..pipeline.inputs import Subject
from ..pipeline.selection import Selection
from ..pipeline.stages import BlockPipeline, BlockStage, FullModelPipeline
from ..recovery.tuning import EVALUATIONS, HELDOUT_SHARE, STEP_SAMPLES
from ..rotation.permutation_search import search_products
from .memory import Visit
from .offloaded import bring_seconds, streamed_try, times_read
from .run_spec import RunSpec, pattern_of
from .solver import TRY_BYTES, TRY_SHARE, clock, solving_seconds

# Seconds that a try of the passes may take by what smaller ones took; or `TRY_SHARE` of what the run will.
BATCH_SECONDS = 1.5
# Bytes a second that are written where nothing is known of the disk.
DISK_RATE = 500e6
FIRST_TOKENS, STEP = 16, 4  # tokens of the first try, and how many times as many the next one has
SHOWN = 4  # experts that are shown all tokens in a try
# The products that a step of learning a rotation takes, for each weight and coordinate.
LEARNING_PRODUCTS = 6


@dataclasses.dataclass(frozen=True)
class Seconds:
    """What was measured, counted up to a sample of full length."""

    first: float  # one forward pass of the model, with the head's backward pass where gradients are wanted
    block: dict[str, float]  # block → another pass of it, all its layers under the hooks
    bare: dict[str, float]  # block → a pass of it without
    whole: float  # a pass of the whole model under the hooks, where blocks are in no chain
    once: dict[str, float]  # block → making the memory of its statistics, for all samples together
    shown: dict[str, float]  # block → all tokens to one expert, under the hooks on it
    solving: dict[str, float]  # layer → its solver
    product: float  # of one floating-point operation in a product
    ready: float  # looking at the model and the data
    bringing: float = 0.0  # all weights that are elsewhere, once

    def of_block(self, block: Block, visits: Sequence[Visit], outline: RunSpec) -> float:
        """Passes and solver of one block.

        Args:
            block: of the run.
            visits: its rounds.
            outline: of the run.
        """
        passes, solving = sum(visit.passes for visit in visits), sum(self.solving[layer.name] for layer in block.layers)
        if block.name not in self.block:
            return passes * outline.samples * self.whole + solving
        bare = min(self.bare[block.name], self.block[block.name])
        # Every round has hooks on its own layers alone; rows in parts come by twice, to rank and to compute.
        seen = sum(_weights(visit.layers) * (2 if visit.by_rows else 1) for visit in visits) / _weights(block.layers)
        shown = sum(visit.shown for visit in visits) * self.shown[block.name]
        seconds = passes * bare + seen * (self.block[block.name] - bare) + shown
        return outline.samples * seconds + self.once[block.name] + solving

    def phases(self, outline: RunSpec, blocks: Sequence[tuple[Block, list[Visit]]]) -> dict[str, float]:
        """By phase, and their total.

        Args:
            outline: of the run.
            blocks: each with its rounds.
        """
        config, layers = outline.selection.config, outline.selection.layers
        one_pass = self.first + sum(self.block.values())
        found = {}
        if config.rotation is not None:
            ordering = ordering_products(outline.selection) * self.product
            found["rotation"] = one_pass * outline.samples + self._learning(outline) + ordering
        if config.allocation == "fisher":
            rows = sum(
                self.solving[each.name] * min(1.0, max(ROWS, each.shape[0] // SHARE) / each.shape[0]) for each in layers
            )
            found["allocation"] = one_pass * sampled_count(outline.samples) + rows * len(SPARSITIES) / 2
        again = sum(self.of_block(*each, outline) for each in blocks)
        solving = sum(self.solving[layer.name] for layer in layers)
        captured = self.first * outline.samples * len(outline.sequential)
        found |= {"calibration": self.ready + captured + again - solving, "solver": solving}
        if config.recover is not None:
            samples = config.recover_steps * STEP_SAMPLES + outline.samples * (2 + EVALUATIONS / HELDOUT_SHARE)
            found["recovery"] = samples * sum(self.block.values()) + (solving * 6 if config.recover == "gradual" else 0)
        if outline.away is not None:
            found["reading"] = self.bringing * times_read(outline.selection)
        found["saving"] = sum(p.nbytes for p in _parameters(outline)) / DISK_RATE
        return {**found, "total": sum(found.values())}

    def _learning(self, outline: RunSpec) -> float:
        """Steps of Adam: products with every matrix, forwards and backwards."""
        layers = [layer for layer in outline.selection.layers if layer.groups == 1]
        width = max((layer.shape[1] for layer in layers), default=0)
        rows = outline.selection.config.rotation_rows
        weights = sum(min(layer.shape[0], rows or layer.shape[0]) * layer.shape[1] for layer in layers)
        return outline.selection.config.rotation_steps * LEARNING_PRODUCTS * weights * width * self.product


def ordering_products(selection: Selection) -> float:
    """Floating-point operations of finding orders of neurons where they compete for the places of n:m.

    The neurons are taken to be the widest inputs of a block.

    Args:
        selection: the layers that are pruned, with their patterns.
    """
    products = 0.0
    for block in selection.structure.blocks:
        layers = [layer for layer in block.layers if layer.groups == 1]
        widths = {layer.shape[1] for layer in layers}
        for layer in layers:
            if len(widths) > 1 and layer.shape[1] == max(widths):
                products += search_products(layer.shape, [pattern_of(selection, layer)])
    return products


def _parameters(outline: RunSpec) -> list[Tensor]:
    structure = outline.selection.structure
    inside = [parameter for block in structure.blocks for parameter in block.module.parameters()]
    return list({id(each): each for each in [*inside, *(layer.parameter for layer in structure.outside)]}.values())


def measure(subject: Subject, outline: RunSpec, data: CalibrationData, ready: float) -> Seconds:
    """Try a little of everything that a run does.

    Args:
        subject: the model and what belongs to it, which stay as they are.
        outline: of the run.
        data: in the run's batches.
        ready: seconds that looking at them has taken.

    Raises:
        MoonshotError: the model cannot be run.
    """
    random = torch.random.get_rng_state()
    try:
        with frozen(subject.model):
            tried = _passes(subject, outline, data.batches[0])
            bringing, checking = (0.0, 0.0) if outline.away is None else bring_seconds(outline.sequential[0])
            solving, product = solving_seconds(outline), _product(outline)
            return Seconds(
                **tried._asdict(), solving=solving, product=product, bringing=bringing, ready=ready + checking
            )
    finally:
        torch.random.set_rng_state(random)


def _passes(subject: Subject, outline: RunSpec, batch: Batch) -> "_Tried":
    """Seconds of a sample."""
    some, known = _cut(batch, 1, FIRST_TOKENS), list[tuple[int, _Tried]]()
    while True:
        started = clock(outline.storage.device)
        found = _try(subject, outline, some)
        taken = clock(outline.storage.device) - started
        if taken < BATCH_SECONDS:  # the first time of a size has what a process needs once
            found = found.least(_try(subject, outline, some))
        known = [*known[-1:], (_elements(some), found)]
        whole = _line(known, _elements(batch)).times(1 / batch_size(batch))
        share = TRY_SHARE * outline.samples * (whole.first + whole.whole + sum(whole.block.values()))
        larger = _larger(batch, some, known, taken, max(BATCH_SECONDS, share))
        if larger is None:
            return whole
        some = larger


def _larger(batch: Batch, some: Batch, known: "list[tuple[int, _Tried]]", taken: float, limit: float) -> Batch | None:
    """The largest part of a batch whose try is affordable by what the last two took, in all and on a batch alone."""
    own, rest = known[-1][1].passing, taken - known[-1][1].passing
    sizes = [batch, _cut(batch, 1, None), _cut(batch, 1, 256)]
    for other in (each for each in sizes if _elements(each) > _elements(some)):
        expected = _line(known, _elements(other)).passing
        if expected < limit and max(0.0, rest) + expected < STEP * limit:
            return other
    step = _cut(batch, 1, STEP * _length(some))  # one more is tried where little is known, for the line
    return step if len(known) == 1 and own < 2 * limit and _elements(step) > _elements(some) else None


def _line(known: "list[tuple[int, _Tried]]", elements: int) -> "_Tried":
    """What a batch of so many elements takes, by the line through the last two tries; in proportion to a single one."""
    size, last = known[-1]
    if elements == size:
        return last
    if len(known) == 1:
        return last.times(elements / size)
    before, first = known[0]
    return last.plus(last.above(first), (elements - size) / (size - before))


class _Tried(NamedTuple):
    """Seconds of a batch: as the fields of the same name in `Seconds`, which are of a sample."""

    first: float
    block: dict[str, float]
    bare: dict[str, float]
    whole: float
    once: dict[str, float]
    shown: dict[str, float]

    @classmethod
    def of(cls, first: float, whole: float, blocks: "dict[str, _Timed]") -> "_Tried":
        """From what every block took."""
        seen, alone, once, shown = ({name: each[field] for name, each in blocks.items()} for field in range(4))
        return cls(first, seen, alone, whole, once, shown)

    @property
    def passing(self) -> float:
        """Of all that grows with the batch."""
        return self.first + self.whole + sum(sum(some.values()) for some in (self.block, self.bare, self.shown))

    def joined(self, other: "_Tried", make: Callable[[float, float], float], once: bool = False) -> "_Tried":
        """Field by field of two tries; `once` stays what it was unless it is asked for."""

        def each(mine: Any, others: Any) -> Any:
            return (
                {name: make(mine[name], others[name]) for name in mine}
                if isinstance(mine, dict)
                else make(mine, others)
            )

        found = _Tried(*(each(*pair) for pair in zip(self, other, strict=True)))
        return found if once else found._replace(once=self.once)

    def least(self, other: "_Tried") -> "_Tried":
        """Of two tries."""
        return self.joined(other, min, once=True)

    def above(self, other: "_Tried") -> "_Tried":
        """What it takes more."""
        return self.joined(other, lambda mine, others: max(0.0, mine - others))

    def plus(self, other: "_Tried", factor: float) -> "_Tried":
        """With so many times another."""
        return self.joined(other, lambda mine, others: mine + factor * others)

    def times(self, factor: float) -> "_Tried":
        """All that grows with the batch."""
        return self.joined(self, lambda mine, _: factor * mine)


class _Timed(NamedTuple):
    """Seconds of a block: a pass under hooks and without, of the memory of statistics, and of what is shown."""

    seen: float
    alone: float
    once: float
    shown: float


class _Clocked(Storage):
    """Storage that knows how long making its memory has taken, which the first batch waits for, and no other."""

    def __init__(self, device: torch.device):
        super().__init__(device)
        self.seconds = 0.0

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype, what: str) -> Tensor:
        started = clock(self.device)
        found = super().zeros(shape, dtype, what)
        self.seconds += clock(self.device) - started
        return found


def _try(subject: Subject, outline: RunSpec, batch: Batch) -> _Tried:
    return _try_present(subject, outline, batch) if outline.away is None else _try_away(subject, outline, batch)


def _try_present(subject: Subject, outline: RunSpec, batch: Batch) -> _Tried:
    selection, device = outline.selection, outline.storage.device
    gradients, structure = selection.needs_gradients, selection.structure
    first, whole, found = 0.0, 0.0, dict[str, _Timed]()
    for chain in outline.sequential:
        around = [block for block in structure.blocks if block not in chain]
        storage = Storage(device)
        passes = BlockPipeline(subject.model, chain, [batch], gradients, subject.loss, storage, around)
        started = clock(device)
        passes.capture()
        first += clock(device) - started
        wanted = {_kind(block) for block in chain if block.layers}
        known: dict[Any, _Timed] = {}
        order = range(passes.lowest, passes.highest + 1)
        for i in reversed(order) if gradients else order:
            if wanted <= known.keys():
                break
            with chain[i].onloaded():
                known[_kind(chain[i])] = _block(outline, chain[i], batch, partial(_pass, passes, i))
        found |= {block.name: known[_kind(block)] for block in chain if block.layers}
    rest = tuple(layer for block in outline.non_sequential for layer in block.layers) + structure.outside
    if rest:
        everything = FullModelPipeline(subject.model, structure.blocks, [batch], gradients, subject.loss)
        whole, _ = _observed(outline, rest, batch, everything.run)
    return _Tried.of(first, whole, found)


def _block(outline: RunSpec, block: Block, batch: Batch, run: Callable[[bool, Observer], None]) -> _Timed:
    alone, _ = _observed(outline, (), batch, partial(run, False))
    shown = 0.0
    fused = [layer for layer in block.layers if outline.under_calibrated(layer)]
    if fused:
        count = min(SHOWN, *(layer.groups for layer in fused))
        parts = [dataclasses.replace(layer, span=(0, count), everywhere=True) for layer in fused]
        taken, _ = _observed(outline, parts, batch, partial(run, False), gradients=False)
        shown = max(0.0, taken - alone) / count
    seen, once = _observed(outline, block.layers, batch, partial(run, True))
    return _Timed(seen, alone, once, shown)


def _try_away(subject: Subject, outline: RunSpec, batch: Batch) -> _Tried:
    """A block of each kind is brought; the time for that does not count."""
    gradients, device, blocks = outline.selection.needs_gradients, outline.storage.device, outline.sequential[0]
    started = clock(device)
    forwards = streamed_try(subject.model, blocks, batch, False, subject.loss)
    first = clock(device) - started
    passes = streamed_try(subject.model, blocks, batch, gradients, subject.loss)
    known: dict[Any, tuple[_Timed, float]] = {}
    order = range(passes.lowest, passes.highest + 1)
    for i in reversed(order) if gradients else order:
        block = blocks[i]
        if block.layers and _kind(block) not in known:
            with block.onloaded():
                forward, _ = _observed(outline, (), batch, partial(_pass, forwards, i, False))
                known[_kind(block)] = _block(outline, block, batch, partial(_pass, passes, i)), forward
    if gradients:
        started = clock(device)
        passes.tail(0, batch)
        first += clock(device) - started + sum(known[_kind(block)][1] for block in blocks if block.layers)
    return _Tried.of(first, 0.0, {block.name: known[_kind(block)][0] for block in blocks if block.layers})


def _pass(passes: BlockPipeline, index: int, advance: bool, observer: Observer) -> None:
    BlockStage(passes, index).observe(observer, advance)


def _weights(layers: Sequence[PrunableLayer]) -> int:
    return sum(layer.shape[0] * layer.shape[1] for layer in layers)


def _kind(block: Block) -> Any:
    """Equal for blocks that take as long."""
    return tuple((type(layer.modules[0]), layer.shape) for layer in block.layers)


def _observed(
    outline: RunSpec,
    layers: Sequence[PrunableLayer],
    batch: Batch,
    run: Callable[[Observer], None],
    gradients: bool = True,
) -> tuple[float, float]:
    """Seconds of a batch under the hooks of all layers, and those of making memory for their sums."""
    statistics, count, device = outline.statistics, batch_size(batch), outline.storage.device
    wanted = {layer.name for layer in layers if gradients and statistics.lams[layer.name] < 1}
    plans = {layer.name: _affordable(outline, layer, count) for layer in layers}
    compressed = any(plans[name].column_block is not None for name in wanted)
    samples, storage = STAGED if compressed else count, _Clocked(device)
    started = clock(device)
    with Observer(layers, statistics.diagonal, wanted, samples, storage, plans) as observer:
        run(observer)
    passed = clock(device)
    for layer in layers:
        if observer.reached(layer):
            observer.take(layer)
    # Samples wait to be compressed together.
    taken = (clock(device) - passed) * (count / STAGED if compressed else 1)
    return passed - started - storage.seconds + taken, storage.seconds


def _affordable(outline: RunSpec, layer: PrunableLayer, samples: int) -> GradientPlan:
    """How a try gathers a layer: as the run, or the rows of it that fit in the memory."""
    plan, d_out = outline.statistics.plan(layer), layer.shape[0]
    size = 4 * d_out * numbers_per_row(layer.shape[1], samples, plan.column_block)
    most = int(d_out * min(1.0, TRY_BYTES / size))
    if outline.statistics.diagonal or most == d_out or layer.groups > 1:
        return plan
    return dataclasses.replace(plan, rows=slice(0, max(1, most)))


def _cut(batch: Batch, samples: int, tokens: int | None) -> Batch:
    """Some of a batch's samples, cut to some tokens where nothing but tokens goes in."""
    some = take(batch, 0, samples)
    if tokens is None or not set(some) <= TOKEN_INPUTS:
        return some
    return {name: each[:, :tokens] for name, each in some.items()}


def _length(batch: Batch) -> int:
    return next(iter(batch.values())).shape[1] if "input_ids" in batch else 1


def _elements(batch: Batch) -> int:
    return next(iter(batch.values())).numel()


def _product(outline: RunSpec) -> float:
    """Seconds of one operation in a product of matrices, where a rotation is going to be learned."""
    if outline.selection.config.rotation is None:
        return 0.0
    matrix = torch.ones(512, 512, device=outline.storage.device)
    started = clock(matrix.device)
    for _ in range(4):
        matrix @ matrix
    return (clock(matrix.device) - started) / (4 * 512**3)
