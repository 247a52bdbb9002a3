"""Make a model smaller, to a target: measure, decide, remove blocks, prune neurons and heads, compact."""

import dataclasses
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ..config import MoonshotConfig
from ..errors import MoonshotError
from ..model.calls import Forward, called_by
from ..pipeline.selection import Subject
from ..prune.run import Discard
from ..reports.prune_report import PruneReport
from .decision import Tables, decide, without_set
from .hidden import Narrowed, narrow
from .measurements import measure_parts
from .parts import apply_decision, attach_decision, without_blocks
from .request import Shrinking, check_request
from .target import Target


def shrink_model(
    subject: Subject,
    config: MoonshotConfig,
    calibration: Any,
    target: Target,
    batch_shape: tuple[int, int],
    forward: Forward | None,
    resume_dir: str | os.PathLike[str] | None,
    hidden_multiple: int | None = None,
) -> tuple[PreTrainedModel, PruneReport, Discard]:
    """Like `MoonshotPruner.shrink`, but return a new, smaller model with its report; the subject's model is unchanged.

    Raises:
        MoonshotError: a target that cannot be reached, a configuration or model that does not fit, or bad data.
    """
    started = time.perf_counter()
    calibration = config.calibration if calibration is None else calibration
    check_request(subject, config, calibration, target, batch_shape, hidden_multiple)
    if isinstance(calibration, Iterator):  # it is read twice
        calibration = list(calibration)
    folder, shape = None if resume_dir is None else Path(resume_dir), (batch_shape[0], batch_shape[1])
    run = Shrinking(subject, config, calibration, target, shape, forward, folder, hidden_multiple)
    tables, hidden, measured = measure_parts(run)
    narrowed = None if hidden is None else narrow(hidden, tables, target)
    if hidden is not None and narrowed is None:
        tables = dataclasses.replace(tables, refused={**tables.refused, **hidden.refused})
    del hidden  # the statistics need a third of the memory of a Llama in float32, two thirds in bfloat16
    if narrowed is None:
        model, report = remove_parts(run, tables, measured)
    else:
        tables = dataclasses.replace(tables, merging=None)
        model, report = shrink_narrowed(run, tables, narrowed, measured)
    deciding = time.perf_counter() - started - report.seconds["total"]
    report.seconds = {"decision": deciding, **report.seconds, "total": time.perf_counter() - started}
    return model, report, run.discard


def remove_parts(run: Shrinking, tables: Tables, measured: Mapping[str, float]) -> tuple[PreTrainedModel, PruneReport]:
    """Decide which blocks, neurons and heads to remove, and remove them.

    Raises:
        MoonshotError: like `shrink_model`.
    """
    while True:
        decision = decide(tables, run.target, measured)
        try:
            model, removal, decision = without_blocks(run, tables.merging, decision)
            break
        except MoonshotError as error:
            if not decision.blocks:
                raise
            tables = without_set(tables, decision.blocks, str(error))
    return apply_decision(run, decision, model, removal)


def shrink_narrowed(
    run: Shrinking, tables: Tables, narrowed: Narrowed, measured: Mapping[str, float]
) -> tuple[PreTrainedModel, PruneReport]:
    """Remove further parts of a model with a smaller hidden size, unless it is small enough already.

    Raises:
        MoonshotError: like `shrink_model`.
    """
    costs = tables.costs_of(run.target)
    budget, cost = run.target.budget(costs.dense), run.cost_of(narrowed.model)
    smaller = run.of_narrowed(narrowed.model, narrowed.basis, costs.dense)
    if cost <= budget:
        model, report = apply_decision(smaller, narrowed.sufficient(costs.unit, budget, cost), narrowed.model, None)
    else:
        with called_by(narrowed.model, run.forward):
            parts, _, others = measure_parts(smaller, narrowed=True)
        model, report = remove_parts(smaller, parts, others)
    narrowed.complete(report, tables, run.target, measured)
    attach_decision(model, report)
    return model, report
