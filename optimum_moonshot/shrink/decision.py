"""The decision: measure the parts of a model, and solve the program for a target."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from ..errors import MoonshotError
from ..model.layers import find_blocks, find_structure
from .blocks import BLOCKS
from .costs import Costs, latency_costs, shape_costs
from .experts import ExpertCount, WithoutExperts
from .losses import (
    MOST_BLOCKS,
    BlockSets,
    WidthLosses,
    block_sets,
    build_program,
    expert_losses,
    width_losses,
)
from .merging import Merging
from .program import Choice, Program
from .report import Candidate, ShrinkReport, Target
from .request import Shrinking
from .trials import Trials
from .widths import Width, within


@dataclass(frozen=True)
class Tables:
    """The measured losses and costs of the parts of a model, for every target of one kind."""

    widths: tuple[Width, ...]
    refused: Mapping[str, str]  # width that cannot be reduced → reason
    losses: tuple[WidthLosses, ...]
    sets: BlockSets
    parameters: Costs
    bytes: Costs
    seconds: Costs | None = None  # for a target in seconds
    merging: Merging | None = None  # of removed blocks; None for the tables of a model that was narrowed since

    def program(self, costs: Costs) -> Program:
        return build_program(costs, self.widths, self.losses, self.sets)

    def costs_of(self, target: Target) -> Costs:
        costs = {"parameters": self.parameters, "bytes": self.bytes, "latency": self.seconds}[target.field]
        assert costs is not None
        return costs


@dataclass(frozen=True)
class Decision:
    """The parts to remove from a model."""

    blocks: tuple[int, ...]
    levels: Mapping[Width, int]  # groups to remove from every layer of a width
    parameters: int  # of the smaller model
    report: ShrinkReport


def measure_tables(
    run: Shrinking,
    trials: Trials,
    widths: Sequence[Width],
    refused: Mapping[str, str],
    experts: tuple[ExpertCount, WithoutExperts] | None = None,
    dense: Tables | None = None,
) -> Tables:
    """Measure the losses and costs of the parts of a run's model, which is dense and frozen.

    Args:
        run: for its model and kind of target.
        trials: measures the losses of the model.
        widths: the reducible widths.
        refused: the other widths, with the reasons.
        experts: the removable experts, and a function that returns a context without the experts of a trial.
        dense: the tables of the model before its hidden size became smaller, for the losses; None: measure them.

    Raises:
        MoonshotError: the model is small enough already, or its latency cannot be measured.
    """
    model, target, seconds = run.model, run.target, None
    if target.field == "latency":  # first, so that a wrong target costs nothing else
        seconds = latency_costs(model, widths, run.batch_shape, trials.measurements.keep)
        target.budget(seconds.dense)
    removable = [*widths, experts[0]] if experts is not None else list(widths)
    if dense is not None:
        removable, losses = _with_losses(dense, removable)
    else:
        by_block = [block.layers for block in find_structure(model).blocks]
        losses = [width_losses(trials, width, by_block) for width in widths]
        if experts is not None:
            losses.append(expert_losses(trials, *experts, [module for _, module in find_blocks(model)]))
    refused = dict(refused)
    parameters, sizes = (shape_costs(model, removable, unit) for unit in ("parameters", "bytes"))
    costs = {"parameters": parameters, "bytes": sizes, "latency": seconds}[target.field]
    assert costs is not None
    try:
        sets = block_sets(trials, _most_blocks(costs, target)) if dense is None else dense.sets
    except MoonshotError as error:  # a block that does not map its input to the same shape, or that no data reaches
        sets, refused[BLOCKS] = BlockSets(((),), (0.0,)), str(error)
    refused |= trials.refused
    return Tables(tuple(removable), refused, tuple(losses), sets, parameters, sizes, seconds, trials.merging)


def _with_losses(dense: Tables, widths: Sequence[Width]) -> tuple[list[Width], list[WidthLosses]]:
    """The widths, and levels of them, whose losses in the dense model were measured, and these losses."""
    measured_widths, losses = list[Width](), list[WidthLosses]()
    measured = {width.name: pair for pair in zip(dense.widths, dense.losses, strict=True) for width in pair[:1]}
    for width in widths:
        former, loss = measured.get(width.name, (width, None))
        if loss is not None and former.count == width.count:
            by_level = dict(zip(former.levels, loss.losses, strict=True))
            levels = tuple(level for level in width.levels if level in by_level)
            measured_widths.append(dataclasses.replace(width, levels=levels))
            losses.append(WidthLosses(tuple(map(by_level.__getitem__, levels)), loss.shares))
    return measured_widths, losses


def useful_widths(model: PreTrainedModel, widths: Sequence[Width], target: Target) -> list[Width]:
    """The widths up to the level that reaches a target alone; for a target in seconds, as they are."""
    if target.field == "latency":
        return list(widths)
    costs = shape_costs(model, widths, target.unit)
    excess = costs.dense - target.budget(costs.dense)
    savings = {name: list(map(sum, zip(*by_block, strict=True))) for name, by_block in costs.savings.items()}
    return [within(width, savings[width.name], excess) for width in widths]


def _most_blocks(costs: Costs, target: Target) -> int:
    """The number of blocks, of any choice, whose removal alone reaches a target; more would only add to the loss."""
    excess = costs.dense - target.budget(costs.dense)
    saved = list(itertools.accumulate(sorted(costs.blocks)))
    enough = next((count for count, total in enumerate(saved, 1) if total >= excess), len(saved))
    return min(enough, int(MOST_BLOCKS * len(saved)))


def decide(tables: Tables, target: Target, measured: Mapping[str, float]) -> Decision:
    """Decide which parts to remove: the combination with the least predicted loss.

    Args:
        tables: losses and costs of the model.
        target: of the kind that the tables were measured for.
        measured: all measurements, for the report.

    Raises:
        MoonshotError: no combination reaches the target, or the model is small enough.
    """
    costs = tables.costs_of(target)
    program, budget = tables.program(costs), target.budget(costs.dense)
    chosen = program.best(budget)
    if chosen is None:
        raise target.unreachable(program.least_cost().cost, costs.dense, tables.refused)
    return decision_of(tables, target, program, chosen, measured)


def decision_of(
    tables: Tables, target: Target, program: Program, chosen: Choice, measured: Mapping[str, float]
) -> Decision:
    """The decision for a choice of a program, with a report; the other parameters are as in `decide`."""
    costs, options = tables.costs_of(target), chosen.options
    budget = target.budget(costs.dense)
    levels = {width: width.levels[option] for width, option in zip(tables.widths, options[1:], strict=True)}
    after = tuple(round(tables.program(sizes).choice(options).cost) for sizes in (tables.parameters, tables.bytes))
    report = ShrinkReport(
        unit=costs.unit,
        budget=budget,
        dense=costs.dense,
        chosen=_candidate(program, chosen, [dimension.name for dimension in program.dimensions]),
        blocks=tables.sets.sets[options[0]],
        widths={width.name: (width.count, width.count - level) for width, level in levels.items()},
        considered=tuple(alternatives(program, budget)),
        measured=dict(measured),
        parameters=(round(tables.parameters.dense), after[0]),
        bytes=(round(tables.bytes.dense), after[1]),
        refused=dict(tables.refused),
    )
    return Decision(report.blocks, levels, after[0], report)


def without_set(tables: Tables, blocks: tuple[int, ...], reason: str) -> Tables:
    """The tables without a set of blocks that the architecture does not allow."""
    name = f"{BLOCKS} {', '.join(map(str, blocks))}"
    return dataclasses.replace(tables, sets=tables.sets.without(blocks), refused={**tables.refused, name: reason})


def alternatives(program: Program, budget: float) -> list[Candidate]:
    """The best choice within the budget for every set of dimensions that may change; equal choices once."""
    names = [dimension.name for dimension in program.dimensions]
    best: dict[tuple[int, ...], Candidate] = {}
    for count in range(1, len(names) + 1):
        for allowed in itertools.combinations(names, count):
            choice = program.best(budget, frozenset(allowed))
            if choice is not None:
                best.setdefault(choice.options, _candidate(program, choice, allowed))
    return list(best.values())


def _candidate(program: Program, choice: Choice, allowed: Sequence[str]) -> Candidate:
    removed = {
        dimension.name: dimension.removed[option]
        for dimension, option in zip(program.dimensions, choice.options, strict=True)
    }
    return Candidate(tuple(allowed), removed, float(choice.loss), float(choice.cost))
