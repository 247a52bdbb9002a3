"""A run that removes whole experts: select the layers, plan, choose the experts, remove them.

The experts are removed in the run, not set to zero, because the router would still select experts of zeros.
"""

import os
import time
from collections.abc import Callable
from typing import Any

from torch import nn

from ..config import MoonshotConfig
from ..errors import require
from ..model.calls import frozen
from ..model.mixtures import find_mixtures
from ..objective.patterns import Experts
from ..pipeline.inputs import prepare
from ..pipeline.selection import Subject, select_experts
from ..pipeline.variant import Variant, attach_report, share_recovered
from ..recover.blockwise import SmallerModel
from ..recover.run import plan_recovery
from ..reports.prune_report import PruneReport
from .choice import ExpertSelection
from .removal import ExpertRemoval


def prune_experts(
    subject: Subject, config: MoonshotConfig, calibration: Any, resume_dir: str | os.PathLike[str] | None
) -> tuple[PruneReport, Callable[[], None]]:
    """Like `prune_model`, for pattern="experts": removes the same number of experts from every mixture.

    Raises:
        MoonshotError: a model without mixtures, or with too few experts to remove so many; bad data, or too little
            memory. The model is unchanged.
    """
    started, recovering = time.perf_counter(), 0.0
    selection = select_experts(subject.model, config)
    prepared = prepare(subject, selection, calibration, resume_dir)
    message = "pattern='experts' needs data"
    require(prepared.data is not None, message, field="calibration", value=None)
    parameters, pattern = _count(subject.model), selection.config.parsed_pattern
    assert isinstance(pattern, Experts)
    with frozen(subject.model):
        mixtures = find_mixtures(subject.model, prepared.probe)
        removal = ExpertRemoval.plan(subject.model, mixtures, pattern, prepared.probe)
    variant = Variant.open(prepared, selection, resume_dir, "resume_dir")
    store = variant.store
    for layer in selection.layers:
        variant.skip(layer, "its experts are removed as a whole")
    experts = ExpertSelection(prepared, tuple(removal.mixtures), removal.pattern, store)
    # The experts are chosen before the recovery runs.
    smaller = SmallerModel(
        lambda block: removal.tensors(block.name, experts.remaining()),
        removal.configured,
        lambda: removal.removed(experts.remaining()),
    )
    try:
        recovery = None if config.recover is None else plan_recovery(prepared, variant, smaller)
        with frozen(subject.model):
            experts.run()
            if recovery is not None:
                recovering = recovery()
                share_recovered(prepared, variant)
        prepared.backoff.share()
        removal.apply(experts.remaining(), variant.commit)
    finally:
        store.release()
    total = time.perf_counter() - started
    seconds = {"calibration": total - experts.solving - recovering, "solver": experts.solving, "total": total}
    seconds |= {"recovery": recovering} if recovery is not None else {}
    removed = {mixture.name: len(experts.removed(mixture)) for mixture in removal.mixtures}
    compaction = removal.compaction(removed, (parameters, _count(subject.model)))
    layers = [store.reports[mixture.name] for mixture in removal.mixtures]
    fields = {"skipped": {}, "compaction": compaction, "parameters": parameters, "recovery": variant.recovered}
    notes = dict.fromkeys([*variant.notes, *experts.notes, *experts.pipeline.notes])
    record = {"compaction": compaction}
    return attach_report(prepared, selection, layers, seconds, notes, report=fields, record=record), store.discard


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
