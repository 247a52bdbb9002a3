"""The memory in which a distillation trains, by a rule: the first place below that has room.

1. The device: the copy of the model, float32 masters, gradients and moments.
2. The device for the copy, host memory for masters, gradients and moments.
3. Neither: the model is recovered block by block, of which one at a time has an optimizer's state.

The best state is a copy in host memory.
"""

from dataclasses import dataclass

import torch
from torch import nn

from ..calibration.storage import Storage
from ..devices import is_gpu

GIB = 2**30


@dataclass(frozen=True)
class TrainingBytes:
    """Bytes of training all parameters of a model end to end."""

    copy: int  # of the model
    state: int  # masters, gradients and moments
    best: int  # the best state
    host: int  # masters, gradients, moments and the best state, where they are not on the device

    @classmethod
    def of(cls, model: nn.Module, grids: bool) -> "TrainingBytes":
        """`grids`: whether weights on a grid have latent weights beside them."""
        copy = state = total = 0
        for parameter in model.parameters():
            count, wide = parameter.numel(), parameter.dtype in (torch.float32, torch.float64) and not grids
            copy += count * (4 if parameter.dtype == torch.float16 else parameter.dtype.itemsize)
            state += count * (12 if wide else 16)
            total += count
        return cls(copy, state, 4 * total, 20 * total)


@dataclass(frozen=True)
class Placement:
    """Where a distillation trains, with the note on it for the report; empty for the plain one."""

    trains: bool  # end to end; otherwise block by block
    on_host: bool = False
    note: str = ""

    @classmethod
    def choose(cls, size: TrainingBytes, device: torch.device, free: int, host: int) -> "Placement":
        """The first place with room.

        Args:
            size: of the training.
            device: of the model.
            free: bytes there.
            host: bytes in host memory; on a CPU the same.
        """
        if not is_gpu(device):
            needed = size.copy + size.state + size.best
            return cls(True) if needed <= free else cls._refused(needed, free, "host memory")
        whole = size.copy + size.state
        if whole <= free and size.best <= host:
            return cls(True)
        if size.copy <= free and size.host <= host:
            reason = f"its {_gib(whole)} exceed the {_gib(free)} left on {device}"
            return cls(True, True, f"the distillation's optimizer state was in host memory: {reason}")
        if size.copy <= free:
            return cls._refused(size.host, host, "host memory")
        return cls._refused(size.copy, free, str(device))

    @classmethod
    def _refused(cls, needed: int, free: int, place: str) -> "Placement":
        reason = f"end-to-end training needs {_gib(needed)} in {place}, which has {_gib(free)} left"
        return cls(False, note=f"recovered block by block instead of distilled: {reason}")

    @classmethod
    def within(cls, size: TrainingBytes, storage: Storage) -> "Placement":
        """As `choose`, by the memory that a run has left."""
        host = torch.device("cpu")
        place = host if host in storage.limits else storage.device
        return cls.choose(size, storage.device, storage.available(), storage.limits[place] - storage.used[place])


def _gib(size: int) -> str:
    return f"{size / GIB:.4g} GiB"
