"""Calibration passes over a model: one decoder layer alive at a time, at a cost that its depth does not change.

`BlockwisePasses` caches what enters every block during one forward pass of the model. Then

* λ < 1: the head's backward pass gives the gradient of the last block's output, and the steps go from the last block to
  the first. Running a block again, forwards and backwards, shows its layers' activations and gradients, and gives the
  gradient that the block before needs. In all two forward passes and one backward pass, and no graph but one block's.
* λ = 1: the steps go from the first block to the last without any graph; each block's outputs replace its inputs in
  the cache.

The model stays dense until the last step is over ("one-shot"), so the order does not change what is seen.
`FullModelPasses` runs the entire model for every step; it serves what is not a chain of blocks.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ..calibration.observer import Observer
from ..calibration.storage import Storage
from ..data.batches import Batch, batch_size
from ..malloc_trim import trim_host_memory
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
from ..model.layers import Block, PrunableLayer
from ..model.losses import Loss, loss_gradient, token_mask
from ..model.onloading import all_onloaded, onloaded_in_turn


class Step(Protocol):
    """One stop of the passes over a model: the layers that are seen here, and how to run the data through them.

    `observe` may be called several times, where the layers' statistics do not fit in memory together. Either its last
    call has ``last=True``, or `skip` ends the step.
    """

    @property
    def layers(self) -> tuple[PrunableLayer, ...]:
        """Those that are seen."""

    @property
    def moved(self) -> bool:
        """Whether the passes have moved on, for some batches at least, so that no other look can be had here."""

    def observe(self, observer: Observer, last: bool) -> None:
        """Pass all data under the observer's hooks.

        Args:
            observer: entered; it is told every batch.
            last: no other look follows here, so that the passes also move on to the next step.
        """

    def skip(self) -> None:
        """Move on without another look."""


class _Stop(Exception):
    """Ends a forward pass once its last wanted block was entered."""


@dataclass(frozen=True)
class FullModelStep:
    """A `Step` that runs the entire model whenever it is observed."""

    layers: tuple[PrunableLayer, ...]
    passes: "FullModelPasses"
    moved: ClassVar[bool] = False

    def observe(self, observer: Observer, last: bool) -> None:
        self.passes.run(observer)

    def skip(self) -> None:
        """Nothing waits for it."""


class FullModelPasses:
    """Every step runs the entire model, and its backward pass where gradients are wanted.

    Args:
        model: its weights are all present meanwhile.
        blocks: of the model, to be brought where they are not.
        batches: the calibration data.
        gradients: whether any layer needs them.
        loss: (output, batch) → [B] losses, or None for the model's own.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[Block],
        batches: list[Batch],
        gradients: bool,
        loss: Loss | None,
    ):
        self.model, self.blocks, self.batches, self.gradients, self.loss = model, blocks, batches, gradients, loss
        self.losses: list[Tensor | None] = [None] * len(batches)  # ℓ_n, where a backward pass starts from them
        self.passes = 0  # over all data, so far

    def steps(self, layers: tuple[PrunableLayer, ...]) -> Iterator[Step]:
        """One for all of these layers, if there are any."""
        if layers:
            yield FullModelStep(layers, self)

    def run(self, observer: Observer) -> None:
        """Pass all data; without a backward pass where the observer wants no gradients."""
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


@dataclass(frozen=True)
class BlockStep:
    """A `Step` at one block, whose weights are present meanwhile."""

    layers: tuple[PrunableLayer, ...]
    passes: "BlockwisePasses"
    index: int

    @property
    def moved(self) -> bool:
        return self.passes.moved == self.index

    def observe(self, observer: Observer, last: bool) -> None:
        self.passes.run(self.index, observer, last)

    def skip(self) -> None:
        self.passes.advance(self.index)


class BlockwisePasses:
    """Blocks one after another on cached inputs; see the module's text.

    Args:
        model: they are a part of it.
        blocks: a chain, in some of which there are layers to see.
        batches: the calibration data.
        gradients: whether any layer needs them.
        loss: (output, batch) → [B] losses, or None for the model's own.
        storage: where the caches live.
        around: the model's other blocks, to be brought where their weights are elsewhere.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: tuple[Block, ...],
        batches: list[Batch],
        gradients: bool,
        loss: Loss | None,
        storage: Storage,
        around: Sequence[Block] = (),
    ):
        self.model, self.blocks, self.batches, self.around = model, blocks, batches, around
        self.gradients, self.loss, self.storage = gradients, loss, storage
        self.calls: list[list[BlockCall | None]] = [[None] * len(batches) for _ in blocks]
        self.deltas: list[Tensor | None] = [None] * len(batches)
        self.losses: list[Tensor | None] = [None] * len(batches)  # ℓ_n, where a backward pass starts from them
        self.moved: int | None = None  # the block whose inputs, or gradients, have begun to give way to another's
        wanted = [i for i, block in enumerate(blocks) if block.layers]
        self.lowest, self.highest = wanted[0], wanted[-1]

    def capture(self, progress: Callable[[int], None] = lambda count: None) -> None:
        """One forward pass over the data, which keeps what enters the blocks in `calls[block][batch]`."""
        for index, batch in enumerate(self.batches):
            self._capture(index, batch)
            progress(1)
        trim_host_memory()

    def steps(self, progress: Callable[[int], None] = lambda count: None) -> Iterator[Step]:
        """One per block that has layers to see (and those between), in the order described above.

        A block's weights are present until the next step is asked for.
        """
        self.capture(progress)
        order = range(self.lowest, self.highest + 1)
        for i in reversed(order) if self.gradients else order:
            with self.blocks[i].onloaded():
                yield BlockStep(self.blocks[i].layers, self, i)
            self.calls[i] = []

    def _capture(self, index: int, batch: Batch) -> None:
        """One forward pass of the model; keeps every block's call, and the gradient of the last wanted block's output.

        With gradients, the graph starts behind the last wanted block; without, the pass ends there.
        """
        handles = []
        batch = to_device(batch, model_device(self.model))
        tail: list[Tensor] = []

        def keep(i: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden, args, kwargs = split_hidden(args, without_caches(kwargs))
            first = not self.gradients and i > self.lowest  # at λ = 1 the block before will give it
            cached = None if first else self.storage.put(hidden.detach(), f"{self.blocks[i].name}: inputs")
            self.calls[i][index] = BlockCall(*self._share(i, index, (args, kwargs)), cached)
            if not self.gradients and i == self.highest:
                raise _Stop

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
            # What is around the chain may lie behind it: a decoder is a part of the tail's graph.
            others = all_onloaded(self.around) if self.gradients else onloaded_in_turn(self.around)
            with others, torch.set_grad_enabled(self.gradients), onloaded_in_turn(self.blocks):
                output = run_model(self.model, batch)
                if self.gradients:
                    logits, gradient, self.losses[index] = loss_gradient(self.model, output, batch, self.loss)
                    (delta,) = torch.autograd.grad(logits, tail, gradient)
                    self.deltas[index] = self.storage.put(delta, "output gradients")
        except _Stop:
            return
        finally:
            for handle in handles:
                handle.remove()

    def _share(self, i: int, index: int, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments with tensors equal to the first batch's replaced by those: masks and rotary tables repeat."""
        if index == 0:
            return arguments
        first = self.calls[i][0]
        known = _tensors((first.args, first.kwargs))
        return tree_map_only(Tensor, lambda t: next((k for k in known if k is t or _same(k, t)), t), arguments)

    def run(self, i: int, observer: Observer, last: bool) -> None:
        """Pass all data through one block under the observer's hooks.

        Args:
            i: its number in the chain.
            observer: entered; it is told every batch.
            last: on to the next block as well: its inputs, or the gradients of the one before, replace this one's.
        """
        block, first = self.blocks[i].module, 0
        for index, batch in enumerate(self.batches):
            count, mask = batch_size(batch), token_mask(batch)
            device = next(block.parameters()).device
            observer.begin(first, count, None if mask is None else mask.to(device))
            self._run_batch(i, index, last and self._leads_on(i))
            observer.end()
            first += count

    def advance(self, i: int) -> None:
        """Give the next block what it needs of block `i`, unseen."""
        if self._leads_on(i):
            for index in range(len(self.batches)):
                self._run_batch(i, index, True)

    def _leads_on(self, i: int) -> bool:
        """Whether a block is still to come behind block `i` in the order of the steps."""
        return i > self.lowest if self.gradients else i < self.highest

    def _run_batch(self, i: int, index: int, propagate: bool) -> None:
        call = self.calls[i][index]
        hidden = call.hidden.to(next(self.blocks[i].module.parameters()).device)
        with torch.set_grad_enabled(self.gradients):
            if self.gradients:
                hidden = hidden.detach().requires_grad_(propagate)
            output = self._output(i, index, hidden)
            if output.requires_grad:
                torch.autograd.backward(output, self.deltas[index].to(output.device))
        if not propagate:
            return
        self.moved = i
        if self.gradients:
            self.deltas[index].copy_(hidden.grad)
        else:
            # The cached input is this block's alone from here on: the next block's takes its place.
            following = self.calls[i + 1][index]
            following.hidden = call.hidden.copy_(output.detach())

    def _output(self, i: int, index: int, hidden: Tensor) -> Tensor:
        """What a block gives on a batch, where its weights are."""
        block = self.blocks[i].module
        device = next(block.parameters()).device
        args, kwargs = to_device(join_hidden(hidden, self.calls[i][index]), device)
        return first_tensor(block(*args, **kwargs))


def _tensors(tree: Any) -> list[Tensor]:
    found: list[Tensor] = []
    tree_map_only(Tensor, found.append, tree)
    return found


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)
