"""The seconds of a run: measured seconds of a batch and of one matrix of every shape, times their numbers.

A batch passes the model, and then, under the hooks of the run, the first block of every kind; `solver.py` has the
matrices.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ..calibration.accumulators import STAGED, GradientPlan
from ..calibration.observer import Observer
from ..calibration.storage import Storage
from ..data.batches import Batch, batch_size, take
from ..devices import wait_for
from ..errors import require
from ..model.calls import (
    BlockCall,
    first_tensor,
    frozen,
    join_hidden,
    run_model,
    split_hidden,
    to_device,
    without_caches,
)
from ..model.layers import Block, PrunableLayer
from ..model.losses import token_mask
from ..pipeline.block_sequences import passing_on, without_weights
from ..pipeline.selection import Selection, Subject
from ..pipeline.walk import FullModelPipeline, PassObserver
from ..recover.tuning import EVALUATIONS, HELDOUT_SHARE, STEP_SAMPLES
from ..rotate.learning import PATIENCE
from ..rotate.permutation_search import search_products
from .footprint import kind_of
from .memory import WHOLE, Phase, Visit, passes_of
from .solver import clock, curve_seconds, solving_seconds
from .spec import RunSpec, module_bytes, pattern_of

# Tokens of a trial batch, unless a single sample has more, and the number that an image counts as.
TRIAL_TOKENS, IMAGE_TOKENS = 1024, 64
# Bytes per second that a disk is assumed to write.
DISK_RATE = 500e6
# Matrix products of a step of learning a rotation, per weight and coordinate.
LEARNING_PRODUCTS = 6
# How often a rotation onloads each block, apart from the steps of learning: search, trials, statistics, writing.
ROTATION_READS = 18

PassRunner = Callable[[PassObserver], None]  # passes the trial batch, under an observer's hooks


def measure(subject: Subject, phases: Sequence[Phase], batch: Batch, ready: float) -> dict[str, float]:
    """The seconds of every phase, and in "total"; `ready` are the seconds of the plan so far.

    The model and the random state are unchanged.
    """
    random, run = torch.random.get_rng_state(), phases[-1].run
    config, length = run.selection.config, batch["input_ids"].shape[1] if "input_ids" in batch else IMAGE_TOKENS
    batch = to_device(take(batch, 0, max(1, TRIAL_TOKENS // length)), run.device)
    try:
        with frozen(subject.model), _first_blocks(subject.model, run, batch) as reading:
            trial = Trial.of(subject, run, batch)
            seconds = {phase.name: trial.seconds(phase) * phase.run.samples for phase in phases}
            solving = sum(solving_seconds(run).values())
            if config.rotation is not None:
                seconds["rotation"] += rotation_products(run.selection) * _product_seconds(run.device)
            if config.allocation == "fisher":
                seconds["allocation"] += sum(curve_seconds(run).values())
    finally:
        torch.random.set_rng_state(random)
    seconds["calibration"] += ready
    seconds["solver"] = solving
    if config.recover is not None:
        seconds["recovery"] = _recovery_samples(run) * trial.forward / batch_size(batch)
        seconds["recovery"] += 6 * solving if config.recover == "gradual" else 0
    if run.offloaded is not None:
        seconds["reading"] = reading * _times_read(run.selection)
    seconds["saving"] = sum(module_bytes(block.module) for block in run.selection.structure.blocks) / DISK_RATE
    return {**seconds, "total": sum(seconds.values())}


@contextmanager
def _first_blocks(model: nn.Module, run: RunSpec, batch: Batch) -> Iterator[float]:
    """Meanwhile the first offloaded block of every kind is onloaded, and the others return their input.

    Yields the seconds to read all offloaded blocks.
    """
    if run.offloaded is None:
        yield 0.0
        return
    ((blocks, _),) = run.sequential
    probe = without_weights(model, blocks, batch)
    message = "plan: the blocks' arguments cannot be seen without their weights; plan the model in memory"
    require(probe is not None, message)
    assert probe is not None
    first = list({kind_of(block): block for block in reversed(blocks)}.values())
    others = [block for block in blocks if block not in first]
    with ExitStack() as stack:
        started = time.perf_counter()
        for block in first:
            stack.enter_context(block.onloaded())
            for tensor in (*block.module.parameters(), *block.module.buffers()):
                tensor.sum()  # a mapped file is read on first access
        wait_for(run.device)
        seconds = (time.perf_counter() - started) / sum(module_bytes(block.module) for block in first)
        stack.enter_context(passing_on(others, probe.extras[: len(others)]))
        yield seconds * run.offloaded.total


@dataclass
class Trial:
    """A batch that has passed the model once."""

    subject: Subject
    batch: Batch
    calls: dict[Any, tuple[str, PassRunner]]  # kind of block → the first one's name, and its call on the batch
    outside: float  # seconds of a forward pass outside of all blocks
    forward: float  # seconds of a forward pass of all blocks

    @classmethod
    def of(cls, subject: Subject, run: RunSpec, batch: Batch) -> "Trial":
        calls: dict[Any, tuple[str, PassRunner]] = {}
        blocks, inside, started = run.selection.structure.blocks, 0.0, list[float]()

        def enter(block: Block, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            with suppress(KeyError):  # without a hidden state: its layers are observed by passes of the whole model
                hidden, others, named = split_hidden(args, kwargs)
                call = BlockCall(others, without_caches(named), hidden)
                calls.setdefault(kind_of(block), (block.name, partial(_run_block, block.module, call, batch)))
            started.append(clock(run.device))

        def leave(*_: Any) -> None:
            nonlocal inside
            inside += clock(run.device) - started.pop()

        with ExitStack() as stack, torch.no_grad():
            for block in blocks:
                stack.callback(block.module.register_forward_pre_hook(partial(enter, block), with_kwargs=True).remove)
                stack.callback(block.module.register_forward_hook(leave).remove)
            start = clock(run.device)
            run_model(subject.model, batch)
            outside = clock(run.device) - start - inside
        trial = cls(subject, batch, calls, outside, 0.0)
        alone = {kind: trial.observed(run, call, ()) for kind, (_, call) in calls.items()}
        trial.forward = sum(alone.get(kind_of(block), 0.0) for block in blocks)
        return trial

    def seconds(self, phase: Phase) -> float:
        """Seconds per sample in all passes of a phase."""
        run, visits = phase.run, {visit.block.name: visit for visit in phase.visits}
        total = self.forward + 3 * self.outside if run.gradients else 0.0  # capture: with the head's backward pass
        passes: dict[Any, float] = {}  # kind → seconds of a pass
        for kind, (name, call) in self.calls.items():
            if name in visits:
                passes[kind] = self._pass_seconds(run, visits[name], call)
        for visit in phase.visits:
            if visit.block.name == WHOLE:
                blocks = run.selection.structure.blocks if run.offloaded is None else ()
                model = FullModelPipeline(self.subject.model, blocks, [self.batch], run.gradients, self.subject.loss)
                total += visit.passes * self._pass_seconds(run, visit, model.run)
            else:
                total += visit.passes * passes[kind_of(visit.block)]
        return total / batch_size(self.batch)

    def _pass_seconds(self, run: RunSpec, visit: Visit, call: PassRunner) -> float:
        """Mean seconds of a pass of the trial batch at a block; of slices the first is measured."""
        forward, seconds, spec = self.observed(run, call, ()), 0.0, run.statistics
        for part in visit.parts:
            layers, plans = part.layers, {layer.name: spec.plan(layer) for layer in part.layers}
            if part.slices and layers[0].separate:
                layers = (replace(layers[0], span=(part.slices[0].start, part.slices[0].stop)),)
            elif part.slices:
                plans = {name: replace(plan, rows=part.slices[0]) for name, plan in plans.items()}
            passes, observed = passes_of(run, part), self.observed(run, call, layers, plans)
            # Half of the passes send all tokens to every under-calibrated expert, not to `top_k` of them.
            more = [layer.groups / run.footprint.top_k[layer.name] for layer in layers if run.all_token_experts(layer)]
            seconds += passes * observed + (passes // 2 * (max(more) - 1) * (observed - forward) if more else 0.0)
        advancing = visit.passes - sum(passes_of(run, part) for part in visit.parts)
        return (seconds + advancing * forward * (3 if run.gradients else 1)) / visit.passes

    def observed(
        self,
        run: RunSpec,
        call: PassRunner,
        layers: Sequence[PrunableLayer],
        plans: Mapping[str, GradientPlan] | None = None,
    ) -> float:
        """Seconds of a pass of the trial batch under the hooks of some layers.

        The second of two passes is timed: the first one allocates the memory of the statistics.
        """
        plans, spec, device = plans or {}, run.statistics, run.device
        with_gradients = {layer.name for layer in layers if layer.name in plans and spec.needs_gradients(layer)}
        compressed = any(plans[name].column_block is not None for name in with_gradients)
        count = batch_size(self.batch)
        samples = STAGED if compressed else count
        with Observer(layers, spec.diagonal, with_gradients, samples, Storage(device), plans) as observer:
            call(observer)
            passing = clock(device)
            call(observer)
        passed = clock(device)
        for layer in layers:
            if observer.reached(layer):
                observer.take(layer)
        adding = clock(device) - passed  # of `STAGED` samples, where they are compressed
        return passed - passing + (adding * count / STAGED if compressed else 0.0)


def _run_block(module: nn.Module, call: BlockCall, batch: Batch, observer: PassObserver) -> None:
    """Run a block on its arguments under an observer, and backward if it needs gradients."""
    gradients, mask = bool(observer.gradients), token_mask(batch)
    observer.begin(0, batch_size(batch), mask)
    with torch.set_grad_enabled(gradients):
        args, kwargs = join_hidden(call.hidden.detach().requires_grad_(gradients), call)
        output = first_tensor(module(*args, **kwargs))
        if gradients:
            torch.autograd.backward(output, output.detach())
    observer.end()


def _recovery_samples(run: RunSpec) -> float:
    """Samples that pass all blocks in a recovery; a backward pass takes as long as two forward passes."""
    config, heldout = run.selection.config, run.samples * EVALUATIONS / HELDOUT_SHARE
    samples = 3 * config.recovery_steps * STEP_SAMPLES + 2 * run.samples + heldout
    return 2 * samples if config.recover == "distill" else samples  # the teacher runs too


def rotation_products(selection: Selection) -> float:
    """Floating-point operations of learning a rotation and of searching channel permutations.

    Learning multiplies with every matrix, forward and backward. Neurons, assumed to be the widest inputs of a block,
    are permuted where they compete for the places of n:m.
    """
    config = selection.config
    single = [layer for layer in selection.layers if layer.groups == 1]
    width = max((layer.shape[1] for layer in single), default=0)
    rows = config.rotation_rows
    weights = sum(min(layer.shape[0], rows or layer.shape[0]) * layer.shape[1] for layer in single)
    products: float = config.rotation_steps * LEARNING_PRODUCTS * weights * width
    if rows is not None:  # evaluations of all rows, forward alone
        weights = sum(layer.shape[0] * layer.shape[1] for layer in single)
        products += config.rotation_steps / PATIENCE * LEARNING_PRODUCTS / 3 * weights * width
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
