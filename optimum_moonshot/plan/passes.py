"""Seconds of the passes over the data: a batch passes the first block of every kind as in the run.

Where a batch would take more than a few seconds, a sample or some of its tokens take its place, and the time is
proportional to the tokens.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..calibration.accumulators import STAGED, GradientPlan
from ..calibration.observer import Observer
from ..calibration.storage import Storage
from ..data.batches import Batch, batch_size, shorten, take
from ..model.layers import Block, PrunableLayer
from ..pipeline.block_sequences import BlockSequence
from ..pipeline.selection import Subject
from ..pipeline.walk import FullModelPipeline, Stage, Walk
from .footprint import kind_of
from .memory import WHOLE, Phase, Visit, passes_of
from .solver import clock
from .spec import RunSpec

# A larger trial is expected to take at most so many seconds, or this fraction of the run if that is more.
TRIAL_SECONDS, TRIAL_FRACTION = 3.0, 0.02
FIRST_TOKENS = 64  # of the first trial
ALL_TOKEN_EXPERTS = 4  # experts of a layer that get all tokens in a trial


class PassSeconds(NamedTuple):
    """Seconds per sample."""

    capture: float  # of the forward pass that fills the caches, with gradients also of the head's backward pass
    blocks: dict[str, float]  # of all passes at a block, by its name
    forward: float  # of one pass of the blocks without hooks

    @property
    def total(self) -> float:
        """All passes."""
        return self.capture + sum(self.blocks.values())


def pass_seconds(subject: Subject, phase: Phase, batch: Batch, sequences: Sequence[BlockSequence]) -> PassSeconds:
    """Measure the seconds per sample in the passes of a phase."""
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
    measured: dict[Any, tuple[float, float]] = {}  # kind → seconds of a pass, and of one without hooks
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
    yield from walk.capture()


def _visit_seconds(run: RunSpec, stage: Stage, visit: Visit, count: int) -> tuple[float, float]:
    """Mean seconds of a batch of `count` samples in a pass at a block, and in a pass without hooks."""
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

    The second of two passes is timed: the first one allocates the memory of the statistics.
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
