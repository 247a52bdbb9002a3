"""Stages of a model, where layers are observed on all calibration data, repeatedly, until a stage advances.

`observe_model` runs the entire model, for layers outside of sequential blocks. A `Walk` has one stage for each of some
sequential blocks: one of them is alive at a time, and a block costs the same at any depth. The arguments of the blocks
except their hidden state, such as masks and rotary tables, are captured first, by a pass in which the blocks return
their input and compute nothing. Then

* forward (λ = 1): the blocks are visited from the first to the last without a graph; the outputs of a block replace its
  inputs in the cache. In all one forward pass.
* backward (Fisher gradients, λ < 1): a forward pass block by block caches the inputs of every block, and the head alone
  gives the gradient of the last block's output. The blocks are visited from the last to the first: running a block
  again, forward and backward, yields the activations and gradients of its layers, and the output gradient of the block
  before. In all two forward passes and one backward pass, and one block's graph at a time.

So an offloaded block is onloaded once for the forward pass and once for its visit. Where the arguments depend on what
blocks compute, a forward pass of the whole model captures arguments, inputs and the head's gradient instead.

The model stays dense until the last visit is done (one-shot), so the order does not change the statistics.
"""

from collections import deque
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ..calibration.storage import Storage
from ..data.batches import Batch, batch_size
from ..devices import trim_host_memory
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
from ..model.layers import Block, PrunableLayer, all_onloaded, onloaded_in_turn
from ..model.losses import Loss, loss_gradient, token_mask
from .block_sequences import Extras, passing_on


class PassObserver(Protocol):
    """An observer of a pass over the data: every batch is announced to it."""

    @property
    def gradients(self) -> Mapping[str, object]:
        """The statistics of gradients, by layer; empty where no backward pass is needed."""

    def begin(self, first: int, count: int, mask: Tensor | None) -> None:
        """Announce a batch of `count` samples, numbered from `first` on.

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

    def recut(self, batches: Sequence[Batch]) -> bool:
        """Continue with other batches of the same samples; False where that is not possible."""


@dataclass(eq=False)
class OpenStage:
    """A stage without a next one, so that it can be observed at any time."""

    layers: Sequence[PrunableLayer]
    run: Callable[[PassObserver], None]  # passes all data under an observer's hooks
    onloaded: Callable[[], AbstractContextManager[None]] = nullcontext
    advanced: ClassVar[bool] = False

    def observe(self, observer: PassObserver, advance: bool = False) -> None:
        self.run(observer)

    def recut(self, batches: Sequence[Batch]) -> bool:
        return False

    def advance(self) -> None:
        pass


def observe_model(
    model: nn.Module,
    blocks: Sequence[Block],
    batches: Sequence[Batch],
    observer: PassObserver,
    gradients: bool,
    loss: Loss | None,
) -> list[Tensor | None]:
    """Pass all data through the entire model, and back where gradients are needed.

    `blocks` are all of the model's, and `loss` is (output, batch) → [B] losses, or None for the model's own. Returns
    the losses ℓ_n by batch, None without a backward pass.
    """
    losses: list[Tensor | None] = [None] * len(batches)
    with all_onloaded(blocks) if gradients else onloaded_in_turn(blocks):
        first = 0
        for index, batch in enumerate(batches):
            batch = to_device(batch, model_device(model))
            count = batch_size(batch)
            observer.begin(first, count, token_mask(batch))
            with torch.set_grad_enabled(gradients):
                output = run_model(model, batch)
                if gradients:
                    logits, gradient, losses[index] = loss_gradient(model, output, batch, loss)
                    if logits.requires_grad:  # else nothing that is observed has a gradient
                        torch.autograd.backward(logits, gradient)
            observer.end()
            first += count
    return losses


class Stop(Exception):
    """Ends a forward pass of the model at a block."""


class BlockStage:
    """The block of a `Walk` with an index."""

    def __init__(self, walk: "Walk", index: int):
        self.walk, self.index, self.block = walk, index, walk.blocks[index]
        self.layers, self.module, self.onloaded = self.block.layers, self.block.module, self.block.onloaded
        self.recut, self.advanced = walk.recut, False
        # Whether another stage of the walk follows.
        self.has_next = index > walk.lowest if walk.gradients else index < walk.highest

    def observe(self, observer: PassObserver | None, advance: bool = False) -> None:
        """Like `Stage.observe`, but without an observer the data pass unobserved."""
        walk, first, advance = self.walk, 0, advance and self.has_next
        walk.forwards += 1
        walk.backwards += walk.gradients and (advance or observer is not None and bool(observer.gradients))
        device = next(self.module.parameters()).device
        for index, batch in enumerate(walk.batches):
            call, count, mask = walk.calls[self.index][index], batch_size(batch), token_mask(batch)
            if observer is not None:
                observer.begin(first, count, None if mask is None else mask.to(device))
            with torch.set_grad_enabled(walk.gradients):
                hidden = call.hidden.to(device)
                if walk.gradients:
                    hidden = hidden.detach().requires_grad_(advance)
                args, kwargs = to_device(join_hidden(hidden, call), device)
                output = first_tensor(self.module(*args, **kwargs))
                if output.requires_grad:
                    torch.autograd.backward(output, walk.deltas[index].to(output.device))
            if advance:  # give the next stage its input, or the gradient of its output, in the memory of this one's
                self.advanced = True
                if walk.gradients:
                    assert hidden.grad is not None
                    walk.deltas[index].copy_(hidden.grad)
                else:
                    walk.calls[self.index + 1][index].hidden = call.hidden.copy_(output.detach())
            del hidden, args, kwargs, output  # before the observer and the next batch need memory
            if observer is not None:
                observer.end()
            first += count

    def advance(self) -> None:
        if self.has_next and not self.advanced:
            self.observe(None, True)
        self.walk.calls[self.index] = []


@dataclass(eq=False)
class Walk:
    """Sequential blocks, one after another on cached inputs; see the module's docstring."""

    model: nn.Module
    blocks: tuple[Block, ...]  # some of them have layers to observe
    batches: Sequence[Batch]
    gradients: bool  # whether any layer needs them: the stages then run backward
    loss: Loss | None  # (output, batch) → [B] losses; None for the model's own
    storage: Storage  # of the caches
    extras: Extras | None = None  # with which blocks can return their input; None: their arguments need a full pass
    around: Sequence[Block] = ()  # the model's other blocks, onloaded for passes of the whole model
    progress: Callable[[int], Any] = lambda count: None  # called with the batches that `capture` has completed

    def __post_init__(self) -> None:
        self.calls: list[list[BlockCall]] = [[] for _ in self.blocks]  # by block and batch
        self.deltas: list[Tensor] = []  # gradients of the present block's output, by batch
        self.losses: list[Tensor | None] = [None] * len(self.batches)  # ℓ_n, where a backward pass starts from them
        observed = [i for i, block in enumerate(self.blocks) if block.layers]
        self.lowest, self.highest = observed[0], observed[-1]
        self.forwards, self.backwards = 0, 0  # passes of all data through single blocks
        if self.gradients and self.extras is not None:
            self.highest = len(self.blocks) - 1  # the head's gradient is that of its output

    def capture(self) -> list[BlockStage]:
        """Cache arguments, inputs, and with gradients the last block's output gradient, for the first visit.

        Returns:
            The blocks from the lowest to the highest with layers to observe, in the order of visits.
        """
        if self.extras is not None:
            self.capture_arguments()
            self.capture_from(0)
        else:
            for index, batch in enumerate(self.batches):
                self._capture(index, batch)
                self.progress(1)
        trim_host_memory()
        order = range(self.lowest, self.highest + 1)
        return [BlockStage(self, i) for i in (reversed(order) if self.gradients else order)]

    def run_from(self, i: int, observer: PassObserver) -> None:
        """Observe an onloaded block, whose inputs are cached, with the gradients of the blocks behind it.

        `capture_arguments` has run; the inputs stay in the cache.
        """
        self.lowest = i
        self.capture_from(i)
        for j in range(self.highest, i, -1):
            stage = BlockStage(self, j)
            with stage.onloaded():
                stage.observe(None, True)
            for call in self.calls[j]:
                call.hidden = call.hidden.to("meta")
        BlockStage(self, i).observe(observer)

    def recut(self, batches: Sequence[Batch]) -> bool:
        """Continue with other batches of the same samples; False where the cached tensors do not have samples as rows.

        Arguments are captured anew, which computes no block.
        """
        if self.extras is None:
            return False
        earlier, before = self.calls, self.batches
        self.calls, self.batches = [[] for _ in self.blocks], batches
        self.capture_arguments(cached=())
        cached = [i for i, calls in enumerate(earlier) if calls and not any(call.hidden.is_meta for call in calls)]
        for i in cached:
            old, new = (_samples(calls[i], of) for calls, of in ((earlier, before), (self.calls, batches)))
            if old is None or old != new:
                self.calls, self.batches = earlier, before
                return False
        for i, calls in enumerate(earlier):
            if not calls:
                self.calls[i] = []  # its stage is done
            elif i in cached:
                states = self._cut([call.hidden for call in calls], f"{self.blocks[i].name}: inputs")
                for call, state in zip(self.calls[i], states, strict=True):
                    call.hidden = state
            calls.clear()
        self.deltas = self._cut(self.deltas, "output gradients") if self.deltas else []
        self.losses = [None] * len(batches)
        return True

    def _cut(self, tensors: list[Tensor], what: str) -> list[Tensor]:
        """Cached tensors of the earlier batches for the present ones; the list is emptied to free them in turn."""
        rows = deque(row for tensor in tensors for row in tensor)
        tensors.clear()
        count = map(batch_size, self.batches)
        return [self.storage.put(torch.stack([rows.popleft() for _ in range(size)]), what) for size in count]

    def capture_arguments(self, cached: Container[int] = (0,)) -> None:
        """The arguments of every block on every batch, and the inputs of some, while blocks return their input.

        The pass ends at the last block that is observed: the head is the largest product of a small model.
        """
        assert self.extras is not None
        keep = partial(self._keep, cached, self.highest)
        with torch.no_grad(), onloaded_in_turn(self.around), passing_on(self.blocks, self.extras):
            for batch in self.batches:
                self._run_hooked(to_device(batch, model_device(self.model)), keep)

    def _keep(
        self, cached: Container[int], last: int | None, i: int, _: nn.Module, args: tuple[Any, ...], kwargs: Any
    ) -> None:
        """A hook that stores the call of block i, with its hidden state if `cached`, and stops the pass at the last."""
        hidden, args, kwargs = split_hidden(args, without_caches(kwargs))
        state = hidden.detach()
        state = self.storage.put(state, f"{self.blocks[i].name}: inputs") if i in cached else state.to("meta")
        if self.calls[i]:  # masks and rotary tables repeat: tensors that equal the first batch's are shared with it
            earlier, first = list[Tensor](), self.calls[i][0]
            tree_map_only(Tensor, earlier.append, (first.args, first.kwargs))
            share = lambda t: next((e for e in earlier if e is t or _equal(e, t)), t)  # noqa: E731
            args, kwargs = tree_map_only(Tensor, share, (args, kwargs))
        self.calls[i].append(BlockCall(args, kwargs, state))
        if i == last:
            raise Stop

    def _run_hooked(self, batch: Batch, keep: Callable[..., None], lowest: int = 0) -> Any:
        """The output of the model on a batch on its device; blocks call `keep` before they run. None after `Stop`."""
        with ExitStack() as hooks:
            for i in range(lowest, self.highest + 1):
                module = self.blocks[i].module
                hooks.callback(module.register_forward_pre_hook(partial(keep, i), with_kwargs=True).remove)
            try:
                return run_model(self.model, batch)
            except Stop:
                return None

    def capture_from(self, first: int) -> None:
        """The inputs of the blocks behind the first, and with gradients the output gradient of the last one."""
        for i in range(first, self.highest + 1 if self.gradients else self.lowest):
            with self.blocks[i].onloaded():
                self.forward(i)
        for index, batch in enumerate(self.batches):
            if self.gradients:
                self.differentiate_head(index, batch)
            self.progress(1)

    @torch.no_grad()
    def forward(self, i: int) -> None:
        """Compute the inputs of the next block by an onloaded one, whose inputs stay cached if its stage needs them.

        With gradients, the outputs of the last block are in `deltas`, where their gradients will replace them.
        """
        self.forwards += 1
        block, outputs = self.blocks[i].module, list[Tensor]()
        device = next(block.parameters()).device
        for index, call in enumerate(self.calls[i]):
            args, kwargs = to_device(join_hidden(call.hidden, call), device)
            output = first_tensor(block(*args, **kwargs))
            if self.gradients and i == self.highest:
                outputs.append(self.storage.put(output, "output gradients"))
            elif self.gradients and i >= self.lowest:
                self.calls[i + 1][index].hidden = self.storage.put(output, f"{self.blocks[i + 1].name}: inputs")
            else:
                self.calls[i + 1][index].hidden = call.hidden.copy_(output)
        if outputs:  # of all batches: another call after a shortage of memory needs complete ones
            self.deltas = outputs
        if i < self.lowest:
            self.calls[i] = []

    def differentiate_head(self, index: int, batch: Batch) -> None:
        """The gradient of the last block's output on a batch, by the head alone; it replaces the output in `deltas`."""
        assert self.extras is not None
        device = model_device(self.model)
        batch = to_device(batch, device)
        last = self.deltas[index].to(device, copy=True).requires_grad_(True)
        with torch.enable_grad(), all_onloaded(self.around), passing_on(self.blocks, self.extras, lambda: last):
            output = run_model(self.model, batch)
            logits, gradient, self.losses[index] = loss_gradient(self.model, output, batch, self.loss)
            (delta,) = torch.autograd.grad(logits, [last], gradient)
        self.deltas[index].copy_(delta)

    def _capture(self, index: int, batch: Batch) -> None:
        """One forward pass of the whole model on a batch: arguments, inputs, and the head's gradient.

        With gradients, the graph starts behind the highest observed block; without, the pass ends there.
        """
        batch, tail = to_device(batch, model_device(self.model)), list[Tensor]()
        cached = range(len(self.blocks)) if self.gradients else (self.lowest,)
        keep = partial(self._keep, cached, None if self.gradients else self.highest)

        def cut(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            hidden = first_tensor(output).detach().requires_grad_(True)
            tail.append(hidden)
            return hidden if isinstance(output, Tensor) else (hidden, *output[1:])

        with ExitStack() as stack:
            if self.gradients:
                stack.callback(self.blocks[self.highest].module.register_forward_hook(cut).remove)
            # Other blocks may follow these: a decoder is a part of its encoder's graph.
            stack.enter_context(all_onloaded(self.around) if self.gradients else onloaded_in_turn(self.around))
            stack.enter_context(torch.set_grad_enabled(self.gradients))
            stack.enter_context(onloaded_in_turn(self.blocks))
            output = self._run_hooked(batch, keep, self.lowest)
            if self.gradients:
                logits, gradient, self.losses[index] = loss_gradient(self.model, output, batch, self.loss)
                (delta,) = torch.autograd.grad(logits, tail, gradient)
                self.deltas.append(self.storage.put(delta, "output gradients"))


def _samples(calls: Sequence[BlockCall], batches: Sequence[Batch]) -> list[torch.Size] | None:
    """The shape of the hidden state of every sample; None if some hidden states do not have samples as rows."""
    if any(len(call.hidden) != batch_size(batch) for call, batch in zip(calls, batches, strict=True)):
        return None
    return [row.shape for call in calls for row in call.hidden]


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)
