"""Where a block's weights are: in the model all the time, or there for the time of a step alone.

Whoever reads a block's weights, or runs the block, does it under ``with block.onloaded():``. What that brings and takes
away is a matter of the block's `Weights`. So a model's blocks may lie on disk, in host memory or on another device, and
those who calibrate, solve, recover and write need not know.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Protocol

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


class Weights(Protocol):
    """Where a block's weights come from."""

    def onloaded(self) -> AbstractContextManager[None]:
        """A context in which the block's parameters hold its weights; what was written to them is kept on exit.

        It may be entered again inside of itself.
        """


class Resident:
    """The weights are in the model all the time."""

    def onloaded(self) -> AbstractContextManager[None]:
        return nullcontext()


RESIDENT = Resident()


class Block(Protocol):
    """What is asked here of a block (`layers.Block`)."""

    @property
    def module(self) -> nn.Module:
        """The module that repeats."""

    @property
    def weights(self) -> Weights:
        """Where its weights come from."""


def by_module(blocks: Sequence[Block]) -> dict[nn.Module, Weights]:
    """Where the weights of every module inside of some blocks come from.

    Args:
        blocks: of a model.
    """
    return {module: block.weights for block in blocks for module in block.module.modules()}


# A context to be in as long as a module's weights are present.
Within = Callable[[nn.Module], AbstractContextManager[Any]]


@contextmanager
def onloaded_in_turn(blocks: Sequence[Block], within: Within | None = None) -> Iterator[None]:
    """While the model runs as a whole, forwards, each block's weights are present for the time of its call.

    Args:
        blocks: of the model.
        within: a context for each call of a block whose weights come for it.
    """
    with ExitStack() as stack:
        for block in blocks:
            if block.weights is not RESIDENT:
                _bring_for_calls(block, stack, within)
        yield


@contextmanager
def differentiated_in_turn(blocks: Sequence[Block], within: Within | None = None) -> Iterator[None]:
    """As `onloaded_in_turn`, for a run that gradients are asked of afterwards.

    The graph keeps what it needs of the weights for itself: without the hooks here it holds the parameters, which are
    empty once their block's call is over.

    Args:
        blocks: of the model.
        within: a context for each call of a block whose weights come for it.
    """
    away = any(block.weights is not RESIDENT for block in blocks)
    with saved_tensors_hooks(_alias, _same) if away else nullcontext(), onloaded_in_turn(blocks, within):
        yield


def _alias(tensor: Tensor) -> Tensor:
    return tensor.detach() if isinstance(tensor, nn.Parameter) else tensor


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _bring_for_calls(block: Block, stack: ExitStack, within: Within | None) -> None:
    held: list[ExitStack] = []

    def enter(*_: Any) -> None:
        with ExitStack() as inside:
            inside.enter_context(block.weights.onloaded())
            if within is not None:
                inside.enter_context(within(block.module))
            held.append(inside.pop_all())

    def leave(*_: Any) -> None:
        held.pop().close()

    def end() -> None:  # of a call that failed
        for inside in reversed(held):
            inside.close()

    stack.callback(end)
    stack.callback(block.module.register_forward_pre_hook(enter, prepend=True).remove)
    stack.callback(block.module.register_forward_hook(leave).remove)


@contextmanager
def all_onloaded(blocks: Sequence[Block]) -> Iterator[None]:
    """Every block's weights at once, for passes that need the whole model forwards and backwards."""
    with ExitStack() as stack:
        for block in blocks:
            stack.enter_context(block.weights.onloaded())
        yield
