"""The format "bitmask": the nonzero values of a matrix and one bit per weight. Formulas only, no file access.

A matrix W [d_out, d_in] is stored as

* ``values`` (``_packed``): row by row in the order of the inputs, [d_out, d_in·n/m] for n:m, otherwise flat;
* ``meta`` (``_meta``): uint8 [d_out, ⌈d_in/8⌉], bit j (least significant first) of byte b is 1 where input 8b+j has a
  value.

If m consecutive inputs have fewer than n nonzeros, zeros are stored in addition, so that all rows have the same length.
−0.0 counts as zero and is restored as 0.0; all other values are restored bit for bit. 2:4 in 16 bits needs 1/2 + 1/16
= 9/16 of the memory. In this package, `shape` is (d_out, d_in), and `values`, `meta` are these tensors.
"""

from functools import lru_cache, reduce

import numpy as np
import torch
from torch import Tensor

from ..errors import MoonshotError, require
from ..kernels import find_library
from ..objective.patterns import NM

# The integer dtype of the same width as a floating-point dtype: bit patterns of NaN and −0.0 are copied unchanged.
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_STEP = 1 << 17  # bytes of `meta` unpacked at a time, since the shifts need 12 times the memory of their weights


def packed_bytes(shape: tuple[int, int], values: int, itemsize: int) -> int:
    """Bytes of a packed matrix with this number of values."""
    return values * itemsize + shape[0] * -(-shape[1] // 8)


def pack(matrix: Tensor, pattern: NM | None) -> tuple[Tensor, Tensor]:
    """Pack a matrix in host memory into `values`, in its dtype, and `meta`; without a pattern, exactly the nonzeros.

    Raises:
        MoonshotError: m consecutive inputs have more than n nonzeros.
    """
    matrix = matrix.contiguous()
    meta, integers = stored_bits(matrix, pattern), matrix.view(INTEGERS[matrix.dtype.itemsize])
    if pattern is not None:
        integers = torch.where(matrix != 0, integers, 0)  # a zero that is stored may be −0.0
    keep = np.unpackbits(meta.numpy(), axis=1, count=matrix.shape[1], bitorder="little").view(bool)
    values = torch.from_numpy(integers.numpy()[keep]).view(matrix.dtype)
    return values if pattern is None else values.view(len(matrix), -1), meta


def stored_bits(matrix: Tensor, pattern: NM | None) -> Tensor:
    """`meta` of a matrix in host memory.

    Raises:
        MoonshotError: m consecutive inputs have more than n nonzeros.
    """
    keep, d_in = matrix != 0, matrix.shape[1]
    meta = pack_bits(keep)
    if pattern is None or is_nm(meta, d_in, pattern):
        return meta
    if 8 % pattern.m == 0 and d_in % 8 == 0:
        meta = _filled_bytes(pattern)[meta.int()]
        if is_nm(meta, d_in, pattern):
            return meta
    _fill(keep.view(-1, pattern.m), pattern, d_in)
    return pack_bits(keep)


def pack_bits(keep: Tensor) -> Tensor:
    """The inverse of `unpack_bits`, in host memory."""
    return torch.from_numpy(np.packbits(keep.numpy(), axis=1, bitorder="little"))


def is_nm(meta: Tensor, d_in: int, pattern: NM) -> bool:
    """Whether exactly n of every m inputs have a value; m divides `d_in`."""
    if 8 % pattern.m == 0 and d_in % 8 == 0:
        return bool(_regular(pattern.m, pattern.n, meta.device)[meta.int()].all())
    return bool((unpack_bits(meta, d_in).view(-1, pattern.m).sum(1) == pattern.n).all())


def fullest_window(meta: Tensor, m: int) -> int:
    """The most values that m consecutive inputs have; m is 4 or a multiple of 8, and divides the number of inputs."""
    if m < 8:
        return int(_fullest(m, meta.device)[meta.int()].max())
    return int(popcounts(meta.device)[meta.int()].view(len(meta), -1, m // 8).sum(-1, dtype=torch.uint8).max())


def _fill(groups: Tensor, pattern: NM, d_in: int) -> None:
    """Set the first False entries of bool [groups, m] to True until every group has exactly n, in place."""
    missing = pattern.n - groups.sum(1)
    fullest = int(missing.argmin())
    if int(missing[fullest]) < 0:
        raise MoonshotError(
            f"it is not {pattern}: {pattern.n - int(missing[fullest])} of {pattern.m} weights from row "
            f"{fullest * pattern.m // d_in}, input {fullest * pattern.m % d_in} on are not zero"
        )
    rows = missing.nonzero().flatten()
    groups[rows] |= _first_free(groups[rows], missing[rows])


def _first_free(groups: Tensor, count: Tensor) -> Tensor:
    """The first `count` [groups] entries of bool [groups, m] that are False, in its shape."""
    free = ~groups
    return free & (free.cumsum(1) <= count[:, None])


def unpack_bits(meta: Tensor, d_in: int) -> Tensor:
    """Unpack `meta` to bool [d_out, d_in], True where a value is stored."""
    positions = torch.arange(8, dtype=torch.uint8, device=meta.device)
    return ((meta[..., None] >> positions) & 1).flatten(1)[:, :d_in].bool()


def check_packed(values: Tensor, meta: Tensor, shape: tuple[int, int]) -> None:
    """Raise `MoonshotError` unless two tensors are one packed matrix."""
    d_out, d_in = shape
    require(
        meta.dtype == torch.uint8 and tuple(meta.shape) == (d_out, -(-d_in // 8)),
        f"weight_meta is {meta.dtype} {list(meta.shape)} where a weight of {d_out}×{d_in} needs "
        f"uint8 [{d_out}, {-(-d_in // 8)}]",
    )
    wide = values.is_floating_point() and values.dtype.itemsize > 1
    require(wide, f"weight_packed has dtype {values.dtype}; floating point of at least 16 bits is required")
    counts = popcounts(meta.device)[meta.int()].sum(1, dtype=torch.int64)
    stored = list(values.shape) if values.ndim == 2 else int(values.numel())
    fits = bool((counts == values.shape[1]).all()) if values.ndim == 2 else int(counts.sum()) == stored
    require(
        fits and values.ndim in (1, 2) and (values.ndim == 1 or len(values) == d_out),
        f"weight_packed holds {stored} values, weight_meta marks {int(counts.sum())}",
    )
    beyond = bool((meta[:, -1] >> (d_in % 8)).any()) if d_in % 8 else False
    require(not beyond, f"weight_meta marks values beyond input {d_in}")


def unpack(values: Tensor, meta: Tensor, d_in: int, window: int = -1, offsets: Tensor | None = None) -> Tensor:
    """The dense matrix, on the device and in the dtype of `values`, which must have passed `check_packed`.

    `window` and `offsets` are the results of `find_window` and `find_offsets`; -1 and None compute them.
    """
    library = find_library()
    if type(values) is Tensor and library is not None and library.takes(values) and meta.is_contiguous():
        offsets = find_offsets(values, meta, d_in) if offsets is None else offsets
        return library.unpack(values.new_empty(len(meta), d_in), values, meta, offsets)
    return unpack_by_torch(values, meta, d_in, window)


def unpack_by_torch(values: Tensor, meta: Tensor, d_in: int, window: int = -1) -> Tensor:
    """Like `unpack`, for devices and dtypes that the compiled library does not support."""
    window = find_window(values, meta, d_in) if window < 0 else window
    if window:
        return _unpack_windows(values, meta, d_in, window)
    dense = values.new_zeros(len(meta), d_in)
    return dense.masked_scatter_(unpack_bits(meta, d_in), values.flatten())


def find_offsets(values: Tensor, meta: Tensor, d_in: int) -> Tensor | None:
    """The result of `row_offsets`, or None where all rows have the same number of values."""
    if values.ndim == 2:
        return None
    library = find_library()
    if library is not None and library.takes(values) and meta.is_contiguous():
        return library.offsets(meta, d_in)
    return row_offsets(meta)


def select_rows(
    values: Tensor, meta: Tensor, offsets: Tensor | None, first: int, stop: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Views of the tensors of rows `first` to `stop` − 1; `offsets` is the result of `find_offsets`."""
    if offsets is None:
        return values[first:stop], meta[first:stop], None
    begin = offsets[first : stop + 1]
    start, end = int(begin[0]), int(begin[-1])
    return values[start:end], meta[first:stop], begin - start


def row_offsets(meta: Tensor) -> Tensor:
    """Index of the first value of each row, and the number of all values: int64 [d_out + 1]."""
    counts = popcounts(meta.device)[meta.int()].sum(1, dtype=torch.int64)
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def find_window(values: Tensor, meta: Tensor, d_in: int) -> int:
    """The window, 4 or 8 weights, if all windows have the same number of values (1:4, 2:4, 4:8, …); else 0."""
    if values.ndim != 2 or d_in % 8 or not values.numel():
        return 0
    for window in (4, 8):
        per, rest = divmod(values.shape[1] * window, d_in)
        whole_words = rest == 0 and window * values.dtype.itemsize % 8 == 0
        if whole_words and bool(_regular(window, per, meta.device)[meta.int()].all()):
            return window
    return 0


def _unpack_windows(values: Tensor, meta: Tensor, d_in: int, window: int) -> Tensor:
    """Assemble each window of weights as 64-bit words, by shifts from a table: faster than a scatter."""
    bits = 8 * values.dtype.itemsize
    per = values.shape[1] * window // d_in
    shifts = _shifts(window, per, bits, meta.device)
    codes, words = meta.flatten(), torch.empty(len(meta) * d_in * bits // 64, dtype=torch.int64, device=meta.device)
    integers = values.contiguous().view(INTEGERS[values.dtype.itemsize]).view(-1, 8 // window, 1, per)
    step = 8 * bits // 64
    for start in range(0, len(codes), _STEP):
        shifted = integers[start : start + _STEP].to(torch.int64)
        if bits < 64:
            shifted = shifted & (1 << bits) - 1
        shifted = shifted << shifts.index_select(0, codes[start : start + _STEP].int())
        words[start * step : (start + len(shifted)) * step] = reduce(torch.bitwise_or, shifted.unbind(-1)).flatten()
    return words.view(values.dtype).view(len(meta), d_in)


def _bits() -> Tensor:
    """The bits of each byte, [256, 8], least significant first; on the CPU even if the default device is another."""
    return (torch.arange(256, device="cpu")[:, None] >> torch.arange(8, device="cpu")) & 1


@lru_cache
def popcounts(device: torch.device) -> Tensor:
    """The number of bits of every byte, uint8 [256]."""
    return _bits().sum(1).to(device=device, dtype=torch.uint8)


@lru_cache
def _fullest(window: int, device: torch.device) -> Tensor:
    """The most bits in a window of every byte, uint8 [256]."""
    return _bits().view(256, -1, window).sum(2).amax(1).to(device=device, dtype=torch.uint8)


@lru_cache
def _regular(window: int, per: int, device: torch.device) -> Tensor:
    """Bool [256], True for bytes with `per` bits in each window."""
    return (_bits().view(256, -1, window).sum(2) == per).all(1).to(device)


@lru_cache
def _filled_bytes(pattern: NM) -> Tensor:
    """Every byte, uint8 [256], with the first bits added until each m of them have n, if they do not have more."""
    groups = _bits().bool().view(-1, pattern.m)
    groups |= _first_free(groups, pattern.n - groups.sum(1))
    return pack_bits(groups.view(256, 8)).flatten()


@lru_cache
def _shifts(window: int, per: int, bits: int, device: torch.device) -> Tensor:
    """Left shift of each value, [256, windows of a byte, 64-bit words of a window, values]; 64 drops the value."""
    groups = _bits().view(256, -1, window)
    words = window * bits // 64
    shifts = torch.full((256, groups.shape[1], words, per), 64, device="cpu")
    for code, group, position in groups.nonzero().tolist():
        index = int(groups[code, group, :position].sum())
        if index < per:
            word, shift = divmod(position * bits, 64)
            shifts[code, group, word, index] = shift
    return shifts.to(device)
