"""What a result was made with: versions and memory."""

import contextlib
import platform
import resource
import sys
from importlib.metadata import PackageNotFoundError, version

import torch


def peak_memory(device: torch.device) -> int:
    """Bytes: on a GPU the most allocated since the last reset, on a CPU the process's largest resident size so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def versions() -> dict[str, str]:
    """Of the libraries that a result depends on."""
    found = {"python": platform.python_version()}
    for name in ("optimum-moonshot", "torch", "transformers", "datasets", "safetensors"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
