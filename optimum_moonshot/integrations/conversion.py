"""Unpacking of packed weights while a loader reads them: conversions for transformers, and a stream for vLLM.

Files of mixtures on the Hub have one weight per expert, and transformers' converters stack them to fused parameters,
or rename them. Such a conversion matches the weight, but not its packed tensors, and in some releases it takes one of
these for the weight. So the tensors of a parameter are renamed to numbers, which no conversion matches; one converter
unpacks them and then applies the model's own.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming, dot_natural_key

from ..checkpoint.weight_files import Layers, Tensors, described_layers
from ..checkpoint.weight_names import Target, conversions_of, followed_names, merged_weights, parameter_names, renamed
from ..errors import naming, require
from ..packing import PackedLayer, suffixes, weight_of

_NAME = "moonshot-expert"  # matches no pattern of a model


class _Unpack(ConversionOps):
    """The tensors of a packed weight, in any format, → the weight."""

    def __init__(self, layers: Mapping[str, PackedLayer], dtypes: Mapping[str, torch.dtype], last: str):
        self.layers, self.dtypes, self.last = layers, dtypes, last

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Unpack":
        """Return this object: transformers copies a converter for every tensor, and this part is immutable."""
        return self

    def convert(self, input_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        name = kwargs["full_layer_name"]
        tensors: Tensors = {key: part[0] if isinstance(part, list) else part for key, part in input_dict.items()}
        with naming(name):
            weight = self.layers[name].unpack(self.last, tensors)
        return {self.last: weight.to(self.dtypes[name])}


class Unpacking(WeightConverter):
    """Unpacks every packed weight, except those of the modules `kept`, which stay packed in memory.

    `layers` and `dtypes` are by the names in the model, whose last part is `last`: "weight", or that of a parameter of
    fused experts. Most releases of transformers do not cast the weights of a quantizer.
    """

    def __init__(
        self, layers: Mapping[str, PackedLayer], dtypes: Mapping[str, torch.dtype], kept: Iterable[str], last: str
    ):
        super().__init__([last + suffix for suffix in suffixes()], last, operations=[_Unpack(layers, dtypes, last)])
        self.kept = frozenset(kept)

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        if source_key.rpartition(".")[0] in self.kept:
            return source_key, None
        return super().rename_source_key(source_key)


@dataclass(frozen=True)
class PackedExperts:
    """The stored weights of all parameters with a conversion of the model and a packed weight."""

    layers: Layers  # the packed weights, by their names in the files
    parameters: Mapping[str, str]  # name in the files → parameter of the model, for all weights
    merged: Mapping[str, Target]  # merged weights, by their names in the files
    keys: Mapping[str, str]  # name of a tensor after transformers has renamed it → stored weight

    @classmethod
    def find(cls, model: nn.Module, files: Iterable[str]) -> "PackedExperts | None":
        """Find them in the files of a packed checkpoint, for a model on the meta device; None if there are none."""
        layers: Layers = {}
        stored: list[str] = []
        for path in files:
            with safe_open(path, "pt") as file:
                stored += file.keys()
                layers |= described_layers(file.metadata())
        owners = {name: weight_of(name) if weight_of(name) in layers else name for name in stored}
        merged = merged_weights(model, dict.fromkeys(owners.values()))
        parameters = parameter_names(model, layers) | {name: each.weight for name, each in merged.items()}
        packed = {parameters[name] for name in layers.keys() & parameters.keys() - followed_names(model, layers).keys()}
        selected = {name: parameter for name, parameter in parameters.items() if parameter in packed}
        keys = renamed(model, [name for name, owner in owners.items() if owner in selected])
        layers = {name: layer for name, layer in layers.items() if name in selected}
        return cls(layers, selected, merged, {key: owners[name] for name, key in keys.items()}) if layers else None

    def conversions(self, dtypes: Mapping[str, torch.dtype]) -> list[Any]:
        """The conversions to add to the model's own; `dtypes` of all loaded tensors, by their names in the model."""
        numbers = {key: f"{_NAME}-{number}" for number, key in enumerate(self.keys)}
        targets = {numbers[key]: self.parameters[owner] for key, owner in self.keys.items()}
        return [_Numbering(numbers), _Fusing(targets, _Fuse(self, dtypes))]

    def restore(self, model: Any) -> None:
        """Restore the conversions of a loaded model, which saving reverses."""
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
        self.experts, self.dtypes = experts, dtypes

    def convert(self, input_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        parameter = kwargs["full_layer_name"]
        layers, merged = self.experts.layers, self.experts.merged
        tensors: Tensors = {name: parts[0] for name, parts in input_dict.items()}
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


def unpacked(
    tensors: Iterable[tuple[str, Tensor]], find_layers: Callable[[], Layers], prefix: str = ""
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a dense checkpoint, each packed weight as soon as its last tensor is read.

    The order of the tensors is arbitrary; all their names have a prefix that those in the files lack. `find_layers`,
    which returns the packed weights by their names in the files, is called at the first tensor with the name of a
    packed one, and never for checkpoints of other programs.
    """
    layers: Layers | None = None
    waiting: dict[str, Tensors] = {}
    for name, tensor in tensors:
        stored = name.removeprefix(prefix)
        weight = weight_of(stored)
        if weight != stored and layers is None:
            layers = find_layers()
        if weight == stored or not layers or weight not in layers:
            yield name, tensor
            continue
        layer, parts = layers[weight], waiting.setdefault(weight, {})
        parts[stored] = tensor
        if len(parts) == len(layer.names(weight)):
            with naming(weight):
                dense = layer.unpack(weight, waiting.pop(weight))
            yield prefix + weight, dense
    missing = next(iter(waiting), "")
    with naming(missing):
        require(not waiting, "not all of its packed tensors were read")
