"""Word embeddings whose weight stays packed in memory; a head that is tied to them multiplies by the same tensors."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..packing import Codec
from .packed_module import PackedMatrix, PackedModule

_WEIGHT = "weight"


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
