"""The statistics of a rotation's objective: H⁻¹ of every input, and the Fisher loss of each layer."""

from collections.abc import Sequence

from torch import Tensor

from ..calibration.statistic import GradientStatistic, Small
from ..calibration.storage import Storage
from ..model.layers import PrunableLayer
from ..objective.linalg import damped_inverse_factor, escalate
from .objective import Coordinates
from .spaces import Space

DAMPING = 0.01


class FisherAtZero(GradientStatistic):
    """``L_F(0) = 1/N Σ_n Σ_k (a_nk · w_k)²`` of a layer, the Fisher estimate of the model's loss without it.

    Because ``a_nk · w_k = Σ_t δ_tk (w_k · x_t)``, no weight gradients are needed.

    Args:
        layer: with its dense weight.
        samples: N, the number of calibration samples.
        storage: unused: the result is a number.
    """

    def __init__(self, layer: PrunableLayer, samples: int, storage: Storage):
        super().__init__(layer, samples, storage)
        self.total = 0.0
        self.products: Tensor | None = None

    def add(self, inputs: Tensor, delta: Tensor, done: bool, groups: slice) -> None:
        weight = self.layer.matrix.float().view(self.layer.groups, -1, self.layer.shape[1])
        products = (delta * (inputs @ weight[groups].mT)).sum(2)  # [samples, groups, out]
        if self.products is None:
            self.products = products.new_zeros(len(products), self.layer.groups, products.shape[2])
        self.products[:, groups] += products
        if done:
            self.total += float(self.products.double().square().sum()) / self.samples
            self.products = None

    def partial(self) -> Small:
        return Small(self.total)

    def combine(self, merged: Sequence[float]) -> None:
        self.total = sum(merged)

    def result(self) -> float:
        return self.total


def inverse(gram: Tensor, reads: Coordinates | None) -> Tensor:
    """The part of H⁻¹ that a rotation of the inputs needs, in float32: see `Group.inverse`.

    Args:
        gram: G of the inputs, [d_in, d_in].
        reads: the inputs' coordinates of a space; None if they keep their basis.

    Raises:
        FactorizationError: G is not positive semidefinite.
    """
    unit = float(gram.diagonal().double().mean())
    factor, _ = escalate(DAMPING, lambda damping: damped_inverse_factor(gram, unit, damping))
    if reads is None:
        return factor.square().sum(0).float()
    if reads.index is None:
        return (factor.mT @ factor).float()
    columns = factor.T[reads.index.to(factor.device)]  # [count, copies, width, d_in]
    return (columns @ columns.mT).float()


def coordinates(layer: PrunableLayer, spaces: Sequence[Space]) -> tuple[Coordinates | None, tuple[Coordinates, ...]]:
    """The coordinates of spaces on a layer's columns, and on its rows.

    Args:
        layer: a matrix, not a convolution.
        spaces: that may be rotated.
    """
    reads: list[Coordinates] = []
    writes: list[Coordinates] = []
    for space in spaces:
        for place in space.places:
            if place.at.holder in layer.modules and place.at.parameter is layer.parameter:
                axes = writes if place.at.axis == layer.axes[0] else reads
                axes.append(Coordinates(space, place.index))
    return (reads[0] if reads else None), tuple(writes)
