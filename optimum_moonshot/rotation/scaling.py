"""Units for rows that are compared with each other: each in that of the model's loss.

A solver that compares the weights of several rows takes their scores as they are, and so a unit of every output for
equally dear. What one costs the model is ``D_k = Σ δ_k²`` of its gradients (as in K-FAC, Martens and Grosse, arXiv
1503.05671). Where a factor on a row comes out again at a column behind it, up with down, v with o, the row is
multiplied by ``√D_k`` and the column divided: their products stay, and scores of the row are then in units of the loss.
The columns' scores ``w² / [H⁻¹]`` do not change.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ..calibration.statistic import GradientStatistic
from ..calibration.storage import Storage
from ..distributed.ranks import Ranks
from ..model.layers import PrunableLayer
from .learning import Learned, rotations
from .spaces import Space

# No factor is larger, or smaller than one over it: 16 bits have to hold what it multiplies.
LARGEST = 16.0


class OutputMoments(GradientStatistic):
    """Second moments of the gradients at what a layer gives to spaces that may be scaled, summed over all tokens.

    Their products for spaces that are rotated, [count, width, width], their squares for others, [count, width].

    Args:
        layer: the layer.
        samples: N, calibration samples in all.
        storage: of other statistics.
    """

    spaces: Sequence[Space] = ()

    @classmethod
    def of(cls, spaces: Sequence[Space]) -> type["OutputMoments"]:
        """The statistic of the spaces of one model, of which those that may be scaled count."""
        return type("OutputMoments", (cls,), {"spaces": [space for space in spaces if space.scaled]})

    def __init__(self, layer: PrunableLayer, samples: int, storage: Storage):
        super().__init__(layer, samples, storage)
        self.given = list(_given(layer, self.spaces))
        self.totals: dict[str, Tensor] = {}

    def add(self, inputs: Tensor, delta: Tensor, done: bool, groups: slice) -> None:
        for space, rows in self.given:
            part = delta.flatten(0, -2)[:, rows.to(delta.device)]
            turned = space.follows is not None and not space.follows.permuted
            found = torch.einsum("tci,tcj->cij", part, part) if turned else part.square().sum(0)
            self.totals[space.name] = self.totals.get(space.name, 0) + found.double().cpu()

    def merge(self, ranks: Ranks, owner: int | None) -> None:
        found = ranks.all_gather_object(self.totals)
        names = dict.fromkeys(name for totals in found for name in totals)
        self.totals = {name: torch.stack([t[name] for t in found if name in t]).sum(0) for name in names}

    def result(self) -> dict[str, Tensor]:
        return self.totals


def _given(layer: PrunableLayer, spaces: Sequence[Space]) -> Iterator[tuple[Space, Tensor]]:
    """The spaces whose coordinates are rows of a layer's weight, and which rows, int64 [count, width]."""
    for space in spaces:
        for place in space.places:
            if place.writes and place.index is not None and place.at.parameter is layer.parameter:
                yield space, place.index[:, 0]


def scale(spaces: Sequence[Space], state: Learned, moments: Mapping[str, Tensor]) -> None:
    """Give the state the factors of all spaces that may be scaled and have moments.

    Args:
        spaces: of the model.
        state: with the rotations and the orders.
        moments: space → as `OutputMoments` has them, [count, width, width] or [count, width].
    """
    found = rotations(spaces, state)
    for space in spaces:
        if not space.scaled or space.name not in moments:
            continue
        moment, change = moments[space.name], None if space.follows is None else found.get(space.follows)
        if moment.ndim == 3:
            assert change is not None
            moment = (change * (moment @ change)).sum(-2)
        elif change is not None:
            moment = moment.gather(-1, change)
        state.factors[space.name] = factors(moment)


def factors(moment: Tensor) -> Tensor:
    """``√D`` over its geometric mean, within `LARGEST`; ones where there is no gradient at all.

    Args:
        moment: D, [count, width].
    """
    size = moment.clamp_min(0).sqrt()
    some = size > 0
    if not some.any():
        return torch.ones_like(size)
    return (size / size[some].log().mean().exp()).clamp(1 / LARGEST, LARGEST)
