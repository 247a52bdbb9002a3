"""Modules with weights that stay packed in memory, and packing of weights without a record of their pattern."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import MoonshotError
from ..objective.grid import BLOCK, Grid
from ..objective.patterns import NM
from ..packing import Codec, Quantized, find_codec
from ..packing.bitmask import fullest_window, pack_bits, popcounts
from ..packing.codec import Parts


class PackedMatrix(NamedTuple):
    """The format and the size of a packed weight."""

    codec: Codec
    shape: tuple[int, int]  # d_out, d_in


def packed_parts(module: nn.Module, codec: Codec, weight: str = "weight") -> dict[str, Tensor]:
    """The tensors of a packed weight by suffix; the module has each under its name in files."""
    return {suffix: getattr(module, name) for suffix, name in codec.names(weight).items()}


def is_intercepted() -> bool:
    """Whether a tracer, a dispatch mode, or a transform such as vmap intercepts the calls of torch's operators."""
    return (
        torch._C._is_tracing()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


class PackedModule(nn.Module):
    """The base of modules with packed weights, which replace a module with dense ones, the `origin`, if any.

    `packed` has the packed weights by their names. The tensors of each are buffers, with their names in a checkpoint:
    the weight's and a suffix. In the origin, packed weights are on the meta device. With tied weights, one module, the
    `owner`, has the tensors of all.
    """

    def __init__(self, origin: nn.Module | None, owner: "PackedModule | None" = None):
        super().__init__()
        self._origin = (origin,)  # a tuple, so that it is not registered as a submodule
        self._owner = (owner,)
        self.packed: dict[str, PackedMatrix] = {}
        self._plans: dict[str, Any] = {}

    @property
    def origin(self) -> nn.Module | None:
        """The module that it replaces, with the packed weights on the meta device."""
        return self._origin[0]

    @property
    def owner(self) -> "PackedModule":
        """The module with the tensors of the packed weights: this one, or the one that its weights are tied to."""
        return self._owner[0] or self

    def register_packed(self, weight: str, matrix: PackedMatrix, parts: Mapping[str, Tensor]) -> None:
        """Register the tensors of a packed weight, perhaps empty ones to load into, in place of the origin's weight.

        Args:
            weight: the name of the weight.
            matrix: its format and size.
            parts: its tensors, by suffix.
        """
        self.packed[weight] = matrix
        self._plans.clear()
        if self.owner is not self:
            if self.origin is not None and self.owner.origin is not None:
                self.origin._parameters[weight] = self.owner.origin._parameters[weight]
            return
        for suffix, name in matrix.codec.names(weight).items():
            self.register_buffer(name, parts[suffix])
        dense = None if self.origin is None else self.origin._parameters[weight]
        if self.origin is not None and dense is not None:
            # The meta device keeps its shape and dtype.
            self.origin._parameters[weight] = nn.Parameter(dense.detach().to("meta"), dense.requires_grad)

    def parts_of(self, weight: str) -> dict[str, Tensor]:
        """The tensors of a packed weight, by their suffixes."""
        return packed_parts(self.owner, self.packed[weight].codec, weight)

    def dtype_of(self, weight: str) -> torch.dtype:
        """The dtype of the values of a packed weight."""
        return next(part.dtype for part in self.parts_of(weight).values() if part.is_floating_point())

    def plan_of(self, weight: str) -> Any:
        """The codec's plan of a packed weight, cached until its tensors are moved or loaded again."""
        if self.owner is not self:
            return self.owner.plan_of(weight)
        if weight in self._plans:
            return self._plans[weight]
        codec, shape = self.packed[weight]
        plan = codec.plan(self.parts_of(weight), shape)
        if not torch.compiler.is_compiling():  # tensors created inside a graph do not outlive it
            self._plans[weight] = plan
        return plan

    def matrix_of(self, weight: str) -> Tensor:
        """A packed weight as a dense matrix [d_out, d_in], unpacked on every call."""
        codec, shape = self.packed[weight]
        parts = self.parts_of(weight)
        if any(part.is_meta for part in parts.values()):
            return torch.empty(shape, dtype=self.dtype_of(weight), device="meta")
        return codec.unpack(parts, shape, self.plan_of(weight))

    @property
    def owned(self) -> dict[str, PackedMatrix]:
        """The packed weights whose tensors are in this module."""
        return self.packed if self.owner is self else {}

    @staticmethod
    def initialized(weight: Tensor) -> Tensor:
        """Mark a weight as loaded, so that transformers does not initialize it with random numbers; return it."""
        weight._is_hf_initialized = True  # type: ignore[attr-defined]
        return weight

    @property
    def packed_bytes(self) -> int:
        """Bytes of the packed weights; tied ones count in their owner."""
        return sum(part.nbytes for weight in self.owned for part in self.parts_of(weight).values())

    @property
    def dense_bytes(self) -> int:
        """Bytes of the same weights when dense."""
        return sum(
            matrix.shape[0] * matrix.shape[1] * self.dtype_of(weight).itemsize for weight, matrix in self.owned.items()
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_plans": {}}  # plans contain addresses of this process

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "PackedModule":
        self._plans.clear()
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, *args: Any) -> None:
        self._plans.clear()
        super()._load_from_state_dict(*args)


def is_packed(model: nn.Module) -> bool:
    """Whether a layer of the model is packed in memory."""
    return any(isinstance(module, PackedModule) for module in model.modules())


_FORMAT = "bitmask"
_WINDOWS = (4, 8, 16, 32)  # candidates for m: n:m needs no row offsets, unlike unstructured nonzeros
_FILLED = 1 / 64  # largest fraction of zeros among the values that n:m stores
_SAMPLE = 64  # rows that rule out n:m for most weights
_PROBED = 4  # rows that rule out a grid for most weights, where restoring scales is slow


class Packed(NamedTuple):
    """A packed matrix."""

    codec: Codec
    parts: Parts  # in host memory


def pack_if_smaller(matrix: Tensor, grids: Sequence[Grid] = ()) -> Packed | None:
    """Pack a matrix, such as one that vLLM merged from several, or sharded; None if the result is not smaller.

    The result has its n:m pattern if there is one, and otherwise exactly its nonzeros: integer codes if the matrix is
    on one of the grids, and else its values.

    Args:
        matrix: [d_out, d_in], of 16 bits or more and on any device.
        grids: grids to try in this order, in any dtype. A part of the inputs that starts within a group has smaller
            groups, of 64 or a multiple that divides the group, or is on no grid if it starts within a block of 64.
    """
    matrix = matrix.detach().cpu().contiguous()
    pattern = find_pattern(matrix)
    for grid in _with_smaller_groups(grids, matrix.dtype):
        quantized = Quantized.of(grid)
        try:
            grid.scales_of(matrix[:: max(1, len(matrix) // _PROBED)])
            return Packed(quantized, quantized.pack(matrix, pattern))
        except MoonshotError:
            continue
    codec = find_codec(_FORMAT)
    if codec.packed_bytes(matrix, pattern) >= matrix.nbytes:
        return None
    return Packed(codec, codec.pack(matrix, pattern))


def _with_smaller_groups(grids: Sequence[Grid], dtype: torch.dtype) -> Iterator[Grid]:
    """Every grid with its own groups, then with smaller groups that divide them, largest first."""
    for grid in grids:
        for group in range(grid.group, 0, -BLOCK):
            if grid.group % group == 0:
                yield replace(grid, group=group, dtype=dtype)


def find_pattern(matrix: Tensor) -> NM | None:
    """The n:m of a matrix in host memory with the smallest m; None if storing it that way would store many zeros."""
    meta = pack_bits(matrix != 0)
    stored = int(popcounts(meta.device)[meta.int()].sum())
    for m in _WINDOWS:
        if matrix.shape[1] % m or not stored:
            continue
        for rows in (meta[:_SAMPLE], meta):
            n = fullest_window(rows, m)
            if matrix.numel() // m * n > stored * (1 + _FILLED):
                break
        else:
            return NM(n, m)
    return None
