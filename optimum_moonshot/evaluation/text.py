"""Perplexity by the protocol of the pruning literature, comparable with published numbers.

The text is tokenised as one stream and split into non-overlapping windows of the model's sequence length. Perplexity is
the exponential of the mean loss of all next-token predictions within windows. In the literature only the first window
begins with BOS; models that were trained with BOS before every context need it before each window.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..data.sources import describe, short_name
from ..data.text import bos_of, evaluation_text, tokenize, window_length
from ..errors import MoonshotError, Option, Text, check_whole, require
from ..model.calls import evaluation_mode, model_device, run_model
from ..model.isolation import isolated
from ..model.model_info import check_tokens, max_positions
from ..model.wide_products import wide_products
from ..progress import progress_bar
from ..reports.measurement import Measurement

# Logits are converted to float32 in slices of about this size; with a large vocabulary, all of them are gigabytes.
SLICE_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Perplexity:
    """A perplexity and its data."""

    value: float
    dataset: str
    windows: int
    sequence_length: int  # tokens of a window
    tokens: int  # predicted tokens: windows · (sequence_length - 1)
    bos: bool = False  # every window begins with BOS

    def measurements(self) -> dict[str, Measurement]:
        settings = {"windows": self.windows, "sequence_length": self.sequence_length}
        settings |= {"bos": True} if self.bos else {}
        return {short_name(self.dataset): Measurement("perplexity", self.value, settings)}


def perplexity(
    model: nn.Module,
    tokenizer: Any,
    dataset: Any = "wikitext2",
    *,
    sequence_length: int | None = None,
    batch_size: int = 4,
    max_windows: int | None = None,
    bos: bool | None = None,
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
        bos: whether every window begins with BOS, which replaces one token of text; None: if the tokenizer puts it
            before a text. False is the protocol of published numbers, where only the whole text does.
        progress: show a progress bar of the windows.

    Raises:
        MoonshotError: data that cannot be read or is shorter than a window, or a model without logits, or with NaN.
    """
    check_whole("batch_size", batch_size, 1)
    if max_windows is not None:
        check_whole("max_windows", max_windows, 1)
    needed = "perplexity of text needs the model's tokenizer"
    require(
        tokenizer is not None, needed, field="tokenizer", value=None, hint="pass it, or save it in the model's folder"
    )
    valid = bos is None or isinstance(bos, bool)
    require(valid, "use True, False or None", field="bos", value=bos)
    token = getattr(tokenizer, "bos_token_id", None)
    require(not bos or token is not None, "the tokenizer has no BOS token", field="bos", value=bos)
    first = bos_of(tokenizer) if bos is None or token is None else [int(token)] * bos
    length = window_length(sequence_length, max_positions(model))
    text, most = evaluation_text(dataset, tokenizer)
    windows = _windows(tokenize(tokenizer, text), length, max_windows or most, describe(dataset), first)
    encoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    needed = "perplexity of text needs a causal language model"
    require(not encoder, f"{type(model).__name__} is an encoder-decoder", hint=needed)
    check_tokens(model, windows, "tokenizer")
    total = torch.zeros((), dtype=torch.float64)
    bar = progress_bar(total=len(windows), desc="perplexity", shown=progress)
    with isolated(model) as model, evaluation_mode(model), torch.no_grad(), bar:
        for batch in windows.split(batch_size):
            total += _loss(model, batch)
            bar.update(len(batch))
    tokens = len(windows) * (length - 1)
    return Perplexity(float((total / tokens).exp()), describe(dataset), len(windows), length, tokens, bool(first))


def _windows(ids: list[int], length: int, most: int | None, name: str, bos: list[int]) -> Tensor:
    """At most `most` non-overlapping windows [W, length] that begin with `bos`, without the remainder of the text."""
    while bos and ids[:1] == bos:
        ids = ids[1:]
    content = length - len(bos)
    count = len(ids) // content
    if count == 0:
        size = len(ids) + len(bos)
        short = Text(f"{name}: the text has {size} tokens, fewer than {{}}", Option("sequence_length", length))
        shorter = Text("give more text or set {}", Option("sequence_length", size))
        raise MoonshotError(short, hint=shorter if size >= 2 else "give more text")
    count = min(count, most or count)
    windows = torch.tensor(ids[: count * content]).view(count, content)
    return torch.cat([torch.tensor(bos, dtype=torch.int64).expand(count, -1), windows], 1) if bos else windows


def _loss(model: nn.Module, ids: Tensor) -> Tensor:
    """Summed loss of the next-token predictions in windows [B, T], in float64 on the CPU."""
    ids = ids.to(model_device(model))
    with wide_products(model):
        output = run_model(model, {"input_ids": ids})
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(logits, Tensor) or logits.ndim != 3 or logits.shape[:2] != ids.shape:
        message = f"{type(model).__name__} returns no logits for every token"
        raise MoonshotError(message, hint="load it with AutoModelForCausalLM, with its head")
    step = max(1, SLICE_BYTES // (4 * logits.shape[-1]))
    total = torch.zeros((), dtype=torch.float64)
    for window, scores in zip(ids, logits, strict=True):
        targets = window[1:].to(scores.device).split(step)
        for piece, target in zip(scores[:-1].split(step), targets, strict=True):
            total += functional.cross_entropy(piece.float(), target, reduction="none").cpu().double().sum()
    finite = not bool(total.isnan())
    require(finite, f"{type(model).__name__} returns NaN logits", hint="check its weights and its dtype")
    return total
