"""The only queries of an accelerator: its memory, random state and synchronization; memory freed on the host; and
settings of torch that a program may have changed, which this package resets while it computes.

Tests replace the queries by those of another device (tests/support/other_device.py), which reveals tensors left on the
host. The default dtype and the random state are the process's: the first of several threads that are inside changes
them, and the last one restores them.
"""

import ctypes
import gc
import re
import resource
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

# Errors of torch and the libraries below it without a class for them.
_OUT_OF_MEMORY = re.compile(r"DefaultCPUAllocator: |you tried to allocate|out of memory|_STATUS_ALLOC_FAILED")
_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
_LOCK = threading.Lock()
_SHARED: dict[Any, tuple[int, ExitStack]] = {}  # changes that several threads share, and how many are inside


def default_device() -> torch.device:
    """A GPU if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def is_gpu(device: torch.device) -> bool:
    """Whether a device has separate memory and runs asynchronously."""
    return device.type not in ("cpu", "meta")


def trim_host_memory() -> None:
    """Return the memory of freed tensors to the system, so that it is not counted against the next phase.

    glibc keeps freed memory below any live allocation, such as packed weights or calibration caches.
    """
    if _TRIM is not None:
        _TRIM(0)


def free_bytes(device: torch.device) -> int:
    """Free memory of a GPU, including segments that torch has cached and does not use."""
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached


def peak_bytes(device: torch.device) -> int:
    """Peak bytes: allocated on a GPU since `reset_peak`, or resident in the process so far."""
    if is_gpu(device):
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device, or the host, is out of memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and bool(_OUT_OF_MEMORY.search(str(error)))


def release_unused(device: torch.device) -> None:
    """Release unreachable tensors and the GPU's cached segments, which are too small for larger tensors."""
    gc.collect()
    if is_gpu(device):
        torch.cuda.empty_cache()


def reset_peak(device: torch.device) -> None:
    """Start to measure a GPU's peak."""
    if is_gpu(device):
        torch.cuda.reset_peak_memory_stats(device)


def device_name(device: torch.device) -> str:
    """The name of a GPU, or the CPU with the number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} with {torch.get_num_threads()} threads"


def wait_for(device: torch.device) -> None:
    """Wait for all kernels of a GPU."""
    if is_gpu(device):
        torch.cuda.synchronize(device)


def preserved_random_state(device: torch.device | None = None) -> AbstractContextManager[None]:
    """Restore torch's random state on exit: of the CPU, and of `device`, or of every GPU if the process uses any."""
    used = range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)
    return torch.random.fork_rng(devices=used if device is None else [device] if is_gpu(device) else [])


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
