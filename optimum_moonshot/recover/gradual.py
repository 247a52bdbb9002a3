"""Gradual recovery: prune a block in stages of increasing sparsity, and tune it between them.

The survivors of a layer that loses most of its weights at once were selected for a block that no longer exists. Here
the block starts dense. Stage q of `STAGES` removes the fraction 1 - (1 - q/STAGES)³ of the layer's sparsity (the
schedule of Zhu and Gupta, arXiv 1710.01878) by the run's solver, with the Gram matrix of the *current* inputs, behind
the recovered blocks and in this block as tuned so far; then the survivors are tuned towards the dense block's outputs.
n:m patterns keep fewer and fewer of every m. Removed weights may return in a later stage.

The reconstruction error is the only objective: the Fisher gradients belong to the dense model, and recovery removes the
gain of λ < 1 in one shot (docs/measured.md).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from ..data.batches import Batch, batch_size
from ..errors import FactorizationError
from ..model.layers import PrunableLayer
from ..objective.patterns import NM, Experts, Pattern
from ..pipeline.backoff import Backoff
from ..pipeline.collect import StatisticsTask
from ..pipeline.loop import solve_parts
from ..pipeline.solve import Statistics, solve_layer
from ..pipeline.spec import StatisticsSpec
from ..pipeline.stages import OpenStage, PassObserver
from ..solvers import Solver
from .student import BlockTask, Student, Tensors
from .tuning import Tuner

STAGES = 6  # fewer lose accuracy; each costs a pass of the data through the block and a solution of its layers


def stage_patterns(pattern: Pattern) -> list[Pattern]:
    """The patterns of a layer in each stage; the last is its final pattern, and the only one with its grid."""
    fractions = [1 - (1 - q / STAGES) ** 3 for q in range(1, STAGES)]
    if isinstance(pattern, NM):
        removed = [round(fraction * (pattern.m - pattern.n)) for fraction in fractions]
        return [*(NM(pattern.m - count, pattern.m) for count in removed), pattern]
    assert not isinstance(pattern, Experts)  # a separate run removes them
    return [*(replace(pattern.times(fraction), grid=None) for fraction in fractions), pattern]


class StagePruning(StatisticsTask):
    """Solves the layers of a student for their patterns, from statistics of the current block.

    No result is written to the student before all are solved, so that every pass observes the same block even if the
    memory requires several.
    """

    def __init__(
        self,
        solver: Solver,
        patterns: Mapping[str, Pattern],
        samples: int,
        backoff: Backoff,
        batches: Callable[[], Sequence[Batch]],
    ):
        lams = dict.fromkeys(patterns, 1.0)
        spec = StatisticsSpec(solver, {name: [pattern] for name, pattern in patterns.items()}, lams, samples)
        super().__init__(spec, backoff, batches)
        self.weights: Tensors = {}
        self.solver_notes: list[str] = []
        self.unreached: set[str] = set()

    def lacks(self, layer: PrunableLayer) -> bool:
        return layer.name not in self.weights and layer.name not in self.unreached

    def skip(self, layer: PrunableLayer) -> None:
        """Keep the layer's weight."""
        self.unreached.add(layer.name)

    def solve(self, layer: PrunableLayer, statistics: Statistics) -> None:
        try:
            (solved,) = solve_layer(self.spec.solver, layer, self.spec.patterns[layer.name], statistics, 1.0)
        except FactorizationError as error:
            raise error.within(layer.name) from None
        self.weights[layer.name] = solved.weight
        self.solver_notes += [f"{layer.name}: {note}" for note in solved.notes]


class Gradual:
    """Prunes and tunes blocks in stages; half of the steps of a block follow the last stage, the others the rest.

    `batches` may become smaller by backoff.
    """

    def __init__(
        self,
        solver: Solver,
        steps: int,
        batches: Callable[[], Sequence[Batch]],
        backoff: Backoff,
    ):
        self.solver, self.batches, self.backoff = solver, batches, backoff
        self.between = steps // (2 * (STAGES - 1))

    def tune(self, student: Student, task: BlockTask, tuner: Tuner) -> list[str]:
        """Recover a block from its dense weights; returns notes. A layer without data keeps its pruned weight.

        Raises:
            MoonshotError: activations that are not finite, or too little memory for the statistics.
            FactorizationError: a layer's quadratic stays singular at the largest damping; it names the layer.
            Restart: the recovery has to restart with smaller batches.
        """
        pruned = {layer.name: layer.matrix.clone() for layer in student.layers}
        student.to_dense()
        notes: list[str] = []
        for stage in range(STAGES):
            if stage:
                tuner.settle(self.between)
            patterns = {layer.name: stage_patterns(student.patterns[layer.name])[stage] for layer in student.layers}
            weights, solver_notes = self._solve(student, task, patterns)
            student.prune({**pruned, **weights})
            notes += solver_notes
        student.to_grids()
        return [*dict.fromkeys(notes), *tuner.finish()]

    def _solve(self, student: Student, task: BlockTask, patterns: Mapping[str, Pattern]) -> tuple[Tensors, list[str]]:
        """The weights [d_out, d_in] of all layers from statistics of the current block, and notes of the solver."""
        sizes = [batch_size(batch) for batch in self.batches()]
        pruning = StagePruning(self.solver, patterns, sum(sizes), self.backoff, self.batches)
        solve_parts(pruning, OpenStage(student.layers, partial(self._observe, student, task, sizes)))
        return pruning.weights, pruning.solver_notes

    @torch.no_grad()
    def _observe(self, student: Student, task: BlockTask, sizes: Sequence[int], observer: PassObserver) -> None:
        tensors, first = student.tensors, 0
        device = student.parameters[0].device
        for index, (inputs, mask) in enumerate(zip(task.inputs, task.masks, strict=True)):
            observer.begin(first, sizes[index], None if mask is None else mask.to(device))
            task.output(index, tensors, inputs, widen=True)
            observer.end()
            first += sizes[index]
