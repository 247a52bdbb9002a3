"""Calibration data: text or model inputs in, batches of exactly `num_samples` samples out.

`_open` tells three kinds of sources apart:

* running text (a .txt file, "wikitext2", "ptb"): one stream of tokens, random windows of it;
* documents ("c4", JSON, Parquet, strings, a data set with a text column): one random window from each of `num_samples`
  documents longer than a window; without enough of those every document is a sample, padded per batch;
* model inputs (dictionaries of tensors, a data set with tokens): the first `num_samples`, as they are.

Every random choice comes from `seed`; the global random state stays as it is.
"""

import glob
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict, load_dataset
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..errors import MoonshotError, check_whole, reason, require
from .batches import INPUT_RANKS, Batch, as_batch, digest, take, unpack
from .batches import batch_size as samples_of

Samples = tuple[list[Tensor], list[str]]  # token ids, and notes
Load = Callable[[], Dataset | IterableDataset]

LONGEST = 2048  # tokens of a sample where neither the user nor the model sets a length
SHUFFLE_BUFFER = 10_000  # documents among which a streamed data set is shuffled
TOKENIZED_TOGETHER = 64  # documents per call of the tokenizer
FORMATS = (".txt", ".json", ".jsonl", ".json.gz", ".jsonl.gz", ".parquet")
TEXT_COLUMNS = ("text", "sentence", "content")


@dataclass(frozen=True)
class Corpus:
    """A data set of the literature: where it lies on the Hub, and how its records become one text."""

    path: str
    joiner: str
    options: dict[str, Any]  # of `load_dataset`
    files: dict[str, str] = field(default_factory=dict)  # of the splits; empty: all
    test: str = "test"  # the split that models are evaluated on
    documents: int | None = None  # how many of that split the literature reads
    windows: int | None = None  # and how many windows of these
    columns: frozenset[str] = frozenset()  # those by which a file of its form is known
    running: bool = True  # whether calibration windows come from the joined text, not each from a document

    def load(self, split: str) -> Dataset | IterableDataset:
        files = {"data_files": {split: self.files[split]}} if self.files else {}
        return load_dataset(self.path, split=split, **files, **self.options)


C4_FILES = {"train": "en/c4-train.00000-of-01024.json.gz", "validation": "en/c4-validation.00000-of-00008.json.gz"}
CORPORA = {
    "c4": Corpus(
        "allenai/c4", " ", {"streaming": True}, C4_FILES, "validation",
        documents=1100, windows=256, columns=frozenset({"text", "timestamp", "url"}), running=False,
    ),
    "wikitext2": Corpus("Salesforce/wikitext", "\n\n", {"name": "wikitext-2-raw-v1"}),
    "ptb": Corpus(
        "ptb-text-only/ptb_text_only", " ", {"revision": "refs/convert/parquet"}, columns=frozenset({"sentence"})
    ),
}  # fmt: skip
ACCEPTED = (
    f"use {', '.join(CORPORA)}, the path of a {', '.join(FORMATS)} file, a list of strings, a datasets.Dataset, "
    "or an iterable of model inputs"
)


@dataclass(frozen=True)
class CalibrationData:
    """What a model is calibrated on, and what the user should know about it."""

    batches: list[Batch]  # on the CPU; dim 0 of every tensor is the sample, at most batch_size of them
    num_samples: int
    sequence_length: int | None  # longest sample, in tokens; None where there are no input_ids
    source: str  # "c4", a path, "list of 128 strings"
    digest: str  # sha256 of keys, shapes, dtypes and bytes of all batches in order
    notes: tuple[str, ...]
    given: bool = False  # model inputs, as they are

    def describe(self) -> dict[str, Any]:
        """For reports, as JSON types. They may be published: a file is known there by its name, not by its path."""
        source = short_name(self.source)
        known = {name: getattr(self, name) for name in ("num_samples", "sequence_length", "digest")}
        return {"source": source, **known}


def load_calibration(
    source: Any,
    tokenizer: Any,
    *,
    num_samples: int = 128,
    sequence_length: int | None = None,
    batch_size: int = 8,
    seed: int = 0,
    max_positions: int | None = None,
) -> CalibrationData:
    """Exactly `num_samples` samples of `source`, in batches.

    Args:
        source: "c4", "wikitext2" or "ptb"; the path of a .txt, .json, .jsonl, .json.gz, .jsonl.gz or .parquet file; a
            list of strings; a `datasets.Dataset` or `IterableDataset`; or an iterable of model inputs, dictionaries of
            tensors with a batch dimension, or pairs of inputs and labels.
        tokenizer: a Hugging Face tokenizer; may be None for model inputs.
        num_samples: how many.
        sequence_length: tokens of a window; None is the model's longest, at most 2048. Model inputs keep their length.
        batch_size: samples of a batch, at most. Batches of model inputs are split but never joined.
        seed: of every random choice.
        max_positions: the model's longest sequence in tokens; None where it has no limit.

    Raises:
        MoonshotError: data that does not exist, cannot be read, is too little, or holds NaN.
    """
    for name, value, least in (("num_samples", num_samples, 1), ("batch_size", batch_size, 1), ("seed", seed, 0)):
        check_whole(name, value, least)
    length = window_length(sequence_length, max_positions)
    described, opened = describe(source), open_source(source)
    if isinstance(opened, _Inputs):
        batches, notes = _take(opened, num_samples, batch_size, seed, max_positions), [*opened.notes]
    else:
        require(tokenizer is not None, "tokenizer=None: text calibration needs one, give the model's tokenizer")
        generator = torch.Generator().manual_seed(seed)
        choose = _documents if opened.joiner is None else _windows
        samples, notes = choose(opened, tokenizer, num_samples, length, generator)
        batches = _collate(samples, batch_size, tokenizer)
    tokens = [batch["input_ids"].shape[-1] for batch in batches if "input_ids" in batch]
    longest, given = max(tokens, default=None), isinstance(opened, _Inputs)
    return CalibrationData(batches, num_samples, longest, described, digest(batches), tuple(notes), given)


def evaluation_text(source: Any) -> tuple[str, int | None]:
    """Text to evaluate a model on: a named data set's test split as the literature reads it, or all text of `source`.

    Also how many of its windows the literature reads; None is all.

    Records of files, data sets and lists are joined by a blank line; those with the columns of C4 (text, timestamp,
    url) or PTB (sentence) as these are.

    Raises:
        MoonshotError: data that does not exist, cannot be read, or is no text.
    """
    if isinstance(source, str) and source in CORPORA:
        corpus = CORPORA[source]
        texts = _texts(partial(corpus.load, corpus.test), source)
    else:
        opened = open_source(source)
        if not isinstance(opened, _Texts):
            raise MoonshotError(f"{describe(source)}: model inputs, where text is needed")
        texts = opened.read(None)
        if opened.corpus is None:
            return ("\n\n" if opened.joiner is None else opened.joiner).join(texts), None
        corpus = opened.corpus
    return corpus.joiner.join(islice(texts, corpus.documents)), corpus.windows


def describe(source: Any) -> str:
    """A few words that name a source in reports and messages."""
    if isinstance(source, str | os.PathLike):
        return os.fspath(source)
    if isinstance(source, list | tuple):
        strings = bool(source) and isinstance(source[0], str)
        return f"{type(source).__name__} of {len(source)} {'strings' if strings else 'items'}"
    return f"Dataset of {len(source)} rows" if isinstance(source, Dataset) else type(source).__name__


def is_hub_name(source: str) -> bool:
    """Whether this may name a data set on the Hub, an owner/name; a file that is misspelt has a suffix."""
    return re.fullmatch(r"[\w.-]+/[\w.-]+", source) is not None and not source.endswith(FORMATS)


def short_name(source: str) -> str:
    """What `describe` gives as it may be published: a file or folder by its name, not by its path."""
    if not os.path.exists(source) and is_hub_name(source):
        return source
    return Path(os.path.expanduser(source)).resolve().name or source


def window_length(sequence_length: int | None, max_positions: int | None) -> int:
    """Tokens of a window.

    Args:
        sequence_length: what was asked for; None is the model's longest, at most 2048.
        max_positions: the model's longest sequence in tokens; None where it has no limit.

    Raises:
        MoonshotError: a length below 2, or one that the model has no positions for.
    """
    if sequence_length is None:
        return min(max_positions or LONGEST, LONGEST)
    check_whole("sequence_length", sequence_length, 2)
    fits = not max_positions or sequence_length <= max_positions
    require(fits, f"sequence_length={sequence_length}: give at most the {max_positions} positions that the model has")
    return sequence_length


def tokenize(tokenizer: Any, text: str | list[str]) -> Any:
    """Token ids of a text, or of each of a list; without the tokenizer's warning that a text is long.

    Args:
        tokenizer: a Hugging Face tokenizer.
        text: one, or a list of them.
    """
    return tokenizer(text, verbose=False, return_attention_mask=False)["input_ids"]


@dataclass(frozen=True)
class _Texts:
    read: Callable[[torch.Generator | None], Iterator[str]]  # in order, or shuffled where a generator is given
    joiner: str | None = None  # makes them one running text; None: documents
    long_only: bool = False  # no document shorter than a window may be used
    corpus: Corpus | None = None  # whose form it has
    count: Callable[[int], int] | None = None  # documents, up to a number; None where only reading all would tell


@dataclass(frozen=True)
class _Inputs:
    items: Iterable[Any]
    single: bool = False  # items are samples without a batch dimension
    notes: tuple[str, ...] = ()

    def batches(self) -> Iterator[Batch]:
        """One batch for each item; all have the inputs of the first, but for a mask where nothing is padded."""
        first: set[str] | None = None
        for index, item in enumerate(self._read()):
            what = f"item {index} of the data"
            batch = as_batch(item, what, self.single)
            names = set(batch) - {"attention_mask"}
            first = names if first is None else first
            require(
                names == first,
                f"{what} has {', '.join(sorted(names))}, item 0 {', '.join(sorted(first))}: give all the same inputs",
            )
            yield from unpack(batch, what)

    def _read(self) -> Iterator[Any]:
        """The items; an error of the code that makes them says which was the last."""
        count = 0
        try:
            for item in self.items:
                yield item
                count += 1
        except MoonshotError:
            raise
        except Exception as error:
            told = f"{type(error).__name__}: {reason(error)}"
            raise MoonshotError(f"item {count} of the data cannot be read ({told}): mend what makes it") from error


def open_source(source: Any) -> _Texts | _Inputs:
    """Which kind of source this is; nothing is downloaded yet, nor read beyond a first row.

    Raises:
        MoonshotError: data that does not exist, cannot be read, or is of no known kind.
    """
    if isinstance(source, str) and source in CORPORA:
        corpus = CORPORA[source]
        joiner = corpus.joiner if corpus.running else None
        return _Texts(partial(_texts, partial(corpus.load, "train"), source), joiner, long_only=not corpus.running)
    if isinstance(source, str | os.PathLike):
        return _open_file(source)
    if isinstance(source, DatasetDict | IterableDatasetDict):
        raise MoonshotError(f"a {describe(source)} with splits {', '.join(source)}: give one of them")
    if isinstance(source, Dataset | IterableDataset):
        return _open_dataset(lambda: source, describe(source), counted=isinstance(source, Dataset))
    if isinstance(source, list | tuple):
        require(len(source) > 0, f"the data is an empty {type(source).__name__}: {ACCEPTED}")
        if isinstance(source[0], str):
            wrong = next((i for i, text in enumerate(source) if not isinstance(text, str)), None)
            require(wrong is None, f"item {wrong} of the data is not a string: give strings only")
            return _Texts(
                lambda generator: (source[i] for i in _order(len(source), generator)), count=partial(min, len(source))
            )
    iterable = hasattr(source, "__iter__") or hasattr(source, "__getitem__")
    require(iterable and not isinstance(source, Tensor | bytes), f"data of type {describe(source)}: {ACCEPTED}")
    return _Inputs([source] if isinstance(source, Mapping) else source)


def file_rows(source: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The rows of a JSON, JSON lines or Parquet file; of a .txt file its lines that are not blank, each as "text".

    Raises:
        MoonshotError: it does not exist, is empty, of an unknown format, or damaged.
    """
    path, suffix = _known_file(source)
    if suffix != ".txt":
        yield from _rows(_loader(path, suffix), str(source))
        return
    for row in _rows(partial(_lines, path), str(source)):
        yield from ({"text": line} for line in row["text"].splitlines() if line.strip())


def _lines(path: Path) -> list[dict[str, Any]]:
    return [{"text": path.read_text(encoding="utf-8")}]


def _known_file(source: str | os.PathLike[str]) -> tuple[Path, str]:
    """A file and its suffix, one of `FORMATS`."""
    path = Path(os.path.expanduser(source))
    require(os.path.isfile(path), f"{_quoted(source)} is neither the name of a data set nor a file: {ACCEPTED}")
    suffix = next((suffix for suffix in FORMATS if path.name.lower().endswith(suffix)), "")
    require(bool(suffix), f'"{source}": a file of unknown format, use one of {", ".join(FORMATS)}')
    require(path.stat().st_size > 0, f'"{source}" is empty: give a file that holds text')
    return path, suffix


def _loader(path: Path, suffix: str) -> Load:
    # `load_dataset` would take an unescaped path for a pattern.
    builder = "parquet" if suffix == ".parquet" else "json"
    where = {"data_files": glob.escape(str(path.resolve())), "split": "train", "streaming": True}
    return partial(load_dataset, builder, **where)


def _open_file(source: str | os.PathLike[str]) -> _Texts | _Inputs:
    path, suffix = _known_file(source)
    if suffix == ".txt":
        return _Texts(partial(_texts, partial(_lines, path), str(source)), joiner="")
    return _open_dataset(_loader(path, suffix), str(source), counted=True)


def _quoted(source: str | os.PathLike[str]) -> str:
    """A name in a message; a text that was given in its place is cut short."""
    name = os.fspath(source)
    return f'"{name}"' if len(name) <= 200 else f'"{name[:50]}…"'


def _open_dataset(load: Load, what: str, counted: bool = False) -> _Texts | _Inputs:
    """Text or model inputs, by the first row; `counted` where reading rows again costs little."""
    row = next(_rows(load, what), None)
    if row is None:
        raise MoonshotError(f"{what} has no rows: give data that holds text or model inputs")
    if not any(name in row for name in INPUT_RANKS):
        _text_column(row)
        corpus = next((corpus for corpus in CORPORA.values() if corpus.columns == row.keys()), None)
        count = (lambda most: sum(1 for _ in islice(_texts(load, what), most))) if counted else None
        return _Texts(partial(_texts, load, what), corpus=corpus, count=count)
    extra = [name for name, value in row.items() if value is None or isinstance(value, str)]
    items = ({name: row[name] for name in row if name not in extra} for row in _rows(load, what))
    return _Inputs(items, single=True, notes=(f"columns left out: {', '.join(extra)}",) if extra else ())


def _rows(load: Load, what: str, generator: torch.Generator | None = None) -> Iterator[dict[str, Any]]:
    """The rows in order, or shuffled where a generator is given; errors of reading them name the source."""
    try:
        rows = dataset = load()
        if isinstance(dataset, Dataset):
            rows = (dataset[i] for i in _order(len(dataset), generator))
        elif generator is not None:
            rows = dataset.shuffle(seed=generator.initial_seed(), buffer_size=SHUFFLE_BUFFER)
        yield from rows
    except Exception as error:
        raise _unreadable(what, error) from error


def _unreadable(what: str, error: Exception) -> MoonshotError:
    if what in CORPORA:
        mend = f"give the path of a local file ({', '.join(FORMATS)}) instead"
        return MoonshotError(f'"{what}": {CORPORA[what].path} cannot be loaded from the Hub ({reason(error)}); {mend}')
    return MoonshotError(f'"{what}" cannot be read ({reason(error)}): check what it holds, and the extension of a file')


def _order(count: int, generator: torch.Generator | None) -> Iterable[int]:
    return range(count) if generator is None else torch.randperm(count, generator=generator).tolist()


def _texts(load: Load, what: str, generator: torch.Generator | None = None) -> Iterator[str]:
    """The text of every row; a missing one is empty."""
    column = None
    for row in _rows(load, what, generator):
        column = column or _text_column(row)
        text = row[column] or ""
        require(isinstance(text, str), f'column "{column}" holds a {type(text).__name__}: it must hold strings')
        yield text


def _text_column(row: dict[str, Any]) -> str:
    known = [column for column in TEXT_COLUMNS if column in row]
    strings = [column for column, value in row.items() if isinstance(value, str)]
    found = bool(known) or len(strings) == 1
    require(found, f"the data has the columns {', '.join(row)}: rename the one that holds text to {TEXT_COLUMNS[0]}")
    return (known or strings)[0]


def _window(ids: list[int], length: int, generator: torch.Generator) -> Tensor:
    """`length` tokens from a random place, or all there are."""
    if len(ids) <= length:
        return torch.tensor(ids)
    start = int(torch.randint(len(ids) - length + 1, (), generator=generator))
    return torch.tensor(ids[start : start + length])


def _windows(texts: _Texts, tokenizer: Any, num_samples: int, length: int, generator: torch.Generator) -> Samples:
    """Random windows of running text, and notes."""
    assert texts.joiner is not None  # it is running text
    ids = tokenize(tokenizer, texts.joiner.join(texts.read(None)))
    mend = "give more text or a shorter sequence"
    require(len(ids) >= length, f"the text has {len(ids)} tokens, fewer than sequence_length={length}: {mend}")
    different = len(ids) - length + 1
    require(
        num_samples <= different,
        f"num_samples={num_samples}: the text has {len(ids)} tokens, {different} different windows of {length}: "
        f"give more text, a shorter sequence, or num_samples={different} at most",
    )
    overlap = f"the text has {len(ids)} tokens: {num_samples} windows of {length} overlap"
    notes = [overlap] if len(ids) < num_samples * length else []
    return [_window(ids, length, generator) for _ in range(num_samples)], notes


def _documents(texts: _Texts, tokenizer: Any, num_samples: int, length: int, generator: torch.Generator) -> Samples:
    """Windows of long documents if there are enough; else `num_samples` documents of any length; and notes."""
    held = num_samples if texts.count is None else texts.count(num_samples)
    require(
        held >= num_samples,
        f"num_samples={num_samples}: the data has {held} documents, give more text or set num_samples={held} at most",
    )
    windows, samples, whole, usable, dropped = [], [], 0, 0, 0
    for ids in _token_lists(texts.read(generator), tokenizer):
        if len(ids) < 2:
            dropped += 1
            continue
        sample = _window(ids, length, generator)
        if len(ids) > length:
            windows.append(sample)
        if len(windows) == num_samples:
            return windows, []
        usable += 1
        if usable <= num_samples:
            samples.append(sample)
            whole += len(ids) <= length
    few = f"num_samples={num_samples}: only {len(windows)} documents are longer than sequence_length={length}"
    require(not texts.long_only, f"{few}, lower one of the two")
    require(usable > 0, f"none of {dropped} documents has 2 tokens or more: give more text")
    mend = f"give more text or set num_samples={usable}"
    require(usable >= num_samples, f"num_samples={num_samples}: {usable} documents have 2 tokens or more, {mend}")
    padded = ", padded per batch" if len({len(sample) for sample in samples}) > 1 else ""
    notes = [f"{whole} of {num_samples} documents used whole{padded}: {len(windows)} have more than {length} tokens"]
    return samples, notes + [f"{dropped} documents of fewer than 2 tokens dropped"] * bool(dropped)


def _token_lists(texts: Iterator[str], tokenizer: Any) -> Iterator[list[int]]:
    while chunk := list(islice(texts, TOKENIZED_TOGETHER)):
        # The special tokens that a tokenizer makes of an empty string are no text.
        yield from (ids if text else [] for text, ids in zip(chunk, tokenize(tokenizer, chunk), strict=True))


def _collate(samples: list[Tensor], batch_size: int, tokenizer: Any) -> list[Batch]:
    """Batches [B, T] in order, padded on the right, with a mask where padding was needed."""
    known = (getattr(tokenizer, name, None) for name in ("pad_token_id", "eos_token_id"))
    pad_token = next((token for token in known if token is not None), 0)  # any will do: the mask hides it
    batches = []
    for start in range(0, len(samples), batch_size):
        group = samples[start : start + batch_size]
        lengths = torch.tensor([len(sample) for sample in group])
        batch = {"input_ids": pad_sequence(group, batch_first=True, padding_value=pad_token)}
        if lengths.min() < lengths.max():
            batch["attention_mask"] = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
        batches.append(batch)
    return batches


def _take(inputs: _Inputs, num_samples: int, batch_size: int, seed: int, longest: int | None) -> list[Batch]:
    """The first `num_samples` samples of model inputs."""
    batches, taken = [], 0
    # A DataLoader draws from the global state, even one that does not shuffle.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        for index, batch in enumerate(inputs.batches()):
            tokens = batch["input_ids"].shape[-1] if "input_ids" in batch else 0
            fits = not longest or tokens <= longest
            require(fits, f"item {index} has {tokens} tokens: cut it to the {longest} positions of the model")
            count = min(samples_of(batch), num_samples - taken)
            for start in range(0, count, batch_size):
                batches.append(take(batch, start, min(start + batch_size, count)))
            taken += count
            if taken == num_samples:
                return batches
    mend = f"give more or set num_samples={taken}" if taken else "give more"
    raise MoonshotError(f"num_samples={num_samples}: the data has {taken} samples, {mend}")


def input_batches(source: Any) -> Iterator[Batch]:
    """All batches of model inputs of a source, as they come.

    Raises:
        MoonshotError: text, or data that cannot be read.
    """
    opened = open_source(source)
    if not isinstance(opened, _Inputs):
        raise MoonshotError(f"{describe(source)}: text, where model inputs are needed")
    return opened.batches()
