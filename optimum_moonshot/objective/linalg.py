"""Damped Cholesky factorisations of symmetric positive definite matrices.

Factors are computed in float64: the shared matrix of a layer is factored only once, and its condition number often
exceeds 10⁷, the limit of float32.
"""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from ..errors import FactorizationError

MAX_DAMPING = 1.0

T = TypeVar("T")


def all_finite(tensor: Tensor) -> bool:
    """Whether no entry is NaN or infinite."""
    if not tensor.numel():
        return True
    low, high = torch.aminmax(tensor)  # propagates NaN, and needs no temporary of the tensor's size as isfinite does
    return bool(torch.isfinite(low) & torch.isfinite(high))


def diagonal_blocks(matrix: Tensor, size: int) -> Tensor:
    """The diagonal blocks of matrices.

    Args:
        matrix: [d, d], or several, [g, d, d].
        size: of a block, a divisor of d.

    Returns:
        [g, d / size, size, size], with g = 1 for a single matrix.
    """
    matrices = matrix if matrix.ndim == 3 else matrix[None]
    blocks = matrices.unflatten(2, (-1, size)).unflatten(1, (-1, size)).diagonal(dim1=1, dim2=3)
    return blocks.permute(0, 3, 1, 2).contiguous()


def inverse_factor(matrix: Tensor, ridge: float = 0.0) -> tuple[Tensor, Tensor]:
    """The upper triangular U with ``(matrix + ridge·I)⁻¹ = Uᵀ U``, without inverting the matrix.

    Factoring the matrix with rows and columns reversed yields ``matrix = V Vᵀ`` with V upper triangular, and U = V⁻¹.
    That is one factorisation and one triangular inverse, half the work of Cholesky → inverse → Cholesky. At most two
    matrices beside `matrix` are in memory at a time.

    Args:
        matrix: symmetric, [..., d, d], float64; not modified.
        ridge: added to the diagonal.

    Returns:
        U, [..., d, d], and a bool tensor [...], False where `matrix` is not positive definite.
    """
    flipped = matrix.flip(-2, -1)
    flipped.diagonal(dim1=-2, dim2=-1).add_(ridge)
    lower, info = torch.linalg.cholesky_ex(flipped)
    del flipped
    # Column-major, as LAPACK needs it to write the solution in place.
    inverse = torch.zeros(matrix.shape, dtype=matrix.dtype, device=matrix.device).mT
    inverse.diagonal(dim1=-2, dim2=-1).fill_(1)
    torch.linalg.solve_triangular(lower, inverse, upper=False, out=inverse)
    del lower
    ok = (info == 0) & torch.isfinite(inverse.diagonal(dim1=-2, dim2=-1)).all(-1)
    return inverse.flip(-2, -1), ok


def damped_inverse_factor(matrix: Tensor, unit: float, damping: float) -> Tensor:
    """U with ``(matrix + damping·unit·I)⁻¹ = Uᵀ U``.

    Args:
        matrix: symmetric, [d, d].
        unit: added to the diagonal by a damping of 1.
        damping: in (0, 1].

    Returns:
        U, [d, d] in float64.

    Raises:
        FactorizationError: the matrix is not positive definite at this damping.
    """
    factor, ok = inverse_factor(matrix.double(), damping * unit)
    check_factored(ok, f"the quadratic of size {matrix.shape[-1]}")
    return factor


def check_factored(ok: Tensor, what: str = "a row's Hessian") -> None:
    """Raise `FactorizationError` unless all of `ok` is True.

    Args:
        ok: bool, any shape: whether each factorisation succeeded.
        what: the factored matrix, for the message.

    Raises:
        FactorizationError: a factorisation has failed.
    """
    if not ok.all():
        raise FactorizationError(f"{what} is not positive definite")


def escalate(damping: float, attempt: Callable[[float], T]) -> tuple[T, float]:
    """Call `attempt` with increasing damping until it succeeds; returns its result and the damping.

    Args:
        damping: the first value, in (0, 1]; it increases tenfold, up to `MAX_DAMPING`, after each failure.
        attempt: raises `FactorizationError` on failure.

    Raises:
        FactorizationError: it fails even at a damping of `MAX_DAMPING`.
    """
    tried = []
    while True:
        try:
            return attempt(damping), damping
        except FactorizationError as error:
            tried.append(damping)
            if damping >= MAX_DAMPING:
                hint = "more or longer calibration samples improve its condition number"
                raise FactorizationError(f"{error} at any damping of {tried}", hint=hint) from None
        damping = min(10 * damping, MAX_DAMPING)
