"""The inputs of a plan: the memory that it assumes, and calibration batches."""

import dataclasses
from typing import Any

import torch

from ..config import memory_size
from ..data.batches import Batch, split_batches
from ..data.text import LONGEST, load_calibration
from ..errors import MoonshotError, require
from ..model.losses import is_causal
from ..model.model_info import embedded_tokens, max_positions, reads_images_and_text, takes_images
from ..pipeline.calibration_data import usable
from ..pipeline.selection import Selection, Subject


@dataclasses.dataclass(frozen=True)
class MachineMemory:
    """The memory that a plan assumes; None is that of this machine."""

    device: int | None = None  # bytes of the device in total, including the model
    host: int | None = None  # bytes of host memory that are free

    @classmethod
    def of(cls, device_memory: int | str | None, host_memory: int | str | None) -> "MachineMemory | None":
        """The sizes of another machine, in bytes or as text; None if neither is given."""
        sizes = {"device_memory": device_memory, "host_memory": host_memory}
        numbers = {name: None if size is None else memory_size(name, size) for name, size in sizes.items()}
        return None if not any(numbers.values()) else cls(numbers["device_memory"], numbers["host_memory"])


def is_given(calibration: Any) -> bool:
    """Whether calibration data are batches of model inputs, which a plan can use."""
    return isinstance(calibration, list | tuple) and len(calibration) > 0 and not isinstance(calibration[0], str)


def example_batches(subject: Subject, selection: Selection, calibration: Any) -> list[Batch]:
    """The batches of a run: those given, or random ones of their size."""
    config, model = selection.config, subject.model
    if is_given(calibration):
        options: dict[str, Any] = {name: getattr(config, name) for name in ("num_samples", "batch_size", "seed")}
        options |= {"max_positions": max_positions(model), "usable": usable(subject, selection)}
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
