"""What the card of the dense model says: read, whatever state it is in, and divided into what our card takes over."""

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from huggingface_hub.utils import validate_repo_id, yaml_dump

from ..errors import reason
from .markdown import code_block, printable

MARKER = "<!-- the dense model's own card follows -->"
_MARK = re.compile(rf"^{re.escape(MARKER)}$", re.MULTILINE)
TEXTS = ("license_name", "license_link", "pipeline_tag")  # fields that are taken over
TEXTS_OR_LISTS = ("license", "language")  # likewise
_NOT_THEIRS = ("tags", "library_name")
_log = logging.getLogger(__name__)


class _Data(ModelCardData):
    """What a card's YAML says; of one tag without a list, most releases of huggingface_hub make a list of letters."""

    def __init__(self, *, tags: Any = None, **values: Any):
        super().__init__(tags=[tags] if isinstance(tags, str) else tags, **values)


class _Card(ModelCard):
    """A card that anybody may have written."""

    card_data_class = _Data


@dataclass(frozen=True)
class Base:
    """The dense model."""

    name: str | None = None  # on the Hub
    data: dict[str, Any] = field(default_factory=dict)  # of its card, what ours takes over
    text: str = ""  # of its card


def find_base(name_or_path: str) -> Base:
    """The model that was pruned, by where it was loaded from.

    A folder has no name on the Hub, unless its card is one of ours that tells it. A card that cannot be read is
    missing, with a warning: saving a model depends neither on the network nor on what others have written.
    """
    folder = os.path.isdir(name_or_path)
    name = None if folder else repository(name_or_path)
    path = Path(name_or_path) / "README.md"
    if not (name or (folder and path.is_file())):
        return Base()
    try:
        card = _Card.load(path if folder else name, ignore_metadata_errors=True)
        return split(name, card)
    except Exception as error:  # of the network, and of YAML in which anything may stand
        if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
            return Base(name)  # the Hub has none
        why = f"{type(error).__name__}: {reason(error)}"
        _log.warning("the card of %s cannot be read, so its licence is not taken over: %s", name_or_path, why)
        return Base(name)


def repository(name: Any) -> str | None:
    """A name on the Hub; None for what is none."""
    try:
        validate_repo_id(name)
    except ValueError:
        return None
    return name


def split(name: str | None, card: ModelCard) -> Base:
    """What of a card is the dense model's: all of it, or what is below the mark in one of ours.

    Args:
        name: of the dense model on the Hub, if it is known.
        card: of the folder or repository that it was loaded from.
    """
    data, text = card.data.to_dict(), re.sub(r"\r\n?", "\n", card.text).strip()
    ours = data.get("moonshot")
    named = isinstance(ours, Mapping) and all(isinstance(ours.get(entry), str) for entry in ("solver", "pattern"))
    if not named:
        if "moonshot" in data:
            _log.warning(
                "the card's entry moonshot=%.60r is none of this package's: it is kept as another's card", ours
            )
        taken = _taken_over(data)
        return Base(name, taken, f"{text}\n{_leftover(data, taken)}".strip())
    taken = _taken_over(data)
    taken["tags"] = [tag for tag in taken["tags"] if tag not in (ours["solver"], ours["pattern"])]
    _, below = parted(text)
    below = below.removeprefix(MARKER).strip().removeprefix("# Card of the dense model").strip()
    return Base(name or repository(data.get("base_model")), taken, below)


def parted(text: str) -> tuple[str, str]:
    """What is above the mark in a card of ours, and the rest with the mark; names may hold it inside of a line."""
    mark = _MARK.search(text)
    return (text, "") if mark is None else (text[: mark.start()], text[mark.start() :])


def _taken_over(data: dict[str, Any]) -> dict[str, Any]:
    """The fields that describe the pruned model too, as far as they are text; `tags` is always there."""
    taken: dict[str, Any] = {"tags": _texts(data.get("tags")) or []}
    for name in (*TEXTS, *TEXTS_OR_LISTS):
        value = data.get(name)
        found = _texts(value) if name in TEXTS_OR_LISTS else value
        if found and isinstance(value, str):
            taken[name] = printable(value)
        elif found and name in TEXTS_OR_LISTS:
            taken[name] = found
    return taken


def _texts(value: Any) -> list[str] | None:
    """One text or several; None where there is something else among them. YAML reads the language "no" as False."""
    values = ["no" if each is False else each for each in (value if isinstance(value, list) else [value])]
    known = all(isinstance(each, str) and printable(each) for each in values)
    return [printable(each) for each in values] if known else None


def _leftover(data: dict[str, Any], taken: dict[str, Any]) -> str:
    """What a card's YAML says of the dense model alone: where it was measured, on what it was trained, its terms."""
    left_out = {*taken, *_NOT_THEIRS}
    rest = {name: value for name, value in data.items() if name not in left_out}
    return f"\n{code_block(yaml_dump(rest, sort_keys=False).strip(), 'yaml')}" if rest else ""
