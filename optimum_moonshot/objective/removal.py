"""The loss of removing experts from a mixture: MOONSHOT's two objectives (arXiv 2604.13287, eq. 4) for experts.

The contribution of expert e to token t is ``c_e(t) = gate_e(t) · f_e(x_t)``; the mixture is ``y_t = Σ_e c_e(t)``. With
z_e = 1 for a removed expert, both losses are quadratics in z [E]:

    L_R(z) = zᵀ C z             C_ef = Σ_t <c_e(t), c_f(t)>
    L_F(z) = 1/N ‖Bᵀ z‖²        B_en = Σ_{t in sample n} <∂ℓ_n/∂y_t, c_e(t)>

    L_λ(z) = λ L_R(z)/L_R(1) + (1-λ) L_F(z)/L_F(1) = zᵀ F z,    F = a C + b B Bᵀ

so that the loss is 0 if no expert is removed, and 1 if all are. This is the quadratic of a layer with one row of
weights 1, the Gram matrix C and the gradients B; no update follows, since the gates are outputs of the router.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from .quadratic import RelativeLoss, Scales, scales


@dataclass(frozen=True)
class Removal:
    """``zᵀ F z`` of a mixture, and the statistics of other criteria; all in float64."""

    gram: Tensor  # C  [E, E]
    gradients: Tensor | None  # Bᵀ  [N, E]; None at λ = 1
    norms: Tensor  # Σ_t ‖c_e(t)‖  [E]
    tokens: Tensor  # number of tokens of each expert  [E]
    scales: Scales
    losses_at_one: tuple[float, float | None]  # L_R(1), L_F(1)

    @classmethod
    def build(cls, gram: Tensor, gradients: Tensor | None, norms: Tensor, tokens: Tensor, lam: float) -> Removal:
        """Build the quadratic from the statistics of a mixture; `gradients` are ignored at λ = 1."""
        gram, norms, tokens = gram.double(), norms.double(), tokens.double()
        gradients = None if gradients is None or lam == 1 else gradients.double()
        fisher = None if gradients is None else float(gradients.sum(1).square().mean())
        at_one = float(gram.sum()), fisher
        factors = scales(lam, *at_one, samples=0 if gradients is None else len(gradients))
        if not (factors.a or factors.b):
            factors = factors._replace(notes=("its experts contribute nothing: the first ones are removed",))
        return cls(gram, gradients, norms, tokens, factors, at_one)

    def among(self, experts: Tensor) -> Removal:
        """The quadratic of some experts, int64 [e], while the others remain; in the same units."""
        gradients = None if self.gradients is None else self.gradients[:, experts]
        gram, norms, tokens = self.gram[experts][:, experts], self.norms[experts], self.tokens[experts]
        return dataclasses.replace(self, gram=gram, gradients=gradients, norms=norms, tokens=tokens)

    @property
    def matrix(self) -> Tensor:
        """F, [E, E]."""
        matrix = self.scales.a * self.gram
        if self.gradients is not None and self.scales.b:
            matrix = matrix + self.scales.b * self.gradients.T @ self.gradients
        return (matrix + matrix.T) / 2

    def losses(self, *keeps: Tensor) -> list[RelativeLoss]:
        """Relative losses of masks, bool [E], True for a remaining expert."""
        losses = []
        for keep in keeps:
            removed = (~keep).to(self.gram)
            reconstruction = float(removed @ self.gram @ removed) / (self.losses_at_one[0] or 1.0)
            fisher = None
            if self.gradients is not None:
                fisher = float((self.gradients @ removed).square().mean()) / (self.losses_at_one[1] or 1.0)
            total = float(removed @ self.matrix @ removed)
            losses.append(RelativeLoss(reconstruction, fisher, total))
        return losses


def mean_norms(removal: Removal) -> Tensor:
    """REAP's score (arXiv 2510.13999): the mean of ‖c_e(t)‖ over the tokens of an expert, [E]; 0 without tokens."""
    return torch.where(removal.tokens > 0, removal.norms / removal.tokens.clamp(min=1), 0.0)
