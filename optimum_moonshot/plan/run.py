"""An estimate of a run before it starts: memory by place, passes over the data, seconds, and what does not fit.

The model, its configuration and its files stay as they are; nothing is downloaded or written. Text that is not
tokenized yet counts as `num_samples` windows of `sequence_length` tokens, the most that a run would use.
"""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

from torch import nn

from ..config import MoonshotConfig
from ..errors import require
from ..model.calls import Forward, called_by, model_device
from ..objective.patterns import Experts
from ..pipeline.selection import Subject, select
from .inputs import MachineMemory, build_spec, example_batches, is_given
from .memory import MemoryTrace, Phase, count_phases
from .report import DISK, HOST, BlockPlan, Overflow, Plan, Snapshot, peaks_of
from .seconds import measure
from .solver import clock
from .spec import RunSpec, module_bytes

# Host memory of the libraries that read and tokenize text.
TEXT_BYTES = 48 * 2**20
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
        run, data = build_spec(subject, selection, batches, forward, resumes, limits, offload)
        trace = MemoryTrace(run)
        trace.add("reading text", HOST, TEXT_BYTES if "input_ids" in batches[0] and not is_given(calibration) else 0)
        phases = list(count_phases(trace, model))
        ready = clock(device) - started
        seconds = measure(subject, phases, data.batches[0], ready) if weights and machine is None else {}
    free = {str(place): int(size) for place, size in run.storage.free.items()}
    places = [*dict.fromkeys([str(run.device), *free]), DISK]
    peaks = peaks_of(trace.snapshots, places)
    overflows = *_model_overflows(model, run, limits), *trace.overflows, *_overflows(peaks, free)
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
        blocks=_block_plans(run, phases[-1]),
        snapshots=peaks,
        seconds=seconds,
        overflows=overflows,
        notes=tuple(dict.fromkeys([*subject.notes, *selection.notes, *data.notes])),
    )


def _describe(model: nn.Module, run: RunSpec) -> dict[str, Any]:
    return {
        "class": type(model).__name__,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "bytes": module_bytes(model),
        "weights": model_device(model).type != "meta",
        "offloaded": None if run.offloaded is None else run.offloaded._asdict(),
    }


def _block_plans(run: RunSpec, calibration: Phase) -> tuple[BlockPlan, ...]:
    order = {block.name: index for index, block in enumerate(run.selection.structure.blocks)}
    visits = sorted(calibration.visits, key=lambda visit: order.get(visit.block.name, len(order)))
    slices = [{part.layers[0].name: len(part.slices) for part in visit.parts if part.slices} for visit in visits]
    return tuple(
        BlockPlan(visit.block.name, len(visit.parts), visit.passes, sliced)
        for visit, sliced in zip(visits, slices, strict=True)
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


def _overflows(peaks: Sequence[Snapshot], limits: dict[str, int]) -> Iterator[Overflow]:
    """The peak of each phase at each place, where it exceeds the free memory."""
    for place, limit in limits.items():
        for phase in dict.fromkeys(peak.phase for peak in peaks):
            peak = max((peak for peak in peaks if peak.phase == phase), key=lambda peak: peak.total(place))
            if peak.total(place) > limit:
                largest = max(peak.items, key=lambda item: peak.items[item].get(place, 0))
                hint = HINTS.get(largest, "a machine with more memory")
                yield Overflow(place, phase, peak.where, peak.total(place), limit, hint)
