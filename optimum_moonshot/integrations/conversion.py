"""The step of transformers' weight loader that rebuilds a dense weight from its packed tensors."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps, WeightConverter

from ..errors import naming
from ..packing import PackedLayer, suffixes

_WEIGHT = "weight"


class Unpack(ConversionOps):
    """The tensors of a packed weight, of whatever format, → ``weight``.

    Args:
        layers: the packed weights by their names in the model.
    """

    def __init__(self, layers: Mapping[str, PackedLayer]):
        self.layers = layers

    def __deepcopy__(self, memo: dict[int, Any]) -> "Unpack":
        """transformers copies a converter for every tensor; this part of it never changes."""
        return self

    def convert(
        self, input_dict: dict[str, list[Tensor]], full_layer_name: str, model: nn.Module, **kwargs: Any
    ) -> dict[str, Tensor]:
        tensors = {name: found[0] if isinstance(found, list) else found for name, found in input_dict.items()}
        with naming(full_layer_name):
            return {_WEIGHT: self.layers[full_layer_name].unpack(_WEIGHT, tensors)}


class Unpacking(WeightConverter):
    """Unpacks every packed weight but those of the modules `kept`, which stay packed in memory.

    Args:
        layers: the packed weights by their names in the model.
        kept: names of modules.
    """

    def __init__(self, layers: Mapping[str, PackedLayer], kept: Iterable[str] = ()):
        super().__init__([_WEIGHT + suffix for suffix in suffixes()], _WEIGHT, [Unpack(layers)])
        self.kept = frozenset(kept)

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        if source_key.rpartition(".")[0] in self.kept:
            return source_key, None
        return super().rename_source_key(source_key)
