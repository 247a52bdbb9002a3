"""Prunes or rotates a model: select → prepare → solve every layer → recover → commit."""

import dataclasses
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from ..config import MoonshotConfig
from ..experts.run import prune_experts
from ..model.calls import frozen
from ..objective.patterns import Experts
from ..pipeline.inputs import prepare
from ..pipeline.selection import Subject, select
from ..pipeline.variant import Variant, share_recovered
from ..progress import progress_bar
from ..recover.run import plan_recovery
from ..reports.prune_report import PruneReport
from ..rotate.report import RotationReport
from ..rotate.run import rotated
from .layers import prune_layers

Discard = Callable[[], None]  # deletes the files of a run, which outlive it until the model is saved


def prune_model(
    subject: Subject, config: MoonshotConfig, calibration: Any, resume_dir: str | os.PathLike[str] | None
) -> tuple[PruneReport, Discard]:
    """Prune a model for `MoonshotPruner.prune`. It stays dense until every layer is solved, and if the run fails."""
    calibration = config.calibration if calibration is None else calibration
    if config.pattern == Experts.kind:
        return prune_experts(subject, config, calibration, resume_dir)
    started, recovering = time.perf_counter(), 0.0
    selection = select(subject.model, config)
    prepared = prepare(subject, selection, calibration, resume_dir)
    variant = Variant.open(prepared, selection, resume_dir, "resume_dir")
    bar = progress_bar(total=len(variant.selection.layers), desc="pruning", unit="layer", shown=subject.progress)
    try:
        rotation = nullcontext(0.0) if config.rotation is None else rotated(prepared, [variant], stays=True)
        with rotation as rotating:
            recovery = None if config.recover is None else plan_recovery(prepared, variant)
            with frozen(subject.model), bar:
                prune_layers(prepared, [variant], bar)
                if recovery is not None:
                    recovering = recovery()
                    share_recovered(prepared, variant)
            prepared.backoff.share()
            variant.commit()
    finally:
        variant.store.release()
    total = time.perf_counter() - started
    calibrating = total - rotating - variant.allocating - variant.solving - recovering
    seconds = {"rotation": rotating} if config.rotation is not None else {}
    seconds |= {"allocation": variant.allocating} if selection.config.allocation == "fisher" else {}
    seconds |= {"calibration": calibrating, "solver": variant.solving}
    seconds |= {"recovery": recovering} if config.recover is not None else {}
    return variant.report(prepared, {**seconds, "total": total}), variant.store.discard


def rotate_model(
    subject: Subject, config: MoonshotConfig, calibration: Any, resume_dir: str | os.PathLike[str] | None
) -> tuple[RotationReport, Discard]:
    """Rotate a model for `MoonshotPruner.rotate`."""
    calibration = config.calibration if calibration is None else calibration
    selection = select(subject.model, config)
    prepared = prepare(subject, selection, calibration, resume_dir)
    variant = Variant.open(prepared, selection, resume_dir, "resume_dir")
    try:
        with rotated(prepared, [variant], stays=True):
            pass
    finally:
        variant.store.release()
    assert variant.rotated is not None
    report = variant.rotated.report
    return dataclasses.replace(report, notes=(*report.notes, *variant.notes)), variant.store.discard
