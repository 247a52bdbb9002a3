"""How long a run takes, computed from short trials of its passes (`probe.py`) and of its solver (`solver.py`)."""

import dataclasses
import math
import time
from collections.abc import Sequence

import torch

from ..data.text import CalibrationData
from ..devices import wait_for
from ..model.calls import frozen, model_device
from ..model.layers import Block
from ..model.offload import RESIDENT
from ..model.weight_sums import block_sums
from ..pipeline.selection import Selection, Subject, check_weight
from ..recover.tuning import EVALUATIONS, HELDOUT_SHARE, STEP_SAMPLES
from ..rotate.permutation_search import search_products
from .memory import Visit
from .phases import allocation_run, rotation_run
from .probe import Timing, pass_seconds, total
from .run_spec import RunSpec, module_bytes, pattern_of
from .solver import clock, curve_seconds, solving_seconds

# Bytes per second that a disk is assumed to write.
DISK_RATE = 500e6
# Matrix products of a step of learning a rotation, per weight and coordinate.
LEARNING_PRODUCTS = 6
# How often a rotation onloads each block, apart from the steps of learning: search, trials, statistics, writing.
ROTATION_READS = 18


# The passes of the phases before a run.
_BEFORE = {"rotation": rotation_run, "allocation": allocation_run}


@dataclasses.dataclass(frozen=True)
class Seconds:
    """The measured seconds of one sample of full length, from which those of a run follow."""

    run: RunSpec
    passes: Timing
    before: dict[str, Timing]  # by phase before the run, where that needs gradients and the run none, or vice versa
    solving: dict[str, float]  # by layer
    curves: dict[str, float]  # by layer, of an allocation; empty without one
    product: float  # of one floating-point operation in a matrix product; 0 without a rotation
    ready: float  # from the start of the plan to its trials, and of checking offloaded weights
    onloading: float  # of all offloaded weights, once

    def of_block(self, visit: Visit) -> float:
        """Seconds of a block's passes and of its solver."""
        block, parts, passes = visit
        name, samples, solving = block.name, self.run.samples, sum(self.solving[layer.name] for layer in block.layers)
        if ("observed", name) not in self.passes:
            return passes * samples * self.passes["model", ""] + solving
        observed = self.passes["observed", name]
        bare = min(self.passes["bare", name], observed)
        # Each part has hooks on its own layers only; a slice of rows is observed twice, to rank and to solve.
        weights = 0
        for part in parts:
            twice = part.slices and not part.layers[0].separate
            weights += sum(math.prod(layer.shape) for layer in part.layers) * (2 if twice else 1)
        hooks = weights / sum(math.prod(layer.shape) for layer in block.layers)
        experts = sum(max(map(self.run.all_token_experts, part.layers)) for part in parts)
        seconds = passes * bare + hooks * (observed - bare) + experts * self.passes["expert", name]
        return samples * seconds + self.passes["storage", name] + solving

    def phases(self, visits: Sequence[Visit]) -> dict[str, float]:
        """Seconds by phase, and their total."""
        run, config, layers = self.run, self.run.selection.config, self.run.selection.layers
        capture, blocks_once = self.passes["capture", ""], total(self.passes, "observed")
        once = {phase: total(self.before.get(phase, self.passes), "capture", "observed") for phase in _BEFORE}
        seconds = {}
        if config.rotation is not None:
            products = ordering_products(run.selection) + learning_products(run.selection)
            seconds["rotation"] = once["rotation"] * run.samples + products * self.product
        if config.allocation == "fisher":
            curves = sum(self.curves.values())
            seconds["allocation"] = once["allocation"] * allocation_run(run).samples + curves
        solving = sum(self.solving[layer.name] for layer in layers)
        passes = sum(map(self.of_block, visits)) - solving
        seconds["calibration"] = self.ready + capture * run.samples * len(run.sequential) + passes
        seconds["solver"] = solving
        if config.recover == "distill":
            trained = 3 * config.recovery_steps * STEP_SAMPLES  # a backward pass takes as long as two forward passes
            passed = trained + run.samples * (1 + EVALUATIONS / HELDOUT_SHARE)
            seconds["recovery"] = passed * (capture + total(self.passes, "model", "bare"))
        elif config.recover is not None:
            samples = config.recovery_steps * STEP_SAMPLES + run.samples * (2 + EVALUATIONS / HELDOUT_SHARE)
            seconds["recovery"] = samples * blocks_once + (solving * 6 if config.recover == "gradual" else 0)
        if run.offloaded is not None:
            seconds["reading"] = self.onloading * _times_read(run.selection)
        structure = run.selection.structure
        saved = [parameter for block in structure.blocks for parameter in block.module.parameters()]
        saved += [layer.parameter for layer in structure.outside]
        seconds["saving"] = sum({id(each): each.nbytes for each in saved}.values()) / DISK_RATE
        return {**seconds, "total": sum(seconds.values())}


def ordering_products(selection: Selection) -> float:
    """Floating-point operations of the search for channel permutations, where neurons compete for the places of n:m.

    The neurons are assumed to be the widest inputs of a block.
    """
    products = 0.0
    for block in selection.structure.blocks:
        layers = [layer for layer in block.layers if layer.groups == 1]
        widths = {layer.shape[1] for layer in layers}
        for layer in layers:
            if len(widths) > 1 and layer.shape[1] == max(widths):
                products += search_products(layer.shape, [pattern_of(selection, layer)])
    return products


def learning_products(selection: Selection) -> float:
    """Floating-point operations of learning a rotation: products with every matrix, forward and backward."""
    layers, config = [layer for layer in selection.layers if layer.groups == 1], selection.config
    width = max((layer.shape[1] for layer in layers), default=0)
    weights = sum(min(layer.shape[0], config.rotation_rows or layer.shape[0]) * layer.shape[1] for layer in layers)
    return config.rotation_steps * LEARNING_PRODUCTS * weights * width


def _times_read(selection: Selection) -> int:
    """How often a run reads every offloaded weight, besides saving."""
    config = selection.config
    passes = 3 if selection.needs_gradients else 2  # checks and calibration; with gradients a forward pass before it
    allocation = {"fisher": 2, "owl": 1}.get(config.allocation if isinstance(config.allocation, str) else "", 0)
    rotation = 0 if config.rotation is None else ROTATION_READS + config.rotation_steps
    return passes + allocation + rotation + (config.recover is not None)


def _onloading_seconds(blocks: Sequence[Block]) -> tuple[float, float]:
    """Seconds of wall time to onload all offloaded blocks once, and to check their weights, from the first of them."""
    offloaded = [block for block in blocks if block.weights is not RESIDENT]
    block = offloaded[0]
    started = time.perf_counter()
    with block.onloaded():
        for tensor in (*block.module.parameters(), *block.module.buffers()):  # a mapped file is read on first access
            tensor.sum()
        wait_for(model_device(block.module))
        onloaded = time.perf_counter()
        for layer in block.layers:
            check_weight(layer)
        block_sums(block)
        checked = time.perf_counter()
        factor = sum(module_bytes(each.module) for each in offloaded) / max(1, module_bytes(block.module))
    return (onloaded - started) * factor, (checked - onloaded) * factor


def measure(subject: Subject, run: RunSpec, data: CalibrationData, ready: float) -> Seconds:
    """Run the trials, after `ready` seconds of the plan; the model and the random state stay as they are."""
    random = torch.random.get_rng_state()
    try:
        with frozen(subject.model):
            passes, before, gradients = pass_seconds(subject, run, data.batches[0]), {}, run.selection.needs_gradients
            config = run.selection.config
            planned = {"rotation": config.rotation is not None, "allocation": config.allocation == "fisher"}
            for phase in (phase for phase in _BEFORE if planned[phase]):
                other = _BEFORE[phase](run)
                if other.selection.needs_gradients != gradients:
                    before[phase] = pass_seconds(subject, other, data.batches[0])
            onloading, checks = (0.0, 0.0) if run.offloaded is None else _onloading_seconds(run.sequential[0])
            solving, product = solving_seconds(run), 0.0
            curves = curve_seconds(run) if planned["allocation"] else {}
            if planned["rotation"]:
                matrix = torch.ones(512, 512, device=run.device)
                started = clock(run.device)
                for _ in range(4):
                    matrix @ matrix
                product = (clock(run.device) - started) / (4 * 512**3)
            return Seconds(run, passes, before, solving, curves, product, ready + checks, onloading)
    finally:
        torch.random.set_rng_state(random)
