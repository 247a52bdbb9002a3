"""Calibration and evaluation data from text or model inputs: batches of exactly `num_samples` samples.

* Running text: random windows of the token stream.
* Documents: one random window of each of `num_samples` documents longer than a window; if there are fewer, every
  document is a sample, padded per batch.
* Model inputs: the first `num_samples`, unchanged.
* `SelfCalibration`: prompts from which the dense model generates samples, for models whose training data are not
  available. A sample is generated token by token from the BOS token or from a prompt; if the model ends a text early,
  the sample continues with the next prompt. "Reasoning Models Can be Accurately Pruned Via Chain-of-Thought
  Reconstruction" (arXiv 2509.12464) calibrates reasoning models on their own chains of thought.

If the tokenizer puts BOS before a text, every sample of text begins with it, like the training data: without it, Gemma
3 270M has a perplexity of 161 instead of 41. Every random choice follows from `seed`; the global random state does not
change.
"""

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..errors import MoonshotError, check_number, check_path, check_whole, require, truncated_repr
from .batches import Batch, digest, sample_count, spread_samples, take
from .batches import batch_size as samples_of
from .sources import (
    CALIBRATION_SPLITS,
    CORPORA,
    HUB_DOCUMENTS,
    TEXT_SPLITS,
    Document,
    ModelInputs,
    Texts,
    as_messages,
    describe,
    file_rows,
    has_template,
    open_source,
    read_texts,
    render,
    short_name,
)

Samples = tuple[list[Tensor], list[str]]  # token ids, and notes
Prompt = str | Sequence[Mapping[str, Any]]
Usable = Callable[[Batch], Tensor]  # bool [B], True for the samples of a batch that a run can use

# Largest default length, in tokens, of an evaluated window and of a calibration sample. More samples are better than
# longer ones: KL divergence of SmolLM2-135M at 2:4 0.811 by 128 × 256, 0.822 by 128 × 512 (benchmarks/windows.py).
LONGEST, LONGEST_SAMPLE = 2048, 256
NO_TOKENIZER = "give the model's tokenizer, or save it in the model's folder"
SELF = "self"  # the `calibration` that stands for `SelfCalibration()`
# Columns of prompts, in order of preference.
COLUMNS = ("messages", "conversations", "prompt", "question", "problem", "instruction", "text")
TOKENIZED_TOGETHER = 64  # documents per call of the tokenizer


@dataclass(frozen=True)
class CalibrationData:
    """Calibration batches, and their description for the user."""

    batches: list[Batch]  # on the CPU; dim 0 of every tensor is the sample, at most batch_size of them
    num_samples: int
    sequence_length: int | None  # longest sample, in tokens; None without input_ids
    source: str  # "c4", a path, "list of 128 strings"
    digest: str  # sha256 of keys, shapes, dtypes and bytes of all samples in order
    notes: tuple[str, ...]
    model_inputs: bool = False  # the source contained model inputs, not text

    def spread(self, count: int, without: int = 0) -> "CalibrationData":
        """At most `count` evenly spaced samples, with the same description.

        Samples of ``spread(without)`` are excluded, unless these are all samples.
        """
        batches = spread_samples(self.batches, count, without)
        return replace(self, batches=batches, num_samples=sample_count(batches))

    def at_least(self, samples: int, tokens: int) -> int:
        """The number of samples that has at least so many samples and, if their length is known, so many tokens."""
        return max(samples, math.ceil(tokens / (self.sequence_length or tokens)))

    def describe(self) -> dict[str, Any]:
        """JSON types for reports, without private paths."""
        sizes = {"num_samples": self.num_samples, "sequence_length": self.sequence_length}
        return {"source": short_name(self.source), **sizes, "digest": self.digest}


def load_calibration(
    source: Any,
    tokenizer: Any,
    *,
    num_samples: int = 128,
    sequence_length: int | None = None,
    batch_size: int = 8,
    seed: int = 0,
    max_positions: int | None = None,
    usable: Usable | None = None,
) -> CalibrationData:
    """Exactly `num_samples` samples of `source` (see `MoonshotPruner.prune`), in batches of at most `batch_size`.

    A window has `sequence_length` tokens; None is the model's maximum, `max_positions`, but at most 256. Model inputs
    need no tokenizer and keep their length; their batches are split but never joined, and samples that are not `usable`
    are skipped.

    Raises:
        MoonshotError: data that does not exist, cannot be read, is too little, or contains NaN.
    """
    length = window_length(sequence_length, max_positions, LONGEST_SAMPLE)
    opened = open_source(source)
    if isinstance(opened, ModelInputs):
        batches, unlabelled = _take(opened, num_samples, batch_size, seed, max_positions, usable)
        notes = [*opened.notes, *([f"{unlabelled} samples without a label left out"] if unlabelled else [])]
    else:
        require(tokenizer is not None, "text calibration needs one", field="tokenizer", value=None, hint=NO_TOKENIZER)
        generator = torch.Generator().manual_seed(seed)
        draw = _documents if opened.joiner is None else _windows
        samples, notes = draw(opened, tokenizer, num_samples, length, generator)
        notes += ["every sample begins with the tokenizer's BOS"] if bos_of(tokenizer) else []
        batches = _collate(samples, batch_size, tokenizer)
    tokens = [batch["input_ids"].shape[-1] for batch in batches if "input_ids" in batch]
    name, longest, model_inputs = describe(source), max(tokens, default=None), isinstance(opened, ModelInputs)
    return CalibrationData(batches, num_samples, longest, name, digest(batches), tuple(notes), model_inputs)


def evaluation_text(source: Any, tokenizer: Any = None) -> tuple[str, int | None]:
    """The text to evaluate a model on, and the number of its windows in the literature; None is all.

    A named corpus is read as in the literature, in its test split. Records of files, data sets and lists are joined by
    a blank line, or as in C4 or PTB if they have its columns (text, timestamp, url; or sentence). Conversations,
    rendered by the tokenizer's chat template, follow each other directly.

    Raises:
        MoonshotError: data that does not exist, cannot be read, or is not text.
    """
    corpus = CORPORA.get(source) if isinstance(source, str) else None
    if corpus is not None:
        joiner, texts = corpus.joiner, read_texts(partial(corpus.load, corpus.test), source)
    else:
        opened = _open_text(source, TEXT_SPLITS)
        texts, corpus = opened.read(None), opened.corpus
        joiner = ("\n\n" if opened.joiner is None else opened.joiner) if corpus is None else corpus.joiner
    documents = list(islice(texts, None if corpus is None else corpus.documents))
    if any(not isinstance(document, str) for document in documents):
        joiner = ""
    return joiner.join(_strings(documents, tokenizer)), None if corpus is None else corpus.windows


def all_texts(source: Any, tokenizer: Any) -> Iterator[str]:
    """All texts of a source in order; of a streamed corpus, the first `HUB_DOCUMENTS`.

    Conversations are rendered by the tokenizer's chat template.

    Raises:
        MoonshotError: data that does not exist, cannot be read, or is not text.
    """
    opened = _open_text(source)
    documents = islice(opened.read(None), HUB_DOCUMENTS if opened.long_only else None)
    joiner = opened.joiner or ""
    return (text + joiner for text in _strings(documents, tokenizer))


def separate_texts(source: Any, tokenizer: Any) -> Iterator[str]:
    """The nonblank texts of a source, or of the test split of a named corpus; of running text, the nonblank lines.

    Conversations are rendered by the tokenizer's chat template.
    """
    opened = _open_text(source)
    corpus = CORPORA.get(source) if isinstance(source, str) else None
    texts = opened.read(None) if corpus is None else read_texts(partial(corpus.load, corpus.test), source)
    for text in _strings(texts, tokenizer):
        lines = [text] if opened.joiner is None else text.splitlines()
        yield from (line.strip() for line in lines if line.strip())


def _open_text(source: Any, splits: tuple[str, ...] = CALIBRATION_SPLITS) -> Texts:
    opened = open_source(source, splits)
    if not isinstance(opened, Texts):
        raise MoonshotError(f"{describe(source)} contains model inputs", hint="give text")
    return opened


def text_batches(texts: Iterator[str], tokenizer: Any, length: int, batch_size: int) -> Iterator[Batch]:
    """Every text as a sample of at most `length` tokens, in batches, padded on the right."""
    require(tokenizer is not None, "text needs the model's tokenizer", field="tokenizer", value=None)
    while chunk := list(islice(texts, batch_size)):
        ids = tokenizer(chunk, truncation=True, max_length=length, return_attention_mask=False)["input_ids"]
        yield from _collate([torch.tensor(sample) for sample in ids], batch_size, tokenizer)


def window_length(sequence_length: int | None, max_positions: int | None, longest: int = LONGEST) -> int:
    """Tokens of a window; None is the model's maximum, `max_positions`, but at most `longest`.

    Raises:
        MoonshotError: a length below 2, or beyond the model's positions.
    """
    if sequence_length is None:
        return min(max_positions or longest, longest)
    check_whole("sequence_length", sequence_length, 2)
    fits = not max_positions or sequence_length <= max_positions
    message = f"give at most the {max_positions} positions that the model has"
    require(fits, message, field="sequence_length", value=sequence_length)
    return sequence_length


def tokenize(tokenizer: Any, text: str | list[str]) -> Any:
    """Token ids of a text, or of each text in a list, without the tokenizer's warning about long texts."""
    return tokenizer(text, verbose=False, return_attention_mask=False)["input_ids"]


def tokenize_chat(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """Token ids of rendered conversations: a chat template writes the special tokens itself, usually also BOS."""
    bos = bos_of(tokenizer)
    lists = tokenizer(texts, add_special_tokens=False, verbose=False, return_attention_mask=False)["input_ids"]
    return [ids if not ids or ids[: len(bos)] == bos else bos + ids for ids in lists]


def bos_of(tokenizer: Any) -> list[int]:
    """The BOS that a tokenizer puts before every text, as a list; empty if it does not."""
    bos = getattr(tokenizer, "bos_token_id", None)
    return [bos] if bos is not None and tokenize(tokenizer, "a")[:1] == [bos] else []


def too_few(num_samples: int, message: str, available: int, more: str = "give more") -> MoonshotError:
    """The error of a source with fewer samples than requested, of which `available` would work."""
    hint = f"{more} or set num_samples={available}" if available else more
    return MoonshotError(message, field="num_samples", value=num_samples, hint=hint)


def _window(ids: list[int], length: int, generator: torch.Generator, bos: list[int]) -> Tensor:
    """`length` tokens: the `bos` of a text, then others from a random position; all tokens if there are fewer."""
    if len(ids) <= length:
        return torch.tensor(ids)
    first = len(bos)  # of the text's own tokens
    start = first + int(torch.randint(len(ids) - length + 1, (), generator=generator))
    return torch.tensor(bos + ids[start : start + length - first])


def _windows(texts: Texts, tokenizer: Any, num_samples: int, length: int, generator: torch.Generator) -> Samples:
    assert texts.joiner is not None  # running text
    ids = tokenize(tokenizer, texts.joiner.join(_strings(texts.read(None), tokenizer)))
    if len(ids) < length:
        short = f"the text has {len(ids)} tokens, fewer than sequence_length={length}"
        raise MoonshotError(short, hint="give more text or a shorter sequence")
    distinct = len(ids) - length + 1
    if num_samples > distinct:
        message = f"the text has {len(ids)} tokens, {distinct} different windows of {length}"
        raise too_few(num_samples, message, distinct, "give more text, a shorter sequence,")
    overlap = len(ids) < num_samples * length
    notes = [f"the text has {len(ids)} tokens: {num_samples} windows of {length} overlap"] * overlap
    bos = bos_of(tokenizer)
    return [_window(ids, length, generator, bos) for _ in range(num_samples)], notes


def _documents(texts: Texts, tokenizer: Any, num_samples: int, length: int, generator: torch.Generator) -> Samples:
    """Windows of long documents if there are enough; else `num_samples` documents of any length."""
    count = num_samples if texts.count is None else texts.count(num_samples)
    if count < num_samples:  # checked before tokenizing, which may take minutes
        raise too_few(num_samples, f"the data has {count} documents", count, "give more text")
    windows, samples, whole, usable, dropped, bos = [], [], 0, 0, 0, bos_of(tokenizer)
    for ids in _token_lists(texts.read(generator), tokenizer):
        if len(ids) < 2:
            dropped += 1
            continue
        sample = _window(ids, length, generator, bos)
        if len(ids) > length:
            windows.append(sample)
        if len(windows) == num_samples:
            return windows, []
        usable += 1
        if usable <= num_samples:
            samples.append(sample)
            whole += len(ids) <= length
    if texts.long_only:
        longer = f"only {len(windows)} documents are longer than sequence_length={length}"
        raise MoonshotError(longer, field="num_samples", value=num_samples, hint="lower one of the two")
    require(usable > 0, f"none of {dropped} documents has 2 tokens or more", hint="give more text")
    if usable < num_samples:
        raise too_few(num_samples, f"{usable} documents have 2 tokens or more", usable, "give more text")
    padded = ", padded per batch" if len({len(sample) for sample in samples}) > 1 else ""
    notes = [f"{whole} of {num_samples} documents used whole{padded}: {len(windows)} have more than {length} tokens"]
    return samples, notes + [f"{dropped} documents of fewer than 2 tokens dropped"] * bool(dropped)


def _strings(documents: Iterable[Document], tokenizer: Any) -> Iterator[str]:
    """The documents as text; conversations are rendered by the tokenizer's chat template, unless they are empty."""
    for number, document in enumerate(documents):
        if not isinstance(document, str):
            document = render(tokenizer, document, f"item {number} of the data") if document else ""
        yield document


def _token_lists(texts: Iterator[Document], tokenizer: Any) -> Iterator[list[int]]:
    while chunk := list(islice(texts, TOKENIZED_TOGETHER)):
        chat = any(not isinstance(document, str) for document in chunk)
        strings = [*_strings(chunk, tokenizer)]
        lists = tokenize_chat(tokenizer, strings) if chat else tokenize(tokenizer, strings)
        # An empty text has no tokens; a tokenizer may still add special ones.
        yield from (ids if text else [] for text, ids in zip(strings, lists, strict=True))


def _collate(samples: list[Tensor], batch_size: int, tokenizer: Any) -> list[Batch]:
    """Batches [B, T] in order, padded on the right, with a mask where padding was needed."""
    tokens = (getattr(tokenizer, name, None) for name in ("pad_token_id", "eos_token_id"))
    pad_token = next((token for token in tokens if token is not None), 0)  # any token: the mask hides it
    batches = []
    for start in range(0, len(samples), batch_size):
        group = samples[start : start + batch_size]
        lengths = torch.tensor([len(sample) for sample in group])
        batch = {"input_ids": pad_sequence(group, batch_first=True, padding_value=pad_token)}
        if lengths.min() < lengths.max():
            batch["attention_mask"] = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
        batches.append(batch)
    return batches


def _take(
    inputs: ModelInputs, num_samples: int, batch_size: int, seed: int, longest: int | None, usable: Usable | None
) -> tuple[list[Batch], int]:
    """The first usable samples, and the number of other samples between them."""
    batches, taken, omitted = list[Batch](), 0, 0
    # A DataLoader draws from the global random state, even without shuffling.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        for index, batch in enumerate(inputs.batches()):
            tokens = batch["input_ids"].shape[-1] if "input_ids" in batch else 0
            if longest and tokens > longest:
                hint = f"cut it to the {longest} positions of the model"
                raise MoonshotError(f"item {index} has {tokens} tokens", hint=hint)
            labelled = None if usable is None else usable(batch)
            if labelled is not None and not bool(labelled.all()):
                omitted += int((~labelled).sum())
                if not bool(labelled.any()):
                    continue
                batch = {name: tensor[labelled] for name, tensor in batch.items()}
            count = min(samples_of(batch), num_samples - taken)
            for start in range(0, count, batch_size):
                batches.append(take(batch, start, min(start + batch_size, count)))
            taken += count
            if taken == num_samples:
                return batches, omitted
    others = f" with a label, and {omitted} without" if omitted else ""
    raise too_few(num_samples, f"the data has {taken} samples{others}", taken)


@dataclass(frozen=True, kw_only=True)
class SelfCalibration:
    """Samples that the dense model generates; ``calibration="self"`` uses the defaults.

    Args:
        prompts: strings, conversations (lists of messages with role and content), or the path of a .txt file with a
            prompt on every line, or of a JSON (lines), CSV or Parquet file with a column of prompts. Prompts are
            used repeatedly, in an order that follows from the seed. None generates from the model's BOS token.
        chat: format prompts by the tokenizer's chat template; None does so if it has one.
        thinking: the template's `enable_thinking`; None leaves it to the template.
        temperature: of the sampling; 1 is the model's distribution.
        top_p: sample from the most likely tokens with this total probability; 1: from all tokens.
        batch_size: samples generated at a time. The samples depend on it.

    Raises:
        MoonshotError: a value of the wrong type or out of range.
    """

    prompts: str | os.PathLike[str] | Sequence[Prompt] | None = None
    chat: bool | None = None
    thinking: bool | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    batch_size: int = 32

    def __post_init__(self) -> None:
        check_number("temperature", self.temperature)
        require(self.temperature > 0, "it must be above 0", field="temperature", value=self.temperature)
        check_number("top_p", self.top_p)
        require(0 < self.top_p <= 1, "it must be above 0 and at most 1", field="top_p", value=self.top_p)
        check_whole("batch_size", self.batch_size, least=1)
        for name in ("chat", "thinking"):
            value = getattr(self, name)
            require(value is None or isinstance(value, bool), "use True, False or None", field=name, value=value)
        if isinstance(self.prompts, str | os.PathLike):
            check_path("prompts", self.prompts)
            path, hint = os.fspath(self.prompts), "give its path, or prompts in a list"
            require(os.path.isfile(os.path.expanduser(path)), "no such file", field="prompts", value=path, hint=hint)
        elif self.prompts is not None:
            listed = isinstance(self.prompts, Sequence) and len(self.prompts) > 0
            accepted = "give a list of strings or of conversations, or a path"
            require(listed, accepted, field="prompts", value=self.prompts)
            object.__setattr__(self, "prompts", tuple(map(_checked, self.prompts)))

    @classmethod
    def of(cls, calibration: Any) -> "SelfCalibration | None":
        """The settings, if `calibration` requests generated data; None for other data."""
        if isinstance(calibration, cls):
            return calibration
        return cls() if isinstance(calibration, str) and calibration == SELF else None

    def describe(self) -> str:
        """The description in reports, without private paths."""
        sampling = f"temperature {self.temperature:g}" + (f", top_p {self.top_p:g}" if self.top_p < 1 else "")
        if isinstance(self.prompts, str | os.PathLike):
            start = f"prompts of {short_name(os.fspath(self.prompts))}"
        else:
            start = "its BOS token" if self.prompts is None else f"{len(self.prompts)} prompts"
        return f"{SELF} ({sampling}, from {start})"

    def beginnings(self, tokenizer: Any, bos: int | None, length: int) -> list[list[int]]:
        """The tokens of the prompts, fewer than `length`, or the BOS token without prompts.

        Raises:
            MoonshotError: no BOS token and no prompts, no tokenizer or chat template for prompts, or prompts that
                cannot be read or are too long.
        """
        if self.prompts is None:
            if bos is None:
                hint = "give prompts, SelfCalibration(prompts=[...])"
                raise MoonshotError("the model has no BOS token", field="calibration", value=SELF, hint=hint)
            return [[bos]]
        give = "give the model's tokenizer"
        require(tokenizer is not None, "prompts need one", field="tokenizer", value=None, hint=give)
        template = has_template(tokenizer)
        missing = "the tokenizer has no chat template"
        require(template or not self.chat, missing, field="chat", value=self.chat, hint="leave it out")
        beginnings = []
        for number, prompt in enumerate(self._read()):
            tokens = self._tokens(tokenizer, prompt, template and self.chat is not False, number)
            require(len(tokens) > 0, f"number {number} has no tokens", field="prompts", hint="leave it out")
            if len(tokens) >= length:
                message = (
                    f"number {number} has {len(tokens)} tokens, and sequence_length={length} has no room for an answer"
                )
                raise MoonshotError(message, field="prompts", hint="give shorter prompts, or longer samples")
            beginnings.append(tokens)
        return beginnings

    def _read(self) -> Sequence[Prompt]:
        if not isinstance(self.prompts, str | os.PathLike):
            return self.prompts or ()
        path, prompts = os.fspath(self.prompts), []
        for row in file_rows(path):
            column = next((name for name in COLUMNS if name in row), None)
            if column is None:
                message, hint = f"the data has the columns {', '.join(row)}", "rename the one with prompts to prompt"
                raise MoonshotError(message, field="prompts", value=path, hint=hint)
            if row[column]:
                prompts.append(_checked(row[column]))
        give = "give some, or leave it out"
        require(len(prompts) > 0, "it has no prompts", field="prompts", value=path, hint=give)
        return prompts

    def _tokens(self, tokenizer: Any, prompt: Prompt, chat: bool, number: int) -> list[int]:
        if not chat:
            if not isinstance(prompt, str):
                message = f"number {number} is a conversation, which needs a chat template"
                raise MoonshotError(message, field="prompts", hint="give strings")
            return list(tokenize(tokenizer, prompt))
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*map(dict, prompt)]
        options = {} if self.thinking is None else {"enable_thinking": self.thinking}
        options |= {"add_generation_prompt": True}
        return tokenize_chat(tokenizer, [render(tokenizer, messages, f"number {number}", "prompts", **options)])[0]


def _checked(prompt: Any) -> Prompt:
    """A string, or a list of messages."""
    if isinstance(prompt, str):
        return prompt
    try:
        if isinstance(prompt, Sequence) and len(prompt) > 0:
            return as_messages(prompt, "it")
    except MoonshotError:
        pass
    raise MoonshotError(f"{truncated_repr(prompt)} is neither a string nor a list of messages", field="prompts")


def check_named_source(source: Any) -> None:
    """Raise `MoonshotError` if calibration data are a file that is missing, or cannot be read."""
    if isinstance(source, str | os.PathLike) and SelfCalibration.of(source) is None:
        open_source(source)
