"""Where the pruned layers of a checkpoint lie in its files: their names and layouts, from a model without weights."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..errors import MoonshotError, reason
from ..model.layers import adapter_at, find_structure, holders
from .declared_metadata import Claims
from .packed_files import model_skeleton, pruned_layers
from .weight_names import loaded_into


@dataclass(frozen=True)
class Places:
    """The pruned layers, in the model's order, and the weights in the files that are theirs: one, or one per expert."""

    layers: tuple[str, ...]
    weights: Mapping[str, str]  # name in the files → layer
    transposed: frozenset[str] = frozenset()  # layers that are stored [d_in, d_out], or [experts, d_in, d_out]
    notes: tuple[str, ...] = field(default=())

    def as_matrix(self, layer: str, tensor: Tensor) -> Tensor:
        """[d_out, d_in] of a tensor that is laid out as a layer's weight."""
        if tensor.ndim < 2:
            return tensor[None]
        if tensor.ndim == 3:
            return (tensor.mT if layer in self.transposed else tensor).flatten(0, 1)
        return tensor.T if layer in self.transposed else tensor.flatten(1)


def find_places(folder: Path, claims: Claims, weights: Iterable[str], **options: Any) -> Places:
    """Find the layers that a folder's texts say are pruned; where they say nothing, those that could be.

    Args:
        folder: of the checkpoint.
        claims: what its texts say.
        weights: the dense names of what is in the files.
        options: for the model's classes, such as `trust_remote_code`.
    """
    weights = list(weights)
    try:
        model = model_skeleton(folder, **options)
    except MoonshotError as error:
        return _by_name(claims, weights, reason(error))
    layers = _claimed(claims, model)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    places = {name: (module, key) for name, module, key in holders(model) if name in set(layers)}
    forms = {name: adapter_at(*place) for name, place in places.items()}
    known = {id(form.weight): name for name, form in forms.items() if form is not None}
    stored = loaded_into(model, weights)
    owners = {weight: known.get(id(parameters.get(stored.get(weight)))) for weight in weights}
    # What is stored expert by expert is [d_out, d_in]: transformers turns it, if it must, when it merges them.
    turned = {name for name, form in forms.items() if form is not None and form.axes in ((1, 0), (2, 1))}
    return Places(tuple(layers), {weight: name for weight, name in owners.items() if name}, frozenset(turned))


def _by_name(claims: Claims, weights: list[str], why: str) -> Places:
    """Without a model: by the names in the report, with the shapes that it says."""
    report = claims.report
    layers = () if report is None or report.compacted else tuple(report.layers)
    owned = {weight: weight.removesuffix(".weight") for weight in weights}
    note = f"the layers are known by the report alone: {why}"
    return Places(layers, {weight: name for weight, name in owned.items() if name in set(layers)}, notes=(note,))


def _claimed(claims: Claims, model: nn.Module) -> list[str]:
    """The pruned layers, by the report; without one by config.json and the architecture."""
    if claims.report is not None and not claims.report.compacted:
        return list(claims.report.layers)
    try:
        if claims.record is None:
            return [layer.name for layer in find_structure(model).layers()]
        pruned = pruned_layers(model)  # tied ones under every name
        chosen = find_structure(model, claims.record.targets, claims.record.ignore).layers()
        return [layer.name for layer in chosen if layer.weight_name in pruned]
    except MoonshotError:  # nothing in the model can be pruned, or is what the record names
        return []
