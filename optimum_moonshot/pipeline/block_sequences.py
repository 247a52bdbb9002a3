"""The sequential blocks of a model: each reads the output of the one before, so that they can be run one by one.

A model may have several sequences: an encoder and a decoder, a vision tower and a text model. Sequences in which
nothing is pruned are ignored.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from ..data.batches import Batch
from ..errors import MoonshotError
from ..model.calls import (
    Arguments,
    BlockCall,
    close,
    first_tensor,
    join_hidden,
    run_model,
    split_hidden,
    without_caches,
)
from ..model.layers import Block, onloaded_in_turn, visited
from ..model.losses import Loss, loss_gradient
from .block_probe import Extras, check_around


class BlockSequence(NamedTuple):
    """Sequential blocks, with those between them in which nothing is pruned."""

    blocks: tuple[Block, ...]
    extras: Extras | None  # with which they can return their input; None where their arguments depend on each other


class BlockSequences(NamedTuple):
    """The blocks of a model in which something is pruned."""

    sequential: list[BlockSequence]  # in the model's order
    non_sequential: tuple[Block, ...]  # called, but in no sequence
    unreached: tuple[Block, ...]  # not called by a forward pass


def find_block_sequences(
    model: nn.Module, blocks: tuple[Block, ...], batch: Batch, gradients: bool, loss: Loss | None
) -> BlockSequences:
    """The longest sequences: of all blocks, else of those that are called, else of the blocks of one list.

    The model is in evaluation mode and onloaded, the batch a small sample on its device. With `gradients`, input
    gradients must agree too.
    """
    wanted = tuple(block for block in blocks if block.layers)
    if not wanted:
        return BlockSequences([], (), ())
    if whole := find_sequence(model, blocks, batch, gradients, loss):
        return BlockSequences([whole], (), ())
    called = _called(model, blocks, batch)
    reached = tuple(block for block in blocks if block.name in called)
    unreached = tuple(block for block in wanted if block.name not in called)
    if not any(block.layers for block in reached):
        return BlockSequences([], (), unreached)
    if len(reached) < len(blocks) and (called_ones := find_sequence(model, reached, batch, gradients, loss)):
        return BlockSequences([called_ones], (), unreached)
    lists: dict[str, list[Block]] = {}
    for block in reached:
        lists.setdefault(block.name.rpartition(".")[0], []).append(block)
    sequential: list[BlockSequence] = []
    others: tuple[Block, ...] = ()
    for stack in map(tuple, lists.values()):
        pruned = tuple(block for block in stack if block.layers)
        tested = pruned and len(stack) < len(reached)
        if tested and (sequence := find_sequence(model, stack, batch, gradients, loss)):
            sequential.append(sequence)
        else:
            others += pruned
    return BlockSequences(sequential, others, unreached)


def _called(model: nn.Module, blocks: tuple[Block, ...], batch: Batch) -> set[str]:
    """The names of the blocks that a forward pass calls."""
    called: set[str] = set()
    handles = [block.module.register_forward_pre_hook(lambda *_, name=block.name: called.add(name)) for block in blocks]
    try:
        with torch.no_grad():
            run_model(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return called


def find_sequence(
    model: nn.Module, blocks: tuple[Block, ...], batch: Batch, gradients: bool, loss: Loss | None
) -> BlockSequence | None:
    """The sequence of blocks that compute the same one by one as in the model; None where they do not.

    Each block must be called once, read the output of the one before, and return the same output and the same input
    gradient when run again alone on its cached arguments. Arguments as for `find_block_sequences`.
    """
    calls, outputs, order = list[BlockCall](), list[Tensor](), list[int]()
    extras: Extras = []

    def enter(i: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        hidden, rest, named = split_hidden(args, kwargs)
        if gradients and not order:
            hidden = hidden.detach().requires_grad_(True)
        order.append(i)
        calls.append(BlockCall(rest, without_caches(named), hidden))
        return join_hidden(hidden, BlockCall(rest, named, hidden))

    def leave(i: int, _: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        outputs.append(first_tensor(output))
        extras.append(None if isinstance(output, Tensor) else len(output) - 1)
        if not gradients or i < len(blocks) - 1:
            return None
        # A pass cuts the graph here by another tensor, which the loss must read: feature maps are the block's own.
        outputs[-1] = outputs[-1].clone()
        return outputs[-1] if isinstance(output, Tensor) else (outputs[-1], *output[1:])

    with ExitStack() as stack:
        for i, block in enumerate(blocks):
            stack.callback(block.module.register_forward_pre_hook(partial(enter, i), with_kwargs=True).remove)
            stack.callback(block.module.register_forward_hook(partial(leave, i)).remove)
        stack.enter_context(torch.set_grad_enabled(gradients))
        try:
            result = run_model(model, batch)
        except (KeyError, IndexError, TypeError, AttributeError, MoonshotError):
            return None  # a block without a hidden state among its arguments
    if order != list(range(len(blocks))):
        return None
    if any(call.hidden is not before for call, before in zip(calls[1:], outputs[:-1], strict=True)):
        return None
    deltas = None
    if gradients:
        logits, gradient, _ = loss_gradient(model, result, batch, loss)
        if not logits.requires_grad:
            return None  # the loss depends on them by choices alone, which have no gradient
        deltas = torch.autograd.grad(logits, [calls[0].hidden, *outputs], gradient, allow_unused=True)
        if any(delta is None for delta in deltas):
            return None
    if not all(_runs_alone(block, calls[i], outputs[i], deltas, i) for i, block in enumerate(blocks)):
        return None
    try:
        check_around(model, blocks, batch, gradients, loss, extras, calls)
    except MoonshotError:
        return BlockSequence(blocks, None)
    return BlockSequence(blocks, extras)


def _runs_alone(block: Block, call: BlockCall, expected: Tensor, deltas: Sequence[Tensor] | None, i: int) -> bool:
    if expected.shape != call.hidden.shape:
        return False
    hidden = call.hidden.detach().requires_grad_(deltas is not None)
    args, kwargs = tree_map_only(Tensor, Tensor.detach, join_hidden(hidden, call))
    args, kwargs = join_hidden(hidden, BlockCall(args, kwargs, hidden))
    with torch.set_grad_enabled(deltas is not None):
        output = first_tensor(block.module(*args, **kwargs))
    if not close(output, expected):
        return False
    if deltas is None:
        return True
    (delta,) = torch.autograd.grad(output, [hidden], deltas[i + 1])
    return close(delta, deltas[i])


class _Reads(TorchFunctionMode):
    """Records the parameters among the arguments of functions."""

    def __init__(self) -> None:
        super().__init__()
        self.parameters: set[nn.Parameter] = set()

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        tree_map_only(nn.Parameter, self.parameters.add, (args, kwargs))
        return function(*args, **(kwargs or {}))


@torch.no_grad()
def parameters_read(model: nn.Module, batch: Batch) -> set[str]:
    """The names of parameters that a forward pass gives to any function, inside or outside of their module's call."""
    names: set[str] = set()

    def note() -> None:
        every = model.named_parameters(remove_duplicate=False)
        names.update(name for name, parameter in every if parameter in reads.parameters)

    @contextmanager
    def within(_: nn.Module) -> Iterator[None]:
        yield
        note()  # before its parameters are replaced by placeholders

    with _Reads() as reads, onloaded_in_turn(visited(model), within):
        run_model(model, batch)
    note()
    return names
