"""What the caller of `load_pruned` chose, on its way through transformers to the quantizer: no file can say it."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True)
class Request:
    """Choices for one load."""

    runtime: str | None = None  # of `RUNTIMES`; None: what plain `from_pretrained` was given
    verified: frozenset[str] = frozenset()  # absolute paths of files that were verified already


_REQUEST: ContextVar[Request] = ContextVar("moonshot_request", default=Request())  # noqa: B039


@contextmanager
def requested(request: Request) -> Iterator[None]:
    """Every checkpoint that is loaded inside the block, in this thread, is loaded so."""
    token = _REQUEST.set(request)
    try:
        yield
    finally:
        _REQUEST.reset(token)


def current_request() -> Request:
    """That of the innermost block around the caller; outside of all, plain `from_pretrained`'s."""
    return _REQUEST.get()
