"""The names of weights in a checkpoint's files, which for many architectures are not those in the model.

transformers renames what it loads (ViT, vision-language models, …) and undoes that when it saves.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import nn

from ..packing import suffixes


def parameter_names(model: nn.Module, stored: Iterable[str]) -> dict[str, str]:
    """The name in the model of every stored weight that transformers loads as it is.

    Those that it splits, merges or does not know are left out.

    Args:
        model: a `PreTrainedModel`, possibly on the meta device.
        stored: names in the files of a dense checkpoint.

    Returns:
        The stored names that were found, each with the one in `model.state_dict()`.
    """
    rename_source_key, renamings, converters = _mapping(model)
    state, found = model.state_dict(), {}
    for name in stored:
        known, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if pattern is None and known in state:
            found[name] = known
    return found


def followed_names(model: nn.Module, stored: Iterable[str]) -> dict[str, str]:
    """As `parameter_names`, but only of weights whose packed tensors, of any format, transformers names likewise.

    Args:
        model: a `PreTrainedModel`, possibly on the meta device.
        stored: names in the files of a dense checkpoint.
    """
    found = parameter_names(model, stored)
    every = renamed(model, (name + end for name in found for end in ("", *suffixes())))
    return {
        name: known
        for name, known in found.items()
        if all(every[name + suffix] == every[name] + suffix for suffix in suffixes())
    }


class Merged(NamedTuple):
    """How transformers makes a fused parameter of a stored weight, with others."""

    weight: str  # the parameter in the model; the first, where they make several
    pattern: str  # by which the converter knows such a weight, as all experts' `w1`
    converter: Any  # transformers' `WeightConverter`

    @property
    def keeps_rows(self) -> bool:
        """Whether a row of the stored weight is one in the parameter; not known of every operation."""
        return {type(step).__name__ for step in self.converter.operations} <= _STACKING


_STACKING = {"MergeModulelist", "Concatenate"}


def merged_weights(model: nn.Module, stored: Iterable[str]) -> dict[str, Merged]:
    """The stored weights of single experts, which transformers merges with those of the others.

    Args:
        model: a `PreTrainedModel`, possibly on the meta device.
        stored: names in the files of a dense checkpoint.
    """
    rename_source_key, renamings, converters = _mapping(model)
    fused = {name for name, parameter in model.named_parameters() if parameter.ndim == 3}
    known = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    state, found = model.state_dict(), {}
    for name in stored:
        weight, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if pattern is not None and weight in fused:
            found[name] = Merged(weight, pattern, known[pattern])
    return found


def loaded_into(model: nn.Module, stored: Iterable[str]) -> dict[str, str]:
    """The parameter or buffer in the model that every stored weight becomes, or becomes a part of.

    Those that transformers splits or does not know are left out.

    Args:
        model: a `PreTrainedModel`, possibly on the meta device.
        stored: names in the files of a dense checkpoint.

    Returns:
        The stored names that were found, each with the one in `model.state_dict()`.
    """
    stored = list(stored)
    merged = {name: each.weight for name, each in merged_weights(model, stored).items()}
    return parameter_names(model, stored) | merged


def renamed(model: nn.Module, stored: Iterable[str]) -> dict[str, str]:
    """What transformers calls stored tensors once it has renamed them, before it merges or splits any.

    Args:
        model: a `PreTrainedModel`, possibly on the meta device.
        stored: names in the files.
    """
    rename_source_key, renamings, _ = _mapping(model)
    return {name: rename_source_key(name, renamings, [])[0] for name in stored}


def conversions_of(model: nn.Module, stored: Iterable[str], others: Iterable[Any]) -> list[Any]:
    """The conversions that transformers keeps, to reverse them when it saves, of a model that it has loaded.

    Args:
        model: a `PreTrainedModel`.
        stored: names in the files of a dense checkpoint.
        others: conversions that it has kept already; those that are not the model's own come first.

    Returns:
        All that any of the names needs, and the others, each once, in transformers' order.
    """
    rename_source_key, renamings, converters = _mapping(model)
    for name in stored:
        rename_source_key(name, renamings, converters)
    used = [entry for entry in (*renamings, *converters) if hasattr(entry, "was_used") and entry.was_used()]
    places = {_signature(entry): place for place, entry in enumerate(_conversions(model))}
    found = {_signature(entry): entry for entry in (*used, *others)}  # releases without `was_used` keep all
    return [found[signature] for signature in sorted(found, key=lambda signature: places.get(signature, -1))]


def _signature(conversion: Any) -> tuple[Any, ...]:
    patterns = tuple(conversion.source_patterns), tuple(conversion.target_patterns)
    return type(conversion).__name__, *patterns, getattr(conversion, "scope_prefix", None)


def _mapping(model: nn.Module) -> tuple[Any, list[Any], list[Any]]:
    """transformers' function that renames what is loaded, and what it renames and converts for a model."""
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key  # as below

    mapping = _conversions(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    return rename_source_key, renamings, [entry for entry in mapping if isinstance(entry, WeightConverter)]


def _conversions(model: nn.Module) -> list[Any]:
    # Imported after transformers' quantizers, from which this package is imported.
    from transformers.conversion_mapping import get_model_conversion_mapping

    return get_model_conversion_mapping(model)
