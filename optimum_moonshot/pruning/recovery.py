"""Block-wise recovery, without labels: tune the weights that survived until each block does again what it did dense.

Two streams of hidden states run forward over the blocks, in a cache each. The dense model's, d, gives every block g its
targets; those of the recovered prefix, h, are its inputs, exactly as it will see them in the pruned model:

    min over the surviving weights of block f:   mean over tokens of |f(h) - g(d)|² / |g(d)|²

The pruned weights themselves come from the run before, so they do not depend on the recovery. One block's optimizer
state is alive at a time. The user's model only lends its code: a block runs with copies of its weights put in place of
its own for the call (`torch.func.functional_call`). Norms and biases stay as they are.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map_only

from ..calibration.chains import find_chains
from ..calibration.memory import Storage
from ..calibration.passes import BlockwisePasses
from ..config import MoonshotConfig
from ..data.batches import Batch, batch_size, shorten, split_batches
from ..errors import require
from ..model.calls import BlockCall, first_tensor, frozen, join_hidden, model_device, to_device
from ..model.layers import Block, PrunableLayer, Structure
from ..model.losses import token_mask
from ..model.presence import all_present
from ..reports.prune_report import BlockReport
from .preparation import Prepared
from .result_store import ResultStore
from .variant import Variant

STEP_SAMPLES = 8  # samples of one optimizer step
HELDOUT_SHARE = 8  # one in so many samples is not trained on: it decides when to stop, and whether a block gained
EVALUATIONS = 10  # of the held-out samples, spread evenly over the steps
PATIENCE = 3  # evaluations without a new best after which a block is done
BETAS = (0.9, 0.95)
TINY = 1e-12  # |target|² below which a token's error is no longer relative

Tensors = dict[str, Tensor]


def part_size(num_samples: int) -> int:
    """Samples that calibration batches should have at most, so that a share of them can be held out.

    Raises:
        MoonshotError: there are too few.
    """
    require(num_samples >= 2, f"num_samples={num_samples}: recovery holds a share of them out, give at least 2")
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


class Student:
    """A block's tensors with its pruned weights in float32, and which of them train.

    Args:
        block: of the dense model.
        weights: the pruned matrices [d_out, d_in] of all layers with a part in the block.
        tuned: names of the layers that train.
    """

    def __init__(self, block: Block, weights: list[tuple[PrunableLayer, Tensor]], tuned: set[str]):
        parameters = dict(block.module.named_parameters())
        names = {id(parameter): name for name, parameter in parameters.items()}
        dense = {**parameters, **dict(block.module.named_buffers())}
        self.dtypes = {name: tensor.dtype for name, tensor in dense.items()}
        self.tensors = {name: _float32(tensor.detach()) for name, tensor in dense.items()}
        self.trained: dict[str, tuple[PrunableLayer, nn.Parameter, Tensor]] = {}
        for layer, weight in weights:
            name = names[id(layer.parameter)]
            pruned = layer.as_parameter(weight).to(layer.parameter.device, torch.float32, copy=True).contiguous()
            trains = layer.name in tuned and bool(pruned.any())
            self.tensors[name] = nn.Parameter(pruned, requires_grad=trains)
            if trains:
                self.trained[name] = layer, self.tensors[name], pruned != 0

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [parameter for _, parameter, _ in self.trained.values()]

    def parameter_groups(self, lr: float) -> list[dict[str, Any]]:
        """For an optimizer: every layer's rate is `lr` times the root mean square of its surviving weights."""
        return [
            {"params": [parameter], "lr": lr * float(parameter.detach()[keep].square().mean().sqrt())}
            for _, parameter, keep in self.trained.values()
        ]

    def mask_gradients(self) -> None:
        """Weights at zero get no gradient, and Adam leaves them there exactly."""
        for _, parameter, keep in self.trained.values():
            parameter.grad.mul_(keep)

    def rounded(self) -> Tensors:
        """The block's tensors as they will be in the model, in its dtypes."""
        return {name: tensor.detach().to(self.dtypes[name]) for name, tensor in self.tensors.items()}

    def matrices(self) -> Tensors:
        """The trained weights by layer, [d_out, d_in] in the model's dtype."""
        tensors = self.rounded()
        return {layer.name: layer.as_matrix(tensors[name]) for name, (layer, _, _) in self.trained.items()}

    def snapshot(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.parameters]

    @torch.no_grad()
    def restore(self, snapshot: list[Tensor]) -> None:
        for parameter, saved in zip(self.parameters, snapshot, strict=True):
            parameter.copy_(saved)


def _float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


@dataclass
class Task:
    """What a block has to learn: its inputs and targets on every batch, in caches, and how both are compared."""

    module: nn.Module
    calls: list[BlockCall]
    inputs: list[Tensor]  # h, [B, T, D] or of any shape that the block reads
    targets: list[Tensor]  # g(d), of the same shape
    masks: list[Tensor | None]  # bool [B, T], True where a token counts; None for all

    def output(self, index: int, tensors: Tensors, hidden: Tensor, widen: bool = False) -> Tensor:
        """The block's output on a batch, of the shape of `hidden`.

        Args:
            index: the batch's number.
            tensors: in place of the block's own parameters and buffers, by their names.
            hidden: what the block reads, [B, T, D] or of any shape that it takes.
            widen: compute in float32, whatever the dtype of the inputs.
        """
        device = next(iter(tensors.values())).device
        arguments = to_device(join_hidden(hidden, self.calls[index]), device)
        args, kwargs = tree_map_only(Tensor, _float32, arguments) if widen else arguments
        return first_tensor(functional_call(self.module, tensors, args, kwargs))

    def error(self, index: int, tensors: Tensors, widen: bool = False) -> Tensor:
        """Σ |output - target|² / |target|² over a batch's tokens, padding left out: a number, with its graph.

        Args:
            index, tensors, widen: as for `output`.
        """
        output = positions(self.output(index, tensors, self.inputs[index], widen)).float()
        target = positions(self.targets[index]).to(output.device).float()
        errors = (output - target).square().sum(-1) / target.square().sum(-1).clamp_min(TINY)
        mask = self.masks[index]
        return errors.sum() if mask is None else errors[mask.to(errors.device)].sum()

    def tokens(self, indices: list[int]) -> int:
        """How many tokens count in these batches."""
        pairs = ((self.masks[index], self.targets[index]) for index in indices)
        return sum(positions(target)[..., 0].numel() if mask is None else int(mask.sum()) for mask, target in pairs)

    @torch.no_grad()
    def loss(self, indices: list[int], tensors: Tensors) -> float:
        """The mean relative squared error over the tokens of some batches.

        Args:
            indices: the batches' numbers.
            tensors: as for `output`.
        """
        return sum(self.error(index, tensors).item() for index in indices) / self.tokens(indices)

    @torch.no_grad()
    def advance(self, states: list[Tensor], tensors: Tensors) -> None:
        """Replace the block's inputs by its outputs.

        Args:
            states: what the block reads, for every batch, [B, T, D] or of any shape that it takes; changed in place.
            tensors: as for `output`.
        """
        for index, state in enumerate(states):
            state.copy_(self.output(index, tensors, state))


def positions(hidden: Tensor) -> Tensor:
    """[B, T, D]; a hidden state of another rank is one position per sample."""
    return hidden if hidden.ndim == 3 else hidden.flatten(1)[:, None]


class Recovery:
    """The recovery of one run's results.

    Args:
        model: dense and frozen while it runs.
        structure: what the run prunes.
        blocks: the chain that it is inside of.
        config: how many steps, at which rate, and the seed of their order.
        batches: the calibration data, in parts of `part_size` samples at most.
        storage: where the two streams live.
        store: the pruned weights in, the recovered ones out.
    """

    def __init__(
        self,
        model: nn.Module,
        structure: Structure,
        blocks: tuple[Block, ...],
        config: MoonshotConfig,
        batches: list[Batch],
        storage: Storage,
        store: ResultStore,
    ):
        self.model, self.structure, self.blocks, self.config = model, structure, blocks, config
        self.batches, self.storage, self.store = batches, storage, store
        self.steps, self.heldout = divide([batch_size(batch) for batch in batches])

    @classmethod
    def plan(cls, prepared: Prepared, variant: Variant) -> "Recovery | None":
        """The recovery that follows a run, if one was asked for; what it cannot do is found here, before any work.

        Args:
            prepared: the model and the data.
            variant: of the run, which gets a note on what is not recovered.

        Raises:
            MoonshotError: no data, or no pruned layers inside of a chain of blocks.
        """
        selection, model = variant.selection, prepared.model
        config, structure = selection.config, selection.structure
        if config.recover is None:
            return None
        require(prepared.data is not None, f"calibration=None: recover={config.recover!r} needs data")
        batches = split_batches(prepared.batches, part_size(prepared.data.num_samples))
        probe = to_device(shorten(batches[0]), model_device(model))
        with frozen(model), all_present(structure.blocks):
            found = find_chains(model, structure.blocks, probe, False, prepared.subject.loss)
        require(
            len(found.chains) == 1 and not found.loose,
            f"recover={config.recover!r} needs pruned layers inside one chain of blocks, each of which reads what the "
            f"one before gives: this model has {len(found.chains)}, and {len(found.loose)} blocks in none; use "
            "recover=None, or choose the layers of one chain by targets=",
        )
        if structure.outside:
            variant.notes.append(f"{len(structure.outside)} layers outside of the blocks were not recovered")
        return cls(model, structure, found.chains[0], config, batches, prepared.storage, variant.store)

    def run(self) -> Iterator[Block]:
        """Recover every block that is not yet; yields each one when it is done."""
        blocks = self.blocks
        around = [block for block in self.structure.blocks if block not in blocks]
        passes = BlockwisePasses(self.model, blocks, self.batches, False, None, self.storage, around)
        passes.capture()
        dense = [call.hidden for call in passes.calls[passes.lowest]]
        inputs = [self.storage.put(hidden, "inputs of recovered blocks") for hidden in dense]
        masks = [self._mask(batch, hidden) for batch, hidden in zip(self.batches, dense, strict=True)]
        for i in range(passes.lowest, passes.highest + 1):
            task = Task(blocks[i].module, passes.calls[i], inputs, dense, masks)
            with blocks[i].present():
                self._step(i, task, i < passes.highest)
            if blocks[i].layers:
                yield blocks[i]

    def _step(self, i: int, task: Task, leads_on: bool) -> None:
        """Recover block `i`, if it is not yet; its inputs become its outputs where a block follows."""
        block = self.blocks[i]
        task.advance(task.targets, Student(block, [], set()).rounded())  # they are the targets from here on
        student = self._student(block)
        if student.trained and block.name not in self.store.blocks:
            self.store.put_block(*self._recover(i, student, task))
        if leads_on:
            task.advance(task.inputs, student.rounded())

    def _mask(self, batch: Batch, hidden: Tensor) -> Tensor | None:
        """Which of a hidden state's positions are no padding; None for all."""
        mask = token_mask(batch)
        if mask is None or bool(mask.all()):
            return None
        require(
            positions(hidden).shape[:2] == mask.shape,
            f"recover: hidden states of shape {list(hidden.shape)} do not show which tokens are padding: "
            "use samples of equal length",
        )
        return mask

    def _student(self, block: Block) -> Student:
        """The block with its pruned weights. A layer that other blocks share is not tuned."""
        inside, here = set(map(id, block.module.parameters())), set(block.module.modules())
        known = [layer for layer in self.structure.layers() if layer in self.store]
        layers = [layer for layer in known if id(layer.parameter) in inside]
        tuned = {layer.name for layer in layers if here.issuperset(layer.modules)}
        return Student(block, [(layer, self.store.weight(layer)) for layer in layers], tuned)

    def _recover(self, i: int, student: Student, task: Task) -> tuple[BlockReport, Tensors]:
        started = time.perf_counter()
        before = task.loss(self.heldout, student.rounded())
        pruned = student.snapshot()
        steps, notes = self._tune(i, student, task)
        after = task.loss(self.heldout, student.rounded())
        if not after < before:
            student.restore(pruned)
            after, notes = before, [*notes, "no gain: the pruned weights were kept"]
        name, seconds = self.blocks[i].name, time.perf_counter() - started
        return BlockReport(name, before, after, steps, seconds, tuple(notes)), student.matrices()

    def _tune(self, i: int, student: Student, task: Task) -> tuple[int, list[str]]:
        """Train, and end at the best of the states that were evaluated; returns the steps taken, and notes."""
        total, every = self.config.recover_steps, max(1, self.config.recover_steps // EVALUATIONS)
        optimizer = torch.optim.Adam(student.parameter_groups(self.config.recover_lr), betas=BETAS)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (1 + math.cos(math.pi * step / total)) / 2)
        order = self._order(i)
        best, kept, since = math.inf, student.snapshot(), 0
        for step in range(1, total + 1):
            batches = next(order)
            for index in batches:
                (task.error(index, student.tensors, widen=True) / task.tokens(batches)).backward()
            student.mask_gradients()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            if step % every and step < total:
                continue
            loss = task.loss(self.heldout, student.rounded())
            since += 1
            if loss < best:
                best, kept, since = loss, student.snapshot(), 0
            if since == PATIENCE or not math.isfinite(loss):
                break
        student.restore(kept)
        return step, [] if step == total else [f"stopped after {step} of {total} steps"]

    def _order(self, i: int) -> Iterator[list[int]]:
        """The batches of step after step: all of them in a new order, again and again."""
        generator = torch.Generator().manual_seed((self.config.seed + i) % 2**63)
        while True:
            for index in torch.randperm(len(self.steps), generator=generator).tolist():
                yield self.steps[index]
