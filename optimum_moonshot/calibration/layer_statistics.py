"""What was gathered of a layer, and the quadratic objective that follows from it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..objective.fisher import Fisher
from ..objective.quadratic import DiagonalQuadratic, Objective, Quadratic, Totals, reconstruction
from ..objective.row_slices import SliceLimit
from .accumulators import LayerTotals


@dataclass
class LayerStatistics:
    """What a layer's objective needs: Σ x xᵀ and the Fisher term of its rows or, diagonal, Σ x² and Σ_n A_n².

    Inputs are [d_in, d_in] or [d_in], with groups in front where there are several. Gradients are a `Fisher`, or
    [d_out, d_in] where diagonal; None at λ = 1. They may be those of some rows, with the totals of the layer once those
    are known.
    """

    inputs: Tensor
    gradients: Fisher | Tensor | None
    samples: int
    diagonal: bool = False
    totals: LayerTotals | None = None
    extra: Mapping[type, Any] = field(default_factory=dict)  # of the statistics asked for beyond these, by their class
    unknown: frozenset[int] = frozenset()  # groups that go by magnitude, whatever was gathered
    tokens: Tensor | None = None  # int64 [groups]: how many each group has read, where groups are experts
    limit: SliceLimit | None = None  # on the slices of rows in a solver

    def groups(self, count: int) -> Iterator["LayerStatistics"]:
        """Those of each group of rows alone, where every group is a matrix of its own.

        Args:
            count: how many groups there are.
        """
        size, shared = 0, self.inputs.ndim == (1 if self.diagonal else 2)  # one G for all, as without data
        if self.gradients is not None:
            size = (len(self.gradients) if isinstance(self.gradients, Tensor) else self.gradients.count) // count
        for index in range(count):
            rows, gradients = slice(index * size, (index + 1) * size), self.gradients
            tokens = None if self.tokens is None else self.tokens[index : index + 1]
            if index in self.unknown:
                nothing = torch.zeros_like(self.inputs[index])
                yield replace(self, inputs=nothing, gradients=None, extra={}, unknown=frozenset(), tokens=tokens)
                continue
            if gradients is not None:
                gradients = gradients[rows] if isinstance(gradients, Tensor) else gradients.part(rows)
            inputs = self.inputs if shared else self.inputs[index]
            yield replace(self, inputs=inputs, gradients=gradients, extra={}, unknown=frozenset(), tokens=tokens)

    def objective(self, weight: Tensor, lam: float, column_block: int | None = None) -> Objective:
        """The layer's quadratic at its dense weight.

        Args:
            weight: [d_out, d_in].
            lam: λ in [0, 1].
            column_block: inputs of a row that have a quadratic together; None is all.
        """
        gradients = self.gradients if lam < 1 else None
        if self.diagonal:
            # They may have been gathered in host memory, and are no larger than the weight.
            assert not isinstance(gradients, Fisher)
            inputs, squares = self.inputs.to(weight.device), None if gradients is None else gradients.to(weight.device)
            return DiagonalQuadratic.build(weight, inputs, squares, self.samples, lam, self.limit)
        assert not isinstance(gradients, Tensor)
        return Quadratic.build(weight, self.inputs, gradients, lam, column_block=column_block, limit=self.limit)

    def layer_objective(self, weight: Tensor, lam: float, column_block: int | None = None) -> Quadratic:
        """As `objective`, without gradients: by the totals that were gathered with some rows.

        Args:
            weight: as for `objective`.
            lam: as for `objective`.
            column_block: as for `objective`.
        """
        assert self.totals is not None  # `GradientPlan.totals`
        fisher, squares = self.totals.result()
        totals = Totals(reconstruction(weight, self.inputs, column_block), fisher, squares, self.samples)
        return Quadratic.build(weight, self.inputs, None, lam, totals, column_block, self.limit)
