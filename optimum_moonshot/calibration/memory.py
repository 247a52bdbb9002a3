"""Where statistics and caches live: on the device while the budget lasts, then in host memory, then on disk."""

import errno
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import psutil
import torch
from torch import Tensor

from ..errors import MoonshotError

Item = TypeVar("Item")
# The share of free memory that is used where no budget is given: solvers and activations need the rest.
DEFAULT_SHARE = 0.6


class Storage:
    """Hands out tensors by a budget and counts them until they are garbage.

    Args:
        device: the model's device, the first place tried.
        max_memory: bytes allowed there; None is 60% of what is free now.
        offload_dir: folder for memory-mapped files once host memory (60% of what is free now) is used up too. Files
            are unlinked as soon as they are mapped, so a killed process leaves none behind.
    """

    def __init__(self, device: torch.device, max_memory: int | None = None, offload_dir: str | None = None):
        self.device = torch.device(device)
        host = int(DEFAULT_SHARE * psutil.virtual_memory().available)
        if self.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self.device)
            self.limits = {self.device: int(DEFAULT_SHARE * free), torch.device("cpu"): host}
        else:
            self.limits = {self.device: host}
        if max_memory is not None:
            self.limits[self.device] = max_memory
        self.used = dict.fromkeys(self.limits, 0)
        self.offload_dir = None if offload_dir is None else Path(offload_dir)
        self.spilled = 0  # bytes that went to disk

    def available(self) -> int:
        """Bytes left on the model's device."""
        return self.limits[self.device] - self.used[self.device]

    def rounds(
        self, items: Iterable[Item], size_of: Callable[[Item], int], available: Callable[[], int] | None = None
    ) -> Iterator[list[Item]]:
        """Items that half of what is left serves together, at least one; what is left is asked when a round begins.

        Args:
            items: in their order.
            size_of: bytes of one.
            available: says what is left; None is `Storage.available`.
        """
        available = self.available if available is None else available
        together: list[Item] = []
        room = 0
        for item in items:
            size = size_of(item)
            if together and size > room:
                yield together
                together = []
            if not together:
                room = available() // 2
            together.append(item)
            room -= size
        if together:
            yield together

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, what: str) -> Tensor:
        """An uninitialised tensor in the first place that has room.

        Args:
            shape: any shape.
            dtype: any.
            what: it is for, in errors.

        Raises:
            MoonshotError: no room anywhere, or the disk is full.
        """
        size = torch.Size(shape).numel() * dtype.itemsize
        for device, limit in self.limits.items():
            if self.used[device] + size <= limit:
                tensor = torch.empty(shape, dtype=dtype, device=device)
                self.used[device] += size
                weakref.finalize(tensor, self._release, device, size)
                return tensor
        if self.offload_dir is None:
            raise MoonshotError(
                f"max_memory: {what} needs {size / 2**30:.2f} GiB more than the budget of "
                f"{sum(self.limits.values()) / 2**30:.2f} GiB has left; raise max_memory, set offload_dir to a folder "
                "on a fast disk, or lower num_samples or sequence_length"
            )
        return self._on_disk(shape, dtype, size, what)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype, what: str) -> Tensor:
        """As `empty`, filled with zeros.

        Args:
            shape, dtype, what: as for `empty`.

        Raises:
            MoonshotError: no room anywhere, or the disk is full.
        """
        return self.empty(shape, dtype, what).zero_()

    def put(self, tensor: Tensor, what: str) -> Tensor:
        """A stored copy of a tensor.

        Args:
            tensor: of any shape, on any device.
            what: it is, in errors.

        Raises:
            MoonshotError: no room anywhere, or the disk is full.
        """
        return self.empty(tensor.shape, tensor.dtype, what).copy_(tensor)

    def _release(self, device: torch.device, size: int) -> None:
        self.used[device] -= size

    def _on_disk(self, shape: tuple[int, ...], dtype: torch.dtype, size: int, what: str) -> Tensor:
        try:
            self.offload_dir.mkdir(parents=True, exist_ok=True)
            handle, path = tempfile.mkstemp(prefix="moonshot-", suffix=".cache", dir=self.offload_dir)
            try:
                _reserve(handle, path, max(size, 1))
                flat = torch.from_file(path, shared=True, size=torch.Size(shape).numel(), dtype=dtype)
            finally:
                os.close(handle)
                os.unlink(path)
        except OSError as error:
            raise MoonshotError(
                f"offload_dir={str(self.offload_dir)!r}: no room for {what}, {size / 2**30:.2f} GiB ({error.strerror})"
            ) from error
        self.spilled += size
        return flat.view(shape)


def _reserve(handle: int, path: str, size: int) -> None:
    """Take the room at once: writing to a mapped file on a full disk kills the process instead of raising."""
    if hasattr(os, "posix_fallocate"):  # not on macOS
        os.posix_fallocate(handle, 0, size)
    elif shutil.disk_usage(path).free < size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
