"""The trainer of every recovery: Adam on groups of samples in random order, validated on held-out samples.

`Tuner` trains a block on its relative error, `Distillation` (distill.py) a whole model on its divergence from the
dense one. The result is the evaluated state with the least held-out loss.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map_only

from ..config import MoonshotConfig
from ..data.batches import Batch
from ..errors import require
from ..model.calls import BlockCall, first_tensor, join_hidden, to_device
from ..model.losses import token_mask
from ..model.mixtures import router_names
from .student import Student, StudentBlock, Tensors, to_float32

STEP_SAMPLES = 8  # samples of one optimizer step
HELDOUT_SHARE = 8  # one in this many samples is held out
EVALUATIONS = 10  # of the held-out samples, spread evenly over the steps
PATIENCE = 3  # evaluations without a new best before training stops
# A learning rate that raises the held-out loss is lowered to this fraction, at most so often. The rate that suits the
# demo Llama raises the divergence of SmolLM2-135M at sparsity 0.5 from 0.47 to 0.66 in two steps.
LOWERED, MOST_LOWERED = 0.3, 3
BETAS = (0.9, 0.95)
TINY = 1e-12  # lower bound of |target|² in the relative error


def part_size(num_samples: int) -> int:
    """The largest size of a part of the data, in samples, that allows a fraction of them to be held out.

    Raises:
        MoonshotError: fewer than 2 samples.
    """
    message = "recovery holds a fraction of them out, give at least 2"
    require(num_samples >= 2, message, field="num_samples", value=num_samples)
    return min(STEP_SAMPLES, max(1, num_samples // HELDOUT_SHARE))


def step_parts(num_samples: int) -> list[int]:
    """The sizes, in samples, of the parts that make up the steps; they do not depend on the batches of the data.

    Raises:
        MoonshotError: fewer than 2 samples.
    """
    size, ends = part_size(num_samples), [*range(0, num_samples, STEP_SAMPLES), num_samples]
    return [min(size, stop - start) for first, stop in itertools.pairwise(ends) for start in range(first, stop, size)]


def split_heldout(sizes: list[int]) -> tuple[list[list[int]], list[int]]:
    """Divide parts of these sizes into optimizer steps and held-out parts, which are the last; return their indices."""
    heldout: list[int] = []
    while len(heldout) + 1 < len(sizes) and sum(sizes[i] for i in heldout) < max(1, sum(sizes) // HELDOUT_SHARE):
        heldout.insert(0, len(sizes) - len(heldout) - 1)
    steps: list[list[int]] = [[]]
    for index in range(len(sizes) - len(heldout)):
        if sum(sizes[i] for i in steps[-1]) >= STEP_SAMPLES:
            steps.append([])
        steps[-1].append(index)
    return steps, heldout


def divide_parts(sizes: list[int], batches: list[int]) -> tuple[list[list[int]], list[int]]:
    """Like `split_heldout`, but return indices of the batches of the parts; `batches` has the batch sizes."""
    ends, starts = [*itertools.accumulate(sizes)], [0, *itertools.accumulate(batches)][:-1]
    steps, heldout = split_heldout(sizes)

    def divided(parts: list[int]) -> list[int]:
        ranges = [range(ends[part] - sizes[part], ends[part]) for part in parts]
        return [index for samples in ranges for index, start in enumerate(starts) if start in samples]

    return [divided(step) for step in steps], divided(heldout)


class Optimizer:
    """Adam on the masters of a student; the rate of each is relative to the root mean square of its initial values."""

    def __init__(self, student: Student, lr: float):
        self.student = student
        groups = [{"params": [value], "lr": lr * rate, "initial": lr * rate} for value, rate in student.rates()]
        self.adam = torch.optim.Adam(groups, betas=BETAS, foreach=False)  # True needs temporaries of the model's size

    def reset(self) -> None:
        """Set the moments to those before the first step."""
        for moments in self.adam.state.values():
            for tensor in moments.values():
                tensor.zero_()

    def step(self, rate: float) -> None:
        """Take a step from the gradients of the masters, with a fraction `rate` of the initial learning rates."""
        self.student.finish_gradients()
        for group in self.adam.param_groups:
            group["lr"] = rate * group["initial"]
        self.adam.step()
        self.student.clear_gradients()
        self.student.round()


@dataclass
class Progress:
    """The progress of a training; losses are measured on the held-out samples."""

    first: float = math.inf  # loss before the first step, if it is known
    best: float = math.inf
    last: float = 0.0
    step: int = 0  # steps taken; the next samples and learning rate follow from it
    since: int = 0  # evaluations since the best, or since the rate was lowered
    lowered: int = 0  # how often the learning rate was lowered
    begun: int = 0  # the step at which it was lowered last
    best_values: Tensors = field(default_factory=dict)  # a snapshot of the student

    def evaluated(self, loss: float, student: Student) -> None:
        """Record a held-out loss of the student; copy its state if the loss is the least so far."""
        self.last, self.since = loss, self.since + 1
        if loss < self.best:
            self.best, self.since, self.best_values = loss, 0, student.snapshot()

    @property
    def too_fast(self) -> bool:
        """Whether the steps have raised the loss, and the learning rate may be lowered."""
        return not (self.last < self.first or self.best < self.first) and self.lowered < MOST_LOWERED

    def lower(self, optimizer: "Optimizer") -> None:
        """Begin anew from the first values at a lower learning rate; the schedule goes on."""
        optimizer.student.restore(self.best_values)
        optimizer.reset()
        self.last, self.since, self.lowered, self.begun = self.first, 0, self.lowered + 1, self.step

    @property
    def stopped(self) -> bool:
        """Whether the loss no longer falls, or is not finite."""
        return self.since >= PATIENCE or not math.isfinite(self.last)


class Trainer:
    """Trains a student on all samples except the held-out samples.

    Args:
        config: the configuration with the number of steps and the learning rate.
        sizes: sizes of the parts of the data, from `step_parts`.
        batches: sizes of the batches into which the parts are divided.
        seed: seed of the order of the steps.
    """

    student: Student

    def __init__(self, config: MoonshotConfig, sizes: list[int], batches: list[int], seed: int):
        self.lr, self.total = config.recovery_lr, config.recovery_steps
        self.groups, self.heldout = divide_parts(sizes, batches)
        self.order = self._random_order(seed % 2**63)
        self.taken = 0  # steps in all phases

    def add_gradients(self, group: int) -> None:
        """Add the gradients of the mean loss on a group of samples."""
        raise NotImplementedError

    def loss(self) -> float:
        """The held-out loss of the weights in the dtypes of the model."""
        raise NotImplementedError

    def step(self, optimizer: Optimizer, rate: float) -> None:
        """Take a step with a fraction `rate` of the learning rates."""
        self.add_gradients(next(self.order))
        optimizer.step(rate)
        self.taken += 1

    def train(self, optimizer: Optimizer, progress: Progress) -> Iterator[bool]:
        """Take the remaining steps with a cosine schedule, until the held-out loss no longer falls.

        Yields after every step whether the student was evaluated; `progress` then has its best state.
        """
        total = progress.step + self.total - self.taken
        every = max(1, total // EVALUATIONS)
        while progress.step < total and not progress.stopped:
            self.step(optimizer, LOWERED**progress.lowered * (1 + math.cos(math.pi * progress.step / total)) / 2)
            progress.step += 1
            evaluates = progress.step % every == 0 or progress.step == total
            if evaluates:
                progress.evaluated(self.loss(), self.student)
                if progress.too_fast:
                    progress.lower(optimizer)
            yield evaluates

    def early_stop(self) -> list[str]:
        """Return a note if the training stopped before its last step."""
        return [] if self.taken == self.total else [f"stopped after {self.taken} of {self.total} steps"]

    def _random_order(self, seed: int) -> Iterator[int]:
        """Yield the group of each step: endlessly, all groups in a new random order."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            yield from torch.randperm(len(self.groups), generator=generator).tolist()


@dataclass
class BlockTask:
    """The cached inputs and targets of a block on every batch, and the relative error between outputs and targets.

    `tensors` replace the block's parameters and buffers by name; hidden states are [B, T, D], or of another shape
    that the block accepts.
    """

    module: nn.Module
    calls: list[BlockCall]
    inputs: list[Tensor]  # h, by batch: hidden states of the recovered prefix
    targets: list[Tensor]  # g(d), by batch: outputs of the dense block
    masks: list[Tensor | None]  # bool [B, T], True where a token counts; None: everywhere

    def output(self, index: int, tensors: Tensors, hidden: Tensor, widen: bool = False) -> Tensor:
        """The block's output for a hidden state of batch `index`; `widen` computes in float32."""
        device = next(iter(tensors.values())).device
        arguments = to_device(join_hidden(hidden, self.calls[index]), device)
        args, kwargs = tree_map_only(Tensor, to_float32, arguments) if widen else arguments
        return first_tensor(functional_call(self.module, tensors, args, kwargs))

    def error(self, index: int, tensors: Tensors, widen: bool = False) -> Tensor:
        """Σ |output - target|² / |target|² over the tokens of a batch without padding: a scalar with its graph."""
        output = positions(self.output(index, tensors, self.inputs[index], widen)).float()
        target = positions(self.targets[index]).to(output.device).float()
        errors = (output - target).square().sum(-1) / target.square().sum(-1).clamp_min(TINY)
        mask = self.masks[index]
        return errors.sum() if mask is None else errors[mask.to(errors.device)].sum()

    def tokens(self, indices: list[int]) -> int:
        """The number of tokens in some batches without padding."""
        pairs = ((self.masks[index], self.targets[index]) for index in indices)
        return sum(positions(target)[..., 0].numel() if mask is None else int(mask.sum()) for mask, target in pairs)

    @torch.no_grad()
    def loss(self, indices: list[int], tensors: Tensors) -> float:
        """The mean relative squared error over the tokens of some batches."""
        return sum(self.error(index, tensors).item() for index in indices) / self.tokens(indices)

    @torch.no_grad()
    def advance(self, states: list[Tensor], tensors: Tensors) -> None:
        """Replace the hidden states of all batches by the block's outputs, in place."""
        for index, state in enumerate(states):
            state.copy_(self.output(index, tensors, state))


def positions(hidden: Tensor) -> Tensor:
    """A hidden state as [B, T, D]; with another number of dimensions, a sample is one position: [B, 1, D]."""
    return hidden if hidden.ndim == 3 else hidden.flatten(1)[:, None]


def padding_mask(batch: Batch, hidden: Tensor) -> Tensor | None:
    """Bool [B, T], True at the positions of a hidden state that are not padding; None if there is no padding.

    Raises:
        MoonshotError: the shape of the hidden state does not show which tokens are padding.
    """
    mask = token_mask(batch)
    if mask is None or bool(mask.all()):
        return None
    message = f"hidden states of shape {list(hidden.shape)} do not show which tokens are padding"
    hint = "use samples of equal length"
    require(positions(hidden).shape[:2] == mask.shape, message, field="recover", hint=hint)
    return mask


class Tuner(Trainer):
    """Trains a block on its relative error; the `number` of the block changes the order of the steps."""

    def __init__(
        self,
        student: StudentBlock,
        task: BlockTask,
        config: MoonshotConfig,
        number: int,
        sizes: list[int],
        batches: list[int],
    ):
        super().__init__(config, sizes, batches, config.seed + number)
        self.student: StudentBlock = student
        self.task = task

    def add_gradients(self, group: int) -> None:
        batches = self.groups[group]
        for index in batches:
            (self.task.error(index, self.student.tensors, widen=True) / self.task.tokens(batches)).backward()

    def loss(self) -> float:
        return self.task.loss(self.heldout, self.student.rounded())

    def settle(self, steps: int) -> None:
        """Take some steps at the initial rate; undo them if the held-out loss does not fall."""
        before, values, optimizer = self.loss(), self.student.snapshot(), Optimizer(self.student, self.lr)
        for _ in range(steps):
            self.step(optimizer, 1.0)
        if not self.loss() < before:
            self.student.restore(values)

    def finish(self) -> list[str]:
        """Take the remaining steps and restore the best evaluated state; return notes."""
        progress = Progress(best_values=self.student.snapshot())
        for _ in self.train(Optimizer(self.student, self.lr), progress):
            pass
        self.student.restore(progress.best_values)
        return self.early_stop()


def trained_names(model: nn.Module, config: MoonshotConfig) -> frozenset[str] | None:
    """The names of the parameters that a distillation trains; None for all.

    Raises:
        MoonshotError: these are routers, and the model has none.
    """
    if config.recover != "routers":
        return None
    names = router_names(model)
    message = f"{type(model).__name__} has no routers beside fused experts"
    require(bool(names), message, field="recover", value="routers", hint="use a mixture of experts")
    return names
