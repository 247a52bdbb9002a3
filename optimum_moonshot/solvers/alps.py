"""ALPS (Meng et al., arXiv 2406.07831) with row-specific Hessians: a mask by ADMM, then least squares on its support.

With ``H_k = F_k + μI``, scaled to a diagonal of about 1, ADMM splits the weights into an unconstrained copy X and a
sparse copy D, which an increasing penalty ρ forces to agree:

    x_k = (H_k + ρI)⁻¹ (H_k ŵ_k - v_k + ρ d_k),   D = X + V/ρ projected to the pattern,   V += ρ (X - D)

until the support converges. All weights of the layer compete, and a removed weight may return, unlike in the single
sweep of SparseGPT. The remaining weights are then fitted by conjugate gradients, each step of which lowers the loss.

At λ = 1 the rows share H, and x is one product with its inverse. Otherwise, the inverse of the mean H preconditions a
few steps of conjugate gradients, started from the previous iteration, so that no row needs a separate inverse.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from ..devices import is_gpu
from ..objective.linalg import check_factored, parallel_map, row_slices, split_range
from ..objective.patterns import NM, Pattern, Unstructured, keep_alive
from ..objective.quadratic import Quadratic
from .base import PrunedWeight, Solver, damped, damping_option, finish, hyperparameter, register_solver
from .sparsegpt import SparseGPT

# The penalty grows every third iteration: (least fraction of the support that changed, factor) (ALPS, appendix B).
GROWTH = ((0.1, 1.3), (0.005, 1.2), (0.0, 1.1))
EVERY = 3
# Fraction of the support below which a change counts as converged.
SETTLED = 1e-4
# Squared residual, relative to the first, at which conjugate gradients stop.
CONVERGED = 1e-12
# Factors of rows in one slice on a CPU: about its second-level cache.
CACHE_BYTES = 2**20
Operator = Callable[[Tensor], Tensor]


@register_solver("alps")
@dataclass(frozen=True)
class ALPS(Solver):
    """Comparison group: the whole matrix. `damping` p adds μ = p·mean(diag G)/L_R(0) to F_k's diagonal."""

    damping: float = damping_option()
    penalty: float = hyperparameter(0.1, help="ρ of the first iterations, for Hessians with a diagonal of 1", above=0)
    iterations: int = hyperparameter(60, help="most iterations of ADMM; it stops once the mask converges", least=1)
    inner_steps: int = hyperparameter(3, help="steps of conjugate gradients per iteration, where λ < 1", least=1)
    # 20 steps have the loss of 100 within 3e-4 on SmolLM2-135M at 2:4 and 0.6, in half of the time.
    refit_steps: int = hyperparameter(20, help="most steps of conjugate gradients on the remaining weights", least=0)

    patterns: ClassVar[tuple[type, ...]] = (Unstructured, NM)
    grouped: ClassVar[bool] = True

    def solve(self, objective: Quadratic, pattern: Pattern) -> PrunedWeight:
        if not (objective.scales.a or objective.scales.b):  # without statistics, prune by magnitude
            keep = pattern.keep(objective.weight.square())
            return finish(objective, objective.weight, keep, self.damping, self.damping)
        return damped(objective, self.damping, lambda ridge: self._split(objective, ridge, pattern))

    def trials(self, objective: Quadratic, patterns: Sequence[Pattern]) -> list[Tensor]:
        # SparseGPT takes a fraction of the time, and its losses have about the same ratios between patterns.
        return SparseGPT(damping=self.damping).trials(objective, patterns)

    def _split(self, objective: Quadratic, ridge: float, pattern: Pattern) -> tuple[Tensor, Tensor]:
        """Pruned weight and `keep`, both [d_out, d_in]."""
        system = System(objective, ridge, torch.float32)
        dense = system.dense
        target = system.times(dense)
        free, image, shifted = dense, target, dense  # image: H_k free_k
        previous = keep = torch.ones_like(dense, dtype=torch.bool)
        rho = self.penalty
        for first in range(0, self.iterations, EVERY):
            inverse = system.inverse(rho)
            for _ in range(min(EVERY, self.iterations - first)):
                # shifted = X + V/ρ is D on `keep` and the next V/ρ elsewhere: one tensor has both.
                right = torch.where(keep, shifted, -shifted).mul_(rho).add_(target)
                free, image = system.solve(right, rho, inverse, free, image, self.inner_steps)
                shifted = shifted.masked_fill(keep, 0).add_(free)
                scores = shifted.square()
                if objective.importance is not None and isinstance(pattern, Unstructured):
                    scores *= objective.importance
                keep = keep_alive(pattern.keep, scores, objective.alive)
            check_factored(shifted.isfinite().all())
            changed = float((keep != previous).sum()) / 2 / max(1, int(keep.sum()))
            if changed < SETTLED:
                break
            growth = next(growth for least, growth in GROWTH if changed >= least)
            previous, rho = keep, rho * growth
            shifted = torch.where(keep, shifted, shifted / growth)  # V stays
        sparse = shifted.masked_fill(~keep, 0)
        return system.refit(sparse, keep, self.refit_steps), keep


class System:
    """The matrices ``H_k = S_k⁻¹ (F_k + μI) S_k⁻¹`` of all rows, for weights ``S_k w_k``, all in `dtype`.

    S_k is diagonal, the product of a scale per input, which the rows of a group share, and one per row, such that the
    diagonals of H_k are 1 on average over both: one penalty ρ then suits all weights, and rounding in float32 stays
    below the differences between masks. All methods raise `FactorizationError` where a matrix is not positive definite.
    """

    def __init__(self, objective: Quadratic, ridge: float, dtype: torch.dtype):
        weight = objective.weight
        gram = objective.scales.a * objective.gram.to(dtype).reshape(-1, *objective.gram.shape[-2:])
        gram.diagonal(dim1=1, dim2=2).add_(ridge)
        self.rows = _rows(objective, gram, ridge)
        diagonal = self.rows.diagonal.view(len(gram), -1, weight.shape[1])
        inputs = diagonal.mean(1, keepdim=True).sqrt()
        outputs = (diagonal / inputs.square()).mean(2, keepdim=True).sqrt()
        self.scale = (inputs * outputs).expand(-1, len(weight) // len(gram), -1).reshape(weight.shape)
        # The mean H_k over the rows: the shared part exactly, the Fisher terms only by their diagonal (of 1 in total),
        # which needs no product over all rows. The diagonal of the shared part alone may exceed 1 where rows differ in
        # scale; it is never lowered, which could make the matrix indefinite.
        self.mean = gram / inputs / inputs.mT * outputs.pow(-2).mean(1, keepdim=True)
        self.mean.diagonal(dim1=1, dim2=2).clamp_(min=1)
        self.weight, self.dense = weight, (weight.to(dtype) * self.scale).contiguous()

    def times(self, vectors: Tensor) -> Tensor:
        """``H_k x_k`` for x [d_out, d_in]."""
        return self.rows.times(vectors / self.scale) / self.scale

    def inverse(self, rho: float) -> Tensor:
        """``(H + ρI)⁻¹`` of the mean H, [groups, d_in, d_in]; exact for every row at λ = 1."""
        shifted = self.mean.clone()
        shifted.diagonal(dim1=1, dim2=2).add_(rho)
        factor, info = torch.linalg.cholesky_ex(shifted)
        check_factored(info == 0, "the Gram matrix")
        return torch.cholesky_inverse(factor)

    def _inverse_on(self, columns: Tensor) -> Tensor:
        """The inverse of the mean H restricted to some columns, bool [d_in], and zeros elsewhere."""
        lower, info = torch.linalg.cholesky_ex(self.mean[:, columns][:, :, columns])
        check_factored(info == 0, "the Gram matrix")
        whole, within = torch.zeros_like(self.mean), columns.nonzero()[:, 0]
        whole[:, within[:, None], within] = torch.cholesky_inverse(lower)
        return whole

    def solve(
        self, right: Tensor, rho: float, inverse: Tensor, start: Tensor, image: Tensor, steps: int
    ) -> tuple[Tensor, Tensor]:
        """``(H_k + ρI)⁻¹ r_k``, exactly at λ = 1, else approximately by `steps` of conjugate gradients.

        `right` is r, `inverse` from `inverse` for ρ, and `image` H_k times `start`. Returns the solutions and, if the
        rows do not share H, their products with H_k, both [d_out, d_in].
        """
        if self.rows.shared:
            return _product(right, inverse), image

        def times(vectors: Tensor) -> Tensor:
            return self.times(vectors) + rho * vectors

        solution, residual = conjugate_gradients(
            times, right - image - rho * start, start, steps, lambda residual: _product(residual, inverse)
        )
        return solution, right - residual - rho * solution  # H_k x without another product

    def refit(self, sparse: Tensor, keep: Tensor, steps: int, columns: Tensor | None = None) -> Tensor:
        """Least squares on `keep`; each row starts from the better of `sparse`, scaled, and the masked dense weight.

        Every one of the at most `steps` conjugate gradients lowers the loss of every row. `columns`, bool [d_in], are
        rows that lose few weights: the inverse of the mean H on them is the preconditioner, with which a
        row that lacks z of them converges in z + 1 steps at λ = 1. Returns the weight [d_out, d_in] in the original
        coordinates.
        """
        errors = torch.stack([self.dense - sparse, torch.where(keep, 0, self.dense)])
        gradients = torch.stack([self.times(error) for error in errors])  # half the negative gradients
        losses = (errors * gradients).sum(2, keepdim=True)
        better = losses[0] < losses[1]
        start, gradient = (torch.where(better, first, second) for first, second in (errors, gradients))
        inverse = None if columns is None else self._inverse_on(columns)
        error, _ = conjugate_gradients(
            lambda vectors: torch.where(keep, self.times(vectors), 0),
            torch.where(keep, -gradient, 0),
            start,
            steps,
            lambda residual: residual if inverse is None else torch.where(keep, _product(residual, inverse), 0),
        )
        weight = self.weight - (error / self.scale).float()
        check_factored(weight.isfinite().all())
        return weight


class Rows(Protocol):
    """The matrices ``F_k + μI`` of all rows."""

    shared: bool  # whether the rows of a group have the same matrix
    diagonal: Tensor  # of the matrices, [d_out, d_in] or [groups, 1, d_in]

    def times(self, vectors: Tensor) -> Tensor:
        """The product of every row's matrix with its vector, [d_out, d_in] in the dtype of the vectors."""


class SharedRows:
    """λ = 1: one matrix for all rows of a group; `gram` is a·G + μI, [groups, d_in, d_in]."""

    shared = True

    def __init__(self, gram: Tensor):
        self.gram = gram
        self.diagonal = gram.diagonal(dim1=1, dim2=2)[:, None]

    def times(self, vectors: Tensor) -> Tensor:
        return _product(vectors, self.gram)


class LowRankRows:
    """The shared matrix a·G + μI, `gram` [groups, d_in, d_in], plus a low-rank term per row.

    `factors` are √b·A_kᵀ, [d_out, samples, d_in] in float32, contiguous.
    """

    shared = False

    def __init__(self, gram: Tensor, factors: Tensor):
        # Each factor is read twice, so a slice of them has to fit the CPU's cache.
        size = len(factors) if is_gpu(factors.device) else max(1, CACHE_BYTES * len(factors) // factors.nbytes)
        self.gram, self.factors, self.parts = gram, factors, split_range(0, len(factors), size)
        squares = torch.cat([factors[rows].square().sum(1) for rows in self.parts])
        self.diagonal = gram[0].diagonal() + squares

    def times(self, vectors: Tensor) -> Tensor:
        products, single = _product(vectors, self.gram), vectors.float()[:, None]

        def add(rows: slice) -> None:
            factors = self.factors[rows]
            products[rows] += ((single[rows] @ factors.mT) @ factors)[:, 0]

        parallel_map(add, self.parts, vectors.device)
        return products


class DenseRows:
    """A matrix per row, [d_out, d_in, d_in] in float32: their products are bound by memory bandwidth."""

    shared = False

    def __init__(self, matrices: Tensor, dtype: torch.dtype):
        self.matrices = matrices
        self.diagonal = matrices.diagonal(dim1=1, dim2=2).to(dtype)

    def times(self, vectors: Tensor) -> Tensor:
        return (self.matrices @ vectors[:, :, None].float())[:, :, 0].to(vectors.dtype)


def _rows(objective: Quadratic, gram: Tensor, ridge: float) -> Rows:
    """The matrices in their cheapest form; `gram` is that of `SharedRows`."""
    if not objective.scales.b:
        return SharedRows(gram)
    fisher, device, (d_out, d_in) = objective.fisher_term, objective.weight.device, objective.weight.shape
    if len(gram) == 1 and fisher.max_rank < d_in:
        factors = torch.empty(d_out, fisher.max_rank, d_in, device=device)
        for rows in row_slices(slice(0, d_out), 4 * fisher.max_rank * d_in, device):
            torch.mul(fisher.factors(rows, device, torch.float32), objective.scales.b**0.5, out=factors[rows])
        return LowRankRows(gram, factors)
    matrices = torch.empty(d_out, d_in, d_in, device=device)
    for rows in row_slices(slice(0, d_out), 8 * d_in * d_in, device):
        matrices[rows] = objective.row_hessians(rows)
    matrices.diagonal(dim1=1, dim2=2).add_(ridge)
    return DenseRows(matrices, gram.dtype)


def conjugate_gradients(
    times: Operator, residual: Tensor, start: Tensor, steps: int, condition: Operator = lambda residual: residual
) -> tuple[Tensor, Tensor]:
    """Preconditioned conjugate gradients (Hestenes & Stiefel 1952) on one positive definite system per row.

    `times` is the product of the systems with vectors, `condition` that of an approximate inverse; `residual` is the
    right-hand side minus times(start). At most `steps`, fewer once all rows have converged. Returns the solution and
    its residual. All tensors are [d_out, d_in].
    """
    solution, direction = start, torch.zeros_like(start)
    first = before = torch.ones_like(start[:, :1])
    for number in range(steps):
        conditioned = condition(residual)
        now = (residual * conditioned).sum(1, keepdim=True)
        first = first if number else now
        active = now > CONVERGED * first  # converged rows stop: further steps would fit rounding errors
        if number % EVERY == 0 and not bool(active.any()):  # not at every step: it waits for the GPU
            break
        direction.mul_(torch.where(active, now / before, 0)).add_(conditioned)
        image = times(direction)
        curvature = (direction * image).sum(1, keepdim=True)
        length = torch.where(active & (curvature > 0), now / curvature, 0)
        solution = torch.addcmul(solution, length, direction, out=solution if number else None)
        residual = torch.addcmul(residual, -length, image, out=residual if number else None)
        before = now
    return solution, residual


def _product(vectors: Tensor, matrices: Tensor) -> Tensor:
    """Rows [d_out, d_in] times their group's symmetric matrix [groups, d_in, d_in]."""
    return (vectors.view(len(matrices), -1, vectors.shape[1]) @ matrices).view_as(vectors)
