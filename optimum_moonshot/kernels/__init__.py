"""Kernels for packed matrices: in C for CPUs, in Triton for GPUs.

The C library is compiled at installation if there is a compiler; Triton is part of torch's CUDA builds.
"""

import logging
from functools import lru_cache
from importlib import import_module
from types import ModuleType

from .library import Library, QuantizedMatrix, find_library

__all__ = ["Library", "QuantizedMatrix", "find_gpu_kernels", "find_library"]

_log = logging.getLogger(__name__)


@lru_cache
def find_gpu_kernels(formats: str) -> ModuleType | None:
    """The module of the kernels for "bitmask" or "quantized" formats; None, with a warning, if Triton is missing."""
    try:
        return import_module(f".triton_{formats}", __name__)
    except ImportError as error:
        _log.warning("%s weights are unpacked at every call: Triton is missing (%s)", formats, error)
        return None
