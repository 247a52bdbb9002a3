"""A pruning: select → prepare → solve every layer → recover → commit; until then the model stays dense."""

import os
import time
from typing import Any

from ..config import MoonshotConfig
from ..model.calls import frozen
from ..objective.patterns import Experts
from ..pipeline.backoff import enough_memory
from ..pipeline.inputs import prepare, sample_folder
from ..pipeline.selection import Subject, select
from ..pipeline.variant import Variant, share_recovered
from ..progress import progress_bar
from ..recovery.blockwise import Recovery
from ..reports.prune_report import PruneReport
from ..results.store import ResultStore
from .expert_pruning import run_removal
from .layers import prune_layers
from .rotate import rotated


def prune_model(
    subject: Subject, config: MoonshotConfig, calibration: Any, resume_dir: str | os.PathLike[str] | None
) -> tuple[PruneReport, ResultStore]:
    """Prune a model.

    Args:
        subject: the model and what belongs to it.
        config: how.
        calibration: what `MoonshotPruner.prune` takes.
        resume_dir: a folder that keeps each layer's result, or None.

    Returns:
        The report, and what holds the results: its files outlive the run, to be discarded once the model is saved.

    Raises:
        MoonshotError: bad data, layers or statistics, or too little memory; the model is as it was.
    """
    if config.pattern == Experts.kind:
        return run_removal(subject, config, calibration, resume_dir)
    started, recovering = time.perf_counter(), 0.0
    selection = select(subject.model, config)
    prepared = prepare(subject, selection, calibration, sample_folder(subject, resume_dir))
    variant = Variant.open(prepared, selection, resume_dir, "resume_dir")
    bar = progress_bar(total=len(variant.selection.layers), desc="pruning", unit="layer", shown=subject.progress)
    try:
        with rotated(prepared, [variant], stays=True) as rotating, enough_memory():
            recovery = Recovery.plan(prepared, variant)
            with frozen(subject.model), bar:
                prune_layers(prepared, [variant], bar)
                if recovery is not None:
                    recovering = recovery.run() if subject.is_main else 0.0
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
    return variant.report(prepared, {**seconds, "total": total}), variant.store
