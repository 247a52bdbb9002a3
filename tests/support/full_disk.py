"""A simulated full disk."""

import resource
from contextlib import contextmanager


@contextmanager
def full_disk(size):
    """No file can grow beyond `size` bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
