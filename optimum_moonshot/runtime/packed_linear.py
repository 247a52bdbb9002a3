"""Linear layers whose weights stay packed in memory."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import MoonshotError, require
from ..objective.patterns import NM
from ..packing import Codec

_WEIGHT = "weight"  # its name in a Linear


def packed_parts(module: nn.Module, codec: Codec) -> dict[str, Tensor]:
    """The tensors of a packed weight by suffix; the module has each under its name in files."""
    return {suffix: getattr(module, name) for suffix, name in codec.names(_WEIGHT).items()}


class PackedLinear(nn.Module):
    """A Linear (or GPT-2's Conv1D) whose weight stays packed in memory; the codec multiplies by it.

    Its buffers are the codec's tensors, with their names in a checkpoint: ``weight`` and a suffix. `parts` may be empty
    tensors to load into. `origin` is the layer that it replaces, with the weight on the meta device, if any; `pattern`
    is the n:m of all rows, if any.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        codec: Codec,
        shape: tuple[int, int],
        parts: Mapping[str, Tensor],
        bias: nn.Parameter | None = None,
        origin: nn.Module | None = None,
        pattern: NM | None = None,
    ):
        super().__init__()
        self._origin = (origin,)  # a tuple, so that it is not registered as a submodule
        self.codec, self.pattern = codec, pattern
        self.out_features, self.in_features = shape
        self._hold(parts)
        self.register_parameter("bias", bias)

    def _hold(self, parts: Mapping[str, Tensor]) -> None:
        for suffix, name in self.codec.names(_WEIGHT).items():
            self.register_buffer(name, parts[suffix])
        self._plan: Any = None

    @property
    def shape(self) -> tuple[int, int]:
        """d_out, d_in."""
        return self.out_features, self.in_features

    @property
    def origin(self) -> nn.Module | None:
        """The layer that it replaces, with the weight on the meta device."""
        return self._origin[0]

    @property
    def parts(self) -> dict[str, Tensor]:
        """The packed tensors, by their suffixes."""
        return packed_parts(self, self.codec)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values."""
        return next(part.dtype for part in self.parts.values() if part.is_floating_point())

    @property
    def plan(self) -> Any:
        """The codec's plan of the tensors, cached until they are moved or loaded again."""
        if self._plan is not None:
            return self._plan
        plan = self.codec.plan(self.parts, self.shape)
        if not torch.compiler.is_compiling():  # tensors created inside a graph do not outlive it
            self._plan = plan
        return plan

    @property
    def weight(self) -> Tensor:
        """The dense weight [d_out, d_in], unpacked on every access."""
        return self.codec.unpack(self.parts, self.shape, self.plan)

    @torch.no_grad()
    def pack(self, weight: Tensor) -> None:
        """Replace the weight [d_out, d_in].

        Raises:
            MoonshotError: the format cannot represent these values; the layer is unchanged.
        """
        try:
            parts = self.codec.pack(weight.detach().cpu(), self.pattern)
            exact = torch.equal(self.codec.unpack(parts, self.shape), weight.cpu())
        except MoonshotError:
            exact = False
        require(exact, f"{self.codec.name} cannot represent the new weight", hint="call model.dequantize() first")
        self._hold({suffix: part.to(weight.device) for suffix, part in parts.items()})

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "PackedLinear":
        self._plan = None
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, *args: Any) -> None:
        self._plan = None
        super()._load_from_state_dict(*args)

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., d_in] → [..., d_out]."""
        device = inputs.device.type
        if not torch.is_autocast_enabled(device) or torch.get_autocast_dtype(device) != self.dtype:
            return self.codec.linear(inputs, self.parts, self.shape, self.bias, self.plan)
        # As autocast does for a Linear. The codec would unpack the weight, and autograd would keep the dense one.
        with torch.autocast(device, enabled=False):
            bias = None if self.bias is None else self.bias.to(self.dtype)
            return self.codec.linear(inputs.to(self.dtype), self.parts, self.shape, bias, self.plan)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, format={self.codec.name}"
