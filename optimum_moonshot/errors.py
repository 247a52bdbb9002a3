"""Errors a user can act on: each message names the field, the value and the mend."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from safetensors import SafetensorError


class MoonshotError(ValueError):
    """Input that cannot be pruned as asked. The model is left as it was."""


@contextmanager
def writing(field: str, path: str | os.PathLike) -> Iterator[None]:
    """Turn a full disk or a forbidden folder into a `MoonshotError` that names the argument it came with."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise MoonshotError(f"{field}={str(path)!r} cannot be written: {error}") from error


class FactorizationError(MoonshotError):
    """A layer's quadratic stayed singular at the largest damping tried."""


def require(condition: bool, message: str) -> None:
    """Raise `MoonshotError(message)` unless `condition` holds."""
    if not condition:
        raise MoonshotError(message)
