"""An estimate of a run before it: memory by place, passes over the data, seconds, and what would not fit.

The model, its configuration and its files stay as they are; nothing is downloaded or written. Text that is not there
yet counts as `num_samples` windows of `sequence_length` tokens, the longest that a run would take.
"""

import dataclasses
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from ..calibration.storage import Storage, free_memory
from ..config import MoonshotConfig, memory_size
from ..data.batches import Batch, batch_size, split_batches
from ..data.text import LONGEST, CalibrationData, load_calibration
from ..devices import is_gpu
from ..errors import MoonshotError, Option, Text, reason, require
from ..model.calls import Forward, called_by, frozen, model_device
from ..model.layers import Block
from ..model.losses import is_causal
from ..model.model_info import embedded_tokens, max_positions, reads_images_and_text, takes_images, vocabulary_size
from ..model.onloading import all_onloaded
from ..objective.patterns import Experts
from ..pipeline.block_sequences import find_block_sequences
from ..pipeline.inputs import Subject, prepare, with_room
from ..pipeline.selection import Selection, select
from ..reports.plan import DISK, BlockPlan, Overflow, Plan, Snapshot, most_of
from .block_footprint import ModelFootprint, chain_names, model_footprint
from .memory import MemoryTrace, Visit, count_blocks
from .offloaded import Away, blocks_away, module_bytes
from .phases import allocation, recovery, rotation, saving, writing
from .run_spec import CPU, RunSpec
from .seconds import Seconds, measure
from .solver import clock

# What reading and tokenizing text leaves in host memory: the libraries that do it.
TEXT_BYTES = 48 * 2**20
NO_ACTIVATIONS = "activations are not in the figures, since the model cannot run on tensors without memory"


@dataclasses.dataclass(frozen=True)
class Room:
    """What a plan reckons with in place of what this machine has free; None asks the machine."""

    device: int | None = None  # bytes of the device in all, with the model on it
    host: int | None = None  # bytes of host memory that are free

    @classmethod
    def of(cls, device_memory: int | str | None, host_memory: int | str | None) -> "Room | None":
        """The sizes of another machine, in bytes or as text; None if neither is given."""
        sizes = {"device_memory": device_memory, "host_memory": host_memory}
        numbers = {name: None if size is None else memory_size(name, size) for name, size in sizes.items()}
        return None if not any(numbers.values()) else cls(numbers["device_memory"], numbers["host_memory"])


def make_plan(
    subject: Subject,
    config: MoonshotConfig,
    calibration: Any,
    forward: Forward | None = None,
    resumes: bool = False,
    room: Room | None = None,
    offload: str | None = None,
) -> Plan:
    """Plan a run.

    Args:
        subject: the model and what belongs to it; it may be on the meta device.
        config: how.
        calibration: batches of model inputs are looked at; anything else counts as text, or images, of full length.
        forward: (model, inputs) → output, or None for a plain call.
        resumes: whether the run's results go to a folder.
        room: what a machine other than this one has.
        offload: "cpu" or "disk", where a model without weights would have its blocks; one with weights has them where
            they are.

    Raises:
        MoonshotError: a model or data that cannot be pruned so, or of which no plan can be made.
    """
    message = "it has no plan; its statistics are a few numbers"
    require(config.pattern != Experts.kind, message, field="pattern", value=Experts.kind)
    model, own = subject.model, model_device(subject.model)
    weights, started = own.type != "meta", clock(own)
    selection = select(model, config)
    away = blocks_away(selection.structure, offload)
    on_cpu = away is not None and away.place == "cpu" and (room is None or room.device is None) and not is_gpu(own)
    hint = Text("use {}, or give {}", Option("offload", "disk"), "device_memory")
    require(not on_cpu, "the model is on the CPU anyway", field="offload", value="cpu", hint=hint)
    batches = example_batches(subject, selection, calibration)
    text = "input_ids" in batches[0] and not _given(calibration)
    with called_by(model, forward) if weights else nullcontext():
        data, storage, chains = _ready(subject, selection, batches, weights, room, away)
        outline, notes = _outline(subject, selection, data, storage, chains, forward, resumes, away)
        trace, blocks = _walk(outline, model, text)
        ready = clock(own) - started
        seconds = measure(subject, outline, data, ready) if weights and room is None else None
    trace.overflows = [*_too_large(model, outline, room), *trace.overflows]
    return _plan(subject, outline, data, trace, blocks, seconds, weights, tuple(notes))


def example_batches(subject: Subject, selection: Selection, calibration: Any) -> list[Batch]:
    """The batches that a run would have: those given, or random ones of their size.

    Args:
        subject: the model and what belongs to it.
        selection: of `select` for it.
        calibration: as for `make_plan`.

    Raises:
        MoonshotError: a model whose inputs cannot be made up.
    """
    config, model = selection.config, subject.model
    options = {"num_samples": config.num_samples, "batch_size": config.batch_size, "seed": config.seed}
    if _given(calibration):
        return load_calibration(calibration, subject.tokenizer, max_positions=max_positions(model), **options).batches
    name = type(model).__name__
    mend = f"plan: {name}'s inputs cannot be made up: give calibration batches, a list of dictionaries of model inputs"
    require(not reads_images_and_text(model), mend)
    generator = torch.Generator().manual_seed(config.seed)
    sizes = [
        min(config.batch_size, config.num_samples - done) for done in range(0, config.num_samples, config.batch_size)
    ]
    made = _images if takes_images(model) else _tokens
    return [made(subject, selection, count, generator, mend) for count in sizes]


def _given(calibration: Any) -> bool:
    """Whether it is model inputs, which can be looked at and stay as they are."""
    return isinstance(calibration, list | tuple) and len(calibration) > 0 and not isinstance(calibration[0], str)


def _tokens(subject: Subject, selection: Selection, count: int, generator: torch.Generator, mend: str) -> Batch:
    model = subject.model
    size = embedded_tokens(model)
    if size is None:
        raise MoonshotError(mend)
    longest = max_positions(model)
    length = selection.config.sequence_length or min(longest or LONGEST, LONGEST)
    message = f"the model has {longest} positions"
    require(longest is None or length <= longest, message, field="sequence_length", value=length)
    ids = torch.randint(size, (count, length), generator=generator)
    return {"input_ids": ids} if is_causal(model) else {"input_ids": ids, "labels": ids}


def _images(subject: Subject, selection: Selection, count: int, generator: torch.Generator, mend: str) -> Batch:
    config: Any = getattr(subject.model, "config", None)
    side, channels = getattr(config, "image_size", None), getattr(config, "num_channels", 3)
    sizes = getattr(subject.processor, "crop_size", None) or getattr(subject.processor, "size", None) or {}
    side = side or sizes.get("height") or sizes.get("shortest_edge")
    require(side is not None, mend)
    height, width = side if isinstance(side, list | tuple) else (side, side)
    images = torch.randn(count, channels, height, width, generator=generator)
    labels = {"labels": torch.zeros(count, dtype=torch.int64)} if selection.needs_losses else {}
    return {"pixel_values": images, **labels}


def _ready(
    subject: Subject,
    selection: Selection,
    batches: list[Batch],
    weights: bool,
    room: Room | None,
    away: Away | None,
) -> tuple[CalibrationData, Storage, tuple[Sequence[tuple[Block, ...]], Sequence[Block]] | None]:
    """The data in the batches that pass, the memory there is, and, where the model has weights, its chains."""
    model, config = subject.model, selection.config
    if weights and away is None:
        prepared = prepare(subject, selection, batches)
        data = prepared.data
        assert data is not None
        structure, gradients = selection.structure, selection.needs_gradients
        with frozen(model), all_onloaded(structure.blocks):
            found = find_block_sequences(model, structure.blocks, prepared.probe, gradients, subject.loss)
        chains = (found.sequential, found.non_sequential)
    else:
        data = load_calibration(
            batches, None, num_samples=config.num_samples, batch_size=config.batch_size, seed=config.seed
        )
        data, chains = with_room(data, selection, model), None
        if selection.needs_losses and any(layer.adapter.separate for layer in selection.layers):
            data = dataclasses.replace(data, batches=split_batches(data.batches, 1))
    device, free = _free(model, room, away)
    return data, Storage(device, config.max_memory_bytes, config.offload_dir, free), chains


def _free(model: nn.Module, room: Room | None, away: Away | None) -> tuple[torch.device, dict[torch.device, int]]:
    """Where the model will be, and what is free there beside what it always has there, and in host memory."""
    room, own = room or Room(), model_device(model)
    held = _always_there(model, away)
    device = own
    if own.type == "meta":
        device = CPU if room.device is None else torch.device("cuda")
    known = free_memory(CPU if device != own else device)
    host = known[CPU] if room.host is None else room.host
    if device.type == "cpu":
        total = (host if own.type != "meta" else host - held) if room.device is None else room.device - held
        return device, {device: max(0, total)}
    on_device = known.get(device, 0) if room.device is None else room.device - held
    host -= away.total if away is not None and away.place == str(CPU) and own.type == "meta" else 0
    return device, {device: max(0, on_device), CPU: max(0, host)}


def _always_there(model: nn.Module, away: Away | None) -> int:
    """Bytes of a model without its blocks that are elsewhere."""
    return module_bytes(model) - (0 if away is None else away.total)


def _outline(
    subject: Subject,
    selection: Selection,
    data: CalibrationData,
    storage: Storage,
    chains: tuple[Sequence[tuple[Block, ...]], Sequence[Block]] | None,
    forward: Forward | None,
    resumes: bool,
    away: Away | None,
) -> tuple[RunSpec, list[str]]:
    model, notes = subject.model, list(data.notes)
    largest = max(data.batches, key=lambda batch: next(iter(batch.values())).numel())
    try:
        footprint = model_footprint(model, selection.structure, largest, selection.needs_gradients, forward)
    except Exception as error:  # a model may ask for a value anywhere
        told = f"{NO_ACTIVATIONS} ({reason(error)[:200]})"
        if chains is None:
            raise MoonshotError(f"plan: {told}: load its weights, and plan with these") from error
        notes.append(told)
        hidden = _hidden_bytes(model, data)
        footprint = ModelFootprint({}, (), frozenset(), hidden, 0, 0)
    if chains is None:
        chains = chain_names(footprint, selection.structure.blocks)
        hint = Text("without {} they can be pruned, and planned", "offload")
        one = away is None or (len(chains[0]) == 1 and not chains[1])
        require(one, "plan: the model's layers are no chain", hint=hint)
    outline = RunSpec(
        selection=selection,
        sequential=tuple(chains[0]),
        non_sequential=tuple(chains[1]),
        footprint=footprint,
        samples=data.num_samples,
        sizes=tuple(map(batch_size, data.batches)),
        tokens=data.sequence_length,
        vocabulary=vocabulary_size(model),
        itemsize=selection.layers[0].parameter.dtype.itemsize,
        storage=storage,
        resumes=resumes,
        away=away,
    )
    return outline, notes


def _hidden_bytes(model: nn.Module, data: CalibrationData) -> int:
    """Of a batch's hidden state, by the width that the configuration states."""
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    width = getattr(config, "hidden_size", None) or 0
    size = max(map(batch_size, data.batches)) * (data.sequence_length or 0) * width
    return size * next(model.parameters()).dtype.itemsize


def _walk(outline: RunSpec, model: nn.Module, text: bool) -> tuple[MemoryTrace, dict[str, tuple[Block, list[Visit]]]]:
    """Through all phases, in the run's order."""
    trace, config = MemoryTrace(outline), outline.selection.config
    trace.add("reading text", str(CPU), TEXT_BYTES if text else 0)
    away = outline.away or Away(0, 0, DISK)
    device = str(outline.storage.device)
    trace.add("weights of a block", device, away.largest)
    if config.rotation is not None:
        rotation(trace, model)
    if config.allocation == "fisher":
        allocation(trace)
    blocks = {block.name: (block, visits) for block, visits in count_blocks(trace)}
    if config.recover is not None:
        recovery(trace)
    writing(trace)
    saving(trace, module_bytes(model))
    return trace, blocks


def _plan(
    subject: Subject,
    outline: RunSpec,
    data: CalibrationData,
    trace: MemoryTrace,
    blocks: dict[str, tuple[Block, list[Visit]]],
    seconds: "Seconds | None",
    weights: bool,
    notes: tuple[str, ...],
) -> Plan:
    model, storage, selection = subject.model, outline.storage, outline.selection
    device = str(storage.device)
    room = {str(place): int(limit) for place, limit in storage.free.items()}
    places = [*dict.fromkeys([device, *room]), DISK]
    rows = []
    for block in (*selection.structure.blocks, None):
        name = "the whole model" if block is None else block.name
        if name in blocks:
            rows.append(_row(trace, *blocks[name], places, seconds, outline))
    moments = most_of(trace.moments, places)
    overflows = (*trace.overflows, *_overflows(moments, room, outline))
    found = {} if seconds is None else seconds.phases(outline, list(blocks.values()))
    return Plan(
        config={**selection.config.to_dict(), "offload_dir": None},
        model={
            "class": type(model).__name__,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "bytes": module_bytes(model),
            "weights": weights,
            "offloaded": None if outline.away is None else dataclasses.asdict(outline.away),
        },
        data={
            "num_samples": data.num_samples,
            "sequence_length": data.sequence_length,
            "batches": len(outline.sizes),
            "batch_size": outline.batch,
        },
        device=device,
        room=room,
        budget={str(place): limit for place, limit in storage.limits.items()},
        blocks=tuple(rows),
        snapshots=moments,
        seconds=found,
        overflows=overflows,
        notes=tuple(dict.fromkeys([*selection.notes, *notes])),
    )


def _too_large(model: nn.Module, outline: RunSpec, room: Room | None) -> list[Overflow]:
    """That the model alone exceeds the device of another machine."""
    device, away = outline.storage.device, outline.away
    held = _always_there(model, away)
    has = None if room is None else room.host if room.device is None and device.type == "cpu" else room.device
    found = []
    if has is not None and held > has:
        places = '"disk"' if device.type == "cpu" else '"cpu" or "disk"'
        mend = "a narrower dtype, or a larger device" + ("" if away else f"; or its layers elsewhere: offload={places}")
        found.append(Overflow(str(device), "loading", "the model", held, has, mend))
    if away is not None and away.place == str(CPU) and room is not None and room.host and away.total > room.host:
        mend = 'offload="disk"'
        found.append(Overflow(str(CPU), "loading", "the model's layers", away.total, room.host, mend))
    return found


def _row(
    trace: MemoryTrace,
    block: Block,
    found: list[Visit],
    places: Sequence[str],
    seconds: "Seconds | None",
    outline: RunSpec,
) -> BlockPlan:
    names = {block.name, *(layer.name for layer in block.layers)}
    here = [each for each in trace.moments if each.where in names and each.phase in ("calibration", "solver")]
    most = {place: max(each.total(place) for each in here) for place in places}
    return BlockPlan(
        name=block.name,
        layers=len(block.layers),
        rounds=len(found),
        passes=sum(each.passes for each in found),
        parts={each.layers[0].name: len(each.slices) for each in found if each.slices},
        bytes={place: size for place, size in most.items() if size},
        seconds=None if seconds is None else seconds.of_block(block, found, outline),
    )


def _overflows(moments: Sequence[Snapshot], room: dict[str, int], outline: RunSpec) -> list[Overflow]:
    """The moment of each phase that exceeds what a place has free."""
    found = []
    for place, has in room.items():
        for phase in dict.fromkeys(moment.phase for moment in moments):
            worst = max((m for m in moments if m.phase == phase), key=lambda moment: moment.total(place))
            if worst.total(place) > has:
                mend = _mend(worst, place, outline)
                found.append(Overflow(place, phase, worst.where, worst.total(place), has, mend))
    return found


def _mend(moment: Snapshot, place: str, outline: RunSpec) -> str:
    """Which options make the largest item of a moment smaller."""
    sizes: dict[str, int] = {what: found.get(place, 0) for what, found in moment.items.items()}
    most = max(sizes, key=lambda what: sizes[what])
    config, host = outline.selection.config, place == str(CPU)
    gradients = outline.selection.needs_gradients
    options: dict[str, list[str]] = {
        "caches": ["lower max_memory" if not host else "set offload_dir", "lower num_samples or sequence_length"],
        "statistics": [
            "lower max_memory" if not host else "set offload_dir and lower max_memory",
            *(["lower num_samples"] if gradients else []),
            *(['fisher="attention"'] if gradients and config.fisher == "all" else []),
            'solver="wanda"',
        ],
        "solver": [
            *(["lower num_samples"] if gradients else []),
            *(['fisher="attention" or lam=1'] if gradients else []),
            'solver="wanda"',
        ],
        "activations": ["lower batch_size" if outline.batch > 1 else "lower sequence_length"],
        "logits": ["lower batch_size" if outline.batch > 1 else "lower sequence_length"],
        "weights of a block": ["a narrower dtype"],
        "rotated weights": ['offload="disk"' if host else "another offload_dir", "no rotation"],
        "results": ["give a resume_dir"] if not outline.resumes else ["a machine with more memory"],
    }
    return ", or ".join(options.get(most, ["a machine with more memory"]))
