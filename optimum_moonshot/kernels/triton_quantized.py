"""GPU kernels for the formats "int{bits}g{group}" (formulas in `packing/quantized.py`), in Triton.

As in `triton_bitmask`, the product of a few rows of inputs reads the packed matrix, and `unpack` writes the dense one
for more rows. Codes are expanded in registers to the weights of the dense matrix, rounded to their dtype; inputs are
not rounded, and sums are in float32. The row of a matrix without a bitmask is one stream of codes, since blocks of 64
codes need no padding.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .triton_bitmask import MOST_ROWS, count_ones, row_starts

__all__ = ["MOST_ROWS", "linear", "unpack"]

# Tile of a program: rows of weights × blocks of 64 inputs, and its warps. `_DOT` needs 16 rows for `tl.dot`.
_ONE = {"ROWS": 4, "BLOCKS": 4, "num_warps": 4}
_DOT = {"ROWS": 16, "BLOCKS": 2, "num_warps": 4}
_UNPACK = {"ROWS": 4, "BLOCKS": 4, "num_warps": 4}


def linear(
    inputs: Tensor, codes: Tensor, scale: Tensor, meta: Tensor, offsets: Tensor | None, bits: int, group: int
) -> Tensor:
    """The product of inputs [rows, d_in], at most `MOST_ROWS`, with a packed matrix of their dtype: [rows, d_out].

    `offsets` is the index of the first byte of each row, int64 of at least d_out; None if all rows have equal sizes.
    """
    rows, d_in = inputs.shape
    outputs = inputs.new_empty(rows, len(scale))
    if outputs.numel():
        tile = _ONE if rows == 1 else _DOT
        tensors, sizes, constants = _arguments(codes, scale, meta, offsets, bits, group, d_in)
        grid = (triton.cdiv(len(scale), tile["ROWS"]),)
        _linear[grid](inputs.contiguous(), *tensors, outputs, rows, *sizes, ONE=rows == 1, **constants, **tile)
    return outputs


def unpack(
    codes: Tensor, scale: Tensor, meta: Tensor, offsets: Tensor | None, bits: int, group: int, d_in: int
) -> Tensor:
    """The dense matrix [d_out, d_in] in the dtype of the scales; `offsets` as in `linear`."""
    dense = scale.new_empty(len(scale), d_in)
    if dense.numel():
        tensors, sizes, constants = _arguments(codes, scale, meta, offsets, bits, group, d_in)
        grid = (triton.cdiv(len(scale), _UNPACK["ROWS"]),)
        _unpack[grid](*tensors, dense, *sizes, **constants, **_UNPACK)
    return dense


def _arguments(
    codes: Tensor, scale: Tensor, meta: Tensor, offsets: Tensor | None, bits: int, group: int, d_in: int
) -> tuple[tuple[Tensor, ...], tuple[int, ...], dict[str, int]]:
    """Tensors, sizes and constants of both kernels."""
    d_out, groups = scale.shape
    starts = meta if offsets is None else offsets  # without offsets, any pointer: it is not read
    sizes = d_out, d_in, groups, group // 64, codes.numel() // d_out
    # The interpreter truncates to bfloat16, and computes wrong products of it.
    emulated = triton.knobs.runtime.interpret and scale.dtype == torch.bfloat16
    constants = {"BITS": bits, "DENSE": meta.shape[1] == 0, "FLAT": offsets is not None, "EMULATED": emulated}
    return (codes, scale.contiguous(), meta.contiguous(), starts), sizes, constants


@triton.jit
def _stream(codes, base, start, row, d_out, d_in, BITS: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    """Signed codes [ROWS, BLOCKS, 64] from the block `start` on, without a bitmask."""
    UNIT: tl.constexpr = 8 if BITS == 3 else 8 // BITS  # codes in so many whole bytes
    BYTES: tl.constexpr = UNIT * BITS // 8
    first = start * (8 * BITS) + tl.arange(0, BLOCKS * 64 // UNIT) * BYTES
    word = tl.zeros((ROWS, BLOCKS * 64 // UNIT), tl.int32)
    for byte in tl.static_range(BYTES):
        inside = (row < d_out)[:, None] & (first + byte < (d_in * BITS + 7) // 8)[None, :]
        loaded = tl.load(codes + base[:, None] + (first + byte)[None, :], mask=inside, other=0)
        word |= loaded.to(tl.int32) << (8 * byte)
    code = (word[:, :, None] >> (tl.arange(0, UNIT) * BITS)[None, None, :]) & ((1 << BITS) - 1)
    column = start * 64 + tl.arange(0, BLOCKS * 64)
    code = tl.where((column < d_in)[None, :], tl.reshape(code, (ROWS, BLOCKS * 64)) - (1 << (BITS - 1)), 0)
    return tl.reshape(code, (ROWS, BLOCKS, 64))


@triton.jit
def _expanded(
    codes, meta, base, start, row, d_out, d_in, BITS: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr
):  # fmt: skip
    """Like `_stream`, but with a bitmask: 0 where no weight is stored; also the bytes of the codes of each row."""
    width = (d_in + 7) // 8
    at = start * 8 + tl.arange(0, BLOCKS * 8)
    inside = (row < d_out)[:, None] & (at < width)[None, :]
    byte = tl.load(meta + row[:, None] * width + at[None, :], mask=inside, other=0).to(tl.int32)
    byte = tl.reshape(byte, (ROWS, BLOCKS, 8))
    ones = count_ones(byte)
    size = (tl.sum(ones, 2) * BITS + 7) >> 3
    block = base[:, None] + (tl.cumsum(size, 1) - size)
    bit = tl.arange(0, 8)[None, None, None, :]
    mark = ((byte[:, :, :, None] >> bit) & 1) == 1
    before = (tl.cumsum(ones, 2) - ones)[:, :, :, None] + count_ones(byte[:, :, :, None] & ((1 << bit) - 1))
    place, shift = block[:, :, None, None] + (before * BITS >> 3), before * BITS & 7
    code = tl.load(codes + place, mask=mark, other=0).to(tl.int32)
    if BITS == 3:  # some codes extend to the next byte
        code |= tl.load(codes + place + 1, mask=mark & (shift > 5), other=0).to(tl.int32) << 8
    code = tl.where(mark, ((code >> shift) & ((1 << BITS) - 1)) - (1 << (BITS - 1)), 0)
    return tl.reshape(code, (ROWS, BLOCKS, 64)), tl.sum(size, 1)


@triton.jit
def _tile(
    codes, scale, meta, base, start, row, d_out, d_in, groups, per_group,
    BITS: tl.constexpr, DENSE: tl.constexpr, EMULATED: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Weights [ROWS, 64·BLOCKS] from the block `start` on, and the index of the first byte of the next tile."""
    if DENSE:
        code = _stream(codes, base, start, row, d_out, d_in, BITS, ROWS, BLOCKS)
    else:
        code, size = _expanded(codes, meta, base, start, row, d_out, d_in, BITS, ROWS, BLOCKS)
        base += size
    group = (start + tl.arange(0, BLOCKS)) // per_group  # of each block
    inside = (row < d_out)[:, None] & (group < groups)[None, :]
    step = tl.load(scale + row[:, None] * groups + group[None, :], mask=inside, other=0.0).to(tl.float32)
    weight = tl.reshape(code.to(tl.float32) * step[:, :, None], (ROWS, 64 * BLOCKS))
    if EMULATED:
        bits = weight.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # to nearest, ties to even, as a GPU rounds
        weight = bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
    return weight.to(scale.dtype.element_ty), base


@triton.jit
def _linear(
    inputs, codes, scale, meta, offsets, outputs, rows, d_out, d_in, groups, per_group, stride,
    BITS: tl.constexpr, DENSE: tl.constexpr, FLAT: tl.constexpr, EMULATED: tl.constexpr, ONE: tl.constexpr,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    base = row_starts(offsets, row, d_out, stride, FLAT)
    sample = tl.arange(0, 16)
    one = tl.zeros((ROWS, 64 * BLOCKS), tl.float32)
    many = tl.zeros((16, ROWS), tl.float32)
    for start in range(0, tl.cdiv(d_in, 64), BLOCKS):
        weight, base = _tile(
            codes, scale, meta, base, start, row, d_out, d_in, groups, per_group, BITS, DENSE, EMULATED, ROWS, BLOCKS
        )
        column = start * 64 + tl.arange(0, 64 * BLOCKS)
        if ONE:
            x = tl.load(inputs + column, mask=column < d_in, other=0.0)
            one += weight.to(tl.float32) * x.to(tl.float32)[None, :]
        else:
            inside = (sample < rows)[:, None] & (column < d_in)[None, :]
            x = tl.load(inputs + sample[:, None] * d_in + column[None, :], mask=inside, other=0.0)
            if EMULATED:
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
    codes, scale, meta, offsets, dense, d_out, d_in, groups, per_group, stride,
    BITS: tl.constexpr, DENSE: tl.constexpr, FLAT: tl.constexpr, EMULATED: tl.constexpr,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    base = row_starts(offsets, row, d_out, stride, FLAT)
    for start in range(0, tl.cdiv(d_in, 64), BLOCKS):
        weight, base = _tile(
            codes, scale, meta, base, start, row, d_out, d_in, groups, per_group, BITS, DENSE, EMULATED, ROWS, BLOCKS
        )
        column = start * 64 + tl.arange(0, 64 * BLOCKS)
        inside = (row < d_out)[:, None] & (column < d_in)[None, :]
        tl.store(dense + row[:, None] * d_in + column[None, :], weight, mask=inside)
