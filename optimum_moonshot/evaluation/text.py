"""Perplexity and top-1 accuracy by the protocol of the pruning literature, so that numbers compare with published ones.

For perplexity, text is tokenised as one stream and cut into windows of the model's sequence length that do not overlap;
it is the exponentiated mean loss of every next-token prediction inside a window.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..data.corpora import describe, short_name
from ..data.text import evaluation_text, tokenize, window_length
from ..errors import MoonshotError, check_whole, require
from ..model.calls import evaluation_mode, model_device, run_model
from ..model.model_info import check_tokens, max_positions
from ..progress import progress_bar
from ..reports.measurement import Measurement

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
        progress: show a bar of the windows.

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
        progress_bar(total=len(windows), desc="perplexity", shown=progress) as bar,
    ):
        for batch in windows.split(batch_size):
            total += _loss(model, batch)
            bar.update(len(batch))
    tokens = len(windows) * (length - 1)
    return Perplexity(float((total / tokens).exp()), describe(dataset), len(windows), length, tokens)


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
    check_tokens(model, windows, "tokenizer")


def _loss(model: nn.Module, ids: Tensor) -> Tensor:
    """Summed loss of the next-token predictions in windows [B, T], in float64 on the CPU."""
    ids = ids.to(model_device(model))
    output = run_model(model, {"input_ids": ids})
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(logits, Tensor) or logits.ndim != 3 or logits.shape[:2] != ids.shape:
        name = type(model).__name__
        raise MoonshotError(f"{name} gives no logits for every token: load it with AutoModelForCausalLM, with its head")
    step = max(1, SLICE_BYTES // (4 * logits.shape[-1]))
    total = torch.zeros((), dtype=torch.float64)
    for window, scores in zip(ids, logits, strict=True):
        targets = window[1:].to(scores.device).split(step)
        for part, target in zip(scores[:-1].split(step), targets, strict=True):
            total += functional.cross_entropy(part.float(), target, reduction="none").cpu().double().sum()
    require(not bool(total.isnan()), f"{type(model).__name__} gives NaN logits: check its weights and its dtype")
    return total
