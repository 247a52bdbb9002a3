"""Agreement of the embeddings of a changed model with those of the dense one, for models without a head.

Both outputs are pooled as the dense checkpoint declares, else by the mean over their positions.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..data.batches import Batch, batch_size, take
from ..data.images import EVALUATION_SPLITS, image_batches, open_images
from ..data.sources import Texts, describe, open_source, short_name
from ..data.text import separate_texts, text_batches, window_length
from ..errors import check_whole, require
from ..model.calls import Forward, called_by, evaluation_mode, model_device, run_model, to_device
from ..model.embeddings import Pooling, find_pooling
from ..model.losses import pooled_output
from ..model.model_info import check_tokens, max_positions, takes_images
from ..model.wide_products import wide_products
from ..progress import progress_bar
from ..reports.measurement import Measurement, metric_key

NEIGHBOURS = 1024  # samples whose similarities to all others are computed at a time


@dataclass(frozen=True)
class Agreement:
    """The agreement of a model's embeddings with the dense model's."""

    value: float  # mean cosine of the two embeddings of a sample
    neighbours: float  # fraction of the samples that have the same nearest other sample
    dataset: str
    samples: int
    sequence_length: int | None  # at most, in tokens; None for other data than text
    embedding: str  # how outputs are pooled

    def measurements(self) -> dict[str, Measurement]:
        settings = {name: asdict(self)[name] for name in ("samples", "sequence_length", "embedding")}
        values = {"cosine": self.value, "same neighbour": self.neighbours}
        name = short_name(self.dataset)
        return {metric_key(name, metric): Measurement(metric, value, settings) for metric, value in values.items()}


@dataclass(frozen=True)
class Embeddings:
    """The embeddings of a data set, normalized, [N, D] in float32 in host memory."""

    vectors: Tensor
    dataset: str
    sequence_length: int | None
    pooling: Pooling

    def agreement(self, dense: "Embeddings") -> Agreement:
        """The agreement with the dense model's embeddings of the same data."""
        shapes = f"embeddings {list(self.vectors.shape)}, of the dense model {list(dense.vectors.shape)}"
        require(self.vectors.shape == dense.vectors.shape, shapes, hint="give the model that this one was made from")
        same = self.nearest() == dense.nearest()
        cosine = float((self.vectors * dense.vectors).sum(1).double().mean())
        settings = (self.dataset, len(self.vectors), self.sequence_length, str(self.pooling))
        return Agreement(cosine, float(same.double().mean()), *settings)

    def nearest(self) -> Tensor:
        """The index of the nearest other sample of each, [N]."""
        nearest = []
        for start, rows in zip(count(0, NEIGHBOURS), self.vectors.split(NEIGHBOURS), strict=False):
            cosines = rows @ self.vectors.T
            cosines[range(len(rows)), range(start, start + len(rows))] = -torch.inf
            nearest.append(cosines.argmax(1))
        return torch.cat(nearest)


def agreement(
    model: nn.Module,
    dense: nn.Module,
    dataset: Any,
    tokenizer: Any = None,
    processor: Any = None,
    **options: Any,
) -> Agreement:
    """How well the embeddings of a model without a head agree with those of the dense model that it was made from.

    Args:
        model: not changed.
        dense: not changed.
        dataset: as for `embeddings`.
        tokenizer: of both models, for text.
        processor: of both models, for images.
        options: of `embeddings`.

    Raises:
        MoonshotError: as `embeddings`, or embeddings of different sizes.
    """
    of_dense = embeddings(dense, dataset, tokenizer, processor, **options)
    options["pooling"] = of_dense.pooling
    return embeddings(model, dataset, tokenizer, processor, **options).agreement(of_dense)


def embeddings(
    model: nn.Module,
    dataset: Any,
    tokenizer: Any = None,
    processor: Any = None,
    *,
    sequence_length: int | None = None,
    batch_size: int = 32,
    max_samples: int | None = None,
    pooling: Pooling | None = None,
    forward: Forward | None = None,
    progress: bool = False,
) -> Embeddings:
    """The embeddings of a data set by a model without a head.

    Args:
        model: whose output has hidden states or embeddings; not changed.
        dataset: text as for `perplexity`, each record or line a sample; images as for `accuracy`; or an iterable of
            model inputs.
        tokenizer: the model's Hugging Face tokenizer, for text.
        processor: the model's image processor, for images.
        sequence_length: tokens to which a text is cut; None is the model's maximum, at most 2048.
        batch_size: samples per forward pass; batches of model inputs keep their size.
        max_samples: the number of samples, at most; None is all.
        pooling: of the outputs; None is what the model's checkpoint declares, else their mean.
        forward: (model, inputs) → output; replaces the plain call.
        progress: show a progress bar of the samples.

    Raises:
        MoonshotError: data that cannot be read or has fewer than two samples, or a model whose output has neither
            hidden states nor embeddings, or has NaN.
    """
    check_whole("batch_size", batch_size, 1)
    if max_samples is not None:
        check_whole("max_samples", max_samples, 2)
    pooling = find_pooling(model) if pooling is None else pooling
    pooling, vectors = pooling if pooling.modes else Pooling(("mean",)), list[Tensor]()
    images = open_images(dataset, EVALUATION_SPLITS) if takes_images(model) else None
    length = None
    if images is not None:
        batches = image_batches(images, model, processor, None, batch_size)
    else:
        opened, limit = open_source(dataset), window_length(sequence_length, max_positions(model))
        if isinstance(opened, Texts):
            length = limit
            batches = text_batches(separate_texts(dataset, tokenizer), tokenizer, length, batch_size)
        else:
            batches = opened.batches()
    bar = progress_bar(desc="embeddings", unit="sample", shown=progress)
    with evaluation_mode(model), wide_products(model), called_by(model, forward), torch.no_grad(), bar:
        for batch in _first(batches, max_samples):
            if "input_ids" in batch:
                check_tokens(model, batch["input_ids"], "input_ids" if length is None else "tokenizer")
            batch = to_device(batch, model_device(model))
            values, _ = pooled_output(model, run_model(model, batch), batch, pooling)
            vectors.append(functional.normalize(values.float(), dim=1).cpu())
            bar.update(len(vectors[-1]))
    joined = torch.cat(vectors) if vectors else torch.empty(0, 0)
    require(len(joined) > 1, f"{describe(dataset)} has {len(joined)} samples", hint="give two or more")
    finite = not bool(joined.isnan().any())
    require(finite, f"{type(model).__name__} returns NaN", hint="check its weights and its dtype")
    return Embeddings(joined, describe(dataset), length, pooling)


def _first(batches: Iterator[Batch], most: int | None) -> Iterator[Batch]:
    """The batches of the first `most` samples."""
    seen = 0
    for batch in batches:
        batch = batch if most is None else take(batch, 0, most - seen)
        seen += batch_size(batch)
        yield batch
        if seen == most:
            return
