"""Tensors in memory-mapped files that no name leads to: a process that is killed leaves none behind."""

import contextlib
import errno
import os
import shutil
import tempfile
from pathlib import Path

import torch
from torch import Tensor


def mapped_tensor(shape: tuple[int, ...], dtype: torch.dtype, folder: str | os.PathLike[str] | None = None) -> Tensor:
    """An uninitialised tensor whose memory is a file on disk, for as long as the tensor lives.

    Args:
        shape: any.
        dtype: any.
        folder: where the file lies, made if need be; None is the system's for temporary files.

    Raises:
        OSError: the folder cannot be written, or the disk is full.
    """
    if folder is not None:
        Path(folder).mkdir(parents=True, exist_ok=True)
    count = torch.Size(shape).numel()
    handle, path = tempfile.mkstemp(prefix="moonshot-", suffix=".cache", dir=folder)
    try:
        _reserve(handle, path, max(count * dtype.itemsize, 1))
        flat = torch.from_file(path, shared=True, size=count, dtype=dtype)
    finally:
        os.close(handle)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    return flat.view(shape)


def _reserve(handle: int, path: str, size: int) -> None:
    """Take the room at once: writing to a mapped file on a full disk kills the process instead of raising."""
    if hasattr(os, "posix_fallocate"):  # not on macOS
        os.posix_fallocate(handle, 0, size)
    elif shutil.disk_usage(path).free < size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
