"""Conversion of packed tensors to dense weights in the weight loader of transformers."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import ConversionOps, WeightConverter

from ..errors import naming
from ..packing import PackedLayer, suffixes

_WEIGHT = "weight"


class Unpack(ConversionOps):
    """The tensors of a packed weight, in any format, → the weight.

    Args:
        layers: the packed weights by their names in the model.
        dtypes: of the loaded weights: most releases of transformers do not cast the weights of a quantizer.
        last: the last part of their names.
    """

    def __init__(self, layers: Mapping[str, PackedLayer], dtypes: Mapping[str, torch.dtype], last: str = _WEIGHT):
        self.layers = layers
        self.dtypes = dtypes
        self.last = last

    def __deepcopy__(self, memo: dict[int, Any]) -> "Unpack":
        """Return this object: transformers copies a converter for every tensor, and this part is immutable."""
        return self

    def convert(self, input_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        name = kwargs["full_layer_name"]
        tensors: dict[str, Tensor] = {
            key: part[0] if isinstance(part, list) else part for key, part in input_dict.items()
        }
        with naming(name):
            weight = self.layers[name].unpack(self.last, tensors)
        return {self.last: weight.to(self.dtypes[name])}


class Unpacking(WeightConverter):
    """Unpacks every packed weight, except those of the modules `kept`, which stay packed in memory.

    Args:
        layers: the packed weights by their names in the model.
        dtypes: of all loaded tensors, by their names in the model.
        kept: names of modules.
        last: the last part of the weights' names: "weight", or that of a parameter of fused experts.
    """

    def __init__(
        self,
        layers: Mapping[str, PackedLayer],
        dtypes: Mapping[str, torch.dtype],
        kept: Iterable[str] = (),
        last: str = _WEIGHT,
    ):
        super().__init__([last + suffix for suffix in suffixes()], last, operations=[Unpack(layers, dtypes, last)])
        self.kept = frozenset(kept)

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        if source_key.rpartition(".")[0] in self.kept:
            return source_key, None
        return super().rename_source_key(source_key)
