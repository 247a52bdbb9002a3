"""Top-1 accuracy of image classifiers."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..data.batches import Batch
from ..data.images import EVALUATION_SPLITS, class_numbers, image_batches, open_images
from ..data.sources import describe, input_batches, short_name
from ..errors import MoonshotError, check_whole, require
from ..model.calls import Forward, called_by, evaluation_mode, model_device, run_model, to_device
from ..model.isolation import isolated
from ..model.losses import checked_labels
from ..model.wide_products import wide_products
from ..progress import progress_bar
from ..reports.measurement import Measurement


@dataclass(frozen=True)
class Accuracy:
    """A top-1 accuracy and its data."""

    value: float  # fraction of the images whose class has the largest logit, 0 to 1
    dataset: str
    images: int

    def measurements(self) -> dict[str, Measurement]:
        return {short_name(self.dataset): Measurement("accuracy", self.value, {"images": self.images})}


def accuracy(
    model: nn.Module,
    dataset: Any,
    processor: Any = None,
    *,
    batch_size: int = 32,
    max_images: int | None = None,
    forward: Forward | None = None,
    progress: bool = False,
) -> Accuracy:
    """Top-1 accuracy of an image classifier.

    Args:
        model: with logits [B, classes]; not changed.
        dataset: a folder with a sub-folder of images per class, a .parquet file, the name of a data set on the Hub or a
            `datasets.Dataset` with images and labels (of several splits validation, else test), or an iterable of model
            inputs with labels.
        processor: the model's image processor; may be None for model inputs.
        batch_size: images per forward pass; batches of model inputs keep their size.
        max_images: the largest number of images to evaluate; None is all.
        forward: (model, inputs) → output; replaces the plain call.
        progress: show a progress bar of the images.

    Raises:
        MoonshotError: data that cannot be read or has no labels, or a model without class logits, or with NaN.
    """
    check_whole("batch_size", batch_size, 1)
    if max_images is not None:
        check_whole("max_images", max_images, 1)
    source = open_images(dataset, EVALUATION_SPLITS)
    if source is None:
        batches = input_batches(dataset)
    else:
        batches = image_batches(source, model, processor, class_numbers(source, model)[0], batch_size)
    right, seen = 0, 0
    bar = progress_bar(desc="accuracy", unit="image", shown=progress)
    with isolated(model) as model, evaluation_mode(model), wide_products(model), called_by(model, forward), bar:
        for batch in batches:
            if max_images is not None:
                batch = {name: tensor[: max_images - seen] for name, tensor in batch.items()}
            hits = _hits(model, to_device(batch, model_device(model)))
            right, seen = right + int(hits.sum()), seen + len(hits)
            bar.update(len(hits))
            if seen == max_images:
                break
    require(seen > 0, f"{describe(dataset)} has no images")
    return Accuracy(right / seen, describe(dataset), seen)


@torch.no_grad()
def _hits(model: nn.Module, batch: Batch) -> Tensor:
    """Bool [B], True where the label has the largest logit."""
    require("labels" in batch, "the data has no labels", hint="accuracy needs them")
    output = run_model(model, batch)
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    name = type(model).__name__
    if not isinstance(logits, Tensor) or logits.ndim != 2:
        raise MoonshotError(f"{name} returns no logits [images, classes]", hint="load it with its classifier")
    finite = not bool(logits.isnan().any())
    require(finite, f"{name} returns NaN logits", hint="check its weights and its dtype")
    return logits.argmax(-1) == checked_labels(batch["labels"].to(logits.device), logits)
