"""Make a model smaller, to a target: measure, decide, remove blocks, prune neurons and heads, compact."""

import dataclasses
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ..config import MoonshotConfig
from ..errors import MoonshotError, Option, Text, require
from ..model.calls import Forward, evaluation_mode, frozen
from ..model.layers import visited
from ..model.offload import RESIDENT
from ..objective.patterns import Structured
from ..pipeline.backoff import enough_memory
from ..pipeline.inputs import Prepared, prepare, sample_folder, with_samples_shown
from ..pipeline.selection import Subject, select
from ..pipeline.variant import Variant
from ..progress import progress_bar
from ..reports.prune_report import PruneReport
from ..reports.shrink_report import Candidate, ShrinkReport
from ..rotation.width import WidthReduction, cut_stream
from ..shrinking.decision import Decision, Tables, alternatives, decide, measure_tables, without_set
from ..shrinking.experts import EXPERTS, ExpertCount, find_experts, has_experts
from ..shrinking.hidden import HiddenSizes, hidden_sizes
from ..shrinking.latency import model_latency
from ..shrinking.losses import HIDDEN, WithoutExperts
from ..shrinking.target import Target
from ..shrinking.trials import Trials
from ..shrinking.widths import find_widths
from .expert_choice import ExpertTrials
from .expert_pruning import select_experts
from .layers import prune_layers
from .prune import Discard
from .shrink_parts import LAM_HEADS, Shrinking, attach_decision, expert_config, without_blocks


@dataclasses.dataclass(frozen=True)
class Narrowed:
    """A model with a smaller hidden size, with the predicted increase of its loss."""

    model: PreTrainedModel
    reduction: WidthReduction
    loss: float
    refused: Mapping[str, str]

    @property
    def sizes(self) -> tuple[int, int]:
        """Parameters and their bytes."""
        parameters = list(self.model.parameters())
        return sum(each.numel() for each in parameters), sum(each.nbytes for each in parameters)

    def cost(self, run: Shrinking) -> float:
        """In the unit of the target."""
        if run.target.field == "latency":
            return model_latency(self.model, run.batch_shape)
        return self.sizes[run.target.field == "bytes"]


@enough_memory()
def shrink_model(
    subject: Subject,
    config: MoonshotConfig,
    calibration: Any,
    target: Target,
    batch_shape: tuple[int, int],
    forward: Forward | None,
    resume_dir: str | os.PathLike[str] | None,
) -> tuple[PreTrainedModel, PruneReport, Discard]:
    """As `MoonshotPruner.shrink`: a new, smaller model, with its report; the subject's model is unchanged.

    Raises:
        MoonshotError: a target that cannot be reached, a configuration or model that does not fit, or bad data.
    """
    started = time.perf_counter()
    calibration = config.calibration if calibration is None else calibration
    _check(subject, config, calibration)
    if isinstance(calibration, Iterator):  # it is read twice
        calibration = list(calibration)
    folder = None if resume_dir is None else Path(resume_dir)
    run = Shrinking(subject, config, calibration, target, batch_shape, forward, folder)
    tables, hidden, measured = measure_parts(run)
    assert hidden is not None
    narrowed = narrow(hidden, tables, target)
    if narrowed is None:
        tables = dataclasses.replace(tables, refused={**tables.refused, **hidden.refused})
        model, report = remove_parts(run, tables, measured)
    else:
        model, report = shrink_narrowed(run, tables, narrowed, measured)
    deciding = time.perf_counter() - started - report.seconds["total"]
    report.seconds = {"decision": deciding, **report.seconds, "total": time.perf_counter() - started}
    return model, report, run.discard


def remove_parts(run: Shrinking, tables: Tables, measured: Mapping[str, float]) -> tuple[PreTrainedModel, PruneReport]:
    """Decide which blocks, neurons and heads leave, and remove them.

    Raises:
        MoonshotError: as `shrink_model`.
    """
    while True:
        decision = decide(tables, run.target, measured)
        try:
            model, removal = without_blocks(run.subject.model, decision.blocks)
            break
        except MoonshotError as error:
            if not decision.blocks:
                raise
            tables = without_set(tables, decision.blocks, str(error))
    return run.apply(decision, model, removal)


def narrow(hidden: HiddenSizes, tables: Tables, target: Target) -> Narrowed | None:
    """The model with the hidden size of the least predicted loss; None if that is its own.

    Raises:
        MoonshotError: no combination reaches the target.
    """
    while True:
        best = hidden.best(tables, target)
        if best is None:
            costs = tables.costs_of(target)
            raise target.unreachable(tables.program(costs).least_cost().cost * hidden.least, costs.dense)
        size, loss = best
        if size == hidden.width or hidden.stream is None:
            return None
        try:
            model, reduction = cut_stream(hidden.stream, size)
        except MoonshotError as error:
            hidden = hidden.without(size, str(error))
        else:
            return Narrowed(model, reduction, loss, hidden.refused)


def shrink_narrowed(
    run: Shrinking, tables: Tables, narrowed: Narrowed, measured: Mapping[str, float]
) -> tuple[PreTrainedModel, PruneReport]:
    """Remove further parts of a model with a smaller hidden size, unless that reaches the target already.

    Raises:
        MoonshotError: as `shrink_model`.
    """
    costs, reduction = tables.costs_of(run.target), narrowed.reduction
    budget, removed = run.target.budget(costs.dense), reduction.hidden_size[0] - reduction.hidden_size[1]
    subject = dataclasses.replace(run.subject, model=narrowed.model, teacher=run.teacher)
    smaller = dataclasses.replace(
        run, subject=subject, target=Target(run.target.field, budget, in_units=True), resume_dir=run.folder("narrowed")
    )
    count, size = narrowed.sizes
    left = narrowed.cost(run)
    if left <= budget:
        nothing = Candidate((), {}, 0.0, left)
        alone = ShrinkReport(costs.unit, budget, left, nothing, (), {}, (), {}, (count, count), (size, size))
        model, report = smaller.apply(Decision((), {}, count, alone), narrowed.model, None)
    else:
        parts, _, others = measure_parts(smaller, narrowed=True)
        model, report = remove_parts(smaller, parts, others)
    shrunk = report.shrink
    assert shrunk is not None and report.compaction is not None
    chosen = Candidate(
        (HIDDEN, *shrunk.chosen.allowed),
        {HIDDEN: removed, **shrunk.chosen.removed},
        narrowed.loss + shrunk.chosen.loss,
        shrunk.chosen.cost,
    )
    after = {f"{HIDDEN} {reduction.hidden_size[1]}, {name}": value for name, value in shrunk.measured.items()}
    report.shrink = dataclasses.replace(
        shrunk,
        dense=costs.dense,
        chosen=chosen,
        hidden_size=reduction.hidden_size,
        seconds=None if shrunk.seconds is None else (costs.dense, shrunk.seconds[1]),
        considered=(*alternatives(tables.program(costs), budget), chosen),
        measured={**measured, **after},
        parameters=(round(tables.parameters.dense), shrunk.parameters[1]),
        bytes=(round(tables.bytes.dense), shrunk.bytes[1]),
        refused={**tables.refused, **narrowed.refused, **shrunk.refused},
    )
    report.compaction |= {
        "config": {**{name: list(change) for name, change in reduction.config.items()}, **report.compaction["config"]},
        "parameters": [round(tables.parameters.dense), model.num_parameters()],
    }
    attach_decision(model, report)
    return model, report


def _check(subject: Subject, config: MoonshotConfig, calibration: Any) -> None:
    model, pattern = subject.model, config.parsed_pattern
    require(isinstance(model, PreTrainedModel), f"model is a {type(model).__name__}", hint="pass a PreTrainedModel")
    hint = Text("use {}, {}", Option("solver", "osscar"), Option("pattern", Structured.kind))
    message = "a smaller model loses whole neurons and heads"
    require(isinstance(pattern, Structured), message, field="pattern", value=config.pattern, hint=hint)
    message = "the target determines it; leave it at 0"
    require(not config.sparsity, message, field="sparsity", value=config.sparsity)
    message = "the target determines the sparsity of every layer"
    require(config.allocation == "uniform", message, field="allocation", value=config.allocation)
    require(calibration is not None, "losses are measured on data; give some", field="calibration", value=None)
    require(subject.ranks.size == 1, "shrink runs in one process", hint="start it without a launcher")
    resident = all(block.weights is RESIDENT for block in visited(model))
    require(resident, "its blocks are offloaded", field="model", hint=Text("load it without {}", "offload"))


def measure_parts(run: Shrinking, narrowed: bool = False) -> tuple[Tables, HiddenSizes | None, dict[str, float]]:
    """The tables of losses and costs, the losses of hidden sizes unless one was `narrowed`, and all measurements."""
    subject, config, model = run.subject, run.config, run.model
    # At λ < 1, so that the samples have labels for the losses.
    selection = select(model, dataclasses.replace(config, lam=LAM_HEADS, recover=None))
    samples = sample_folder(subject, run.folder("measured"))
    prepared = prepare(subject, selection, run.calibration, samples)
    names = {layer.name for layer in selection.layers}
    pattern = config.parsed_pattern
    assert isinstance(pattern, Structured)
    with frozen(model):
        widths, refused = find_widths(model, prepared.probe, names, pattern.group)
        experts, kept = _experts(prepared, run.target)
        trials = Trials(prepared, widths, _solve, run.resume_dir)
        try:
            tables = measure_tables(model, trials, widths, {**refused, **kept}, run.target, run.batch_shape, experts)
            hidden = None if narrowed else hidden_sizes(prepared, trials, subject.loss, run.target, run.batch_shape)
            return tables, hidden, trials.measurements.values
        finally:
            trials.release()


def _experts(prepared: Prepared, target: Target) -> tuple[tuple[ExpertCount, WithoutExperts] | None, dict[str, str]]:
    """The experts that may leave with a context for each trial, or the reason why they stay."""
    model, config = prepared.model, prepared.selection.config
    assert isinstance(model, PreTrainedModel)
    if target.field == "latency":
        reason = "every token passes as many experts as before, so that its latency stays"
        return None, {EXPERTS: reason} if has_experts(model) else {}
    with evaluation_mode(model):
        width, refused = find_experts(model, prepared.probe)
    if width is None:
        return None, refused
    try:
        selection = select_experts(model, expert_config(config, width.sparsity(width.levels[-1])))
    except MoonshotError as error:
        return None, {EXPERTS: str(error)}
    data = with_samples_shown(prepared.subject, selection, prepared.calibration)
    trials = ExpertTrials(dataclasses.replace(prepared, selection=selection, data=data), width.removals)
    return (width, trials.without), {}


def _solve(prepared: Prepared, variants: Sequence[Variant]) -> None:
    shown = prepared.subject.progress
    with progress_bar(total=len(prepared.selection.layers), desc="trials", unit="layer", shown=shown) as bar:
        prune_layers(prepared, variants, bar)
