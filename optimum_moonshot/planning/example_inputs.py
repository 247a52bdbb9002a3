"""Random calibration batches of the size that a run would have."""

from typing import Any

import torch

from ..data.batches import Batch
from ..data.text import LONGEST, load_calibration
from ..errors import MoonshotError, require
from ..model.losses import is_causal
from ..model.model_info import embedded_tokens, max_positions, reads_images_and_text, takes_images
from ..pipeline.inputs import Subject
from ..pipeline.selection import Selection


def is_given(calibration: Any) -> bool:
    """Whether calibration data are batches of model inputs, which a plan can use."""
    return isinstance(calibration, list | tuple) and len(calibration) > 0 and not isinstance(calibration[0], str)


def example_batches(subject: Subject, selection: Selection, calibration: Any) -> list[Batch]:
    """The batches of a run: those given, or random ones of their size.

    Raises:
        MoonshotError: the form of the model's inputs is unknown.
    """
    config, model = selection.config, subject.model
    if is_given(calibration):
        options = {"num_samples": config.num_samples, "batch_size": config.batch_size, "seed": config.seed}
        return load_calibration(calibration, subject.tokenizer, max_positions=max_positions(model), **options).batches
    generator = torch.Generator().manual_seed(config.seed)
    firsts = range(0, config.num_samples, config.batch_size)
    sizes = [min(config.batch_size, config.num_samples - first) for first in firsts]
    if takes_images(model):
        return [_images(subject, selection, size, generator) for size in sizes]
    return [_tokens(model, selection, size, generator) for size in sizes]


def _unknown(model: Any) -> MoonshotError:
    hint = "give calibration batches, a list of dictionaries of model inputs"
    return MoonshotError(f"plan: {type(model).__name__}'s inputs cannot be made up: {hint}")


def _tokens(model: Any, selection: Selection, count: int, generator: torch.Generator) -> Batch:
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
