"""Make a model smaller, to a target: measure, decide, remove blocks, prune neurons and heads, compact."""

import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ..config import MoonshotConfig
from ..errors import MoonshotError
from ..model.calls import Forward, called_by
from ..pipeline.run_context import run_context
from ..pipeline.selection import Subject
from ..reports.prune_report import PruneReport
from .decision import Tables, decide, without_set
from .hidden import Narrowed, narrow
from .measurements import measure_parts
from .parts import apply_decision, attach_decision, without_blocks
from .report import ShrinkReport, Target, VocabularyReport
from .request import Shrinking, check_request, model_cost
from .tokens import check_calibration
from .vocabulary import reduce_vocabulary


@dataclasses.dataclass(frozen=True)
class Shrunk:
    """A smaller model with its tokenizer."""

    model: PreTrainedModel
    tokenizer: Any
    report: PruneReport | ShrinkReport  # the latter if nothing but the vocabulary is smaller
    discard: Callable[[], None] = lambda: None  # deletes the files of the run, once the model is saved
    replaced_files: frozenset[str] = frozenset()  # of the vocabulary, beside the weights of the original model


def shrink_model(
    subject: Subject,
    config: MoonshotConfig,
    calibration: Any,
    target: Target | None,
    batch_shape: tuple[int, int],
    forward: Forward | None,
    resume_dir: str | os.PathLike[str] | None,
    hidden_multiple: int | None = None,
    vocabulary: Any = None,
) -> Shrunk:
    """Implement `MoonshotPruner.shrink`; the subject's model is unchanged. No target: the vocabulary alone.

    Raises:
        MoonshotError: a target that cannot be reached, a configuration or model that does not fit, or bad data.
    """
    calibration = config.calibration if calibration is None else calibration
    if target is not None:
        check_request(subject, config, calibration, target, batch_shape, hidden_multiple)
    if isinstance(calibration, Iterator):  # it is read twice
        calibration = list(calibration)
    options = (batch_shape, forward, resume_dir, hidden_multiple)
    if vocabulary is None:
        assert target is not None
        return _shrink_parts(subject, config, calibration, target, *options)
    if target is not None:
        check_calibration(calibration)
    smaller, model = reduce_vocabulary(subject, vocabulary, calibration), subject.model
    assert isinstance(model, PreTrainedModel)
    if target is None:
        return Shrunk(smaller.model, smaller.tokenizer, smaller.report.alone(), replaced_files=smaller.files)
    dense, cost = (model_cost(one, target, batch_shape) for one in (model, smaller.model))
    budget = target.budget(dense)
    if cost <= budget:
        report = smaller.report.alone()
        chosen = dataclasses.replace(report.chosen, cost=cost)
        changes: dict[str, Any] = dict(
            unit=target.unit, budget=budget, dense=dense, chosen=chosen, considered=(chosen,)
        )
        report = dataclasses.replace(report, **changes)
        return Shrunk(smaller.model, smaller.tokenizer, report, replaced_files=smaller.files)
    subject = dataclasses.replace(subject, model=smaller.model, tokenizer=smaller.tokenizer)
    with run_context(subject, forward, "shrink") as subject:
        target = dataclasses.replace(target, dense=dense)
        shrunk = _shrink_parts(subject, config, calibration, target, *options)
    _add_vocabulary(shrunk, smaller.report, dense)
    return dataclasses.replace(shrunk, replaced_files=smaller.files)


def _add_vocabulary(shrunk: Shrunk, smaller: VocabularyReport, dense: float) -> None:
    """Add the vocabulary to the report of a model that other parts were removed from afterwards."""
    report = shrunk.report
    assert isinstance(report, PruneReport) and report.shrink is not None and report.compaction is not None
    sizes: dict[str, Any] = {
        name: (getattr(smaller, name)[0], getattr(report.shrink, name)[1]) for name in ("parameters", "bytes")
    }
    seconds = None if report.shrink.seconds is None else (dense, report.shrink.seconds[1])
    report.shrink = dataclasses.replace(report.shrink, dense=dense, seconds=seconds, vocabulary=smaller, **sizes)
    report.compaction = {**report.compaction, "parameters": list(sizes["parameters"])}
    attach_decision(shrunk.model, report)


def _shrink_parts(
    subject: Subject,
    config: MoonshotConfig,
    calibration: Any,
    target: Target,
    batch_shape: tuple[int, int],
    forward: Forward | None,
    resume_dir: str | os.PathLike[str] | None,
    hidden_multiple: int | None,
) -> Shrunk:
    """Remove the parts of a model with the least loss: blocks, neurons, heads, experts, directions of the stream."""
    started = time.perf_counter()
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
    return Shrunk(model, subject.tokenizer, report, run.discard)


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
            parts, _, others = measure_parts(smaller, tables)
        model, report = remove_parts(smaller, parts, others)
    narrowed.complete(report, tables, run.target, measured)
    attach_decision(model, report)
    return model, report
