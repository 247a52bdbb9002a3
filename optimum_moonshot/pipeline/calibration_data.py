"""The calibration data of a run, from a source of any kind, in batches that suit the model."""

import dataclasses
from functools import partial
from typing import Any

from torch import nn

from ..data.batches import Batch, batch_size, shorten, split_batches, without_padding
from ..data.images import load_image_text, load_images, open_image_text, open_images, reads_both
from ..data.self_calibration import SelfCalibration
from ..data.text import CalibrationData, Usable, load_calibration
from ..errors import require
from ..model.losses import add_labels, labelled, token_mask
from ..model.model_info import check_tokens, max_positions, reads_images_and_text, takes_images, vocabulary_size
from ..objective.allocation_rules import NEEDING_DATA
from .generated_samples import load_self
from .run_folder import RunFolder
from .selection import Selection, Subject

# A batch's logits, with their gradient, stay below this: with a large vocabulary fewer samples pass at a time.
LOGITS_BYTES = 2 * 2**30


def read_data(
    subject: Subject, selection: Selection, calibration: Any, samples_folder: RunFolder | None
) -> CalibrationData:
    """Exactly `num_samples` samples, with labels where the loss needs them, in batches whose logits have room."""
    model, config = subject.model, selection.config
    written = SelfCalibration.of(calibration)
    if written is not None:
        data = load_self(model, subject.tokenizer, selection, written, samples_folder, subject.progress)
        return with_room(data, selection, model)
    gradients = selection.needs_losses
    options = {name: getattr(config, name) for name in ("num_samples", "batch_size", "seed")}
    if reads_images_and_text(model) and (pairs := open_image_text(calibration)) is not None:
        require(
            reads_both(subject.processor),
            f"{pairs.name} has images and text, which need the model's processor",
            field="processor",
            hint="give AutoProcessor.from_pretrained(...), or batches of model inputs",
        )
        lengths = {name: getattr(config, name) for name in ("num_samples", "sequence_length", "seed")}
        data = load_image_text(pairs, subject.processor, max_positions=max_positions(model), **lengths)
        _check_ids(model, data, "processor")
        return data  # whose loss is that of the text
    if takes_images(model) and (source := open_images(calibration)) is not None:
        labels = gradients and (subject.loss is None or source.label is not None)
        return load_images(source, model, subject.processor, labels=labels, **options)
    options["sequence_length"] = config.sequence_length
    options["usable"] = usable(subject, selection)
    data = load_calibration(calibration, subject.tokenizer, max_positions=max_positions(model), **options)
    _check_ids(model, data, "input_ids" if data.model_inputs else "tokenizer")
    masked = gradients and subject.loss is None
    batches, note = add_labels(model, data.batches, subject.tokenizer, config.seed, masked)
    if note is not None:
        data = dataclasses.replace(data, batches=batches, notes=(*data.notes, note))
    return with_room(data, selection, model)


def usable(subject: Subject, selection: Selection) -> Usable | None:
    """Which samples of model inputs have a label; None where the loss is the caller's, and labels may mean anything."""
    return None if subject.loss is not None else partial(labelled, subject.model, required=selection.needs_losses)


def _check_ids(model: nn.Module, data: CalibrationData, given_by: str) -> None:
    for ids in (batch["input_ids"] for batch in data.batches if "input_ids" in batch):
        check_tokens(model, ids, given_by)


def with_room(data: CalibrationData, selection: Selection, model: nn.Module) -> CalibrationData:
    """The data in batches whose logits, with their gradient, stay below `LOGITS_BYTES`, where any are needed."""
    if (selection.needs_losses or selection.config.allocation == "owl") and data.sequence_length:
        itemsize = selection.layers[0].parameter.dtype.itemsize
        per_sample = 2 * data.sequence_length * vocabulary_size(model) * itemsize
        data = dataclasses.replace(data, batches=split_batches(data.batches, max(1, LOGITS_BYTES // per_sample)))
    return data


def two_samples(selection: Selection, data: CalibrationData) -> Batch | None:
    """Two samples, padded if any are, to test whether the layers show them; None where it does not matter."""
    several = [batch for batch in data.batches if batch_size(batch) > 1]
    masks = ((batch, token_mask(batch)) for batch in several)
    padded = next((batch for batch, mask in masks if mask is not None and not bool(mask.all())), None)
    if not several or (padded is None and not selection.needs_losses):
        return None
    return shorten(several[0] if padded is None else padded, samples=2)


def one_by_one(data: CalibrationData, unshown: list[str]) -> CalibrationData:
    """The data in batches of one sample, where some layers do not show them, with a note."""
    if not unshown:
        return data
    more = f" and {len(unshown) - 1} more" if len(unshown) > 1 else ""
    note = f"one sample at a time: the inputs of {unshown[0]}{more} do not show which sample they belong to"
    batches = [without_padding(each) for each in split_batches(data.batches, 1)]
    return dataclasses.replace(data, batches=batches, notes=(*data.notes, note))


def check_without_data(selection: Selection) -> None:
    """Check that a run needs no data.

    Raises:
        MoonshotError: it needs some.
    """
    config = selection.config
    message = "without calibration data there is nothing to recompute; give some, or leave it out"
    require(not config.recompute, message, field="recompute", value=True)
    require(
        config.allocation not in NEEDING_DATA,
        f"allocation={config.allocation!r} needs data to see what a layer does",
        field="calibration",
        value=None,
        hint="give some, or use allocation='alpha'",
    )
    such = 'such as "c4", a text file, or a folder of images for an image model'
    needed = f"solver={config.solver!r} needs data, {such}"
    require(not selection.solver.calibrated, needed, field="calibration", value=None)
