"""Stages of a calibration pipeline: one decoder layer alive at a time, at a cost that the depth does not change.

A pipeline is an iterable of stages. The layers of a stage can be observed on all calibration data repeatedly, until the
stage advances: it then computes the inputs, or the output gradients, of the next one.

`BlockPipeline` caches the inputs of every block during one forward pass of the model. Then

* backward (Fisher gradients, λ < 1): the head's backward pass computes the gradient of the last block's output, and the
  stages run from the last block to the first. Running a block again, forward and backward, yields the activations and
  gradients of its layers, and the output gradient of the block before. In all two forward passes and one backward pass,
  and no graph but one block's.
* forward (λ = 1): the stages run from the first block to the last without a graph; the outputs of a block replace its
  inputs in the cache.

The model stays dense until the last stage is done (one-shot), so that the order does not change the statistics.
`FullModelPipeline` runs the entire model for its only stage; it serves layers outside of sequential blocks.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ..calibration.storage import Storage
from ..data.batches import Batch, batch_size
from ..devices import trim_host_memory
from ..model.calls import (
    Arguments,
    BlockCall,
    first_tensor,
    join_hidden,
    model_device,
    run_model,
    split_hidden,
    to_device,
    without_caches,
)
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


class Stop(Exception):
    """Ends a forward pass of the model at a block."""


class BlockStage:
    """The block of a `BlockPipeline` with an index."""

    def __init__(self, pipeline: "BlockPipeline", index: int):
        self.pipeline, self.index, self.block = pipeline, index, pipeline.blocks[index]
        self.layers, self.module, self.onloaded = self.block.layers, self.block.module, self.block.onloaded
        self.advanced = False
        # Whether another stage of the pipeline follows.
        self.leads_on = index > pipeline.lowest if pipeline.gradients else index < pipeline.highest

    def observe(self, observer: PassObserver | None, advance: bool = False) -> None:
        """Like `Stage.observe`, but without an observer the data pass unobserved."""
        pipeline, first, advance = self.pipeline, 0, advance and self.leads_on
        device = next(self.module.parameters()).device
        for index, batch in enumerate(pipeline.batches):
            call, count, mask = pipeline.calls[self.index][index], batch_size(batch), token_mask(batch)
            if observer is not None:
                observer.begin(first, count, None if mask is None else mask.to(device))
            with torch.set_grad_enabled(pipeline.gradients):
                hidden = call.hidden.to(device)
                if pipeline.gradients:
                    hidden = hidden.detach().requires_grad_(advance)
                args, kwargs = to_device(join_hidden(hidden, call), device)
                output = first_tensor(self.module(*args, **kwargs))
                if output.requires_grad:
                    torch.autograd.backward(output, pipeline.deltas[index].to(output.device))
            if advance:
                self.advanced = True
                pipeline.hand_on(self.index, index, output, hidden.grad)
            del hidden, args, kwargs, output  # before the observer and the next batch need memory
            if observer is not None:
                observer.end()
            first += count

    def advance(self) -> None:
        if self.leads_on and not self.advanced:
            self.observe(None, True)
        self.pipeline.calls[self.index] = []


@dataclass(eq=False)
class BlockPipeline:
    """Sequential blocks, one after another on cached inputs; see the module's docstring."""

    model: nn.Module
    blocks: tuple[Block, ...]  # some of them have layers to observe
    batches: Sequence[Batch]
    gradients: bool  # whether any layer needs them: the stages then run backward
    loss: Loss | None  # (output, batch) → [B] losses; None for the model's own
    storage: Storage  # of the caches
    around: Sequence[Block] = ()  # the model's other blocks, onloaded for the forward pass
    progress: Callable[[int], Any] = lambda count: None  # called with the batches that the first pass has completed

    def __post_init__(self) -> None:
        self.calls: list[list[BlockCall]] = [[] for _ in self.blocks]  # by block and batch
        self.deltas: list[Tensor] = []  # gradients of the present block's output, by batch
        self.losses: list[Tensor | None] = [None] * len(self.batches)  # ℓ_n, where a backward pass starts from them
        observed = [i for i, block in enumerate(self.blocks) if block.layers]
        self.lowest, self.highest = observed[0], observed[-1]

    def __iter__(self) -> Iterator[BlockStage]:
        """The blocks from the lowest to the highest that have layers to observe, in the pipeline's direction."""
        self.capture()
        order = range(self.lowest, self.highest + 1)
        for i in reversed(order) if self.gradients else order:
            yield BlockStage(self, i)

    def hand_on(self, i: int, index: int, output: Tensor, gradient: Tensor | None) -> None:
        """Give the next stage its input, or the gradient of its output, in the memory of this one's.

        `output` is that of block i on a batch, `gradient` that of its input, where the stages run backward.
        """
        if self.gradients:
            assert gradient is not None
            self.deltas[index].copy_(gradient)
        else:
            self.calls[i + 1][index].hidden = self.calls[i][index].hidden.copy_(output.detach())

    def capture(self) -> None:
        """One forward pass over the data, which caches every block's call and the last block's output gradient."""
        for index, batch in enumerate(self.batches):
            self._capture(index, batch)
            self.progress(1)
        trim_host_memory()

    def _capture(self, index: int, batch: Batch) -> None:
        """With gradients, the graph starts behind the highest observed block; without, the pass ends there."""
        batch, handles, tail = to_device(batch, model_device(self.model)), [], list[Tensor]()

        def keep(i: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden, args, kwargs = split_hidden(args, without_caches(kwargs))
            computed = not self.gradients and i > self.lowest  # forward, the block before gives its input
            cached = torch.empty(0) if computed else self.storage.put(hidden.detach(), f"{self.blocks[i].name}: inputs")
            self.calls[i].append(BlockCall(*self.share(i, (args, kwargs)), cached))
            if not self.gradients and i == self.highest:
                raise Stop

        def cut(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            hidden = first_tensor(output).detach().requires_grad_(True)
            tail.append(hidden)
            return hidden if isinstance(output, Tensor) else (hidden, *output[1:])

        try:
            for i in range(self.lowest, self.highest + 1):
                hook = lambda _, args, kwargs, i=i: keep(i, args, kwargs)  # noqa: E731
                handles.append(self.blocks[i].module.register_forward_pre_hook(hook, with_kwargs=True))
            if self.gradients:
                handles.append(self.blocks[self.highest].module.register_forward_hook(cut))
            # Other blocks may follow these: a decoder is a part of its encoder's graph.
            others = all_onloaded(self.around) if self.gradients else onloaded_in_turn(self.around)
            with others, torch.set_grad_enabled(self.gradients), onloaded_in_turn(self.blocks):
                output = run_model(self.model, batch)
                if self.gradients:
                    logits, gradient, self.losses[index] = loss_gradient(self.model, output, batch, self.loss)
                    (delta,) = torch.autograd.grad(logits, tail, gradient)
                    self.deltas.append(self.storage.put(delta, "output gradients"))
        except Stop:
            return
        finally:
            for handle in handles:
                handle.remove()

    def share(self, i: int, arguments: Arguments) -> Arguments:
        """The arguments with tensors equal to the first batch's replaced by those: masks and rotary tables repeat."""
        if not self.calls[i]:
            return arguments
        earlier: list[Tensor] = []
        tree_map_only(Tensor, earlier.append, (self.calls[i][0].args, self.calls[i][0].kwargs))
        return tree_map_only(Tensor, lambda t: next((e for e in earlier if e is t or _equal(e, t)), t), arguments)


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)
