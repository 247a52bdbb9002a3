"""Stages of a model: places where layers can be observed on all calibration data, repeatedly, until a stage advances.

The stages of sequential blocks are those of `Walk` (walk.py). `FullModelPipeline` runs the entire model for its only
stage; it serves layers outside of sequential blocks.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from ..data.batches import Batch, batch_size
from ..model.calls import model_device, run_model, to_device
from ..model.layers import Block, PrunableLayer, all_onloaded, onloaded_in_turn
from ..model.losses import Loss, loss_gradient, token_mask


class PassObserver(Protocol):
    """An observer of a pass over the data: every batch is announced to it."""

    @property
    def gradients(self) -> Mapping[str, object]:
        """The statistics of gradients, by layer; empty where no backward pass is needed."""

    def begin(self, first: int, count: int, mask: Tensor | None) -> None:
        """Announce a batch of `count` samples, the first of which has the number `first`.

        The mask, bool [B, T], is True where a token counts; None where all do.
        """

    def end(self) -> None:
        """Add the gradients of the batch."""


class PipelineStage(Protocol):
    """A place in a model that a pipeline visits, and then advances to the next."""

    def onloaded(self) -> AbstractContextManager[None]:
        """A context in which the weights of the layers are in the model."""

    def advance(self) -> None:
        """Give the next stage its inputs, or output gradients, unless a pass has done so; called last."""


class Stage(PipelineStage, Protocol):
    """A place in a model where the layers are observed and solved."""

    @property
    def layers(self) -> Sequence[PrunableLayer]:
        """The layers that can be observed here."""

    @property
    def advanced(self) -> bool:
        """Whether the caches of some batches belong to the next stage already: no other pass is possible here."""

    def observe(self, observer: PassObserver, advance: bool = False) -> None:
        """Pass all data under the hooks of an entered observer, and optionally advance in the same pass."""


@dataclass(eq=False)
class OpenStage:
    """A stage without a next one, so that it can be observed at any time."""

    layers: Sequence[PrunableLayer]
    run: Callable[[PassObserver], None]  # passes all data under an observer's hooks
    onloaded: Callable[[], AbstractContextManager[None]] = nullcontext
    advanced: ClassVar[bool] = False

    def observe(self, observer: PassObserver, advance: bool = False) -> None:
        self.run(observer)

    def advance(self) -> None:
        pass


@dataclass(eq=False)
class FullModelPipeline:
    """One stage, which runs the entire model, and its backward pass where gradients are needed."""

    model: nn.Module
    blocks: Sequence[Block]  # all of the model's
    batches: Sequence[Batch]
    gradients: bool  # whether any layer needs them
    loss: Loss | None  # (output, batch) → [B] losses; None for the model's own
    layers: Sequence[PrunableLayer] = ()  # of the stage; without any there is none
    passes: int = 0  # over all data, so far

    def __post_init__(self) -> None:
        self.losses: list[Tensor | None] = [None] * len(self.batches)  # ℓ_n, where a backward pass starts from them

    def __iter__(self) -> Iterator[Stage]:
        if self.layers:
            yield OpenStage(self.layers, self.run)

    def run(self, observer: PassObserver) -> None:
        """Pass all data; without a backward pass where the observer needs no gradients."""
        gradients = self.gradients and bool(observer.gradients)
        self.passes += 1
        with all_onloaded(self.blocks) if gradients else onloaded_in_turn(self.blocks):
            first = 0
            for index, batch in enumerate(self.batches):
                batch = to_device(batch, model_device(self.model))
                count = batch_size(batch)
                observer.begin(first, count, token_mask(batch))
                with torch.set_grad_enabled(gradients):
                    output = run_model(self.model, batch)
                    if gradients:
                        logits, gradient, self.losses[index] = loss_gradient(self.model, output, batch, self.loss)
                        if logits.requires_grad:  # else nothing that is observed has a gradient
                            torch.autograd.backward(logits, gradient)
                observer.end()
                first += count
