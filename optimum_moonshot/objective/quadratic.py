"""The multi-objective quadratic of MOONSHOT (arXiv 2604.13287, eq. 4-8): reconstruction + Fisher, normalised.

    L_λ(W) = λ L_R(W)/L_R(0) + (1-λ) L_F(W)/L_F(0)
    L_R(W) = Σ_k (w_k-ŵ_k)ᵀ G (w_k-ŵ_k)              G = X Xᵀ over every calibration token
    L_F(W) = 1/N Σ_k ‖A_kᵀ (w_k-ŵ_k)‖²               A_k: row k of the N per-sample gradients, as columns

so row k carries the matrix ``F_k = a G + b A_k A_kᵀ`` with ``a = λ/L_R(0)`` and ``b = (1-λ)/(N L_F(0))``, and
``L_λ(0) = 1``. `Quadratic` keeps the whole matrices, `BlockQuadratic` their diagonal blocks (CAP) and
`DiagonalQuadratic` their diagonals (Wanda), each normalised by its own losses. Tensor format here and in every solver:
weights [d_out, d_in], gradients [N, d_out, d_in]. Rows of a grouped convolution read inputs of their own: its G is
[groups, d_in, d_in], one matrix for each d_out/groups rows.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import FactorizationError

# Rows of A are read in slices of about this many bytes, so that gradients kept off the device stream through it.
SLICE_BYTES = 256 * 2**20
# How far below 0 rounding may take a loss that is 0, in proportion to the largest it could be.
ROUNDING = 1e-5


class RelativeLoss(NamedTuple):
    """L_R(W)/L_R(0), L_F(W)/L_F(0) (None without gradients) and L_λ(W) of one pruned weight."""

    reconstruction: float
    fisher: float | None
    total: float


class RowFisher(NamedTuple):
    """``A_k A_kᵀ`` itself, for the rows (or blocks of rows) of a quadratic: exact, and smaller where N > size."""

    matrices: Tensor  # Σ_n a_n a_nᵀ, [rows, size, size], on any device
    samples: int  # N


class Totals(NamedTuple):
    """Of a whole layer, where a quadratic has the gradients of some of its rows only."""

    reconstruction: float  # L_R(0)
    fisher: float | None  # L_F(0)
    squares: float  # Σ_n A_n², mean over the layer's weights
    samples: int  # N


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
    gradients: Tensor | RowFisher | None  # A_n [N, d_out, d_in], or A_k A_kᵀ, on any device; None at λ = 1
    scales: Scales
    losses_at_zero: tuple[float, float | None]  # L_R(0), L_F(0)
    totals: Totals | None = None  # of the layer, where gradients are those of some rows

    @classmethod
    def build(
        cls,
        weight: Tensor,
        gram: Tensor,
        gradients: Tensor | RowFisher | None,
        lam: float,
        totals: Totals | None = None,
    ) -> "Quadratic":
        """From a dense weight and its statistics; inputs that never fire lose their weights first.

        With `totals` the gradients may follow, rows by rows, in `part`.
        """
        weight, dead = _without_dead_inputs(weight, _input_squares(gram))
        gradients = _by_block(gradients, gram.shape[-1])
        at_zero = totals[:2] if totals else _first(_terms(weight[None], gram, gradients))
        if at_zero[0] < -ROUNDING * float(weight.double().square().sum() * gram.diagonal(dim1=-2, dim2=-1).max()):
            raise FactorizationError("gram is not positive semidefinite: the reconstruction loss at W = 0 is negative")
        found = scales(lam, *at_zero, samples=totals.samples if totals else _samples(gradients))
        return cls(weight, gram, gradients, _with_note(found, dead), at_zero, totals)

    def part(self, rows: slice, gradients: Tensor | RowFisher) -> "Quadratic":
        """The quadratic of some rows, a whole number of groups or inside of one, with their gradients."""
        gram = self.gram
        if gram.ndim > 2:
            size = len(self.weight) // len(gram)
            gram = gram[rows.start // size : -(-rows.stop // size)]
        return replace(self, weight=self.weight[rows], gram=gram, gradients=_by_block(gradients, self.size))

    @property
    def damping_unit(self) -> float:
        """The diagonal that a damping of 1 adds: ``mean(diag G)/L_R(0)`` whatever λ (paper A.6)."""
        if self.losses_at_zero[0]:
            return float(self.gram.diagonal(dim1=-2, dim2=-1).mean()) / self.losses_at_zero[0]
        return self.mean_diagonal() or 1.0

    @property
    def size(self) -> int:
        """Inputs of a block: d_in, unless the quadratic is block-diagonal."""
        return self.gram.shape[-1]

    @property
    def row_weights(self) -> Tensor:
        """ŵ as `rows` counts it, [rows, size]: a row of the weight is a row here, or its blocks one after another."""
        return self.weight.reshape(-1, self.size)

    def mean_diagonal(self) -> float:
        """The mean of all ``F_k,jj`` of the layer."""
        squares = 0.0
        if self.scales.b:
            squares = self.totals.squares if self.totals else _mean_square(self.gradients, self.weight.numel())
        return self.scales.a * float(self.gram.diagonal(dim1=-2, dim2=-1).mean()) + self.scales.b * squares

    def grams_of(self, rows: slice) -> Tensor:
        """Which of the matrices in `gram`, counted through, each of some rows has."""
        count = len(self.row_weights)
        groups, blocks = _by_group(self.gram).shape[:2]
        index = torch.arange(*rows.indices(count), device=self.weight.device)
        return index // (count // groups) * blocks + index % blocks

    def rows(self, rows: slice, device: torch.device) -> Tensor:
        """The matrices F_k of some rows (blocks of rows), [r, size, size] in float64."""
        grams, which = _by_group(self.gram).flatten(0, 1), self.grams_of(rows)
        shared = grams[which].double() if len(grams) > 1 else grams.double().expand(len(which), -1, -1)
        if not self.scales.b:
            return self.scales.a * shared
        if isinstance(self.gradients, RowFisher):
            fisher = self.gradients.matrices[rows].to(device, torch.float64)
            return fisher.mul_(self.scales.b).add_(shared, alpha=self.scales.a)
        factors = self.gradients[:, rows].to(device).permute(1, 2, 0).double()
        return torch.baddbmm(shared, factors, factors.mT, beta=self.scales.a, alpha=self.scales.b)

    def losses(self, *weights: Tensor) -> list[RelativeLoss]:
        """The ruler of every report: relative losses of pruned weights [d_out, d_in]."""
        deltas = torch.stack([weight.float() - self.weight for weight in weights])
        return _relative(_terms(deltas, self.gram, self.gradients), self.losses_at_zero, self.scales.lam)


@dataclass(frozen=True)
class BlockQuadratic(Quadratic):
    """`Quadratic` with all but the diagonal blocks of G and A_k A_kᵀ left out, as CAP does; its own ruler.

    `gram` is [groups, blocks, size, size] with ``blocks · size = d_in``, and block j of row k is row
    ``k · blocks + j`` of `rows` and `gradients`.
    """


def diagonal_blocks(gram: Tensor, size: int) -> Tensor:
    """Of G [d_in, d_in] or [groups, d_in, d_in], the diagonal blocks, [groups, blocks, size, size]."""
    grams = gram if gram.ndim == 3 else gram[None]
    blocks = grams.unflatten(2, (-1, size)).unflatten(1, (-1, size)).diagonal(dim1=1, dim2=3)
    return blocks.permute(0, 3, 1, 2).contiguous()


def _by_group(gram: Tensor) -> Tensor:
    """G of any quadratic as [groups, blocks, size, size]."""
    return gram if gram.ndim == 4 else gram.reshape(-1, 1, *gram.shape[-2:])


def _input_squares(gram: Tensor) -> Tensor:
    """diag G, [d_in] or [groups, d_in]."""
    squares = gram.diagonal(dim1=-2, dim2=-1)
    return squares if gram.ndim < 4 else squares.flatten(1)


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


def reconstruction(weight: Tensor, gram: Tensor) -> float:
    """L_R(0) of a weight."""
    return float(_terms(weight.float()[None], gram, None)[0])


def _by_block(gradients: Tensor | RowFisher | None, size: int) -> Tensor | RowFisher | None:
    """Gradients as a quadratic with blocks of so many inputs counts its rows, [N, rows, size]."""
    if gradients is None or isinstance(gradients, RowFisher):
        return gradients
    return gradients.unflatten(2, (-1, size)).flatten(1, 2)


def _samples(gradients: Tensor | RowFisher | None) -> int:
    if isinstance(gradients, RowFisher):
        return gradients.samples
    return 0 if gradients is None else len(gradients)


def _mean_square(gradients: Tensor | RowFisher, weights: int) -> float:
    """Σ_n A_n², mean over the weights."""
    if isinstance(gradients, RowFisher):
        return float(gradients.matrices.diagonal(dim1=1, dim2=2).double().mean())
    return sum(float(part.float().square().sum()) for part in gradients) / weights


def _terms(deltas: Tensor, gram: Tensor, gradients: Tensor | RowFisher | None) -> tuple[Tensor, Tensor | None]:
    """L_R and L_F of several differences [w, d_out, d_in], as [w] in float64."""
    count, size = len(deltas), gram.shape[-1]
    grams = _by_group(gram).float()
    blocks = deltas.unflatten(2, (-1, size)).unflatten(1, (len(grams), -1)).permute(1, 3, 0, 2, 4)
    products = (blocks.flatten(2, 3) @ grams).view_as(blocks)  # [groups, blocks, w, rows, size]
    lost = (products * blocks).double().sum((0, 1, 3, 4))
    if gradients is None:
        return lost, None
    rows = deltas.reshape(count, -1, size)
    compressed = isinstance(gradients, RowFisher)
    samples = _samples(gradients)
    step = max(1, SLICE_BYTES // (4 * size * (size if compressed else samples)))
    fisher = torch.zeros_like(lost)
    for start in range(0, rows.shape[1], step):
        some = slice(start, start + step)
        columns = rows[:, some].permute(1, 2, 0)
        if compressed:
            part = gradients.matrices[some].to(deltas.device, torch.float32)
            fisher += ((part @ columns) * columns).double().sum((0, 1))
        else:
            part = gradients[:, some].to(deltas.device, torch.float32).transpose(0, 1)
            fisher += (part @ columns).double().square().sum((0, 1))
    return lost, fisher / samples


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
