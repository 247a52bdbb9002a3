"""The step of transformers' weight loader that rebuilds a dense weight from its packed tensors."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.pytorch_utils import Conv1D

from ..checkpoint.keys import META, PACKED
from ..checkpoint.packed_files import PackedLayer, dtype_name, naming
from ..errors import require

_PAIR = ("weight" + PACKED, "weight" + META)


class Unpack(ConversionOps):
    """``weight_packed`` and ``weight_meta`` → ``weight``."""

    def convert(
        self, input_dict: dict[str, list[Tensor]], full_layer_name: str, model: nn.Module, **kwargs: Any
    ) -> dict[str, Tensor]:
        tensors = {name: found[0] if isinstance(found, list) else found for name, found in input_dict.items()}
        with naming(full_layer_name):
            require(set(tensors) == set(_PAIR), f"the files hold {', '.join(tensors)} where both of a pair belong")
            parameter = model.get_parameter(full_layer_name)
            module = model.get_submodule(full_layer_name.rpartition(".")[0])
            layer = PackedLayer(
                tuple(parameter.shape), isinstance(module, Conv1D), "unstructured", dtype_name(parameter.dtype)
            )
            return {"weight": layer.unpack(*(tensors[name] for name in _PAIR))}


class Unpacking(WeightConverter):
    """Unpacks every pair but those of the modules `kept`, which stay packed in memory."""

    def __init__(self, kept: Iterable[str] = ()):
        super().__init__(list(_PAIR), "weight", [Unpack()])
        self.kept = frozenset(kept)

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        if source_key.rpartition(".")[0] in self.kept:
            return source_key, None
        return super().rename_source_key(source_key)
