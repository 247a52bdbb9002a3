"""Opens data sources: texts, or model inputs.

`open_source` distinguishes three kinds:

* running text (a .txt file, "wikitext2", "ptb"): one stream of tokens;
* documents ("c4", JSON, Parquet, strings, a data set with a text column);
* model inputs (dictionaries of tensors, a data set with tokens).
"""

import glob
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict, load_dataset
from torch import Tensor

from ..errors import MoonshotError, reason, require
from .batches import INPUT_RANKS, Batch, as_batch, unpack
from .corpora import CORPORA, FORMATS, Corpus, describe

Load = Callable[[], Dataset | IterableDataset]

SHUFFLE_BUFFER = 10_000  # documents in the buffer that shuffles a streamed data set
TEXT_COLUMNS = ("text", "sentence", "content")
ACCEPTED = (
    f"use {', '.join(CORPORA)}, the path of a {', '.join(FORMATS)} file, a list of strings, a datasets.Dataset, "
    "or an iterable of model inputs"
)


@dataclass(frozen=True)
class Texts:
    """A source of text."""

    read: Callable[[torch.Generator | None], Iterator[str]]  # in order; shuffled if a generator is passed
    joiner: str | None = None  # joins the texts to one running text; None: documents
    long_only: bool = False  # every sample must come from a document longer than a window
    corpus: Corpus | None = None  # the corpus whose format it has
    count: Callable[[int], int] | None = None  # documents, up to a maximum; None if counting means reading everything


@dataclass(frozen=True)
class ModelInputs:
    """A source of model inputs."""

    items: Iterable[Any]
    single: bool = False  # items are samples without a batch dimension
    notes: tuple[str, ...] = ()

    def batches(self) -> Iterator[Batch]:
        """One batch per item; all have the input names of the first, except for an optional attention mask.

        Raises:
            MoonshotError: an item that is not model inputs, or that has other names than the first.
        """
        first: set[str] | None = None
        for index, item in enumerate(self._read()):
            what = f"item {index} of the data"
            batch = as_batch(item, what, self.single)
            names = set(batch) - {"attention_mask"}
            first = names if first is None else first
            if names != first:
                both = f"{', '.join(sorted(names))}, item 0 {', '.join(sorted(first))}"
                raise MoonshotError(f"{what} has {both}", hint="give all the same inputs")
            yield from unpack(batch, what)

    def _read(self) -> Iterator[Any]:
        """The items; an exception of the user's iterable is reported with the number of the item."""
        count = 0
        try:
            for item in self.items:
                yield item
                count += 1
        except MoonshotError:
            raise
        except Exception as error:
            cause = f"{type(error).__name__}: {reason(error)}"
            message = f"item {count} of the data cannot be read ({cause})"
            raise MoonshotError(message, hint="fix the code that produces it") from error


def open_source(source: Any) -> Texts | ModelInputs:
    """The kind of a source, without downloading it or reading more than a first row.

    Raises:
        MoonshotError: data that does not exist, cannot be read, or is of an unknown kind.
    """
    if isinstance(source, str) and source in CORPORA:
        corpus = CORPORA[source]
        joiner = corpus.joiner if corpus.running else None
        return Texts(partial(read_texts, partial(corpus.load, "train"), source), joiner, long_only=not corpus.running)
    if isinstance(source, str | os.PathLike):
        return _open_file(source)
    if isinstance(source, DatasetDict | IterableDatasetDict):
        raise MoonshotError(f"a {describe(source)} with splits {', '.join(source)}", hint="give one of them")
    if isinstance(source, Dataset | IterableDataset):
        return _open_dataset(lambda: source, describe(source), counted=isinstance(source, Dataset))
    if isinstance(source, list | tuple):
        require(len(source) > 0, f"the data is an empty {type(source).__name__}", hint=ACCEPTED)
        if isinstance(source[0], str):
            wrong = next((i for i, text in enumerate(source) if not isinstance(text, str)), None)
            require(wrong is None, f"item {wrong} of the data is not a string", hint="give strings only")
            return Texts(
                lambda generator: (source[i] for i in _order(len(source), generator)), count=partial(min, len(source))
            )
    iterable = hasattr(source, "__iter__") or hasattr(source, "__getitem__")
    if not iterable or isinstance(source, Tensor | bytes):
        raise MoonshotError(f"data of type {describe(source)}", hint=ACCEPTED)
    return ModelInputs([source] if isinstance(source, Mapping) else source)


def input_batches(source: Any) -> Iterator[Batch]:
    """All batches of model inputs of a source, in its order.

    Raises:
        MoonshotError: text, or data that cannot be read.
    """
    opened = open_source(source)
    if not isinstance(opened, ModelInputs):
        raise MoonshotError(f"{describe(source)} is text", hint="give model inputs")
    return opened.batches()


def file_rows(source: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The rows of a JSON, JSON lines or Parquet file; the non-blank lines of a .txt file, each as "text".

    Raises:
        MoonshotError: it does not exist, is empty, of an unknown format, or damaged.
    """
    path, suffix = _check_file(source)
    if suffix != ".txt":
        yield from _rows(_loader(path, suffix), str(source))
        return
    for row in _rows(partial(_whole_text, path), str(source)):
        yield from ({"text": line} for line in row["text"].splitlines() if line.strip())


def read_texts(load: Load, what: str, generator: torch.Generator | None = None) -> Iterator[str]:
    """The text of every row; a missing one is empty.

    Args:
        load: returns the data set.
        what: its name in errors.
        generator: shuffles the rows; None keeps their order.

    Raises:
        MoonshotError: data that cannot be read, or without a column of text.
    """
    column = None
    for row in _rows(load, what, generator):
        column = column or _text_column(row)
        text = row[column] or ""
        if not isinstance(text, str):
            raise MoonshotError(f'column "{column}" holds a {type(text).__name__}', hint="it must hold strings")
        yield text


def _whole_text(path: Path) -> list[dict[str, Any]]:
    return [{"text": path.read_text(encoding="utf-8")}]


def _check_file(source: str | os.PathLike[str]) -> tuple[Path, str]:
    """The path of a file, and its suffix out of `FORMATS`."""
    path = Path(os.path.expanduser(source))
    if not os.path.isfile(path):
        raise MoonshotError(f"{_quoted(source)} is neither the name of a data set nor a file", hint=ACCEPTED)
    suffix = next((suffix for suffix in FORMATS if path.name.lower().endswith(suffix)), "")
    require(bool(suffix), f'"{source}" is a file of unknown format', hint=f"use one of {', '.join(FORMATS)}")
    require(path.stat().st_size > 0, f'"{source}" is empty', hint="give a file that contains text")
    return path, suffix


def _loader(path: Path, suffix: str) -> Load:
    # `load_dataset` would expand glob characters in an unescaped path.
    builder = "parquet" if suffix == ".parquet" else "json"
    where = {"data_files": glob.escape(str(path.resolve())), "split": "train", "streaming": True}
    return partial(load_dataset, builder, **where)


def _open_file(source: str | os.PathLike[str]) -> Texts | ModelInputs:
    path, suffix = _check_file(source)
    if suffix == ".txt":
        return Texts(partial(read_texts, partial(_whole_text, path), str(source)), joiner="")
    return _open_dataset(_loader(path, suffix), str(source), counted=True)


def _quoted(source: str | os.PathLike[str]) -> str:
    """A name in a message, cut short: it may be a whole text passed by mistake."""
    name = os.fspath(source)
    return f'"{name}"' if len(name) <= 200 else f'"{name[:50]}…"'


def _open_dataset(load: Load, what: str, counted: bool = False) -> Texts | ModelInputs:
    """Text or model inputs, by the first row; `counted` if reading the rows again is cheap."""
    row = next(_rows(load, what), None)
    if row is None:
        raise MoonshotError(f"{what} has no rows", hint="give data that contains text or model inputs")
    if not any(name in row for name in INPUT_RANKS):
        _text_column(row)
        corpus = next((corpus for corpus in CORPORA.values() if corpus.columns == row.keys()), None)
        count = (lambda most: sum(1 for _ in islice(read_texts(load, what), most))) if counted else None
        return Texts(partial(read_texts, load, what), corpus=corpus, count=count)
    extra = [name for name, value in row.items() if value is None or isinstance(value, str)]
    items = ({name: row[name] for name in row if name not in extra} for row in _rows(load, what))
    return ModelInputs(items, single=True, notes=(f"columns left out: {', '.join(extra)}",) if extra else ())


def _rows(load: Load, what: str, generator: torch.Generator | None = None) -> Iterator[dict[str, Any]]:
    """The rows in order, or shuffled by a generator; errors while reading name the source."""
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
        message = f'"{what}": {CORPORA[what].path} cannot be loaded from the Hub ({reason(error)})'
        return MoonshotError(message, hint=f"give the path of a local file ({', '.join(FORMATS)}) instead")
    return MoonshotError(f'"{what}" cannot be read ({reason(error)})', hint="check its content and its extension")


def _order(count: int, generator: torch.Generator | None) -> Iterable[int]:
    return range(count) if generator is None else torch.randperm(count, generator=generator).tolist()


def _text_column(row: dict[str, Any]) -> str:
    """The column with the text: one of `TEXT_COLUMNS`, else the only column of strings."""
    candidates = [column for column in TEXT_COLUMNS if column in row]
    strings = [column for column, value in row.items() if isinstance(value, str)]
    if not candidates and len(strings) != 1:
        hint = f"rename the one that holds text to {TEXT_COLUMNS[0]}"
        raise MoonshotError(f"the data has the columns {', '.join(row)}", hint=hint)
    return (candidates or strings)[0]
