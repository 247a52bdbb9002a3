"""The batches of a plan: those of the caller, or random ones of the same size."""

from typing import Any

import torch

from ..data.batches import Batch, split_batches
from ..data.text import LONGEST_SAMPLE, load_calibration, window_length
from ..errors import MoonshotError
from ..model.losses import is_causal
from ..model.model_info import embedded_tokens, max_positions, reads_images_and_text, takes_images
from ..pipeline.calibration_data import usable
from ..pipeline.selection import Selection, Subject


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


def _image_shape(subject: Subject) -> tuple[int, ...] | None:
    config = getattr(subject.model, "config", None)
    crop = getattr(subject.processor, "crop_size", None) or getattr(subject.processor, "size", None) or {}
    side = getattr(config, "image_size", None) or crop.get("height") or crop.get("shortest_edge")
    sides = tuple(side) if isinstance(side, list | tuple) else (side, side)
    return None if side is None else (getattr(config, "num_channels", 3), *sides)
