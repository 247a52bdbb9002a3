"""The report of a run, and its record in the model's configuration."""

from collections.abc import Iterable, Mapping
from typing import Any

from ..reports.prune_report import LayerReport, PruneReport
from ..reports.record import PruningRecord, versions
from .inputs import Prepared
from .selection import Selection


def attach_report(
    prepared: Prepared,
    selection: Selection,
    layers: list[LayerReport],
    seconds: dict[str, float],
    notes: Iterable[str],
    offload_note: str | None = None,
    report: Mapping[str, Any] | None = None,
    record: Mapping[str, Any] | None = None,
) -> PruneReport:
    """The report of a run; its record is attached to the pruned model.

    `layers` are the reports of the layers, `seconds` by phase with the total, and `notes` precede those on memory and
    processes; `report` and `record` are further fields of the `PruneReport` and the `PruningRecord`.
    """
    config, processes = selection.config, prepared.backoff.ranks.size
    alone = ["the rotation was learned"] if config.rotation is not None else []
    alone += ["the blocks were recovered"] if config.recover not in (None, "distill") else []
    by_one = f"; {' and '.join(alone)} by one of them" if alone else ""
    batches = processes if prepared.data is None else len(prepared.data.batches)
    idle = f"; {processes - batches} without samples: lower batch_size" if batches < processes else ""
    pruned = PruneReport(
        config={**config.to_dict(), "offload_dir": None},  # a published report contains no local folders
        layers=layers,
        calibration=None if prepared.data is None else prepared.data.describe(),
        seconds=seconds,
        peak_memory=max(layer.peak_memory for layer in layers),
        versions=versions(),
        notes=[
            *notes,
            *prepared.backoff.notes,
            *([offload_note] if offload_note else []),
            *([f"{processes} processes shared the samples and the layers{idle}{by_one}"] if processes > 1 else []),
        ],
        **(report or {}),
    )
    PruningRecord(
        config=pruned.config,
        solver_options=config.hyperparameters(),
        lam=selection.lam,
        sparsity=pruned.sparsity,
        calibration=pruned.calibration,
        versions=pruned.versions,
        **(record or {}),
    ).attach(prepared.model)
    return pruned
