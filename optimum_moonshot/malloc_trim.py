"""Freed memory, back to the system."""

import ctypes
import sys

# glibc's: it keeps what was freed below anything that is alive, as packed weights are, or the caches of a calibration.
_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None


def trim_host_memory() -> None:
    """Return what the C library keeps of freed tensors, so that a phase is not charged with what the last one held."""
    if _TRIM is not None:
        _TRIM(0)
