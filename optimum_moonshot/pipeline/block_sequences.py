"""The sequential blocks of a model: the input of each is the output of the previous one, so that they can run alone.

There are two probes, because a graph cannot span blocks that are onloaded one at a time:

* `find_sequence`, of a model in memory, compares the input gradient of every block, run alone, with the model's. It
  therefore also accepts blocks whose arguments depend on what other blocks compute, and tries parts of the model.
* `probe_blocks`, of an offloaded model, onloads every block once, and runs it again alone then. Its gradients are those
  of a model whose blocks return their input: if these reach the loss otherwise than by the last block, they differ from
  block to block. It accepts all blocks or raises the reason, since no pass of the whole model could replace them.

A model may have several sequences: an encoder and a decoder, a vision tower and a text model. Sequences in which
nothing is pruned are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map_only

from ..data.batches import Batch, batch_size, take
from ..errors import MoonshotError, require
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
from ..model.layers import Block, onloaded_in_turn, visited
from ..model.losses import Loss, loss_gradient, token_mask
from ..model.weight_sums import function_values
from .calibration_data import calls_seen, unlike

Extras = list[int | None]  # the number of values that each block returns behind its hidden state; None: a bare tensor
_HINT = "load the model without `offload` to prune it"


class BlockSequence(NamedTuple):
    """Sequential blocks; some of them may have no pruned layer."""

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
    """The longest sequences: of all blocks, else of all blocks that are called, else of the blocks of one list.

    The model is in evaluation mode and onloaded, the batch a small sample on its device. With `gradients`, input
    gradients must agree too.
    """
    pruned = tuple(block for block in blocks if block.layers)
    if not pruned:
        return BlockSequences([], (), ())
    if whole := find_sequence(model, blocks, batch, gradients, loss):
        return BlockSequences([whole], (), ())
    called = _called(model, blocks, batch)
    reached = tuple(block for block in blocks if block.name in called)
    unreached = tuple(block for block in pruned if block.name not in called)
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
    gradient when run again alone on its cached arguments. The model is in evaluation mode and onloaded, `batch` a small
    sample on its device. With `gradients`, input gradients must agree too.
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
            (values, form), (others, of_first) = tree_flatten(call), tree_flatten((first.args, first.kwargs))
            same = form == of_first and all(
                torch.equal(x, y) if isinstance(x, Tensor) and isinstance(y, Tensor) else type(x) is type(y)
                for x, y in zip(values, others, strict=True)
            )
            require(same, f"{block.name}: its arguments depend on what other blocks compute", hint=_HINT)
        if gradients:
            logits, gradient, _ = loss_gradient(model, output, batch, loss)
            reached = logits.requires_grad
            deltas = torch.autograd.grad(logits, hiddens, gradient, allow_unused=True) if reached else (None,)
            last = deltas[-1]
            alike = last is not None and all(delta is not None and close(delta, last) for delta in deltas)
            require(alike, "the loss depends on blocks otherwise than by the last one's output", hint=_HINT)


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


def probe_blocks(
    model: nn.Module,
    blocks: tuple[Block, ...],
    batch: Batch,
    gradients: bool,
    loss: Loss | None,
    visit: Callable[[Block], None] = lambda block: None,
) -> tuple[Extras, list[str], dict[str, str]]:
    """Check that all blocks of a model in evaluation mode are sequential, by a batch of one or two small samples.

    Each block is onloaded once, and `visit` called with it. Returns the blocks' extras; the layers whose inputs do not
    show which of two samples they belong to, as `unshown_samples`; and the `function_values` of the model.

    Raises:
        MoonshotError: passes block by block would differ from the model, with the reason.
    """
    hooks = _ProbeHooks(blocks, batch, gradients, visit)
    if hooks.samples > 1:
        second = without_weights(model, blocks, take(batch, 1, 2))
        hooks.second = None if second is None else second.arguments
    with ExitStack() as stack:
        for i, block in enumerate(blocks):
            stack.callback(block.module.register_forward_pre_hook(partial(hooks.before, i), with_kwargs=True).remove)
            stack.callback(block.module.register_forward_hook(partial(hooks.after, i), with_kwargs=True).remove)
        stack.enter_context(onloaded_in_turn(blocks))
        stack.enter_context(torch.set_grad_enabled(gradients))
        try:
            output = run_model(model, batch)
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise MoonshotError(f"blocks without a hidden state among their arguments ({error})", hint=_HINT) from None
    missing = [block.name for i, block in enumerate(blocks) if i not in hooks.calls]
    require(not missing, f"{', '.join(missing[:3])}: no calibration data reaches them", hint=_HINT)
    extras = list(hooks.extras.values())  # in the blocks' order
    check_around(model, blocks, batch, gradients, loss, extras, list(hooks.calls.values()))
    function = function_values(model, output, batch, loss if gradients else None)
    return extras, hooks.unshown, function


class _ProbeHooks:
    """The hooks of `probe_blocks`, before and after the call of every block."""

    def __init__(self, blocks: tuple[Block, ...], batch: Batch, gradients: bool, visit: Callable[[Block], None]):
        self.blocks, self.gradients, self.visit = blocks, gradients, visit
        self.mask, self.samples = token_mask(batch), batch_size(batch)
        self.unshown: list[str] = []
        self.second: list[Arguments] | None = None  # every block's arguments for the second of two samples
        self.calls: dict[int, BlockCall] = {}
        self.extras: dict[int, int | None] = {}
        self.latest: Tensor | None = None  # output of the previous block
        self.alone = False  # whether a block is run again

    def before(self, i: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.alone:
            return None
        name = self.blocks[i].name
        hidden, rest, named = split_hidden(args, kwargs)
        require(i == len(self.calls), f"{name}: it is not called once, in the order of the blocks", hint=_HINT)
        require(
            i == 0 or hidden is self.latest, f"{name}: its input is not the output of the previous block", hint=_HINT
        )
        hidden = hidden.detach().requires_grad_(self.gradients)
        tensors = [value for value in tree_flatten((rest, named))[0] if isinstance(value, Tensor)]
        alone = not any(tensor.requires_grad for tensor in tensors)
        require(alone, f"{name}: it depends on more of other blocks than their hidden state", hint=_HINT)
        self.calls[i] = BlockCall(rest, without_caches(named), hidden)
        return join_hidden(hidden, BlockCall(rest, named, hidden))

    def after(self, i: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self.alone:
            return
        self.latest = first_tensor(output)
        self.extras[i] = None if isinstance(output, Tensor) else len(output) - 1
        name, call = self.blocks[i].name, self.calls[i]
        self.visit(self.blocks[i])
        self.alone = True
        try:
            with torch.no_grad():
                again = self._again(i, module, call)
        finally:
            self.alone = False
        call.hidden = call.hidden.detach()
        alike = again.shape == call.hidden.shape == self.latest.shape and close(again, self.latest.detach())
        require(alike, f"{name}: run alone, its output differs from that in the model", hint=_HINT)

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
        hiddens: list[Tensor] = []

        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden, rest, named = split_hidden(args, kwargs)
            arguments.append((rest, without_caches(named)))  # noqa: B023
            hiddens.append(hidden)  # noqa: B023

        with ExitStack() as stack, suppress(MoonshotError, KeyError, IndexError, TypeError, AttributeError, ValueError):
            for block in blocks:
                stack.callback(block.module.register_forward_pre_hook(enter, with_kwargs=True).remove)
            extras: Extras = [extra] * len(blocks)
            stack.enter_context(passing_on(blocks, extras))
            run_model(model, batch)
            chained = all(hidden is hiddens[0] for hidden in hiddens)  # each block has returned it
            if len(arguments) == len(blocks) and chained:
                return Unweighted(extras, arguments)
    return None


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
