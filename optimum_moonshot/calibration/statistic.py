"""The interface of a layer's statistics, and how to add one.

The hooks of `Observer` convert every call of a layer to the normal form of model/layer_kinds.py and pass it to the
statistics in pieces. An `InputStatistic` needs the inputs only, and is shared by the layers that read the same tensor;
a `GradientStatistic` needs the output gradients too. `merge_statistics` (observer.py) merges the results of several
processes. To add a statistic, write a class, and pass it to the observer:

    Observer(layers, …, extra=(InputMean,))

Its result is then ``observer.take(layer).extra[InputMean]``.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..distributed.sharing import Merger
from ..errors import MoonshotError
from ..model.layers import PrunableLayer
from .storage import Storage

NOT_FINITE = "check the model's weights and dtype (float16 overflows; use bfloat16)"  # a hint
_NOT_MERGED = "it has no `{}`, so that several processes cannot share the data: write one, or use one process"


class InputStatistic(ABC):
    """A statistic of a layer's inputs, over all tokens except padding.

    Args:
        layer: the first of the layers that share it; all have its groups and its d_in.
        storage: allocates large tensors.
        device: of the inputs.
    """

    def __init__(self, layer: PrunableLayer, storage: Storage, device: torch.device):
        self.layer, self.storage, self.device = layer, storage, device

    @abstractmethod
    def add(self, inputs: Tensor, groups: slice) -> None:
        """Add the inputs of some tokens.

        Args:
            inputs: x, [groups, tokens, in] in float32; not to be changed.
            groups: the layer's groups that read them: all, or one expert alone.
        """

    def sums(self) -> Sequence[Tensor]:
        """The tensors that add up over processes with different samples.

        Raises:
            MoonshotError: this statistic cannot be merged.
        """
        raise MoonshotError(f"{type(self).__name__}: {_NOT_MERGED.format('sums')}")

    @abstractmethod
    def result(self) -> Any:
        """The statistic of all data."""


class GradientStatistic(ABC):
    """A statistic of a layer's inputs and output gradients, sample by sample.

    Args:
        layer: the layer.
        samples: N, calibration samples in all.
        storage: allocates large tensors.
    """

    def __init__(self, layer: PrunableLayer, samples: int, storage: Storage):
        self.layer, self.samples, self.storage = layer, samples, storage

    def begin(self, first: int, count: int) -> None:  # noqa: B027 optional
        """Begin a batch.

        Args:
            first: the index of its first sample among all.
            count: its samples.
        """

    @abstractmethod
    def add(self, inputs: Tensor, delta: Tensor, done: bool, groups: slice) -> None:
        """Add a piece of the batch; a layer that is called several times, or in strips, has several.

        Args:
            inputs: x, [samples, groups, tokens, in] in float32; not to be changed.
            delta: δ, [samples, groups, tokens, out] in float32, 0 at padding; not to be changed.
            done: whether it is the last piece of the batch.
            groups: the layer's groups that the piece belongs to: all, or one expert alone.
        """

    def end(self) -> None:  # noqa: B027 optional
        """End the batch."""

    def merge(self, merger: Merger) -> None:
        """Replace the result of this process's samples by the result of all samples.

        Args:
            merger: sums tensors, stacks them, or collects values over all processes.

        Raises:
            MoonshotError: this statistic cannot be merged.
        """
        raise MoonshotError(f"{type(self).__name__}: {_NOT_MERGED.format('merge')}")

    @abstractmethod
    def result(self) -> Any:
        """The statistic of all data."""
