"""A pipeline of which one block at a time is onloaded; all data pass a block before the next one is.

`BlockPipeline` captures batch by batch from the whole model. Here the same is captured in three parts: the arguments of
the blocks from a pass in which they return their input, their inputs block by block, and the gradient of the last
block's output from the head alone. So every block is onloaded once for the forward pass and once for its stage. The
stages yield the same statistics, bit for bit.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..data.batches import Batch
from ..model.calls import (
    BlockCall,
    first_tensor,
    join_hidden,
    model_device,
    run_model,
    split_hidden,
    to_device,
    without_caches,
)
from ..model.losses import loss_gradient
from .block_probe import Extras, passing_on
from .stages import BlockPipeline, BlockStage, PassObserver


@dataclass(eq=False)
class StreamedPipeline(BlockPipeline):
    """A `BlockPipeline` of all blocks of a model; `progress` counts the last part of the capture."""

    extras: Extras = field(kw_only=True)  # of `probe_blocks`

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gradients:
            self.highest = len(self.blocks) - 1  # the head's gradient is that of its output

    def capture(self) -> None:
        self.capture_arguments()
        self._capture_from(0)

    def run_from(self, i: int, observer: PassObserver) -> None:
        """Observe an onloaded block, whose inputs are cached, with the gradients of the blocks behind it.

        `capture_arguments` has run; the inputs stay in the cache.
        """
        self.lowest = i
        self._capture_from(i)
        for j in range(self.highest, i, -1):
            stage = BlockStage(self, j)
            with stage.onloaded():
                stage.observe(None, True)
            for index in range(len(self.batches)):
                self.calls[j][index].hidden = torch.empty(0)
        BlockStage(self, i).observe(observer)

    def _capture_from(self, first: int) -> None:
        """Forward from a block on, and the head."""
        for i in range(first, self.highest if self.gradients else self.lowest):
            with self.blocks[i].onloaded():
                self.forward(i)
        if self.gradients:
            self._outputs()
        for index, batch in enumerate(self.batches):
            if self.gradients:
                self.tail(index, batch)
            self.progress(1)

    def capture_arguments(self) -> None:
        """The arguments of every block on every batch, and the input of the first."""

        def keep(i: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden, args, kwargs = split_hidden(args, without_caches(kwargs))
            cached = self.storage.put(hidden.detach(), f"{self.blocks[0].name}: inputs") if i == 0 else torch.empty(0)
            self.calls[i].append(BlockCall(*self.share(i, (args, kwargs)), cached))

        handles = [
            block.module.register_forward_pre_hook(partial(keep, i), with_kwargs=True)
            for i, block in enumerate(self.blocks)
        ]
        try:
            with torch.no_grad(), passing_on(self.blocks, self.extras):
                for batch in self.batches:
                    run_model(self.model, to_device(batch, model_device(self.model)))
        finally:
            for handle in handles:
                handle.remove()

    @torch.no_grad()
    def forward(self, i: int) -> None:
        """Compute the inputs of the next block by an onloaded one, whose own are kept if its stage will read them."""
        for index in range(len(self.batches)):
            call, following = self.calls[i][index], self.calls[i + 1][index]
            output = self._output(i, call)
            if self.gradients and i >= self.lowest:
                following.hidden = self.storage.put(output, f"{self.blocks[i + 1].name}: inputs")
            else:
                following.hidden = call.hidden.copy_(output)
        if i < self.lowest:
            self.calls[i] = []

    @torch.no_grad()
    def _outputs(self) -> None:
        """The outputs of the last block, which their gradients will replace."""
        self.deltas = []
        with self.blocks[self.highest].onloaded():
            for call in self.calls[self.highest]:
                self.deltas.append(self.storage.put(self._output(self.highest, call), "output gradients"))

    def _output(self, i: int, call: BlockCall) -> Tensor:
        block = self.blocks[i].module
        args, kwargs = to_device(join_hidden(call.hidden, call), next(block.parameters()).device)
        return first_tensor(block(*args, **kwargs))

    def tail(self, index: int, batch: Batch) -> None:
        """The gradient of the last block's output on a batch, by the head alone; it replaces the output in `deltas`."""
        device = model_device(self.model)
        batch = to_device(batch, device)
        last = self.deltas[index].to(device, copy=True).requires_grad_(True)
        with torch.enable_grad(), passing_on(self.blocks, self.extras, lambda: last):
            output = run_model(self.model, batch)
            logits, gradient, self.losses[index] = loss_gradient(self.model, output, batch, self.loss)
            (delta,) = torch.autograd.grad(logits, [last], gradient)
        self.deltas[index].copy_(delta)
