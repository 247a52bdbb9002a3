"""Seconds of a run: a batch passes the first block of every kind as in the run, and counts give the rest.

Where a batch would take more than a few seconds, a sample or some of its tokens take its place, and the time is
proportional to the tokens.
"""

import dataclasses
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch

from ..calibration.accumulators import STAGED, GradientPlan
from ..calibration.observer import Observer
from ..calibration.storage import Storage
from ..data.batches import Batch, batch_size, shorten, take
from ..devices import wait_for
from ..errors import require
from ..model.calls import frozen, to_device
from ..model.layers import Block, PrunableLayer
from ..model.offload import RESIDENT
from ..pipeline.block_probe import passing_on, without_weights
from ..pipeline.block_sequences import BlockSequence
from ..pipeline.selection import Selection, Subject
from ..pipeline.stages import FullModelPipeline, Stage
from ..pipeline.walk import Walk
from ..recover.tuning import EVALUATIONS, HELDOUT_SHARE, STEP_SAMPLES
from ..rotate.permutation_search import search_products
from .footprint import kind_of
from .memory import WHOLE, Phase, Visit, passes_of
from .solver import clock, curve_seconds, solving_seconds
from .spec import RunSpec, module_bytes, pattern_of

# A batch passes in a trial if that is expected to take at most so many seconds, or this fraction of the run.
TRIAL_SECONDS, TRIAL_FRACTION = 3.0, 0.02
FIRST_TOKENS = 64  # of the first trial
ALL_TOKEN_EXPERTS = 4  # experts of a layer that get all tokens in a trial
# Bytes per second that a disk is assumed to write.
DISK_RATE = 500e6
# Matrix products of a step of learning a rotation, per weight and coordinate.
LEARNING_PRODUCTS = 6
# How often a rotation onloads each block, apart from the steps of learning: search, trials, statistics, writing.
ROTATION_READS = 18


class PassSeconds(NamedTuple):
    """Seconds of one sample."""

    capture: float  # of the forward pass that fills the caches, with gradients also of the head's backward pass
    blocks: dict[str, float]  # of all passes at a block, by its name
    forward: float  # of one pass of the blocks that observes nothing

    @property
    def total(self) -> float:
        """All passes."""
        return self.capture + sum(self.blocks.values())


@dataclasses.dataclass(frozen=True)
class Seconds:
    """Seconds by phase, and by block of the calibration and its solver."""

    phases: dict[str, float]
    blocks: dict[str, float]


def measure(subject: Subject, phases: Sequence[Phase], batch: Batch, ready: float) -> Seconds:
    """Run the trials, after `ready` seconds of the plan; the model and the random state stay as they are."""
    random, run = torch.random.get_rng_state(), phases[-1].run
    config = run.selection.config
    try:
        with frozen(subject.model), _first_blocks(subject, run, batch) as (sequences, reading):
            passes = {phase.name: _pass_seconds(subject, phase, batch, sequences) for phase in phases}
            seconds = {phase.name: passes[phase.name].total * phase.run.samples for phase in phases}
            solving = solving_seconds(run)
            if config.rotation is not None:
                seconds["rotation"] += rotation_products(run.selection) * _product_seconds(run.device)
            if config.allocation == "fisher":
                seconds["allocation"] += sum(curve_seconds(run).values())
    finally:
        torch.random.set_rng_state(random)
    calibration = passes["calibration"]
    seconds["calibration"] += ready
    seconds["solver"] = sum(solving.values())
    if config.recover is not None:
        seconds["recovery"] = _recovery_samples(run) * calibration.forward
        seconds["recovery"] += 6 * seconds["solver"] if config.recover == "gradual" else 0
    if run.offloaded is not None:
        seconds["reading"] = reading * _times_read(run.selection)
    seconds["saving"] = sum(module_bytes(block.module) for block in run.selection.structure.blocks) / DISK_RATE
    by_block = {}
    for block, _, _ in phases[-1].visits:
        by_block[block.name] = calibration.blocks[block.name] * run.samples
        by_block[block.name] += sum(solving[layer.name] for layer in block.layers)
    return Seconds({**seconds, "total": sum(seconds.values())}, by_block)


def _recovery_samples(run: RunSpec) -> float:
    """Samples that pass all blocks in a recovery; a backward pass takes as long as two forward passes."""
    config, heldout = run.selection.config, run.samples * EVALUATIONS / HELDOUT_SHARE
    samples = 3 * config.recovery_steps * STEP_SAMPLES + 2 * run.samples + heldout
    return 2 * samples if config.recover == "distill" else samples  # by the teacher too


def rotation_products(selection: Selection) -> float:
    """Floating-point operations of learning a rotation and of searching channel permutations.

    Learning multiplies with every matrix, forward and backward. Neurons, assumed to be the widest inputs of a block,
    are permuted where they compete for the places of n:m.
    """
    config, single = selection.config, [layer for layer in selection.layers if layer.groups == 1]
    width = max((layer.shape[1] for layer in single), default=0)
    weights = sum(min(layer.shape[0], config.rotation_rows or layer.shape[0]) * layer.shape[1] for layer in single)
    products: float = config.rotation_steps * LEARNING_PRODUCTS * weights * width
    for block in selection.structure.blocks:
        layers = [layer for layer in block.layers if layer.groups == 1]
        widths = {layer.shape[1] for layer in layers}
        neurons = [layer for layer in layers if len(widths) > 1 and layer.shape[1] == max(widths)]
        products += sum(search_products(layer.shape, [pattern_of(selection, layer)]) for layer in neurons)
    return products


def _product_seconds(device: torch.device) -> float:
    """Seconds of a floating-point operation in a matrix product."""
    matrix = torch.ones(512, 512, device=device)
    started = clock(device)
    for _ in range(4):
        matrix @ matrix
    return (clock(device) - started) / (4 * 512**3)


def _times_read(selection: Selection) -> int:
    """How often a run reads every offloaded weight, besides saving."""
    config = selection.config
    passes = 3 if selection.needs_gradients else 2  # checks and calibration; with gradients a forward pass before it
    allocation = {"fisher": 2, "owl": 1}.get(config.allocation if isinstance(config.allocation, str) else "", 0)
    rotation = 0 if config.rotation is None else ROTATION_READS + config.rotation_steps
    return passes + allocation + rotation + (config.recover is not None)


@contextmanager
def _first_blocks(subject: Subject, run: RunSpec, batch: Batch) -> Iterator[tuple[Sequence[BlockSequence], float]]:
    """The sequences of blocks that trials pass, and the seconds to read all offloaded blocks.

    Of offloaded blocks these are the first of each kind, which are onloaded meanwhile; the others return their input.
    """
    if run.offloaded is None:
        yield run.sequential, 0.0
        return
    ((blocks, _),), device = run.sequential, run.device
    probe = without_weights(subject.model, blocks, to_device(shorten(batch), device))
    message = "plan: the blocks' arguments cannot be seen without their weights; plan the model in memory"
    require(probe is not None, message)
    assert probe is not None
    first = list({kind_of(block): block for block in reversed(blocks)}.values())[::-1]
    others = [block for block in blocks if block not in first]
    with ExitStack() as stack:
        started = time.perf_counter()
        for block in first:
            stack.enter_context(block.onloaded())
            for tensor in (*block.module.parameters(), *block.module.buffers()):
                tensor.sum()  # a mapped file is read on first access
        wait_for(device)
        seconds = (time.perf_counter() - started) / sum(module_bytes(block.module) for block in first)
        stack.enter_context(passing_on(others, probe.extras[: len(others)]))
        resident = tuple(dataclasses.replace(block, weights=RESIDENT) for block in first)
        yield [BlockSequence(resident, probe.extras[: len(first)])], seconds * run.offloaded.total


def _pass_seconds(subject: Subject, phase: Phase, batch: Batch, sequences: Sequence[BlockSequence]) -> PassSeconds:
    """Seconds of one sample of a batch in the passes of a phase."""
    trial, size, taken, expected = PassSeconds(0.0, {}, 0.0), 0, 0.0, 0.0
    for part in (shorten(batch, tokens=FIRST_TOKENS), take(batch, 0, 1), batch):
        grown = _elements(part) / size if size else 0
        if grown == 1 or grown * taken > max(TRIAL_SECONDS, TRIAL_FRACTION * expected):
            continue
        started = clock(phase.run.device)
        trial = _trial(subject, phase, part, sequences)
        size, taken = _elements(part), clock(phase.run.device) - started
        expected = trial.total * phase.run.samples * _elements(batch) / size / batch_size(batch)
    scale = _elements(batch) / size / batch_size(batch)
    blocks = {name: seconds * scale for name, seconds in trial.blocks.items()}
    return PassSeconds(trial.capture * scale, blocks, trial.forward * scale)


def _elements(batch: Batch) -> int:
    return next(iter(batch.values())).numel()


def _trial(subject: Subject, phase: Phase, batch: Batch, sequences: Sequence[BlockSequence]) -> PassSeconds:
    """Seconds of a batch: one block of each kind is measured."""
    run, capture = phase.run, 0.0
    measured: dict[Any, tuple[float, float]] = {}  # seconds of one of a kind's passes, and of one without hooks
    visits = {visit.block.layers[0].name: visit for visit in phase.visits}
    for stages, blocks in _walks(subject, phase, batch, sequences):
        missing = {kind_of(block) for block in blocks if block.layers} - measured.keys()
        started = clock(run.device)
        for index, stage in enumerate(stages):
            capture += 0.0 if index else clock(run.device) - started
            visit = visits[stage.layers[0].name] if stage.layers else None
            if visit is not None and kind_of(visit.block) in missing:
                measured[kind_of(visit.block)] = _visit_seconds(run, stage, visit, batch_size(batch))
                missing.remove(kind_of(visit.block))
            if not missing:
                break
            stage.advance()
    taken = {visit.block.name: visit.passes * measured[kind_of(visit.block)][0] for visit in phase.visits}
    forward = sum(measured[kind_of(visit.block)][1] for visit in phase.visits)
    if run.offloaded is not None and run.gradients:  # the other blocks returned their input
        names = {block.name for block in sequences[0].blocks}
        others = (kind_of(block) for block in run.selection.structure.blocks if block.name not in names)
        capture += sum(measured[kind][1] for kind in others if kind in measured)
    return PassSeconds(capture, taken, forward)


def _walks(
    subject: Subject, phase: Phase, batch: Batch, sequences: Sequence[BlockSequence]
) -> Iterator[tuple[Iterable[Stage], tuple[Block, ...]]]:
    """The walks of a run with their blocks; offloaded blocks are in the sequences or return their input."""
    run, blocks = phase.run, phase.run.selection.structure.blocks
    for sequence in sequences:
        others = tuple(block for block in blocks if block not in sequence.blocks) if run.offloaded is None else ()
        storage = Storage(run.device)
        extras, loss = sequence.extras, subject.loss
        walk = Walk(subject.model, sequence.blocks, [batch], run.gradients, loss, storage, extras, others)
        yield _captured(walk), sequence.blocks
    for block in (visit.block for visit in phase.visits if visit.block.name == WHOLE):
        others = blocks if run.offloaded is None else ()
        yield FullModelPipeline(subject.model, others, [batch], run.gradients, subject.loss, block.layers), (block,)


def _captured(walk: Walk) -> Iterator[Stage]:
    walk.capture()
    yield from walk.stages()


def _visit_seconds(run: RunSpec, stage: Stage, visit: Visit, count: int) -> tuple[float, float]:
    """Seconds of a batch of `count` samples in a pass at a block, on average, and in one that observes nothing."""
    forward, seconds, spec = _observed(run, stage, (), count), 0.0, run.statistics
    for part in visit.parts:
        layers, plans = part.layers, {layer.name: spec.plan(layer) for layer in part.layers}
        if part.slices and layers[0].separate:
            layers = (dataclasses.replace(layers[0], span=(part.slices[0].start, part.slices[0].stop)),)
        elif part.slices:
            plans = {name: dataclasses.replace(plan, rows=part.slices[0]) for name, plan in plans.items()}
        passes, observed = passes_of(run, part), _observed(run, stage, layers, count, plans)
        shown = [layer for layer in part.layers if run.all_token_experts(layer)]
        if shown:  # half of the passes give them all tokens
            some = min(ALL_TOKEN_EXPERTS, *(layer.groups for layer in shown))
            experts = [dataclasses.replace(layer, span=(0, some), everywhere=True) for layer in shown]
            expert = max(0.0, _observed(run, stage, experts, count) - forward) / some
            seconds += passes // 2 * (observed + forward) + expert * max(layer.groups for layer in shown)
        else:
            seconds += passes * observed
    advancing = visit.passes - sum(passes_of(run, part) for part in visit.parts)
    return (seconds + advancing * forward * (3 if run.gradients else 1)) / visit.passes, forward


def _observed(
    run: RunSpec,
    stage: Stage,
    layers: Sequence[PrunableLayer],
    count: int,
    plans: Mapping[str, GradientPlan] | None = None,
) -> float:
    """Seconds of a batch of `count` samples under the hooks of some layers; with `plans` as in a pass of the run.

    The batch passes twice: the first time it waits for the memory of the statistics.
    """
    plans, spec = plans or {}, run.statistics
    with_gradients = {layer.name for layer in layers if layer.name in plans and spec.needs_gradients(layer)}
    compressed = any(plans[name].column_block is not None for name in with_gradients)
    samples = STAGED if compressed else count
    with Observer(layers, spec.diagonal, with_gradients, samples, Storage(run.device), plans) as observer:
        stage.observe(observer)
        passing = clock(run.device)
        stage.observe(observer, advance=bool(plans))
    passed = clock(run.device)
    for layer in layers:
        if observer.reached(layer):
            observer.take(layer)
    adding = clock(run.device) - passed  # of `STAGED` samples, where they are compressed
    return passed - passing + (adding * count / STAGED if compressed else 0.0)
