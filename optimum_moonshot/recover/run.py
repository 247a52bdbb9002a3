"""The recovery that a run is configured with: end to end where the memory suffices, else block by block."""

import dataclasses
from collections.abc import Callable

from ..errors import Text, require
from ..pipeline.inputs import Prepared
from ..pipeline.variant import Variant, broadcast_first
from .blockwise import Recovery
from .distill import Distillation
from .placement import Placement, TrainingBytes
from .teacher import RECOVER
from .tuning import part_size


def plan_recovery(prepared: Prepared, variant: Variant) -> Callable[[], float]:
    """Prepare the recovery of a run before its first layer; notes in the variant give the reason for another kind.

    Returns:
        A function that all processes call behind the last layer; it returns the seconds.

    Raises:
        MoonshotError: no data, too few, or a model that this kind does not recover.
    """
    config = variant.selection.config
    if config.recover != "distill":
        return _by_block(prepared, variant)
    require(prepared.data is not None, Text("{} needs data", RECOVER), field="calibration", value=None)
    part_size(prepared.calibration.num_samples)
    grids = config.bits is not None or config.has_budget
    size = TrainingBytes.of(prepared.model, grids)
    placement = prepared.subject.ranks.broadcast_object(Placement.within(size, prepared.storage))
    variant.notes += [placement.note] if placement.note else []
    if placement.trains:
        return Distillation(prepared, variant, placement.on_host).run
    return _by_block(prepared, variant)


def _by_block(prepared: Prepared, variant: Variant) -> Callable[[], float]:
    recovery = Recovery.plan(prepared, variant)
    if recovery.config.recover == "distill":
        recovery.config = dataclasses.replace(recovery.config, recover="blockwise")
    return lambda: broadcast_first(prepared, recovery.run)
