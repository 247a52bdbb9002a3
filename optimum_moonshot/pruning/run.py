"""One run of the pruner: select → prepare → solve every layer → recover → write; until then the model stays dense."""

import os
import time
from typing import Any

import torch
from tqdm.auto import tqdm

from ..config import MoonshotConfig
from ..errors import MoonshotError
from ..model.calls import frozen
from ..reports.prune_report import PruneReport
from .preparation import Prepared, Subject, prepare
from .recovery import Recovery
from .selection import select
from .solving import prune_layers
from .variant import Variant


def run(
    subject: Subject, config: MoonshotConfig, calibration: Any, resume_dir: str | os.PathLike | None
) -> PruneReport:
    """Prune a model.

    Args:
        subject: the model and what belongs to it.
        config: how.
        calibration: what `MoonshotPruner.prune` takes.
        resume_dir: a folder that keeps each layer's result until the run is complete, or None.

    Raises:
        MoonshotError: bad data, layers or statistics, or too little memory; the model is as it was.
    """
    started = time.perf_counter()
    selection = select(subject.model, config)
    prepared = prepare(subject, selection, calibration)
    variant = Variant.open(prepared, selection, resume_dir, "resume_dir")
    recovery = Recovery.plan(prepared, variant)
    bar = tqdm(total=len(selection.layers), desc="pruning", unit="layer", disable=not subject.progress)
    recovering = 0.0
    try:
        with frozen(subject.model), bar:
            prune_layers(prepared, [variant], bar)
            if recovery is not None:
                recovering = recover(prepared, recovery)
    except torch.OutOfMemoryError as error:
        raise MoonshotError(f"out of device memory: lower max_memory, batch_size or num_samples ({error})") from None
    variant.commit()
    variant.store.discard()
    total = time.perf_counter() - started
    seconds = {"calibration": total - variant.solving - recovering, "solver": variant.solving}
    seconds |= {"recovery": recovering} if config.recover is not None else {}
    return variant.report(prepared, {**seconds, "total": total})


def recover(prepared: Prepared, recovery: Recovery) -> float:
    """Recover block after block under a bar; returns the seconds it took."""
    started = time.perf_counter()
    total = sum(bool(block.layers) for block in prepared.selection.structure.blocks)
    hidden = not prepared.subject.progress
    with tqdm(recovery.run(), desc="recovering", total=total, unit="block", disable=hidden) as blocks:
        for block in blocks:
            blocks.set_postfix_str(block.name)
    return time.perf_counter() - started
