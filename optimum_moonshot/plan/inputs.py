"""The run that a plan estimates, with batches of the caller or random ones of the same size."""

import dataclasses
from typing import Any

import torch

from ..data.batches import Batch, split_batches, take
from ..data.text import LONGEST_SAMPLE, load_calibration, window_length
from ..errors import MoonshotError
from ..model.calls import frozen, model_device, to_device
from ..model.losses import is_causal
from ..model.model_info import embedded_tokens, max_positions, reads_images_and_text, takes_images
from ..pipeline.block_sequences import without_weights
from ..pipeline.calibration_data import usable, with_room
from ..pipeline.inputs import prepare
from ..pipeline.model_pipeline import block_sequences
from ..pipeline.selection import Selection, Subject
from ..prune.layers import runs_forward
from .machine import MachineMemory
from .memory import RunSpec


def is_given(calibration: Any) -> bool:
    """Whether calibration data are batches of model inputs, which a plan can use."""
    return isinstance(calibration, list | tuple) and len(calibration) > 0 and not isinstance(calibration[0], str)


def sizes(selection: Selection) -> dict[str, Any]:
    """The options of `load_calibration` that the configuration has."""
    return {name: getattr(selection.config, name) for name in ("num_samples", "batch_size", "seed")}


def example_batches(subject: Subject, selection: Selection, calibration: Any) -> list[Batch]:
    """The batches of a run: the given ones, or random ones of the same size.

    Raises:
        MoonshotError: the data cannot be read, or the inputs of the model are not known.
    """
    if is_given(calibration):
        options: dict[str, Any] = {"max_positions": max_positions(subject.model), "usable": usable(subject, selection)}
        return load_calibration(calibration, subject.tokenizer, **options, **sizes(selection)).batches
    shape, generator = None, torch.Generator().manual_seed(selection.config.seed)
    count, images, vocabulary = selection.config.num_samples, takes_images(subject.model), 0
    if not reads_images_and_text(subject.model) and images:
        shape = _image_shape(subject)
    elif not reads_images_and_text(subject.model) and (vocabulary := embedded_tokens(subject.model) or 0):
        shape = (window_length(selection.config.sequence_length, max_positions(subject.model), LONGEST_SAMPLE),)
    if shape is None:
        message = f"plan: {type(subject.model).__name__}'s inputs cannot be made up"
        raise MoonshotError(f"{message}: give calibration batches, a list of dictionaries of model inputs")
    if images:
        labels = {"labels": torch.zeros(count, dtype=torch.int64)} if selection.needs_losses else {}
        batch = {"pixel_values": torch.randn(count, *shape, generator=generator), **labels}
    else:
        ids = torch.randint(vocabulary, (count, *shape), generator=generator)
        batch = {"input_ids": ids} if is_causal(subject.model) else {"input_ids": ids, "labels": ids}
    return split_batches([batch], selection.config.batch_size)


def describe_run(subject: Subject, selection: Selection, batches: list[Batch], machine: MachineMemory) -> RunSpec:
    """Describe a run, load its data in batches, and find with which extras its blocks can return their input.

    Raises `MoonshotError` for a run that cannot be planned.
    """
    model, device, blocks = subject.model, model_device(subject.model), selection.structure.blocks
    run, in_turn, extras = machine.run(subject, selection), blocks, None
    if device.type != "meta" and selection.structure.resident:
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
    gradients = selection.needs_gradients
    return dataclasses.replace(run, data=data, in_turn=in_turn, extras=extras, gradients=gradients, forward=forward)


def _image_shape(subject: Subject) -> tuple[int, ...] | None:
    config = getattr(subject.model, "config", None)
    crop = getattr(subject.processor, "crop_size", None) or getattr(subject.processor, "size", None) or {}
    side = getattr(config, "image_size", None) or crop.get("height") or crop.get("shortest_edge")
    sides = tuple(side) if isinstance(side, list | tuple) else (side, side)
    return None if side is None else (getattr(config, "num_channels", 3), *sides)
