"""Pass the choices of `load_pruned` through transformers to the quantizer, where no file can set them."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True)
class Request:
    """Choices for one call."""

    runtime: str | None = None  # of `RUNTIMES`; None: that of plain `from_pretrained`
    verified: frozenset[str] = frozenset()  # absolute paths of files that are checked already


_REQUEST: ContextVar[Request] = ContextVar("moonshot_request", default=Request())  # noqa: B039


@contextmanager
def requested(request: Request) -> Iterator[None]:
    """Apply a request to all checkpoints that are loaded inside the block, in this thread."""
    token = _REQUEST.set(request)
    try:
        yield
    finally:
        _REQUEST.reset(token)


def current_request() -> Request:
    """The request of the innermost block around the caller; the default outside of all."""
    return _REQUEST.get()
