"""The dense model as a teacher: its logits on the calibration samples, and a student's divergence from them.

Of a model without a head these are its output, pooled as in `OutputLoss`, and half the relative squared distance.

The teacher runs once. Its final hidden states are cached, and its head computes the logits from them wherever these are
needed: hidden states are smaller by the ratio of vocabulary to width. Where the head's output is not the model's (with
capped logits), or the model has none (a classifier), the logits themselves are cached, in full.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ..calibration.storage import Storage
from ..data.batches import IGNORED, Batch
from ..errors import MoonshotError, Option, Text, require
from ..model.calls import recorded, run_model
from ..model.embeddings import find_pooling, has_head
from ..model.losses import pooled_output, relative_distance, token_mask

CHUNK = 2**22  # logits of the teacher in float32 at once
RECOVER = Option("recover", "distill")
BLOCKWISE = Text("use {}", Option("recover", "blockwise"))


def logits_of(model: nn.Module, output: Any) -> Tensor:
    """The logits in a model's output, [B, C] or [B, T, C].

    Raises:
        MoonshotError: there are none.
    """
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    usable = isinstance(logits, Tensor) and logits.ndim in (2, 3)
    if not isinstance(logits, Tensor) or not usable:
        message = f"{type(model).__name__} returns no logits [samples, classes] or [samples, tokens, classes]"
        raise MoonshotError(message, field="recover", value="distill", hint=BLOCKWISE)
    return logits


def counted(batch: Batch, logits: Tensor) -> Tensor:
    """Float32 [...] in host memory, 1 for each row of the logits [..., C] without padding and 0 for the others.

    Raises:
        MoonshotError: the shape of the logits does not show which rows are padding.
    """
    shape, labels = logits.shape[:-1], batch.get("labels")
    mask = torch.ones(shape, dtype=torch.bool) if len(shape) == 1 else token_mask(batch)
    if labels is not None and labels.shape == shape != (mask.shape if mask is not None else None):
        mask = labels != IGNORED  # the decoder's tokens
    mask = torch.ones(shape, dtype=torch.bool) if mask is None or bool(mask.all()) else mask
    message = f"logits of shape {list(logits.shape)} do not show which tokens are padding"
    visible = mask.shape == shape or bool(mask.all())
    require(visible, message, field="recover", value="distill", hint="use samples of equal length")
    mask = mask if mask.shape == shape else torch.ones(shape, dtype=torch.bool)
    return mask.to("cpu", torch.float32)


class Teacher:
    """The logits of a frozen model in evaluation mode, which stays as it is while they are used."""

    def __init__(self, model: nn.Module, storage: Storage):
        self.model, self.storage = model, storage
        self.pooling = None if has_head(type(model)) else find_pooling(model)
        find = getattr(model, "get_output_embeddings", lambda: None)
        self.head: nn.Module | None = find()
        self.checked = False  # whether the head's output is the model's, by the first batch

    def outputs(self, model: nn.Module, output: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        """The logits, or the pooled output, of the teacher or a student, and the rows that count as in `record`.

        Raises:
            MoonshotError: there are none, or they do not show which rows are padding.
        """
        if self.pooling is None:
            logits = logits_of(model, output)
            return logits, counted(batch, logits)
        values, mask = pooled_output(model, output, batch, self.pooling)
        return values, torch.ones(values.shape[:-1]) if mask is None else mask.to("cpu", torch.float32)

    @torch.no_grad()
    def record(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """A cache of the outputs on a batch, which is on the model's device, and the rows that count.

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
        kept, what = (logits, "logits") if self.head is None else (hidden, "hidden states")
        return self.storage.put(kept, f"{what} of the teacher"), weights

    def logits(self, rows: Tensor) -> Tensor:
        """The logits [rows, C] of rows of a cache, in float32."""
        return (rows if self.head is None else self.head(rows)).float()

    @torch.no_grad()
    def divergence(self, logits: Tensor, cache: Tensor, weights: Tensor) -> tuple[float, Tensor]:
        """The divergence of a student from the teacher.

        Args:
            logits: [..., C] of the student.
            cache: of the same samples, from `record`.
            weights: float32 [...], one for each row of the logits.

        Returns:
            Σ w · KL(teacher ‖ student) over the rows, in nats, and its gradient at the logits, in their dtype. Of
            outputs without a head half the relative squared distance replaces KL.
        """
        gradient, total = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device), 0.0
        students, targets = logits.detach().flatten(0, -2), cache.flatten(0, -2)
        gradients, size = gradient.flatten(0, -2), max(1, CHUNK // logits.shape[-1])
        weights = weights.flatten().to(logits.device)
        for start in range(0, len(students), size):
            part = slice(start, start + size)
            if self.pooling is not None:
                student, teacher = students[part].float(), targets[part].to(logits.device).float()
                total += float((0.5 * relative_distance(student, teacher) * weights[part]).sum())
                scale = weights[part] / teacher.square().sum(-1).clamp(min=torch.finfo(torch.float32).tiny)
                gradients[part] = (student - teacher) * scale[:, None]
                continue
            student = students[part].float().log_softmax(-1)
            teacher = self.logits(targets[part].to(logits.device)).log_softmax(-1)
            likely = teacher.exp()
            terms = torch.where(likely > 0, likely * (teacher - student), 0)
            total += float((terms.sum(-1) * weights[part]).sum())
            gradients[part] = (student.exp() - likely) * weights[part, None]
        return total, gradient
