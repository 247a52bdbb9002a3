"""A first pass of a model whose blocks are offloaded: a small sample, each block onloaded for its call alone.

It checks whether the blocks are sequential, so that passes can run block by block over all data with one of them in
memory, as `block_sequences.is_sequential` does for a model that is onloaded, which compares the gradients of the blocks
with the model's. Here a block is run again alone while it is onloaded, and the gradients are those of a model whose
blocks return their input: if these reach the loss otherwise than by the last block, they differ from block to block.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from ..calibration.samples import calls_seen, unlike
from ..data.batches import Batch, batch_size, take
from ..errors import MoonshotError, Text, require
from ..model.calls import (
    Arguments,
    BlockCall,
    close,
    first_tensor,
    join_hidden,
    replace_call,
    run_model,
    split_hidden,
    without_caches,
)
from ..model.layers import Block, onloaded_in_turn
from ..model.losses import Loss, loss_gradient, token_mask
from ..model.weight_sums import function_values

Extras = list[int | None]  # the number of values that each block returns behind its hidden state; None: a bare tensor
_HINT = Text("load the model without {} to prune it", "offload")


def probe_blocks(
    model: nn.Module,
    blocks: tuple[Block, ...],
    batch: Batch,
    gradients: bool,
    loss: Loss | None,
    look: Callable[[Block], None] = lambda block: None,
) -> tuple[Extras, list[str], dict[str, str]]:
    """Check that all blocks of a model in evaluation mode are sequential, by a batch of one or two small samples.

    Each block is onloaded once, and `look` called with it. Returns the blocks' extras; of two samples, as
    `unshown_samples`; and `function_values`.

    Raises:
        MoonshotError: passes block by block would differ from the model, with the reason.
    """
    looking = _Look(blocks, batch, gradients, look)
    if looking.samples > 1:
        second = without_weights(model, blocks, take(batch, 1, 2))
        looking.second = None if second is None else second.arguments
    with ExitStack() as stack:
        for i, block in enumerate(blocks):
            stack.callback(block.module.register_forward_pre_hook(partial(looking.enter, i), with_kwargs=True).remove)
            stack.callback(block.module.register_forward_hook(partial(looking.leave, i), with_kwargs=True).remove)
        stack.enter_context(onloaded_in_turn(blocks))
        stack.enter_context(torch.set_grad_enabled(gradients))
        try:
            output = run_model(model, batch)
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise MoonshotError(f"blocks without a hidden state among their arguments ({error})", hint=_HINT) from None
    missing = [block.name for i, block in enumerate(blocks) if i not in looking.calls]
    require(not missing, f"{', '.join(missing[:3])}: no calibration data reaches them", hint=_HINT)
    extras = list(looking.extras.values())  # in the blocks' order
    check_around(model, blocks, batch, gradients, loss, extras, list(looking.calls.values()))
    function = function_values(model, output, batch, loss if gradients else None)
    return extras, looking.unshown, function


class _Look:
    """Hooks of the first pass."""

    def __init__(self, blocks: tuple[Block, ...], batch: Batch, gradients: bool, look: Callable[[Block], None]):
        self.blocks, self.gradients, self.look = blocks, gradients, look
        self.mask, self.samples = token_mask(batch), batch_size(batch)
        self.unshown: list[str] = []
        self.second: list[Arguments] | None = None  # every block's arguments for the second of two samples
        self.calls: dict[int, BlockCall] = {}
        self.extras: dict[int, int | None] = {}
        self.latest: Tensor | None = None  # output of the block before
        self.alone = False  # a block is run again

    def enter(self, i: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.alone:
            return None
        name = self.blocks[i].name
        hidden, rest, named = split_hidden(args, kwargs)
        require(i == len(self.calls), f"{name}: it is not called in its turn, once", hint=_HINT)
        require(i == 0 or hidden is self.latest, f"{name}: it does not read what the block before gives", hint=_HINT)
        hidden = hidden.detach().requires_grad_(self.gradients)
        tensors = [each for each in tree_flatten((rest, named))[0] if isinstance(each, Tensor)]
        require(not any(each.requires_grad for each in tensors), f"{name}: it reads more of other blocks", hint=_HINT)
        self.calls[i] = BlockCall(rest, without_caches(named), hidden)
        return join_hidden(hidden, BlockCall(rest, named, hidden))

    def leave(self, i: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self.alone:
            return
        self.latest = first_tensor(output)
        self.extras[i] = None if isinstance(output, Tensor) else len(output) - 1
        name, call = self.blocks[i].name, self.calls[i]
        self.look(self.blocks[i])
        self.alone = True
        try:
            with torch.no_grad():
                again = self._again(i, module, call)
        finally:
            self.alone = False
        call.hidden = call.hidden.detach()
        alike = again.shape == call.hidden.shape == self.latest.shape and close(again, self.latest.detach())
        require(alike, f"{name}: run alone it gives something else than in the model", hint=_HINT)

    def _again(self, i: int, module: nn.Module, call: BlockCall) -> Tensor:
        """The output of a block that runs again; of two samples, its layers are compared with the second alone."""
        layers, outputs = self.blocks[i].layers, list[Tensor]()

        def run(hidden: Tensor, arguments: Arguments) -> None:
            args, kwargs = join_hidden(hidden, BlockCall(*arguments, hidden))
            outputs.append(first_tensor(module(*args, **kwargs)))

        both = calls_seen(layers, self.mask, self.samples, partial(run, call.hidden, (call.args, call.kwargs)))
        if self.samples > 1 and self.second is None:
            self.unshown += [layer.name for layer in layers]
        elif self.second is not None:
            mask, hidden = None if self.mask is None else self.mask[1:], call.hidden[len(call.hidden) // 2 :]
            alone = calls_seen(layers, mask, 1, partial(run, hidden, self.second[i]))
            self.unshown += unlike(layers, both, alone)
        return outputs[0]


class Unweighted(NamedTuple):
    """A pass of a model whose blocks returned their input."""

    extras: Extras  # with which they could
    arguments: list[Arguments]  # of every block


@torch.no_grad()
def without_weights(model: nn.Module, blocks: Sequence[Block], batch: Batch) -> Unweighted | None:
    """The arguments of all blocks, without their weights and outputs; None where the model does not allow it."""
    for extra in (None, 0, 1, 2, 3):
        arguments: list[Arguments] = []
        shapes: set[torch.Size] = set()

        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden, rest, named = split_hidden(args, kwargs)
            arguments.append((rest, without_caches(named)))  # noqa: B023
            shapes.add(hidden.shape)  # noqa: B023

        with ExitStack() as stack, suppress(MoonshotError, KeyError, IndexError, TypeError, AttributeError, ValueError):
            for block in blocks:
                stack.callback(block.module.register_forward_pre_hook(enter, with_kwargs=True).remove)
            extras: Extras = [extra] * len(blocks)
            stack.enter_context(passing_on(blocks, extras))
            run_model(model, batch)
            if len(arguments) == len(blocks) and len(shapes) == 1:
                return Unweighted(extras, arguments)
    return None


def check_around(
    model: nn.Module,
    blocks: tuple[Block, ...],
    batch: Batch,
    gradients: bool,
    loss: Loss | None,
    extras: Extras,
    expected: Sequence[BlockCall],
) -> None:
    """Check that blocks which return their input have the `expected` arguments, and the head the last one's gradient.

    Raises:
        MoonshotError: the arguments, or the loss, depend on what blocks compute.
    """
    calls: list[Arguments] = []
    hiddens: list[Tensor] = []

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden, rest, named = split_hidden(args, kwargs)
        if not calls and gradients:
            hidden = hidden.detach().requires_grad_(True)
        hidden = hidden.clone()  # another tensor for each block, to have a gradient
        calls.append((rest, without_caches(named)))
        hiddens.append(hidden)
        return join_hidden(hidden, BlockCall(rest, named, hidden))

    with ExitStack() as stack:
        for block in blocks:
            stack.callback(block.module.register_forward_pre_hook(enter, with_kwargs=True).remove)
        stack.enter_context(passing_on(blocks, extras))
        stack.enter_context(torch.set_grad_enabled(gradients))
        try:
            output = run_model(model, batch)
        except (MoonshotError, KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
            raise MoonshotError("the model reads more of its blocks than their hidden state", hint=_HINT) from error
        require(len(calls) == len(blocks), "the model calls other blocks where these return their input", hint=_HINT)
        for block, call, first in zip(blocks, calls, expected, strict=True):
            same = _alike(call, (first.args, first.kwargs))
            require(same, f"{block.name}: its arguments depend on what other blocks compute", hint=_HINT)
        if gradients:
            logits, gradient, _ = loss_gradient(model, output, batch, loss)
            reached = logits.requires_grad
            deltas = torch.autograd.grad(logits, hiddens, gradient, allow_unused=True) if reached else (None,)
            last = deltas[-1]
            alike = last is not None and all(delta is not None and close(delta, last) for delta in deltas)
            require(alike, "the loss depends on blocks otherwise than by the last one's output", hint=_HINT)


def _alike(a: Any, b: Any) -> bool:
    """Whether the tensors of two trees are equal."""
    (left, shape), (right, other) = tree_flatten(a), tree_flatten(b)
    return shape == other and all(
        torch.equal(x, y) if isinstance(x, Tensor) and isinstance(y, Tensor) else type(x) is type(y)
        for x, y in zip(left, right, strict=True)
    )


@contextmanager
def passing_on(blocks: Sequence[Block], extras: Extras, last: Callable[[], Tensor] | None = None) -> Iterator[None]:
    """Meanwhile sequential blocks return their input, or the last one `last()`, and need no weights."""
    with ExitStack() as stack:
        for block, extra in zip(blocks, extras, strict=True):
            replace_call(block.module, partial(_pass_on, extra, None), stack)
        if last is not None:
            replace_call(blocks[-1].module, partial(_pass_on, extras[-1], last), stack)
        yield


def _pass_on(extra: int | None, replacement: Callable[[], Tensor] | None, *args: Any, **kwargs: Any) -> Any:
    hidden = split_hidden(args, kwargs)[0] if replacement is None else replacement()
    return hidden if extra is None else (hidden, *[None] * extra)
