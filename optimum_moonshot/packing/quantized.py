"""The formats "int{bits}g{group}": integer codes, a scale per group of inputs, and one bit per weight.

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

The products with a matrix are operators. ``moonshot::quantized_linear`` is x Wᵀ + bias, with gradients for x and bias;
W is constant. ``moonshot::quantized_grouped`` is the same for groups of inputs, each with a matrix of a stack, without
bias. The compiled library multiplies directly with the packed W, and so do GPU kernels with few rows of x. For
gradients, and where there is no library, tiles of W are unpacked, so that no dense copy of W is written to memory; GPU
kernels unpack all of W. ``moonshot::quantized_lookup`` unpacks the rows of W with given indices, as an embedding does.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from math import gcd
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..errors import require
from ..kernels.library import QuantizedMatrix, find_gpu_kernels, find_library
from ..objective.grid import BITS, BLOCK, DTYPES, Grid
from ..objective.linalg import row_slices, split_range
from ..objective.patterns import NM
from .bitmask import is_nm, pack_bits, popcounts, stored_bits, unpack_bits
from .codec import INPUTS, Codec, Parts, Shape, Verdict, register_operators
from .timing import kernel_name, kernel_obstacle, timed_verdict

_TEMPORARY = 24  # bytes of the intermediates of a weight
FASTER = ("vbmi2", "amx")  # instruction sets whose product of one row is faster than the dense one at any sparsity
_NAME = re.compile(r"int([0-9])g([1-9][0-9]{0,8})")
_TILE = 1 << 20  # bytes of a tile of unpacked rows
_MOST_WIDE = 4  # rows of inputs that are not rounded; above, torch's product with tiles is faster

_MATRIX = "Tensor codes, Tensor scale, Tensor meta, Tensor? offsets, int bits, int group"
_library = torch.library.Library("moonshot", "FRAGMENT")
_library.define(f"quantized_linear(Tensor inputs, {_MATRIX}, Tensor? bias, bool wide) -> Tensor")
_library.define(f"quantized_product(Tensor inputs, {_MATRIX}, Tensor? bias, bool wide) -> Tensor")
_library.define(f"quantized_lookup(Tensor rows, {_MATRIX}, int d_in) -> Tensor")
_library.define(f"quantized_grouped(Tensor inputs, Tensor counts, {_MATRIX}, bool wide) -> Tensor")
_library.define(f"quantized_transposed(Tensor outputs, {_MATRIX}, int d_in) -> Tensor")
_library.define(f"quantized_grouped_transposed(Tensor outputs, Tensor counts, {_MATRIX}, int d_in) -> Tensor")


def pack(grid: Grid, matrix: Tensor, pattern: NM | None) -> tuple[Tensor, Tensor, Tensor]:
    """Pack a matrix in host memory into `codes`, `scale` and `meta`; raises like `Quantized.pack`."""
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
        allowed = " or ".join(str(list(size)) for size in sorted(sizes))
        fits = tuple(tensor.shape) in sizes
        require(fits, f"weight_{name} is {list(tensor.shape)} where a weight of {d_out}×{d_in} needs {allowed}")
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


class Quantized(Codec):
    """The format as a codec. A plan is the result of `find_offsets`.

    Args:
        bits: of a code: 8, 4 or 3.
        group: consecutive inputs of a row with one scale, a multiple of 64.
        inputs: one of `INPUTS`. Where no library computes integer products, inputs are never rounded.

    Raises:
        MoonshotError: other values.
    """

    suffixes: ClassVar[tuple[str, ...]] = ("_codes", "_scale", "_meta")
    looks_up: ClassVar[bool] = True

    def __init__(self, bits: int, group: int = 128, inputs: str = INPUTS[0]):
        Grid(bits, group)
        self.bits, self.group, self.inputs = bits, group, inputs
        self.name = f"int{bits}g{group}"

    @staticmethod
    def of(grid: Grid) -> "Quantized":
        """The format of weights on a grid, in any dtype."""
        return _quantized(grid.bits, grid.group, INPUTS[0])

    def named(self, name: str) -> "Quantized | None":
        match = _NAME.fullmatch(name)
        bits, group = (int(number) for number in match.groups()) if match else (0, 0)
        return _quantized(bits, group, self.inputs) if bits in BITS and group % BLOCK == 0 else None

    def with_inputs(self, inputs: str) -> "Quantized":
        return _quantized(self.bits, self.group, inputs)

    def grid(self, dtype: torch.dtype) -> Grid:
        """The grid of weights in a dtype."""
        return Grid(self.bits, self.group, dtype)

    def pack(self, matrix: Tensor, pattern: NM | None) -> Parts:
        """Like `Codec.pack`, but also raises `MoonshotError` if the matrix is not on the grid.

        Without a pattern, zeros are stored too where that needs fewer bytes than a bitmask.
        """
        return dict(zip(self.suffixes, pack(self.grid(matrix.dtype), matrix, pattern), strict=True))

    def check(self, parts: Parts, shape: Shape, dtype: torch.dtype | None = None, pattern: NM | None = None) -> None:
        codes, scale, meta = self._tensors(parts)
        check_packed(self.grid(scale.dtype), codes, scale, meta, shape, pattern)
        require(dtype in (None, scale.dtype), f"its scales are {scale.dtype}, {dtype} was written")

    def unpack(self, parts: Parts, shape: Shape, plan: Tensor | None = None) -> Tensor:
        codes, scale, meta = self._tensors(parts)
        return unpack(self.grid(scale.dtype), codes, scale, meta, shape[1], plan)

    def packed_bytes(self, matrix: Tensor, pattern: NM | None) -> int:
        return packed_bytes(self.grid(matrix.dtype), matrix, pattern)

    def rows(
        self, parts: Parts, shape: Shape, first: int, stop: int, plan: Tensor | None = None
    ) -> tuple[Parts, Tensor | None]:
        codes, scale, meta = self._tensors(parts)
        offsets = find_offsets(meta, shape[1], self.bits) if plan is None else plan
        *rows, offsets = select_rows(codes, scale, meta, offsets, first, stop)
        return dict(zip(self.suffixes, rows, strict=True)), offsets

    def stack(self, matrices: Sequence[Parts], shapes: Sequence[Shape]) -> Parts:
        *_, bits = self.suffixes
        if len({parts[bits].shape[1] for parts in matrices}) > 1:  # some store every weight
            filled = (_all_stored(parts[bits], d_in) for parts, (_, d_in) in zip(matrices, shapes, strict=True))
            matrices = [{**parts, bits: meta} for parts, meta in zip(matrices, filled, strict=True)]
        return super().stack(matrices, shapes)

    def plan(self, parts: Parts, shape: Shape) -> Tensor | None:
        if torch.compiler.is_compiling():  # data-dependent values must be computed inside the operators
            return None
        return find_offsets(self._tensors(parts)[2], shape[1], self.bits)

    def linear(
        self, inputs: Tensor, parts: Parts, shape: Shape, bias: Tensor | None = None, plan: Tensor | None = None
    ) -> Tensor:
        if torch.is_autocast_enabled(inputs.device.type) or inputs.shape[-1] != shape[1]:
            return super().linear(inputs, parts, shape, bias, plan)
        arguments = inputs, *self._tensors(parts), plan, self.bits, self.group, bias, self.inputs != INPUTS[0]
        differentiable = torch.is_grad_enabled() and (inputs.requires_grad or (bias is not None and bias.requires_grad))
        if differentiable or torch.compiler.is_compiling():
            return torch.ops.moonshot.quantized_linear.default(*arguments)
        # Without gradients, skip autograd: its overhead per call is as large as a small product.
        return torch.ops.moonshot.quantized_product.default(*arguments)

    def lookup(self, rows: Tensor, parts: Parts, shape: Shape, plan: Tensor | None = None) -> Tensor:
        matrix = *self._tensors(parts), plan, self.bits, self.group
        dense: Tensor = torch.ops.moonshot.quantized_lookup.default(rows, *matrix, shape[1])
        return dense

    def direct(
        self, parts: Parts, shape: Shape, bias: Tensor | None = None, plan: Tensor | None = None
    ) -> Callable[[Tensor], Tensor | None] | None:
        (codes, scale, meta), library, wide = self._tensors(parts), find_library(), self.inputs != INPUTS[0]
        matrix = library_matrix(self.grid(scale.dtype), codes, scale, meta, shape[1], plan)
        if library is None or matrix is None or not _supports(scale.new_empty(1, shape[1]), scale, bias, 1, wide):
            return None
        return library.direct_quantized_product(matrix, bias, wide, _MOST_WIDE if wide else library.most_rows)

    def grouped(self, inputs: Tensor, counts: Tensor, parts: Parts, shape: Shape, plan: Tensor | None = None) -> Tensor:
        if torch.is_autocast_enabled(inputs.device.type) or inputs.shape[-1] != shape[1]:
            return super().grouped(inputs, counts, parts, shape, plan)
        matrix = *self._tensors(parts), plan, self.bits, self.group
        wide = self.inputs != INPUTS[0]
        outputs: Tensor = torch.ops.moonshot.quantized_grouped.default(inputs, counts, *matrix, wide)
        return outputs

    def decoding(
        self, shape: Shape, pattern: NM | None, fraction: float, dtype: torch.dtype, device: torch.device
    ) -> Verdict:
        """Like `Codec.decoding`: a compiled product with rounded inputs, which reads at most half the bytes, is faster.

        The kernels of GPUs, AVX2 and NEON are timed.
        """
        obstacle, name = kernel_obstacle("quantized", shape, dtype, device), kernel_name(device)
        if obstacle is None and device.type == "cpu" and self.inputs != INPUTS[0]:
            obstacle = "the kernel is slower for inputs that are not rounded"
        if obstacle is not None:
            return Verdict(False, obstacle)
        if name in FASTER:
            return Verdict(True, f"{name} kernels for {self.name}")
        # Bits per weight: 1 of the bitmask, unless all weights are stored; a scale per group; and the codes.
        codes = 8 * dtype.itemsize * (fraction - 1 / self.group)
        share = 1.0 if codes > self.bits - 0.01 else (codes - 1) / self.bits
        return timed_verdict(self, shape, pattern, share, dtype, device)

    def _tensors(self, parts: Parts) -> tuple[Tensor, Tensor, Tensor]:
        codes, scale, meta = (parts[suffix] for suffix in self.suffixes)
        return codes, scale, meta


def _all_stored(meta: Tensor, d_in: int) -> Tensor:
    """The bitmask; all ones if every weight is stored without one."""
    if meta.shape[1]:
        return meta
    full = torch.full((len(meta), -(-d_in // 8)), 255, dtype=torch.uint8, device=meta.device)
    full[:, -1] >>= -d_in % 8
    return full


@lru_cache
def _quantized(bits: int, group: int, inputs: str) -> Quantized:
    return Quantized(bits, group, inputs)


class _Matrix(NamedTuple):
    """A packed matrix, as the arguments `_MATRIX` of the operators."""

    codes: Tensor
    scale: Tensor
    meta: Tensor
    offsets: Tensor | None  # of `find_offsets`; None also if they were not computed
    bits: int
    group: int

    def with_offsets(self, d_in: int) -> "_Matrix":
        offsets = find_offsets(self.meta, d_in, self.bits) if self.offsets is None else self.offsets
        return self._replace(offsets=offsets)

    def in_library(self, d_in: int) -> QuantizedMatrix | None:
        """The matrix for the compiled library; None if that is missing or does not support it."""
        grid = Grid(self.bits, self.group, self.scale.dtype)
        return library_matrix(grid, self.codes, self.scale, self.meta, d_in, self.offsets)

    def groups(self, counts: Tensor, d_in: int) -> "Iterator[tuple[slice, _Matrix]]":
        """The rows of inputs and the matrix of every group that has inputs."""
        offsets, d_out, first = self.with_offsets(d_in).offsets, len(self.scale) // len(counts), 0
        for number, count in enumerate(counts.tolist()):
            if count:
                places = number * d_out, (number + 1) * d_out
                rows = select_rows(self.codes, self.scale, self.meta, offsets, *places)
                yield slice(first, first + count), _Matrix(*rows, self.bits, self.group)
                first += count

    def tiles(self, d_in: int) -> Iterator[tuple[slice, Tensor]]:
        """Unpack tiles of rows: the range of rows and the tile, valid until the next one."""
        library, matrix = find_library(), self.in_library(d_in)
        if library is None or matrix is None:
            grid = Grid(self.bits, self.group, self.scale.dtype)
            yield from unpacked_slices(grid, self.codes, self.scale, self.meta, d_in)
            return
        size = max(1, _TILE // (d_in * self.scale.dtype.itemsize))
        buffer = self.scale.new_empty(min(size, len(self.scale)), d_in)
        for rows in split_range(0, len(self.scale), size):
            yield rows, library.quantized_unpack(buffer[: rows.stop - rows.start], matrix, rows.start)


def _product(inputs: Tensor, *arguments: Any) -> Tensor:
    *tensors, bias, wide = arguments
    matrix, library, d_in = _Matrix(*tensors), find_library(), inputs.shape[-1]
    if _is_for_gpu(inputs, matrix.scale):
        return _gpu_product(inputs, matrix, bias)
    flat, outputs = inputs.reshape(-1, d_in), inputs.new_empty(*inputs.shape[:-1], len(matrix.scale))
    in_library = matrix.in_library(d_in)
    if library is not None and in_library is not None and _supports(inputs, matrix.scale, bias, len(flat), wide):
        return library.quantized_product(flat.contiguous(), in_library, bias, wide).view_as(outputs)
    for rows, tile in matrix.tiles(d_in):
        outputs[..., rows] = functional.linear(inputs, tile, None if bias is None else bias[rows])
    return outputs


def _lookup(rows: Tensor, *arguments: Any) -> Tensor:
    *tensors, d_in = arguments
    matrix = _Matrix(*tensors)
    codes, scale, meta = gather_rows(*matrix.with_offsets(d_in)[:4], rows.flatten())
    return unpack(Grid(matrix.bits, matrix.group, scale.dtype), codes, scale, meta, d_in).view(*rows.shape, d_in)


def _is_for_gpu(inputs: Tensor, scale: Tensor) -> bool:
    supported = inputs.dtype == scale.dtype and scale.dtype in DTYPES
    return inputs.is_cuda and supported and find_gpu_kernels("quantized") is not None


def _gpu_product(inputs: Tensor, matrix: _Matrix, bias: Tensor | None) -> Tensor:
    """The product with inputs that are not rounded; few rows, bound by memory bandwidth, use the packed matrix."""
    kernels, flat = find_gpu_kernels("quantized"), inputs.reshape(-1, inputs.shape[-1])
    assert kernels is not None
    matrix = matrix.with_offsets(flat.shape[1])
    if len(flat) > kernels.MOST_ROWS:
        return functional.linear(inputs, kernels.unpack(*matrix, flat.shape[1]), bias)
    outputs = kernels.linear(flat, *matrix)
    outputs = outputs if bias is None else outputs + bias
    return outputs.view(*inputs.shape[:-1], len(matrix.scale))


def _supports(x: Tensor, scale: Tensor, bias: Tensor | None, rows: int, wide: bool) -> bool:
    """Whether the library supports these inputs, and is faster; torch's product raises the error for invalid ones."""
    library = find_library()
    most = 0 if library is None else min(library.most_rows, _MOST_WIDE) if wide else library.most_rows
    fits = bias is None or (bias.dtype == x.dtype and bias.shape == scale.shape[:1] and bias.is_contiguous())
    return fits and x.dtype == scale.dtype and x.device.type == "cpu" and x.numel() > 0 and rows <= most


def _transposed(outputs: Tensor, *arguments: Any) -> Tensor:
    """y W: [..., d_out] → [..., d_in]."""
    *tensors, d_in = arguments
    matrix = _Matrix(*tensors)
    if _is_for_gpu(outputs, matrix.scale):
        kernels = find_gpu_kernels("quantized")
        assert kernels is not None
        return outputs @ kernels.unpack(*matrix.with_offsets(d_in), d_in)
    wider = torch.promote_types(outputs.dtype, torch.float32)
    sums = torch.zeros(*outputs.shape[:-1], d_in, dtype=wider, device=outputs.device)
    for rows, tile in matrix.tiles(d_in):
        sums += outputs[..., rows] @ tile
    return sums.to(outputs.dtype)


def _grouped(inputs: Tensor, counts: Tensor, *arguments: Any) -> Tensor:
    *tensors, wide = arguments
    matrix, library, d_in = _Matrix(*tensors), find_library(), inputs.shape[1]
    outputs, in_library = inputs.new_zeros(len(inputs), len(matrix.scale) // len(counts)), matrix.in_library(d_in)
    fits = _supports(inputs, matrix.scale, None, int(counts.max()), wide)
    if library is not None and in_library is not None and fits:
        library.quantized_grouped(outputs, inputs.contiguous(), counts, in_library, wide)
        return outputs
    for rows, expert in matrix.groups(counts, d_in):
        outputs[rows] = _product(inputs[rows], *expert, None, wide)
    return outputs


def _grouped_transposed(outputs: Tensor, counts: Tensor, *arguments: Any) -> Tensor:
    """Like `_transposed` for groups of rows: [rows, d_out] → [rows, d_in]."""
    *tensors, d_in = arguments
    sums = outputs.new_zeros(len(outputs), d_in)
    for rows, expert in _Matrix(*tensors).groups(counts, d_in):
        sums[rows] = _transposed(outputs[rows], *expert, d_in)
    return sums


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, *tensors, ctx.bits, ctx.group, _, _ = inputs
    ctx.d_in = x.shape[-1]
    ctx.save_for_backward(*tensors)


def _gradients(ctx: Any, outputs: Tensor) -> tuple[Tensor | None, ...]:
    x = bias = None
    if ctx.needs_input_grad[0]:
        matrix = *ctx.saved_tensors, ctx.bits, ctx.group
        x = torch.ops.moonshot.quantized_transposed.default(outputs, *matrix, ctx.d_in)
    if ctx.needs_input_grad[7]:
        bias = outputs.flatten(0, -2).sum(0) if outputs.ndim > 1 else outputs
    return x, None, None, None, None, None, None, bias, None


def _remember_grouped(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, *tensors, ctx.bits, ctx.group, _ = inputs
    ctx.d_in = x.shape[1]
    ctx.save_for_backward(*tensors)


def _gradients_grouped(ctx: Any, outputs: Tensor) -> tuple[Tensor | None, ...]:
    matrix = *ctx.saved_tensors, ctx.bits, ctx.group
    x = torch.ops.moonshot.quantized_grouped_transposed.default(outputs, *matrix, ctx.d_in)
    return x, None, None, None, None, None, None, None, None


register_operators(
    _library,
    (
        ("quantized_linear", _product, lambda x, _, scale, *rest: x.new_empty(*x.shape[:-1], scale.shape[0])),
        ("quantized_product", _product, lambda x, _, scale, *rest: x.new_empty(*x.shape[:-1], scale.shape[0])),
        ("quantized_lookup", _lookup, lambda rows, _, scale, *rest: scale.new_empty(*rows.shape, rest[-1])),
        ("quantized_grouped", _grouped, lambda x, n, _, s, *rest: x.new_empty(x.shape[0], s.shape[0] // n.shape[0])),
        ("quantized_transposed", _transposed, lambda y, *rest: y.new_empty(*y.shape[:-1], rest[-1])),
        ("quantized_grouped_transposed", _grouped_transposed, lambda y, *rest: y.new_empty(*y.shape[:-1], rest[-1])),
    ),
    (
        ("quantized_linear", _gradients, _remember),
        ("quantized_grouped", _gradients_grouped, _remember_grouped),
    ),
)
