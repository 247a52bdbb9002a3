"""GPU kernels for the format "bitmask" (formulas in `packing/bitmask.py`), in Triton.

The product of a few rows is bound by the memory bandwidth for the weights, so it reads them packed:

* `_regular`: every byte of `meta` marks the same number of values (m divides 8: 1:4, 2:4, 4:8, …). It iterates over the
  stored values, so that their loads are coalesced, and gathers the input of each by a table of bit positions;
* `_any`: all other patterns. It iterates over the inputs and gathers the value of each, by counting the bits before.

For more rows, the dense product is faster; `unpack` writes the matrix for it. Sums are in float32.

Importing this module requires Triton, which is part of torch's CUDA builds. With TRITON_INTERPRET=1 set before, the
kernels run on a CPU, slowly, for tests.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

# Most rows of inputs of the packed product: one tile of a tensor-core product.
MOST_ROWS = 16
# Most rows of inputs of `_regular`, which gathers each input separately; `_any` uses matrix products for more.
FEW_ROWS = 4
# Tile of a program: rows of weights × values (STEP) or bytes of `meta` (BYTES), and its warps. `_DOT` needs 16 rows for
# `tl.dot`.
_REGULAR = {"ROWS": 4, "STEP": 512, "num_warps": 4}
_ANY = {"ROWS": 4, "BYTES": 64, "num_warps": 4}
_DOT = {"ROWS": 16, "BYTES": 16, "num_warps": 4}
_UNPACK = {"ROWS": 4, "BYTES": 64, "num_warps": 4}


def linear(inputs: Tensor, values: Tensor, meta: Tensor, offsets: Tensor | None, window: int) -> Tensor:
    """The product of inputs [rows, d_in], at most `MOST_ROWS`, with a packed matrix of their dtype: [rows, d_out].

    `offsets` is the index of the first value of each row, int64 [d_out], for flat values, None if they are a matrix;
    `window` is the result of `find_window`, 0 if the bytes of `meta` mark different numbers of values.
    """
    rows, d_in = inputs.shape
    d_out, stride = meta.shape[0], values.shape[1] if values.ndim == 2 else 0
    outputs = inputs.new_empty(rows, d_out)
    if not outputs.numel():
        return outputs
    inputs = inputs.contiguous()
    if window and rows <= FEW_ROWS:
        per = values.shape[1] * 8 // d_in
        grid = (triton.cdiv(d_out, _REGULAR["ROWS"]),)
        tensors = inputs, values, meta, _places(meta.device), outputs
        _regular[grid](*tensors, rows, d_out, d_in, meta.shape[1], M=triton.next_power_of_2(rows), PER=per, **_REGULAR)
        return outputs
    tile = _ANY if rows == 1 else _DOT
    grid = (triton.cdiv(d_out, tile["ROWS"]),)
    starts = meta if offsets is None else offsets  # without offsets, any pointer: it is not read
    arguments = inputs, values, meta, starts, outputs, rows, d_out, d_in, meta.shape[1], stride
    # The interpreter computes wrong products of bfloat16.
    widen = triton.knobs.runtime.interpret and values.dtype == torch.bfloat16
    _any[grid](*arguments, FLAT=offsets is not None, ONE=rows == 1, WIDEN=widen, **tile)
    return outputs


def unpack(values: Tensor, meta: Tensor, d_in: int, offsets: Tensor | None) -> Tensor:
    """The dense matrix [d_out, d_in]; `offsets` as in `linear`."""
    d_out, stride = meta.shape[0], values.shape[1] if values.ndim == 2 else 0
    dense = values.new_empty(d_out, d_in)
    if dense.numel():
        starts = meta if offsets is None else offsets
        grid = (triton.cdiv(d_out, _UNPACK["ROWS"]),)
        arguments = values, meta, starts, dense, d_out, d_in, meta.shape[1], stride
        _unpack[grid](*arguments, FLAT=offsets is not None, **_UNPACK)
    return dense


@lru_cache
def _places(device: torch.device) -> Tensor:
    """Position of the j-th set bit of each byte, uint8 [256, 8]; 0 beyond its last."""
    bits = (torch.arange(256, device="cpu")[:, None] >> torch.arange(8, device="cpu")) & 1
    order = torch.argsort(1 - bits, dim=1, stable=True)
    return torch.where(bits.gather(1, order) == 1, order, 0).to(device=device, dtype=torch.uint8)


@triton.jit
def _regular(
    inputs, values, meta, places, outputs, rows, d_out, d_in, width,
    M: tl.constexpr, PER: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Multiply by stored values: look up the position of each, and gather its input."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    valid = (row < d_out)[:, None]
    row = row.to(tl.int64)  # offsets into `values` can exceed 32 bits
    length = width * PER
    sums = tl.zeros((M, ROWS, STEP), tl.float32) if M > 1 else tl.zeros((ROWS, STEP), tl.float32)
    for start in range(0, length, STEP):
        at = start + tl.arange(0, STEP)
        inside = valid & (at < length)[None, :]
        byte = tl.load(meta + row[:, None] * width + (at // PER)[None, :], mask=inside, other=0).to(tl.int32)
        place = tl.load(places + byte * 8 + (at % PER)[None, :]).to(tl.int32)
        weight = tl.load(values + row[:, None] * length + at[None, :], mask=inside, other=0.0).to(tl.float32)
        column = (at // PER)[None, :] * 8 + place
        if M > 1:
            sample = tl.arange(0, M)[:, None, None]
            mask = inside[None, :, :] & (sample < rows)
            x = tl.load(inputs + sample * d_in + column[None, :, :], mask=mask, other=0.0)
            sums += weight[None, :, :] * x.to(tl.float32)
        else:
            sums += weight * tl.load(inputs + column, mask=inside, other=0.0).to(tl.float32)
    if M > 1:
        sample = tl.arange(0, M)[:, None]
        inside = (sample < rows) & (row < d_out)[None, :]
        tl.store(outputs + sample * d_out + row[None, :], tl.sum(sums, 2).to(outputs.dtype.element_ty), mask=inside)
    else:
        tl.store(outputs + row, tl.sum(sums, 1).to(outputs.dtype.element_ty), mask=row < d_out)


@triton.jit
def count_ones(byte):
    """Number of set bits of a byte; Triton has no portable popcount."""
    pairs = byte - ((byte >> 1) & 0x55)
    fours = (pairs & 0x33) + ((pairs >> 2) & 0x33)
    return (fours + (fours >> 4)) & 0x0F


@triton.jit
def _tile(
    values, meta, row, base, start, d_out, d_in, width, ROWS: tl.constexpr, BYTES: tl.constexpr
):  # fmt: skip
    """Dense weights [ROWS, 8·BYTES] from the byte `start` on, and the number of values of each row among them."""
    at = start + tl.arange(0, BYTES)
    inside = (row < d_out)[:, None] & (at < width)[None, :]
    byte = tl.load(meta + row[:, None] * width + at[None, :], mask=inside, other=0).to(tl.int32)
    ones = count_ones(byte)
    before = base[:, None] + (tl.cumsum(ones, 1) - ones)
    bit = tl.arange(0, 8)[None, None, :]
    mark = (byte[:, :, None] >> bit) & 1
    place = before[:, :, None] + count_ones(byte[:, :, None] & ((1 << bit) - 1))
    weight = tl.load(values + place, mask=mark == 1, other=0.0)
    return tl.reshape(weight, (ROWS, 8 * BYTES)), tl.sum(ones, 1)


@triton.jit
def row_starts(offsets, row, d_out, stride, FLAT: tl.constexpr):
    """Index of the first value of each row."""
    if FLAT:
        return tl.load(offsets + row, mask=row < d_out, other=0)
    return row.to(tl.int64) * stride


@triton.jit
def _any(
    inputs, values, meta, offsets, outputs, rows, d_out, d_in, width, stride,
    FLAT: tl.constexpr, ONE: tl.constexpr, WIDEN: tl.constexpr, ROWS: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    """Multiply by inputs: the number of bits before each is the index of its value."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    base = row_starts(offsets, row, d_out, stride, FLAT)
    sample = tl.arange(0, 16)
    one = tl.zeros((ROWS, 8 * BYTES), tl.float32)
    many = tl.zeros((16, ROWS), tl.float32)
    for start in range(0, width, BYTES):
        weight, count = _tile(values, meta, row, base, start, d_out, d_in, width, ROWS, BYTES)
        base += count
        column = start * 8 + tl.arange(0, 8 * BYTES)
        if ONE:
            x = tl.load(inputs + column, mask=column < d_in, other=0.0)
            one += weight.to(tl.float32) * x.to(tl.float32)[None, :]
        else:
            inside = (sample < rows)[:, None] & (column < d_in)[None, :]
            x = tl.load(inputs + sample[:, None] * d_in + column[None, :], mask=inside, other=0.0)
            if WIDEN:
                weight, x = weight.to(tl.float32), x.to(tl.float32)
            many = tl.dot(x, tl.trans(weight), many, input_precision="ieee")
    if ONE:
        tl.store(outputs + row, tl.sum(one, 1).to(outputs.dtype.element_ty), mask=row < d_out)
    else:
        inside = (sample < rows)[:, None] & (row < d_out)[None, :]
        at = sample.to(tl.int64)[:, None] * d_out + row[None, :]
        tl.store(outputs + at, many.to(outputs.dtype.element_ty), mask=inside)


@triton.jit
def _unpack(
    values, meta, offsets, dense, d_out, d_in, width, stride,
    FLAT: tl.constexpr, ROWS: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    base = row_starts(offsets, row, d_out, stride, FLAT)
    for start in range(0, width, BYTES):
        weight, count = _tile(values, meta, row, base, start, d_out, d_in, width, ROWS, BYTES)
        base += count
        column = start * 8 + tl.arange(0, 8 * BYTES)
        inside = (row < d_out)[:, None] & (column < d_in)[None, :]
        tl.store(dense + row[:, None] * d_in + column[None, :], weight, mask=inside)
