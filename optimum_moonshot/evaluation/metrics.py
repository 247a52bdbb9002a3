"""Metrics of a model: perplexity, top-1 accuracy, and agreement with the original dense model.

Perplexity follows the protocol of the pruning literature, and is comparable with published numbers. The text is
tokenised as one stream and split into non-overlapping windows of the model's sequence length. Perplexity is the
exponential of the mean loss of all next-token predictions within windows. In the literature only the first window
begins with BOS; models that were trained with BOS before every context need it before each window.

The agreement of language models is the divergence of their predictions. It tells more than perplexity about models that
were trained on more than plain text, such as instructions. For models without a head, it is the similarity of their
embeddings, which are pooled as the dense checkpoint declares, or else averaged over the positions.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm

from ..data.batches import Batch, batch_size, take
from ..data.images import EVALUATION_SPLITS, class_numbers, image_batches, open_images
from ..data.sources import Texts, describe, input_batches, open_source, short_name
from ..data.text import bos_of, evaluation_text, separate_texts, text_batches, tokenize, window_length
from ..errors import MoonshotError, check_whole, require
from ..model.calls import Forward, called_by, evaluation_mode, model_device, run_model, to_device
from ..model.embeddings import Pooling, find_pooling
from ..model.isolation import isolated, wide_products
from ..model.losses import checked_labels, pooled_output
from ..model.model_info import check_tokens, max_positions, takes_images
from ..progress import progress_bar
from ..reports.prune_report import Measurement, metric_key

# Logits are converted to float32 in slices of about this size; with a large vocabulary, the whole takes gigabytes.
SLICE_BYTES = 64 * 2**20
NEIGHBOURS = 1024  # samples whose similarities to all others are computed at a time


@dataclass(frozen=True)
class Perplexity:
    """A perplexity and its data."""

    value: float
    dataset: str
    windows: int
    sequence_length: int  # tokens of a window
    tokens: int  # predicted tokens: windows · (sequence_length - 1)
    bos: bool = False  # every window begins with BOS

    @property
    def settings(self) -> dict[str, Any]:
        settings = {"windows": self.windows, "sequence_length": self.sequence_length}
        return settings | ({"bos": True} if self.bos else {})

    def measurements(self) -> dict[str, Measurement]:
        return {short_name(self.dataset): Measurement("perplexity", self.value, self.settings)}


@dataclass(frozen=True)
class Divergence(Perplexity):
    """A perplexity, and the divergence of the model's predictions from the dense model's predictions."""

    kl: float = field(kw_only=True)  # mean of KL(dense ‖ model) over the predicted tokens, in nats
    agreement: float = field(kw_only=True)  # fraction of the positions where both predict the same top token
    dense: float = field(kw_only=True)  # perplexity of the dense model

    @property
    def of_dense(self) -> Perplexity:
        """The dense model's perplexity on the same data."""
        return Perplexity(self.dense, self.dataset, self.windows, self.sequence_length, self.tokens, self.bos)

    def measurements(self) -> dict[str, Measurement]:
        values, name = {"KL divergence": self.kl, "same top token": self.agreement}, short_name(self.dataset)
        more = {metric_key(name, metric): Measurement(metric, value, self.settings) for metric, value in values.items()}
        return super().measurements() | more


def perplexity(
    model: nn.Module,
    tokenizer: Any,
    dataset: Any = "wikitext2",
    *,
    sequence_length: int | None = None,
    batch_size: int = 4,
    max_windows: int | None = None,
    bos: bool | None = None,
    against: nn.Module | None = None,
    progress: bool = False,
) -> Perplexity:
    """Perplexity of a causal language model; lower is better.

    Args:
        model: with logits [B, T, vocabulary]; not changed.
        tokenizer: the model's Hugging Face tokenizer.
        dataset: "wikitext2", "c4" or "ptb" as in the literature; the path of a .txt, .json, .jsonl, .json.gz,
            .jsonl.gz, .csv or .parquet file, the name of a data set on the Hub (its test or validation split, at most
            10,000 rows), a list of strings or a `datasets.Dataset`, whose texts are joined by a blank line.
            Conversations are rendered by the tokenizer's chat template. Data with the columns of C4 (text, timestamp,
            url) or PTB (sentence), such as a downloaded shard, are read as that corpus.
        sequence_length: tokens of a window; None is the model's maximum, at most 2048.
        batch_size: windows per forward pass.
        max_windows: the largest number of windows to evaluate; None is all, and 256 for "c4".
        bos: whether every window begins with BOS, which replaces one token of text; None: if the tokenizer adds BOS
            to a text. False is the protocol of published numbers, where only the text as a whole begins with BOS.
        against: the original dense model, with the same vocabulary; the result is then a `Divergence`.
        progress: show a progress bar of the windows.

    Raises:
        MoonshotError: data that cannot be read or is shorter than a window, or a model without logits, or with NaN.
    """
    check_whole("batch_size", batch_size, 1)
    if max_windows is not None:
        check_whole("max_windows", max_windows, 1)
    message, hint = "perplexity of text needs the model's tokenizer", "pass it, or save it in the model's folder"
    require(tokenizer is not None, message, field="tokenizer", value=None, hint=hint)
    valid = bos is None or isinstance(bos, bool)
    require(valid, "use True, False or None", field="bos", value=bos)
    token = getattr(tokenizer, "bos_token_id", None)
    require(not bos or token is not None, "the tokenizer has no BOS token", field="bos", value=bos)
    first = bos_of(tokenizer) if bos is None or token is None else [int(token)] * bos
    length = window_length(sequence_length, max_positions(model))
    text, most = evaluation_text(dataset, tokenizer)
    windows = _windows(tokenize(tokenizer, text), length, max_windows or most, describe(dataset), first)
    encoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    hint = "perplexity of text needs a causal language model"
    require(not encoder, f"{type(model).__name__} is an encoder-decoder", hint=hint)
    check_tokens(model, windows, "tokenizer")
    bar = progress_bar(total=len(windows), desc="perplexity", shown=progress)
    sums, tokens = _sums(model, against, windows.split(batch_size), bar), len(windows) * (length - 1)
    values, (kl, same) = (sums[:2] / tokens).exp().tolist(), (sums[2:] / tokens).tolist()
    shared = values[0], describe(dataset), len(windows), length, tokens, bool(first)
    return Perplexity(*shared) if against is None else Divergence(*shared, kl=kl, agreement=same, dense=values[1])


def _sums(model: nn.Module, dense: nn.Module | None, batches: Sequence[Tensor], bar: "tqdm[Any]") -> Tensor:
    """Add the `_prediction_sums` of all windows, [4] in float64."""
    total = torch.zeros(4, dtype=torch.float64)
    with ExitStack() as stack:
        stack.enter_context(bar)
        models = [stack.enter_context(isolated(one)) for one in (model, dense) if one is not None]
        for one in models:
            stack.enter_context(evaluation_mode(one))
        stack.enter_context(torch.no_grad())
        for windows in batches:
            total += _prediction_sums(windows, *(_next_logits(one, windows) for one in models))
            _check_finite(model, total[0], " logits")
            bar.update(len(windows))
    return total


def _windows(ids: list[int], length: int, most: int | None, name: str, bos: list[int]) -> Tensor:
    """At most `most` non-overlapping windows [W, length] that begin with `bos`, without the remainder of the text."""
    while bos and ids[:1] == bos:
        ids = ids[1:]
    content = length - len(bos)
    count = len(ids) // content
    if count == 0:
        size = len(ids) + len(bos)
        short = f"{name}: the text has {size} tokens, fewer than sequence_length={length}"
        shorter = f"give more text or set sequence_length={size}"
        raise MoonshotError(short, hint=shorter if size >= 2 else "give more text")
    count = min(count, most or count)
    windows = torch.tensor(ids[: count * content]).view(count, content)
    return torch.cat([torch.tensor(bos, dtype=torch.int64).expand(count, -1), windows], 1) if bos else windows


def _next_logits(model: nn.Module, ids: Tensor) -> Tensor:
    """The logits [B, T - 1, vocabulary] of the next tokens in windows [B, T]."""
    with wide_products(model):
        logits = _logits(model, {"input_ids": ids.to(model_device(model))})
    if not isinstance(logits, Tensor) or logits.ndim != 3 or logits.shape[:2] != ids.shape:
        message = f"{type(model).__name__} returns no logits for every token"
        raise MoonshotError(message, hint="load it with AutoModelForCausalLM, with its head")
    return logits[:, :-1]


def _prediction_sums(ids: Tensor, logits: Tensor, dense: Tensor | None = None) -> Tensor:
    """Sums over the predicted tokens of windows [B, T]: of the loss, and of the dense model's loss, KL and agreement.

    The result is [4] in float64 on the CPU; the last three are 0 without the dense model's logits.
    """
    vocabulary = logits.shape[-1]
    shapes = f"{vocabulary} tokens, the dense model {0 if dense is None else dense.shape[-1]}"
    require(dense is None or dense.shape[-1] == vocabulary, f"the model predicts {shapes}", field="against")
    sums, step = torch.zeros(4, dtype=torch.float64), max(1, SLICE_BYTES // (4 * vocabulary))
    for window, *of_window in zip(ids, logits, *([] if dense is None else [dense]), strict=True):
        targets = window[1:].to(logits.device).split(step)
        for target, *rows in zip(targets, *(scores.split(step) for scores in of_window), strict=True):
            predicted, *dense_log = (scores.to(logits.device).float().log_softmax(-1) for scores in rows)
            values = [functional.nll_loss(log, target, reduction="none") for log in (predicted, *dense_log)]
            for expected in dense_log:
                values += [
                    (expected.exp() * (expected - predicted)).sum(-1),
                    expected.argmax(-1) == predicted.argmax(-1),
                ]
            sums[: len(values)] += torch.stack([value.cpu().double().sum() for value in values])
    return sums


def _logits(model: nn.Module, batch: Batch) -> Any:
    """The logits of a batch; None if the output has none."""
    output = run_model(model, batch)
    return output if isinstance(output, Tensor) else getattr(output, "logits", None)


def _check_finite(model: nn.Module, values: Tensor, name: str = "") -> None:
    """Raise `MoonshotError` if values that the model returned, or a sum of them, contain NaN."""
    message, hint = f"{type(model).__name__} returns NaN{name}", "check its weights and its dtype"
    require(not bool(values.isnan().any()), message, hint=hint)


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
    correct, seen = 0, 0
    bar = progress_bar(desc="accuracy", unit="image", shown=progress)
    with isolated(model) as model, evaluation_mode(model), wide_products(model), called_by(model, forward), bar:
        for batch in _first(batches, max_images):
            hits = _hits(model, to_device(batch, model_device(model)))
            correct, seen = correct + int(hits.sum()), seen + len(hits)
            bar.update(len(hits))
    require(seen > 0, f"{describe(dataset)} has no images")
    return Accuracy(correct / seen, describe(dataset), seen)


@torch.no_grad()
def _hits(model: nn.Module, batch: Batch) -> Tensor:
    """Bool [B], True where the label has the largest logit."""
    require("labels" in batch, "the data has no labels", hint="accuracy needs them")
    logits = _logits(model, batch)
    if not isinstance(logits, Tensor) or logits.ndim != 2:
        message = f"{type(model).__name__} returns no logits [images, classes]"
        raise MoonshotError(message, hint="load it with its classifier")
    _check_finite(model, logits, " logits")
    return logits.argmax(-1) == checked_labels(batch["labels"].to(logits.device), logits)


@dataclass(frozen=True)
class Agreement:
    """The agreement of a model's embeddings with the dense model's."""

    value: float  # mean cosine of the two embeddings of a sample
    neighbours: float  # fraction of the samples with the same nearest neighbour in both models
    dataset: str
    samples: int
    sequence_length: int | None  # the most tokens of a text; None for other data
    embedding: str  # how outputs are pooled

    def measurements(self) -> dict[str, Measurement]:
        settings = {name: asdict(self)[name] for name in ("samples", "sequence_length", "embedding")}
        values, name = {"cosine": self.value, "same neighbour": self.neighbours}, short_name(self.dataset)
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
        """Return the index of each sample's nearest other sample, int64 [N]."""
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
    """Compare the embeddings of a model without a head with the embeddings of the original dense model.

    Args:
        model: not changed.
        dense: not changed.
        dataset: see `embeddings`.
        tokenizer: the tokenizer of both models, for text.
        processor: the image processor of both models, for images.
        options: further arguments of `embeddings`.

    Raises:
        MoonshotError: like `embeddings`, or embeddings of different sizes.
    """
    reference = embeddings(dense, dataset, tokenizer, processor, **options)
    options["pooling"] = reference.pooling
    return embeddings(model, dataset, tokenizer, processor, **options).agreement(reference)


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
    """Compute the embeddings of a data set with a model that has no head.

    Args:
        model: with hidden states or embeddings in its output; not changed.
        dataset: text like for `perplexity`, each record or line a sample; images like for `accuracy`; or an iterable of
            model inputs.
        tokenizer: the model's Hugging Face tokenizer, for text.
        processor: the model's image processor, for images.
        sequence_length: the number of tokens to which texts are truncated; None is the model's maximum, at most 2048.
        batch_size: samples per forward pass; batches of model inputs keep their size.
        max_samples: the largest number of samples; None is all.
        pooling: how outputs are pooled; None is the pooling that the model's checkpoint declares, else the mean.
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
    batches, length = _batches(model, dataset, tokenizer, processor, sequence_length, batch_size)
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
    _check_finite(model, joined)
    return Embeddings(joined, describe(dataset), length, pooling)


def _batches(
    model: nn.Module, dataset: Any, tokenizer: Any, processor: Any, sequence_length: int | None, batch_size: int
) -> tuple[Iterator[Batch], int | None]:
    """Return the batches of a data set for `embeddings`, and the most tokens of a text (None for other data)."""
    images = open_images(dataset, EVALUATION_SPLITS) if takes_images(model) else None
    if images is not None:
        return image_batches(images, model, processor, None, batch_size), None
    source, length = open_source(dataset), window_length(sequence_length, max_positions(model))
    if isinstance(source, Texts):
        return text_batches(separate_texts(dataset, tokenizer), tokenizer, length, batch_size), length
    return source.batches(), None


def _first(batches: Iterator[Batch], most: int | None) -> Iterator[Batch]:
    """The batches of the first `most` samples."""
    seen = 0
    for batch in batches:
        batch = batch if most is None else take(batch, 0, most - seen)
        seen += batch_size(batch)
        yield batch
        if seen == most:
            return
