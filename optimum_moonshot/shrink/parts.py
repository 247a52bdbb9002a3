"""Remove the decided parts of a model: blocks of a copy, its experts, then neurons and heads."""

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel

from ..errors import require
from ..experts.run import prune_experts
from ..model.calls import called_by, evaluation_mode
from ..model.compaction import Compaction
from ..model.depth import BlockRemoval, remove_blocks
from ..model.layers import find_blocks
from ..prune.record import compact_pruned
from ..prune.run import prune_model
from ..reports.prune_report import PruneReport
from ..reports.record import PruningRecord
from .decision import Decision
from .experts import ExpertCount, expert_config
from .merging import Merging
from .request import LAM_HEADS, LAM_NEURONS, Shrinking
from .widths import Width


def apply_decision(
    run: Shrinking, decision: Decision, model: Any, removal: BlockRemoval | None
) -> tuple[PreTrainedModel, PruneReport]:
    """Prune and compact the copy of the model that has the remaining blocks, and report the decision.

    Args:
        run: the request.
        decision: the parts to remove.
        model: a copy without the blocks of the decision.
        removal: the removal of the blocks; None if all remain.

    Raises:
        MoonshotError: like `prune_model`, or the architecture has no configuration of these widths.
    """
    with called_by(model, run.forward), evaluation_mode(run.teacher):
        model, report = _pruned(run, decision, model, removal)
    _complete(run, decision, model, report)
    return model, report


def without_blocks(
    run: Shrinking, merging: Merging | None, decision: Decision
) -> tuple[Any, BlockRemoval | None, Decision]:
    """A copy of the model in which the blocks of the decision are merged into those before them, or deleted.

    A narrowed model belongs to the run, and is not copied. The report of the returned decision has the merged blocks.
    """
    blocks = decision.blocks
    if not blocks:
        return run.model if run.subject.narrowed else copy.deepcopy(run.model), None, decision
    if merging is not None:  # before the removal, which may reuse the model's tensors
        merging.fit(merging.runs(blocks))
    model, removal = remove_blocks(run.model, blocks, copies=not run.subject.narrowed)
    runs = [] if merging is None else merging.write(model, blocks)
    merged = tuple(block for before, last in runs for block in range(before + 1, last + 1))
    return model, removal, dataclasses.replace(decision, report=dataclasses.replace(decision.report, merged=merged))


def _pruned(
    run: Shrinking, decision: Decision, model: Any, removal: BlockRemoval | None
) -> tuple[PreTrainedModel, PruneReport]:
    """Prune and compact the copy of the model that has the remaining blocks."""
    levels = {width: level for width, level in decision.levels.items() if not isinstance(width, ExpertCount)}
    experts = sum(width.sparsity(level) for width, level in decision.levels.items() if isinstance(width, ExpertCount))
    narrower, recover, reports = any(levels.values()), run.config.recover, list[PruneReport]()
    if experts:
        subject = run.smaller(model, decision.blocks, decision.report.merged)
        config = expert_config(run.config, experts, None if narrower else recover)
        report, _ = prune_experts(subject, config, run.calibration, run.folder("experts"))
        reports.append(report)
    if not experts or narrower:
        model, report = _structured(run, levels, decision, model)
        report.layers = [*(layer for earlier in reports for layer in earlier.layers), *report.layers]
        reports.append(report)
    changes = {} if removal is None else {name: list(change) for name, change in removal.config.items()}
    for step in reports:
        changes |= {} if step.compaction is None else step.compaction["config"]
    empty = Compaction({}, {}, {}, (0, 0)).to_dict()
    parameters = [decision.report.parameters[0], model.num_parameters()]
    report.compaction = {**empty, **(report.compaction or {}), "config": changes, "parameters": parameters}
    return model, report


def _allocation(
    run: Shrinking, levels: Mapping[Width, int], blocks: tuple[int, ...], model: Any
) -> dict[str, float | str]:
    """The sparsity of each layer of the copy, whose blocks have other names where some are missing."""
    names = [name for name, _ in find_blocks(run.model)]
    remaining = [name for index, name in enumerate(names) if index not in blocks]
    renamed = dict(zip(remaining, (name for name, _ in find_blocks(model)), strict=True))
    return {
        new + layer.name.removeprefix(old): width.sparsity(level)
        for width, level in levels.items()
        for layer, _ in width.members
        for old, new in renamed.items()
        if layer.name.startswith(f"{old}.")
    }


def _structured(
    run: Shrinking, levels: Mapping[Width, int], decision: Decision, model: Any
) -> tuple[PreTrainedModel, PruneReport]:
    """Prune neurons and heads of the copy without some blocks, recover it, and compact it."""
    subject = run.smaller(model, decision.blocks, decision.report.merged)
    allocation = _allocation(run, levels, decision.blocks, model)
    config, narrower = run.config, any(levels.values())
    heads = any(level and width.members[0][1].size > 1 for width, level in levels.items())
    lam = config.lam if config.lam is not None else LAM_HEADS if heads else LAM_NEURONS
    config = dataclasses.replace(config, lam=lam, sparsity=0.0, allocation=allocation or "uniform")
    skipped = config.recover is not None and not (config.distills or narrower or subject.narrowed)
    config = dataclasses.replace(config, recover=None) if skipped else config
    report, _ = prune_model(subject, config, run.calibration, run.folder("run"))
    if skipped:
        report.notes.append(f"recover={run.config.recover!r} had nothing to tune: no neurons or heads were removed")
    if narrower:
        model, _ = compact_pruned(model, report)
    return model, report


def _complete(run: Shrinking, decision: Decision, model: PreTrainedModel, report: PruneReport) -> None:
    """Check the size of the smaller model, and add the decision to its report and record."""
    actual, expected = model.num_parameters(), decision.parameters
    message = (
        f"the smaller model has {actual:,} parameters, not {expected:,}: the architecture has no such configuration"
    )
    require(actual == expected, message)
    shrunk = decision.report
    if run.target.field == "latency":
        seconds = (shrunk.dense, run.cost_of(model))
        shrunk = dataclasses.replace(shrunk, batch_shape=run.batch_shape, seconds=seconds)
        if seconds[1] > shrunk.budget:
            latencies = f"{1e3 * seconds[1]:.4g} ms, the target {1e3 * shrunk.budget:.4g} ms"
            report.notes.append(f"the latency of the smaller model is {latencies}: its parts predicted less")
    deleted = [block for block in shrunk.blocks if block not in shrunk.merged]
    if deleted:
        why = "no layer before them adds its output to the residual stream as it is"
        report.notes.append(f"blocks {', '.join(map(str, deleted))} were deleted, not merged: {why}")
    report.shrink = shrunk
    attach_decision(model, report)


def attach_decision(model: PreTrainedModel, report: PruneReport) -> None:
    """Note the decision and the changes of the configuration in the model's record."""
    assert report.shrink is not None
    record, summary = PruningRecord.require_of(model), report.shrink.summary()
    dataclasses.replace(record, compaction=report.compaction, shrink=summary).attach(model)
