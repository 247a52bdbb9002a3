"""The names of weights in a checkpoint's files, which for many architectures are not those in the model.

transformers renames what it loads (ViT, vision-language models, …) and undoes that when it saves.
"""

from collections.abc import Iterable
from typing import Any

from torch import nn

from ..packing import suffixes


def parameter_names(model: nn.Module, stored: Iterable[str], packable: bool = True) -> dict[str, str]:
    """The name in the model of every stored weight that transformers loads as it is.

    Those that it splits, merges or does not know are left out.

    Args:
        model: a `PreTrainedModel`, possibly on the meta device.
        stored: names in the files of a dense checkpoint.
        packable: leave out those whose packed tensors, of any format, it would name otherwise, too.

    Returns:
        The stored names that were found, each with the one in `model.state_dict()`.
    """
    rename_source_key, renamings, converters = _mapping(model)
    state, ends, found = model.state_dict(), ("", *suffixes()), {}
    for name in stored:
        known, converter = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        renamed = [rename_source_key(name + end, renamings, [])[0] for end in ends]
        alike = not packable or renamed == [renamed[0] + end for end in ends]
        if converter is None and known in state and alike:
            found[name] = known
    return found


def expert_names(model: nn.Module, stored: Iterable[str]) -> dict[str, str]:
    """The fused parameter of every stored weight of one expert, which transformers merges with those of the others.

    Args:
        model: a `PreTrainedModel`, possibly on the meta device.
        stored: names in the files of a dense checkpoint.
    """
    rename_source_key, renamings, converters = _mapping(model)
    fused = {name for name, parameter in model.named_parameters() if parameter.ndim == 3}
    state, found = model.state_dict(), {}
    for name in stored:
        known, converter = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if converter is not None and known in fused:
            found[name] = known
    return found


def _mapping(model: nn.Module) -> tuple[Any, list[Any], list[Any]]:
    """transformers' function that renames what is loaded, and what it renames and converts for a model."""
    # Both are imported after transformers' quantizers, from which this package is imported.
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    return rename_source_key, renamings, [entry for entry in mapping if isinstance(entry, WeightConverter)]
