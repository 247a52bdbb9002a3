"""Adds later changes of a pruned model to its report and to its record."""

import dataclasses
from typing import Any

from ..errors import require
from ..model.compaction import Compaction, compact_model
from ..model.isolation import isolated
from ..model.model_info import whole_numbers
from ..objective.patterns import Experts
from ..pipeline.run_context import PACKED, check_idle
from ..reports.prune_report import PruneReport
from ..reports.record import PruningRecord
from ..rotate.report import RotationReport
from ..runtime.packed_module import is_packed
from ..shrink.report import ShrinkReport


def compact_pruned(model: Any, report: PruneReport | None) -> tuple[Any, Compaction]:
    """Like `compact_model`, with entries in the record and in the report, if there is one.

    A model with fewer experts is compact already.
    """
    check_idle(model, "compact")
    record = PruningRecord.of(model)
    if record is not None and record.config["pattern"] == Experts.kind and record.compaction is not None:
        return model, Compaction.from_dict(record.compaction)
    require(not is_packed(model), PACKED)
    with isolated(model):
        small, compaction = compact_model(model)
    dataclasses.replace(PruningRecord.require_of(model), compaction=compaction.to_dict()).attach(small)
    if report is not None:
        declared = {name for name, _ in whole_numbers(model.config)}
        report.compaction = compaction.to_dict()
        report.notes += [
            f"{type(model.config).__name__} does not declare {name}, which transformers reads: programs that compute "
            "it from the number of heads cannot load the smaller model; `ignore` the layers that read heads to keep "
            "them all"
            for name in compaction.config
            if name not in declared
        ]
    return small, compaction


def note_rotation(model: Any, report: PruneReport, rotation: RotationReport) -> None:
    """Add an earlier rotation to the report of a pruned model, and to its record."""
    report.rotation, record = rotation, PruningRecord.of(model)
    if record is not None:
        dataclasses.replace(record, rotation=rotation.summary()).attach(model)


def note_vocabulary(model: Any, report: PruneReport | None, shrunk: ShrinkReport) -> None:
    """Add a smaller vocabulary to the report of a pruned model, if there is one, and to its record."""
    record, summary = PruningRecord.of(model), shrunk.summary()
    if report is not None:
        earlier = shrunk if report.shrink is None else report.shrink
        report.shrink = dataclasses.replace(earlier, vocabulary=shrunk.vocabulary)
        summary = report.shrink.summary()
    if record is not None:
        dataclasses.replace(record, shrink=summary).attach(model)


def remove_tokens(report: PruneReport, shrunk: ShrinkReport) -> None:
    """Subtract the tokens that were removed from a pruned model from the sizes in its report."""
    fewer, smaller = (before - after for before, after in (shrunk.parameters, shrunk.bytes))
    report.parameters -= fewer
    rounded = report.embedding_bits is not None  # then `smaller` is not the change of the packed file
    report.other_bytes = None if report.other_bytes is None or rounded else report.other_bytes - smaller
    if report.shrink is not None:
        sizes = {"parameters": shrunk.parameters[1], "bytes": shrunk.bytes[1]}
        changes: dict[str, Any] = {name: (getattr(report.shrink, name)[0], after) for name, after in sizes.items()}
        report.shrink = dataclasses.replace(report.shrink, **changes)
