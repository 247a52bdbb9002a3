"""An estimate of a run before it starts: memory by place, passes over the data, seconds, and what does not fit.

The model, its configuration and its files stay as they are; nothing is downloaded or written. Text that is not
tokenized yet counts as `num_samples` windows of `sequence_length` tokens, the most that a run would use.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

from torch import nn

from ..config import MoonshotConfig
from ..devices import is_gpu
from ..errors import require
from ..model.calls import Forward, called_by, model_device
from ..objective.patterns import Experts
from ..pipeline.selection import Subject, select
from .inputs import MachineMemory, build_spec, example_batches, is_given
from .memory import MemoryTrace, Visit, count_phases
from .report import DISK, HOST, BlockPlan, Overflow, Plan, Snapshot, peaks_of
from .seconds import Seconds, measure
from .solver import clock
from .spec import RunSpec, module_bytes, offloaded_blocks

# Host memory of the libraries that read and tokenize text.
TEXT_BYTES = 48 * 2**20


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
    offloaded = offloaded_blocks(selection.structure, offload, limits.device is None and not is_gpu(device))
    batches = example_batches(subject, selection, calibration)
    with called_by(model, forward) if weights else nullcontext():
        run, data = build_spec(subject, selection, batches, forward, resumes, limits, offloaded)
        trace = MemoryTrace(run)
        trace.add("reading text", HOST, TEXT_BYTES if "input_ids" in batches[0] and not is_given(calibration) else 0)
        phases = list(count_phases(trace, model))
        ready = clock(device) - started
        seconds = measure(subject, phases, data.batches[0], ready) if weights and machine is None else None
    free = {str(place): int(size) for place, size in run.storage.free.items()}
    places = [*dict.fromkeys([str(run.device), *free]), DISK]
    peaks = peaks_of(trace.snapshots, places)
    overflows = *_model_overflows(model, run, limits), *trace.overflows, *_overflows(peaks, free, run)
    return Plan(
        config={**selection.config.to_dict(), "offload_dir": None},
        model=_describe(model, run),
        data={
            "num_samples": data.num_samples,
            "sequence_length": data.sequence_length,
            "batches": len(run.sizes),
            "batch_size": run.batch,
        },
        device=str(run.device),
        available=free,
        budget={str(place): limit for place, limit in run.storage.limits.items()},
        blocks=tuple(_block_plans(trace, phases[-1].visits, places, seconds)),
        snapshots=peaks,
        seconds={} if seconds is None else seconds.phases,
        overflows=overflows,
        notes=tuple(dict.fromkeys([*subject.notes, *selection.notes, *data.notes])),
    )


def _describe(model: nn.Module, run: RunSpec) -> dict[str, Any]:
    return {
        "class": type(model).__name__,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "bytes": module_bytes(model),
        "weights": model_device(model).type != "meta",
        "offloaded": None if run.offloaded is None else dataclasses.asdict(run.offloaded),
    }


def _block_plans(
    trace: MemoryTrace, visits: list[Visit], places: Sequence[str], seconds: Seconds | None
) -> Iterator[BlockPlan]:
    """The plans of the blocks in the model's order; layers outside of all sequences are last."""
    order = {block.name: index for index, block in enumerate(trace.run.selection.structure.blocks)}
    for block, parts, passes in sorted(visits, key=lambda visit: order.get(visit.block.name, len(order))):
        names = {block.name, *(layer.name for layer in block.layers)}
        phases = ("calibration", "solver")
        snapshots = [snapshot for snapshot in trace.snapshots if snapshot.where in names and snapshot.phase in phases]
        peaks = {place: max(snapshot.total(place) for snapshot in snapshots) for place in places}
        yield BlockPlan(
            name=block.name,
            layers=len(block.layers),
            rounds=len(parts),
            passes=passes,
            parts={part.layers[0].name: len(part.slices) for part in parts if part.slices},
            bytes={place: size for place, size in peaks.items() if size},
            seconds=None if seconds is None else seconds.blocks[block.name],
        )


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


def _overflows(peaks: Sequence[Snapshot], limits: dict[str, int], run: RunSpec) -> Iterator[Overflow]:
    """The peak of each phase at each place, where it exceeds the free memory."""
    for place, limit in limits.items():
        for phase in dict.fromkeys(peak.phase for peak in peaks):
            peak = max((peak for peak in peaks if peak.phase == phase), key=lambda peak: peak.total(place))
            if peak.total(place) > limit:
                hint = _hint(peak, place, run)
                yield Overflow(place, phase, peak.where, peak.total(place), limit, hint)


def _hint(peak: Snapshot, place: str, run: RunSpec) -> str:
    """The options that reduce the largest item of a peak."""
    largest = max(peak.items, key=lambda item: peak.items[item].get(place, 0))
    host, shorter = place == HOST, f"lower {'batch_size' if run.batch > 1 else 'sequence_length'}"
    fisher = 'lower num_samples, or fisher="shared" or lam=1, or ' if run.gradients else ""
    options = {
        "caches": f"{'set offload_dir' if host else 'lower max_memory'}, or lower num_samples or sequence_length",
        "statistics": f'{"set offload_dir and " if host else ""}lower max_memory, or {fisher}solver="wanda"',
        "solver": f'{fisher}solver="wanda"',
        "activations": shorter,
        "logits": shorter,
        "weights of a block": "a narrower dtype",
        "rotated weights": 'offload="disk", or no rotation' if host else "another offload_dir, or no rotation",
        "results": "a machine with more memory" if run.resumes else "give a resume_dir",
    }
    return options.get(largest, "a machine with more memory")
