"""Progress bars, where somebody is there to see them."""

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from huggingface_hub.utils import are_progress_bars_disabled
from tqdm.auto import tqdm

T = TypeVar("T")


def progress_bar(iterable: Iterable[T] | None = None, *, shown: bool, **options: Any) -> "tqdm[T]":
    """A bar of tqdm's. It moves only in a notebook or where stderr is a terminal: a log would get hundreds of lines.

    Args:
        iterable: what it counts; without one, `update` moves it.
        shown: False for no bar at all.
        options: of tqdm.
    """
    return tqdm(iterable, disable=not (shown and bars_are_wanted()), **options)


def bars_are_wanted() -> bool:
    """Whether anybody sees a bar, and none of the switches is off: tqdm's, transformers', huggingface_hub's."""
    if os.environ.get("TQDM_DISABLE", "").lower() not in ("", "0", "false") or are_progress_bars_disabled():
        return False
    transformers = sys.modules.get("transformers.utils.logging")  # who has not imported it has switched nothing off
    if transformers is not None and not transformers.is_progress_bar_enabled():
        return False
    return _in_notebook() or bool(getattr(sys.stderr, "isatty", lambda: False)())


@contextmanager
def without_transformers_bars() -> Iterator[None]:
    """Inside the block transformers shows no bar, where one of its functions does a part of what is asked of it."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _in_notebook() -> bool:
    """tqdm has chosen its widget: it knows."""
    return any(cls.__module__ == "tqdm.notebook" for cls in tqdm.__mro__)
