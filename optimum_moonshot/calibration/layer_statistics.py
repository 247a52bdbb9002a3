"""What was gathered of a layer: Gram matrices, and what became of the gradients of its samples."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor, nn

from ..model.convolution import batched, geometry, joined, strips
from ..model.layers import PrunableLayer
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
class InputStatistics:
    """G [d_in, d_in], or its diagonal [d_in]; one object for all layers that read the same tensor (q, k and v).

    A grouped convolution has [groups, d_in, d_in] or [groups, d_in].
    """

    value: Tensor
    diagonal: bool
    readers: dict[str, list[int]] = field(default_factory=dict)  # layer → ids of the tensors it read in this batch

    def add(self, inputs: Tensor) -> None:
        """Add a batch of inputs [tokens, d_in], or [groups, tokens, d_in]."""
        inputs = inputs.float()
        if self.diagonal:
            self.value += inputs.square().sum(-2)
        elif self.value.ndim == 2:
            self.value.addmm_(inputs.T, inputs)
        else:
            self.value.baddbmm_(inputs.mT, inputs)

    def add_call(self, call: "Call") -> None:
        """Add what a call of a layer read."""
        for rows in call.matrices():
            self.add(rows)


@dataclass
class LayerStatistics:
    """What a layer's objective needs: Σ x xᵀ or (diagonal) Σ x², and A_n [N, d_out, d_in], Σ_n a_n a_nᵀ of its rows or
    (diagonal) Σ_n A_n² [d_out, d_in].

    Inputs are [d_in, d_in] or [d_in], with groups in front for a grouped convolution. Gradients may be those of some
    rows, with the totals of the layer once those are known.
    """

    inputs: Tensor
    gradients: Tensor | RowFisher | None
    samples: int
    diagonal: bool = False
    totals: LayerTotals | None = None

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


@dataclass(frozen=True)
class Call:
    """One call of a layer on a batch."""

    layer: PrunableLayer
    module: nn.Module
    inputs: Tensor  # [..., d_in], or images [B, C, H, W]
    version: int  # of the inputs: it grows when they are changed in place
    mask: Tensor | None  # of the tokens that count

    @property
    def read_as(self) -> tuple | None:
        """What two calls share that read the same matrix from the same tensor."""
        return geometry(self.module) if isinstance(self.module, nn.Conv2d) else None

    def matrices(self) -> Iterator[Tensor]:
        """The rows that count, [tokens, d_in] or [groups, tokens, d_in], in pieces."""
        if not isinstance(self.module, nn.Conv2d):
            kept = self.inputs if self.mask is None else self.inputs[self.mask]
            yield kept.reshape(-1, kept.shape[-1])
            return
        for strip in strips(self.module, batched(self.inputs)):
            patches = joined(strip.patches)
            yield patches if self.layer.groups > 1 else patches[0]
