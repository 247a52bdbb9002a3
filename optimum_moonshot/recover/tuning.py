"""Train the surviving weights of one block by Adam on its relative error, without labels.

A part of the samples is held out for validation: no phase of training ends in a state with a larger error on them than
its first.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn

from ..config import MoonshotConfig
from ..errors import require
from ..model.layers import Block
from ..objective.patterns import MixedNM, Pattern, Structured
from .student import BlockTask, Student


def changes_structure(patterns: Iterable[Pattern | MixedNM]) -> bool:
    """Whether patterns of a block's layers remove neurons or heads."""
    return any(isinstance(pattern, Structured) for pattern in patterns)


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """The floating-point parameters of a block by their names in it, without those of embeddings.

    An embedding in a block may produce an argument of other blocks, as the relative positions of T5 do.
    """
    tables = {id(each.weight) for each in module.modules() if isinstance(each, nn.Embedding)}
    named = module.named_parameters()
    return {name: each for name, each in named if each.is_floating_point() and id(each) not in tables}


def shared_names(model: nn.Module, blocks: Iterable[Block]) -> set[str]:
    """The names of parameters in blocks that are also used outside of their block; no block is onloaded."""
    prefixes = [f"{block.name}." for block in blocks]
    uses: dict[int, list[tuple[str, str]]] = {}  # parameter → its names, each with that of the block
    for name, parameter in model.named_parameters(remove_duplicate=False):
        inside = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
        uses.setdefault(id(parameter), []).append((name, inside))
    shared = [names for names in uses.values() if len({inside for _, inside in names}) > 1]
    return {name for names in shared for name, _ in names}


STEP_SAMPLES = 8  # samples of one optimizer step
HELDOUT_SHARE = 8  # one in so many samples is held out, to stop the training and to reject a block without gain
EVALUATIONS = 10  # of the held-out samples, spread evenly over the steps
PATIENCE = 3  # evaluations without a new best before training stops
BETAS = (0.9, 0.95)


def part_size(num_samples: int) -> int:
    """The largest number of samples in a batch with which a fraction of them can be held out.

    Raises:
        MoonshotError: fewer than 2 samples.
    """
    message = "recovery holds a fraction of them out, give at least 2"
    require(num_samples >= 2, message, field="num_samples", value=num_samples)
    return min(STEP_SAMPLES, max(1, num_samples // HELDOUT_SHARE))


def split_heldout(sizes: list[int]) -> tuple[list[list[int]], list[int]]:
    """The indices of the batches for each optimizer step, and of the held-out ones, the last, by their samples."""
    heldout: list[int] = []
    while len(heldout) + 1 < len(sizes) and sum(sizes[i] for i in heldout) < max(1, sum(sizes) // HELDOUT_SHARE):
        heldout.insert(0, len(sizes) - len(heldout) - 1)
    steps: list[list[int]] = [[]]
    for index in range(len(sizes) - len(heldout)):
        if sum(sizes[i] for i in steps[-1]) >= STEP_SAMPLES:
            steps.append([])
        steps[-1].append(index)
    return steps, heldout


def step_parts(num_samples: int) -> list[int]:
    """The samples of the parts that steps consist of, whatever batches the data has.

    Raises:
        MoonshotError: fewer than 2 samples.
    """
    size, ends = part_size(num_samples), [*range(0, num_samples, STEP_SAMPLES), num_samples]
    return [min(size, stop - start) for first, stop in itertools.pairwise(ends) for start in range(first, stop, size)]


def divide_parts(sizes: list[int], pieces: list[int]) -> tuple[list[list[int]], list[int]]:
    """As `split_heldout`, with the indices of the pieces that the parts are divided into, by their samples."""
    ends, starts = [*itertools.accumulate(sizes)], [0, *itertools.accumulate(pieces)][:-1]
    steps, heldout = split_heldout(sizes)

    def split(parts: list[int]) -> list[int]:
        ranges = [range(ends[part] - sizes[part], ends[part]) for part in parts]
        return [piece for samples in ranges for piece, start in enumerate(starts) if start in samples]

    return [split(step) for step in steps], split(heldout)


class Tuner:
    """Trains a student on a task.

    The steps are taken in random orders, which differ by block, of index `number`. `sizes` are the samples of their
    parts, `pieces` those of the batches of the task.
    """

    def __init__(
        self,
        student: Student,
        task: BlockTask,
        config: MoonshotConfig,
        number: int,
        sizes: list[int],
        pieces: list[int],
    ):
        self.student, self.task, self.lr = student, task, config.recovery_lr
        self.total = config.recovery_steps
        self.groups, self.heldout = divide_parts(sizes, pieces)
        self.order = self._batches((config.seed + number) % 2**63)
        self.taken = 0  # steps in all phases

    def loss(self) -> float:
        """The held-out error of the weights in the dtypes of the model."""
        return self.task.loss(self.heldout, self.student.rounded())

    def finish(self) -> list[str]:
        """Take the remaining steps with a cosine schedule, and restore the best evaluated state; returns notes."""
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
        """Take some steps at the initial rate; undo them without a gain on the held-out samples."""
        before, kept = self.loss(), self.student.snapshot()
        for _ in self._steps(steps, lambda step: 1.0):
            pass
        if not self.loss() < before:
            self.student.restore(kept)

    def _steps(self, total: int, rate: Callable[[int], float]) -> Iterator[int]:
        """Take optimizer steps; yields the number of each, from 1 on, after it."""
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

    def _batches(self, seed: int) -> Iterator[list[int]]:
        """The batches of each step: all of them in a new random order, endlessly."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            for index in torch.randperm(len(self.groups), generator=generator).tolist():
                yield self.groups[index]
