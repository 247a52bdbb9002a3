"""The multi-objective quadratic of MOONSHOT (arXiv 2604.13287, eq. 4-8): reconstruction + Fisher, normalised.

    L_λ(W) = λ L_R(W)/L_R(0) + (1-λ) L_F(W)/L_F(0)
    L_R(W) = Σ_k (w_k-ŵ_k)ᵀ G (w_k-ŵ_k)              G = X Xᵀ over every calibration token
    L_F(W) = 1/N Σ_k ‖A_kᵀ (w_k-ŵ_k)‖²               A_k: row k of the N per-sample gradients, as columns

so the matrix of row k is ``F_k = a G + b A_k A_kᵀ`` with ``a = λ/L_R(0)`` and ``b = (1-λ)/(N L_F(0))``, and
``L_λ(0) = 1``. Where rows share the Fisher term, G is replaced by F = a G + b A Aᵀ: solvers then work as at λ = 1.
`Quadratic` has the whole matrices or, with column blocks, only their diagonal blocks (CAP), and `DiagonalQuadratic`
only their diagonals (Wanda), each normalised by its own losses. Tensor format here and in all solvers: weights
[d_out, d_in], gradients [N, d_out, d_in] as a `Fisher`. Groups of d_out/groups rows can have separate Gram matrices, as
in a grouped convolution; G is then [groups, d_in, d_in].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ..errors import FactorizationError
from .fisher import Fisher
from .linalg import diagonal_blocks, row_slices

# Memory of a diagonal loss per weight of a slice: differences, squares and products in float64.
LOSS_BYTES = 24
# Largest rounding error of L_R(0) in float32, relative to its upper bound ‖ŵ‖² max(diag G): a loss below its negative
# means that G is not positive semidefinite.
ROUNDING = 1e-5
# Smallest importance of a weight: its own diagonal is estimated from few tokens.
LEAST_IMPORTANCE = 1e-3


class RelativeLoss(NamedTuple):
    """L_R(W)/L_R(0), L_F(W)/L_F(0) (None without gradients) and L_λ(W) of one pruned weight."""

    reconstruction: float
    fisher: float | None
    total: float


class Totals(NamedTuple):
    """Statistics of a whole layer, for a quadratic with the gradients of only some of its rows."""

    reconstruction: float  # L_R(0)
    fisher: float | None  # L_F(0)
    squares: float  # mean of Σ_n A_n² over the layer's weights
    samples: int  # N


class Scales(NamedTuple):
    """The scalars of F_k, with notes for the user."""

    a: float  # of G
    b: float  # of A_k A_kᵀ; 0 without a Fisher term
    lam: float  # the effective λ
    notes: tuple[str, ...]


def scales(lam: float, reconstruction: float, fisher: float | None, samples: int, dead: int = 0) -> Scales:
    """Compute a and b from L_R(0) and L_F(0) (None without gradients) of N samples.

    If one of these is 0, only the other term is used, with a note, as on the `dead` inputs.

    Raises:
        FactorizationError: a loss is infinite, or NaN.
    """
    if not math.isfinite(reconstruction + (fisher or 0.0)):
        message = "the loss at W = 0 is beyond the range of float32"
        raise FactorizationError(message, hint="divide the inputs of the layer, or the gradients, by a constant")
    note = None
    if lam < 1 and not fisher:
        lam, note = 1.0, "no Fisher loss at W = 0: reconstruction alone"
    if lam > 0 and not reconstruction:
        if fisher and not note:
            lam, note = 0.0, "no reconstruction loss at W = 0: Fisher alone"
        else:
            note = "no loss at W = 0: weights are removed by magnitude"
    a = lam / reconstruction if lam > 0 and reconstruction else 0.0
    b = (1 - lam) / (samples * fisher) if fisher and lam < 1 else 0.0
    notes = (f"{dead} dead inputs" if dead else None, note)
    return Scales(a, b, lam, tuple(filter(None, notes)))


@dataclass(frozen=True)
class Quadratic:
    """``Σ_k (w_k-ŵ_k)ᵀ F_k (w_k-ŵ_k)`` with row-specific ``F_k = a·gram + b·A_k A_kᵀ``; ``L_λ(0) = 1``.

    With column blocks of `size` inputs, only the diagonal blocks of G and A_k A_kᵀ are used: block j of row k is then
    row ``k · blocks + j`` of `row_weights`, `row_hessians` and `fisher`.
    """

    weight: Tensor  # ŵ       [d_out, d_in] float32, 0 at dead inputs
    gram: Tensor  # G         [d_in, d_in], [groups, d_in, d_in] or, with blocks, [groups, blocks, size, size]
    input_gram: Tensor  # G, also where `gram` is F, which rows share, and so a = 1 and b = 0
    fisher: Fisher | None  # A_k A_kᵀ of the rows; None at λ = 1, and before `part`
    scales: Scales
    losses_at_zero: tuple[float, float | None]  # L_R(0), L_F(0)
    totals: Totals | None = None  # of the layer, if `fisher` covers some rows only
    alive: Tensor | None = None  # bool [d_out, d_in], True for the weights that may be nonzero; None: all
    # By how much a weight's own diagonal of F_k exceeds that of F: a factor of the scores by which weights of several
    # rows compete, [d_out, d_in]. SmolLM2-135M at 0.6, SparseGPT: perplexity 52 instead of 68 without it, 62 with F_k.
    importance: Tensor | None = None

    diagonal_only: ClassVar[bool] = False  # whether only the diagonals of G and A_k A_kᵀ are used

    @classmethod
    def build(
        cls,
        weight: Tensor,
        gram: Tensor,
        fisher: Fisher | None,
        lam: float,
        totals: Totals | None = None,
        column_block: int | None = None,
        alive: Tensor | None = None,
    ) -> Quadratic:
        """Build the quadratic of a dense weight from its statistics; weights at inputs that are always 0 are set to 0.

        `gram` is [d_in, d_in] or [groups, d_in, d_in] in float32, and `fisher` of the weight's rows, or of their column
        blocks of `column_block` inputs, a divisor of d_in; None at λ = 1. With the `totals` of the layer, `fisher` can
        be passed to `part`, for some rows at a time. `alive` are the `patterns.nonzeros` of the weight before the run,
        whose zeros no solver fills.

        Raises:
            FactorizationError: G is far from positive semidefinite.
        """
        gram = gram if column_block is None else diagonal_blocks(gram, column_block)
        squares = gram.diagonal(dim1=-2, dim2=-1)
        weight, dead = _without_dead_inputs(weight, squares if gram.ndim < 4 else squares.flatten(1))
        fisher = None if fisher is None else fisher.column_blocks(gram.shape[-1])
        at_zero = totals[:2] if totals else _terms(weight[None], gram, fisher)[0]
        if at_zero[0] < -ROUNDING * float(weight.double().square().sum() * squares.max()):
            raise FactorizationError("gram is not positive semidefinite: the reconstruction loss at W = 0 is negative")
        source = totals or fisher
        scalars = scales(lam, *at_zero, samples=source.samples if source else 0, dead=dead)
        if fisher is None or fisher.shared is None or not scalars.b:
            return cls(weight, gram, gram, fisher, scalars, at_zero, totals, alive)
        shared = scalars.a * gram + scalars.b * fisher.shared.to(gram.device).view_as(gram)
        whole = cls(weight, shared, gram, fisher, scalars._replace(a=1.0, b=0.0), at_zero, totals, alive)
        if fisher.squares is None:
            return whole
        return replace(whole, importance=whole._importance(fisher.squares, scalars))

    def part(self, rows: slice, fisher: Fisher) -> Quadratic:
        """The quadratic of some rows of the weight: a whole number of groups, or some within one."""
        gram = self.gram
        if gram.ndim > 2:
            size = len(self.weight) // len(gram)
            gram = gram[rows.start // size : -(-rows.stop // size)]
        weight, alive = self.weight[rows], None if self.alive is None else self.alive[rows]
        fisher = fisher.column_blocks(self.size)
        return replace(self, weight=weight, gram=gram, input_gram=gram, fisher=fisher, alive=alive)

    def _importance(self, squares: Tensor, scalars: Scales) -> Tensor:
        """``(a G_jj + b Σ_t δ_tk² x_tj²) / F_jj`` of every weight, 1 where F_jj is 0."""
        which = self.grams_of(slice(None))

        def of_rows(gram: Tensor) -> Tensor:
            return gram.diagonal(dim1=-2, dim2=-1).reshape(-1, self.size)[which]

        shared, diagonals = of_rows(self.gram), scalars.b * squares.to(self.weight.device).view(-1, self.size)
        diagonals += scalars.a * of_rows(self.input_gram)
        return torch.where(shared > 0, diagonals / shared, 1.0).clamp_(min=LEAST_IMPORTANCE).view_as(self.weight)

    @property
    def damping_unit(self) -> float:
        """The number that a damping of 1 adds to the diagonal: ``mean(diag G)/L_R(0)`` for every λ (paper A.6)."""
        if self.losses_at_zero[0]:
            return float(self.input_gram.diagonal(dim1=-2, dim2=-1).mean()) / self.losses_at_zero[0]
        return self.mean_diagonal() or 1.0

    @property
    def size(self) -> int:
        """Inputs of a row of `row_weights`: d_in, or the size of a column block."""
        return self.gram.shape[-1]

    @property
    def row_weights(self) -> Tensor:
        """ŵ, [rows, size]: the rows of the weight, or their column blocks one after another."""
        return self.weight.reshape(-1, self.size)

    @property
    def fisher_term(self) -> Fisher:
        assert self.fisher is not None  # b > 0
        return self.fisher

    def mean_diagonal(self) -> float:
        """Mean of all ``F_k,jj`` of the layer."""
        squares = 0.0
        if self.scales.b:
            squares = self.totals.squares if self.totals else self.fisher_term.mean_square()
        return self.scales.a * float(self.gram.diagonal(dim1=-2, dim2=-1).mean()) + self.scales.b * squares

    def grams_of(self, rows: slice) -> Tensor:
        """Index [r] into the flattened matrices of `gram`, for each of some rows of `row_weights`."""
        count = len(self.row_weights)
        groups, blocks = _by_group(self.gram).shape[:2]
        index = torch.arange(*rows.indices(count), device=self.weight.device)
        return index // (count // groups) * blocks + index % blocks

    def row_hessians(self, rows: slice) -> Tensor:
        """The matrices F_k of some rows of `row_weights`, [r, size, size] in float64."""
        grams, which = _by_group(self.gram).flatten(0, 1), self.grams_of(rows)
        shared = grams[which].double() if len(grams) > 1 else grams.double().expand(len(which), -1, -1)
        if not self.scales.b:
            return self.scales.a * shared
        return self.fisher_term.combined(shared, rows, self.scales.a, self.scales.b)

    def losses(self, *weights: Tensor) -> list[RelativeLoss]:
        deltas = torch.stack([weight.float() - self.weight for weight in weights])
        return _relative(_terms(deltas, self.input_gram, self.fisher), self.losses_at_zero, self.scales.lam)


def _by_group(gram: Tensor) -> Tensor:
    """G as [groups, blocks, size, size]."""
    return gram if gram.ndim == 4 else gram.reshape(-1, 1, *gram.shape[-2:])


@dataclass(frozen=True)
class DiagonalQuadratic:
    """`Quadratic` with G and A_k A_kᵀ replaced by their diagonals, as in Wanda, also in the normalisation."""

    weight: Tensor  # ŵ                     [d_out, d_in] float32, 0 at dead inputs
    input_squares: Tensor  # diag G         [d_in], or [d_out, d_in] for groups of rows with separate inputs
    gradient_squares: Tensor | None  # Σ_n A_n²  [d_out, d_in]; None at λ = 1
    samples: int
    scales: Scales
    losses_at_zero: tuple[float, float | None]
    alive: Tensor | None = None  # bool [d_out, d_in], True for the weights that may be nonzero; None: all

    diagonal_only: ClassVar[bool] = True

    @classmethod
    def build(
        cls,
        weight: Tensor,
        input_squares: Tensor,
        gradient_squares: Tensor | None,
        samples: int,
        lam: float,
        alive: Tensor | None = None,
    ) -> DiagonalQuadratic:
        """Build the quadratic from diag G, [d_in] or [groups, d_in], and Σ_n A_n² (None at λ = 1) of N samples."""
        weight, dead = _without_dead_inputs(weight, input_squares)
        input_squares = of_rows(input_squares, len(weight)) if input_squares.ndim == 2 else input_squares
        at_zero = _diagonal_terms([weight], None, input_squares, gradient_squares, samples)[0]
        scalars = scales(lam, *at_zero, samples=samples, dead=dead)
        return cls(weight, input_squares, gradient_squares, samples, scalars, at_zero, alive)

    def diagonal(self) -> Tensor:
        """F_k,jj, [d_out, d_in]."""
        if not (self.scales.a or self.scales.b):
            return torch.ones_like(self.weight)
        diagonal = (self.scales.a * self.input_squares).expand_as(self.weight)
        if self.gradient_squares is None or not self.scales.b:
            return diagonal
        return diagonal + self.scales.b * self.gradient_squares

    def losses(self, *weights: Tensor) -> list[RelativeLoss]:
        squares, samples = self.gradient_squares, self.samples
        terms = _diagonal_terms(weights, self.weight, self.input_squares, squares, samples)
        return _relative(terms, self.losses_at_zero, self.scales.lam)


Objective = Quadratic | DiagonalQuadratic


def of_rows(groups: Tensor, d_out: int) -> Tensor:
    """Values of groups of rows [groups, …], repeated for each of the rows, [d_out, …]."""
    return groups.repeat_interleave(d_out // len(groups), 0)


def _without_dead_inputs(weight: Tensor, input_squares: Tensor) -> tuple[Tensor, int]:
    """A copy of the weight with 0 at dead inputs, and their number."""
    dead = input_squares == 0
    if dead.all():  # the layer is then pruned by magnitude (`scales`), so the weights must remain
        return weight.detach().float(), 0
    of_weight = dead if dead.ndim == 1 else of_rows(dead, len(weight))
    return weight.detach().to(torch.float32, copy=True).masked_fill_(of_weight, 0), int(dead.sum())


def reconstruction(weight: Tensor, gram: Tensor, column_block: int | None = None) -> float:
    """The reconstruction loss L_R(0), of `build`'s arguments."""
    gram = gram if column_block is None else diagonal_blocks(gram, column_block)
    return _terms(weight.float()[None], gram, None)[0][0]


def _terms(deltas: Tensor, gram: Tensor, fisher: Fisher | None) -> list[tuple[float, float | None]]:
    """L_R and L_F (None without gradients) of each of several differences [w, d_out, d_in]."""
    count, size = len(deltas), gram.shape[-1]
    grams = _by_group(gram).float()
    blocks = deltas.unflatten(2, (-1, size)).unflatten(1, (len(grams), -1)).permute(1, 3, 0, 2, 4)
    products = (blocks.flatten(2, 3) @ grams).view_as(blocks)  # [groups, blocks, w, rows, size]
    reconstruction = (products * blocks).double().sum((0, 1, 3, 4)).tolist()
    if fisher is None:
        return [(loss, None) for loss in reconstruction]
    return list(zip(reconstruction, fisher.losses(deltas.reshape(count, -1, size)).tolist(), strict=True))


def _diagonal_terms(
    weights: Sequence[Tensor],
    dense: Tensor | None,
    input_squares: Tensor,
    gradient_squares: Tensor | None,
    samples: int,
) -> list[tuple[float, float | None]]:
    """Like `_terms`, but for the differences of weights [d_out, d_in] from `dense` (or 0), by slices of rows."""
    d_out, d_in = weights[0].shape
    losses = torch.zeros(2, len(weights), dtype=torch.float64, device=weights[0].device)
    for rows in row_slices(slice(0, d_out), LOSS_BYTES * d_in, losses.device):
        inputs = input_squares if input_squares.ndim == 1 else input_squares[rows]
        for index, weight in enumerate(weights):
            part = weight[rows].float()
            squares = (part if dense is None else part - dense[rows]).square()
            losses[0, index] += (squares * inputs).double().sum()
            if gradient_squares is not None:
                losses[1, index] += (squares * gradient_squares[rows]).double().sum()
    if gradient_squares is None:
        return [(loss, None) for loss in losses[0].tolist()]
    return list(zip(losses[0].tolist(), (losses[1] / samples).tolist(), strict=True))


def _relative(
    terms: Sequence[tuple[float, float | None]], at_zero: tuple[float, float | None], lam: float
) -> list[RelativeLoss]:
    """Relative losses; a term that is 0 at W = 0 is 0 for every W that only removes weights, and is not divided."""
    losses = []
    for reconstruction, fisher in terms:
        reconstruction = reconstruction / at_zero[0] if at_zero[0] else reconstruction
        if fisher is None:
            losses.append(RelativeLoss(reconstruction, None, reconstruction))
        else:
            fisher = fisher / at_zero[1] if at_zero[1] else fisher
            losses.append(RelativeLoss(reconstruction, fisher, lam * reconstruction + (1 - lam) * fisher))
    return losses
