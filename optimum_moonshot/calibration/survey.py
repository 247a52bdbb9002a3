"""A first look at a model whose blocks are elsewhere: one pass of a small sample, each block there for its own call.

It says whether the blocks are a chain, so that passes can go block by block over all data with one of them in memory,
and what the rest of the model does with them. `chains.is_chain` asks the same of a model that is there as a whole: it
compares the gradients of the blocks with the model's. Here a block is run again alone while it is there, and the
gradients are those of a model whose blocks give back what they read: wherever these reach the loss otherwise than by
the last block, the gradients differ from block to block.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from ..data.batches import Batch
from ..errors import MoonshotError, require
from ..model.calls import BlockCall, calling, close, first_tensor, join_hidden, run_model, split_hidden, without_caches
from ..model.layers import Block
from ..model.losses import Loss, loss_gradient
from ..model.presence import present_in_turn

Extras = list[int | None]  # what every block returns behind its hidden state: how many values, None for a bare tensor
_MEND = "load the model without offload to prune it"


def survey(
    model: nn.Module,
    blocks: tuple[Block, ...],
    batch: Batch,
    gradients: bool,
    loss: Loss | None,
    look: Callable[[Block], None] = lambda block: None,
) -> Extras:
    """Check that the blocks are a chain; each is brought once.

    Args:
        model: in evaluation mode; it stays as it is.
        blocks: all of its blocks.
        batch: a small sample on its device.
        gradients: whether passes will go backwards.
        loss: (output, batch) → [B] losses, or None for the model's own.
        look: told every block while its weights are there.

    Returns:
        What every block returns behind its hidden state.

    Raises:
        MoonshotError: passes block by block would not see what the model sees, with the reason.
    """
    looking = _Look(blocks, gradients, look)
    with ExitStack() as stack:
        for i, block in enumerate(blocks):
            stack.callback(block.module.register_forward_pre_hook(partial(looking.enter, i), with_kwargs=True).remove)
            stack.callback(block.module.register_forward_hook(partial(looking.leave, i), with_kwargs=True).remove)
        stack.enter_context(present_in_turn(blocks))
        stack.enter_context(torch.set_grad_enabled(gradients))
        try:
            run_model(model, batch)
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise MoonshotError(f"blocks without a hidden state among their arguments ({error}): {_MEND}") from None
    missing = [block.name for i, block in enumerate(blocks) if i not in looking.calls]
    require(not missing, f"{', '.join(missing[:3])}: no calibration data reaches them: {_MEND}")
    _check_around(model, blocks, batch, gradients, loss, looking)
    return [looking.extras[i] for i in range(len(blocks))]


class _Look:
    """Hooks of the first pass."""

    def __init__(self, blocks: tuple[Block, ...], gradients: bool, look: Callable[[Block], None]):
        self.blocks, self.gradients, self.look = blocks, gradients, look
        self.calls: dict[int, BlockCall] = {}
        self.extras: dict[int, int | None] = {}
        self.latest: Tensor | None = None  # what the block before returned
        self.alone = False  # a block is run again

    def enter(self, i: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.alone:
            return None
        name = self.blocks[i].name
        hidden, rest, named = split_hidden(args, kwargs)
        require(i == len(self.calls), f"{name}: it is not called in its turn, once: {_MEND}")
        require(i == 0 or hidden is self.latest, f"{name}: it does not read what the block before gives: {_MEND}")
        hidden = hidden.detach().requires_grad_(self.gradients)
        tensors = [each for each in tree_flatten((rest, named))[0] if isinstance(each, Tensor)]
        require(not any(each.requires_grad for each in tensors), f"{name}: it reads more of other blocks: {_MEND}")
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
                args, kwargs = join_hidden(call.hidden, call)
                again = first_tensor(module(*args, **kwargs))
        finally:
            self.alone = False
        call.hidden = call.hidden.detach()
        alike = again.shape == call.hidden.shape == self.latest.shape and close(again, self.latest.detach())
        require(alike, f"{name}: run alone it gives something else than in the model: {_MEND}")


def _check_around(
    model: nn.Module, blocks: tuple[Block, ...], batch: Batch, gradients: bool, loss: Loss | None, looking: _Look
) -> None:
    """The arguments of the blocks, and the gradients, where the blocks give back what they read."""
    calls: list[tuple[Any, ...]] = []
    hiddens: list[Tensor] = []

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden, rest, named = split_hidden(args, kwargs)
        if not calls and gradients:
            hidden = hidden.detach().requires_grad_(True)
        calls.append((rest, without_caches(named)))
        hiddens.append(hidden)
        return join_hidden(hidden, BlockCall(rest, named, hidden))

    with ExitStack() as stack:
        for i, block in enumerate(blocks):
            stack.callback(block.module.register_forward_pre_hook(enter, with_kwargs=True).remove)
            stack.enter_context(calling(block.module, partial(_pass_copy, looking.extras[i])))
        stack.enter_context(torch.set_grad_enabled(gradients))
        try:
            output = run_model(model, batch)
        except (MoonshotError, KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
            raise MoonshotError(f"the model reads more of its blocks than their hidden state: {_MEND}") from error
        for block, call, found in zip(blocks, calls, looking.calls.values(), strict=True):
            same = _alike(call, (found.args, found.kwargs))
            require(same, f"{block.name}: its arguments depend on what other blocks compute: {_MEND}")
        if gradients:
            logits, gradient, _ = loss_gradient(model, output, batch, loss)
            reached = logits.requires_grad
            deltas = torch.autograd.grad(logits, hiddens, gradient, allow_unused=True) if reached else (None,)
            alike = all(delta is not None and close(delta, deltas[-1]) for delta in deltas)
            require(alike, f"the loss depends on blocks otherwise than by the last one's output: {_MEND}")


def _pass_copy(extra: int | None, *args: Any, **kwargs: Any) -> Any:
    hidden = split_hidden(args, kwargs)[0].clone()
    return hidden if extra is None else (hidden, *[None] * extra)


def _alike(a: Any, b: Any) -> bool:
    """Whether the tensors of two trees are equal."""
    (left, shape), (right, other) = tree_flatten(a), tree_flatten(b)
    return shape == other and all(
        torch.equal(x, y) if isinstance(x, Tensor) and isinstance(y, Tensor) else type(x) is type(y)
        for x, y in zip(left, right, strict=True)
    )


@contextmanager
def passing_on(blocks: Sequence[Block], extras: Extras, last: Callable[[], Tensor] | None = None) -> Iterator[None]:
    """Meanwhile the blocks give back what they read and need no weights.

    Args:
        blocks: a chain.
        extras: of `survey`.
        last: gives what the last block returns in place of that.
    """
    with ExitStack() as stack:
        for block, extra in zip(blocks, extras, strict=True):
            stack.enter_context(calling(block.module, partial(_pass_on, extra, None)))
        if last is not None:
            stack.enter_context(calling(blocks[-1].module, partial(_pass_on, extras[-1], last)))
        yield


def _pass_on(extra: int | None, given: Callable[[], Tensor] | None, *args: Any, **kwargs: Any) -> Any:
    hidden = split_hidden(args, kwargs)[0] if given is None else given()
    return hidden if extra is None else (hidden, *[None] * extra)
