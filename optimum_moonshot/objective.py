"""The multi-objective quadratic of MOONSHOT (arXiv 2604.13287, eq. 4-8): reconstruction + Fisher, normalised.

    L_λ(W) = λ L_R(W)/L_R(0) + (1-λ) L_F(W)/L_F(0)
    L_R(W) = Σ_k (w_k-ŵ_k)ᵀ G (w_k-ŵ_k)              G = X Xᵀ over every calibration token
    L_F(W) = 1/N Σ_k ‖A_kᵀ (w_k-ŵ_k)‖²               A_k: row k of the N per-sample gradients, as columns

so row k carries the matrix ``F_k = a G + b A_k A_kᵀ`` with ``a = λ/L_R(0)`` and ``b = (1-λ)/(N L_F(0))``, and
``L_λ(0) = 1``. `Quadratic` keeps the whole matrices, `DiagonalQuadratic` their diagonals (Wanda), normalised by the
diagonal losses. Tensor format here and in every solver: weights [d_out, d_in], gradients [N, d_out, d_in]. Rows of a
grouped convolution read inputs of their own: its G is [groups, d_in, d_in], one matrix for each d_out/groups rows.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

# Rows of A are read in slices of about this many bytes, so that gradients kept off the device stream through it.
SLICE_BYTES = 256 * 2**20


class RelativeLoss(NamedTuple):
    """L_R(W)/L_R(0), L_F(W)/L_F(0) (None without gradients) and L_λ(W) of one pruned weight."""

    reconstruction: float
    fisher: float | None
    total: float


class Scales(NamedTuple):
    """The scalars a, b of F_k, the λ they realise, and what a user should know about them."""

    a: float
    b: float
    lam: float
    notes: tuple[str, ...]


def scales(lam: float, reconstruction: float, fisher: float | None, samples: int) -> Scales:
    """a and b from L_R(0) and L_F(0); a term that vanishes at W = 0 gives way to the other, with a note.

    Args:
        lam: λ in [0, 1], the weight of the reconstruction term.
        reconstruction: L_R(0).
        fisher: L_F(0), None without gradients.
        samples: N.
    """
    notes = []
    if lam < 1 and not fisher:
        lam, notes = 1.0, ["no Fisher loss at W = 0: reconstruction alone"]
    if lam > 0 and not reconstruction:
        if fisher and not notes:
            lam, notes = 0.0, ["no reconstruction loss at W = 0: Fisher alone"]
        else:
            return Scales(0.0, 0.0, lam, ("no loss at W = 0: weights go by magnitude",))
    a = lam / reconstruction if lam > 0 else 0.0
    b = (1 - lam) / (samples * fisher) if lam < 1 else 0.0
    return Scales(a, b, lam, tuple(notes))


@dataclass(frozen=True)
class Quadratic:
    """``Σ_k (w_k-ŵ_k)ᵀ F_k (w_k-ŵ_k)`` with row-specific ``F_k = a·gram + b·A_k A_kᵀ``; ``L_λ(0) = 1``."""

    weight: Tensor  # ŵ             [d_out, d_in] float32, 0 at dead inputs
    gram: Tensor  # G               [d_in, d_in], or [groups, d_in, d_in]
    gradients: Tensor | None  # A_n [N, d_out, d_in], on any device; None at λ = 1
    scales: Scales
    losses_at_zero: tuple[float, float | None]  # L_R(0), L_F(0)

    @classmethod
    def build(cls, weight: Tensor, gram: Tensor, gradients: Tensor | None, lam: float) -> "Quadratic":
        """From a dense weight and its statistics; inputs that never fire lose their weights first."""
        weight, dead = _without_dead_inputs(weight, gram.diagonal(dim1=-2, dim2=-1))
        terms = _terms(weight[None], gram, gradients)
        at_zero = _first(terms)
        found = scales(lam, *at_zero, samples=0 if gradients is None else len(gradients))
        return cls(weight, gram, gradients, _with_note(found, dead), at_zero)

    @property
    def damping_unit(self) -> float:
        """The diagonal that a damping of 1 adds: ``mean(diag G)/L_R(0)`` whatever λ (paper A.6)."""
        if self.losses_at_zero[0]:
            return float(self.gram.diagonal(dim1=-2, dim2=-1).mean()) / self.losses_at_zero[0]
        if self.scales.b:
            squares = sum(float(part.float().square().mean()) for part in self.gradients)
            return self.scales.b * squares
        return 1.0

    def rows(self, rows: slice, device: torch.device) -> Tensor:
        """The matrices F_k of some rows, [r, d_in, d_in] in float64."""
        count = len(self.weight[rows])
        gram = self.gram if self.gram.ndim == 2 else of_rows(self.gram, len(self.weight))[rows]
        gram = gram.double().expand(count, -1, -1)
        if not self.scales.b:
            return self.scales.a * gram
        factors = self.gradients[:, rows].to(device).permute(1, 2, 0).double()
        return torch.baddbmm(gram, factors, factors.mT, beta=self.scales.a, alpha=self.scales.b)

    def losses(self, *weights: Tensor) -> list[RelativeLoss]:
        """The ruler of every report: relative losses of pruned weights [d_out, d_in]."""
        deltas = torch.stack([weight.float() - self.weight for weight in weights])
        return _relative(_terms(deltas, self.gram, self.gradients), self.losses_at_zero, self.scales.lam)


@dataclass(frozen=True)
class DiagonalQuadratic:
    """`Quadratic` with G and A_k A_kᵀ replaced by their diagonals, as Wanda does; ``L_λ(0) = 1`` by its own ruler."""

    weight: Tensor  # ŵ                     [d_out, d_in] float32, 0 at dead inputs
    input_squares: Tensor  # diag G         [d_in], or [d_out, d_in] where rows read inputs of their own
    gradient_squares: Tensor | None  # Σ_n A_n², elementwise  [d_out, d_in]; None at λ = 1
    samples: int
    scales: Scales
    losses_at_zero: tuple[float, float | None]

    @classmethod
    def build(
        cls, weight: Tensor, input_squares: Tensor, gradient_squares: Tensor | None, samples: int, lam: float
    ) -> "DiagonalQuadratic":
        """From a dense weight and its statistics; `input_squares` may be [groups, d_in]."""
        weight, dead = _without_dead_inputs(weight, input_squares)
        input_squares = of_rows(input_squares, len(weight)) if input_squares.ndim == 2 else input_squares
        at_zero = _first(_diagonal_terms(weight[None], input_squares, gradient_squares, samples))
        found = _with_note(scales(lam, *at_zero, samples=samples), dead)
        return cls(weight, input_squares, gradient_squares, samples, found, at_zero)

    def diagonal(self) -> Tensor:
        """F_k,jj, [d_out, d_in]."""
        if not (self.scales.a or self.scales.b):
            return torch.ones_like(self.weight)
        diagonal = (self.scales.a * self.input_squares).expand_as(self.weight)
        return diagonal + self.scales.b * self.gradient_squares if self.scales.b else diagonal

    def losses(self, *weights: Tensor) -> list[RelativeLoss]:
        deltas = torch.stack([weight.float() - self.weight for weight in weights])
        terms = _diagonal_terms(deltas, self.input_squares, self.gradient_squares, self.samples)
        return _relative(terms, self.losses_at_zero, self.scales.lam)


def of_rows(groups: Tensor, d_out: int) -> Tensor:
    """What holds for groups of rows [groups, …], for each of the d_out rows: [d_out, …]."""
    return groups.repeat_interleave(d_out // len(groups), 0)


def _without_dead_inputs(weight: Tensor, input_squares: Tensor) -> tuple[Tensor, int]:
    """`input_squares` [d_in] or [groups, d_in]."""
    dead = input_squares == 0
    of_weight = dead if dead.ndim == 1 else of_rows(dead, len(weight))
    return weight.detach().float().masked_fill(of_weight, 0), int(dead.sum())


def _with_note(found: Scales, dead: int) -> Scales:
    return found if not dead else found._replace(notes=(f"{dead} dead inputs", *found.notes))


def _terms(deltas: Tensor, gram: Tensor, gradients: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """L_R and L_F of several differences [w, d_out, d_in], as [w] in float64."""
    if gram.ndim == 2:
        products = deltas @ gram.float()
    else:
        products = (deltas.unflatten(1, (len(gram), -1)) @ gram.float()).flatten(1, 2)
    reconstruction = (products * deltas).double().sum((1, 2))
    if gradients is None:
        return reconstruction, None
    samples, d_out, d_in = gradients.shape
    step = max(1, SLICE_BYTES // (4 * samples * d_in))
    fisher = torch.zeros_like(reconstruction)
    for start in range(0, d_out, step):
        rows = slice(start, start + step)
        part = gradients[:, rows].to(deltas.device, torch.float32).transpose(0, 1)
        fisher += (part @ deltas[:, rows].permute(1, 2, 0)).double().square().sum((0, 1))
    return reconstruction, fisher / samples


def _diagonal_terms(
    deltas: Tensor, input_squares: Tensor, gradient_squares: Tensor | None, samples: int
) -> tuple[Tensor, Tensor | None]:
    squares = deltas.square()
    reconstruction = (squares * input_squares).double().sum((1, 2))
    if gradient_squares is None:
        return reconstruction, None
    return reconstruction, (squares * gradient_squares).double().sum((1, 2)) / samples


def _first(terms: tuple[Tensor, Tensor | None]) -> tuple[float, float | None]:
    reconstruction, fisher = terms
    return float(reconstruction[0]), None if fisher is None else float(fisher[0])


def _relative(
    terms: tuple[Tensor, Tensor | None], at_zero: tuple[float, float | None], lam: float
) -> list[RelativeLoss]:
    """Relative losses; a term that vanishes at W = 0 is 0 for any W that only removes weights."""
    reconstruction = [value / at_zero[0] if at_zero[0] else value for value in terms[0].tolist()]
    if terms[1] is None:
        return [RelativeLoss(r, None, r) for r in reconstruction]
    fisher = [value / at_zero[1] if at_zero[1] else value for value in terms[1].tolist()]
    return [RelativeLoss(r, f, lam * r + (1 - lam) * f) for r, f in zip(reconstruction, fisher, strict=True)]
