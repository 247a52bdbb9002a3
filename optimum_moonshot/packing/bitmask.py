"""The format "bitmask": the nonzero values of a matrix and one bit per weight.

A matrix W [d_out, d_in] is stored as

* ``values`` (``_packed``): row by row in the order of the inputs, [d_out, d_in·n/m] for n:m, otherwise flat;
* ``meta`` (``_meta``): uint8 [d_out, ⌈d_in/8⌉], bit j (least significant first) of byte b is 1 where input 8b+j has a
  value.

If m consecutive inputs have fewer than n nonzeros, zeros are stored in addition, so that all rows have the same length.
−0.0 counts as zero and is restored as 0.0; all other values are restored bit for bit. 2:4 in 16 bits needs 1/2 + 1/16
= 9/16 of the memory. In this package, `shape` is (d_out, d_in), and `values`, `meta` are these tensors.

The products with a matrix are operators, one node each for `torch.compile`. ``moonshot::packed_linear`` is x Wᵀ + bias,
with gradients for x and bias; W is constant. ``moonshot::packed_grouped`` is the same for groups of inputs, each with a
matrix of a stack, without bias. The compiled library multiplies directly with the packed W. For gradients, and where
torch is faster, tiles of W are unpacked into a buffer that fits the CPU's cache, so that no dense copy of W is written
to memory.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, reduce
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ..errors import MoonshotError, require
from ..kernels.library import Library, find_gpu_kernels, find_library
from ..objective.patterns import NM
from .codec import Codec, Parts, Shape, Verdict, register_operators
from .timing import kernel_name, kernel_obstacle, timed_verdict

# The integer dtype of the same width as a floating-point dtype: bit patterns of NaN and −0.0 are copied unchanged.
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_STEP = 1 << 17  # bytes of `meta` unpacked at a time, since the shifts need 12 times the memory of their weights
# Computed once for a matrix: the results of `find_window` (-1: not computed) and of `find_offsets` (None: not computed,
# or rows of equal lengths).
Plan = tuple[int, Tensor | None]
_NO_PLAN: Plan = (-1, None)

_TILE = 1 << 20  # bytes of a tile of unpacked rows: at most half the second-level cache of current CPUs
# Largest packed size, as a fraction of the dense size, at which one row was at least 10% faster, by instruction set and
# bytes of a weight (benchmarks/results/runtime-sets.json). This is a sparsity of 20% in 16 bits, and of 40% to 50% in
# 32 bits, where the dense product already reaches the memory bandwidth. With a few more rows the gain is smaller; with
# many rows the loss is not significant.
_WIDE = {2: 0.87, 4: 0.64}
_MOST = {"avx2": {2: 0.87, 4: 0.55}, "avx512": _WIDE, "vbmi2": _WIDE, "amx": _WIDE}

_MATRIX = "Tensor values, Tensor meta, Tensor? offsets"
_library = torch.library.Library("moonshot", "DEF")
_library.define(f"packed_linear(Tensor inputs, {_MATRIX}, Tensor? bias, int window) -> Tensor")
_library.define(f"packed_product(Tensor inputs, {_MATRIX}, Tensor? bias, int window) -> Tensor")
_library.define(f"packed_transposed(Tensor outputs, {_MATRIX}, int d_in, int window) -> Tensor")
_library.define(f"packed_grouped(Tensor inputs, Tensor counts, {_MATRIX}) -> Tensor")
_library.define(f"packed_grouped_transposed(Tensor outputs, Tensor counts, {_MATRIX}, int d_in) -> Tensor")


def pack(matrix: Tensor, pattern: NM | None) -> tuple[Tensor, Tensor]:
    """Pack a matrix in host memory into `values` and `meta`; raises like `Codec.pack`."""
    matrix = matrix.contiguous()
    meta, integers = stored_bits(matrix, pattern), matrix.view(INTEGERS[matrix.dtype.itemsize])
    if pattern is not None:
        integers = torch.where(matrix != 0, integers, 0)  # a zero that is stored may be −0.0
    keep = np.unpackbits(meta.numpy(), axis=1, count=matrix.shape[1], bitorder="little").view(bool)
    values = torch.from_numpy(integers.numpy()[keep]).view(matrix.dtype)
    return values if pattern is None else values.view(len(matrix), -1), meta


def stored_bits(matrix: Tensor, pattern: NM | None) -> Tensor:
    """`meta` of a matrix in host memory; `MoonshotError` if m consecutive inputs have more than n nonzeros."""
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
    if values.dtype.itemsize == 2:  # 2 to 3 times as fast as a scatter; 32 bits half as fast
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
    """Assemble each window of weights of 16 bits as 64-bit words, by shifts from a table."""
    per = values.shape[1] * window // d_in
    shifts = _shifts(window, per, meta.device)
    codes, words = meta.flatten(), torch.empty(len(meta) * d_in // 4, dtype=torch.int64, device=meta.device)
    integers = values.contiguous().view(torch.int16).view(-1, 8 // window, 1, per)
    for start in range(0, len(codes), _STEP):
        shifted = integers[start : start + _STEP].to(torch.int64) & (1 << 16) - 1
        shifted = shifted << shifts.index_select(0, codes[start : start + _STEP].int())
        words[2 * start : 2 * (start + len(shifted))] = reduce(torch.bitwise_or, shifted.unbind(-1)).flatten()
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
def _shifts(window: int, per: int, device: torch.device) -> Tensor:
    """Left shift of each value, [256, windows of a byte, 64-bit words of a window, values]; 64 drops the value."""
    groups = _bits().view(256, -1, window)
    shifts = torch.full((256, groups.shape[1], window // 4, per), 64, device="cpu")
    for code, group, position in groups.nonzero().tolist():
        index = int(groups[code, group, :position].sum())
        if index < per:
            shifts[code, group, position // 4, index] = 16 * (position % 4)
    return shifts.to(device)


class Bitmask(Codec):
    """The format as a codec."""

    name = "bitmask"
    suffixes: ClassVar[tuple[str, ...]] = ("_packed", "_meta")

    def pack(self, matrix: Tensor, pattern: NM | None) -> Parts:
        return dict(zip(self.suffixes, pack(matrix, pattern), strict=True))

    def check(self, parts: Parts, shape: Shape, dtype: torch.dtype | None = None, pattern: NM | None = None) -> None:
        values, meta = self._tensors(parts)
        check_packed(values, meta, shape)
        require(dtype in (None, values.dtype), f"its values are {values.dtype}, {dtype} was written")
        require(pattern is None or is_nm(meta, shape[1], pattern), f"it is not {pattern}")

    def unpack(self, parts: Parts, shape: Shape, plan: Plan | None = None) -> Tensor:
        return unpack(*self._tensors(parts), shape[1], *(plan or _NO_PLAN))

    def packed_bytes(self, matrix: Tensor, pattern: NM | None) -> int:
        d_out, d_in = matrix.shape
        values = matrix.numel() * pattern.n // pattern.m if pattern else int(matrix.count_nonzero())
        return values * matrix.dtype.itemsize + d_out * -(-d_in // 8)

    def rows(self, parts: Parts, shape: Shape, first: int, stop: int, plan: Plan | None = None) -> tuple[Parts, Plan]:
        values, meta = self._tensors(parts)
        window, offsets = plan or _NO_PLAN
        offsets = find_offsets(values, meta, shape[1]) if offsets is None else offsets
        *rows, offsets = select_rows(values, meta, offsets, first, stop)
        return dict(zip(self.suffixes, rows, strict=True)), (window, offsets)

    def stack(self, matrices: Sequence[Parts], shapes: Sequence[Shape]) -> Parts:
        values, meta = self.suffixes
        if len({parts[values].shape[1:] for parts in matrices}) > 1:  # rows of unequal lengths
            matrices = [{values: parts[values].flatten(), meta: parts[meta]} for parts in matrices]
        return super().stack(matrices, shapes)

    def plan(self, parts: Parts, shape: Shape) -> Plan:
        values, meta = self._tensors(parts)
        if torch.compiler.is_compiling():  # data-dependent values must be computed inside the operators
            return _NO_PLAN
        library = find_library()
        compiled = library is not None and library.takes(values)
        return -1 if compiled else find_window(values, meta, shape[1]), find_offsets(values, meta, shape[1])

    def linear(
        self, inputs: Tensor, parts: Parts, shape: Shape, bias: Tensor | None = None, plan: Plan | None = None
    ) -> Tensor:
        if torch.is_autocast_enabled(inputs.device.type) or inputs.shape[-1] != shape[1]:
            return super().linear(inputs, parts, shape, bias, plan)
        values, meta = self._tensors(parts)
        window, offsets = plan or _NO_PLAN
        differentiable = torch.is_grad_enabled() and (inputs.requires_grad or (bias is not None and bias.requires_grad))
        if differentiable or torch.compiler.is_compiling():
            return torch.ops.moonshot.packed_linear.default(inputs, values, meta, offsets, bias, window)
        # Without gradients, skip autograd: its overhead per call is as large as a small product.
        return torch.ops.moonshot.packed_product.default(inputs, values, meta, offsets, bias, window)

    def direct(
        self, parts: Parts, shape: Shape, bias: Tensor | None = None, plan: Plan | None = None
    ) -> Callable[[Tensor], Tensor | None] | None:
        (values, meta), library, (_, offsets) = self._tensors(parts), find_library(), plan or _NO_PLAN
        like = values.new_empty(1, shape[1])
        if library is None or not _supports(library, like, values, meta, bias):
            return None
        offsets = find_offsets(values, meta, shape[1]) if offsets is None else offsets
        return library.direct_product(values, meta, offsets, shape[1], bias)

    def grouped(self, inputs: Tensor, counts: Tensor, parts: Parts, shape: Shape, plan: Plan | None = None) -> Tensor:
        if torch.is_autocast_enabled(inputs.device.type) or inputs.shape[-1] != shape[1]:
            return super().grouped(inputs, counts, parts, shape, plan)
        _, offsets = plan or _NO_PLAN
        outputs: Tensor = torch.ops.moonshot.packed_grouped.default(inputs, counts, *self._tensors(parts), offsets)
        return outputs

    def decoding(
        self, shape: Shape, pattern: NM | None, fraction: float, dtype: torch.dtype, device: torch.device
    ) -> Verdict:
        """Like `Codec.decoding`, by the measured thresholds where there are any, else by one measurement per shape."""
        obstacle, name = kernel_obstacle("bitmask", shape, dtype, device), kernel_name(device)
        if obstacle is not None:
            return Verdict(False, obstacle)
        if name in _MOST:
            most = _MOST[name][dtype.itemsize]
            why = f"{name} kernels" if fraction <= most else f"more than {most:.0%} of the bytes remain"
            return Verdict(fraction <= most, why)
        return timed_verdict(self, shape, pattern, fraction - 1 / (8 * dtype.itemsize), dtype, device)

    def _tensors(self, parts: Parts) -> tuple[Tensor, Tensor]:
        values, meta = (parts[suffix] for suffix in self.suffixes)
        return values, meta


def _product(
    inputs: Tensor, values: Tensor, meta: Tensor, offsets: Tensor | None, bias: Tensor | None, window: int
) -> Tensor:
    library, d_in, shape = find_library(), inputs.shape[-1], (*inputs.shape[:-1], len(meta))
    if _is_for_gpu(inputs, values):
        return _gpu_product(inputs, values, meta, offsets, bias, window)
    if library is None or not _supports(library, inputs, values, meta, bias):
        return functional.linear(inputs, unpack(values, meta, d_in, window, offsets), bias)
    flat = inputs.reshape(-1, d_in).contiguous()
    offsets = find_offsets(values, meta, d_in) if offsets is None else offsets
    if len(flat) <= library.most_rows:
        return library.product(flat, values, meta, offsets, bias).view(shape)
    outputs = flat.new_empty(len(flat), len(meta))
    for rows, tile in _tiles(library, values, meta, offsets, d_in):
        outputs[:, rows] = functional.linear(flat, tile, None if bias is None else bias[rows])
    return outputs.view(shape)


def _is_for_gpu(inputs: Tensor, values: Tensor) -> bool:
    supported = inputs.dtype == values.dtype and values.dtype.itemsize <= 4
    return inputs.is_cuda and supported and find_gpu_kernels("bitmask") is not None


def _gpu_product(
    inputs: Tensor, values: Tensor, meta: Tensor, offsets: Tensor | None, bias: Tensor | None, window: int
) -> Tensor:
    """Few rows, bound by memory bandwidth, are multiplied by the packed matrix, more rows by the unpacked one."""
    kernels, flat = find_gpu_kernels("bitmask"), inputs.reshape(-1, inputs.shape[-1])
    assert kernels is not None
    offsets = find_offsets(values, meta, flat.shape[1]) if offsets is None else offsets
    if len(flat) > kernels.MOST_ROWS:
        return functional.linear(inputs, kernels.unpack(values, meta, flat.shape[1], offsets), bias)
    window = find_window(values, meta, flat.shape[1]) if window < 0 else window
    outputs = kernels.linear(flat, values, meta, offsets, window)
    outputs = outputs if bias is None else outputs + bias
    return outputs.view(*inputs.shape[:-1], len(meta))


def _supports(library: Library, x: Tensor, values: Tensor, meta: Tensor, bias: Tensor | None) -> bool:
    """Whether the library supports these tensors; for invalid ones, torch's dense product raises the error."""
    return (
        library.takes(values)
        and x.dtype == values.dtype
        and x.device.type == meta.device.type == "cpu"
        and x.numel() > 0
        and meta.is_contiguous()
        and meta.shape[1] == -(-x.shape[-1] // 8)
        and (bias is None or (bias.dtype == x.dtype and bias.shape == meta.shape[:1] and bias.is_contiguous()))
    )


def _tiles(
    library: Library, values: Tensor, meta: Tensor, offsets: Tensor | None, d_in: int
) -> Iterator[tuple[slice, Tensor]]:
    """Unpack W by tiles of rows into one buffer, [rows, d_in]: the range of rows and the tile, valid until the next."""
    size = max(1, _TILE // (d_in * values.dtype.itemsize))
    buffer = values.new_empty(min(size, len(meta)), d_in)
    for first in range(0, len(meta), size):
        tile = library.unpack(buffer[: len(meta) - first], values, meta, offsets, first)
        yield slice(first, first + len(tile)), tile


def _transposed(
    outputs: Tensor, values: Tensor, meta: Tensor, offsets: Tensor | None, d_in: int, window: int
) -> Tensor:
    """y W: [..., d_out] → [..., d_in]."""
    library = find_library()
    if library is None or not library.takes(values) or not outputs.numel():
        return outputs @ unpack(values, meta, d_in, window, offsets)
    flat = outputs.reshape(-1, len(meta))
    offsets = find_offsets(values, meta, d_in) if offsets is None else offsets
    sums = torch.zeros(len(flat), d_in, dtype=torch.float32, device="cpu")
    for rows, tile in _tiles(library, values, meta, offsets, d_in):
        sums += flat[:, rows] @ tile
    return sums.to(outputs.dtype).view(*outputs.shape[:-1], d_in)


def _grouped(inputs: Tensor, counts: Tensor, values: Tensor, meta: Tensor, offsets: Tensor | None) -> Tensor:
    library, d_in = find_library(), inputs.shape[1]
    offsets = find_offsets(values, meta, d_in) if offsets is None else offsets
    outputs = inputs.new_zeros(len(inputs), len(meta) // len(counts))
    if (
        library is not None
        and _supports(library, inputs, values, meta, None)
        and int(counts.max()) <= library.most_rows
    ):
        library.grouped(outputs, inputs.contiguous(), counts, values, meta, offsets)
        return outputs
    for rows, matrix in _groups(counts, values, meta, offsets):
        outputs[rows] = _product(inputs[rows], *matrix, None, -1)
    return outputs


def _grouped_transposed(
    outputs: Tensor, counts: Tensor, values: Tensor, meta: Tensor, offsets: Tensor | None, d_in: int
) -> Tensor:
    """Like `_transposed` for groups of rows: [rows, d_out] → [rows, d_in]."""
    offsets = find_offsets(values, meta, d_in) if offsets is None else offsets
    sums = outputs.new_zeros(len(outputs), d_in)
    for rows, matrix in _groups(counts, values, meta, offsets):
        sums[rows] = _transposed(outputs[rows], *matrix, d_in, -1)
    return sums


def _groups(
    counts: Tensor, values: Tensor, meta: Tensor, offsets: Tensor | None
) -> Iterator[tuple[slice, tuple[Tensor, Tensor, Tensor | None]]]:
    """The rows of inputs and the matrix of every group that has inputs."""
    d_out, first = len(meta) // len(counts), 0
    for group, count in enumerate(counts.tolist()):
        if count:
            yield slice(first, first + count), select_rows(values, meta, offsets, group * d_out, (group + 1) * d_out)
            first += count


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, values, meta, offsets, _, ctx.window = inputs
    ctx.d_in = x.shape[-1]
    ctx.save_for_backward(values, meta, offsets)


def _gradients(ctx: Any, outputs: Tensor) -> tuple[Tensor | None, ...]:
    x = bias = None
    if ctx.needs_input_grad[0]:
        x = torch.ops.moonshot.packed_transposed.default(outputs, *ctx.saved_tensors, ctx.d_in, ctx.window)
    if ctx.needs_input_grad[4]:
        bias = outputs.flatten(0, -2).sum(0) if outputs.ndim > 1 else outputs
    return x, None, None, None, bias, None


def _remember_grouped(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.d_in = inputs[0].shape[1]
    ctx.save_for_backward(*inputs[1:])


def _gradients_grouped(ctx: Any, outputs: Tensor) -> tuple[Tensor | None, ...]:
    x = torch.ops.moonshot.packed_grouped_transposed.default(outputs, *ctx.saved_tensors, ctx.d_in)
    return x, None, None, None, None


register_operators(
    _library,
    (
        ("packed_linear", _product, lambda x, _, meta, *rest: x.new_empty(*x.shape[:-1], meta.shape[0])),
        ("packed_product", _product, lambda x, _, meta, *rest: x.new_empty(*x.shape[:-1], meta.shape[0])),
        ("packed_transposed", _transposed, lambda y, _, meta, offsets, d_in, w: y.new_empty(*y.shape[:-1], d_in)),
        ("packed_grouped", _grouped, lambda x, n, _, meta, *rest: x.new_empty(x.shape[0], meta.shape[0] // n.shape[0])),
        ("packed_grouped_transposed", _grouped_transposed, lambda y, *rest: y.new_empty(y.shape[0], rest[-1])),
    ),
    (
        ("packed_linear", _gradients, _remember),
        ("packed_grouped", _gradients_grouped, _remember_grouped),
    ),
)
