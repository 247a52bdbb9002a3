"""The inputs of a plan: calibration batches, sequences of blocks, and the memory that is free."""

import dataclasses
from typing import Any

import torch
from torch import nn

from ..calibration.storage import Storage, free_memory
from ..config import memory_size
from ..data.batches import Batch, batch_size, split_batches
from ..data.text import LONGEST, CalibrationData, load_calibration
from ..devices import is_gpu
from ..errors import MoonshotError, reason, require
from ..model.calls import Forward, frozen, model_device
from ..model.losses import is_causal
from ..model.model_info import (
    embedded_tokens,
    max_positions,
    reads_images_and_text,
    takes_images,
    text_setting,
    vocabulary_size,
)
from ..pipeline.calibration_data import usable, with_room
from ..pipeline.inputs import prepare
from ..pipeline.model_pipeline import block_sequences
from ..pipeline.selection import Selection, Subject
from .footprint import ModelFootprint, model_footprint, sequences_by_shape
from .spec import OffloadedBlocks, RunSpec, module_bytes, offloaded_blocks

CPU = torch.device("cpu")


@dataclasses.dataclass(frozen=True)
class MachineMemory:
    """The memory that a plan assumes; None is this machine's."""

    device: int | None = None  # bytes of the device in total, including the model
    host: int | None = None  # bytes of host memory that are free

    @classmethod
    def of(cls, device_memory: int | str | None, host_memory: int | str | None) -> "MachineMemory | None":
        """The sizes of another machine, in bytes or as text; None if neither is given."""
        sizes = {"device_memory": device_memory, "host_memory": host_memory}
        numbers = {name: None if size is None else memory_size(name, size) for name, size in sizes.items()}
        return None if not any(numbers.values()) else cls(numbers["device_memory"], numbers["host_memory"])


def build_spec(
    subject: Subject,
    selection: Selection,
    batches: list[Batch],
    forward: Forward | None,
    resumes: bool,
    machine: MachineMemory,
    offload: str | None,
) -> tuple[RunSpec, CalibrationData]:
    """Describe a run, and load its data in batches, with notes for the plan; arguments as for `make_plan`.

    Raises `MoonshotError` for a run that cannot be planned, or cannot be planned without the model's weights.
    """
    model, config, device = subject.model, selection.config, model_device(subject.model)
    offloaded = offloaded_blocks(selection.structure, offload, machine.device is None and not is_gpu(device))
    in_memory = device.type != "meta" and offloaded is None
    if in_memory:
        prepared = prepare(subject, selection, batches)
        data = prepared.calibration
    else:
        data = with_room(load_calibration(batches, None, **_sizes(selection)), selection, model)
        if selection.needs_losses and any(layer.separate for layer in selection.layers):
            data = dataclasses.replace(data, batches=split_batches(data.batches, 1))
    footprint, notes = _footprint(model, selection, data, forward, required=not in_memory)
    if in_memory:
        with frozen(model):
            tested = block_sequences(prepared, selection.needs_gradients)
        sequential, others = tuple(tested.sequential), tested.non_sequential
    else:
        sequential, others = sequences_by_shape(footprint, selection.structure.blocks)
        hint = "without `offload` they can be pruned, and planned"
        single = offloaded is None or (len(sequential) == 1 and not others)
        require(single, "plan: the model's blocks are not sequential", hint=hint)
    device, free = _free(model, machine, offloaded)
    run = RunSpec(
        selection=selection,
        sequential=sequential,
        non_sequential=others,
        footprint=footprint,
        sizes=tuple(map(batch_size, data.batches)),
        tokens=data.sequence_length or 0,
        vocabulary=vocabulary_size(model),
        storage=Storage(device, config.max_memory_bytes, config.offload_dir, free),
        resumes=resumes,
        gradients=selection.needs_gradients,
        offloaded=offloaded,
    )
    return run, dataclasses.replace(data, notes=(*data.notes, *notes))


def _sizes(selection: Selection) -> dict[str, Any]:
    return {name: getattr(selection.config, name) for name in ("num_samples", "batch_size", "seed")}


def _footprint(
    model: nn.Module, selection: Selection, data: CalibrationData, forward: Forward | None, required: bool
) -> tuple[ModelFootprint, list[str]]:
    """The footprint of the largest batch, and a note if it consists of the hidden states alone."""
    largest = max(data.batches, key=lambda batch: next(iter(batch.values())).numel())
    trains = selection.config.recover is not None
    try:
        return model_footprint(model, selection.structure, largest, selection.needs_gradients, trains, forward), []
    except Exception as error:  # a model may depend on the value of any tensor
        note = "activations are not in the figures, since the model cannot run on tensors without memory"
        note = f"{note} ({reason(error)[:200]})"
        if required:
            raise MoonshotError(f"plan: {note}: load its weights, and plan with these") from error
        width = text_setting(model, "hidden_size") * next(model.parameters()).dtype.itemsize
        hidden = batch_size(largest) * (data.sequence_length or 0) * width
        return ModelFootprint({}, (), hidden, 0), [note]


def _free(
    model: nn.Module, machine: MachineMemory, offloaded: OffloadedBlocks | None
) -> tuple[torch.device, dict[torch.device, int]]:
    """The device that the model will be on, and the free bytes there, besides its resident weights, and on the host."""
    device = model_device(model)
    meta = device.type == "meta"
    if meta:
        device = CPU if machine.device is None else torch.device("cuda")
    resident = module_bytes(model) - (offloaded.total if offloaded else 0)
    free = free_memory(CPU if meta else device)
    host = free[CPU] if machine.host is None else machine.host
    on_device = free.get(device, 0) if machine.device is None else machine.device - resident
    if device.type == "cpu":
        if machine.device is None:
            on_device = host - resident if meta else host
        return device, {device: max(0, on_device)}
    if meta and offloaded is not None and offloaded.place == "cpu":
        host -= offloaded.total
    return device, {device: max(0, on_device), CPU: max(0, host)}


def is_given(calibration: Any) -> bool:
    """Whether calibration data are batches of model inputs, which a plan can use."""
    return isinstance(calibration, list | tuple) and len(calibration) > 0 and not isinstance(calibration[0], str)


def example_batches(subject: Subject, selection: Selection, calibration: Any) -> list[Batch]:
    """The batches of a run: the given ones, or random ones of the same size."""
    config, model = selection.config, subject.model
    if is_given(calibration):
        options = {"max_positions": max_positions(model), "usable": usable(subject, selection), **_sizes(selection)}
        return load_calibration(calibration, subject.tokenizer, **options).batches
    generator = torch.Generator().manual_seed(config.seed)
    make = _images if takes_images(model) else _tokens
    return split_batches([make(subject, selection, config.num_samples, generator)], config.batch_size)


def _tokens(subject: Subject, selection: Selection, count: int, generator: torch.Generator) -> Batch:
    model: Any = subject.model
    size, longest = embedded_tokens(model), max_positions(model)
    if size is None or reads_images_and_text(model):
        raise _unknown(model)
    length = selection.config.sequence_length or min(longest or LONGEST, LONGEST)
    message = f"the model has {longest} positions"
    require(longest is None or length <= longest, message, field="sequence_length", value=length)
    ids = torch.randint(size, (count, length), generator=generator)
    return {"input_ids": ids} if is_causal(model) else {"input_ids": ids, "labels": ids}


def _images(subject: Subject, selection: Selection, count: int, generator: torch.Generator) -> Batch:
    config: Any = getattr(subject.model, "config", None)
    side, channels = getattr(config, "image_size", None), getattr(config, "num_channels", 3)
    sizes = getattr(subject.processor, "crop_size", None) or getattr(subject.processor, "size", None) or {}
    side = side or sizes.get("height") or sizes.get("shortest_edge")
    if side is None or reads_images_and_text(subject.model):
        raise _unknown(subject.model)
    height, width = side if isinstance(side, list | tuple) else (side, side)
    images = torch.randn(count, channels, height, width, generator=generator)
    labels = {"labels": torch.zeros(count, dtype=torch.int64)} if selection.needs_losses else {}
    return {"pixel_values": images, **labels}


def _unknown(model: Any) -> MoonshotError:
    hint = "give calibration batches, a list of dictionaries of model inputs"
    return MoonshotError(f"plan: {type(model).__name__}'s inputs cannot be made up: {hint}")
