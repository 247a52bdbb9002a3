"""The formats "int{bits}g{group}": integer codes, a scale per group of inputs, and one bit per weight. Formulas only.

A matrix W [d_out, d_in] on a `Grid` (objective/grid.py) is stored as

* ``codes`` (``_codes``): flat uint8, row by row, each row in blocks of 64 inputs, the last one shorter. A block is a
  bit stream, least significant bits first: the codes of its stored weights in the order of the inputs, plus the grid's
  zero point, `bits` bits each, padded with zero bits to a whole byte;
* ``scale`` (``_scale``): [d_out, ⌈d_in/group⌉] in the dtype of W;
* ``meta`` (``_meta``): as in the format "bitmask", or [d_out, 0] if every weight is stored. This is so for n:m with
  n = m, and without a pattern where it needs fewer bytes than a bitmask.

A weight is code · scale, rounded to the dtype of the scale; one that is not stored is 0. As in the format "bitmask",
n:m stores zeros in addition where m consecutive inputs have fewer than n nonzeros. 2:4 in 4 bits needs 1 + 2 bits per
weight, and the scales.
"""

from collections.abc import Iterator
from math import gcd

import torch
from torch import Tensor
from torch.nn import functional

from ..errors import require
from ..kernels import QuantizedMatrix, find_library
from ..objective.grid import BLOCK, Grid
from ..objective.linalg import row_slices
from ..objective.patterns import NM
from .bitmask import is_nm, pack_bits, popcounts, stored_bits, unpack_bits

_TEMPORARY = 24  # bytes of the intermediates of a weight


def pack(grid: Grid, matrix: Tensor, pattern: NM | None) -> tuple[Tensor, Tensor, Tensor]:
    """Pack a matrix in host memory into `codes`, `scale` and `meta`.

    Raises:
        MoonshotError: m consecutive inputs have more than n nonzeros, or the matrix or its dtype has no grid.
    """
    grid, matrix = grid.with_dtype(matrix.dtype), matrix.contiguous()
    (d_out, d_in), library, meta = matrix.shape, find_library(), stored_bits(matrix, pattern)
    if _stores_all(grid, meta, d_in, pattern):
        meta = meta[:, :0].contiguous()
    codes = torch.empty(_codes_bytes(grid, meta, d_in), dtype=torch.uint8, device="cpu")
    scale = matrix.new_empty(d_out, grid.groups(d_in))
    target = library_matrix(grid, codes, scale, meta, d_in)
    if library is None or target is None or not library.quantized_pack(target, matrix):
        codes, scale = _pack(grid, matrix, meta)
    return codes, scale, meta


def _pack(grid: Grid, matrix: Tensor, meta: Tensor) -> tuple[Tensor, Tensor]:
    """`codes` and `scale`; raises `MoonshotError` with a row that is not on the grid."""
    d_in = matrix.shape[1]
    scale, streams = grid.scales_of(matrix), [torch.empty(0, dtype=torch.uint8, device="cpu")]
    for rows in row_slices(slice(0, len(matrix)), _TEMPORARY * d_in, matrix.device):
        codes = grid.codes(matrix[rows], grid.per_weight(scale[rows], d_in)).add_(grid.zero_point).to(torch.uint8)
        codes = codes.masked_select(unpack_bits(meta[rows], d_in)) if meta.shape[1] else codes.flatten()
        streams.append(_join(codes, block_counts(meta[rows], d_in), grid.bits))
    return torch.cat(streams), scale


def packed_bytes(grid: Grid, matrix: Tensor, pattern: NM | None) -> int:
    """Bytes of the result of `pack`."""
    d_out, d_in = matrix.shape
    scales = d_out * grid.groups(d_in) * matrix.dtype.itemsize
    if pattern is not None and (pattern.n == pattern.m or BLOCK % pattern.m == 0):
        sizes = [min(BLOCK, d_in - first) * pattern.n // pattern.m for first in range(0, d_in, BLOCK)]
        mask = 0 if pattern.n == pattern.m else -(-d_in // 8)
        return scales + d_out * (mask + sum(-(-size * grid.bits // 8) for size in sizes))
    meta = pack_bits((matrix != 0).cpu()) if pattern is None else stored_bits(matrix.cpu().contiguous(), pattern)
    if _stores_all(grid, meta, d_in, pattern):
        meta = meta[:, :0]
    return scales + meta.numel() + _codes_bytes(grid, meta, d_in)


def _stores_all(grid: Grid, meta: Tensor, d_in: int, pattern: NM | None) -> bool:
    """Whether all weights of a matrix with this bitmask are stored, without the bitmask."""
    if pattern is not None:
        return pattern.n == pattern.m
    return _codes_bytes(grid, meta[:, :0], d_in) <= meta.numel() + _codes_bytes(grid, meta, d_in)


def _codes_bytes(grid: Grid, meta: Tensor, d_in: int) -> int:
    """Bytes of `codes`."""
    offsets = find_offsets(meta, d_in, grid.bits)
    if offsets is not None:
        return int(offsets[-1])
    return int(block_bytes(block_counts(meta[:1], d_in), grid.bits).sum()) * len(meta)


def block_counts(meta: Tensor, d_in: int) -> Tensor:
    """Number of stored weights of every block, int64 [d_out, ⌈d_in/64⌉]."""
    if not meta.shape[1]:
        counts = torch.full((-(-d_in // BLOCK),), BLOCK, device=meta.device)
        counts[-1] -= -d_in % BLOCK
        return counts.expand(len(meta), -1)
    counts = popcounts(meta.device)[meta.int()]
    return functional.pad(counts, (0, -meta.shape[1] % 8)).unflatten(1, (-1, 8)).sum(-1)


def block_bytes(counts: Tensor, bits: int) -> Tensor:
    """Bytes of the codes of blocks with these numbers of stored weights."""
    return (counts * bits + 7) // 8


def find_offsets(meta: Tensor, d_in: int, bits: int) -> Tensor | None:
    """Index of the first byte of each row and the number of all bytes, int64 [d_out + 1]; None without a bitmask."""
    if not meta.shape[1]:
        return None
    library = find_library()
    if library is not None and meta.device.type == "cpu" and meta.is_contiguous():
        return library.quantized_offsets(bits, meta, d_in)
    return row_offsets(meta, d_in, bits)


def row_offsets(meta: Tensor, d_in: int, bits: int) -> Tensor:
    """Like `find_offsets`, but for devices that the compiled library does not support."""
    return functional.pad(block_bytes(block_counts(meta, d_in), bits).sum(1).cumsum(0), (1, 0))


def select_rows(
    codes: Tensor, scale: Tensor, meta: Tensor, offsets: Tensor | None, first: int, stop: int
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Views of the tensors of rows `first` to `stop` − 1, and their offsets; `offsets` is from `find_offsets`."""
    size = codes.numel() // len(scale)  # of every row, without offsets
    start, end = first * size, stop * size
    if offsets is not None:
        offsets = offsets[first : stop + 1]
        start, end = int(offsets[0]), int(offsets[-1])
        offsets = offsets - start
    return codes[start:end], scale[first:stop], meta[first:stop], offsets


def gather_rows(
    codes: Tensor, scale: Tensor, meta: Tensor, offsets: Tensor | None, rows: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Copies of the tensors of the rows with these indices [n], in any order; `offsets` is from `find_offsets`."""
    if offsets is None:
        codes = codes.view(len(scale), -1).index_select(0, rows).flatten()
    else:
        starts, sizes = offsets[:-1].index_select(0, rows), offsets.diff().index_select(0, rows)
        places = torch.arange(int(sizes.sum()), device=codes.device)
        codes = codes[places + (starts - sizes.cumsum(0) + sizes).repeat_interleave(sizes)]
    return codes, scale.index_select(0, rows), meta.index_select(0, rows)


def library_matrix(
    grid: Grid, codes: Tensor, scale: Tensor, meta: Tensor, d_in: int, offsets: Tensor | None = None
) -> QuantizedMatrix | None:
    """A packed matrix for the compiled library; None if that is missing or does not support these tensors.

    `offsets` is the result of `find_offsets`, computed if it is None.
    """
    library = find_library()
    in_memory = all(tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in (codes, meta))
    if library is None or not in_memory or not library.takes(scale):
        return None
    offsets = find_offsets(meta, d_in, grid.bits) if offsets is None else offsets
    mask, shape = meta if meta.shape[1] else None, (len(scale), d_in)
    return QuantizedMatrix(grid.bits, grid.group, codes, scale, mask, offsets, shape)


def check_packed(
    grid: Grid, codes: Tensor, scale: Tensor, meta: Tensor, shape: tuple[int, int], pattern: NM | None
) -> None:
    """Raise `MoonshotError` unless three tensors are one packed matrix, with that pattern if one is given."""
    d_out, d_in = shape
    for name, tensor, sizes in (
        ("scale", scale, {(d_out, grid.groups(d_in))}),
        ("meta", meta, {(d_out, 0), (d_out, -(-d_in // 8))}),
    ):
        wanted = " or ".join(str(list(size)) for size in sorted(sizes))
        fits = tuple(tensor.shape) in sizes
        require(fits, f"weight_{name} is {list(tensor.shape)} where a weight of {d_out}×{d_in} needs {wanted}")
    wide = scale.is_floating_point() and scale.dtype.itemsize > 1
    require(wide, f"weight_scale has dtype {scale.dtype}; floating point of at least 16 bits is required")
    integers = codes.dtype == meta.dtype == torch.uint8
    require(integers, f"weight_codes and weight_meta are {codes.dtype} and {meta.dtype}, not uint8")
    require(bool(((scale >= 0) & scale.isfinite()).all()), "weight_scale has a negative or infinite scale, or NaN")
    beyond = bool((meta[:, -1] >> (d_in % 8)).any()) if meta.shape[1] and d_in % 8 else False
    require(not beyond, f"weight_meta marks values beyond input {d_in}")
    if pattern is not None:
        follows = is_nm(meta, d_in, pattern) if meta.shape[1] else pattern.n == pattern.m
        require(follows, f"it is not {pattern}")
    counts = block_counts(meta, d_in)
    needed = int(block_bytes(counts, grid.bits).sum())
    fits = codes.ndim == 1 and len(codes) == needed
    require(fits, f"weight_codes is {list(codes.shape)}, weight_meta needs [{needed}] for codes of {grid.bits} bits")
    _check_codes(grid, codes, scale, meta, d_in)


def _check_codes(grid: Grid, codes: Tensor, scale: Tensor, meta: Tensor, d_in: int) -> None:
    for rows, counts, stream in _row_streams(codes, meta, d_in, grid.bits):
        ends, used = block_bytes(counts, grid.bits).flatten().cumsum(0) - 1, (counts * grid.bits % 8).flatten()
        ends, used = ends[used > 0], used[used > 0]
        require(not (stream[ends] >> used).any(), "weight_codes has nonzero bits after the last code of a block")
        stored = _split(stream, counts, grid.bits)
        lowest = f"weight_codes has the code {-grid.zero_point}; {-grid.top} is the smallest"
        require(bool(stored.all()), lowest)
        empty = scale[rows] == 0
        if bool(empty.any()):
            zero = _placed(grid, stored, meta[rows], d_in) == grid.zero_point
            require(bool((zero | ~grid.per_weight(empty, d_in)).all()), "weight_scale is 0 for a group with weights")


def unpack(grid: Grid, codes: Tensor, scale: Tensor, meta: Tensor, d_in: int, offsets: Tensor | None = None) -> Tensor:
    """The dense matrix, on the device and in the dtype of `scale`, of tensors that have passed `check_packed`.

    `offsets` is the result of `find_offsets`, computed if it is None.
    """
    dense, library = scale.new_empty(len(scale), d_in), find_library()
    matrix = library_matrix(grid, codes, scale, meta, d_in, offsets) if type(codes) is Tensor else None
    if matrix is not None and library is not None:
        return library.quantized_unpack(dense, matrix)
    for rows, values in unpacked_slices(grid, codes, scale, meta, d_in):
        dense[rows] = values
    return dense


def unpacked_slices(
    grid: Grid, codes: Tensor, scale: Tensor, meta: Tensor, d_in: int
) -> Iterator[tuple[slice, Tensor]]:
    """Like `unpack`, but by slices of rows, for devices and dtypes that the compiled library does not support."""
    for rows, counts, stream in _row_streams(codes, meta, d_in, grid.bits):
        signed = _placed(grid, _split(stream, counts, grid.bits), meta[rows], d_in).short() - grid.zero_point
        yield rows, grid.values(signed, grid.per_weight(scale[rows], d_in))


def _row_streams(codes: Tensor, meta: Tensor, d_in: int, bits: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Slices of rows, the `block_counts` of each, and its part of `codes`."""
    first = 0
    for rows in row_slices(slice(0, len(meta)), _TEMPORARY * d_in, codes.device):
        counts = block_counts(meta[rows], d_in)
        stop = first + int(block_bytes(counts, bits).sum())
        yield rows, counts, codes[first:stop]
        first = stop


def _placed(grid: Grid, stored: Tensor, meta: Tensor, d_in: int) -> Tensor:
    """Unsigned codes of the stored weights as uint8 [rows, d_in], the zero point where none is stored."""
    if not meta.shape[1]:
        return stored.view(-1, d_in)
    dense = torch.full((len(meta), d_in), grid.zero_point, dtype=torch.uint8, device=meta.device)
    return dense.masked_scatter_(unpack_bits(meta, d_in), stored)


def _split(stream: Tensor, counts: Tensor, bits: int) -> Tensor:
    """The unsigned codes of the blocks of a bit stream, uint8 [codes]; `_join` is the inverse."""
    unit = gcd(bits, 8)  # a byte and a code consist of whole units of so many bits
    units = _pieces(stream, unit, 8 // unit)
    padding = _padding(counts, bits, unit)
    return _assembled(units if padding is None else units.masked_select(~padding), unit, bits // unit)


def _join(codes: Tensor, counts: Tensor, bits: int) -> Tensor:
    """The bit stream, uint8 [bytes], of the blocks with these numbers of unsigned codes."""
    unit = gcd(bits, 8)
    units = _pieces(codes, unit, bits // unit)
    padding = _padding(counts, bits, unit)
    if padding is not None:
        units = torch.zeros_like(padding, dtype=torch.uint8).masked_scatter_(~padding, units)
    return _assembled(units, unit, 8 // unit)


def _padding(counts: Tensor, bits: int, unit: int) -> Tensor | None:
    """Bool [units], True for the units of a stream that pad a block to a whole byte; None if there are none."""
    counts = counts.flatten()
    sizes = block_bytes(counts, bits)
    missing = (8 * sizes - bits * counts) // unit
    if not bool(missing.any()):
        return None
    ends = sizes.cumsum(0) * (8 // unit)
    padding = torch.zeros(int(ends[-1]), dtype=torch.bool, device=counts.device)
    for back in range(1, 8 // unit):
        padding[ends[missing >= back] - back] = True
    return padding


def _pieces(integers: Tensor, unit: int, count: int) -> Tensor:
    """Split each integer into `count` units of `unit` bits, least significant first; flat."""
    if count == 1:
        return integers
    return torch.stack([integers >> unit * place & (1 << unit) - 1 for place in range(count)], -1).flatten()


def _assembled(units: Tensor, unit: int, count: int) -> Tensor:
    """The inverse of `_pieces`."""
    if count == 1:
        return units
    integers = units[::count].clone()
    for place in range(1, count):
        integers |= units[place::count] << unit * place
    return integers
