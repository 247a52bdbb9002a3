"""Perplexity by the protocol of the pruning literature, comparable with published numbers.

The text is tokenised as one stream and split into non-overlapping windows of the model's sequence length; perplexity is
the exponentiated mean loss of all next-token predictions within windows.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..data.sources import describe, short_name
from ..data.text import evaluation_text, tokenize, window_length
from ..errors import MoonshotError, Option, Text, check_whole, require
from ..model.calls import evaluation_mode, model_device, run_model
from ..model.isolation import isolated
from ..model.model_info import check_tokens, max_positions
from ..model.wide_products import wide_products
from ..progress import progress_bar
from ..reports.measurement import Measurement

# Logits are copied to float32 in slices of about this size: at once, a large vocabulary would take gigabytes.
SLICE_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Perplexity:
    """A perplexity and its data."""

    value: float
    dataset: str
    windows: int
    sequence_length: int  # tokens of a window
    tokens: int  # predicted tokens: windows · (sequence_length - 1)

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
    """Perplexity of a causal language model; lower is better.

    Args:
        model: with logits [B, T, vocabulary]; not changed.
        tokenizer: the model's Hugging Face tokenizer.
        dataset: "wikitext2", "c4" or "ptb" as in the literature; the path of a .txt, .json, .jsonl, .json.gz, .jsonl.gz
            or .parquet file, a list of strings or a `datasets.Dataset`, whose texts are joined by a blank line. Data
            with the columns of C4 (text, timestamp, url) or PTB (sentence), such as a downloaded shard, are read as
            that corpus.
        sequence_length: tokens of a window; None is the model's longest, at most 2048.
        batch_size: windows per forward pass.
        max_windows: the number of windows to evaluate, at most; None is all, and 256 for "c4".
        progress: show a progress bar of the windows.

    Raises:
        MoonshotError: data that cannot be read or is shorter than a window, or a model without logits, or with NaN.
    """
    check_whole("batch_size", batch_size, 1)
    if max_windows is not None:
        check_whole("max_windows", max_windows, 1)
    needed = "perplexity of text needs the model's tokenizer"
    require(tokenizer is not None, needed, field="tokenizer", value=None)
    length = window_length(sequence_length, max_positions(model))
    text, most = evaluation_text(dataset)
    windows = _windows(tokenize(tokenizer, text), length, max_windows or most, describe(dataset))
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
    return Perplexity(float((total / tokens).exp()), describe(dataset), len(windows), length, tokens)


def _windows(ids: list[int], length: int, most: int | None, name: str) -> Tensor:
    """At most `most` non-overlapping windows [W, length], without the remainder of the text."""
    count = len(ids) // length
    if count == 0:
        short = Text(f"{name}: the text has {len(ids)} tokens, fewer than {{}}", Option("sequence_length", length))
        shorter = Text("give more text or set {}", Option("sequence_length", len(ids)))
        raise MoonshotError(short, hint=shorter if len(ids) >= 2 else "give more text")
    count = min(count, most or count)
    return torch.tensor(ids[: count * length]).view(count, length)


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
        for part, target in zip(scores[:-1].split(step), targets, strict=True):
            total += functional.cross_entropy(part.float(), target, reduction="none").cpu().double().sum()
    finite = not bool(total.isnan())
    require(finite, f"{type(model).__name__} returns NaN logits", hint="check its weights and its dtype")
    return total
