"""The choice of a run's recovery: end to end if the memory suffices, else block by block.

End-to-end training (recover="distill" or "routers") follows the first rule below for which the memory suffices.

1. Everything on the device: the copy of the model, float32 masters, gradients and moments.
2. The copy on the device; masters, gradients and moments in host memory.
3. The model is recovered block by block; only one block at a time has an optimizer's state. Routers alone are not
   trained so: it would train everything else.

The best state is copied to host memory.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from ..calibration.storage import Storage
from ..config import MoonshotConfig
from ..devices import is_gpu
from ..errors import require
from ..model.calls import frozen
from ..pipeline.inputs import Prepared
from ..pipeline.variant import Variant, broadcast_first
from .blockwise import Recovery, SmallerModel
from .distill import Distillation
from .student import HOST
from .tuning import part_size, trained_names


def plan_recovery(prepared: Prepared, variant: Variant, smaller: SmallerModel | None = None) -> Callable[[], float]:
    """Prepare the recovery of a run before its first layer; a note in the variant explains a fallback.

    Args:
        prepared: the dense model with the data.
        variant: of the run.
        smaller: the model without its removed experts, if the run removes some.

    Returns:
        A function that all processes call after the last layer; it returns the seconds.

    Raises:
        MoonshotError: no data, too few samples, too little memory for the training of routers, or a model that this
            kind does not recover.
    """
    config = variant.selection.config
    message = f"recover={config.recover!r} needs data"
    require(prepared.data is not None, message, field="calibration", value=None)
    if config.distills:
        removable, hint = smaller is None or variant.selection.structure.resident, "use recover='blockwise'"
        why = "the experts of offloaded blocks are removed after the recovery"
        require(removable, why, field="recover", value=config.recover, hint=hint)
        part_size(prepared.calibration.num_samples)
        size = TrainingBytes.of(prepared.model, config)
        placement = broadcast_first(prepared, lambda: Placement.within(size, prepared.storage))
        fits = placement.trains or config.recover == "distill"
        require(fits, placement.note, field="recover", value=config.recover, hint="leave it out, or free memory")
        blockwise = "" if placement.trains else "recovered block by block instead of distilled: "
        variant.notes += [f"{blockwise}{placement.note}"] if placement.note else []
        if placement.trains:
            return Distillation(prepared, variant, placement.on_host, smaller).run
    with frozen(prepared.model):
        recovery = Recovery(prepared, variant, smaller)
    if config.recover == "distill":
        recovery.config = dataclasses.replace(config, recover="blockwise")
    return lambda: broadcast_first(prepared, recovery.run)


@dataclass(frozen=True)
class TrainingBytes:
    """Bytes of training all parameters of a model end to end."""

    copy: int  # of the model
    state: int  # masters, gradients and moments
    best: int  # the best state
    host: int  # masters, gradients, moments and the best state, if they are not on the device

    @classmethod
    def of(cls, model: nn.Module, config: MoonshotConfig) -> "TrainingBytes":
        """Compute the bytes for a model; weights on a grid have latent masters.

        Raises:
            MoonshotError: routers are to be trained, and the model has none.
        """
        copy = state = total = 0
        grids, names = config.bits is not None or config.has_budget, trained_names(model, config)
        for name, parameter in model.named_parameters():
            count, wide = parameter.numel(), parameter.dtype in (torch.float32, torch.float64) and not grids
            copy += count * (4 if parameter.dtype == torch.float16 else parameter.dtype.itemsize)
            if names is None or name in names:
                state += count * (12 if wide else 16)
                total += count
        return cls(copy, state, 4 * total, 20 * total)


@dataclass(frozen=True)
class Placement:
    """Where a distillation trains; the note is empty if everything is on the device."""

    trains: bool  # end to end; otherwise block by block
    on_host: bool = False
    note: str = ""

    @classmethod
    def choose(cls, size: TrainingBytes, device: torch.device, free: int, host: int) -> "Placement":
        """Return the first placement for which the memory suffices.

        Args:
            size: the bytes of the training.
            device: the device of the model.
            free: free bytes on the device.
            host: free bytes in host memory; equal to `free` on a CPU.
        """
        if not is_gpu(device):
            needed = size.copy + size.state + size.best
            return cls(True) if needed <= free else cls._refused(needed, free, "host memory")
        whole = size.copy + size.state
        if whole <= free and size.best <= host:
            return cls(True)
        if size.copy > free:
            return cls._refused(size.copy, free, str(device))
        if size.host > host:
            return cls._refused(size.host, host, "host memory")
        reason = f"its {_gib(whole)} exceed the {_gib(free)} left on {device}"
        return cls(True, True, f"the distillation's optimizer state was in host memory: {reason}")

    @classmethod
    def _refused(cls, needed: int, free: int, place: str) -> "Placement":
        return cls(False, note=f"end-to-end training needs {_gib(needed)} in {place}, which has {_gib(free)} left")

    @classmethod
    def within(cls, size: TrainingBytes, storage: Storage) -> "Placement":
        """Like `choose`, for the memory that is left in the storage of a run."""
        place = HOST if HOST in storage.limits else storage.device
        return cls.choose(size, storage.device, storage.available(), storage.limits[place] - storage.used[place])


def _gib(size: int) -> str:
    return f"{size / 2**30:.4g} GiB"
