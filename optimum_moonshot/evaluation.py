"""Perplexity and top-1 accuracy by the protocol of the pruning literature, so that numbers compare with published ones.

For perplexity, text is tokenised as one stream and cut into windows of the model's sequence length that do not overlap;
it is the exponentiated mean loss of every next-token prediction inside a window.
"""

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from tqdm.auto import tqdm

from .data import describe, evaluation_text, input_batches, short_name, tokenize, window_length
from .errors import check_whole, require
from .images import EVALUATION_SPLITS, class_numbers, image_batches, open_images
from .losses import checked_labels
from .passes import Batch, Forward, called_by, evaluation_mode, model_device, run_model, to_device
from .report import Measurement

# Logits are copied to float32 in slices of about this many bytes: whole, a large vocabulary would cost gigabytes.
SLICE_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Perplexity:
    """A perplexity, and what it was measured on."""

    value: float
    dataset: str
    windows: int
    sequence_length: int  # tokens of a window
    tokens: int  # predicted ones: windows · (sequence_length - 1)

    def measurements(self) -> dict[str, Measurement]:
        settings = {"windows": self.windows, "sequence_length": self.sequence_length}
        return {short_name(self.dataset): Measurement("perplexity", self.value, settings)}


def perplexity(
    model: nn.Module,
    tokenizer: Any,
    dataset: Any = "wikitext2",
    *,
    sequence_length: int | None = None,
    batch_size: int = 4,
    max_windows: int | None = None,
    progress: bool = False,
) -> Perplexity:
    """How well a causal language model predicts text; lower is better.

    Args:
        model: with logits [B, T, vocabulary]; left as it was.
        tokenizer: the model's Hugging Face tokenizer.
        dataset: "wikitext2", "c4" or "ptb" as in the literature; the path of a .txt, .json, .jsonl, .json.gz, .jsonl.gz
            or .parquet file, a list of strings or a `datasets.Dataset`, whose texts a blank line joins. What has the
            columns of C4 (text, timestamp, url) or PTB (sentence) is read as these are, so a downloaded shard will do.
        sequence_length: tokens of a window; None is the model's longest, at most 2048.
        batch_size: windows that pass through the model at a time.
        max_windows: the first so many windows at most; None is all, and 256 for "c4".

    Raises:
        MoonshotError: data that cannot be read or is shorter than a window, or a model that gives no logits, or NaN.
    """
    check_whole("batch_size", batch_size, 1)
    if max_windows is not None:
        check_whole("max_windows", max_windows, 1)
    require(tokenizer is not None, "tokenizer=None: perplexity of text needs the model's tokenizer")
    length = window_length(sequence_length, max_positions(model))
    text, most = evaluation_text(dataset)
    windows = _windows(tokenize(tokenizer, text), length, max_windows or most, describe(dataset))
    _check(model, windows)
    total = torch.zeros((), dtype=torch.float64)
    with (
        evaluation_mode(model),
        torch.no_grad(),
        tqdm(total=len(windows), desc="perplexity", disable=not progress) as bar,
    ):
        for batch in windows.split(batch_size):
            total += _loss(model, batch)
            bar.update(len(batch))
    tokens = len(windows) * (length - 1)
    return Perplexity(float((total / tokens).exp()), describe(dataset), len(windows), length, tokens)


@dataclass(frozen=True)
class Accuracy:
    """A top-1 accuracy, and what it was measured on."""

    value: float  # share of the images whose class has the largest logit, 0 to 1
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
    """How often an image classifier's first choice is right.

    Args:
        model: with logits [B, classes]; left as it was.
        dataset: a folder with a sub-folder of images per class, a .parquet file, the name of a data set on the Hub or a
            `datasets.Dataset` with images and labels (of several splits validation, else test), or an iterable of model
            inputs with labels.
        processor: the model's image processor; may be None for model inputs.
        batch_size: images that pass through the model at a time; model inputs come as they are.
        max_images: the first so many images at most; None is all.
        forward: (model, inputs) → output, in place of a plain call.

    Raises:
        MoonshotError: data that cannot be read or has no labels, or a model that gives no class logits, or NaN.
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
    bar = tqdm(desc="accuracy", unit="image", disable=not progress)
    with evaluation_mode(model), called_by(model, forward), torch.no_grad(), bar:
        for batch in batches:
            if max_images is not None:
                batch = {name: tensor[: max_images - seen] for name, tensor in batch.items()}
            hits = _hits(model, to_device(batch, model_device(model)))
            right, seen = right + int(hits.sum()), seen + len(hits)
            bar.update(len(hits))
            if seen == max_images:
                break
    require(seen > 0, f"{describe(dataset)} has no images: give data that has some")
    return Accuracy(right / seen, describe(dataset), seen)


def _hits(model: nn.Module, batch: Batch) -> Tensor:
    """Bool [B], True where the label has the largest logit."""
    require("labels" in batch, "the data has no labels: give some to measure accuracy")
    output = run_model(model, batch)
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    name = type(model).__name__
    fits = isinstance(logits, Tensor) and logits.ndim == 2
    require(fits, f"{name} gives no logits [images, classes]: load it with its classifier")
    require(not bool(logits.isnan().any()), f"{name} gives NaN logits: check its weights and its dtype")
    return logits.argmax(-1) == checked_labels(batch["labels"].to(logits.device), logits)


def max_positions(model: nn.Module) -> int | None:
    """The longest sequence that a model has positions for, in tokens; None where its configuration names none."""
    config = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None)
    return positions if isinstance(positions, int) and positions > 0 else None


def vocabulary_size(model: nn.Module) -> int:
    """The width of a language model's logits; 1 where the configuration names none."""
    config = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return getattr(text, "vocab_size", None) or 1


def _windows(ids: list[int], length: int, most: int | None, name: str) -> Tensor:
    """Windows [W, length] that do not overlap, without the rest that fills none."""
    count = len(ids) // length
    mend = "give more text" + (f" or set sequence_length={len(ids)}" if len(ids) >= 2 else "")
    require(count > 0, f"{name}: the text has {len(ids)} tokens, fewer than sequence_length={length}: {mend}")
    count = min(count, most or count)
    return torch.tensor(ids[: count * length]).view(count, length)


def _check(model: nn.Module, windows: Tensor) -> None:
    config = getattr(model, "config", None)
    name = type(model).__name__
    require(
        not getattr(config, "is_encoder_decoder", False),
        f"{name} is an encoder-decoder: perplexity of text needs a causal language model",
    )
    size = None
    with suppress(AttributeError, NotImplementedError):  # not every model says where its embeddings are
        size = model.get_input_embeddings().num_embeddings
    require(
        size is None or int(windows.max()) < size,
        f"tokenizer: it gives token {int(windows.max())}, {name} has {size}: use the tokenizer of the model",
    )


def _loss(model: nn.Module, ids: Tensor) -> Tensor:
    """Summed loss of the next-token predictions in windows [B, T], in float64 on the CPU."""
    ids = ids.to(model_device(model))
    output = run_model(model, {"input_ids": ids})
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    fits = isinstance(logits, Tensor) and logits.ndim == 3 and logits.shape[:2] == ids.shape
    require(
        fits,
        f"{type(model).__name__} gives no logits for every token: load it with AutoModelForCausalLM, with its head",
    )
    step = max(1, SLICE_BYTES // (4 * logits.shape[-1]))
    total = torch.zeros((), dtype=torch.float64)
    for window, scores in zip(ids, logits, strict=True):
        targets = window[1:].to(scores.device).split(step)
        for part, target in zip(scores[:-1].split(step), targets, strict=True):
            total += functional.cross_entropy(part.float(), target, reduction="none").cpu().double().sum()
    require(not bool(total.isnan()), f"{type(model).__name__} gives NaN logits: check its weights and its dtype")
    return total
