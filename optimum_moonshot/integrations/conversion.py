"""The step of transformers' weight loader that rebuilds a dense weight from its packed tensors."""

from typing import Any

from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.pytorch_utils import Conv1D

from ..checkpoint import META, PACKED, PackedLayer, dtype_name, naming
from ..errors import require


class Unpack(ConversionOps):
    """``weight_packed`` and ``weight_meta`` → ``weight``; a plain ``weight`` passes through."""

    def __init__(self, quantizer: Any):
        """transformers makes one with its quantizer, which is not needed, and copies it for every weight."""

    def convert(
        self, input_dict: dict[str, list[Tensor]], full_layer_name: str, model: nn.Module, **kwargs: Any
    ) -> dict[str, Tensor]:
        tensors = {name: found[0] if isinstance(found, list) else found for name, found in input_dict.items()}
        if set(tensors) == {"weight"}:
            return tensors
        with naming(full_layer_name):
            both = {"weight" + PACKED, "weight" + META}
            require(set(tensors) == both, f"the files hold {', '.join(sorted(tensors))} where both of a pair belong")
            parameter = model.get_parameter(full_layer_name)
            module = model.get_submodule(full_layer_name.rpartition(".")[0])
            layer = PackedLayer(
                tuple(parameter.shape), isinstance(module, Conv1D), "unstructured", dtype_name(parameter.dtype)
            )
            return {"weight": layer.unpack(tensors["weight" + PACKED], tensors["weight" + META])}


def is_ours(conversion: Any) -> bool:
    """Whether one of a model's weight conversions is the unpacking."""
    return isinstance(conversion, WeightConverter) and any(isinstance(op, Unpack) for op in conversion.operations)
