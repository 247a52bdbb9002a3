"""Memory for statistics and caches: on the device within the budget, then in host memory, then on disk."""

import weakref
from collections.abc import Mapping
from pathlib import Path

import psutil
import torch
from torch import Tensor

from ..devices import free_bytes, is_gpu
from ..errors import MoonshotError
from ..mapped import mapped_tensor

# The fraction of the free memory that is used without a budget: solvers and activations need the rest.
DEFAULT_SHARE = 0.6

# The fix where the tensors of a run exceed the memory that it may use.
MORE_MEMORY = "raise max_memory, set offload_dir to a folder on a fast disk, or lower num_samples or sequence_length"


class Storage:
    """Allocates tensors within a budget, and counts them until they are garbage.

    `max_memory` is the budget on the device in bytes, by default 60% of the `free` memory there, which is measured if
    it is None. Once 60% of the free host memory is used as well, tensors are memory-mapped files in the folder
    `spill_to`, unlinked as soon as they are mapped, so that none remains of a killed process.
    """

    def __init__(
        self,
        device: torch.device,
        max_memory: int | None = None,
        spill_to: str | None = None,
        free: Mapping[torch.device, int] | None = None,
    ):
        self.device = torch.device(device)
        self.free = dict(free_memory(self.device) if free is None else free)
        self.limits = {place: int(DEFAULT_SHARE * size) for place, size in self.free.items()}
        if max_memory is not None:
            self.limits[self.device] = max_memory
        self.used = dict.fromkeys(self.limits, 0)
        self.folder = None if spill_to is None else Path(spill_to)
        self.spilled = 0  # bytes on disk
        self.cached = 0  # bytes of caches on the device
        # Limits after an allocation failed: on the available bytes, and on the caches on the device.
        self.most: int | None = None
        self.caches: int | None = None

    def available(self) -> int:
        """Bytes left on the model's device, for the statistics of one pass."""
        left = self.limits[self.device] - self.used[self.device]
        return left if self.most is None else min(left, self.most)

    @property
    def next_place(self) -> bool:
        """Whether caches can be stored elsewhere than on the device."""
        return len(self.limits) > 1 or self.folder is not None

    def place(self, size: int, cache: bool = False) -> torch.device | None:
        """The first device with `size` bytes left, or None if only disk has; caches may have a lower limit."""
        full = cache and self.caches is not None and self.cached + size > self.caches
        places = [place for place in self.limits if not (full and place == self.device)]
        return next((place for place in places if self.used[place] + size <= self.limits[place]), None)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, what: str, cache: bool = False) -> Tensor:
        """An uninitialised tensor in the first place that has room; `what` names it in errors.

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
        if self.folder is None:
            budget = f"{sum(self.limits.values()) / 2**30:.2f} GiB"
            message = f"{what} needs {size / 2**30:.2f} GiB more than the budget of {budget} has left"
            raise MoonshotError(message, field="max_memory", hint=MORE_MEMORY)
        try:
            tensor = mapped_tensor(shape, dtype, self.folder)
        except OSError as error:
            message = f"no room for {what}, {size / 2**30:.2f} GiB ({error.strerror})"
            raise MoonshotError(message, field="offload_dir", value=self.folder) from error
        self.spilled += size
        return tensor

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype, what: str) -> Tensor:
        return self.empty(shape, dtype, what).zero_()

    def put(self, tensor: Tensor, what: str) -> Tensor:
        """A cache: a stored copy of a tensor of any device."""
        return self.empty(tensor.shape, tensor.dtype, what, cache=True).copy_(tensor)

    def away(self, tensor: Tensor, what: str) -> Tensor:
        """Move a cache off the device, if it is there and can be stored elsewhere."""
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


def free_memory(device: torch.device) -> dict[torch.device, int]:
    """Bytes that are free on the device and, if it is a GPU, in host memory."""
    host = psutil.virtual_memory().available
    return {device: free_bytes(device), torch.device("cpu"): host} if is_gpu(device) else {device: host}
