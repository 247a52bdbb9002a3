"""Modules with weights that stay packed in memory."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..packing import Codec


class PackedMatrix(NamedTuple):
    """The format and the size of a packed weight."""

    codec: Codec
    shape: tuple[int, int]  # d_out, d_in


def packed_parts(module: nn.Module, codec: Codec, weight: str = "weight") -> dict[str, Tensor]:
    """The tensors of a packed weight by suffix; the module has each under its name in files."""
    return {suffix: getattr(module, name) for suffix, name in codec.names(weight).items()}


class PackedModule(nn.Module):
    """The base of modules with packed weights, which replace a module with dense ones, the `origin`, if any.

    `packed` has the packed weights by their names. The tensors of each are buffers, with their names in a checkpoint:
    the weight's and a suffix. In the origin, packed weights are on the meta device.
    """

    def __init__(self, origin: nn.Module | None):
        super().__init__()
        self._origin = (origin,)  # a tuple, so that it is not registered as a submodule
        self.packed: dict[str, PackedMatrix] = {}
        self._plans: dict[str, Any] = {}

    @property
    def origin(self) -> nn.Module | None:
        """The module that it replaces, with the packed weights on the meta device."""
        return self._origin[0]

    def register_packed(self, weight: str, matrix: PackedMatrix, parts: Mapping[str, Tensor]) -> None:
        """Register the tensors of a packed weight, perhaps empty ones to load into, in place of the origin's weight.

        Args:
            weight: the name of the weight.
            matrix: its format and size.
            parts: its tensors, by suffix.
        """
        self.packed[weight] = matrix
        self._plans.pop(weight, None)
        for suffix, name in matrix.codec.names(weight).items():
            self.register_buffer(name, parts[suffix])
        dense = None if self.origin is None else self.origin._parameters[weight]
        if self.origin is not None and dense is not None:
            # The meta device keeps its shape and dtype.
            self.origin._parameters[weight] = nn.Parameter(dense.detach().to("meta"), dense.requires_grad)

    def parts_of(self, weight: str) -> dict[str, Tensor]:
        """The tensors of a packed weight, by their suffixes."""
        return packed_parts(self, self.packed[weight].codec, weight)

    def dtype_of(self, weight: str) -> torch.dtype:
        """The dtype of the values of a packed weight."""
        return next(part.dtype for part in self.parts_of(weight).values() if part.is_floating_point())

    def plan_of(self, weight: str) -> Any:
        """The codec's plan of a packed weight, cached until its tensors are moved or loaded again."""
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

    @staticmethod
    def initialized(weight: Tensor) -> Tensor:
        """The weight with the mark of transformers: no model initializes it after loading, with random numbers."""
        weight._is_hf_initialized = True  # type: ignore[attr-defined]
        return weight

    @property
    def packed_bytes(self) -> int:
        """Bytes of the packed weights."""
        return sum(part.nbytes for weight in self.packed for part in self.parts_of(weight).values())

    @property
    def dense_bytes(self) -> int:
        """Bytes of the same weights, dense."""
        return sum(
            matrix.shape[0] * matrix.shape[1] * self.dtype_of(weight).itemsize for weight, matrix in self.packed.items()
        )

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "PackedModule":
        self._plans.clear()
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, *args: Any) -> None:
        self._plans.clear()
        super()._load_from_state_dict(*args)
