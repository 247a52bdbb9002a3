"""Read the model card of the dense model, even a damaged one, and escape any text inside Markdown."""

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from reprlib import repr as short
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from huggingface_hub.utils import validate_repo_id, yaml_dump

from ..errors import MoonshotError, reason

MARKER = "<!-- the dense model's own card follows -->"
_MARK = re.compile(rf"^{re.escape(MARKER)}$", re.MULTILINE)
_TEXTS = ("license_name", "license_link", "pipeline_tag")  # fields that are copied
_TEXTS_OR_LISTS = ("license", "language")  # likewise
_REPLACED = ("tags", "library_name")
# Characters that start markup inside a line; an underscore does so only at the edge of a word.
_MARKUP = re.compile(r"[\\`*\[\]<>|~&#]|(?<!\w)_|_(?!\w)")
_ESCAPED = re.compile(r"\\([^\w\s])|\\(_)")
_log = logging.getLogger(__name__)


class _Data(ModelCardData):
    """The YAML of a card; most releases of huggingface_hub split a single tag without a list into letters."""

    def __init__(self, *, tags: Any = None, **values: Any):
        super().__init__(tags=[tags] if isinstance(tags, str) else tags, **values)


class _Card(ModelCard):
    """A card from any author."""

    card_data_class = _Data


@dataclass(frozen=True)
class Base:
    """The dense model."""

    name: str | None = None  # on the Hub
    data: dict[str, Any] = field(default_factory=dict)  # fields of its card that are copied
    text: str = ""  # of its card

    def fields(self, task: str | None) -> dict[str, Any]:
        """The fields of its card for the card of a derived model, without tags; `task` if the card names none."""
        copied = {name: self.data[name] for name in (*_TEXTS, *_TEXTS_OR_LISTS) if name in self.data}
        return {**copied, "pipeline_tag": copied.get("pipeline_tag", task)}


def find_base(name_or_path: str) -> Base:
    """The dense model that was pruned, from the name or path that it was loaded from.

    A folder or a file has no name on the Hub, unless a card of this package names it. A card that cannot be read is
    ignored with a warning, so that saving a model depends neither on the network nor on foreign cards.
    """
    folder = os.path.isdir(name_or_path)
    name = None if os.path.exists(name_or_path) else _repository(name_or_path)
    path = Path(name_or_path) / "README.md"
    source = path if folder and path.is_file() else name
    if not source:
        return Base()
    try:
        card = _Card.load(source, ignore_metadata_errors=True)
        return split(name, card)
    except Exception as error:  # of the network, or of arbitrary YAML
        if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
            return Base(name)  # the Hub has none
        why = f"{type(error).__name__}: {reason(error)}"
        _log.warning("the card of %s cannot be read, so its licence is not copied: %s", name_or_path, why)
        return Base(name)


def find_source(name_or_path: str) -> str | None:
    """The name on the Hub of the model that was pruned, or that of its folder or GGUF file; None for one in memory."""
    path = name_or_path and os.path.exists(name_or_path)
    return Path(name_or_path).resolve().name if path else _repository(name_or_path)


def _repository(name: Any) -> str | None:
    """The name of a repository on the Hub; None for any other value."""
    try:
        validate_repo_id(name)
    except ValueError:
        return None
    return name


def split(name: str | None, card: ModelCard) -> Base:
    """The dense model's part of a card: all of it, or the text below the marker in a card of this package."""
    data, text = card.data.to_dict(), re.sub(r"\r\n?", "\n", card.text).strip()
    entry, copied = data.get("moonshot"), _copied(data)
    if not isinstance(entry, Mapping) or not all(isinstance(entry.get(key), str) for key in ("solver", "pattern")):
        if "moonshot" in data:
            # Not %r: YAML's aliases may make it larger than any memory.
            message = "the card's entry moonshot=%.60s is not of this package: the card is kept as a foreign one"
            _log.warning(message, short(entry))
        # Fields of the dense model alone, such as its evaluations, training data and terms.
        rest = {key: value for key, value in data.items() if key not in {*copied, *_REPLACED}}
        block = f"\n{code_block(yaml_dump(rest, sort_keys=False).strip(), 'yaml')}" if rest else ""
        return Base(name, copied, f"{text}\n{block}".strip())
    copied["tags"] = [tag for tag in copied["tags"] if tag not in (entry["solver"], entry["pattern"])]
    _, below = parted(text)
    below = below.removeprefix(MARKER).strip().removeprefix("# Card of the dense model").strip()
    return Base(name or _repository(data.get("base_model")), copied, below)


def read_entry(card: ModelCard) -> Mapping[str, Any]:
    """The entry `moonshot` of a card of this package; `MoonshotError` without a valid one."""
    entry = card.data.to_dict().get("moonshot")
    if not isinstance(entry, Mapping) or not isinstance(entry.get("pattern"), str):
        raise MoonshotError(f"moonshot={short(entry):.60}: not an entry of this package")
    return entry


def parted(text: str) -> tuple[str, str]:
    """The text above the marker in a card of this package, and the rest; the marker fills a line."""
    mark = _MARK.search(text)
    return (text, "") if mark is None else (text[: mark.start()], text[mark.start() :])


def _copied(data: dict[str, Any]) -> dict[str, Any]:
    """The valid fields that also describe the pruned model; always with `tags`."""
    copied: dict[str, Any] = {"tags": _texts(data.get("tags")) or []}
    for name in (*_TEXTS, *_TEXTS_OR_LISTS):
        value = data.get(name)
        texts = _texts(value) if name in _TEXTS_OR_LISTS else value
        if texts and isinstance(value, str):
            copied[name] = printable(value)
        elif texts and name in _TEXTS_OR_LISTS:
            copied[name] = texts
    return copied


def _texts(value: Any) -> list[str] | None:
    """One text or several; None if any value is not text. YAML reads the language "no" as False."""
    texts = ["no" if text is False else text for text in (value if isinstance(value, list) else [value])]
    valid = all(isinstance(text, str) and printable(text) for text in texts)
    return [printable(text) for text in texts] if valid else None


def printable(value: Any) -> str:
    """Text in one line, without unprintable characters."""
    return " ".join("".join(sign if sign.isprintable() else " " for sign in str(value)).split())


def escaped(value: Any) -> str:
    """Text that Markdown shows literally, in one line or one cell of a table; `unescaped` is the inverse."""
    return _MARKUP.sub(lambda match: "\\" + match[0], printable(value))


def unescaped(text: str) -> str:
    """The inverse of `escaped`, except for spaces."""
    return _ESCAPED.sub(lambda match: match[1] or match[2], text)


def code(value: Any) -> str:
    """Text as inline code."""
    text = printable(value)
    fence = "`" * (_longest_run(text) + 1)
    space = " " if text.startswith("`") or text.endswith("`") or not text else ""
    return f"{fence}{space}{text}{space}{fence}"


def code_block(text: str, language: str) -> str:
    """Lines as a code block, with a fence longer than any in them."""
    fence = "`" * max(4, _longest_run(text) + 1)
    return f"{fence}{language}\n{text}\n{fence}"


def _longest_run(text: str) -> int:
    """The length of the longest run of backticks."""
    return max(map(len, re.findall("`+", text)), default=0)
