"""The locations of the pruned layers in a checkpoint's files, from the model on the meta device."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..errors import MoonshotError, reason
from ..model.layers import find_structure, named_layers
from .declared_metadata import DeclaredMetadata
from .meta_model import checkpoint_meta_model
from .packed_files import pruned_layers
from .weight_names import loaded_into


@dataclass(frozen=True)
class WeightLocations:
    """The pruned layers, in the model's order, and their weights in the files: one each, or one per expert."""

    layers: tuple[str, ...]
    weights: Mapping[str, str]  # name in the files → layer
    transposed: frozenset[str] = frozenset()  # layers that are stored [d_in, d_out], or [experts, d_in, d_out]
    notes: tuple[str, ...] = field(default=())

    def as_matrix(self, layer: str, tensor: Tensor) -> Tensor:
        """Convert a tensor from the layout of a layer's weight to [d_out, d_in].

        Args:
            layer: its name.
            tensor: of the `shape` of its weight in the files.
        """
        if tensor.ndim < 2:
            return tensor[None]
        if tensor.ndim == 3:
            return (tensor.mT if layer in self.transposed else tensor).flatten(0, 1)
        return tensor.T if layer in self.transposed else tensor.flatten(1)


def locate_weights(folder: Path, declared: DeclaredMetadata, weights: Iterable[str], **options: Any) -> WeightLocations:
    """Find the layers that are declared as pruned; without a declaration, all that could be.

    Args:
        folder: of the checkpoint.
        declared: its metadata.
        weights: the dense names of the weights in the files.
        options: for the model's classes, such as `trust_remote_code`.
    """
    weights = list(weights)
    try:
        model = checkpoint_meta_model(folder, **options)
    except MoonshotError as error:
        return _by_name(declared, weights, reason(error))
    layers = _declared_layers(declared, model)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    pruned = {name: layer for name, _, layer in named_layers(model) if name in set(layers) and layer is not None}
    layer_of = {id(layer.module._parameters.get(layer.key)): name for name, layer in pruned.items()}
    stored = loaded_into(model, weights)
    owners = {weight: layer_of.get(id(parameters.get(stored.get(weight, "")))) for weight in weights}
    # Single experts are stored [d_out, d_in]: transformers transposes them when it merges them.
    transposed = {name for name, layer in pruned.items() if layer.axes in ((1, 0), (2, 1))}
    return WeightLocations(
        tuple(layers), {weight: name for weight, name in owners.items() if name}, frozenset(transposed)
    )


def _by_name(declared: DeclaredMetadata, weights: list[str], why: str) -> WeightLocations:
    """Without a model: by the names in the report."""
    report = declared.report
    layers = () if report is None or report.compacted else tuple(report.layers)
    owners = {weight: weight.removesuffix(".weight") for weight in weights}
    note = f"the layers are known from the report alone: {why}"
    located = {weight: name for weight, name in owners.items() if name in set(layers)}
    return WeightLocations(layers, located, notes=(note,))


def _declared_layers(declared: DeclaredMetadata, model: nn.Module) -> list[str]:
    """The pruned layers, by the report; without one, by config.json and the architecture."""
    if declared.report is not None and not declared.report.compacted:
        return list(declared.report.layers)
    try:
        if declared.record is None:
            return [layer.name for layer in find_structure(model).layers()]
        pruned = pruned_layers(model)  # tied ones by every name
        selected = find_structure(model, declared.record.targets, declared.record.ignore).layers()
        return [layer.name for layer in selected if layer.weight_name in pruned]
    except MoonshotError:  # the model has no layer that can be pruned, or that the record names
        return []
