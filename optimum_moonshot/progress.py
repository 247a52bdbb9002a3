"""Progress bars, only in notebooks and terminals."""

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from huggingface_hub.utils import are_progress_bars_disabled
from tqdm.auto import tqdm

T = TypeVar("T")


def progress_bar(iterable: Iterable[T] | None = None, *, shown: bool, **options: Any) -> "tqdm[T]":
    """A tqdm bar, disabled unless `shown` in a notebook or a terminal: a log file would get hundreds of lines."""
    return tqdm(iterable, disable=not (shown and bars_are_wanted()), **options)


def bars_are_wanted() -> bool:
    """Whether a bar is visible, and not switched off for tqdm, transformers or huggingface_hub."""
    if os.environ.get("TQDM_DISABLE", "").lower() not in ("", "0", "false") or are_progress_bars_disabled():
        return False
    transformers = sys.modules.get("transformers.utils.logging")  # not imported: not switched off
    if transformers is not None and not transformers.is_progress_bar_enabled():
        return False
    notebook = any(cls.__module__ == "tqdm.notebook" for cls in tqdm.__mro__)  # as `tqdm.auto` has selected
    return notebook or bool(getattr(sys.stderr, "isatty", lambda: False)())


@contextmanager
def without_transformers_bars() -> Iterator[None]:
    """Disable the progress bars of transformers inside the block."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
