"""The Fisher term of a quadratic's rows, ``A_k A_kᵀ = Σ_n a_n a_nᵀ`` for row k, in several representations.

`SampleGradients` stores row k of each sample's gradient, the a_n. `FisherMatrices` stores the sums, which is exact too
and smaller if there are more samples than inputs. `SharedFisher` is an approximation that does not depend on the row.
Quadratics and solvers use the interface `Fisher` only; another approximation of the term is another subclass.

Tensor format: rows are the rows of a weight [d_out, d_in], or its column blocks, where block j of row k is row
``k · blocks + j``. Values may be on any device and in any floating-point dtype; results are computed on the device of
the caller, by slices of rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from .linalg import all_finite, diagonal_blocks, slices_within

# Bytes of a slice of rows: values stored on another device are streamed in slices of this size.
SLICE_BYTES = 256 * 2**20


class Fisher(ABC):
    """``A_k A_kᵀ`` [size, size] of each of `count` rows, summed over `samples`."""

    samples: int  # N
    count: int  # rows
    size: int  # inputs of a row: d_in, or the size of a column block
    max_rank: int  # number of factors of a row, a bound of its rank: at most the samples, and at most the inputs
    shared: Tensor | None = None  # the matrices, [matrices, size, size], where consecutive rows share one
    squares: Tensor | None = None  # with the diagonals of each row's own term, [count, size]

    @abstractmethod
    def part(self, rows: slice) -> Fisher:
        """The Fisher term of some rows, without a copy."""

    @abstractmethod
    def column_blocks(self, size: int) -> Fisher:
        """The Fisher term of column blocks with `size` inputs, as rows; `self` if its rows are such blocks already."""

    @abstractmethod
    def matrices(self, rows: slice, device: torch.device) -> Tensor:
        """``A_k A_kᵀ`` of r rows, as a new tensor [r, size, size] in float64 on `device`."""

    @abstractmethod
    def losses(self, deltas: Tensor) -> Tensor:
        """``L_F = 1/N Σ_k ‖A_kᵀ δ_k‖²`` of several differences, by slices of rows.

        Args:
            deltas: δ, [w, count, size] in float32.

        Returns:
            [w] in float64, on the same device.
        """

    @abstractmethod
    def mean_square(self) -> float:
        """Mean of the diagonals of all matrices: the mean of Σ_n A_n² over the weights."""

    @abstractmethod
    def is_finite(self) -> bool:
        """Whether no value is NaN or infinite."""

    def factors(self, rows: slice, device: torch.device, dtype: torch.dtype = torch.float64) -> Tensor:
        """Factors B [r, max_rank, size] of r rows, ``Bᵀ B = A_k A_kᵀ``, for algorithms on few vectors per row.

        They are read-only, since they may share the memory of the stored values.
        """
        values, vectors = torch.linalg.eigh(self.matrices(rows, device))
        return (vectors.mT * values.clamp_(min=0).sqrt_()[:, :, None]).to(dtype)

    def combined(self, shared: Tensor, rows: slice, a: float, b: float) -> Tensor:
        """``a·shared + b·A_k A_kᵀ`` of r rows, as a new tensor.

        `shared` and the result are [r, size, size] in float64, on the same device.
        """
        return self.matrices(rows, shared.device).mul_(b).add_(shared, alpha=a)


class SampleGradients(Fisher):
    """The gradients A_n of the samples, [N, rows, size]."""

    def __init__(self, gradients: Tensor):
        self.gradients = gradients
        self.samples, self.count, self.size = gradients.shape
        self.max_rank = min(self.samples, self.size)

    def part(self, rows: slice) -> SampleGradients:
        return SampleGradients(self.gradients[:, rows])

    def column_blocks(self, size: int) -> SampleGradients:
        return SampleGradients(self.gradients.unflatten(2, (-1, size)).flatten(1, 2))

    def matrices(self, rows: slice, device: torch.device) -> Tensor:
        vectors = self._vectors(rows, device, torch.float64)
        return vectors.mT @ vectors

    def losses(self, deltas: Tensor) -> Tensor:
        total = torch.zeros(len(deltas), dtype=torch.float64, device=deltas.device)
        for rows in slices_within(slice(0, self.count), 4 * self.size * self.samples, SLICE_BYTES):
            columns = deltas[:, rows].permute(1, 2, 0)
            products = self.gradients[:, rows].to(deltas.device, torch.float32).transpose(0, 1) @ columns
            total += products.double().square().sum((0, 1))
        return total / self.samples

    def mean_square(self) -> float:
        return sum(float(part.float().square().sum()) for part in self.gradients) / (self.count * self.size)

    def is_finite(self) -> bool:
        return all_finite(self.gradients)

    def factors(self, rows: slice, device: torch.device, dtype: torch.dtype = torch.float64) -> Tensor:
        if self.samples > self.size:
            return super().factors(rows, device, dtype)
        return self._vectors(rows, device, dtype)

    def combined(self, shared: Tensor, rows: slice, a: float, b: float) -> Tensor:
        vectors = self._vectors(rows, shared.device, torch.float64)
        return torch.baddbmm(shared, vectors.mT, vectors, beta=a, alpha=b)

    def _vectors(self, rows: slice, device: torch.device, dtype: torch.dtype) -> Tensor:
        """The a_n of some rows, [r, N, size]."""
        return self.gradients[:, rows].to(device).transpose(0, 1).to(dtype)


class FisherMatrices(Fisher):
    """The matrices ``Σ_n a_n a_nᵀ`` of N samples, [rows, size, size]."""

    def __init__(self, values: Tensor, samples: int):
        self.values, self.samples = values, samples
        self.count, _, self.size = values.shape
        self.max_rank = self.size

    def part(self, rows: slice) -> FisherMatrices:
        return FisherMatrices(self.values[rows], self.samples)

    def column_blocks(self, size: int) -> FisherMatrices:
        if size == self.size:
            return self
        return FisherMatrices(diagonal_blocks(self.values, size).flatten(0, 1), self.samples)

    def matrices(self, rows: slice, device: torch.device) -> Tensor:
        return self.values[rows].to(device, torch.float64, copy=True)

    def losses(self, deltas: Tensor) -> Tensor:
        total = torch.zeros(len(deltas), dtype=torch.float64, device=deltas.device)
        for rows in slices_within(slice(0, self.count), 4 * self.size**2, SLICE_BYTES):
            columns = deltas[:, rows].permute(1, 2, 0)
            products = self.values[rows].to(deltas.device, torch.float32) @ columns
            total += (products * columns).double().sum((0, 1))
        return total / self.samples

    def mean_square(self) -> float:
        return float(self.values.diagonal(dim1=1, dim2=2).double().mean())

    def is_finite(self) -> bool:
        return all_finite(self.values)


class SharedFisher(Fisher):
    """``Σ_t s_t x_t x_tᵀ`` with ``s_t = mean_k δ_tk²`` over the rows that share it (GuidedQuant, arXiv 2505.07004).

    For independent tokens it is the mean of the rows' terms. The rows of a layer, or of each of its groups, share one.

    Args:
        shared: [matrices, size, size].
        which: index of each row's matrix, int64 [count] on the CPU; ascending, or that of column blocks.
        samples: N.
        squares: ``Σ_t δ_tk² x_tj²``, [count, size], whose mean over rows is the diagonal of their matrix; optional.
    """

    def __init__(self, shared: Tensor, which: Tensor, samples: int, squares: Tensor | None = None):
        self.shared: Tensor = shared
        self.which, self.samples, self.squares = which, samples, squares
        self.count, self.size = len(which), shared.shape[-1]
        self.max_rank = self.size

    def part(self, rows: slice) -> SharedFisher:
        which = self.which[rows]
        first, last = (int(which.min()), int(which.max())) if len(which) else (0, -1)
        squares = None if self.squares is None else self.squares[rows]
        return SharedFisher(self.shared[first : last + 1], which - first, self.samples, squares)

    def column_blocks(self, size: int) -> SharedFisher:
        blocks = self.size // size
        if blocks == 1:
            return self
        which = self.which[:, None] * blocks + torch.arange(blocks)
        squares = None if self.squares is None else self.squares.reshape(-1, size)
        return SharedFisher(diagonal_blocks(self.shared, size).flatten(0, 1), which.flatten(), self.samples, squares)

    def matrices(self, rows: slice, device: torch.device) -> Tensor:
        return self.shared.to(device, torch.float64)[self.which[rows].to(device)]

    def losses(self, deltas: Tensor) -> Tensor:
        total = torch.zeros(len(deltas), dtype=torch.float64, device=deltas.device)
        for index, matrix in enumerate(self.shared):
            of_rows = deltas if len(self.shared) == 1 else deltas[:, self.which == index]
            products = of_rows @ matrix.to(deltas.device, torch.float32)
            total += (products * of_rows).double().sum((1, 2))
        return total / self.samples

    def mean_square(self) -> float:
        diagonals = self.shared.diagonal(dim1=1, dim2=2).double().mean(1).cpu()
        return float(diagonals[self.which].mean())

    def is_finite(self) -> bool:
        return all_finite(self.shared)
