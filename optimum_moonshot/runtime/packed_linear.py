"""Linear layers and word embeddings whose weights stay packed in memory.

A head that is tied to word embeddings multiplies by the same tensors.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import MoonshotError, require
from ..objective.patterns import NM
from ..packing import Codec
from .packed_module import PackedMatrix, PackedModule, is_intercepted

_WEIGHT = "weight"  # its name in a Linear and an Embedding
_DIRECT = "direct"  # key of the cached `Codec.direct`


class PackedLinear(PackedModule):
    """A Linear (or GPT-2's Conv1D) whose weight stays packed in memory; the codec multiplies by it.

    `parts` may be empty tensors to load into. `origin` is the layer that it replaces, if any; `pattern` is the n:m of
    all rows, if any, and `owner` the module with its tensors, if its weight is tied.
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
        owner: PackedModule | None = None,
    ):
        super().__init__(origin, owner)
        self.out_features, self.in_features = shape
        self.pattern = pattern
        self.register_packed(_WEIGHT, PackedMatrix(codec, shape), parts)
        self._stored = tuple(codec.names(_WEIGHT).values())
        self.register_parameter("bias", bias)

    @property
    def codec(self) -> Codec:
        """The format."""
        return self.packed[_WEIGHT].codec

    @property
    def shape(self) -> tuple[int, int]:
        """d_out, d_in."""
        return self.out_features, self.in_features

    @property
    def parts(self) -> dict[str, Tensor]:
        """The packed tensors, by their suffixes."""
        return self.parts_of(_WEIGHT)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values."""
        return self.dtype_of(_WEIGHT)

    @property
    def plan(self) -> Any:
        """The codec's plan of the tensors, cached until they are moved or loaded again."""
        return self.plan_of(_WEIGHT)

    @property
    def weight(self) -> Tensor:
        """The dense weight [d_out, d_in], unpacked on every access."""
        return self.initialized(self.matrix_of(_WEIGHT))

    @torch.no_grad()
    def pack(self, weight: Tensor) -> None:
        """Replace the weight [d_out, d_in].

        Raises:
            MoonshotError: the format cannot represent these values, or another module has the weight too; the layer is
                unchanged.
        """
        hint = "call model.dequantize() first, or keep an adapter unmerged, beside the weight"
        require(self.owner is self, "it is tied to the word embeddings, which would change too", hint=hint)
        try:
            parts = self.codec.pack(weight.detach().cpu(), self.pattern)
            exact = torch.equal(self.codec.unpack(parts, self.shape), weight.cpu())
        except MoonshotError:
            exact = False
        require(exact, f"{self.codec.name} cannot represent the new weight", hint=hint)
        parts = {suffix: part.to(weight.device) for suffix, part in parts.items()}
        self.register_packed(_WEIGHT, self.packed[_WEIGHT], parts)

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., d_in] → [..., d_out]."""
        if (outputs := self._directly(inputs)) is not None:
            return outputs
        device = inputs.device.type
        if not torch.is_autocast_enabled(device) or torch.get_autocast_dtype(device) != self.dtype:
            return self.codec.linear(inputs, self.parts, self.shape, self.bias, self.plan)
        # Like autocast for a Linear. The codec would unpack the weight, and autograd would keep the dense one.
        with torch.autocast(device, enabled=False):
            bias = None if self.bias is None else self.bias.to(self.dtype)
            return self.codec.linear(inputs.to(self.dtype), self.parts, self.shape, bias, self.plan)

    def _directly(self, inputs: Tensor) -> Tensor | None:
        """The product by `Codec.direct`; None where another kind of call is necessary."""
        if torch.compiler.is_compiling() or type(inputs) is not Tensor or inputs.device.type != "cpu":
            return None
        bias = self._parameters["bias"]
        differentiable = inputs.requires_grad or (bias is not None and bias.requires_grad)
        if (differentiable and torch.is_grad_enabled()) or is_intercepted() or torch.is_autocast_enabled("cpu"):
            return None
        # The tensors may have been replaced, or moved, without a call of this class.
        buffers = self.owner._buffers
        addresses = [buffers[name].data_ptr() for name in self._stored]  # type: ignore[union-attr]
        addresses.append(0 if bias is None else bias.data_ptr())
        if self._plans.get(_DIRECT, (None,))[0] != addresses:
            direct = self.codec.direct(self.parts, self.shape, bias, self.plan)
            self._plans[_DIRECT] = addresses, self.dtype, direct
        _, dtype, direct = self._plans[_DIRECT]
        fits = direct is not None and inputs.dtype == dtype and inputs.shape[-1] == self.in_features
        return direct(inputs) if fits and inputs.is_contiguous() else None

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, format={self.codec.name}"


def lookup_obstacle(embedding: nn.Embedding) -> str | None:
    """The reason why the weight of an embedding cannot be packed in memory, if any."""
    return None if embedding.max_norm is None else "its rows are normalized in every call"


class PackedEmbedding(PackedModule):
    """An Embedding, perhaps of a derived class such as a scaled one, whose weight stays packed in memory.

    `parts` may be empty tensors to load into; with a tied weight, `owner` has the tensors. A derived class computes its
    output from the rows that are looked up: it is called with these as its weight.
    """

    def __init__(
        self,
        codec: Codec,
        shape: tuple[int, int],
        parts: Mapping[str, Tensor],
        origin: nn.Embedding,
        owner: PackedModule | None = None,
    ):
        super().__init__(origin, owner)
        self.num_embeddings, self.embedding_dim = shape
        self.padding_idx = origin.padding_idx
        self.register_packed(_WEIGHT, PackedMatrix(codec, shape), parts)
        for name, buffer in origin._buffers.items():
            self.register_buffer(name, buffer, persistent=name not in origin._non_persistent_buffers_set)
        derived = copy.copy(origin)
        derived.padding_idx = None  # an index into all rows, for gradients only
        self._derived = (None if type(origin).forward is nn.Embedding.forward else derived,)

    @property
    def codec(self) -> Codec:
        """The format."""
        return self.packed[_WEIGHT].codec

    @property
    def weight(self) -> Tensor:
        """The dense weight [num_embeddings, embedding_dim], unpacked on every access."""
        return self.initialized(self.matrix_of(_WEIGHT))

    def forward(self, input: Tensor) -> Tensor:
        """Indices of any shape → [*input.shape, embedding_dim]."""
        codec, shape = self.packed[_WEIGHT]
        rows = codec.lookup(input, self.parts_of(_WEIGHT), shape, self.plan_of(_WEIGHT))
        derived = self._derived[0]
        if derived is None:
            return rows
        places = torch.arange(input.numel(), device=input.device).view(input.shape)
        tensors: dict[str, Any] = {
            _WEIGHT: rows.flatten(0, -2),
            **{name: self._buffers[name] for name in derived._buffers},
        }
        outputs: Tensor = torch.func.functional_call(derived, tensors, (places,))
        return outputs

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, format={self.codec.name}"
