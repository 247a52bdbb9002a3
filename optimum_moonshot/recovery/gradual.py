"""Pruning a block in stages while it is tuned: each time to more of its sparsity, from the weights that it has by then.

A layer that loses most of its weights at once has no way back: its survivors were chosen for a block that no longer is.
Here the block begins dense again. Stage q of `STAGES` removes the share 1 - (1 - q/STAGES)³ of what the layer is to
lose (the schedule of Zhu and Gupta, arXiv 1710.01878), by the run's solver, with the Gram matrix of what the layer
reads *now*, behind the recovered blocks and in this block as it was tuned; then the survivors are tuned towards the
dense block's output. n:m patterns keep fewer and fewer of every m. A weight that is gone may come back later.

The reconstruction error is the only objective: tuning is towards the outputs, and the gradients of the whole model's
loss were those of the dense model (what λ < 1 gains in one shot is gone after a recovery, docs/measured.md).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from ..data.batches import Batch, batch_size
from ..errors import FactorizationError
from ..model.layers import PrunableLayer
from ..objective.patterns import NM, Experts, Pattern
from ..pipeline.backoff import Backoff
from ..pipeline.loop import StatisticsTask, solve_parts
from ..pipeline.solve import Statistics, solve_layer
from ..pipeline.spec import StatisticsSpec
from ..pipeline.stages import OpenStage, PassObserver
from ..solvers import Solver
from .student import Student, Task, Tensors
from .tuning import Tuner

STAGES = 6  # fewer lose, and each costs a pass of the data through the block and a solution of its layers


def stage_patterns(pattern: Pattern) -> list[Pattern]:
    """What a layer is pruned by in each stage; the last is its pattern.

    Args:
        pattern: that it ends with.
    """
    shares = [1 - (1 - q / STAGES) ** 3 for q in range(1, STAGES)]
    if isinstance(pattern, NM):
        before: list[Pattern] = [NM(pattern.m - round(share * (pattern.m - pattern.n)), pattern.m) for share in shares]
    else:
        assert not isinstance(pattern, Experts)  # which are removed in a run of their own
        before = [pattern.times(share) for share in shares]
    return [*before, pattern]


class StagePruning(StatisticsTask):
    """Solves the layers of a student by their statistics in the block as it is.

    No result is written to the student before all are solved: a pass over the data for some layers, where the memory
    takes no more, observes the block that the first pass did.

    Args:
        solver: of the run.
        patterns: layer → its pattern in this stage of the pruning.
        samples: N.
        backoff: of the recovery, with the storage of the statistics.
        batches: of the recovery.
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
        """As `Task.lacks`."""
        return layer.name not in self.weights and layer.name not in self.unreached

    def skip(self, layer: PrunableLayer) -> None:
        """As `Task.skip`: the layer keeps its weight."""
        self.unreached.add(layer.name)

    def solve(self, layer: PrunableLayer, statistics: Statistics) -> None:
        """As `Task.solve`."""
        try:
            (solved,) = solve_layer(self.spec.solver, layer, self.spec.patterns[layer.name], statistics, 1.0)
        except FactorizationError as error:
            raise error.within(layer.name) from None
        self.weights[layer.name] = solved.weight
        self.solver_notes += [f"{layer.name}: {note}" for note in solved.notes]


class Gradual:
    """Prunes and tunes one block after another in stages.

    Args:
        solver: of the run.
        patterns: gives the pattern that a layer ends with.
        steps: of a block in all; half of them follow the last stage, the others are between stages.
        batches: of the recovery, as small as backoff has made them.
        backoff: of the recovery, with the storage of the statistics.
    """

    def __init__(
        self,
        solver: Solver,
        patterns: Callable[[PrunableLayer], Pattern],
        steps: int,
        batches: Callable[[], Sequence[Batch]],
        backoff: Backoff,
    ):
        self.solver, self.patterns, self.batches, self.backoff = solver, patterns, batches, backoff
        self.between = steps // (2 * (STAGES - 1))

    def tune(self, student: Student, task: Task, tuner: Tuner) -> list[str]:
        """Recover a block from its dense weights on; returns notes.

        Args:
            student: with the weights that the run pruned; a layer that the data no longer reach keeps those.
            task: the block's inputs and targets.
            tuner: of both.

        Raises:
            MoonshotError: activations that are not finite, or too little memory for the statistics.
            FactorizationError: a layer's quadratic stays singular at the largest damping, with the layer's name.
            Restart: the recovery has to start over with smaller batches.
        """
        pruned = {layer.name: layer.matrix.clone() for layer in student.layers}
        student.to_dense()
        notes: list[str] = []
        for stage in range(STAGES):
            if stage:
                tuner.settle(self.between)
            patterns = {layer.name: stage_patterns(self.patterns(layer))[stage] for layer in student.layers}
            weights, damped = self._solve(student, task, patterns)
            student.prune({**pruned, **weights})
            notes += damped
        return [*dict.fromkeys(notes), *tuner.finish()]

    def _solve(self, student: Student, task: Task, patterns: Mapping[str, Pattern]) -> tuple[Tensors, list[str]]:
        """Every layer's weight [d_out, d_in] by its statistics in the block as it is, and notes of the solver."""
        sizes = [batch_size(batch) for batch in self.batches()]
        pruning = StagePruning(self.solver, patterns, sum(sizes), self.backoff, self.batches)
        solve_parts(pruning, OpenStage(student.layers, partial(self._observe, student, task, sizes)))
        return pruning.weights, pruning.solver_notes

    @torch.no_grad()
    def _observe(self, student: Student, task: Task, sizes: Sequence[int], observer: PassObserver) -> None:
        """Pass all data through the student."""
        tensors, first = student.tensors, 0
        device = student.parameters[0].device
        for index, (inputs, mask) in enumerate(zip(task.inputs, task.masks, strict=True)):
            observer.begin(first, sizes[index], None if mask is None else mask.to(device))
            task.output(index, tensors, inputs, widen=True)
            observer.end()
            first += sizes[index]
