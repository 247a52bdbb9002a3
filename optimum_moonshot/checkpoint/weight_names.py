"""The names of weights in a checkpoint's files, which for many architectures differ from those in the model.

transformers renames weights when it loads them (ViT, vision-language models, …), and reverses that when it saves.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from torch import nn

from ..packing import suffixes

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def parameter_names(model: nn.Module, stored: Iterable[str]) -> dict[str, str]:
    """The name in the model of every stored weight that transformers loads unchanged.

    Args:
        model: a `PreTrainedModel`, possibly on the meta device.
        stored: names in the files of a dense checkpoint.

    Returns:
        Stored name → name in `model.state_dict()`, without weights that transformers splits, merges or ignores.
    """
    rename_source_key, renamings, converters = _mapping(model)
    prefix, state, names = model.base_model_prefix, model.state_dict(), {}
    for name in stored:
        renamed_to, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if pattern is None and renamed_to in state:
            names[name] = renamed_to
    return names


def followed_names(model: nn.Module, stored: Iterable[str]) -> dict[str, str]:
    """As `parameter_names`, but only weights whose packed tensors, of any format, are renamed in the same way.

    Args:
        model: a `PreTrainedModel`, possibly on the meta device.
        stored: names in the files of a dense checkpoint.
    """
    names = parameter_names(model, stored)
    new = renamed(model, (name + end for name in names for end in ("", *suffixes())))
    return {
        name: parameter
        for name, parameter in names.items()
        if all(new[name + suffix] == new[name] + suffix for suffix in suffixes())
    }


class Merged(NamedTuple):
    """How transformers merges a stored weight with others into a fused parameter."""

    weight: str  # the parameter in the model; the first of several
    pattern: str  # of the weights that are merged, such as all experts' `w1`
    converter: Any  # transformers' `WeightConverter`

    @property
    def keeps_rows(self) -> bool:
        """Whether rows of the stored weight are rows of the parameter; False for unknown operations."""
        return {type(step).__name__ for step in self.converter.operations} <= _STACKING


_STACKING = {"MergeModulelist", "Concatenate"}


def merged_weights(model: nn.Module, stored: Iterable[str]) -> dict[str, Merged]:
    """The stored weights of single experts, which transformers merges into fused parameters.

    Args:
        model: a `PreTrainedModel`, possibly on the meta device.
        stored: names in the files of a dense checkpoint.
    """
    rename_source_key, renamings, converters = _mapping(model)
    fused = {name for name, parameter in model.named_parameters() if parameter.ndim == 3}
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix, state, merged = model.base_model_prefix, model.state_dict(), {}
    for name in stored:
        weight, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if pattern is not None and weight in fused:
            merged[name] = Merged(weight, pattern, by_pattern[pattern])
    return merged


def loaded_into(model: nn.Module, stored: Iterable[str]) -> dict[str, str]:
    """The parameter or buffer in the model that every stored weight is loaded into, alone or merged with others.

    Args:
        model: a `PreTrainedModel`, possibly on the meta device.
        stored: names in the files of a dense checkpoint.

    Returns:
        Stored name → name in `model.state_dict()`, without weights that transformers splits or ignores.
    """
    stored = list(stored)
    merged = {name: each.weight for name, each in merged_weights(model, stored).items()}
    return parameter_names(model, stored) | merged


def renamed(model: nn.Module, stored: Iterable[str]) -> dict[str, str]:
    """The names of stored tensors after transformers has renamed them, before it merges or splits any.

    Args:
        model: a `PreTrainedModel`, possibly on the meta device.
        stored: names in the files.
    """
    rename_source_key, renamings, _ = _mapping(model)
    return {name: rename_source_key(name, renamings, [])[0] for name in stored}


def conversions_of(model: nn.Module, stored: Iterable[str], others: Iterable[Any]) -> list[Any]:
    """The conversions that transformers must store in a loaded model, to reverse them when it saves.

    Args:
        model: a `PreTrainedModel`.
        stored: names in the files of a dense checkpoint.
        others: conversions that are stored already; those that are not of the model's type come first.

    Returns:
        Those that any of the names needs, and the others, each once, in transformers' order.
    """
    rename_source_key, renamings, converters = _mapping(model)
    for name in stored:
        rename_source_key(name, renamings, converters)
    used = [entry for entry in (*renamings, *converters) if hasattr(entry, "was_used") and entry.was_used()]
    order = {_signature(entry): index for index, entry in enumerate(_conversions(model))}
    entries = {_signature(entry): entry for entry in (*used, *others)}  # releases without `was_used` store all
    return [entries[signature] for signature in sorted(entries, key=lambda signature: order.get(signature, -1))]


def _signature(conversion: Any) -> tuple[Any, ...]:
    patterns = tuple(conversion.source_patterns), tuple(conversion.target_patterns)
    return type(conversion).__name__, *patterns, getattr(conversion, "scope_prefix", None)


def _mapping(model: nn.Module) -> tuple[Any, list[Any], list[Any]]:
    """transformers' function that renames weights, and the renamings and converters of a model."""
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key  # late, as below

    mapping = _conversions(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    return rename_source_key, renamings, [entry for entry in mapping if isinstance(entry, WeightConverter)]


def _conversions(model: nn.Module) -> list[Any]:
    # Imported late: transformers' quantizers import this package.
    from transformers.conversion_mapping import get_model_conversion_mapping

    return get_model_conversion_mapping(cast("PreTrainedModel", model))
