"""Products with packed matrices: in C on a CPU, in Triton on a GPU.

The installation compiles the library in C, if it has a compiler; Triton comes with torch's builds for CUDA.
"""

import logging
from functools import lru_cache
from types import ModuleType

from .library import Library, find_library

__all__ = ["Library", "find_gpu_kernels", "find_library"]

_log = logging.getLogger(__name__)


@lru_cache
def find_gpu_kernels() -> ModuleType | None:
    """The module of the GPU's kernels; None, and one line that says so, where Triton is missing."""
    try:
        from . import triton_bitmask
    except ImportError as error:
        _log.warning("packed weights are unpacked at every call: Triton is missing (%s)", error)
        return None
    return triton_bitmask
