"""What was gathered of a layer, and the quadratic objective that follows from it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ..objective.quadratic import (
    BlockQuadratic,
    DiagonalQuadratic,
    Quadratic,
    RowFisher,
    diagonal_blocks,
    reconstruction,
)
from .accumulators import LayerTotals


@dataclass
class LayerStatistics:
    """What a layer's objective needs: Σ x xᵀ or (diagonal) Σ x², and A_n [N, d_out, d_in], Σ_n a_n a_nᵀ of its rows or
    (diagonal) Σ_n A_n² [d_out, d_in].

    Inputs are [d_in, d_in] or [d_in], with groups in front where there are several. Gradients may be those of some
    rows, with the totals of the layer once those are known.
    """

    inputs: Tensor
    gradients: Tensor | RowFisher | None
    samples: int
    diagonal: bool = False
    totals: LayerTotals | None = None
    extra: Mapping[type, Any] = field(default_factory=dict)  # of the statistics asked for beyond these, by their class

    def objective(self, weight: Tensor, lam: float, block: int | None = None) -> Quadratic | DiagonalQuadratic:
        """The layer's quadratic at its dense weight [d_out, d_in]; `block` inputs of a row have one together."""
        gradients = self.gradients if lam < 1 else None
        if self.diagonal:
            return DiagonalQuadratic.build(weight, self.inputs, gradients, self.samples, lam)
        if block is not None:
            return BlockQuadratic.build(weight, diagonal_blocks(self.inputs, block), gradients, lam)
        return Quadratic.build(weight, self.inputs, gradients, lam)

    def layer_objective(self, weight: Tensor, lam: float, block: int | None = None) -> Quadratic:
        """The layer's quadratic without gradients, by the totals that were gathered with some rows."""
        kind, gram = (
            (Quadratic, self.inputs) if block is None else (BlockQuadratic, diagonal_blocks(self.inputs, block))
        )
        totals = self.totals.result(reconstruction(weight, gram))
        return kind.build(weight, gram, None, lam, totals)
