"""Unpacking of packed weights while a loader reads them: conversions for transformers, and a stream for vLLM.

transformers renames the weights of many models, and its converters stack the weights of experts to fused parameters.
They match a weight, but not its packed tensors, and some releases mistake a packed tensor for the weight. So the
tensors of a parameter are renamed to numbers, which match no converter of the model; one converter unpacks them, then
applies the model's own converter. Weights are cast here: most releases of transformers do not cast a quantizer's.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming, dot_natural_key

from ..checkpoint.weight_files import (
    Layers,
    StoredTensors,
    Target,
    Tensors,
    conversions_of,
    merged_weights,
    renamed,
    target_names,
)
from ..errors import error_context, require
from ..objective.patterns import NM, Unstructured
from ..packing import Codec, PackedLayer, weight_of
from ..packing.codec import Parts

_NAME = "moonshot-weight"  # matches no pattern of a model


@dataclass(frozen=True)
class PackedWeights:
    """The stored weights of every parameter that is loaded from at least one packed weight."""

    layers: Layers  # the packed weights, by their names in the files
    parameters: Mapping[str, str]  # name in the files → parameter of the model, for all weights
    merged: Mapping[str, Target]  # merged weights, by their names in the files
    keys: Mapping[str, str]  # name of a tensor after transformers has renamed it → stored weight
    stored: Mapping[str, Tensor]  # name in the files → tensor of these weights, on the meta device

    @classmethod
    def find(cls, model: nn.Module, tensors: StoredTensors) -> "PackedWeights":
        """Find the packed weights in a checkpoint, for a model on the meta device."""
        stored, layers = {name: tensor.to("meta") for name, tensor in tensors.items()}, tensors.layers
        owners = {name: weight_of(name) if weight_of(name) in layers else name for name in stored}
        parameters = target_names(model, dict.fromkeys(owners.values()))
        packed = {parameters[name] for name in layers}
        selected = {name: parameter for name, parameter in parameters.items() if parameter in packed}
        stored = {name: stored[name] for name, owner in owners.items() if owner in selected}
        keys = {key: owners[name] for name, key in renamed(model, stored).items()}
        return cls(layers, selected, merged_weights(model, selected), keys, stored)

    def stacks(self, model: nn.Module) -> dict[str, "StoredWeight"]:
        """Return the fused weights of experts, by name in the model."""
        sources: dict[str, list[str]] = {}
        for name, parameter in self.parameters.items():
            sources.setdefault(parameter, []).append(name)
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        return {
            parameter: self._stack(names, shapes[parameter])
            for parameter, names in sources.items()
            if len(shapes.get(parameter, ())) == 3
        }

    def _stack(self, names: list[str], shape: tuple[int, ...]) -> "StoredWeight":
        entries = [self.layers[name] for name in names if name in self.layers]
        patterns = {entry.pattern for entry in entries}
        pattern = entries[0].pattern if len(patterns) == 1 else Unstructured.kind
        tensors = [tensor for name, tensor in self.stored.items() if weight_of(name) in names or name in names]
        first = next(name for name in names if name in self.layers)
        empty = {suffix: part[:0] for suffix, part in self.layers[first].parts(first, self.stored).items()}
        mixed = len({entry.format for entry in entries}) > 1
        obstacle = "its experts are stored in several formats" if mixed else None
        return StoredWeight(replace(entries[0], shape=shape, pattern=pattern), empty, tensors, obstacle)

    def conversions(
        self, dtypes: Mapping[str, torch.dtype], stacked: Mapping[str, str], others: Collection[str]
    ) -> list[Any]:
        """Return the conversions to add to the model's own.

        Args:
            dtypes: name in the model → dtype, for all loaded tensors.
            stacked: parameter that stays packed → `StoredWeight.target`.
            others: parameters whose packed tensors are loaded as they are.
        """
        keys = {key: self.parameters[owner] for key, owner in self.keys.items()}
        numbers = {key: f"{_NAME}-{number}" for number, key in enumerate(keys) if keys[key] not in others}
        targets = {number: stacked.get(keys[key], keys[key]) for key, number in numbers.items()}
        return [_Numbering(numbers), _Unpacking(targets, _Unpack(self, dtypes, stacked))]

    def restore(self, model: Any) -> None:
        """Restore the conversions of a loaded model, so that saving reverses them."""
        others = [entry for entry in model._weight_conversions if not isinstance(entry, _Numbering | _Unpacking)]
        model._weight_conversions = conversions_of(model, self.parameters, others)


class _Numbering(WeightRenaming):
    """Renames the tensors to numbers."""

    def __init__(self, numbers: Mapping[str, str]):
        super().__init__(_NAME, _NAME)
        self.numbers = numbers

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        return self.numbers.get(source_key, source_key), None


class _Unpacking(WeightConverter):
    """Collects all tensors of a parameter by their names in the files."""

    def __init__(self, targets: Mapping[str, str], operation: "_Unpack"):
        super().__init__(_NAME, _NAME, operations=[operation])
        self.targets, self.unpack = targets, operation

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Unpacking":
        """Return a converter that shares the operation: transformers copies a converter for every tensor."""
        return _Unpacking(self.targets, self.unpack)

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        target = self.targets.get(source_key)
        return (source_key, None) if target is None else (target, _NAME)

    def add_tensor(self, target_key: str, source_key: str, source_pattern: str, future: Any) -> None:
        super().add_tensor(target_key, source_key, source_key, future)


class StoredWeight(NamedTuple):
    """The stored tensors of a packed weight, of all experts if it is fused, on the meta device."""

    layer: PackedLayer  # the weight in the model
    empty: dict[str, Tensor]  # by suffix; without rows for a fused weight: the sizes depend on the files
    tensors: list[Tensor]  # all stored tensors
    obstacle: str | None = None  # the reason why it cannot be packed in memory, if any

    def empty_parts(self, weight: nn.Parameter) -> dict[str, Tensor]:
        """Return empty packed tensors by suffix, on the device of `weight`; floating-point tensors have its dtype."""
        return {
            suffix: torch.empty_like(
                part, dtype=weight.dtype if part.is_floating_point() else part.dtype, device=weight.device
            )
            for suffix, part in self.empty.items()
        }

    def target(self, name: str) -> str:
        """Return the name of a floating-point packed tensor; transformers loads all packed tensors in its dtype."""
        names = self.layer.codec.names(name)
        return next(names[suffix] for suffix, part in self.empty.items() if part.is_floating_point())

    def packed_bytes(self, weight: nn.Parameter) -> int:
        """Bytes of the packed tensors in memory."""
        return sum(
            tensor.numel() * (weight.dtype.itemsize if tensor.is_floating_point() else tensor.itemsize)
            for tensor in self.tensors
        )


class _Packed(NamedTuple):
    """A packed matrix with its shape."""

    parts: Parts
    shape: tuple[int, int]  # d_out, d_in


class _Unpack(ConversionOps):
    """Builds a parameter, or the packed stack of its matrices, from its tensors by name in the files."""

    def __init__(self, weights: PackedWeights, dtypes: Mapping[str, torch.dtype], stacked: Mapping[str, str]):
        self.weights, self.dtypes = weights, dtypes
        self.targets, self.stacked = stacked, {target: parameter for parameter, target in stacked.items()}

    def convert(self, input_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        target, model = kwargs["full_layer_name"], kwargs["model"]
        tensors: Tensors = {name: parts[0] for name, parts in input_dict.items()}
        layers = self.weights.layers
        names = {weight_of(name) if weight_of(name) in layers else name for name in tensors}
        order, config = sorted(names, key=dot_natural_key), kwargs["config"]
        if target not in self.stacked:
            return {target: self._dense(self.dtypes[target], model.get_parameter(target).shape, config, order, tensors)}
        parameter = self.stacked[target]
        path, _, key = parameter.rpartition(".")
        mixture = model.get_submodule(path)
        codec, shape = mixture.packed[key]
        matrices = list(self._packed(mixture, key, self.dtypes[target], config, order, tensors))
        stored = sum(matrix.shape[0] for matrix in matrices), *{matrix.shape[1] for matrix in matrices}
        require(stored == shape, f"{parameter}: its experts are saved as {stored}, config.json says {shape}")
        parts = codec.stack([matrix.parts for matrix in matrices], [matrix.shape for matrix in matrices])
        dtype = self.dtypes[target]
        return {
            f"{path}.{name}": parts[suffix].to(dtype) if parts[suffix].is_floating_point() else parts[suffix]
            for suffix, name in codec.names(key).items()
        }

    def _dense(
        self, dtype: torch.dtype, shape: Sequence[int], config: Any, order: list[str], tensors: Tensors
    ) -> Tensor:
        """Return the dense parameter of a shape, through the model's own converter if there is one."""
        layers, merged = self.weights.layers, self.weights.merged
        weights: Tensors = {}
        for name in order:
            with error_context(name):
                weight = layers[name].unpack(name, tensors) if name in layers else tensors[name]
            weights[name] = weight.to(dtype)
            if name not in merged:
                return weights[name]
        stored = [(merged[name].pattern, weight) for name, weight in weights.items()]
        return merged[order[0]].merged(shape, config, stored)

    def _packed(
        self, mixture: Any, key: str, dtype: torch.dtype, config: Any, order: list[str], tensors: Tensors
    ) -> Iterator[_Packed]:
        """Yield packed matrices with the rows of all experts, in order; at most one matrix is dense at a time.

        If the model's converter does not preserve rows, all weights of the parameter are dense at once.
        """
        layers, merged, transposed = self.weights.layers, self.weights.merged, mixture.is_transposed
        codec = next(layers[name].codec for name in order if name in layers)
        shapes = {name: layers[name].shape if name in layers else tuple(tensors[name].shape) for name in order}
        converter, shape, rows = merged.get(order[0]), mixture.origin.get_parameter(key).shape, None
        if converter is not None and not transposed:
            rows = converter.row_order(shape, config, [(merged[name].pattern, shapes[name]) for name in order])
        if len(order) == 1 and len(shapes[order[0]]) == 3 and (converter is None or _inside(rows, shapes[order[0]])):
            with error_context(order[0]):
                yield from _repacked(order[0], layers[order[0]], tensors, transposed, rows)
        elif blocks := _blocks(rows, shapes):
            for name in blocks:
                with error_context(name):
                    if name in layers:
                        yield _Packed(layers[name].checked(name, tensors), layers[name].matrix)
                    else:
                        yield _packed(codec, tensors[name])
        else:
            for matrix in self._dense(dtype, shape, config, order, tensors):
                yield _packed(codec, matrix.T if transposed else matrix)


def _blocks(rows: Tensor | None, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Return the stored matrices that form the parameter when stacked by rows; none if their rows are mixed."""
    if rows is None or any(len(shape) != 2 for shape in shapes.values()):
        return []
    numbers = torch.arange(len(rows), device="cpu").split([shape[0] for shape in shapes.values()])
    starts = torch.stack([rows_of_matrix[0] for rows_of_matrix in numbers])
    owners = (torch.searchsorted(starts, rows, right=True) - 1).unique_consecutive().tolist()
    whole = torch.equal(torch.cat([numbers[owner] for owner in owners]), rows)
    return [[*shapes][owner] for owner in owners] if whole else []


def _inside(rows: Tensor | None, shape: tuple[int, ...]) -> bool:
    """Whether every expert has the rows of one stored expert, in any order; `shape` is [E, rows, columns]."""
    owners = None if rows is None else rows.view(shape[:2]) // shape[1]
    return owners is not None and bool((owners == owners[:, :1]).all())


def _repacked(
    name: str, layer: PackedLayer, tensors: Tensors, transposed: bool, rows: Tensor | None
) -> Iterator[_Packed]:
    """Yield the packed matrices of the experts in a packed fused weight, [E, out, in], or [E, in, out] if `transposed`.

    If a converter moves rows within their expert, `rows` has the index of the stored row for every row.
    """
    codec, matrix, (experts, size, _) = layer.codec, layer.matrix, layer.shape
    parts = layer.checked(name, tensors)
    moved = rows is not None and not torch.equal(rows, torch.arange(len(rows), device="cpu"))
    if layer.stacked and not moved:
        yield _Packed(parts, matrix)
        return
    plan, count = codec.plan(parts, matrix), matrix[0] // experts
    for expert in range(experts):
        order = None if rows is None else rows[expert * size : (expert + 1) * size]
        stored = expert if order is None else int(order[0]) // size
        packed, planned = codec.rows(parts, matrix, stored * count, (stored + 1) * count, plan)
        dense = codec.unpack(packed, (count, matrix[1]), planned).view(layer.shape[1:])
        dense = dense if order is None else dense[order - stored * size]
        yield _packed(codec, dense.T if transposed else dense, layer.nm)


def _packed(codec: Codec, matrix: Tensor, pattern: NM | None = None) -> _Packed:
    return _Packed(codec.pack(matrix.cpu(), pattern), (matrix.shape[0], matrix.shape[1]))


def unpacked(
    tensors: Iterable[tuple[str, Tensor]], find_layers: Callable[[], Layers], prefix: str = ""
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a dense checkpoint, each packed weight as soon as its last tensor is read.

    The order of the tensors is arbitrary; every name is `prefix` and the name in the files. `find_layers` returns the
    packed weights by name in the files. It is called at the first tensor that is named like a packed tensor, so never
    for checkpoints of other programs.
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
            with error_context(weight):
                dense = layer.unpack(weight, waiting.pop(weight))
            yield prefix + weight, dense
    missing = next(iter(waiting), "")
    with error_context(missing):
        require(not waiting, "not all of its packed tensors were read")
