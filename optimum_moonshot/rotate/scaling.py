"""Scales rows that are compared with each other to units of the model's loss.

A solver that compares the weights of several rows gives all outputs the same weight. The effect of output k on the loss
is ``D_k = Σ δ_k²`` of its gradients (as in K-FAC, Martens and Grosse, arXiv 1503.05671). If a later column can
compensate a factor on a row (up and down, v and o), the row is multiplied by ``√D_k`` and the column divided by it.
Their product does not change, and neither do the scores ``w² / [H⁻¹]`` of the column; the scores of the row are then in
units of the loss.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..calibration.statistic import GradientStatistic
from ..calibration.storage import Storage
from ..distributed.sharing import Merger
from ..model.layers import PrunableLayer
from .learning import Learned, rotations
from .spaces import Space

# The largest factor, and the inverse of the smallest, so that the scaled weights fit 16 bits.
LARGEST = 16.0


class OutputMoments(GradientStatistic):
    """Second moments of the gradients at a layer's outputs in the spaces that may be scaled, summed over all tokens.

    Matrices [count, width, width] for spaces that are rotated, diagonals [count, width] for others.
    """

    spaces: Sequence[Space] = ()

    @classmethod
    def of(cls, spaces: Sequence[Space]) -> type["OutputMoments"]:
        """The statistic for the spaces of a model that may be scaled."""
        return type("OutputMoments", (cls,), {"spaces": [space for space in spaces if space.scaled]})

    def __init__(self, layer: PrunableLayer, samples: int, storage: Storage):
        super().__init__(layer, samples, storage)
        self.outputs = [  # the spaces whose coordinates are rows of the layer, and these rows, int64 [count, width]
            (space, place.index[:, 0])
            for space in self.spaces
            for place in space.places
            if place.writes and place.index is not None and place.at.parameter is layer.parameter
        ]
        self.totals: dict[str, Tensor] = {}

    def add(self, inputs: Tensor, delta: Tensor, done: bool, groups: slice) -> None:
        for space, rows in self.outputs:
            outputs = delta.flatten(0, -2)[:, rows.to(delta.device)]
            rotated = space.follows is not None and not space.follows.permuted
            moment = torch.einsum("tci,tcj->cij", outputs, outputs) if rotated else outputs.square().sum(0)
            self.totals[space.name] = self.totals.get(space.name, 0) + moment.double().cpu()

    def merge(self, merger: Merger) -> None:
        processes = merger.values(self.totals)
        names = dict.fromkeys(name for totals in processes for name in totals)
        self.totals = {name: torch.stack([t[name] for t in processes if name in t]).sum(0) for name in names}

    def result(self) -> dict[str, Tensor]:
        return self.totals


def scale(spaces: Sequence[Space], state: Learned, moments: Mapping[str, Tensor]) -> None:
    """Add the factors of all scaled spaces to a learned state; `moments` has the `OutputMoments` by space name."""
    learned = rotations(spaces, state)
    for space in spaces:
        if not space.scaled or space.name not in moments:
            continue
        moment, change = moments[space.name], None if space.follows is None else learned.get(space.follows)
        if moment.ndim == 3:
            assert change is not None
            moment = (change * (moment @ change)).sum(-2)
        elif change is not None:
            moment = moment.gather(-1, change)
        state.factors[space.name] = factors(moment)


def factors(moment: Tensor) -> Tensor:
    """``√D`` [count, width] divided by its geometric mean, clamped by `LARGEST`; ones if all gradients are 0."""
    size = moment.clamp_min(0).sqrt()
    positive = size > 0
    if not positive.any():
        return torch.ones_like(size)
    return (size / size[positive].log().mean().exp()).clamp(1 / LARGEST, LARGEST)
