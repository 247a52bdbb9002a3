"""The named corpora of the pruning literature, and the names of data sources in reports and messages."""

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import Dataset, IterableDataset, load_dataset

FORMATS = (".txt", ".json", ".jsonl", ".json.gz", ".jsonl.gz", ".parquet")


@dataclass(frozen=True)
class Corpus:
    """A data set of the literature: its path on the Hub, and how its records are joined to one text."""

    path: str
    joiner: str
    options: dict[str, Any]  # of `load_dataset`
    files: dict[str, str] = field(default_factory=dict)  # by split; empty: all
    test: str = "test"  # the evaluation split
    documents: int | None = None  # how many of that split the literature reads
    windows: int | None = None  # how many evaluation windows the literature reads
    columns: frozenset[str] = frozenset()  # a file with exactly these columns has this corpus's format
    running: bool = True  # calibration windows are drawn from the joined text, not one per document

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


def describe(source: Any) -> str:
    """A short name of a source for reports and messages."""
    if isinstance(source, str | os.PathLike):
        return os.fspath(source)
    if isinstance(source, list | tuple):
        strings = bool(source) and isinstance(source[0], str)
        return f"{type(source).__name__} of {len(source)} {'strings' if strings else 'items'}"
    return f"Dataset of {len(source)} rows" if isinstance(source, Dataset) else type(source).__name__


def is_hub_name(source: str) -> bool:
    """Whether this may be the owner/name of a data set on the Hub; a misspelt file path has a suffix."""
    return re.fullmatch(r"[\w.-]+/[\w.-]+", source) is not None and not source.endswith(FORMATS)


def short_name(source: str) -> str:
    """The result of `describe` in publishable form: a file or folder by its name, without its path."""
    if not os.path.exists(source) and is_hub_name(source):
        return source
    return Path(os.path.expanduser(source)).resolve().name or source
