"""The format "bitmask" as a codec."""

from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ..errors import require
from ..kernels import find_library
from ..objective.patterns import NM
from .bitmask import check_packed, find_offsets, find_window, is_nm, pack, packed_bytes, select_rows, unpack
from .bitmask_product import grouped_product, packed_linear
from .bitmask_speed import decoding
from .codec import Codec, Parts, Verdict


class ProductPlan(NamedTuple):
    """Properties of a packed matrix that are computed once, for the kernels or for torch."""

    window: int = -1  # of `find_window`; -1 if not computed
    offsets: Tensor | None = None  # of `find_offsets`; None if not computed, or if rows have equal lengths


class Bitmask(Codec):
    """The codec of the formulas in `bitmask` and the operators in `bitmask_product`."""

    name = "bitmask"
    suffixes: ClassVar[tuple[str, ...]] = ("_packed", "_meta")

    def pack(self, matrix: Tensor, pattern: NM | None) -> Parts:
        return dict(zip(self.suffixes, pack(matrix, pattern), strict=True))

    def check(
        self,
        parts: Mapping[str, Tensor],
        shape: tuple[int, int],
        dtype: torch.dtype | None = None,
        pattern: NM | None = None,
    ) -> None:
        values, meta = self._parts(parts)
        check_packed(values, meta, shape)
        require(dtype in (None, values.dtype), f"its values are {values.dtype}, {dtype} was written")
        require(pattern is None or is_nm(meta, shape[1], pattern), f"it is not {pattern}")

    def unpack(self, parts: Mapping[str, Tensor], shape: tuple[int, int], plan: ProductPlan | None = None) -> Tensor:
        plan = ProductPlan() if plan is None else plan
        return unpack(*self._parts(parts), shape[1], None if plan.window < 0 else plan.window, plan.offsets)

    def packed_bytes(self, matrix: Tensor, pattern: NM | None) -> int:
        d_out, d_in = matrix.shape
        values = matrix.numel() * pattern.n // pattern.m if pattern else int(matrix.count_nonzero())
        return packed_bytes((d_out, d_in), values, matrix.dtype.itemsize)

    def rows(
        self,
        parts: Mapping[str, Tensor],
        shape: tuple[int, int],
        first: int,
        stop: int,
        plan: ProductPlan | None = None,
    ) -> tuple[Parts, ProductPlan]:
        values, meta = self._parts(parts)
        offsets = find_offsets(values, meta, shape[1]) if plan is None or plan.offsets is None else plan.offsets
        *rows, offsets = select_rows(values, meta, offsets, first, stop)
        return dict(zip(self.suffixes, rows, strict=True)), ProductPlan(-1 if plan is None else plan.window, offsets)

    def stack(self, matrices: Sequence[Mapping[str, Tensor]], shapes: Sequence[tuple[int, int]]) -> Parts:
        values, meta = self.suffixes
        if len({parts[values].shape[1:] for parts in matrices}) > 1:  # rows of unequal lengths
            matrices = [{values: parts[values].flatten(), meta: parts[meta]} for parts in matrices]
        return super().stack(matrices, shapes)

    def plan(self, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> ProductPlan:
        values, meta = self._parts(parts)
        if torch.compiler.is_compiling():  # data-dependent values must be computed inside the operators
            return ProductPlan()
        library = find_library()
        in_c = library is not None and library.takes(values)
        return ProductPlan(-1 if in_c else find_window(values, meta, shape[1]), find_offsets(values, meta, shape[1]))

    def linear(
        self,
        inputs: Tensor,
        parts: Mapping[str, Tensor],
        shape: tuple[int, int],
        bias: Tensor | None = None,
        plan: ProductPlan | None = None,
    ) -> Tensor:
        values, meta = self._parts(parts)
        if torch.is_autocast_enabled(inputs.device.type) or inputs.shape[-1] != shape[1]:
            return super().linear(inputs, parts, shape, bias, plan)
        plan = ProductPlan() if plan is None else plan
        return packed_linear(inputs, values, meta, plan.offsets, bias, plan.window)

    def grouped(
        self,
        inputs: Tensor,
        counts: Tensor,
        parts: Mapping[str, Tensor],
        shape: tuple[int, int],
        plan: ProductPlan | None = None,
    ) -> Tensor:
        if torch.is_autocast_enabled(inputs.device.type):
            return super().grouped(inputs, counts, parts, shape, plan)
        return grouped_product(inputs, counts, *self._parts(parts), None if plan is None else plan.offsets)

    def decoding(
        self, shape: tuple[int, int], pattern: NM | None, fraction: float, dtype: torch.dtype, device: torch.device
    ) -> Verdict:
        return decoding(self, shape, pattern, fraction, dtype, device)

    def _parts(self, parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        values, meta = (parts[suffix] for suffix in self.suffixes)
        return values, meta
