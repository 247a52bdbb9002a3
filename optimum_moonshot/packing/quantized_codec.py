"""The formats "int{bits}g{group}", such as "int4g128", as codecs."""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ..errors import require
from ..objective.grid import BITS, BLOCK, Grid
from ..objective.patterns import NM
from .codec import INPUTS, Codec, Parts, Verdict
from .quantized import check_packed, find_offsets, pack, packed_bytes, select_rows, unpack
from .quantized_product import QuantizedTensors, grouped_product, quantized_linear
from .timing import LEAST, kernel_lacks, kernel_name, timed_verdict

FASTER = ("vbmi2", "amx")  # instruction sets whose product of one row is faster than the dense one at any sparsity
_NAME = re.compile(r"int([0-9])g([1-9][0-9]{0,8})")


class ProductPlan(NamedTuple):
    """Properties of a packed matrix that are computed once."""

    offsets: Tensor | None  # of `find_offsets`


class Quantized(Codec):
    """The codec of the formulas in `quantized` and the operators in `quantized_product`.

    Args:
        bits: of a code: 8, 4 or 3.
        group: consecutive inputs of a row with one scale, a multiple of 64.
        inputs: one of `INPUTS`. Where no library computes integer products, inputs are never rounded.

    Raises:
        MoonshotError: other values.
    """

    suffixes: ClassVar[tuple[str, ...]] = ("_codes", "_scale", "_meta")

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
        """As `Codec.pack`; also raises `MoonshotError` if the matrix is not on the grid.

        Without a pattern, zeros are stored too where that takes fewer bytes than a bitmask.
        """
        return dict(zip(self.suffixes, pack(self.grid(matrix.dtype), matrix, pattern), strict=True))

    def check(
        self,
        parts: Mapping[str, Tensor],
        shape: tuple[int, int],
        dtype: torch.dtype | None = None,
        pattern: NM | None = None,
    ) -> None:
        codes, scale, meta = self._parts(parts)
        check_packed(self.grid(scale.dtype), codes, scale, meta, shape, pattern)
        require(dtype in (None, scale.dtype), f"its scales are {scale.dtype}, {dtype} was written")

    def unpack(self, parts: Mapping[str, Tensor], shape: tuple[int, int], plan: ProductPlan | None = None) -> Tensor:
        codes, scale, meta = self._parts(parts)
        return unpack(self.grid(scale.dtype), codes, scale, meta, shape[1], None if plan is None else plan.offsets)

    def packed_bytes(self, matrix: Tensor, pattern: NM | None) -> int:
        return packed_bytes(self.grid(matrix.dtype), matrix, pattern)

    def rows(
        self,
        parts: Mapping[str, Tensor],
        shape: tuple[int, int],
        first: int,
        stop: int,
        plan: ProductPlan | None = None,
    ) -> tuple[Parts, ProductPlan]:
        codes, scale, meta = self._parts(parts)
        offsets = find_offsets(meta, shape[1], self.bits) if plan is None else plan.offsets
        *rows, offsets = select_rows(codes, scale, meta, offsets, first, stop)
        return dict(zip(self.suffixes, rows, strict=True)), ProductPlan(offsets)

    def stack(self, matrices: Sequence[Mapping[str, Tensor]], shapes: Sequence[tuple[int, int]]) -> Parts:
        *_, bits = self.suffixes
        if len({parts[bits].shape[1] for parts in matrices}) > 1:  # some store every weight
            filled = (_all_stored(parts[bits], d_in) for parts, (_, d_in) in zip(matrices, shapes, strict=True))
            matrices = [{**parts, bits: meta} for parts, meta in zip(matrices, filled, strict=True)]
        return super().stack(matrices, shapes)

    def plan(self, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> ProductPlan | None:
        if torch.compiler.is_compiling():  # data-dependent values must be computed inside the operators
            return None
        return ProductPlan(find_offsets(self._parts(parts)[2], shape[1], self.bits))

    def linear(
        self,
        inputs: Tensor,
        parts: Mapping[str, Tensor],
        shape: tuple[int, int],
        bias: Tensor | None = None,
        plan: ProductPlan | None = None,
    ) -> Tensor:
        if torch.is_autocast_enabled(inputs.device.type) or inputs.shape[-1] != shape[1]:
            return super().linear(inputs, parts, shape, bias, plan)
        return quantized_linear(inputs, self._tensors(parts, plan), bias, wide=self.inputs != INPUTS[0])

    def grouped(
        self,
        inputs: Tensor,
        counts: Tensor,
        parts: Mapping[str, Tensor],
        shape: tuple[int, int],
        plan: ProductPlan | None = None,
    ) -> Tensor:
        if torch.is_autocast_enabled(inputs.device.type) or inputs.shape[-1] != shape[1]:
            return super().grouped(inputs, counts, parts, shape, plan)
        return grouped_product(inputs, counts, self._tensors(parts, plan), wide=self.inputs != INPUTS[0])

    def decoding(
        self, shape: tuple[int, int], pattern: NM | None, fraction: float, dtype: torch.dtype, device: torch.device
    ) -> Verdict:
        """As `Codec.decoding`: a compiled product with rounded inputs is faster; it reads at most half of the bytes.

        The kernels of GPUs, AVX2 and NEON are timed.
        """
        lacks = self._lacks(shape, dtype, device)
        if lacks is not None:
            return Verdict(False, lacks)
        name = kernel_name(device)
        if name in FASTER:
            return Verdict(True, f"{name} kernels for {self.name}")
        # Bits per weight: those of a bitmask, unless all weights are stored, a scale per group, and the codes.
        codes = 8 * dtype.itemsize * (fraction - 1 / self.group)
        share = 1.0 if codes > self.bits - 0.01 else (codes - 1) / self.bits
        return timed_verdict(self, shape, pattern, share, dtype, device, name)

    def _lacks(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> str | None:
        """The reason why no kernel can be faster; None if one can."""
        lacks = kernel_lacks("quantized", dtype, device)
        if lacks is None and device.type == "cpu" and self.inputs != INPUTS[0]:
            lacks = "the kernel is slower for inputs that are not rounded"
        small = shape[0] * shape[1] < LEAST
        return f"smaller than {LEAST} weights" if lacks is None and small else lacks

    def _tensors(self, parts: Mapping[str, Tensor], plan: ProductPlan | None) -> QuantizedTensors:
        offsets = None if plan is None else plan.offsets
        return QuantizedTensors(*self._parts(parts), offsets, self.bits, self.group)

    def _parts(self, parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        codes, scale, meta = (parts[suffix] for suffix in self.suffixes)
        return codes, scale, meta


def _all_stored(meta: Tensor, d_in: int) -> Tensor:
    """A bitmask, with all bits if there is none."""
    if meta.shape[1]:
        return meta
    full = torch.full((len(meta), -(-d_in // 8)), 255, dtype=torch.uint8, device=meta.device)
    full[:, -1] >>= -d_in % 8
    return full


@lru_cache
def _quantized(bits: int, group: int, inputs: str) -> Quantized:
    return Quantized(bits, group, inputs)
