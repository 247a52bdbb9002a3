"""The memory that a plan assumes: what is free besides the model, on this machine or another one."""

import dataclasses

import torch
from torch import nn

from ..calibration.storage import Storage, free_memory
from ..config import MoonshotConfig, memory_size
from ..devices import is_gpu
from ..errors import require
from ..model.calls import model_device
from ..model.layers import Structure, is_on_disk
from ..model.weights import RESIDENT
from .memory import OffloadedBlocks, module_bytes
from .report import DISK, HOST

CPU = torch.device("cpu")


@dataclasses.dataclass(frozen=True)
class MachineMemory:
    """The memory that a plan assumes; None is this machine's."""

    device: int | None = None  # bytes of the device in total, including the model
    host: int | None = None  # bytes of host memory that are free

    @classmethod
    def of(cls, device_memory: int | str | None, host_memory: int | str | None) -> "MachineMemory | None":
        """The sizes of another machine, in bytes or as text; None if neither is given."""
        sizes = {"device_memory": device_memory, "host_memory": host_memory}
        numbers = {name: None if size is None else memory_size(name, size) for name, size in sizes.items()}
        return None if not any(numbers.values()) else cls(numbers["device_memory"], numbers["host_memory"])

    def storage(self, model: nn.Module, config: MoonshotConfig, offloaded: OffloadedBlocks | None) -> Storage:
        """The budget of a run."""
        device, free = _free(model, self, offloaded)
        return Storage(device, config.max_memory_bytes, config.offload_dir, free)


def offloaded_blocks(structure: Structure, offload: str | None, device: torch.device | None) -> OffloadedBlocks | None:
    """The offloaded blocks of a model; None if all are resident.

    `offload` is "cpu" or "disk" for a model without weights; on the CPU it cannot be "cpu". None: another device.
    """
    blocks = [block for block in structure.blocks if offload is not None or block.weights is not RESIDENT]
    if not blocks:
        return None
    sizes = [module_bytes(block.module) for block in blocks]
    place = offload or (DISK if is_on_disk(blocks) else HOST)
    hint = "use offload='disk', or give device_memory"
    message = "the model is on the CPU anyway"
    require(place != HOST or device is None or is_gpu(device), message, field="offload", value="cpu", hint=hint)
    return OffloadedBlocks(max(sizes), sum(sizes), place)


def _free(
    model: nn.Module, machine: MachineMemory, offloaded: OffloadedBlocks | None
) -> tuple[torch.device, dict[torch.device, int]]:
    """The device that the model will be on, and the free bytes there, besides its resident weights, and on the host."""
    device = model_device(model)
    meta = device.type == "meta"
    if meta:
        device = CPU if machine.device is None else torch.device("cuda")
    resident = module_bytes(model) - (offloaded.total if offloaded else 0)
    free = free_memory(CPU if meta else device)
    host = free[CPU] if machine.host is None else machine.host
    on_device = free.get(device, 0) if machine.device is None else machine.device - resident
    if device.type == "cpu":
        if machine.device is None:
            on_device = host - resident if meta else host
        return device, {device: max(0, on_device)}
    if meta and offloaded is not None and offloaded.place == "cpu":
        host -= offloaded.total
    return device, {device: max(0, on_device), CPU: max(0, host)}
