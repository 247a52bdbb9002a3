"""Optimizer steps on one block: the surviving weights learn, a share of the samples watches.

Adam on the block's relative error, without labels. The samples that are held out decide what is kept: a phase of steps
never ends in a state that is worse on them than the one that it began with.
"""

import itertools
import math
from collections.abc import Callable, Iterator

import torch

from ..config import MoonshotConfig
from ..errors import require
from .student import Student, Task

STEP_SAMPLES = 8  # samples of one optimizer step
HELDOUT_SHARE = 8  # one in so many samples is not trained on: it decides when to stop, and whether a block gained
EVALUATIONS = 10  # of the held-out samples, spread evenly over the steps
PATIENCE = 3  # evaluations without a new best after which a block is done
BETAS = (0.9, 0.95)


def part_size(num_samples: int) -> int:
    """Samples that calibration batches should have at most, so that a share of them can be held out.

    Raises:
        MoonshotError: there are too few.
    """
    message = "recovery holds a fraction of them out, give at least 2"
    require(num_samples >= 2, message, field="num_samples", value=num_samples)
    return min(STEP_SAMPLES, max(1, num_samples // HELDOUT_SHARE))


def divide(sizes: list[int]) -> tuple[list[list[int]], list[int]]:
    """Batches by index: those that each optimizer step takes, and the held-out ones, the last.

    Args:
        sizes: samples of each batch.
    """
    heldout: list[int] = []
    while len(heldout) + 1 < len(sizes) and sum(sizes[i] for i in heldout) < max(1, sum(sizes) // HELDOUT_SHARE):
        heldout.insert(0, len(sizes) - len(heldout) - 1)
    steps: list[list[int]] = [[]]
    for index in range(len(sizes) - len(heldout)):
        if sum(sizes[i] for i in steps[-1]) >= STEP_SAMPLES:
            steps.append([])
        steps[-1].append(index)
    return steps, heldout


def divide_parts(sizes: list[int], samples: int | None) -> tuple[list[list[int]], list[int]]:
    """As `divide`, by the numbers of parts of the batches, each where its batch is.

    Args:
        sizes: samples of each batch, before it was split.
        samples: of a part, at most; None leaves the batches whole.
    """
    counts = [1 if samples is None else -(-size // samples) for size in sizes]
    ends = list(itertools.accumulate(counts))
    parts = [range(end - count, end) for end, count in zip(ends, counts, strict=True)]
    steps, heldout = divide(sizes)
    return [[part for index in step for part in parts[index]] for step in steps], [
        part for index in heldout for part in parts[index]
    ]


class Tuner:
    """Trains one block.

    Args:
        student: what learns.
        task: what it has to learn.
        config: how many steps, at which rate, and the seed of their order.
        number: of the block in its chain; blocks have orders of their own.
        sizes: samples of each batch.
        samples: of each part that the task has of a batch, at most; None where it has the batches whole.
    """

    def __init__(
        self,
        student: Student,
        task: Task,
        config: MoonshotConfig,
        number: int,
        sizes: list[int],
        samples: int | None = None,
    ):
        self.student, self.task, self.lr = student, task, config.recover_lr
        self.total = config.recover_steps
        self.groups, self.heldout = divide_parts(sizes, samples)
        self.order = self._order((config.seed + number) % 2**63)
        self.taken = 0  # steps, of all phases

    def loss(self) -> float:
        """The held-out error of the weights as they will be in the model."""
        return self.task.loss(self.heldout, self.student.rounded())

    def finish(self) -> list[str]:
        """The steps that are left, along a cosine; ends at the best of the evaluated states. Returns notes."""
        total = self.total - self.taken
        every = max(1, total // EVALUATIONS)
        best, kept, since, step = math.inf, self.student.snapshot(), 0, 0
        for step in self._steps(total, lambda step: (1 + math.cos(math.pi * step / total)) / 2):
            if step % every and step < total:
                continue
            loss = self.loss()
            since += 1
            if loss < best:
                best, kept, since = loss, self.student.snapshot(), 0
            if since == PATIENCE or not math.isfinite(loss):
                break
        self.student.restore(kept)
        return [] if step == total else [f"stopped after {self.taken} of {self.total} steps"]

    def settle(self, steps: int) -> None:
        """Some steps at the first rate, undone where the held-out samples gain nothing.

        Args:
            steps: how many.
        """
        before, kept = self.loss(), self.student.snapshot()
        for _ in self._steps(steps, lambda step: 1.0):
            pass
        if not self.loss() < before:
            self.student.restore(kept)

    def _steps(self, total: int, rate: Callable[[int], float]) -> Iterator[int]:
        """Optimizer steps, each yielded once it is taken, with its number from 1 on."""
        optimizer = torch.optim.Adam(self.student.parameter_groups(self.lr), betas=BETAS)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        for step in range(1, total + 1):
            batches = next(self.order)
            for index in batches:
                error = self.task.error(index, self.student.tensors, widen=True)
                (error / self.task.tokens(batches)).backward()
            self.student.mask_gradients()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            self.taken += 1
            yield step

    def _order(self, seed: int) -> Iterator[list[int]]:
        """The batches of step after step: all of them in a new order, again and again."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            for index in torch.randperm(len(self.groups), generator=generator).tolist():
                yield self.groups[index]
