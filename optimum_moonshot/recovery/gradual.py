"""Pruning a block in stages while it is tuned: each time to more of its sparsity, from the weights that it has by then.

A layer that loses most of its weights at once has no way back: its survivors were chosen for a block that no longer is.
Here the block begins dense again. Stage q of `STAGES` removes the share 1 - (1 - q/STAGES)³ of what the layer is to
lose (the schedule of Zhu and Gupta, arXiv 1710.01878), by the run's solver, with the Gram matrix of what the layer
reads *now*, behind the recovered blocks and in this block as it was tuned; then the survivors are tuned towards the
dense block's output. n:m patterns keep fewer and fewer of every m. A weight that is gone may come back later.

The reconstruction error is the only objective: tuning is towards the outputs, and the gradients of the whole model's
loss were those of the dense model (what λ < 1 gains in one shot is gone after a recovery, docs/measured.md).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch

from ..calibration.observer import Observer
from ..errors import FactorizationError
from ..model.layers import PrunableLayer
from ..objective.patterns import NM, Pattern
from ..pipeline.backoff import Backoff
from ..pipeline.schedule import StatisticsSchedule
from ..pipeline.solve import Statistics, solve_layer
from ..solvers import Solver
from .student import Student, Task, Tensors, TunedLayer
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
        before = [pattern.times(share) for share in shares]
    return [*before, pattern]


@dataclass(frozen=True)
class StudentStep:
    """A `Step` at one block with a student's weights, on the inputs that it learns from."""

    student: Student
    task: Task
    sizes: list[int]  # samples of each batch
    moved: ClassVar[bool] = False

    @property
    def layers(self) -> tuple[TunedLayer, ...]:
        return tuple(self.student.layers)

    @torch.no_grad()
    def observe(self, observer: Observer, last: bool) -> None:
        """Pass all data through the student.

        Args:
            observer: entered; it is told every batch.
            last: makes no difference: another step begins anew.
        """
        tensors, first = self.student.tensors, 0
        device = self.student.parameters[0].device
        for index, (inputs, mask) in enumerate(zip(self.task.inputs, self.task.masks, strict=True)):
            observer.begin(first, self.sizes[index], None if mask is None else mask.to(device))
            self.task.output(index, tensors, inputs, widen=True)
            observer.end()
            first += self.sizes[index]

    def skip(self) -> None:
        """Nothing waits for it."""


class Gradual:
    """Prunes and tunes one block after another in stages.

    Args:
        solver: of the run.
        patterns: layer → what it ends with.
        steps: of a block in all; half of them follow the last stage, the others are between stages.
        sizes: samples of each batch.
        backoff: of the recovery, with the storage where statistics live.
    """

    def __init__(
        self,
        solver: Solver,
        patterns: Callable[[PrunableLayer], Pattern],
        steps: int,
        sizes: list[int],
        backoff: Backoff,
    ):
        self.solver, self.patterns, self.sizes, self.backoff = solver, patterns, sizes, backoff
        self.schedule: StatisticsSchedule | None = None  # of the latest stage
        self.between = steps // (2 * (STAGES - 1))

    def tune(self, student: Student, task: Task, tuner: Tuner) -> list[str]:
        """Recover a block from its dense weights on; returns notes.

        Args:
            student: with the weights that the run pruned; a layer that the data no longer reach keeps those.
            task: what the block has to learn.
            tuner: of both.

        Raises:
            MoonshotError: activations that are not finite, or too little memory for the statistics.
            FactorizationError: a layer's quadratic stays singular at the largest damping, with the layer's name.
            torch.OutOfMemoryError: the block is to be done again, with smaller chunks.
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
        """Every layer's weight [d_out, d_in] by its statistics in the block as it is, and notes of the solver.

        None is given to the student before all are solved: a pass over the data for some of them, where the memory
        takes no more, sees what the first one saw.
        """
        wanted = {name: [pattern] for name, pattern in patterns.items()}
        lams = dict.fromkeys(patterns, 1.0)
        backoff, samples = self.backoff, sum(self.sizes)
        schedule = StatisticsSchedule(self.solver, wanted, lams, samples, backoff.storage, backoff=backoff)
        self.schedule = schedule
        weights: Tensors = {}
        notes: list[str] = []

        def solve(layer: PrunableLayer, statistics: Statistics) -> None:
            try:
                (solved,) = solve_layer(self.solver, layer, wanted[layer.name], statistics, 1.0)
            except FactorizationError as error:
                raise FactorizationError(f"{layer.name}: {error}") from None
            weights[layer.name] = solved.weight
            notes.extend(f"{layer.name}: {note}" for note in solved.notes)

        for layer, statistics in schedule.statistics(StudentStep(student, task, self.sizes), student.layers):
            if statistics is not None and not backoff.solved(layer.name, partial(solve, layer, statistics)):
                raise torch.OutOfMemoryError(backoff.failed)
        return weights, notes
