"""Where statistics and caches live: on the device while the budget lasts, then in host memory, then on disk."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import psutil
import torch
from torch import Tensor

from ..devices import free_bytes, is_gpu
from ..errors import MoonshotError, Text
from ..mapped import mapped_tensor

Item = TypeVar("Item")
# The share of free memory that is used where no budget is given: solvers and activations need the rest.
DEFAULT_SHARE = 0.6

# The fix where the tensors of a run exceed the memory that it may use.
MORE_MEMORY = Text(
    "raise {}, set {} to a folder on a fast disk, or lower {} or {}",
    "max_memory",
    "offload_dir",
    "num_samples",
    "sequence_length",
)


class Storage:
    """Hands out tensors by a budget and counts them until they are garbage.

    Args:
        device: the model's device, the first place tried.
        max_memory: bytes allowed there; None is 60% of what is free now.
        offload_dir: folder for memory-mapped files once host memory (60% of what is free now) is used up too. Files
            are unlinked as soon as they are mapped, so a killed process leaves none behind.
        free: bytes that are free on the device and in host memory; None asks the machine.
    """

    def __init__(
        self,
        device: torch.device,
        max_memory: int | None = None,
        offload_dir: str | None = None,
        free: Mapping[torch.device, int] | None = None,
    ):
        self.device = torch.device(device)
        self.free = dict(free_memory(self.device) if free is None else free)
        self.limits = {place: int(DEFAULT_SHARE * size) for place, size in self.free.items()}
        if max_memory is not None:
            self.limits[self.device] = max_memory
        self.used = dict.fromkeys(self.limits, 0)
        self.offload_dir = None if offload_dir is None else Path(offload_dir)
        self.spilled = 0  # bytes that went to disk
        self.cached = 0  # bytes of caches on the device
        # Where more has been too much: of what is available, and of caches on the device.
        self.most: int | None = None
        self.caches: int | None = None

    def available(self) -> int:
        """Bytes left on the model's device, for statistics that are gathered at once."""
        left = self.limits[self.device] - self.used[self.device]
        return left if self.most is None else min(left, self.most)

    @property
    def next_place(self) -> bool:
        """Whether caches have another place behind the device."""
        return len(self.limits) > 1 or self.offload_dir is not None

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

    def place(self, size: int, cache: bool = False) -> torch.device | None:
        """The first place that has room for so many bytes; None where only the disk is left.

        Args:
            size: bytes.
            cache: they are one of the caches, which may have less of the device.
        """
        full = cache and self.caches is not None and self.cached + size > self.caches
        places = [place for place in self.limits if not (full and place == self.device)]
        return next((place for place in places if self.used[place] + size <= self.limits[place]), None)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, what: str, cache: bool = False) -> Tensor:
        """An uninitialised tensor in the first place that has room.

        Args:
            shape: any shape.
            dtype: any.
            what: it is for, in errors.
            cache: as for `place`.

        Raises:
            MoonshotError: no room anywhere, or the disk is full.
        """
        size = torch.Size(shape).numel() * dtype.itemsize
        device = self.place(size, cache)
        if device is not None:
            tensor = torch.empty(shape, dtype=dtype, device=device)
            cached = size if cache and device == self.device else 0
            self.used[device] += size
            self.cached += cached
            weakref.finalize(tensor, self._release, device, size, cached)
            return tensor
        if self.offload_dir is None:
            budget = f"{sum(self.limits.values()) / 2**30:.2f} GiB"
            message = f"{what} needs {size / 2**30:.2f} GiB more than the budget of {budget} has left"
            raise MoonshotError(message, field="max_memory", hint=MORE_MEMORY)
        return self._on_disk(shape, dtype, size, what)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype, what: str) -> Tensor:
        """As `empty`, filled with zeros.

        Args:
            shape: as for `empty`.
            dtype: as for `empty`.
            what: as for `empty`.

        Raises:
            MoonshotError: no room anywhere, or the disk is full.
        """
        return self.empty(shape, dtype, what).zero_()

    def put(self, tensor: Tensor, what: str) -> Tensor:
        """A stored copy of a tensor: a cache.

        Args:
            tensor: of any shape, on any device.
            what: it is, in errors.

        Raises:
            MoonshotError: no room anywhere, or the disk is full.
        """
        return self.empty(tensor.shape, tensor.dtype, what, cache=True).copy_(tensor)

    def away(self, tensor: Tensor, what: str) -> Tensor:
        """A cache at another place than the device, where it is on the device and there is one; else itself.

        Args:
            tensor: that `put` gave, of any shape.
            what: it is, in errors.

        Raises:
            MoonshotError: no room anywhere, or the disk is full.
        """
        if tensor.device != self.device or not self.next_place:
            return tensor
        allowed, self.caches = self.caches, 0
        try:
            return self.put(tensor, what)
        finally:
            self.caches = allowed

    def _release(self, device: torch.device, size: int, cached: int) -> None:
        self.used[device] -= size
        self.cached -= cached

    def _on_disk(self, shape: tuple[int, ...], dtype: torch.dtype, size: int, what: str) -> Tensor:
        try:
            tensor = mapped_tensor(shape, dtype, self.offload_dir)
        except OSError as error:
            message = f"no room for {what}, {size / 2**30:.2f} GiB ({error.strerror})"
            raise MoonshotError(message, field="offload_dir", value=self.offload_dir) from error
        self.spilled += size
        return tensor


def free_memory(device: torch.device) -> dict[torch.device, int]:
    """Bytes that are free now, of the device and then of the host, which for a CPU are one."""
    host = psutil.virtual_memory().available
    return {device: free_bytes(device), torch.device("cpu"): host} if is_gpu(device) else {device: host}
