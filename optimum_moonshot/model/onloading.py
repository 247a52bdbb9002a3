"""Weights that are in the model all the time, or onloaded for the time of a step.

Code that reads a block's weights, or runs the block, does it under ``with block.onloaded():``. The block's `Weights`
decides what that loads, so calibration, solvers and recovery need not know whether a model is on disk, in host memory
or on the device. Code that writes a weight declares it (`offload.mark_written`): other changes are dropped on exit.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Protocol

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


class Weights(Protocol):
    """The weights of a block."""

    def onloaded(self) -> AbstractContextManager[None]:
        """A context in which the block's parameters hold its weights. Reentrant."""


class Resident:
    """Weights that are in the model all the time."""

    def onloaded(self) -> AbstractContextManager[None]:
        return nullcontext()


RESIDENT = Resident()


class Onloadable(Protocol):
    """A module with its weights, such as `layers.Block`."""

    @property
    def module(self) -> nn.Module: ...

    @property
    def weights(self) -> Weights: ...


# A context around each call of a module while its weights are onloaded.
Within = Callable[[nn.Module], AbstractContextManager[Any]]


def by_module(blocks: Sequence[Onloadable]) -> dict[nn.Module, Weights]:
    """The weights that each module inside of some blocks belongs to."""
    return {module: block.weights for block in blocks for module in block.module.modules()}


@contextmanager
def onloaded_in_turn(blocks: Sequence[Onloadable], within: Within | None = None) -> Iterator[None]:
    """While the whole model runs forward, each offloaded block's weights are onloaded for its call, inside `within`."""
    with ExitStack() as stack:
        for block in blocks:
            if block.weights is not RESIDENT:
                _onload_for_calls(block, stack, within)
        yield


@contextmanager
def differentiated_in_turn(blocks: Sequence[Onloadable], within: Within | None = None) -> Iterator[None]:
    """As `onloaded_in_turn`, for a forward pass that gradients are computed of afterwards.

    The hooks keep the data that the graph saved of each parameter alive: the parameter itself is empty after the call.
    """

    def alias(tensor: Tensor) -> Tensor:
        return tensor.detach() if isinstance(tensor, nn.Parameter) else tensor

    offloaded = any(block.weights is not RESIDENT for block in blocks)
    saved = saved_tensors_hooks(alias, lambda tensor: tensor) if offloaded else nullcontext()
    with saved, onloaded_in_turn(blocks, within):
        yield


def _onload_for_calls(block: Onloadable, stack: ExitStack, within: Within | None) -> None:
    calls: list[ExitStack] = []  # of the calls in progress

    def enter(*_: Any) -> None:
        with ExitStack() as inside:
            inside.enter_context(block.weights.onloaded())
            if within is not None:
                inside.enter_context(within(block.module))
            calls.append(inside.pop_all())

    def leave(*_: Any) -> None:
        calls.pop().close()

    def end() -> None:  # after a call that failed
        for inside in reversed(calls):
            inside.close()

    stack.callback(end)
    stack.callback(block.module.register_forward_pre_hook(enter, prepend=True).remove)
    stack.callback(block.module.register_forward_hook(leave).remove)


@contextmanager
def all_onloaded(blocks: Sequence[Onloadable]) -> Iterator[None]:
    """All blocks' weights at once, for backward passes of the whole model."""
    with ExitStack() as stack:
        for block in blocks:
            stack.enter_context(block.weights.onloaded())
        yield
