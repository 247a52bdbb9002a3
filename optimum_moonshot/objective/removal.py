"""What a mixture loses without some of its experts: MOONSHOT's two objectives (arXiv 2604.13287, eq. 4) for experts.

Expert e gives token t the contribution ``c_e(t) = gate_e(t) · f_e(x_t)``, and the mixture ``y_t = Σ_e c_e(t)``. With
z_e = 1 for an expert that goes, both losses are quadratics in z, of the size E:

    L_R(z) = zᵀ C z             C_ef = Σ_t <c_e(t), c_f(t)>
    L_F(z) = 1/N ‖Bᵀ z‖²        B_en = Σ_{t in sample n} <∂ℓ_n/∂y_t, c_e(t)>

    L_λ(z) = λ L_R(z)/L_R(1) + (1-λ) L_F(z)/L_F(1) = zᵀ F z,    F = a C + b B Bᵀ

so that no expert gone is 0 and all gone is 1. It is the quadratic of a layer with one row of weights, a 1 for each
expert, the Gram matrix C and the gradients B; the survivors' weights stay 1, since the router has them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .quadratic import RelativeLoss, Scales, scales


@dataclass(frozen=True)
class Removal:
    """``zᵀ F z`` of a mixture, and what other criteria go by; all in float64."""

    gram: Tensor  # C  [E, E]
    gradients: Tensor | None  # Bᵀ  [N, E]; None at λ = 1
    norms: Tensor  # Σ_t ‖c_e(t)‖  [E]
    tokens: Tensor  # how many tokens an expert has  [E]
    scales: Scales
    losses_at_one: tuple[float, float | None]  # L_R(1), L_F(1)

    @classmethod
    def build(cls, gram: Tensor, gradients: Tensor | None, norms: Tensor, tokens: Tensor, lam: float) -> Removal:
        """From a mixture's statistics.

        Args:
            gram: C, [E, E].
            gradients: Bᵀ, [N, E]; without effect at λ = 1, where it may be None.
            norms: Σ_t ‖c_e(t)‖, [E].
            tokens: how many tokens each expert has, [E].
            lam: λ in [0, 1].
        """
        gram, norms, tokens = gram.double(), norms.double(), tokens.double()
        gradients = None if gradients is None or lam == 1 else gradients.double()
        fisher = None if gradients is None else float(gradients.sum(1).square().mean())
        at_one = float(gram.sum()), fisher
        count = 0 if gradients is None else len(gradients)
        return cls(gram, gradients, norms, tokens, _noted(scales(lam, *at_one, samples=count)), at_one)

    @property
    def matrix(self) -> Tensor:
        """F, [E, E]."""
        matrix = self.scales.a * self.gram
        if self.gradients is not None and self.scales.b:
            matrix = matrix + self.scales.b * self.gradients.T @ self.gradients
        return (matrix + matrix.T) / 2

    def losses(self, *keeps: Tensor) -> list[RelativeLoss]:
        """The ruler of every report: relative losses of choices, bool [E], True for an expert that stays."""
        found = []
        for keep in keeps:
            gone = (~keep).to(self.gram)
            reconstruction = float(gone @ self.gram @ gone) / (self.losses_at_one[0] or 1.0)
            fisher = None
            if self.gradients is not None:
                fisher = float((self.gradients @ gone).square().mean()) / (self.losses_at_one[1] or 1.0)
            total = float(gone @ self.matrix @ gone)
            found.append(RelativeLoss(reconstruction, fisher, total))
        return found


def _noted(found: Scales) -> Scales:
    """What `scales` says of weights, said of experts."""
    if found.a or found.b:
        return found
    return found._replace(notes=("its experts contribute nothing: the first ones go",))


def mean_norms(removal: Removal) -> Tensor:
    """REAP's score (arXiv 2510.13999): ‖c_e(t)‖, a mean over the tokens of an expert, [E]; 0 where it has none."""
    return torch.where(removal.tokens > 0, removal.norms / removal.tokens.clamp(min=1), 0.0)
