"""Passes over a model of which one block at a time is in memory; all data go through a block before the next comes.

What `BlockwisePasses` gathers batch by batch from the whole model is gathered here in three parts: the blocks'
arguments from a pass in which they give back what they read, their inputs block by block, and the gradient of the last
one's output from the head alone. So every block is brought once forwards, and once for its step. What the steps see is
the same, bit for bit.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..calibration.observer import Observer
from ..calibration.storage import Storage
from ..data.batches import Batch
from ..model.calls import (
    BlockCall,
    model_device,
    run_model,
    split_hidden,
    to_device,
    without_caches,
)
from ..model.layers import Block
from ..model.losses import Loss, loss_gradient
from .block_pipeline import BlockwisePasses
from .block_probe import Extras, passing_on


class StreamedPasses(BlockwisePasses):
    """As `BlockwisePasses`.

    Args:
        model, blocks, batches, gradients, loss, storage: as there; the blocks are all of the model's.
        extras: of `survey`.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: tuple[Block, ...],
        batches: list[Batch],
        gradients: bool,
        loss: Loss | None,
        storage: Storage,
        extras: Extras,
    ):
        super().__init__(model, blocks, batches, gradients, loss, storage)
        self.extras = extras
        if gradients:
            self.highest = len(blocks) - 1  # the head's gradient is that of its output

    def capture(self, progress: Callable[[int], None] = lambda count: None) -> None:
        """What enters every block; progress counts the batches, which the last part makes complete."""
        self.arguments()
        self._go_through(0, progress)

    def arguments(self) -> None:
        """Every block's arguments on every batch, and the first one's inputs."""
        for index, batch in enumerate(self.batches):
            self._arguments(index, batch)

    def run_from(self, i: int, hidden: list[Tensor], observer: Observer) -> None:
        """Show a block what the passes see that begin there; `arguments` are known.

        Args:
            i: its number in the chain; it is present.
            hidden: what it reads, [B, T, d] for every batch.
            observer: entered; it is told every batch.
        """
        self.lowest = i
        for call, own in zip(self.calls[i], hidden, strict=True):
            call.hidden = self.storage.put(own, f"{self.blocks[i].name}: inputs")
        self._go_through(i, lambda count: None)
        for j in range(self.highest, i, -1):
            with self.blocks[j].onloaded():
                self.advance(j)
            for call in self.calls[j]:
                call.hidden = None
        self.run(i, observer, False)

    def _go_through(self, first: int, progress: Callable[[int], None]) -> None:
        """Forwards from a block on, and the head."""
        for i in range(first, self.highest if self.gradients else self.lowest):
            self._forward(i)
        if self.gradients:
            self._outputs()
        for index, batch in enumerate(self.batches):
            if self.gradients:
                self.tail(index, batch)
            progress(1)

    def _arguments(self, index: int, batch: Batch) -> None:
        """Every block's arguments on a batch, and the first one's input."""
        batch = to_device(batch, model_device(self.model))

        def keep(i: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden, args, kwargs = split_hidden(args, without_caches(kwargs))
            cached = self.storage.put(hidden.detach(), f"{self.blocks[0].name}: inputs") if i == 0 else None
            self.calls[i][index] = BlockCall(*self._share(i, index, (args, kwargs)), cached)

        handles = [
            block.module.register_forward_pre_hook(partial(keep, i), with_kwargs=True)
            for i, block in enumerate(self.blocks)
        ]
        try:
            with torch.no_grad(), passing_on(self.blocks, self.extras):
                run_model(self.model, batch)
        finally:
            for handle in handles:
                handle.remove()

    @torch.no_grad()
    def _forward(self, i: int) -> None:
        """The next block's inputs; this one's are kept where a step follows that reads them."""
        with self.blocks[i].onloaded():
            for index in range(len(self.batches)):
                call, following = self.calls[i][index], self.calls[i + 1][index]
                output = self._output(i, index, call.hidden)
                if self.gradients and i >= self.lowest:
                    following.hidden = self.storage.put(output, f"{self.blocks[i + 1].name}: inputs")
                else:
                    following.hidden = call.hidden.copy_(output)
        if i < self.lowest:
            self.calls[i] = []

    @torch.no_grad()
    def _outputs(self) -> None:
        """What the last block gives, where its gradients will be."""
        with self.blocks[self.highest].onloaded():
            for index, call in enumerate(self.calls[self.highest]):
                output = self._output(self.highest, index, call.hidden)
                self.deltas[index] = self.storage.put(output, "output gradients")

    def tail(self, index: int, batch: Batch) -> None:
        """The gradient of the last block's output, by the head alone.

        Args:
            index: of the batch; the output stands where its gradient will be, in `deltas`.
            batch: the inputs.
        """
        device = model_device(self.model)
        batch = to_device(batch, device)
        last = self.deltas[index].to(device, copy=True).requires_grad_(True)
        with torch.enable_grad(), passing_on(self.blocks, self.extras, lambda: last):
            output = run_model(self.model, batch)
            logits, gradient, self.losses[index] = loss_gradient(self.model, output, batch, self.loss)
            (delta,) = torch.autograd.grad(logits, [last], gradient)
        self.deltas[index].copy_(delta)
