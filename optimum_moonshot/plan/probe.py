"""Seconds of the passes over the data, from trials with parts of one batch.

A batch that would take more than a few seconds is tried with fewer tokens. Its time then follows from the line through
the last two trials, since some of the time does not grow with the tokens: an expert's Gram matrix is read and written
even for a single one. The memory of the statistics is allocated once per part, whatever the number of batches.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..calibration.accumulators import STAGED, GradientPlan, numbers_per_row
from ..calibration.observer import Observer
from ..calibration.storage import Storage
from ..data.batches import Batch, batch_size, shorten, take
from ..errors import MoonshotError
from ..model.calls import model_device, to_device
from ..model.layers import Block, PrunableLayer
from ..pipeline.block_probe import without_weights
from ..pipeline.selection import Subject
from ..pipeline.stages import FullModelPipeline
from ..pipeline.walk import BlockStage, Walk
from .run_spec import RunSpec
from .solver import TRIAL_BYTES, TRIAL_FRACTION, clock

# Seconds of a trial, as predicted from smaller ones, at most; or `TRIAL_FRACTION` of the passes of the run.
TRIAL_SECONDS = 1.5
FIRST_TOKENS, GROWTH = 16, 4  # tokens of the first trial, and the factor to the next
ALL_TOKEN_EXPERTS = 4  # experts of a layer that get all tokens in a trial

# (quantity, block) → seconds of a batch or of a sample. For each block with layers: "bare", a pass without hooks;
# "forward", the same without gradients, if offloaded; "observed", a pass under the hooks of all layers; "expert", all
# tokens for one expert; "storage", the allocation of its statistics, which does not grow with the batch. For block "":
# "capture", the forward pass of the model, with gradients also the head's backward pass; "model", a pass of the whole
# model for the layers outside of its sequences.
Timing = dict[tuple[str, str], float]
GROWING = ("capture", "model", "bare", "observed", "expert")  # quantities that grow with the batch, each counted once


def total(timing: Timing, *quantities: str) -> float:
    """The sum of some quantities over all blocks."""
    return sum(seconds for (quantity, _), seconds in timing.items() if quantity in quantities)


def pass_seconds(subject: Subject, run: RunSpec, batch: Batch) -> Timing:
    """The timing of one sample of a batch."""
    part, trials = shorten(batch, tokens=FIRST_TOKENS), list[tuple[int, Timing]]()
    while True:
        started = clock(run.device)
        timing = _trial(subject, run, part)
        taken = clock(run.device) - started
        if taken < TRIAL_SECONDS:  # the first trial of a size includes the one-time costs of a process
            again = _trial(subject, run, part)
            timing = {key: min(seconds, again[key]) for key, seconds in timing.items()}
        trials = [*trials[-1:], (_elements(part), timing)]
        sample = extrapolate(trials, _elements(batch))
        sample |= {key: seconds / batch_size(batch) for key, seconds in sample.items() if key[0] != "storage"}
        limit = TRIAL_FRACTION * run.samples * total(sample, "capture", "model", "observed")
        larger = _larger(batch, part, trials, taken, max(TRIAL_SECONDS, limit))
        if larger is None:
            return sample
        part = larger


def _larger(batch: Batch, part: Batch, trials: list[tuple[int, Timing]], taken: float, limit: float) -> Batch | None:
    """The largest part of a batch whose trial should take less than the limit; None for the present one."""
    passes = total(trials[-1][1], *GROWING)
    for other in (batch, take(batch, 0, 1), shorten(batch, tokens=256)):
        expected = total(extrapolate(trials, _elements(other)), *GROWING)
        affordable = expected < limit and max(0.0, taken - passes) + expected < GROWTH * limit
        if affordable and _elements(other) > _elements(part):
            return other
    tokens = next(iter(part.values())).shape[1] if "input_ids" in part else 1
    longer = shorten(batch, tokens=GROWTH * tokens)  # a second trial is worth more time, since it gives the line
    return longer if len(trials) == 1 and passes < 2 * limit and _elements(longer) > _elements(part) else None


def extrapolate(trials: list[tuple[int, Timing]], elements: int) -> Timing:
    """The timing of a batch of so many elements, on the line through the last two trials or through zero."""
    size, last = trials[-1]
    if elements == size:
        return last
    if len(trials) == 1:
        slope = {key: seconds / size for key, seconds in last.items()}
    else:
        before, first = trials[0]
        slope = {key: max(0.0, seconds - first[key]) / (size - before) for key, seconds in last.items()}
    grown = {key: seconds + slope[key] * (elements - size) for key, seconds in last.items() if key[0] != "storage"}
    return {**last, **grown}


def _trial(subject: Subject, run: RunSpec, batch: Batch) -> Timing:
    """The timing of a batch; one block of each kind is measured."""
    device, structure, gradients = run.device, run.selection.structure, run.selection.needs_gradients
    timing: Timing = {("capture", ""): 0.0, ("model", ""): 0.0}
    for sequence in run.sequential:
        started = clock(device)
        pipeline = _captured(subject, run, sequence, batch)
        timing["capture", ""] += clock(device) - started
        missing = {_kind(block) for block in sequence if block.layers}
        order = range(pipeline.lowest, pipeline.highest + 1)
        for index in reversed(order) if gradients else order:
            stage, kind = BlockStage(pipeline, index), _kind(sequence[index])
            if missing and (kind in missing or run.offloaded is None):
                with stage.onloaded():
                    if kind in missing:
                        measured = _block_timing(run, stage, batch)
                        alike = [block.name for block in sequence if _kind(block) == kind]
                        timing |= {(quantity, name): measured[quantity] for quantity in measured for name in alike}
                        missing.remove(kind)
                    stage.advance()
        if gradients and pipeline.extras is not None:
            started = clock(device)
            pipeline.differentiate_head(0, batch)
            timing["capture", ""] += clock(device) - started + total(timing, "forward")
    rest = tuple(layer for block in run.non_sequential for layer in block.layers) + structure.outside
    if rest:
        whole = FullModelPipeline(subject.model, structure.blocks, [batch], gradients, subject.loss)
        timing["model", ""] = _observed(run, rest, batch, whole.run)[0]
    return timing


def _captured(subject: Subject, run: RunSpec, blocks: tuple[Block, ...], batch: Batch) -> Walk:
    """A pipeline before its first stage; offloaded blocks all have the inputs of the first, so none is onloaded."""
    model, gradients, loss = subject.model, run.selection.needs_gradients, subject.loss
    if run.offloaded is None:
        others = [block for block in run.selection.structure.blocks if block not in blocks]
        pipeline = Walk(model, blocks, [batch], gradients, loss, Storage(run.device), around=others)
        pipeline.capture()
        return pipeline
    device = model_device(model)
    probe = without_weights(model, blocks, to_device(batch, device))
    if probe is None:
        message = "plan: the blocks' arguments cannot be seen without their weights; plan the model in memory"
        raise MoonshotError(message)
    walk = Walk(model, blocks, [batch], gradients, loss, Storage(device), probe.extras)
    walk.capture_arguments()
    hidden = walk.calls[0][0].hidden
    for index in range(len(blocks)):
        walk.calls[index][0].hidden = hidden
    walk.deltas = [torch.full_like(hidden, 1e-3)]
    return walk


def _kind(block: Block) -> Any:
    """Equal for blocks that take the same time."""
    return tuple((type(layer.modules[0]), layer.shape) for layer in block.layers)


def _block_timing(run: RunSpec, stage: BlockStage, batch: Batch) -> dict[str, float]:
    """The timing of a block, by quantity."""
    layers, pipeline, gradients = stage.layers, stage.walk, stage.walk.gradients
    bare, forward, expert = _observed(run, (), batch, stage.observe)[0], 0.0, 0.0
    if run.offloaded is not None and gradients:
        pipeline.gradients = False
        forward, _ = _observed(run, (), batch, stage.observe)
        pipeline.gradients = True
    fused = [layer for layer in layers if run.all_token_experts(layer)]
    if fused:
        count = min(ALL_TOKEN_EXPERTS, *(layer.groups for layer in fused))
        parts = [dataclasses.replace(layer, span=(0, count), everywhere=True) for layer in fused]
        expert = max(0.0, _observed(run, parts, batch, stage.observe, gradients=False)[0] - bare) / count
    observed, storage = _observed(run, layers, batch, lambda observer: stage.observe(observer, True))
    return {"forward": forward, "bare": bare, "observed": observed, "storage": storage, "expert": expert}


class _TimedStorage(Storage):
    """Measures the time of its allocations, for which only the first batch waits."""

    seconds = 0.0

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype, what: str) -> Tensor:
        started = clock(self.device)
        tensor = super().zeros(shape, dtype, what)
        self.seconds += clock(self.device) - started
        return tensor


def _observed(
    run: RunSpec,
    layers: Sequence[PrunableLayer],
    batch: Batch,
    observe: Callable[[Observer], None],
    gradients: bool = True,
) -> tuple[float, float]:
    """Seconds of a batch under the hooks of some layers, and those of allocating their statistics."""
    spec, count, device = run.statistics, batch_size(batch), run.device
    with_gradients = {layer.name for layer in layers if gradients and spec.needs_gradients(layer)}
    plans = {layer.name: _affordable(run, layer, count) for layer in layers}
    compressed = any(plans[name].column_block is not None for name in with_gradients)
    samples, storage = STAGED if compressed else count, _TimedStorage(device)
    started = clock(device)
    with Observer(layers, spec.diagonal, with_gradients, samples, storage, plans) as observer:
        observe(observer)
    passed = clock(device)
    for layer in layers:
        if observer.reached(layer):
            observer.take(layer)
    taken = clock(device) - passed
    if compressed:  # of `STAGED` samples together
        taken *= count / STAGED
    return passed - started - storage.seconds + taken, storage.seconds


def _affordable(run: RunSpec, layer: PrunableLayer, samples: int) -> GradientPlan:
    """The form of a layer's gradients in a trial: that of the run, of the rows that fit in memory."""
    plan, d_out = run.statistics.plan(layer), layer.shape[0]
    size = 4 * d_out * numbers_per_row(layer.shape[1], samples, plan.column_block)
    rows = int(d_out * min(1.0, TRIAL_BYTES / size))
    if run.statistics.diagonal or rows == d_out or layer.groups > 1:
        return plan
    return dataclasses.replace(plan, rows=slice(0, max(1, rows)))


def _elements(batch: Batch) -> int:
    return next(iter(batch.values())).numel()
