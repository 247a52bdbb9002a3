"""The seconds of a run: measured seconds of a batch and of one matrix of every shape, times their numbers.

`passes.py` has the trials of a batch, and `solver.py` those of a matrix.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from ..data.batches import Batch, batch_size, take
from ..devices import wait_for
from ..errors import require
from ..model.calls import (
    frozen,
    to_device,
)
from ..pipeline.block_sequences import passing_on, without_weights
from ..pipeline.selection import Selection, Subject
from ..recover.tuning import EVALUATIONS, HELDOUT_SHARE, STEP_SAMPLES
from ..rotate.learning import PATIENCE
from ..rotate.permutation_search import search_products
from .footprint import kind_of
from .memory import Phase
from .passes import Trial
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


def _recovery_samples(run: RunSpec) -> float:
    """Samples that pass all blocks in a recovery; a backward pass takes as long as two forward passes."""
    config, heldout = run.selection.config, run.samples * EVALUATIONS / HELDOUT_SHARE
    samples = 3 * config.recovery_steps * STEP_SAMPLES + 2 * run.samples + heldout
    return 2 * samples if config.distills else samples  # the teacher runs too


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
