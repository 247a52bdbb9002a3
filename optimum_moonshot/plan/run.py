"""An estimate of a run before it starts: memory by place, passes over the data, seconds, and what does not fit.

The model, its configuration and its files stay as they are; nothing is downloaded or written. Text that is not
tokenized yet counts as `num_samples` windows of `sequence_length` tokens, the most that a run would use.
"""

import dataclasses
from contextlib import nullcontext
from typing import Any

from ..config import MoonshotConfig
from ..data.batches import Batch, split_batches, take
from ..data.text import load_calibration
from ..errors import MoonshotError, require
from ..model.calls import Forward, called_by, frozen, model_device, to_device
from ..objective.patterns import Experts
from ..pipeline.backoff import Backoff
from ..pipeline.block_sequences import without_weights
from ..pipeline.calibration_data import with_room
from ..pipeline.inputs import prepare
from ..pipeline.model_pipeline import block_sequences
from ..pipeline.selection import Selection, Subject, select
from ..prune.prefix import runs_forward
from ..recover.tuning import STEP_SAMPLES
from .inputs import example_batches, is_given, sizes
from .machine import MachineMemory, offloaded_blocks
from .memory import Rehearsed, RunSpec, Trace, module_bytes
from .rehearsal import IMAGE_TOKENS, Rehearsal
from .report import DISK, HOST, Plan, peaks_of
from .trials import clock

# Host memory of the libraries that read and tokenize text.
TEXT_BYTES = 48 * 2**20
# Bytes per second that a disk is assumed to write.
DISK_RATE = 500e6
# Products of a step of learning a rotation, by those of a weight with a token in a pass forward and backward.
LEARNING_PRODUCTS = 0.75
# How often a run onloads each block: checks, calibration and saving; and a rotation, apart from its steps of learning:
# search, trials, statistics, writing.
READS, ROTATION_READS = 3, 18


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
    model, device, limits = subject.model, model_device(subject.model), machine or MachineMemory()
    weights, started, selection = device.type != "meta", clock(device), select(subject.model, config)
    batches = example_batches(subject, selection, calibration)
    with called_by(model, forward) if weights else nullcontext():
        run = dataclasses.replace(describe_run(subject, selection, batches, limits, offload), resumes=resumes)
        ready, seconds = clock(device) - started, dict[str, float]()
        with Rehearsal.of_model(run) if weights else nullcontext() as rehearsal:
            trace = Trace(run, lambda phase, name: rehearsal.of(phase, name) if rehearsal else phase.by_shapes())
            text = "input_ids" in batches[0] and not is_given(calibration)
            trace.add("reading text", HOST, TEXT_BYTES if text else 0)
            passes = trace.all()
            if rehearsal is not None and machine is None:
                seconds = seconds_of(trace, ready, rehearsal.reading)
    free = {str(place): int(size) for place, size in run.storage.free.items()}
    peaks = peaks_of(trace.snapshots, [*dict.fromkeys([str(run.storage.device), *free]), DISK])
    estimate = rehearsal.note(run) if rehearsal else "an estimate by the shapes of the layers, without weights"
    data, offloaded = run.calibration, run.offloaded
    return Plan(
        config={**selection.config.to_dict(), "offload_dir": None},
        model={
            "class": type(model).__name__,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "bytes": module_bytes(model),
            "weights": weights,
            "offloaded": None if offloaded is None else offloaded._asdict(),
        },
        data={
            "num_samples": data.num_samples,
            "sequence_length": data.sequence_length,
            "batches": len(data.batches),
            "batch_size": run.batch,
        },
        device=str(run.storage.device),
        available=free,
        blocks=passes,
        snapshots=peaks,
        seconds=seconds,
        overflows=(*trace.overflows, *limits.overflows(run, peaks)),
        notes=tuple(dict.fromkeys([*subject.notes, *selection.notes, *data.notes, estimate])),
    )


def describe_run(
    subject: Subject, selection: Selection, batches: list[Batch], machine: MachineMemory, offload: str | None
) -> RunSpec:
    """Describe a run, load its data in batches, and find with which extras its blocks can return their input.

    Raises `MoonshotError` for a run that cannot be planned.
    """
    model, device, blocks = subject.model, model_device(subject.model), selection.structure.blocks
    offloaded = offloaded_blocks(selection.structure, offload, device if machine.device is None else None)
    storage, in_turn, extras = machine.storage(model, selection.config, offloaded), blocks, None
    if device.type != "meta" and offloaded is None:
        prepared = prepare(subject, selection, batches)
        with frozen(model):
            tested = block_sequences(prepared, selection.needs_gradients).sequential
        data, in_turn = prepared.calibration, tuple(block for sequence in tested for block in sequence.blocks)
        extras = next((sequence.extras for sequence in tested if sequence.blocks == blocks), None)
    else:
        data = with_room(load_calibration(batches, None, **sizes(selection)), selection, model)
        if selection.needs_losses and any(layer.separate for layer in selection.layers):
            data = dataclasses.replace(data, batches=split_batches(data.batches, 1))
        if device.type != "meta":
            probe = without_weights(model, blocks, to_device(take(data.batches[0], 0, 1), device))
            if probe is None:
                hint = "without `offload` they can be pruned, and planned"
                raise MoonshotError("plan: the model's blocks are not sequential", hint=hint)
            extras = probe.extras
    forward = (extras is not None or device.type == "meta") and runs_forward(selection)
    return RunSpec(
        subject,
        selection,
        data,
        storage,
        Backoff(storage),
        in_turn=in_turn,
        extras=extras,
        offloaded=offloaded,
        gradients=selection.needs_gradients,
        forward=forward,
    )


def seconds_of(trace: Trace, ready: float, reading: float) -> dict[str, float]:
    """The seconds of every phase, and in "total"; `ready` are those before, `reading` those of all blocks."""
    run, config, phases = trace.run, trace.run.selection.config, trace.phases
    seconds = {name: rehearsed.seconds for name, rehearsed in phases.items()}
    if config.rotation is not None:
        seconds["rotation"] += (phases["rotation"].seconds - phases["rotation"].around) * _learning_passes(run)
    if config.allocation == "fisher":
        seconds["allocation"] += _solving(run, phases["allocation"])
    seconds["calibration"] += ready
    seconds["solver"] = _solving(run, phases["calibration"])
    if config.recover is not None:
        # A step passes forward and backward, a rehearsed pass twice forward; the streams and losses forward alone. A
        # distillation has a teacher and a head besides.
        seconds["recovery"] -= 0 if config.distills else phases["recovery"].around
        passes = 0.75 * config.recovery_steps * STEP_SAMPLES / run.count + 1
        seconds["recovery"] *= passes * (2 if config.distills else 1)
        seconds["recovery"] += 6 * seconds["solver"] if config.recover == "gradual" else 0
    if run.offloaded is not None:
        reads = READS if config.rotation is None else READS + ROTATION_READS + config.rotation_steps
        seconds["reading"] = reading * reads
    seconds["saving"] = sum(module_bytes(block.module) for block in run.selection.structure.blocks) / DISK_RATE
    return {**seconds, "total": sum(seconds.values())}


def _solving(run: RunSpec, rehearsed: Rehearsed) -> float:
    """Seconds in the solver of all matrices."""
    trials = [(layer, rehearsed.trials.get(run.key(layer))) for layer in run.selection.layers]
    return sum(trial.seconds * (layer.groups if layer.separate else 1) for layer, trial in trials if trial is not None)


def _learning_passes(run: RunSpec) -> float:
    """Learning a rotation in passes over the data: a step multiplies each weight with as many vectors as it is wide."""
    config, layers = run.selection.config, [layer for layer in run.selection.layers if layer.groups == 1]
    width = max((layer.shape[1] for layer in layers), default=0)
    rows = [min(layer.shape[0], config.rotation_rows or layer.shape[0]) for layer in layers]
    share = sum(rows) / max(1, sum(layer.shape[0] for layer in layers))
    return LEARNING_PRODUCTS * config.rotation_steps * share * width / (run.count * (run.tokens or IMAGE_TOKENS))
