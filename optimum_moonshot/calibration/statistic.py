"""The interface of a layer's statistics, and how to add one.

The hooks of `Observer` convert every call of a layer to the normal form of model/layer_kinds.py and pass it on in
pieces. A statistic is a class that is made for a layer, sees all of its pieces, and has a result. One that needs the
inputs alone is an `InputStatistic`, shared by the layers that read the same tensor; one that needs the output gradients
too is a `GradientStatistic`. Its partial results of several processes are merged by merging.py. To add one, write the
class, in a file of its own, and name it where the observer is made:

    Observer(layers, …, extra=(InputMean,))

Its result is then in the layer's statistics, as ``observer.take(layer).extra[InputMean]``.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import MoonshotError
from ..model.layers import PrunableLayer
from .storage import Storage

NOT_FINITE = "check the model's weights and dtype (float16 overflows; use bfloat16)"  # a hint
_NOT_MERGED = "it has no `{}`, so that several processes cannot share the data: write one, or use one process"


@dataclass(frozen=True)
class Summed:
    """A partial result that adds up over the processes; its first axis has the layer's rows, or k for each."""

    tensor: Tensor


@dataclass(frozen=True)
class Stacked:
    """A partial result with one entry per sample, [n, rows, …] of the n samples of this process."""

    tensor: Tensor
    samples: int  # N, of all processes
    empty: Callable[[tuple[int, ...]], Tensor]  # makes the memory of the result, by its shape


@dataclass(frozen=True)
class Small:
    """A partial result that all processes get from each other, by rank: any value that `pickle` takes."""

    value: Any


class InputStatistic(ABC):
    """Of what a layer reads, over all tokens that count.

    Args:
        layer: the first of those that share it; all have its groups and its d_in.
        storage: where large tensors live.
        device: where the inputs are.
    """

    def __init__(self, layer: PrunableLayer, storage: Storage, device: torch.device):
        self.layer, self.storage, self.device = layer, storage, device

    @abstractmethod
    def add(self, inputs: Tensor, groups: slice) -> None:
        """Some tokens' inputs.

        Args:
            inputs: x, [groups, tokens, in] in float32; not to be changed.
            groups: which of the layer's they are of: all, or one expert alone.
        """

    def sums(self) -> Sequence[Tensor]:
        """The tensors that add up over processes, each of which has seen samples of its own.

        Raises:
            MoonshotError: this statistic cannot be merged.
        """
        raise MoonshotError(f"{type(self).__name__}: {_NOT_MERGED.format('sums')}")

    @abstractmethod
    def result(self) -> Any:
        """What the data gave, once all of it has passed."""


class GradientStatistic(ABC):
    """Of what a layer reads and the gradients at what it gives, sample by sample.

    Args:
        layer: the layer.
        samples: N, calibration samples in all.
        storage: where large tensors live.
    """

    def __init__(self, layer: PrunableLayer, samples: int, storage: Storage):
        self.layer, self.samples, self.storage = layer, samples, storage

    def begin(self, first: int, count: int) -> None:  # noqa: B027 not all need to know
        """A batch follows.

        Args:
            first: the number of its first sample among all.
            count: its samples.
        """

    @abstractmethod
    def add(self, inputs: Tensor, delta: Tensor, done: bool, groups: slice) -> None:
        """A piece of the batch; a layer that is called several times, or in strips, has the sum of its pieces.

        Args:
            inputs: x, [samples, groups, tokens, in] in float32; not to be changed.
            delta: δ, [samples, groups, tokens, out] in float32, 0 at padding; not to be changed.
            done: no other piece of this batch follows.
            groups: which of the layer's the piece is of: all, or one expert alone.
        """

    def end(self) -> None:  # noqa: B027
        """The batch is over."""

    def partial(self) -> Summed | Stacked | Small:
        """The result of this process's samples, for others.

        Raises:
            MoonshotError: this statistic cannot be merged.
        """
        raise MoonshotError(f"{type(self).__name__}: {_NOT_MERGED.format('partial')}")

    def combine(self, merged: Any) -> None:  # noqa: B027
        """Take the result of all processes.

        Args:
            merged: the tensor of `Summed` or `Stacked` for all samples, perhaps of some rows; the values of `Small`.
        """

    @abstractmethod
    def result(self) -> Any:
        """What the data gave, once all of it has passed."""
