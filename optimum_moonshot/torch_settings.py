"""Settings of torch that a program may have changed, left out while this package computes: its results need the usual.

The default dtype and the random state are the process's: the first of several threads that are inside changes them, and
the last one restores them.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from .devices import preserved_random_state

_LOCK = threading.Lock()
_SHARED: dict[Any, tuple[int, ExitStack]] = {}  # changes that several threads share, and how many are inside


@contextmanager
def usual_settings() -> Iterator[None]:
    """New tensors are float32 and on the CPU, gradients are enabled and autocast is not, as in a new process.

    The states of torch's random number generators are restored on exit.
    """
    with ExitStack() as undo:
        use_usual_settings(undo)
        yield


def use_usual_settings(undo: ExitStack) -> None:
    """Like `usual_settings`, until `undo` closes."""
    autocast = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    change_once(usual_settings, _process_settings, undo)
    for kind in autocast:
        undo.callback(torch.clear_autocast_cache)  # it may have copies of weights that have changed
        undo.enter_context(torch.autocast(kind, enabled=False))
    if torch.get_default_device().type != "cpu":
        undo.enter_context(torch.device("cpu"))
    undo.enter_context(torch.enable_grad())


def _process_settings(stack: ExitStack) -> None:
    stack.callback(torch.set_default_dtype, torch.get_default_dtype())
    torch.set_default_dtype(torch.float32)
    stack.enter_context(preserved_random_state())


def change_once(key: Any, make: Callable[[ExitStack], None], undo: ExitStack) -> None:
    """Make changes that several threads share: the first one makes them, and the last one whose `undo` closes undoes.

    Args:
        key: of the changes, equal in all threads.
        make: makes them, and leaves on its stack what undoes them.
        undo: of this thread.
    """

    def leave() -> None:
        with _LOCK:
            inside, stack = _SHARED.pop(key)
            if inside > 1:
                _SHARED[key] = inside - 1, stack
            else:
                stack.close()

    with _LOCK:
        inside, stack = _SHARED.get(key) or (0, ExitStack())
        if not inside:
            with ExitStack() as entering:
                make(entering)
                stack = entering.pop_all()
        _SHARED[key] = inside + 1, stack
    undo.callback(leave)
