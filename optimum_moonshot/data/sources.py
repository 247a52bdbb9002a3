"""Sources of data: the corpora of the pruning literature, files, data sets and iterables.

`open_source` distinguishes three kinds:

* running text (a .txt file, "wikitext2", "ptb"): one stream of tokens;
* documents ("c4", JSON, CSV, Parquet, strings, a data set, also on the Hub, with a column of text or conversations);
* model inputs (dictionaries of tensors, a data set with tokens).

The chat template of a tokenizer makes text of conversations.
"""

import glob
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import torch
from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict, load_dataset
from torch import Tensor

from ..errors import MoonshotError, reason, require, truncated_repr
from .batches import SAMPLE_DIMS, Batch, as_batch, unpack

Messages = list[dict[str, Any]]  # each with role and content
Document = str | Messages
Load = Callable[[], Iterable[dict[str, Any]]]  # of the rows
Row = TypeVar("Row")

FORMATS = (".txt", ".json", ".jsonl", ".json.gz", ".jsonl.gz", ".parquet", ".csv")
SHUFFLE_BUFFER = 10_000  # documents in the buffer that shuffles a streamed data set
HUB_DOCUMENTS = 10_000  # documents that are read from a data set on the Hub, which may have billions
TEXT_COLUMNS = ("text", "sentence", "content")
# Names, and ends of names, of columns of strings that are not text.
_LABELS = "ids?|uuid|guid|key|hash|url|uri|source|path|file|date|timestamp|lang|language|model"
NO_TEXT = re.compile(rf"(.*[^a-z])?({_LABELS})", re.IGNORECASE)
# In order of preference; a data set with only one split may use another name.
CALIBRATION_SPLITS, TEXT_SPLITS = ("train",), ("test", "validation", "val", "train")
# The columns of a conversation, in order of preference: one column, or a prompt and its answer.
CONVERSATIONS = ("messages", "conversations", "conversation")
LAYOUTS = (*((name,) for name in CONVERSATIONS), ("prompt", "completion"), ("prompt", "chosen"), ("chosen",))
ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "model": "assistant"}


@dataclass(frozen=True)
class Corpus:
    """A data set of the literature."""

    path: str  # on the Hub
    joiner: str  # between the records of its text
    options: dict[str, Any]  # of `load_dataset`
    files: dict[str, str] = field(default_factory=dict)  # by split; empty: all
    test: str = "test"  # the evaluation split
    documents: int | None = None  # number of documents of that split in the literature
    windows: int | None = None  # number of evaluation windows in the literature
    columns: frozenset[str] = frozenset()  # a file with exactly these columns has the format of this corpus
    running: bool = True  # whether calibration windows are drawn from the joined text, not one per document

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
    f"use {', '.join(CORPORA)}, the path of a {', '.join(FORMATS)} file, the name of a data set on the Hub, a list of "
    "strings, a datasets.Dataset, or an iterable of model inputs"
)


def describe(source: Any) -> str:
    """A short name of a source for reports and messages."""
    if isinstance(source, str | os.PathLike):
        return os.fspath(source)
    if isinstance(source, list | tuple):
        strings = bool(source) and isinstance(source[0], str)
        return f"{type(source).__name__} of {len(source)} {'strings' if strings else 'items'}"
    return f"Dataset of {len(source)} rows" if isinstance(source, Dataset) else type(source).__name__


def is_hub_name(source: str) -> bool:
    """Whether this may be the owner/name of a data set on the Hub, rather than the misspelt path of a file."""
    return re.fullmatch(r"[\w.-]+/[\w.-]+", source) is not None and not source.endswith(FORMATS)


def short_name(source: str) -> str:
    """`describe` without private paths: a file or folder by its name."""
    if not os.path.exists(source) and is_hub_name(source):
        return source
    return Path(os.path.expanduser(source)).resolve().name or source


@dataclass(frozen=True)
class Texts:
    """A source of text, or of conversations."""

    read: Callable[[torch.Generator | None], Iterator[Document]]  # in order; shuffled by a generator
    joiner: str | None = None  # joins the texts to one running text; None: documents
    long_only: bool = False  # every sample must come from a document longer than a window
    corpus: Corpus | None = None  # the corpus whose format the source has
    count: Callable[[int], int] | None = None  # of documents, up to a maximum; None if that means reading everything


@dataclass(frozen=True)
class ModelInputs:
    """A source of model inputs."""

    items: Iterable[Any]
    single: bool = False  # items are samples without a batch dimension
    notes: tuple[str, ...] = ()

    def batches(self) -> Iterator[Batch]:
        """One batch per item; all must have the inputs of the first, except for an optional attention mask."""
        first: set[str] | None = None
        for index, item in enumerate(self._read()):
            what = f"item {index} of the data"
            batch = as_batch(item, what, self.single)
            names = set(batch) - {"attention_mask"}
            first = names if first is None else first
            if names != first:
                difference = f"{', '.join(sorted(names))}, item 0 {', '.join(sorted(first))}"
                raise MoonshotError(f"{what} has {difference}", hint="give all the same inputs")
            yield from unpack(batch, what)

    def _read(self) -> Iterator[Any]:
        """The items; an exception of the user's iterable becomes an error with the number of the item."""
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


def open_source(source: Any, splits: tuple[str, ...] = CALIBRATION_SPLITS) -> Texts | ModelInputs:
    """Open a source of any kind, without downloading it or reading more than the first row.

    Of a data set on the Hub with several splits, the first of `splits` is read.

    Raises:
        MoonshotError: data that does not exist, cannot be read, or is of an unknown kind.
    """
    if isinstance(source, str) and source in CORPORA:
        corpus = CORPORA[source]
        joiner = corpus.joiner if corpus.running else None
        return Texts(partial(read_texts, partial(corpus.load, "train"), source), joiner, long_only=not corpus.running)
    if isinstance(source, str) and is_hub_name(source) and not os.path.exists(os.path.expanduser(source)):
        opened = _open_dataset(partial(_load_from_hub, source, splits), source)
        if isinstance(opened, ModelInputs):
            return opened
        return replace(opened, read=lambda generator: islice(opened.read(generator), HUB_DOCUMENTS))
    if isinstance(source, str | os.PathLike):
        load, running = _open_file(source)
        if running:
            return Texts(partial(read_texts, load, str(source)), joiner="")
        return _open_dataset(load, str(source), counted=True)
    if isinstance(source, DatasetDict | IterableDatasetDict):
        raise MoonshotError(f"a {describe(source)} with splits {', '.join(source)}", hint="give one of them")
    if isinstance(source, Dataset | IterableDataset):
        return _open_dataset(lambda: source, describe(source), counted=isinstance(source, Dataset))
    if isinstance(source, list | tuple):
        require(len(source) > 0, f"the data is an empty {type(source).__name__}", hint=ACCEPTED)
        if isinstance(source[0], list | tuple) and source[0] and chat_columns({CONVERSATIONS[0]: source[0]}):
            source = [{CONVERSATIONS[0]: messages} for messages in source]
        if isinstance(source[0], Mapping) and (chat_columns(source[0]) or source[0].keys() & TEXT_COLUMNS):
            rows = source
            return _open_dataset(lambda: rows, describe(source), counted=True)
        if isinstance(source[0], str):
            wrong = next((i for i, text in enumerate(source) if not isinstance(text, str)), None)
            require(wrong is None, f"item {wrong} of the data is not a string", hint="give strings only")
            strings = source
            return Texts(partial(_rows, lambda: strings, describe(source)), count=partial(min, len(source)))
    iterable = hasattr(source, "__iter__") or hasattr(source, "__getitem__")
    if not iterable or isinstance(source, Tensor | bytes):
        raise MoonshotError(f"data of type {describe(source)}", hint=ACCEPTED)
    return ModelInputs([source] if isinstance(source, Mapping) else source)


def input_batches(source: Any) -> Iterator[Batch]:
    """All batches of a source of model inputs, in order."""
    opened = open_source(source)
    if not isinstance(opened, ModelInputs):
        raise MoonshotError(f"{describe(source)} is text", hint="give model inputs")
    return opened.batches()


def file_rows(source: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The rows of a JSON, JSON lines or Parquet file; the non-blank lines of a .txt file, each as "text"."""
    load, running = _open_file(source)
    for row in _rows(load, str(source)):
        yield from ({"text": line} for line in row["text"].splitlines() if line.strip()) if running else [row]


def read_texts(load: Load, what: str, generator: torch.Generator | None = None) -> Iterator[Document]:
    """The text or conversation of every row (empty if missing), shuffled by a generator; `what` names the source."""
    columns: tuple[str, ...] = ()
    for row in _rows(load, what, generator):
        if not columns:
            columns, chat = _document_columns(row)
        if chat:
            yield conversation(row, columns)
            continue
        text = row[columns[0]] or ""
        if not isinstance(text, str):
            message = f'column "{columns[0]}" has a {type(text).__name__}'
            raise MoonshotError(message, hint="it must contain strings")
        yield text


def _open_file(source: str | os.PathLike[str]) -> tuple[Load, bool]:
    """A function that loads the rows of a file, and whether these are running text (.txt)."""
    path = Path(os.path.expanduser(source))
    if not os.path.isfile(path):
        name = os.fspath(source)
        name = name if len(name) <= 200 else f"{name[:50]}…"  # it may be a text that was passed by mistake
        raise MoonshotError(f'"{name}" is neither the name of a data set nor a file', hint=ACCEPTED)
    suffix = next((suffix for suffix in FORMATS if path.name.lower().endswith(suffix)), "")
    require(bool(suffix), f'"{source}" is a file of unknown format', hint=f"use one of {', '.join(FORMATS)}")
    require(path.stat().st_size > 0, f'"{source}" is empty', hint="give a file that contains text")
    if suffix == ".txt":
        return lambda: [{"text": path.read_text(encoding="utf-8")}], True
    # Escaped, because `load_dataset` expands glob characters.
    files, builder = glob.escape(str(path.resolve())), {".parquet": "parquet", ".csv": "csv"}.get(suffix, "json")
    return partial(load_dataset, builder, data_files=files, split="train", streaming=True), False


def _open_dataset(load: Load, what: str, counted: bool = False) -> Texts | ModelInputs:
    """Text or model inputs, depending on the first row; `counted` if it is cheap to read the rows again."""
    row = next(_rows(load, what), None)
    if row is None:
        raise MoonshotError(f"{what} has no rows", hint="give data that contains text or model inputs")
    if not any(name in row for name in SAMPLE_DIMS):
        _document_columns(row)
        corpus = next((corpus for corpus in CORPORA.values() if corpus.columns == row.keys()), None)
        count = (lambda most: sum(1 for _ in islice(read_texts(load, what), most))) if counted else None
        return Texts(partial(read_texts, load, what), corpus=corpus, count=count)
    extra = [name for name, value in row.items() if value is None or isinstance(value, str)]
    items = ({name: row[name] for name in row if name not in extra} for row in _rows(load, what))
    return ModelInputs(items, single=True, notes=(f"columns left out: {', '.join(extra)}",) if extra else ())


def _rows(load: Callable[[], Iterable[Row]], what: str, generator: torch.Generator | None = None) -> Iterator[Row]:
    """The rows in order, or shuffled by a generator; errors of reading name the source."""
    try:
        rows = dataset = load()
        if isinstance(dataset, Dataset | list | tuple):
            count = len(dataset)
            order = range(count) if generator is None else torch.randperm(count, generator=generator).tolist()
            rows = (dataset[i] for i in order)
        elif generator is not None and isinstance(dataset, IterableDataset):
            rows = dataset.shuffle(seed=generator.initial_seed(), buffer_size=SHUFFLE_BUFFER)
        yield from rows
    except MoonshotError:
        raise
    except Exception as error:
        if what in CORPORA:
            message = f'"{what}": {CORPORA[what].path} cannot be loaded from the Hub ({reason(error)})'
            hint = f"give the path of a local file ({', '.join(FORMATS)}) instead"
        else:
            message, hint = f'"{what}" cannot be read ({reason(error)})', "check its content and its extension"
        raise MoonshotError(message, hint=hint) from error


def _load_from_hub(name: str, splits: tuple[str, ...]) -> IterableDataset:
    """One split of a data set on the Hub, as a stream: a download could take hundreds of gigabytes."""
    try:
        loaded = load_dataset(name, streaming=True)
    except Exception as error:
        message = f'"{name}" is neither a file nor a data set of the Hub that can be read ({reason(error)})'
        raise MoonshotError(message, hint=ACCEPTED) from error
    return choose_split(loaded, splits, name)


def choose_split(loaded: Any, splits: tuple[str, ...], name: str) -> Any:
    """The first of some splits that a data set has, else its only split; a data set without splits itself."""
    if not isinstance(loaded, DatasetDict | IterableDatasetDict):
        return loaded
    split = next((split for split in splits if split in loaded), next(iter(loaded)) if len(loaded) == 1 else None)
    if split is None:
        hint = "give one of them as a datasets.Dataset"
        raise MoonshotError(f"{name} has the splits {', '.join(loaded)}", hint=hint)
    return loaded[split]


def _document_columns(row: Mapping[str, Any]) -> tuple[tuple[str, ...], bool]:
    """The column of text, one of `TEXT_COLUMNS`, else the columns of a conversation, else the only column of strings.

    Strings beside lists or objects describe these, and identifiers are not text. Also returns whether the columns hold
    a conversation.
    """
    named = [column for column in TEXT_COLUMNS if column in row]
    if named:
        return (named[0],), False
    if chat := chat_columns(row):
        return chat, True
    strings = [column for column, value in row.items() if isinstance(value, str)]
    nested = any(isinstance(value, list | tuple | Mapping) for value in row.values())
    if nested or len(strings) != 1 or NO_TEXT.fullmatch(strings[0]):
        hint = f"rename the column with text to {TEXT_COLUMNS[0]}, or with conversations to {CONVERSATIONS[0]}"
        raise MoonshotError(f"the data has the columns {', '.join(row)}", hint=hint)
    return (strings[0],), False


def chat_columns(row: Mapping[str, Any]) -> tuple[str, ...]:
    """The columns of a row that contain a conversation; empty without one."""
    for names in LAYOUTS:
        values = [row[name] for name in names if name in row]
        strings = len(names) > 1  # a single string is text
        if len(values) == len(names) and all(_may_be_messages(value, strings) for value in values):
            return names
    return ()


def conversation(row: Mapping[str, Any], columns: tuple[str, ...]) -> Messages:
    """The messages in the columns of a row; an empty list if it has none."""
    messages: Messages = []
    for column in columns:
        value = row[column]
        if isinstance(value, str):
            value = [{"role": "user" if column == "prompt" else "assistant", "content": value}]
        more = as_messages(value or [], f'column "{column}"')
        # Preference data often repeat the prompt at the beginning of the answer.
        messages = more if more[: len(messages)] == messages else messages + more
    return messages


def as_messages(value: Any, what: str) -> Messages:
    """Messages of role and content, without empty fields; also from messages with the fields from and value.

    Raises:
        MoonshotError: the value, which `what` names, is not a list of messages.
    """
    messages = []
    for message in value if isinstance(value, list | tuple) else [value]:
        fields = {} if not isinstance(message, Mapping) else {k: v for k, v in message.items() if v is not None}
        if "from" in fields and "value" in fields:
            role, content = fields["from"], fields["value"]
            fields = {"role": ROLES.get(role, role), "content": content}
        if "role" not in fields or not ("content" in fields or "content" in message):
            hint = "give lists of messages with role and content, or with from and value"
            raise MoonshotError(f"{what} contains {truncated_repr(message)}, which is not a message", hint=hint)
        messages.append({"content": "", **fields})  # a tool call has no content
    return messages


def has_template(tokenizer: Any) -> bool:
    return getattr(tokenizer, "chat_template", None) is not None


def render(tokenizer: Any, messages: Messages, what: str, field: str | None = None, **options: Any) -> str:
    """The text of a conversation by the tokenizer's chat template, which usually begins with BOS.

    Raises:
        MoonshotError: the tokenizer has no template, or the conversation, which `what` names, does not fit it.
    """
    if not has_template(tokenizer):
        hint = "set tokenizer.chat_template, or give text"
        message = f"{what} is a conversation, which needs a chat template: the tokenizer has none"
        raise MoonshotError(message, field=field, hint=hint)
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))
    except Exception as error:  # a template may raise anything
        message = f"{what} does not fit the chat template ({reason(error)})"
        raise MoonshotError(message, field=field) from error


def _may_be_messages(value: Any, strings: bool) -> bool:
    if isinstance(value, list | tuple):
        return all(isinstance(message, Mapping) for message in value)
    return value is None or (strings and isinstance(value, str))
