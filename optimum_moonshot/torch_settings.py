"""Settings of torch that a program may have changed, left out while this package computes: its results need the usual.

The default dtype and the random state are the process's: the first of several threads that are inside changes them, and
the last one restores them.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

from .devices import preserved_random_state

_LOCK = threading.Lock()
_SHARED: dict[Any, tuple[int, ExitStack]] = {}  # contexts that several threads are in, and how many are


@contextmanager
def usual_settings() -> Iterator[None]:
    """New tensors are float32 and on the CPU, gradients are enabled and autocast is not, as in a new process.

    The states of torch's random number generators are restored on exit.
    """
    autocast = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    with ExitStack() as stack:
        stack.enter_context(shared(usual_settings, lambda: [_float32_by_default(), preserved_random_state()]))
        for kind in autocast:
            stack.callback(torch.clear_autocast_cache)  # it may have copies of weights that have changed
            stack.enter_context(torch.autocast(kind, enabled=False))
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        stack.enter_context(torch.enable_grad())
        yield


@contextmanager
def shared(key: Any, contexts: Callable[[], Iterable[AbstractContextManager[None]]]) -> Iterator[None]:
    """Contexts that the first of several threads enters and the last one leaves, with one `key` in all of them."""
    with _LOCK:
        inside, stack = _SHARED.get(key) or (0, ExitStack())
        if not inside:
            with ExitStack() as entering:
                for each in contexts():
                    entering.enter_context(each)
                stack = entering.pop_all()
        _SHARED[key] = inside + 1, stack
    try:
        yield
    finally:
        with _LOCK:
            inside, stack = _SHARED.pop(key)
            if inside > 1:
                _SHARED[key] = inside - 1, stack
            else:
                stack.close()


@contextmanager
def _float32_by_default() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
