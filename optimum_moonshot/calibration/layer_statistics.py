"""What was gathered of a layer: Gram matrices, and what became of the gradients of its samples."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor, nn

from ..model.convolution import batched, geometry, joined, strips
from ..model.layers import PrunableLayer
from ..objective.fisher import Fisher
from ..objective.quadratic import DiagonalQuadratic, Objective, Quadratic, reconstruction
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
    """What a layer's objective needs: Σ x xᵀ and the Fisher term of its rows or, diagonal, Σ x² and Σ_n A_n².

    Inputs are [d_in, d_in] or [d_in], with groups in front for a grouped convolution. Gradients are a `Fisher`, or
    [d_out, d_in] where diagonal; None at λ = 1. They may be those of some rows, with the totals of the layer once those
    are known.
    """

    inputs: Tensor
    gradients: Fisher | Tensor | None
    samples: int
    diagonal: bool = False
    totals: LayerTotals | None = None

    def objective(self, weight: Tensor, lam: float, column_block: int | None = None) -> Objective:
        """The layer's quadratic at its dense weight.

        Args:
            weight: [d_out, d_in].
            lam: λ in [0, 1].
            column_block: inputs of a row that have a quadratic together; None is all.
        """
        gradients = self.gradients if lam < 1 else None
        if self.diagonal:
            return DiagonalQuadratic.build(weight, self.inputs, gradients, self.samples, lam)
        return Quadratic.build(weight, self.inputs, gradients, lam, column_block=column_block)

    def layer_objective(self, weight: Tensor, lam: float, column_block: int | None = None) -> Quadratic:
        """As `objective`, without gradients: by the totals that were gathered with some rows."""
        totals = self.totals.result(reconstruction(weight, self.inputs, column_block))
        return Quadratic.build(weight, self.inputs, None, lam, totals, column_block)


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
