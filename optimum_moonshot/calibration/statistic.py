"""What a statistic of a layer is, and how to add one.

The hooks of `Observer` bring every call of a layer to the normal form of model/layer_adapters.py and hand it on in pieces.
What is made of the pieces is a statistic: a class that is made for a layer, sees all of its pieces, and has a result. One
that needs the inputs alone is an `InputStatistic`, shared by the layers that read the same tensor; one that needs the
output gradients too is a `GradientStatistic`. To add one, write the class, in a file of its own, and name it where the
observer is made:

    Observer(layers, …, extra=(InputMean,))

Its result is then in the layer's statistics, as ``observer.take(layer).extra[InputMean]``.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..distributed.ranks import Ranks
from ..errors import MoonshotError
from ..model.layers import PrunableLayer
from .storage import Storage

_NOT_MERGED = "it has no `merge`, so that several processes cannot share the data: write one, or use one process"


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

    def merge(self, ranks: Ranks) -> None:
        """Take in what all processes have seen, once the data have passed.

        Args:
            ranks: several, each of which has seen samples of its own.

        Raises:
            MoonshotError: this statistic cannot.
        """
        raise MoonshotError(f"{type(self).__name__}: {_NOT_MERGED}")

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

    def merge(self, ranks: Ranks, owner: int | None) -> None:
        """As `InputStatistic.merge`.

        Args:
            ranks: several processes.
            owner: the only one who needs the result; None is all.

        Raises:
            MoonshotError: this statistic cannot.
        """
        raise MoonshotError(f"{type(self).__name__}: {_NOT_MERGED}")

    def divide(self, ranks: Ranks, rows: Sequence[slice]) -> None:
        """As `merge`, where each process needs the result of some of the layer's rows.

        Args:
            ranks: several processes.
            rows: of each, by rank.

        Raises:
            MoonshotError: this statistic cannot.
        """
        raise MoonshotError(f"{type(self).__name__}: {_NOT_MERGED}")

    @abstractmethod
    def result(self) -> Any:
        """What the data gave, once all of it has passed."""
