"""Tensors in files that no name leads to: a process that is killed leaves none behind."""

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import IO

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


class SpillFile:
    """Tensors that wait on disk, one behind the other, and take no memory until they are read.

    Args:
        folder: where the file lies, made if need be; None is the system's for temporary files.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None):
        self.folder = folder
        self._file: IO[bytes] | None = None
        self._end = 0
        self._lock = Lock()

    def put(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Write a tensor; what is returned reads it again, into host memory.

        Args:
            tensor: of any shape, in host memory.

        Raises:
            OSError: the folder cannot be written, or the disk is full.
        """
        shape, dtype, content = tuple(tensor.shape), tensor.dtype, _bytes(tensor)
        with self._lock:
            if self._file is None:
                if self.folder is not None:
                    Path(self.folder).mkdir(parents=True, exist_ok=True)
                self._file = tempfile.TemporaryFile(prefix="moonshot-", dir=self.folder)  # noqa: SIM115
            file, start = self._file, self._end
            file.seek(start)
            file.write(content)
            file.flush()
            self._end = start + len(content)

        def read() -> Tensor:
            found = torch.empty(shape, dtype=dtype)
            with self._lock:
                file.seek(start)
                file.readinto(_bytes(found))  # type: ignore[attr-defined]
            return found

        return read


def _bytes(tensor: Tensor) -> memoryview:
    """A tensor's memory; of a contiguous one itself, to be written to."""
    flat = tensor.contiguous().flatten()
    return memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(bytearray())
