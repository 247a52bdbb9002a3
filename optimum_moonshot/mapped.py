"""Tensors in unlinked temporary files, which the system deletes even if the process is killed."""

import contextlib
import errno
import io
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from threading import Lock

import torch
from torch import Tensor


def mapped_tensor(shape: tuple[int, ...], dtype: torch.dtype, folder: str | os.PathLike[str] | None = None) -> Tensor:
    """An uninitialised tensor whose memory is a file, deleted with it, in a folder that is created if missing.

    None: the system's folder for temporary files.

    Raises:
        OSError: the folder cannot be written, or the disk is full.
    """
    if folder is not None:
        Path(folder).mkdir(parents=True, exist_ok=True)
    count = torch.Size(shape).numel()
    size = max(count * dtype.itemsize, 1)
    handle, path = tempfile.mkstemp(prefix="moonshot-", suffix=".cache", dir=folder)
    try:
        # Allocate the whole file: on a full disk, writing to a mapped hole raises SIGBUS, which kills the process.
        if hasattr(os, "posix_fallocate"):  # not on macOS
            os.posix_fallocate(handle, 0, size)
        elif shutil.disk_usage(path).free < size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        flat = torch.from_file(path, shared=True, size=count, dtype=dtype)
    finally:
        os.close(handle)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    return flat.view(shape)


class SpillFile:
    """Tensors stored one after another in a temporary file in `folder`; None: the system's folder for such files."""

    def __init__(self, folder: str | os.PathLike[str] | None = None):
        self.folder = folder
        self._file: io.BufferedRandom | None = None
        self._end = 0
        self._lock = Lock()

    def put(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Write a tensor in host memory; returns a function that reads it into new host memory.

        Raises:
            OSError: the folder cannot be written, or the disk is full.
        """
        shape, dtype, content = tuple(tensor.shape), tensor.dtype, _bytes(tensor)
        with self._lock:
            if self._file is None:
                if self.folder is not None:
                    Path(self.folder).mkdir(parents=True, exist_ok=True)
                handle, path = tempfile.mkstemp(prefix="moonshot-", dir=self.folder)
                os.unlink(path)
                self._file = open(handle, "w+b")  # noqa: SIM115
            file, start = self._file, self._end
            file.seek(start)
            file.write(content)
            file.flush()
            self._end = start + len(content)

        def read() -> Tensor:
            result = torch.empty(shape, dtype=dtype)
            with self._lock:
                file.seek(start)
                file.readinto(_bytes(result))
            return result

        return read


def _bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor: writable memory of a contiguous one, a copy of another."""
    flat = tensor.contiguous().flatten()
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(bytearray())
