"""The dense model as a teacher: the targets of a block are outputs of dense blocks, of a whole model its logits.

Without a head, the output of the model, pooled like in `OutputLoss`, replaces the logits, and half the relative squared
distance replaces the divergence.

The teacher of a whole model runs once. Its final hidden states are cached, and its head computes the logits from them
when they are needed: hidden states are smaller by the ratio of vocabulary to width. Where the head's output is not the
model's (capped logits), or there is no head (a classifier), the logits themselves are cached.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..calibration.storage import Storage
from ..data.batches import IGNORED, Batch
from ..errors import MoonshotError, require
from ..model.calls import BlockCall, recorded, run_model
from ..model.depth import skipping
from ..model.embeddings import find_pooling
from ..model.layers import Block, find_structure
from ..model.losses import has_head, pooled_output, relative_distance, token_mask
from ..pipeline.inputs import Prepared
from ..pipeline.walk import Walk
from .student import HOST, StudentBlock
from .tuning import BlockTask

CHUNK = 2**22  # float32 logits of the teacher that are in memory at once


@dataclass(eq=False)
class DenseBlocks:
    """The blocks of a dense model, and one hidden state per batch, which passes through the blocks in order."""

    blocks: Sequence[Block]
    groups: Sequence[range]  # by recovered block: its dense block, and the next blocks that a linear map replaces
    calls: Sequence[list[BlockCall]]  # by dense block and batch
    states: list[Tensor]
    targets: list[Tensor]  # the states in the coordinates of the recovered model
    basis: Tensor | None = None  # of these coordinates; see `DenseTeacher`

    @classmethod
    def of(cls, prepared: Prepared, batches: Sequence[Batch], walk: Walk) -> "DenseBlocks":
        """The dense blocks with the inputs of the first one.

        Args:
            prepared: the recovered model, whose teacher may have more blocks and wider hidden states.
            batches: the data.
            walk: over the recovered blocks, after a pass of the data that cached the inputs of the first.
        """
        teacher, dense, basis = prepared.subject.teacher, walk, None
        groups = [range(index, index + 1) for index in range(len(walk.blocks))]
        if teacher is not None:
            basis, whole = teacher.basis, find_structure(teacher.model).blocks
            remaining = [index for index in range(len(whole)) if index not in teacher.removed]
            names = [block.name for block in prepared.selection.structure.blocks]
            by_name = dict(zip(names, remaining, strict=True))
            blocks, groups = list[Block](), []
            for index in (by_name[block.name] for block in walk.blocks):
                stop = next(end for end in range(index + 1, len(whole) + 1) if end not in teacher.merged)
                groups.append(range(len(blocks), len(blocks) + stop - index))
                blocks += whole[index:stop]
            dense = Walk(teacher.model, tuple(blocks), batches, False, None, prepared.storage)
            dense.lowest, dense.highest = groups[walk.lowest][0], groups[walk.highest][-1]
            with skipping(whole[index].module for index in teacher.removed if index not in teacher.merged):
                dense.capture()
        states = targets = [call.hidden for call in dense.calls[dense.lowest]]
        if basis is not None:
            targets = [prepared.storage.put(_mapped(state, basis), "targets of blocks") for state in states]
        return cls(dense.blocks, groups, dense.calls, states, targets, basis)

    def advance(self, number: int) -> None:
        """Replace the states, and thereby the targets, by the outputs of the dense blocks of a recovered block."""
        for index in self.groups[number]:
            block = self.blocks[index]
            task = BlockTask(block.module, self.calls[index], self.states, self.states, [])
            task.advance(self.states, StudentBlock(block, [], set()).rounded())
        if self.basis is not None:
            for target, state in zip(self.targets, self.states, strict=True):
                target.copy_(_mapped(state, self.basis))


def _mapped(state: Tensor, basis: Tensor) -> Tensor:
    wide = state if state.dtype == torch.float64 else state.float()
    return (wide @ basis.to("cpu", wide.dtype).to(wide.device)).to(state.dtype)


def counted(batch: Batch, logits: Tensor) -> Tensor:
    """Float32 [...] in host memory, 1 for each row of the logits [..., C] without padding and 0 for the others.

    Raises:
        MoonshotError: the shape of the logits does not show which rows are padding.
    """
    rows, labels = logits.shape[:-1], batch.get("labels")
    mask = token_mask(batch) if logits.ndim == 3 else None
    if logits.ndim == 3 and labels is not None and labels.shape == rows and (mask is None or mask.shape != rows):
        mask = labels != IGNORED  # the decoder's tokens
    if mask is None or bool(mask.all()):
        return torch.ones(rows, dtype=torch.float32)
    message = f"logits of shape {list(logits.shape)} do not show which tokens are padding"
    require(mask.shape == rows, message, field="recover", value="distill", hint="use samples of equal length")
    return mask.to(HOST, torch.float32)


class Teacher:
    """The logits of a frozen model in evaluation mode, whose weights must not change while the logits are used."""

    def __init__(self, model: nn.Module, storage: Storage):
        self.model, self.storage = model, storage
        self.pooling = None if has_head(type(model)) else find_pooling(model)
        self.head: nn.Module | None = getattr(model, "get_output_embeddings", lambda: None)()
        self.checked = False  # the first batch has shown whether the head's output is the model's

    def outputs(self, model: nn.Module, output: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the logits or the pooled output of the teacher or a student, and the weights of `record`.

        Raises:
            MoonshotError: there are no logits, or their shape does not show which rows are padding.
        """
        if self.pooling is not None:
            values, mask = pooled_output(model, output, batch, self.pooling)
            return values, torch.ones(values.shape[:-1]) if mask is None else mask.to(HOST, torch.float32)
        logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
        if not isinstance(logits, Tensor) or logits.ndim not in (2, 3):
            message = f"{type(model).__name__} returns no logits [samples, classes] or [samples, tokens, classes]"
            hint = "use recover='blockwise'"
            raise MoonshotError(message, field="recover", value="distill", hint=hint)
        return logits, counted(batch, logits)

    @torch.no_grad()
    def record(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Cache the outputs on a batch, which is on the model's device.

        Returns:
            Hidden states or logits [samples, ..., D], and float32 weights [samples, ...] in host memory, 1 for each
            row of logits without padding and 0 for the others.

        Raises:
            MoonshotError: the model returns no logits, or there is no room for the cache.
        """
        with recorded({} if self.head is None else {"head": self.head}) as calls:
            logits, weights = self.outputs(self.model, run_model(self.model, batch), batch)
        (hidden, *_), _ = calls.get("head", ((None,), {}))
        if self.head is not None and not self.checked:
            exact = isinstance(hidden, Tensor) and torch.equal(self.head(hidden), logits)
            self.head = self.head if exact else None
        self.checked = True
        cached, what = (logits, "logits") if self.head is None else (hidden, "hidden states")
        return self.storage.put(cached, f"{what} of the teacher"), weights

    @torch.no_grad()
    def divergence(self, logits: Tensor, cache: Tensor, weights: Tensor) -> tuple[float, Tensor]:
        """Compute the divergence of a student from the teacher.

        Args:
            logits: [..., C] of the student.
            cache: of the same samples, from `record`.
            weights: float32 [...], one for each row of the logits.

        Returns:
            Σ w · KL(teacher ‖ student) over the rows, in nats, and its gradient at the logits, in their dtype. Half the
            relative squared distance replaces KL for outputs without a head.
        """
        gradient, total = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device), 0.0
        students, targets = logits.detach().flatten(0, -2), cache.flatten(0, -2)
        gradients, size = gradient.flatten(0, -2), max(1, CHUNK // logits.shape[-1])
        weights = weights.flatten().to(logits.device)
        for start in range(0, len(students), size):
            rows = slice(start, start + size)
            student, teacher, weight = students[rows].float(), targets[rows].to(logits.device), weights[rows]
            if self.pooling is not None:
                teacher = teacher.float()
                total += float((0.5 * relative_distance(student, teacher) * weight).sum())
                scale = weight / teacher.square().sum(-1).clamp(min=torch.finfo(torch.float32).tiny)
                gradients[rows] = (student - teacher) * scale[:, None]
                continue
            student = student.log_softmax(-1)
            teacher = (teacher if self.head is None else self.head(teacher)).float().log_softmax(-1)
            probabilities = teacher.exp()
            terms = torch.where(probabilities > 0, probabilities * (teacher - student), 0)
            total += float((terms.sum(-1) * weight).sum())
            gradients[rows] = (student.exp() - probabilities) * weight[:, None]
        return total, gradient
