"""The weights of the calibration tokens in a Fisher term that the rows of a layer share, from the dense model.

The term is Σ_t s_t x_t x_tᵀ with s_t = mean_k δ_tk² (GuidedQuant, arXiv 2505.07004). Of the gradients δ_t of a layer's
output it depends on one number a token. So the s_t of all layers are collected by one backward pass of the dense model,
in 4 bytes a token and layer, and multiply the inputs x_t of the pruned prefix later: statistics that are recomputed
behind pruned blocks need no backward pass of their own.
"""

import torch
from torch import Tensor

from ..distributed.sharing import Merger
from ..model.layers import PrunableLayer
from .statistic import GradientStatistic
from .storage import Storage


class TokenWeights(GradientStatistic):
    """√s_t of all tokens of the samples that this process reads, and Σ_t δ_tk² of the rows of all samples."""

    def __init__(self, layer: PrunableLayer, samples: int, storage: Storage):
        super().__init__(layer, samples, storage)
        self.roots: list[Tensor] = []  # [T], by sample
        self.row_squares = torch.zeros(layer.shape[0], device=layer.parameter.device)  # [d_out]

    def add(self, inputs: Tensor, delta: Tensor, done: bool, groups: slice) -> None:
        squares = delta[:, 0].square()
        self.roots += squares.mean(-1).sqrt_()
        self.row_squares += squares.sum((0, 1))

    def merge(self, merger: Merger) -> None:
        """The roots stay with the process that reads the samples; it reads them in the pruned model too."""
        self.row_squares = merger.summed(self.row_squares)

    def result(self) -> "TokenWeights":
        return self

    @property
    def lengths(self) -> list[int]:
        """The tokens of every sample, in the order of the calls: one for each sample if the layer is called once."""
        return [len(roots) for roots in self.roots]

    def roots_of(self, first: int, count: int) -> Tensor:
        """√s_t of a batch of samples, [samples, T, 1]."""
        return torch.stack(self.roots[first : first + count])[..., None]

    @property
    def row_shares(self) -> Tensor:
        """Σ_t δ_tk² relative to its mean over the rows, [d_out]; 1 where all are 0."""
        mean = self.row_squares.mean()
        return self.row_squares / mean if mean > 0 else self.row_squares + 1
