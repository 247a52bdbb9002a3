"""The step of transformers' weight loader that rebuilds a dense weight from its packed tensors."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps, WeightConverter

from ..errors import naming
from ..packing import PackedLayer, suffixes

_WEIGHT = "weight"


class Unpack(ConversionOps):
    """The tensors of a packed weight, of whatever format, → the weight.

    Args:
        layers: the packed weights by their names in the model.
        dtypes: what each shall be: most releases of transformers leave what a quantizer loads as it was saved.
        last: the last part of their names.
    """

    def __init__(self, layers: Mapping[str, PackedLayer], dtypes: Mapping[str, torch.dtype], last: str = _WEIGHT):
        self.layers = layers
        self.dtypes = dtypes
        self.last = last

    def __deepcopy__(self, memo: dict[int, Any]) -> "Unpack":
        """transformers copies a converter for every tensor; this part of it never changes."""
        return self

    def convert(
        self, input_dict: dict[str, list[Tensor]], full_layer_name: str, model: nn.Module, **kwargs: Any
    ) -> dict[str, Tensor]:
        tensors = {name: found[0] if isinstance(found, list) else found for name, found in input_dict.items()}
        with naming(full_layer_name):
            weight = self.layers[full_layer_name].unpack(self.last, tensors)
        return {self.last: weight.to(self.dtypes[full_layer_name])}


class Unpacking(WeightConverter):
    """Unpacks every packed weight but those of the modules `kept`, which stay packed in memory.

    Args:
        layers: the packed weights by their names in the model.
        dtypes: of everything that is loaded, by its name in the model.
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
