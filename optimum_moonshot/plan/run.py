"""An estimate of a run before it starts: memory by place, passes over the data, seconds, and what does not fit.

The model, its configuration and its files stay as they are; nothing is downloaded or written. Text that is not
tokenized yet counts as `num_samples` windows of `sequence_length` tokens, the most that a run would use.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

from ..config import MoonshotConfig
from ..errors import require
from ..model.calls import Forward, called_by, model_device
from ..objective.patterns import Experts
from ..pipeline.selection import Subject, select
from ..recover.tuning import STEP_SAMPLES
from ..rotate.learning import learning_size
from .inputs import describe_run, example_batches, is_given
from .machine import MachineMemory
from .memory import Rehearsed, RunSpec, Trace, module_bytes
from .rehearsal import IMAGE_TOKENS, Rehearsal
from .report import DISK, HOST, Plan, peaks_of
from .trials import clock

# Host memory of the libraries that read and tokenize text.
TEXT_BYTES = 48 * 2**20
# Bytes per second that a disk is assumed to read and write.
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
    device_memory: int | str | None = None,
    host_memory: int | str | None = None,
    offload: str | None = None,
) -> Plan:
    """Plan a run, as `MoonshotPruner.plan`.

    `resumes` says whether results are written to a folder; the others are the arguments of `MachineMemory.of`.

    Raises:
        MoonshotError: the run is not possible with the model or the data, or cannot be planned.
    """
    message = "it has no plan; its statistics are a few numbers"
    require(config.pattern != Experts.kind, message, field="pattern", value=Experts.kind)
    machine = MachineMemory.of(device_memory, host_memory, offload)
    model, device, limits = subject.model, model_device(subject.model), machine or MachineMemory()
    weights, started, selection = device.type != "meta", clock(device), select(subject.model, config)
    batches = example_batches(subject, selection, calibration)
    with called_by(model, forward) if weights else nullcontext():
        run = dataclasses.replace(describe_run(subject, selection, batches, limits), resumes=resumes)
        ready, seconds = clock(device) - started, dict[str, float]()
        with Rehearsal.of_model(run) if weights else nullcontext() as rehearsal:
            trace = Trace(run, lambda phase, name: rehearsal.of(phase, name) if rehearsal else phase.by_shapes())
            text = "input_ids" in batches[0] and not is_given(calibration)
            trace.add("reading text", HOST, TEXT_BYTES if text else 0)
            passes = trace.all()
            if rehearsal is not None and machine is None:
                seconds = seconds_of(trace, ready)
    free = {str(place): int(size) for place, size in run.storage.free.items()}
    peaks = peaks_of(trace.snapshots, [*dict.fromkeys([str(run.storage.device), *free]), DISK])
    estimate = rehearsal.note(run) if rehearsal else "an estimate by the shapes of the layers, without weights"
    data, left_out = run.calibration, notes_of(run, bool(seconds))
    return Plan(
        config={**selection.config.to_dict(), "offload_dir": None},
        model=run.describe_model(weights),
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
        notes=tuple(dict.fromkeys([*subject.notes, *selection.notes, *data.notes, *left_out, estimate])),
    )


def seconds_of(trace: Trace, ready: float) -> dict[str, float]:
    """The seconds of every phase, and in "total"; `ready` are those before."""
    run, config, phases = trace.run, trace.run.selection.config, trace.phases
    seconds = {name: rehearsed.seconds for name, rehearsed in phases.items()}
    if config.rotation is not None:
        seconds["rotation"] += (phases["rotation"].seconds - phases["rotation"].around) * _learning_passes(run)
    if config.allocation == "fisher":
        seconds["allocation"] += _solving(run, phases["allocation"])
    seconds["calibration"] += ready
    seconds["solver"] = _solving(run, phases["calibration"])
    if config.recover is not None:
        # A step passes forward and backward, a rehearsed pass twice forward; the streams and losses forward alone.
        passes = 0.75 * config.recovery_steps * STEP_SAMPLES / run.count + 1
        seconds["recovery"] = passes * (seconds["recovery"] - phases["recovery"].around)
        seconds["recovery"] += 6 * seconds["solver"] if config.recover == "gradual" else 0
    if run.offloaded.total:
        steps, _ = learning_size(config, run.selection.layers)
        reads = READS if config.rotation is None else READS + ROTATION_READS + steps
        seconds["reading"] = reads * run.offloaded.total / DISK_RATE
    seconds["saving"] = sum(module_bytes(block.module) for block in run.selection.structure.blocks) / DISK_RATE
    return {**seconds, "total": sum(seconds.values())}


def _solving(run: RunSpec, rehearsed: Rehearsed) -> float:
    """Seconds in the solver of all matrices."""
    trials = [(layer, rehearsed.trials.get(run.key(layer))) for layer in run.selection.layers]
    return sum(trial.seconds * (layer.groups if layer.separate else 1) for layer, trial in trials if trial is not None)


def _learning_passes(run: RunSpec) -> float:
    """Learning a rotation in passes over the data: a step multiplies sampled weights with as many vectors as d_in."""
    layers, (steps, rows) = run.selection.layers, learning_size(run.selection.config, run.selection.layers)
    shapes = [layer.shape for layer in layers if layer.groups == 1]
    width = max((d_in for _, d_in in shapes), default=0)
    sampled = sum(min(d_out, rows or d_out) * d_in for d_out, d_in in shapes)
    tokens = run.count * (run.tokens or IMAGE_TOKENS)
    return LEARNING_PRODUCTS * steps * width / tokens * sampled / max(1, sum(d_out * d_in for d_out, d_in in shapes))


def notes_of(run: RunSpec, timed: bool) -> Iterator[str]:
    """The parts of a run that the estimate leaves out or assumes; `timed` says whether it has seconds."""
    config = run.selection.config
    if config.distills:
        yield "estimated as a recovery block by block: training end to end, where the memory suffices, takes more"
    if config.rotation is not None:
        yield "without the inverses of a rotation's Gram matrices"
    if timed and config.rotation is not None:
        yield "without the seconds of permuting channels for n:m patterns"
    if timed and config.recover is not None:
        yield "seconds of all steps of the recovery, which ends earlier where the held-out loss does not improve"
    if timed and run.offloaded.total:
        yield f"seconds of reading and saving at {DISK_RATE / 1e6:.0f} MB/s"
