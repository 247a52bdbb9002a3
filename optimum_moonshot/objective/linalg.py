"""Damped Cholesky factorisations, parallel small products on a CPU, and slices of rows of bounded memory.

Factors are computed in float64: the shared matrix of a layer is factored only once, and its condition number often
exceeds 10⁷, the limit of float32.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from ..errors import FactorizationError

# Intermediates of a slice of rows: near the size of the caches of a CPU, large enough to occupy a GPU.
CPU_BYTES = 64 * 2**20
GPU_BYTES = 1024 * 2**20


@dataclass(eq=False)
class SliceLimit:
    """The limit on a solver's slices with several rows, which a run lowers when its device is out of memory."""

    most: int | None = None  # bytes; None sets no limit
    largest: int = 0  # bytes of the largest such slice so far


_LIMIT: ContextVar[SliceLimit | None] = ContextVar("limit of slices of rows", default=None)


@contextmanager
def limited(limit: SliceLimit) -> Iterator[None]:
    """Apply a limit to the results of `slices_within` and `row_slices` in this thread, inside the block.

    Work that needs far less memory than a solver, such as a selection, uses `split_within`: smaller slices there
    would not help a solver that is out of memory.
    """
    token = _LIMIT.set(limit)
    try:
        yield
    finally:
        _LIMIT.reset(token)


def split_range(start: int, stop: int, width: int) -> list[slice]:
    """Split [start, stop) into slices of `width` indices; the last one has the remainder."""
    return [slice(first, min(first + width, stop)) for first in range(start, stop, width)]


def split_within(rows: int, bytes_per_row: int, most: int) -> list[slice]:
    """Split [0, rows) into slices of at most `most` bytes and at least one row, whatever `limited` allows."""
    return split_range(0, rows, max(1, most // bytes_per_row))


def row_slices(rows: slice, bytes_per_row: int, device: torch.device) -> list[slice]:
    """Like `slices_within`, but with intermediates that fit `CPU_BYTES` or `GPU_BYTES`."""
    return slices_within(rows, bytes_per_row, slice_bytes(device))


def slices_within(rows: slice, bytes_per_row: int, most: int) -> list[slice]:
    """Split rows (with start and stop) into slices of at most `most` bytes, or what `limited` allows if that is less.

    A slice has at least one row.
    """
    limit = _LIMIT.get() or SliceLimit()
    width = max(1, (most if limit.most is None else min(most, limit.most)) // bytes_per_row)
    together = min(width, rows.stop - rows.start)
    if together > 1:
        limit.largest = max(limit.largest, together * bytes_per_row)
    return split_range(rows.start, rows.stop, width)


def slice_bytes(device: torch.device) -> int:
    """Limit on the intermediates of a slice on a device."""
    return CPU_BYTES if device.type == "cpu" else GPU_BYTES


MAX_DAMPING = 1.0
# Weights of at most this and at least its reciprocal, about 1e±12, have losses that float32 can hold. Others are solved
# in another unit, which does not change the minimum.
ORDINARY = 2.0**40

T = TypeVar("T")
Piece = TypeVar("Piece")


def all_finite(tensor: Tensor) -> bool:
    """Whether no entry is NaN or infinite."""
    if not tensor.numel():
        return True
    low, high = torch.aminmax(tensor)  # propagates NaN; unlike `isfinite`, needs no temporary of the tensor's size
    return bool(torch.isfinite(low) & torch.isfinite(high))


def in_unit(weight: Tensor) -> tuple[Tensor, float]:
    """A weight divided by its unit, and the unit: 1, or a power of two near the largest |weight| beyond `ORDINARY`.

    The division by a power of two is exact.
    """
    largest = max(abs(float(extreme)) for extreme in torch.aminmax(weight))
    if largest == 0 or 1 / ORDINARY <= largest <= ORDINARY:
        return weight, 1.0
    unit = 2.0 ** math.frexp(largest)[1]
    return (weight.double() / unit).float(), unit


def diagonal_blocks(matrix: Tensor, size: int) -> Tensor:
    """The diagonal blocks of matrices [d, d] or [g, d, d], as [g or 1, d / size, size, size]."""
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
    """U [d, d] in float64 with ``(matrix + damping·unit·I)⁻¹ = Uᵀ U``.

    Raises:
        FactorizationError: the matrix is not positive definite at this damping.
    """
    factor, ok = inverse_factor(matrix.double(), damping * unit)
    check_factored(ok, f"the quadratic of size {matrix.shape[-1]}")
    return factor


def check_factored(ok: Tensor, what: str = "a row's Hessian") -> None:
    """Raise `FactorizationError` unless all of `ok` is True: whether each factorisation succeeded."""
    if not ok.all():
        raise FactorizationError(f"{what} is not positive definite")


def escalate(damping: float, attempt: Callable[[float], T]) -> tuple[T, float]:
    """Call `attempt` with increasing damping until it succeeds; returns its result and the damping.

    After each `FactorizationError`, the damping increases tenfold, up to `MAX_DAMPING`, where the error is final.
    """
    dampings = []
    while True:
        try:
            return attempt(damping), damping
        except FactorizationError as error:
            dampings.append(damping)
            if damping >= MAX_DAMPING:
                hint = "more or longer calibration samples improve its condition number"
                raise FactorizationError(f"{error} at any damping of {dampings}", hint=hint) from None
        damping = min(10 * damping, MAX_DAMPING)


def parallel_map(work: Callable[[Piece], T], pieces: Sequence[Piece], device: torch.device) -> list[T]:
    """Call `work` on every piece, on a CPU concurrently with one torch thread per call.

    torch parallelises within an operation, which costs more than it gains on small batched products, and its batched
    factorisations use a single thread anyway. Calls must write to disjoint memory, so that results do not depend on the
    number of threads; they are in the order of `pieces`. The first exception is raised after all calls have ended.
    """
    threads = min(torch.get_num_threads(), len(pieces)) if device.type == "cpu" else 1
    if threads <= 1:
        with torch.no_grad():
            return [work(piece) for piece in pieces]
    total = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return list(pool.map(torch.no_grad()(work), pieces))
    finally:
        torch.set_num_threads(total)  # threads started later would inherit the workers' setting
