"""Loading of packed expert weights in transformers, around the model's own weight conversions.

Files on the Hub have one weight per expert, and transformers' converters stack them to fused parameters, or rename
them. Such a conversion matches the weight, but not its packed tensors, and in some releases it takes one of these for
the weight. So the tensors of a parameter are renamed to numbers, which no conversion matches; one converter unpacks
them and then applies the model's own.
"""

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming, dot_natural_key

from ..checkpoint.packed_format import Description, Layers
from ..checkpoint.weight_names import Merged, conversions_of, followed_names, merged_weights, parameter_names, renamed
from ..errors import naming
from ..packing import weight_of

_NAME = "moonshot-expert"  # matches no pattern of a model


@dataclass(frozen=True)
class PackedExperts:
    """The stored weights of all parameters with such a conversion and a packed weight."""

    layers: Layers  # the packed weights, by their names in the files
    parameters: Mapping[str, str]  # name in the files → parameter of the model, for all weights
    merged: Mapping[str, Merged]  # merged weights, by their names in the files
    keys: Mapping[str, str]  # name of a tensor after transformers has renamed it → stored weight

    @classmethod
    def find(cls, model: nn.Module, files: Iterable[str]) -> "PackedExperts | None":
        """Find them in some files; None if there are none.

        Args:
            model: on the meta device.
            files: of a packed checkpoint.
        """
        layers: Layers = {}
        stored: list[str] = []
        for path in files:
            with safe_open(path, "pt") as file:
                stored += file.keys()
                description = Description.read(file.metadata())
                layers |= {} if description is None else description.layers
        owners = {name: weight_of(name) if weight_of(name) in layers else name for name in stored}
        merged = merged_weights(model, dict.fromkeys(owners.values()))
        parameters = parameter_names(model, layers) | {name: each.weight for name, each in merged.items()}
        packed = {parameters[name] for name in layers.keys() & parameters.keys() - followed_names(model, layers).keys()}
        selected = {name: parameter for name, parameter in parameters.items() if parameter in packed}
        keys = renamed(model, [name for name, owner in owners.items() if owner in selected])
        layers = {name: layer for name, layer in layers.items() if name in selected}
        return cls(layers, selected, merged, {key: owners[name] for name, key in keys.items()}) if layers else None

    def conversions(self, dtypes: Mapping[str, torch.dtype]) -> list[Any]:
        """Return the conversions for transformers, to add to the model's own.

        Args:
            dtypes: of all loaded tensors, by their names in the model.
        """
        numbers = {key: f"{_NAME}-{number}" for number, key in enumerate(self.keys)}
        targets = {numbers[key]: self.parameters[owner] for key, owner in self.keys.items()}
        return [_Numbering(numbers), _Fusing(targets, _Fuse(self, dtypes))]

    def restore(self, model: Any) -> None:
        """Restore the model's own conversions, which saving reverses.

        Args:
            model: after loading.
        """
        others = [entry for entry in model._weight_conversions if not isinstance(entry, _Numbering | _Fusing)]
        model._weight_conversions = conversions_of(model, self.parameters, others)


class _Numbering(WeightRenaming):
    """Renames the tensors to numbers."""

    def __init__(self, numbers: Mapping[str, str]):
        super().__init__(_NAME, _NAME)
        self.numbers = numbers

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        return self.numbers.get(source_key, source_key), None


class _Fusing(WeightConverter):
    """Collects all tensors of a parameter by their names in the files."""

    def __init__(self, targets: Mapping[str, str], operation: "_Fuse"):
        super().__init__(_NAME, _NAME, operations=[operation])
        self.targets, self.fuse = targets, operation

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Fusing":
        """transformers copies a converter for every tensor; the operation is shared."""
        return _Fusing(self.targets, self.fuse)

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        target = self.targets.get(source_key)
        return (source_key, None) if target is None else (target, _NAME)

    def add_tensor(self, target_key: str, source_key: str, source_pattern: str, future: Any) -> None:
        super().add_tensor(target_key, source_key, source_key, future)


class _Fuse(ConversionOps):
    """The tensors of a parameter by their names in the files → the parameter."""

    def __init__(self, experts: PackedExperts, dtypes: Mapping[str, torch.dtype]):
        self.experts = experts
        self.dtypes = dtypes

    def convert(self, input_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        parameter = kwargs["full_layer_name"]
        layers, merged = self.experts.layers, self.experts.merged
        tensors: dict[str, Tensor] = {name: parts[0] for name, parts in input_dict.items()}
        owners = {weight_of(name) if weight_of(name) in layers else name for name in tensors}
        converter: Any = None
        for name in sorted(owners, key=dot_natural_key):
            with naming(name):
                weight = layers[name].unpack(name, tensors) if name in layers else tensors[name]
            weight = weight.to(self.dtypes[parameter])
            if name not in merged:
                return {parameter: weight}
            converter = deepcopy(merged[name].converter) if converter is None else converter
            converter.add_tensor(parameter, name, merged[name].pattern, weight)
        return converter.convert(parameter, model=kwargs["model"], config=kwargs["config"])
