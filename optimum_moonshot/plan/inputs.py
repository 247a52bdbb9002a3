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
    batch = None
    if not reads_images_and_text(subject.model):
        batch = (_images if takes_images(subject.model) else _tokens)(subject, selection)
    if batch is None:
        message = f"plan: {type(subject.model).__name__}'s inputs cannot be made up"
        raise MoonshotError(f"{message}: give calibration batches, a list of dictionaries of model inputs")
    return split_batches([batch], selection.config.batch_size)


def _tokens(subject: Subject, selection: Selection) -> Batch | None:
    config, size = selection.config, embedded_tokens(subject.model)
    if size is None:
        return None
    length = window_length(config.sequence_length, max_positions(subject.model), LONGEST_SAMPLE)
    generator = torch.Generator().manual_seed(config.seed)
    ids = torch.randint(size, (config.num_samples, length), generator=generator)
    return {"input_ids": ids} if is_causal(subject.model) else {"input_ids": ids, "labels": ids}


def _images(subject: Subject, selection: Selection) -> Batch | None:
    count, config = selection.config.num_samples, getattr(subject.model, "config", None)
    crop = getattr(subject.processor, "crop_size", None) or getattr(subject.processor, "size", None) or {}
    side = getattr(config, "image_size", None) or crop.get("height") or crop.get("shortest_edge")
    if side is None:
        return None
    shape = side if isinstance(side, list | tuple) else (side, side)
    generator = torch.Generator().manual_seed(selection.config.seed)
    images = torch.randn(count, getattr(config, "num_channels", 3), *shape, generator=generator)
    labels = {"labels": torch.zeros(count, dtype=torch.int64)} if selection.needs_losses else {}
    return {"pixel_values": images, **labels}
