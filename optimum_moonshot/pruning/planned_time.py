"""How long a run takes, by trying a little of it: one batch through the model, and one matrix of every shape.

What would take more than a few seconds is tried smaller: fewer tokens, fewer rows, fewer inputs; and counted up, tokens
in proportion, matrices by the operations that their solver states.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..calibration.accumulators import STAGED, Plan, numbers_per_row
from ..calibration.layer_statistics import LayerStatistics
from ..calibration.memory import Storage
from ..calibration.observer import Observer
from ..calibration.passes import BlockwisePasses, FullModelPasses
from ..data.batches import TOKEN_INPUTS, Batch, batch_size, take
from ..data.text import CalibrationData
from ..devices import is_gpu, wait_for
from ..errors import FactorizationError
from ..model.calls import frozen
from ..model.layers import Block, PrunableLayer
from ..objective.fisher import Fisher, FisherMatrices, SampleGradients
from ..objective.patterns import Pattern
from ..objective.problem_size import ProblemSize
from ..solvers import Solver
from .fisher_allocation import ROWS, SHARE, SPARSITIES, sampled_count
from .layer_solving import weight_losses
from .planned_memory import Outline, Visit, pattern_of, problem_size
from .planned_reading import bring_seconds, streamed_try, times_read
from .preparation import Subject
from .tuning import EVALUATIONS, HELDOUT_SHARE, STEP_SAMPLES

# Seconds that a try of the passes, or of a matrix, may take by what a smaller one took; or a share of what it says
# that the run will take.
BATCH_SECONDS, MATRIX_SECONDS, TRY_SHARE = 1.5, 0.7, 0.02
# What a plan allocates for a try, at most.
TRY_BYTES = 2**29
# Bytes a second that are written where nothing is known of the disk.
DISK_RATE = 500e6
FIRST_TOKENS, FIRST_SIZE = 16, 128
# The products that a step of learning a rotation takes, for each weight and coordinate.
LEARNING_PRODUCTS = 6


@dataclasses.dataclass(frozen=True)
class Seconds:
    """What was measured, counted up to a sample of full length."""

    first: float  # one forward pass of the model, with the head's backward pass where gradients are wanted
    block: dict[str, float]  # block → another pass of it, all its layers under the hooks
    bare: dict[str, float]  # block → a pass of it without
    whole: float  # a pass of the whole model under the hooks, where blocks are in no chain
    solving: dict[str, float]  # layer → its solver
    product: float  # of one floating-point operation in a product
    ready: float  # looking at the model and the data
    bringing: float = 0.0  # all weights that are elsewhere, once

    def of_block(self, block: Block, visits: Sequence[Visit], outline: Outline) -> float:
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
        return outline.samples * (passes * bare + seen * (self.block[block.name] - bare)) + solving

    def phases(self, outline: Outline, blocks: Sequence[tuple[Block, list[Visit]]]) -> dict[str, float]:
        """By phase, and their total.

        Args:
            outline: of the run.
            blocks: each with its rounds.
        """
        config, layers = outline.selection.config, outline.selection.layers
        one_pass = self.first + sum(self.block.values())
        found = {}
        if config.rotation is not None:
            found["rotation"] = one_pass * outline.samples + self._learning(outline)
        if config.allocation == "fisher":
            rows = sum(
                self.solving[each.name] * min(1.0, max(ROWS, each.shape[0] // SHARE) / each.shape[0]) for each in layers
            )
            found["allocation"] = one_pass * sampled_count(outline.samples) + rows * len(SPARSITIES) / 2
        again = sum(self.of_block(*each, outline) for each in blocks)
        solving = sum(self.solving[layer.name] for layer in layers)
        captured = self.first * outline.samples * len(outline.chains)
        found |= {"calibration": self.ready + captured + again - solving, "solver": solving}
        if config.recover is not None:
            samples = config.recover_steps * STEP_SAMPLES + outline.samples * (2 + EVALUATIONS / HELDOUT_SHARE)
            found["recovery"] = samples * sum(self.block.values()) + (solving * 6 if config.recover == "gradual" else 0)
        if outline.away is not None:
            found["reading"] = self.bringing * times_read(outline.selection)
        found["saving"] = sum(p.nbytes for p in _parameters(outline)) / DISK_RATE
        return {**found, "total": sum(found.values())}

    def _learning(self, outline: Outline) -> float:
        """Steps of Adam: products with every matrix, forwards and backwards."""
        layers = [layer for layer in outline.selection.layers if layer.groups == 1]
        width = max((layer.shape[1] for layer in layers), default=0)
        rows = outline.selection.config.rotation_rows
        weights = sum(min(layer.shape[0], rows or layer.shape[0]) * layer.shape[1] for layer in layers)
        return outline.selection.config.rotation_steps * LEARNING_PRODUCTS * weights * width * self.product


def _parameters(outline: Outline) -> list[Tensor]:
    structure = outline.selection.structure
    inside = [parameter for block in structure.blocks for parameter in block.module.parameters()]
    return list({id(each): each for each in [*inside, *(layer.parameter for layer in structure.outside)]}.values())


def clock(device: torch.device) -> float:
    """Seconds: of this process where one thread does all the work, so that others do not count; else of the wall."""
    if not is_gpu(device) and torch.get_num_threads() == 1:
        return time.process_time()
    wait_for(device)
    return time.perf_counter()


def measure(subject: Subject, outline: Outline, data: CalibrationData, ready: float) -> Seconds:
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
            first, block, bare, whole = _passes(subject, outline, data.batches[0])
            bringing, checking = (0.0, 0.0) if outline.away is None else bring_seconds(outline.chains[0])
            ready += checking
            return Seconds(first, block, bare, whole, _solving(outline), _product(outline), ready, bringing)
    finally:
        torch.random.set_rng_state(random)


def _passes(subject: Subject, outline: Outline, batch: Batch) -> "_Tried":
    """Seconds of a sample."""
    tokens = outline.tokens
    some, share = _cut(batch, 1, FIRST_TOKENS), 0.0
    while True:
        started = clock(outline.storage.device)
        found = _try(subject, outline, some)
        taken = clock(outline.storage.device) - started
        share = batch_size(some) * (1.0 if tokens is None else _length(some) / tokens)
        limit = max(BATCH_SECONDS, TRY_SHARE * outline.samples / share * (found.first + sum(found.block.values())))
        larger = next(
            (
                other
                for other in (batch, _cut(batch, 1, None), _cut(batch, 1, 256))
                if _elements(other) > _elements(some) and taken * _elements(other) / _elements(some) < limit
            ),
            None,
        )
        if larger is None:
            if taken < limit:  # the first time of a size has what a process needs once
                again = _try(subject, outline, some)
                found = found.least(again)
            return found.times(1 / share)
        some = larger


class _Tried(NamedTuple):
    """Seconds of a first pass, of another pass of every block under hooks and without, and of the whole model."""

    first: float
    block: dict[str, float]
    bare: dict[str, float]
    whole: float

    def least(self, other: "_Tried") -> "_Tried":
        """Of two tries."""
        block = {name: min(each, other.block[name]) for name, each in self.block.items()}
        bare = {name: min(each, other.bare[name]) for name, each in self.bare.items()}
        return _Tried(min(self.first, other.first), block, bare, min(self.whole, other.whole))

    def times(self, factor: float) -> "_Tried":
        """All of them."""
        block, bare = ({name: factor * each for name, each in some.items()} for some in self[1:3])
        return _Tried(factor * self.first, block, bare, factor * self.whole)


def _try(subject: Subject, outline: Outline, batch: Batch) -> _Tried:
    return _try_present(subject, outline, batch) if outline.away is None else _try_away(subject, outline, batch)


def _try_present(subject: Subject, outline: Outline, batch: Batch) -> _Tried:
    selection, device = outline.selection, outline.storage.device
    gradients, structure = selection.needs_gradients, selection.structure
    first, blocks, bare, whole = 0.0, {}, {}, 0.0
    for chain in outline.chains:
        around = [block for block in structure.blocks if block not in chain]
        storage = Storage(device)
        passes = BlockwisePasses(subject.model, chain, [batch], gradients, subject.loss, storage, around)
        started = clock(device)
        passes.capture()
        first += clock(device) - started
        wanted = {_kind(block) for block in chain if block.layers}
        known: dict[Any, tuple[float, float]] = {}
        order = range(passes.lowest, passes.highest + 1)
        for i in reversed(order) if gradients else order:
            if wanted <= known.keys():
                break
            with chain[i].present():
                alone = _observed(outline, (), batch, partial(_pass, passes, i, False))
                seen = _observed(outline, chain[i].layers, batch, partial(_pass, passes, i, True))
                known[_kind(chain[i])] = seen, alone
        blocks |= {block.name: known[_kind(block)][0] for block in chain if block.layers}
        bare |= {block.name: known[_kind(block)][1] for block in chain if block.layers}
    rest = tuple(layer for block in outline.loose for layer in block.layers) + structure.outside
    if rest:
        everything = FullModelPasses(subject.model, structure.blocks, [batch], gradients, subject.loss)
        whole = _observed(outline, rest, batch, everything.run)
    return _Tried(first, blocks, bare, whole)


def _try_away(subject: Subject, outline: Outline, batch: Batch) -> _Tried:
    """A block of each kind is brought; the time for that does not count."""
    gradients, device, blocks = outline.selection.needs_gradients, outline.storage.device, outline.chains[0]
    started = clock(device)
    forwards = streamed_try(subject.model, blocks, batch, False, subject.loss)
    first = clock(device) - started
    passes = streamed_try(subject.model, blocks, batch, gradients, subject.loss)
    known: dict[Any, tuple[float, float, float]] = {}
    order = range(passes.lowest, passes.highest + 1)
    for i in reversed(order) if gradients else order:
        block = blocks[i]
        if block.layers and _kind(block) not in known:
            with block.present():
                forward = _observed(outline, (), batch, partial(_pass, forwards, i, False))
                alone = _observed(outline, (), batch, partial(_pass, passes, i, False))
                seen = _observed(outline, block.layers, batch, partial(_pass, passes, i, True))
                known[_kind(block)] = seen, alone, forward
    if gradients:
        started = clock(device)
        passes.tail(0, batch)
        first += clock(device) - started + sum(known[_kind(block)][2] for block in blocks if block.layers)
    names = {block.name: known[_kind(block)] for block in blocks if block.layers}
    seen, bare = ({name: each[i] for name, each in names.items()} for i in range(2))
    return _Tried(first, seen, bare, 0.0)


def _pass(passes: BlockwisePasses, index: int, last: bool, observer: Observer) -> None:
    passes.run(index, observer, last)


def _weights(layers: Sequence[PrunableLayer]) -> int:
    return sum(layer.shape[0] * layer.shape[1] for layer in layers)


def _kind(block: Block) -> Any:
    """Equal for blocks that take as long."""
    return tuple((type(layer.modules[0]), layer.shape) for layer in block.layers)


def _observed(
    outline: Outline, layers: Sequence[PrunableLayer], batch: Batch, run: Callable[[Observer], None]
) -> float:
    """Seconds of a batch under the hooks of all layers."""
    schedule, count, device = outline.schedule, batch_size(batch), outline.storage.device
    wanted = {layer.name for layer in layers if schedule.lams[layer.name] < 1}
    plans = {layer.name: _affordable(outline, layer, count) for layer in layers}
    compressed = any(plans[name].column_block is not None for name in wanted)
    samples = STAGED if compressed else count
    started = clock(device)
    with Observer(layers, schedule.diagonal, wanted, samples, Storage(device), plans) as observer:
        run(observer)
    passed = clock(device)
    for layer in layers:
        if observer.reached(layer):
            observer.take(layer)
    # Samples wait to be compressed together.
    return passed - started + (clock(device) - passed) * (count / STAGED if compressed else 1)


def _affordable(outline: Outline, layer: PrunableLayer, samples: int) -> Plan:
    """How a try gathers a layer: as the run, or the rows of it that fit in the memory."""
    plan, d_out = outline.schedule.plan(layer), layer.shape[0]
    size = 4 * d_out * numbers_per_row(layer.shape[1], samples, plan.column_block)
    most = int(d_out * min(1.0, TRY_BYTES / size))
    if outline.schedule.diagonal or most == d_out or layer.groups > 1:
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


def _solving(outline: Outline) -> dict[str, float]:
    """Seconds in the solver of every layer; those alike are tried once."""
    kinds = {
        layer.name: (problem_size(outline, layer), pattern_of(outline.selection, layer))
        for layer in outline.selection.layers
    }
    parts = {layer.name: layer.groups if layer.form.separate else 1 for layer in outline.selection.layers}
    counts: dict[Any, int] = {}
    for name, kind in kinds.items():
        counts[kind] = counts.get(kind, 0) + parts[name]
    solver = outline.selection.solver
    known = {kind: solver_seconds(solver, kind[1], kind[0], count) for kind, count in counts.items()}
    return {name: known[kind] * parts[name] for name, kind in kinds.items()}


def solver_seconds(solver: Solver, pattern: Pattern, size: ProblemSize, count: int = 1) -> float:
    """How long a matrix takes, by random ones: of its size, if that takes no more than `MATRIX_SECONDS`.

    Args:
        solver: by which algorithm.
        pattern: that it is pruned by.
        size: of the matrix.
        count: of such matrices in the run, in whose time the tries are to be no more than `TRY_SHARE`.
    """
    tried, taken = _smaller(solver, pattern, size, FIRST_SIZE, FIRST_SIZE), 0.0
    while True:
        taken = _solve(solver, pattern, tried)
        if taken < MATRIX_SECONDS:  # the first time has what a process needs once
            taken = min(taken, _solve(solver, pattern, tried))
        larger = [size, *(_smaller(solver, pattern, size, rows, d_in) for rows, d_in in _SIZES)]
        operations = solver.work(tried, pattern).operations
        limit = max(MATRIX_SECONDS, TRY_SHARE * count * taken * solver.work(size, pattern).operations / operations)
        more = {other: solver.work(other, pattern).operations / operations for other in larger}
        more = {other: ratio for other, ratio in more.items() if ratio > 1 and other != tried and _fits(other)}
        affordable = [other for other, ratio in more.items() if taken * ratio < limit]
        if not affordable and more and taken < limit / 5:  # what is small says too much
            affordable = [min(more, key=lambda other: more[other])]
        if not affordable:
            return taken * solver.work(size, pattern).operations / operations
        tried = max(affordable, key=lambda other: more[other])


_SIZES = (
    (2048, 2048),
    (512, 2048),
    (1024, 1024),
    (256, 1024),
    (512, 512),
    (256, 256),
    (64, 256),
    (64, 512),
    (64, 1024),
)


def _fits(size: ProblemSize) -> bool:
    return 4 * (size.inputs**2 + size.weights * max(1, size.samples)) < TRY_BYTES


def _smaller(solver: Solver, pattern: Pattern, size: ProblemSize, rows: int, d_in: int) -> ProblemSize:
    """A part of a matrix, with at most so many rows and inputs; whole groups of both."""
    width = size.column_block or pattern.width
    inputs = min(size.inputs, max(width, d_in // width * width))
    rows = min(size.rows, max(1, rows // size.groups) * size.groups)
    return dataclasses.replace(size, rows=rows, inputs=inputs, column_block=solver.column_block(inputs, pattern))


@torch.no_grad()
def _solve(solver: Solver, pattern: Pattern, size: ProblemSize) -> float:
    """Seconds of a random matrix, with the losses of its result."""
    generator = torch.Generator(size.device).manual_seed(0)
    weight, statistics = random_problem(solver, size, generator)
    started = clock(size.device)
    try:
        objective = statistics.objective(weight, size.lam, size.column_block)
        result = solver.solve(objective, pattern)
        weight_losses(objective, result.weight, result.keep, weight.dtype)
    except FactorizationError:
        pass  # it has taken its time
    return clock(size.device) - started


def random_problem(solver: Solver, size: ProblemSize, generator: torch.Generator) -> tuple[Tensor, LayerStatistics]:
    """A random weight [d_out, d_in] and statistics of it.

    Args:
        solver: which decides what statistics are.
        size: of the matrix.
        generator: on the device of `size`.
    """
    rows, d_in, device = size.rows, size.inputs, size.device

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    inputs = normal(size.groups, min(2 * d_in, 512), d_in)
    gram = (inputs.mT @ inputs + torch.eye(d_in, device=device)).squeeze(0)
    weight = normal(rows, d_in) / d_in**0.5
    if solver.objective.diagonal_only:
        squares = normal(rows, d_in).square_() if size.samples else None
        return weight, LayerStatistics(gram.diagonal(dim1=-2, dim2=-1).clone(), squares, size.samples, True)
    gradients: Fisher | None = None
    if size.samples:
        gradients = SampleGradients(normal(size.samples, rows, d_in))
        if size.compressed:
            found = gradients.column_blocks(size.size)
            values = found.gradients.transpose(0, 1)
            gradients = FisherMatrices(values.mT @ values, size.samples)
    return weight, LayerStatistics(gram, gradients, size.samples)


def _product(outline: Outline) -> float:
    """Seconds of one operation in a product of matrices, where a rotation is going to be learned."""
    if outline.selection.config.rotation is None:
        return 0.0
    matrix = torch.ones(512, 512, device=outline.storage.device)
    started = clock(matrix.device)
    for _ in range(4):
        matrix @ matrix
    return (clock(matrix.device) - started) / (4 * 512**3)
