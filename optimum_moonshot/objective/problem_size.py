"""The size of what a solver is given, by which it says what memory and time it takes, before there is any data."""

from dataclasses import dataclass

import torch

from .row_slices import slice_bytes


@dataclass(frozen=True)
class ProblemSize:
    """One matrix [rows, inputs] with its statistics."""

    rows: int  # d_out
    inputs: int  # d_in
    samples: int = 0  # N, of the gradients; 0 without any (λ = 1)
    groups: int = 1  # Gram matrices that the rows have: those of a grouped convolution
    column_block: int | None = None  # inputs of a column block of the quadratic; None is all
    compressed: bool = False  # the gradients are given as matrices
    lam: float = 1.0  # λ
    sparsity: float = 0.5  # that it is pruned to
    device: torch.device = torch.device("cpu")
    threads: int = 1  # that work on slices of rows at once

    @property
    def weights(self) -> int:
        """Of the matrix."""
        return self.rows * self.inputs

    @property
    def size(self) -> int:
        """Inputs that have a quadratic together."""
        return self.column_block or self.inputs

    @property
    def rank(self) -> int:
        """Factors that the Fisher term of a row has; 0 without one."""
        return min(self.samples, self.size)

    def slices(self, bytes_per_row: int, limit: int | None = None) -> int:
        """Bytes of the slices of rows that pass at a time, one a thread.

        Args:
            bytes_per_row: of intermediates.
            limit: of a slice; None is that of `row_slices`.
        """
        limit = slice_bytes(self.device) if limit is None else limit
        one = max(bytes_per_row, min(limit, self.rows * bytes_per_row))
        return min(self.threads * one, self.rows * bytes_per_row)


@dataclass(frozen=True)
class Work:
    """What solving a matrix takes beside its statistics and the dense weight."""

    bytes: int  # at the peak
    operations: float  # in proportion to the time, between matrices of one solver


def ruler_bytes(size: ProblemSize, diagonal: bool) -> int:
    """What building an objective and measuring its losses takes, for two weights, the pruned and the masked one.

    Args:
        size: of the matrix.
        diagonal: whether the objective has diagonals alone, of which some rows at a time are measured.
    """
    if diagonal:
        return 15 * size.weights + 2 * size.slices(24 * size.inputs) // 3
    return (61 if size.compressed else 53) * size.weights
