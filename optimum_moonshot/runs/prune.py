"""One run of the pruner: select → prepare → solve every layer → recover → write; until then the model stays dense."""

import os
import time
from typing import Any

from ..config import MoonshotConfig
from ..model.calls import frozen
from ..objective.patterns import Experts
from ..pipeline.device_memory import enough_memory
from ..pipeline.exchange import share_recovered
from ..pipeline.inputs import Prepared, Subject, prepare
from ..pipeline.selection import select
from ..pipeline.variant import Variant
from ..progress import progress_bar
from ..recovery.blockwise import Recovery
from ..reports.prune_report import PruneReport
from ..results.run_folder import RunFolder
from ..results.store import ResultStore
from .expert_pruning import run_removal
from .loop import prune_layers
from .rotate import rotated


def run(
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
    started = time.perf_counter()
    selection = select(subject.model, config)
    kept = None
    if resume_dir is not None and subject.ranks.is_main:
        kept = RunFolder(resume_dir, "resume_dir").for_samples()
    prepared = prepare(subject, selection, calibration, kept)
    variant = Variant.open(prepared, selection, resume_dir, "resume_dir")
    try:
        with rotated(prepared, [variant], stays=True) as rotating:
            recovering = solve_and_write(prepared, variant)
    finally:
        variant.store.release()
    total = time.perf_counter() - started
    calibrating = total - rotating - variant.allocating - variant.solving - recovering
    seconds = {"rotation": rotating} if config.rotation is not None else {}
    seconds |= {"allocation": variant.allocating} if selection.config.allocation == "fisher" else {}
    seconds |= {"calibration": calibrating, "solver": variant.solving}
    seconds |= {"recovery": recovering} if config.recover is not None else {}
    return variant.report(prepared, {**seconds, "total": total}), variant.store


def solve_and_write(prepared: Prepared, variant: Variant) -> float:
    """Every layer's result, then all of them into the model; returns the seconds that a recovery took.

    Args:
        prepared: the model, dense, and the data.
        variant: which gets the results.

    Raises:
        MoonshotError: bad statistics, or too little memory on the device; the model is as it was.
    """
    subject, recovering = prepared.subject, 0.0
    recovery = Recovery.plan(prepared, variant)
    bar = progress_bar(total=len(variant.selection.layers), desc="pruning", unit="layer", shown=subject.progress)
    with enough_memory():
        with frozen(subject.model), bar:
            prune_layers(prepared, [variant], bar)
            if recovery is not None:
                recovering = recover(prepared, recovery) if subject.ranks.is_main else 0.0
                share_recovered(prepared, variant)
        prepared.backoff.share()
        variant.commit()
    return recovering


def recover(prepared: Prepared, recovery: Recovery) -> float:
    """Recover block after block under a bar; returns the seconds it took."""
    started = time.perf_counter()
    total = sum(bool(block.layers) for block in recovery.blocks)

    def run() -> None:
        shown = prepared.subject.progress
        with progress_bar(recovery.run(), desc="recovering", total=total, unit="block", shown=shown) as blocks:
            for block in blocks:
                blocks.set_postfix_str(block.name)

    recovery.backoff.repeated(lambda: recovery.where, run, lambda: recovery.parts, lambda: recovery.schedule)
    return time.perf_counter() - started
