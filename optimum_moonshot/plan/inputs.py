"""The inputs of a plan: calibration batches, sequences of blocks, and the memory that is free."""

import dataclasses
from typing import Any

import torch

from ..data.batches import Batch, batch_size, split_batches, take
from ..data.text import LONGEST_SAMPLE, load_calibration, window_length
from ..errors import MoonshotError
from ..model.calls import frozen, model_device, to_device
from ..model.losses import is_causal
from ..model.model_info import embedded_tokens, max_positions, reads_images_and_text, takes_images
from ..pipeline.backoff import Backoff
from ..pipeline.block_sequences import Extras, without_weights
from ..pipeline.calibration_data import usable, with_room
from ..pipeline.inputs import Prepared, prepare
from ..pipeline.model_pipeline import block_sequences
from ..pipeline.selection import Selection, Subject
from ..prune.prefix import runs_forward
from .machine import MachineMemory, offloaded_blocks
from .memory import RunSpec


def build_spec(
    subject: Subject,
    selection: Selection,
    batches: list[Batch],
    resumes: bool,
    machine: MachineMemory,
    offload: str | None,
) -> tuple[RunSpec, Prepared, Extras | None]:
    """Describe a run, load its data in batches, and find with which extras its blocks can return their input.

    Raises `MoonshotError` for a run that cannot be planned.
    """
    model, device, blocks = subject.model, model_device(subject.model), selection.structure.blocks
    offloaded = offloaded_blocks(selection.structure, offload, device if machine.device is None else None)
    storage = machine.storage(model, selection.config, offloaded)
    if device.type != "meta" and offloaded is None:
        prepared = prepare(subject, selection, batches)
        with frozen(model):
            tested = block_sequences(prepared, selection.needs_gradients).sequential
        in_turn = tuple(block for sequence in tested for block in sequence.blocks)
        extras = next((sequence.extras for sequence in tested if sequence.blocks == blocks), None)
    else:
        data = with_room(load_calibration(batches, None, **_sizes(selection)), selection, model)
        if selection.needs_losses and any(layer.separate for layer in selection.layers):
            data = dataclasses.replace(data, batches=split_batches(data.batches, 1))
        prepared, in_turn, extras = Prepared(subject, selection, data, storage, Backoff(storage)), blocks, None
        if device.type != "meta":
            probe = without_weights(model, blocks, to_device(take(data.batches[0], 0, 1), device))
            if probe is None:
                hint = "without `offload` they can be pruned, and planned"
                raise MoonshotError("plan: the model's blocks are not sequential", hint=hint)
            extras = probe.extras
    data = prepared.calibration
    run = RunSpec(
        model=model,
        selection=selection,
        in_turn=in_turn,
        sizes=tuple(map(batch_size, data.batches)),
        tokens=data.sequence_length or 0,
        storage=storage,
        resumes=resumes,
        gradients=selection.needs_gradients,
        forward=(extras is not None or device.type == "meta") and runs_forward(selection),
        offloaded=offloaded,
    )
    return run, prepared, extras


def _sizes(selection: Selection) -> dict[str, Any]:
    return {name: getattr(selection.config, name) for name in ("num_samples", "batch_size", "seed")}


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
    length = window_length(selection.config.sequence_length, longest, LONGEST_SAMPLE)
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
