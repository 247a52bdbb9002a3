"""GPU kernels for the format "bitmask" (`packing/bitmask.py` has its formulas), in Triton.

The product of a few rows is bound by the bytes of the weights, so it reads them packed:

* `_regular`: every byte of `meta` marks equally many values (m divides 8: 1:4, 2:4, 4:8, …). It walks over the stored
  values, which lie in order, and looks up each one's input;
* `_any`: every other pattern. It walks over the inputs, counts the bits before each, and gathers its value there.

Longer inputs are better off with the dense product: `unpack` makes the matrix for it. Sums are in float32.

Importing this needs Triton, which comes with torch's builds for CUDA. With TRITON_INTERPRET=1 set before, the kernels
run on a CPU, slowly, to be tested.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

# Rows of inputs that the packed product takes; more go to the dense one.
MOST_ROWS = 16
# Rows of inputs up to which `_regular` looks up every input of its own; `_any` serves more, by matrix products.
FEW_ROWS = 4
# Rows of weights, and inputs or values, of one step of a program; and its warps.
_REGULAR = {"ROWS": 4, "STEP": 512, "num_warps": 4}
_ANY = {"ROWS": 4, "BYTES": 64, "num_warps": 4}
_DOT = {"ROWS": 16, "BYTES": 16, "num_warps": 4}
_UNPACK = {"ROWS": 4, "BYTES": 64, "num_warps": 4}


def linear(inputs: Tensor, values: Tensor, meta: Tensor, offsets: Tensor | None, window: int) -> Tensor:
    """The product with a packed matrix.

    Args:
        inputs: [rows, d_in], at most `MOST_ROWS`, in the dtype and on the device of the values.
        values: [d_out, d_in·n/m], or flat.
        meta: uint8 [d_out, ⌈d_in/8⌉].
        offsets: int64 [d_out], where each row's values begin, for flat values; None where they are a matrix.
        window: of `find_window`: 0 where the bytes of `meta` do not mark equally many values.

    Returns:
        [rows, d_out], in the dtype of the inputs.
    """
    rows, d_in = inputs.shape
    d_out, stride = meta.shape[0], values.shape[1] if values.ndim == 2 else 0
    found = inputs.new_empty(rows, d_out)
    if not found.numel():
        return found
    inputs = inputs.contiguous()
    if window and rows <= FEW_ROWS:
        per = values.shape[1] * 8 // d_in
        grid = (triton.cdiv(d_out, _REGULAR["ROWS"]),)
        arguments = inputs, values, meta, _places(meta.device), found, rows, d_out, d_in, meta.shape[1]
        _regular[grid](*arguments, M=triton.next_power_of_2(rows), PER=per, **_REGULAR)
        return found
    tile = _ANY if rows == 1 else _DOT
    grid = (triton.cdiv(d_out, tile["ROWS"]),)
    where = meta if offsets is None else offsets  # a pointer that is not read
    arguments = inputs, values, meta, where, found, rows, d_out, d_in, meta.shape[1], stride
    widen = triton.knobs.runtime.interpret and values.dtype == torch.bfloat16  # whose products it gets wrong
    _any[grid](*arguments, FLAT=offsets is not None, ONE=rows == 1, WIDEN=widen, **tile)
    return found


def unpack(values: Tensor, meta: Tensor, d_in: int, offsets: Tensor | None) -> Tensor:
    """The dense matrix [d_out, d_in].

    Args:
        values, meta: as for `linear`.
        d_in: inputs of a row.
        offsets: as for `linear`.
    """
    d_out, stride = meta.shape[0], values.shape[1] if values.ndim == 2 else 0
    dense = values.new_empty(d_out, d_in)
    if dense.numel():
        where = meta if offsets is None else offsets
        grid = (triton.cdiv(d_out, _UNPACK["ROWS"]),)
        arguments = values, meta, where, dense, d_out, d_in, meta.shape[1], stride
        _unpack[grid](*arguments, FLAT=offsets is not None, **_UNPACK)
    return dense


@lru_cache
def _places(device: torch.device) -> Tensor:
    """uint8 [256, 8]: the place of the j-th bit of every byte; 0 beyond its last."""
    bits = (torch.arange(256, device="cpu")[:, None] >> torch.arange(8, device="cpu")) & 1
    order = torch.argsort(1 - bits, dim=1, stable=True)
    return torch.where(bits.gather(1, order) == 1, order, 0).to(device=device, dtype=torch.uint8)


@triton.jit
def _regular(
    inputs, values, meta, places, found, rows, d_out, d_in, width,
    M: tl.constexpr, PER: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Value by value: where each belongs is looked up, and its input gathered."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = (row < d_out)[:, None]
    row = row.to(tl.int64)
    length = width * PER
    sums = tl.zeros((M, ROWS, STEP), tl.float32) if M > 1 else tl.zeros((ROWS, STEP), tl.float32)
    for start in range(0, length, STEP):
        at = start + tl.arange(0, STEP)
        inside = there & (at < length)[None, :]
        byte = tl.load(meta + row[:, None] * width + (at // PER)[None, :], mask=inside, other=0).to(tl.int32)
        place = tl.load(places + byte * 8 + (at % PER)[None, :]).to(tl.int32)
        weight = tl.load(values + row[:, None] * length + at[None, :], mask=inside, other=0.0).to(tl.float32)
        column = (at // PER)[None, :] * 8 + place
        if M > 1:
            sample = tl.arange(0, M)[:, None, None]
            wanted = inside[None, :, :] & (sample < rows)
            given = tl.load(inputs + sample * d_in + column[None, :, :], mask=wanted, other=0.0)
            sums += weight[None, :, :] * given.to(tl.float32)
        else:
            sums += weight * tl.load(inputs + column, mask=inside, other=0.0).to(tl.float32)
    if M > 1:
        sample = tl.arange(0, M)[:, None]
        inside = (sample < rows) & (row < d_out)[None, :]
        tl.store(found + sample * d_out + row[None, :], tl.sum(sums, 2).to(found.dtype.element_ty), mask=inside)
    else:
        tl.store(found + row, tl.sum(sums, 1).to(found.dtype.element_ty), mask=row < d_out)


@triton.jit
def _ones(byte):
    """How many bits of a byte are set."""
    pairs = byte - ((byte >> 1) & 0x55)
    fours = (pairs & 0x33) + ((pairs >> 2) & 0x33)
    return (fours + (fours >> 4)) & 0x0F


@triton.jit
def _tile(
    values, meta, row, base, start, d_out, d_in, width, ROWS: tl.constexpr, BYTES: tl.constexpr
):  # fmt: skip
    """Weights [ROWS, 8·BYTES] from the byte `start` on, zeros included, and how many values each row has there."""
    at = start + tl.arange(0, BYTES)
    inside = (row < d_out)[:, None] & (at < width)[None, :]
    byte = tl.load(meta + row[:, None] * width + at[None, :], mask=inside, other=0).to(tl.int32)
    ones = _ones(byte)
    before = base[:, None] + (tl.cumsum(ones, 1) - ones)
    bit = tl.arange(0, 8)[None, None, :]
    mark = (byte[:, :, None] >> bit) & 1
    place = before[:, :, None] + _ones(byte[:, :, None] & ((1 << bit) - 1))
    weight = tl.load(values + place, mask=mark == 1, other=0.0)
    return tl.reshape(weight, (ROWS, 8 * BYTES)), tl.sum(ones, 1)


@triton.jit
def _begin(offsets, row, d_out, stride, FLAT: tl.constexpr):
    """Where the values of each row begin."""
    if FLAT:
        return tl.load(offsets + row, mask=row < d_out, other=0)
    return row.to(tl.int64) * stride


@triton.jit
def _any(
    inputs, values, meta, offsets, found, rows, d_out, d_in, width, stride,
    FLAT: tl.constexpr, ONE: tl.constexpr, WIDEN: tl.constexpr, ROWS: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    """Input by input: the bits before each say where its value is."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    base = _begin(offsets, row, d_out, stride, FLAT)
    sample = tl.arange(0, 16)
    one = tl.zeros((ROWS, 8 * BYTES), tl.float32)
    many = tl.zeros((16, ROWS), tl.float32)
    for start in range(0, width, BYTES):
        weight, count = _tile(values, meta, row, base, start, d_out, d_in, width, ROWS, BYTES)
        base += count
        column = start * 8 + tl.arange(0, 8 * BYTES)
        if ONE:
            given = tl.load(inputs + column, mask=column < d_in, other=0.0)
            one += weight.to(tl.float32) * given.to(tl.float32)[None, :]
        else:
            inside = (sample < rows)[:, None] & (column < d_in)[None, :]
            given = tl.load(inputs + sample[:, None] * d_in + column[None, :], mask=inside, other=0.0)
            if WIDEN:
                weight, given = weight.to(tl.float32), given.to(tl.float32)
            many = tl.dot(given, tl.trans(weight), many, input_precision="ieee")
    if ONE:
        tl.store(found + row, tl.sum(one, 1).to(found.dtype.element_ty), mask=row < d_out)
    else:
        inside = (sample < rows)[:, None] & (row < d_out)[None, :]
        at = sample.to(tl.int64)[:, None] * d_out + row[None, :]
        tl.store(found + at, many.to(found.dtype.element_ty), mask=inside)


@triton.jit
def _unpack(
    values, meta, offsets, dense, d_out, d_in, width, stride,
    FLAT: tl.constexpr, ROWS: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    base = _begin(offsets, row, d_out, stride, FLAT)
    for start in range(0, width, BYTES):
        weight, count = _tile(values, meta, row, base, start, d_out, d_in, width, ROWS, BYTES)
        base += count
        column = start * 8 + tl.arange(0, 8 * BYTES)
        inside = (row < d_out)[:, None] & (column < d_in)[None, :]
        tl.store(dense + row[:, None] * d_in + column[None, :], weight, mask=inside)
