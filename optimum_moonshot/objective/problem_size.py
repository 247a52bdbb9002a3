"""The size of a pruning problem, from which solvers estimate their memory before any data is read."""

from dataclasses import dataclass

import torch

from .row_slices import slice_bytes


@dataclass(frozen=True)
class ProblemSize:
    """A matrix [rows, inputs] with its statistics."""

    rows: int  # d_out
    inputs: int  # d_in
    samples: int = 0  # N, of the gradients; 0 without gradients (λ = 1)
    groups: int = 1  # number of Gram matrices, above 1 for a grouped convolution
    column_block: int | None = None  # inputs of a column block of the quadratic; None is all
    compressed: bool = False  # whether the Fisher term is stored as matrices
    lam: float = 1.0  # λ
    sparsity: float = 0.5  # target
    device: torch.device = torch.device("cpu")
    threads: int = 1  # that process slices of rows concurrently

    @property
    def weights(self) -> int:
        return self.rows * self.inputs

    @property
    def size(self) -> int:
        """Inputs of a row of the quadratic: d_in, or the size of a column block."""
        return self.column_block or self.inputs

    @property
    def max_rank(self) -> int:
        """Bound of the rank of the Fisher term of a row; 0 without one."""
        return min(self.samples, self.size)

    def slices(self, bytes_per_row: int, limit: int | None = None) -> int:
        """Bytes of the slices of rows that are processed concurrently, one per thread.

        `limit` is that of a slice in bytes; None is the limit of `row_slices`.
        """
        limit = slice_bytes(self.device) if limit is None else limit
        one = max(bytes_per_row, min(limit, self.rows * bytes_per_row))
        return min(self.threads * one, self.rows * bytes_per_row)


def objective_bytes(size: ProblemSize, diagonal: bool) -> int:
    """Bytes to build an objective and to evaluate the losses of two weights, the pruned and the masked one."""
    if diagonal:
        return 15 * size.weights + 2 * size.slices(24 * size.inputs) // 3
    return (61 if size.compressed else 53) * size.weights
