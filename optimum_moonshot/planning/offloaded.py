"""What a plan says of a model whose blocks are elsewhere: the one that is there, and how often all are read."""

import dataclasses
import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..calibration.storage import Storage
from ..config import MoonshotConfig
from ..data.batches import Batch
from ..devices import wait_for
from ..errors import require
from ..model.calls import model_device, to_device
from ..model.layers import Block, Structure
from ..model.losses import Loss
from ..model.offload import is_on_disk
from ..model.onloading import RESIDENT
from ..pipeline.block_probe import without_weights
from ..pipeline.selection import Selection, check_weight
from ..pipeline.streamed import StreamedPipeline
from ..reports.plan import DISK
from ..results.store import weight_sums

CPU = "cpu"
# How often a rotation brings each block besides the steps of learning: to find it, to try it, to gather, to write it.
ROTATION_READS = 18


@dataclasses.dataclass(frozen=True)
class Away:
    """Bytes of the blocks whose weights are elsewhere; one of them at a time is on the device."""

    largest: int
    total: int
    place: str  # "cpu" or "disk"


def blocks_away(structure: Structure, offload: str | None) -> Away | None:
    """Those of a model; None where all are in it.

    Args:
        structure: of the model.
        offload: "cpu" or "disk", where a model without weights would have its blocks; None asks the blocks.
    """
    away = [block for block in structure.blocks if offload is not None or block.weights is not RESIDENT]
    if not away:
        return None
    sizes = [module_bytes(block.module) for block in away]
    return Away(max(sizes), sum(sizes), offload or (DISK if is_on_disk(away) else CPU))


def module_bytes(module: nn.Module) -> int:
    """Of all parameters and buffers, shared ones once."""
    return sum({id(each): each.nbytes for each in _tensors(module)}.values())


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def times_read(selection: Selection) -> int:
    """How often a run reads every weight that is elsewhere, saving apart.

    Args:
        selection: whose configuration says what passes there are.
    """
    config: MoonshotConfig = selection.config
    passes = 3 if selection.needs_gradients else 2  # checked, and seen; forwards before it for gradients
    shares = {"fisher": 2, "owl": 1}.get(config.allocation if isinstance(config.allocation, str) else "", 0)
    turned = 0 if config.rotation is None else ROTATION_READS + config.rotation_steps
    return passes + shares + turned + (config.recover is not None)


def bring_seconds(blocks: Sequence[Block]) -> tuple[float, float]:
    """Seconds of the wall that bringing all weights takes, and checking them, by the first block that is elsewhere.

    Args:
        blocks: of the model.

    Raises:
        MoonshotError: a weight that cannot be pruned.
    """
    away = [block for block in blocks if block.weights is not RESIDENT]
    one, device = away[0], model_device(away[0].module)
    started = time.perf_counter()
    with one.onloaded():
        for tensor in _tensors(one.module):  # what is mapped is read when it is looked at
            tensor.sum()
        wait_for(device)
        brought = time.perf_counter()
        for layer in one.layers:
            check_weight(layer)
            weight_sums(layer)
        checked = time.perf_counter()
        size = max(1, module_bytes(one.module))
    total = sum(module_bytes(block.module) for block in away)
    return (brought - started) * total / size, (checked - brought) * total / size


def streamed_try(
    model: nn.Module, blocks: tuple[Block, ...], batch: Batch, gradients: bool, loss: Loss | None
) -> StreamedPipeline:
    """Passes over a batch whose first block alone has real inputs: all others get these too.

    Args:
        model: whose blocks are elsewhere.
        blocks: all of its blocks.
        batch: the inputs.
        gradients: whether the passes go backwards.
        loss: (output, batch) → [B] losses, or None for the model's own.

    Raises:
        MoonshotError: the blocks cannot be passed one by one.
    """
    device = model_device(model)
    found = without_weights(model, blocks, to_device(batch, device))
    why = "plan: the blocks' arguments cannot be seen without their weights; plan the model in memory"
    require(found is not None, why)
    assert found is not None
    passes = StreamedPipeline(model, blocks, [batch], gradients, loss, Storage(device), extras=found.extras)
    passes.capture_arguments()
    hidden = passes.calls[0][0].hidden
    for i in range(len(blocks)):
        passes.calls[i][0].hidden = hidden
    passes.deltas = [torch.full_like(hidden, 1e-3)]
    return passes
