"""The memory that a plan assumes, besides the model, on this machine or another one, and what exceeds it."""

import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from ..calibration.storage import Storage, free_memory
from ..config import MoonshotConfig, memory_size
from ..devices import is_gpu
from ..errors import require
from ..model.calls import model_device
from ..model.layers import Structure
from ..model.weights import RESIDENT
from ..pipeline.backoff import Backoff
from ..pipeline.selection import Selection, Subject
from .memory import OffloadedBlocks, RunSpec, module_bytes
from .report import DISK, HOST, Overflow, Snapshot

CPU = torch.device("cpu")
# The options that reduce the largest item of a peak.
HINTS = {
    "caches": "set offload_dir, or lower max_memory, num_samples or sequence_length",
    "statistics": 'set offload_dir, lower max_memory or num_samples, or fisher="shared", or solver="wanda"',
    "solver": 'lower num_samples, or fisher="shared" or lam=1, or solver="wanda"',
    "activations": "lower batch_size or sequence_length",
    "logits": "lower batch_size or sequence_length",
    "weights of a block": "a narrower dtype",
    "rotated weights": "another offload_dir, or no rotation",
    "results": "give a resume_dir",
}


@dataclasses.dataclass(frozen=True)
class MachineMemory:
    """The memory that a plan assumes; None is this machine's."""

    device: int | None = None  # bytes of the device in total, including the model
    host: int | None = None  # bytes of host memory that are free
    offload: str | None = None  # where the blocks of a model without weights would be: "cpu" or "disk"

    @classmethod
    def of(
        cls, device_memory: int | str | None = None, host_memory: int | str | None = None, offload: str | None = None
    ) -> "MachineMemory | None":
        """The sizes of another machine, in bytes or as text, and the place of the blocks; None if none is given."""
        sizes = {"device_memory": device_memory, "host_memory": host_memory}
        numbers = {name: None if size is None else memory_size(name, size) for name, size in sizes.items()}
        given = any(numbers.values()) or offload is not None
        return cls(numbers["device_memory"], numbers["host_memory"], offload) if given else None

    def run(self, subject: Subject, selection: Selection) -> RunSpec:
        """A run on this machine, as yet without data: its offloaded blocks, and its budget of memory.

        Raises:
            MoonshotError: blocks in host memory, of a model that would be there anyway.
        """
        offloaded = self._offloaded(selection.structure, model_device(subject.model))
        storage = self._storage(subject.model, selection.config, offloaded)
        return RunSpec(subject, selection, None, storage, Backoff(storage), offloaded=offloaded)

    def _offloaded(self, structure: Structure, device: torch.device) -> OffloadedBlocks:
        blocks = [block for block in structure.blocks if self.offload is not None or block.weights is not RESIDENT]
        if not blocks:
            return OffloadedBlocks()
        sizes = [module_bytes(block.module) for block in blocks]
        place = self.offload or (DISK if structure.on_disk else HOST)
        possible = place != HOST or self.device is not None or is_gpu(device)
        hint = "use offload='disk', or give device_memory"
        require(possible, "the model is on the CPU anyway", field="offload", value="cpu", hint=hint)
        return OffloadedBlocks(max(sizes), sum(sizes), place)

    def _storage(self, model: nn.Module, config: MoonshotConfig, offloaded: OffloadedBlocks) -> Storage:
        """The budget of a run, on the device that the model will be on."""
        device = model_device(model)
        meta, resident = device.type == "meta", module_bytes(model) - offloaded.total
        if meta:
            device = CPU if self.device is None else torch.device("cuda")
        free = free_memory(CPU if meta else device) | ({} if self.host is None else {CPU: self.host})
        if meta:  # it is not in memory yet
            free[CPU] -= resident if device == CPU else (offloaded.total if offloaded.place == HOST else 0)
        if self.device is not None:
            free[device] = self.device - resident
        free = {place: max(0, free[place]) for place in dict.fromkeys([device, CPU])}
        return Storage(device, config.max_memory_bytes, config.offload_dir, free)

    def overflows(self, run: RunSpec, peaks: Sequence[Snapshot]) -> Iterator[Overflow]:
        """The model, on another machine (on this one it is in memory already); then the peak of each phase."""
        device, offloaded, size = run.storage.device, run.offloaded, run.resident_bytes
        limit = self.host if self.device is None and device.type == "cpu" else self.device
        if limit is not None and size > limit:
            places = '"disk"' if device.type == "cpu" else '"cpu" or "disk"'
            hint = "" if offloaded.total else f"; or offload its layers: offload={places}"
            yield Overflow(
                str(device), "loading", "the model", size, limit, f"a narrower dtype, or a larger device{hint}"
            )
        if offloaded.place == HOST and self.host and offloaded.total > self.host:
            yield Overflow(HOST, "loading", "the model's layers", offloaded.total, self.host, f'offload="{DISK}"')
        for place, limit in ((str(place), size) for place, size in run.storage.free.items()):
            for phase in dict.fromkeys(peak.phase for peak in peaks):
                peak = max((peak for peak in peaks if peak.phase == phase), key=lambda peak: peak.total(place))
                if peak.total(place) > limit:
                    largest = max(peak.items, key=lambda item: peak.items[item].get(place, 0))
                    hint = HINTS.get(largest, "a machine with more memory")
                    yield Overflow(place, phase, peak.where, peak.total(place), limit, hint)
