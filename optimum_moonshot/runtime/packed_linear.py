"""Linear layers whose weights stay packed in memory."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..packing import Codec

_WEIGHT = "weight"  # what a Linear calls it


def held_parts(module: nn.Module, codec: Codec) -> dict[str, Tensor]:
    """The tensors of a packed weight that a module holds under the names that they have in files, by their suffixes.

    Args:
        module: which has them as buffers or parameters.
        codec: the packed format.
    """
    return {suffix: getattr(module, name) for suffix, name in codec.names(_WEIGHT).items()}


class PackedLinear(nn.Module):
    """A Linear (or GPT-2's Conv1D) whose weight stays packed in memory; the codec multiplies by it.

    Its buffers are the codec's tensors, called as in a checkpoint's files: ``weight`` and a suffix.

    Args:
        codec: the packed format.
        shape: d_out, d_in.
        parts: the packed tensors by their suffixes, or empty ones of their shapes and dtypes to load into.
        bias: the layer's own, [d_out], or None.
        origin: the layer in whose place it stands, its weight on the meta device; None where it stands in nobody's.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        codec: Codec,
        shape: tuple[int, int],
        parts: Mapping[str, Tensor],
        bias: nn.Parameter | None = None,
        origin: nn.Module | None = None,
    ):
        super().__init__()
        self._origin = (origin,)  # in a tuple it is no part of the model
        self.codec = codec
        self.out_features, self.in_features = shape
        for suffix, name in codec.names(_WEIGHT).items():
            self.register_buffer(name, parts[suffix])
        self.register_parameter("bias", bias)
        self._plan: Any = None

    @property
    def shape(self) -> tuple[int, int]:
        """d_out, d_in."""
        return self.out_features, self.in_features

    @property
    def origin(self) -> nn.Module | None:
        """The layer in whose place it stands, its weight on the meta device."""
        return self._origin[0]

    @property
    def parts(self) -> dict[str, Tensor]:
        """The packed tensors, by their suffixes."""
        return held_parts(self, self.codec)

    @property
    def dtype(self) -> torch.dtype:
        """Of the values."""
        return next(part.dtype for part in self.parts.values() if part.is_floating_point())

    @property
    def plan(self) -> Any:
        """The codec's, of the tensors that are here when it is first asked for, until they are moved or loaded anew."""
        if self._plan is not None:
            return self._plan
        found = self.codec.plan(self.parts, self.shape)
        if not torch.compiler.is_compiling():  # a graph keeps no tensor that is made in it
            self._plan = found
        return found

    @property
    def weight(self) -> Tensor:
        """The dense weight [d_out, d_in], unpacked anew."""
        return self.codec.unpack(self.parts, self.shape, self.plan)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "PackedLinear":
        self._plan = None
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, *args: Any) -> None:
        self._plan = None
        super()._load_from_state_dict(*args)

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., d_in] → [..., d_out]."""
        return self.codec.linear(inputs, self.parts, self.shape, self.bias, self.plan)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, format={self.codec.name}"
