"""Gradual recovery: prune a block in stages of increasing sparsity, and tune it between them.

If most weights of a layer are removed at once, its survivors were selected for a block that no longer exists. Here
the block starts dense. Stage q of `STAGES` removes the fraction 1 - (1 - q/STAGES)³ of the layer's sparsity (the
schedule of Zhu and Gupta, arXiv 1710.01878) by the run's solver, with the Gram matrix of the *current* inputs, which
come from the recovered blocks and from this block as tuned so far; then the survivors are tuned towards the dense
block's outputs. n:m patterns keep fewer and fewer of every m. Removed weights may return in a later stage.

The reconstruction error is the only objective: the Fisher gradients belong to the dense model, and recovery removes the
gain of λ < 1 in one shot (docs/recover.md).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from ..data.batches import Batch, batch_size, sample_count
from ..errors import FactorizationError
from ..model.layers import PrunableLayer
from ..objective.patterns import NM, Experts, Pattern
from ..pipeline.backoff import Backoff
from ..pipeline.loop import Task, solve_parts
from ..pipeline.partition import StatisticsSpec
from ..pipeline.solve import Statistics, solve_layer
from ..pipeline.walk import OpenStage, PassObserver
from ..solvers import Solver
from .student import Tensors
from .tuning import Tuner

STAGES = 6  # fewer reduce accuracy; each costs a pass of the data through the block and a solution of its layers


def stage_patterns(pattern: Pattern) -> list[Pattern]:
    """The patterns of a layer by stage; only the last, the final pattern, has the grid."""
    fractions = [1 - (1 - q / STAGES) ** 3 for q in range(1, STAGES)]
    if isinstance(pattern, NM):
        removed = [round(fraction * (pattern.m - pattern.n)) for fraction in fractions]
        return [*(NM(pattern.m - count, pattern.m) for count in removed), pattern]
    assert not isinstance(pattern, Experts)  # a separate run removes them
    return [*(replace(pattern.times(fraction), grid=None) for fraction in fractions), pattern]


class StagePruning(Task):
    """Solves the layers of a student for their patterns, from statistics of the current block.

    No result is written to the student before all are solved, so that every pass observes the same block even if
    several are needed to save memory.
    """

    def __init__(
        self, spec: StatisticsSpec, backoff: Backoff, batches: Callable[[], Sequence[Batch]], unreached: Tensors
    ):
        super().__init__(spec, backoff, batches)
        self.unreached = unreached  # weights of layers that no data reach
        self.weights: Tensors = {}
        self.solver_notes: list[str] = []

    def lacks(self, layer: PrunableLayer) -> bool:
        return layer.name not in self.weights

    def skip(self, layer: PrunableLayer) -> None:
        self.weights[layer.name] = self.unreached[layer.name]

    def solve(self, layer: PrunableLayer, statistics: Statistics) -> None:
        try:
            (solved,) = solve_layer(self.spec.solver, layer, self.spec.patterns[layer.name], statistics, 1.0)
        except FactorizationError as error:
            raise error.within(layer.name) from None
        self.weights[layer.name] = solved.weight
        self.solver_notes += [f"{layer.name}: {note}" for note in solved.notes]


def tune_gradually(tuner: Tuner, solver: Solver, backoff: Backoff, batches: Callable[[], Sequence[Batch]]) -> list[str]:
    """Recover a block from its dense weights; a layer without data keeps its pruned weight.

    Half of the steps follow the last stage; the others are divided evenly among the earlier stages.

    Args:
        tuner: the tuner of the block with its pruned weights.
        solver: the solver of the run.
        backoff: reduces the size of batches if memory is short.
        batches: returns the batches of the data.

    Returns:
        Notes for the report.

    Raises:
        MoonshotError: activations that are not finite, or too little memory for the statistics.
        FactorizationError: a layer's quadratic stays singular at the largest damping; it names the layer.
        Restart: the recovery must restart with smaller batches.
    """
    student, notes = tuner.student, list[str]()
    pruned = {layer.name: layer.matrix.clone() for layer in student.layers.values()}
    stages = {name: stage_patterns(student.patterns[name]) for name in pruned}
    student.to_dense()
    for stage in range(STAGES):
        if stage:
            tuner.settle(tuner.total // (2 * (STAGES - 1)))
        patterns = {name: [of_stages[stage]] for name, of_stages in stages.items()}
        spec = StatisticsSpec(solver, patterns, dict.fromkeys(patterns, 1.0), sample_count(batches()))
        pruning = StagePruning(spec, backoff, batches, pruned)
        solve_parts(pruning, OpenStage([*student.layers.values()], partial(_observe, tuner, batches())))
        student.prune(pruning.weights)
        notes += pruning.solver_notes
    student.to_grids()
    return [*dict.fromkeys(notes), *tuner.finish()]


@torch.no_grad()
def _observe(tuner: Tuner, batches: Sequence[Batch], observer: PassObserver) -> None:
    """Pass the data through the block under an observer's hooks."""
    task, tensors, first = tuner.task, tuner.student.tensors, 0
    device = next(iter(tensors.values())).device
    for index, (batch, inputs, mask) in enumerate(zip(batches, task.inputs, task.masks, strict=True)):
        observer.begin(first, batch_size(batch), None if mask is None else mask.to(device))
        task.output(index, tensors, inputs, widen=True)
        observer.end()
        first += batch_size(batch)
