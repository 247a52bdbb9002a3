"""An estimate of a run before it starts: memory by place, passes over the data, seconds, and what does not fit.

The model, its configuration and its files stay as they are; nothing is downloaded or written. Text that is not
tokenized yet counts as `num_samples` windows of `sequence_length` tokens, the most that a run would use.
"""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from ..config import MoonshotConfig
from ..data.text import CalibrationData
from ..errors import require
from ..model.calls import Forward, called_by, model_device
from ..objective.patterns import Experts
from ..pipeline.selection import Selection, Subject, select
from ..recover.tuning import EVALUATIONS, HELDOUT_SHARE, STEP_SAMPLES
from ..rotate.learning import PATIENCE, learning_size
from ..rotate.permutation_search import search_products
from .inputs import build_spec, example_batches, is_given
from .machine import MachineMemory
from .memory import Rehearsed, RunSpec, Trace, module_bytes
from .rehearsal import Rehearsal
from .report import DISK, HOST, Overflow, Plan, Snapshot, peaks_of
from .trials import clock

# Host memory of the libraries that read and tokenize text.
TEXT_BYTES = 48 * 2**20
# Bytes per second that a disk is assumed to write.
DISK_RATE = 500e6
# Matrix products of a step of learning a rotation, per weight and coordinate.
LEARNING_PRODUCTS = 6
# How often a rotation onloads each block, apart from the steps of learning: search, trials, statistics, writing.
ROTATION_READS = 18
# The options that reduce the largest item of a peak.
HINTS = {
    "caches": "set offload_dir, or lower max_memory, num_samples or sequence_length",
    "statistics": 'set offload_dir, lower max_memory or num_samples, or fisher="shared", or solver="wanda"',
    "solver": 'lower num_samples, or fisher="shared" or lam=1, or solver="wanda"',
    "activations": "lower batch_size or sequence_length",
    "logits": "lower batch_size or sequence_length",
    "weights of a block": "a narrower dtype",
    "rotated weights": "another offload_dir, or no rotation",
    "results": "give a resume_dir",
}


def make_plan(
    subject: Subject,
    config: MoonshotConfig,
    calibration: Any,
    forward: Forward | None = None,
    resumes: bool = False,
    machine: MachineMemory | None = None,
    offload: str | None = None,
) -> Plan:
    """Plan a run.

    Args:
        subject: the model, which may be on the meta device, and its tokenizer or processor.
        config: of the run.
        calibration: batches of model inputs; anything else counts as text, or images, of full length.
        forward: (model, inputs) → output, or None for a plain call.
        resumes: whether the results of the run are written to a folder.
        machine: memory of another machine; None is this one.
        offload: "cpu" or "disk", where the blocks of a model without weights would be offloaded to.

    Raises:
        MoonshotError: the run is not possible with the model or the data, or cannot be planned.
    """
    message = "it has no plan; its statistics are a few numbers"
    require(config.pattern != Experts.kind, message, field="pattern", value=Experts.kind)
    model, device = subject.model, model_device(subject.model)
    weights, started, limits = device.type != "meta", clock(device), machine or MachineMemory()
    selection = select(model, config)
    batches = example_batches(subject, selection, calibration)
    with called_by(model, forward) if weights else nullcontext():
        run, prepared, extras = build_spec(subject, selection, batches, resumes, limits, offload)
        ready, seconds = clock(device) - started, dict[str, float]()
        with Rehearsal.of_model(prepared, extras, run) if weights else nullcontext() as rehearsal:
            trace = Trace(run, lambda phase, name: rehearsal.of(phase, name) if rehearsal else phase.by_shapes())
            text = "input_ids" in batches[0] and not is_given(calibration)
            trace.add("reading text", HOST, TEXT_BYTES if text else 0)
            passes = trace.all()
            if rehearsal is not None and machine is None:
                seconds = seconds_of(trace, ready, rehearsal.reading)
    data = prepared.calibration
    free = {str(place): int(size) for place, size in run.storage.free.items()}
    places = [*dict.fromkeys([str(run.device), *free]), DISK]
    peaks = peaks_of(trace.snapshots, places)
    overflows = *_model_overflows(model, run, limits), *trace.overflows, *_overflows(peaks, free)
    return Plan(
        config={**selection.config.to_dict(), "offload_dir": None},
        model=_describe(model, run),
        data=_describe_data(data, run),
        device=str(run.device),
        available=free,
        blocks=passes,
        snapshots=peaks,
        seconds=seconds,
        overflows=overflows,
        notes=tuple(dict.fromkeys([*subject.notes, *selection.notes, *data.notes, _estimate(rehearsal, run)])),
    )


def _estimate(rehearsal: Rehearsal | None, run: RunSpec) -> str:
    """The note on the figures' source."""
    if rehearsal is None:
        return "an estimate by the shapes of the layers, without weights"
    count = rehearsal.samples * run.tokens
    passed = f"{count:,} tokens" if count else f"{rehearsal.samples} samples"
    return f"an estimate from the first blocks of every kind, by passes of at most {passed}"


def _describe_data(data: CalibrationData, run: RunSpec) -> dict[str, Any]:
    sizes = {"num_samples": data.num_samples, "sequence_length": data.sequence_length}
    return sizes | {"batches": len(run.sizes), "batch_size": run.batch}


def _describe(model: nn.Module, run: RunSpec) -> dict[str, Any]:
    return {
        "class": type(model).__name__,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "bytes": module_bytes(model),
        "weights": model_device(model).type != "meta",
        "offloaded": None if run.offloaded is None else run.offloaded._asdict(),
    }


def seconds_of(trace: Trace, ready: float, reading: float) -> dict[str, float]:
    """The seconds of every phase, and in "total"; `ready` are those before, `reading` those of all blocks."""
    run, config, phases = trace.run, trace.run.selection.config, trace.phases
    seconds = {name: rehearsed.seconds for name, rehearsed in phases.items()}
    solving = {name: _solving(run, rehearsed) for name, rehearsed in phases.items()}
    if config.rotation is not None:
        seconds["rotation"] += rotation_products(run.selection) * _product_seconds(run.device)
    if config.allocation == "fisher":
        seconds["allocation"] += solving["allocation"]
    seconds |= {"calibration": seconds["calibration"] + ready, "solver": solving["calibration"]}
    if config.recover is not None:
        # Samples that pass all blocks forward and backward, as in the rehearsal, or forward alone.
        heldout = run.samples * EVALUATIONS / HELDOUT_SHARE
        samples = config.recovery_steps * STEP_SAMPLES + (2 * run.samples + heldout) / 3
        samples *= 2 if config.distills else 1  # the teacher runs too
        seconds["recovery"] = phases["recovery"].seconds * samples / run.samples
        seconds["recovery"] += 6 * seconds["solver"] if config.recover == "gradual" else 0
    if run.offloaded is not None:
        seconds["reading"] = reading * _times_read(run)
    seconds["saving"] = sum(module_bytes(block.module) for block in run.selection.structure.blocks) / DISK_RATE
    return {**seconds, "total": sum(seconds.values())}


def _solving(run: RunSpec, rehearsed: Rehearsed) -> float:
    """Seconds in the solver of all matrices."""
    trials = [(layer, rehearsed.trials.get(run.key(layer))) for layer in run.selection.layers]
    return sum(trial.seconds * (layer.groups if layer.separate else 1) for layer, trial in trials if trial is not None)


def rotation_products(selection: Selection) -> float:
    """Floating-point operations of learning a rotation and of searching channel permutations.

    Learning multiplies with every matrix, forward and backward. Neurons, assumed to be the widest inputs of a block,
    are permuted where they compete for the places of n:m.
    """
    config = selection.config
    single = [layer for layer in selection.layers if layer.groups == 1]
    width = max((layer.shape[1] for layer in single), default=0)
    steps, rows = learning_size(config, selection.layers)
    weights = sum(min(layer.shape[0], rows or layer.shape[0]) * layer.shape[1] for layer in single)
    products: float = steps * LEARNING_PRODUCTS * weights * width
    if rows is not None:  # evaluations of all rows, forward alone
        weights = sum(layer.shape[0] * layer.shape[1] for layer in single)
        products += steps / PATIENCE * LEARNING_PRODUCTS / 3 * weights * width
    for block in selection.structure.blocks:
        layers = [layer for layer in block.layers if layer.groups == 1]
        widths = {layer.shape[1] for layer in layers}
        neurons = [layer for layer in layers if len(widths) > 1 and layer.shape[1] == max(widths)]
        products += sum(search_products(layer.shape, [selection.pattern_of(layer)]) for layer in neurons)
    return products


def _product_seconds(device: torch.device) -> float:
    """Seconds of a floating-point operation in a matrix product."""
    matrix = torch.ones(512, 512, device=device)
    started = clock(device)
    for _ in range(4):
        matrix @ matrix
    return (clock(device) - started) / (4 * 512**3)


def _times_read(run: RunSpec) -> int:
    """How often a run reads every offloaded weight, besides saving."""
    config = run.selection.config
    passes = 3 if run.selection.needs_gradients else 2  # checks and calibration; with gradients a forward pass before
    allocation = {"fisher": 2, "owl": 1}.get(config.allocation if isinstance(config.allocation, str) else "", 0)
    rotation = 0 if config.rotation is None else ROTATION_READS + learning_size(config, run.selection.layers)[0]
    return passes + run.forward + allocation + rotation + (config.recover is not None)


def _model_overflows(model: nn.Module, run: RunSpec, machine: MachineMemory) -> Iterator[Overflow]:
    """The overflows of the model itself, on another machine; on this machine it is in memory already."""
    on_cpu, offloaded = run.device.type == "cpu", run.offloaded
    size = module_bytes(model) - (offloaded.total if offloaded else 0)
    limit = machine.host if machine.device is None and on_cpu else machine.device
    if limit is not None and size > limit:
        places = '"disk"' if on_cpu else '"cpu" or "disk"'
        hint = "a narrower dtype, or a larger device"
        hint += "" if offloaded else f"; or offload its layers: offload={places}"
        yield Overflow(str(run.device), "loading", "the model", size, limit, hint)
    if offloaded is not None and offloaded.place == HOST and machine.host and offloaded.total > machine.host:
        layers = "the model's layers"
        yield Overflow(HOST, "loading", layers, offloaded.total, machine.host, f'offload="{DISK}"')


def _overflows(peaks: Sequence[Snapshot], limits: dict[str, int]) -> Iterator[Overflow]:
    """The peak of each phase at each place, where it exceeds the free memory."""
    for place, limit in limits.items():
        for phase in dict.fromkeys(peak.phase for peak in peaks):
            peak = max((peak for peak in peaks if peak.phase == phase), key=lambda peak: peak.total(place))
            if peak.total(place) > limit:
                largest = max(peak.items, key=lambda item: peak.items[item].get(place, 0))
                hint = HINTS.get(largest, "a machine with more memory")
                yield Overflow(place, phase, peak.where, peak.total(place), limit, hint)
