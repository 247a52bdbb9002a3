"""What is asked of an accelerator: its memory, its random state, and which one there is.

Everything else asks here, so that one place knows CUDA, and a stand-in for it (tests/support/other_device.py) shows a
tensor that was left on the host.
"""

import gc
import re
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# What torch and the libraries below it say, where the error has no class of its own.
_OUT_OF_MEMORY = re.compile(r"DefaultCPUAllocator: |you tried to allocate|out of memory|_STATUS_ALLOC_FAILED")


def default_device() -> torch.device:
    """A GPU where there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def is_gpu(device: torch.device) -> bool:
    """Whether a device has memory of its own, and does much at once."""
    return device.type not in ("cpu", "meta")


def free_bytes(device: torch.device) -> int:
    """Memory of a GPU that nobody uses."""
    return torch.cuda.mem_get_info(device)[0]


def peak_bytes(device: torch.device) -> int:
    """Bytes: on a GPU the most allocated since `reset_peak`, on a CPU the process's largest resident size so far."""
    if is_gpu(device):
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device, or the host, has no more memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and bool(_OUT_OF_MEMORY.search(str(error)))


def release_unused(device: torch.device) -> None:
    """Return what nothing refers to any more, so that larger pieces can be had of it."""
    gc.collect()
    if is_gpu(device):
        torch.cuda.empty_cache()


def reset_peak(device: torch.device) -> None:
    """Count a GPU's peak from here on."""
    if is_gpu(device):
        torch.cuda.reset_peak_memory_stats(device)


def wait_for(device: torch.device) -> None:
    """Until a GPU has done what it was asked to."""
    if is_gpu(device):
        torch.cuda.synchronize(device)


@contextmanager
def own_random_numbers(device: torch.device | None = None) -> Iterator[None]:
    """What torch draws inside leaves no trace outside.

    Args:
        device: beside the CPU; None is every GPU.
    """
    gpus = range(torch.cuda.device_count()) if device is None else [device] if is_gpu(device) else []
    with torch.random.fork_rng(devices=gpus):
        yield
