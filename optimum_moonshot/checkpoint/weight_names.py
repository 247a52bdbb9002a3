"""The names of weights in a checkpoint's files, which for many architectures differ from those in the model.

transformers renames weights when it loads them (ViT, vision-language models, …), and reverses that when it saves. In
the functions below, `model` is a `PreTrainedModel`, possibly on the meta device, and `stored` are names in the files of
a dense checkpoint.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from math import prod
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from ..packing import suffixes

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Target(NamedTuple):
    """The parameter of the model that transformers loads a stored weight into."""

    weight: str  # the parameter; the first of several
    pattern: str | None  # of the weights that are merged, such as all experts' `w1`; None: it is only renamed
    converter: Any  # transformers' `WeightConverter`, where it is merged or split
    fused: bool = False  # whether the converter only merges weights into one fused parameter, such as experts

    def converted(self, stored: Iterable[tuple[str | None, Tensor]], model: Any) -> dict[str, Tensor]:
        """The parameters that the converter makes of stored weights, by their names.

        Args:
            stored: the weights with their patterns, in the order of their names.
            model: some operations compare with its shapes and configuration.
        """
        converter = deepcopy(self.converter)
        for number, (pattern, tensor) in enumerate(stored):
            converter.add_tensor(self.weight, str(number), pattern, tensor)
        converted: dict[str, Any] = converter.convert(self.weight, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}

    def merged(self, shape: Sequence[int], config: Any, stored: Iterable[tuple[str | None, Tensor]]) -> Tensor:
        """Like `converted`, but for a single parameter of this shape, in a model with this configuration."""
        model = SimpleNamespace(get_parameter=lambda _: torch.empty(tuple(shape), device="meta"), config=config)
        return self.converted(stored, model)[self.weight]

    def row_order(
        self, shape: Sequence[int], config: Any, stored: Sequence[tuple[str | None, Sequence[int]]]
    ) -> Tensor | None:
        """The number of the stored row that each row of the parameter equals; None if it has other rows.

        The converter is applied to rows of four columns, 4r to 4r + 3 in row r: two would hide exchanged columns.

        Args:
            shape: of the parameter.
            config: of the model.
            stored: the pattern and the shape of every weight, in the order of their names.
        """
        sizes = [prod(size[:-1]) for _, size in stored]
        numbers = torch.arange(4 * sum(sizes), device="cpu").view(-1, 4)
        rows = zip(stored, numbers.split(sizes), strict=True)
        narrow = [(pattern, tensor.view(*size[:-1], 4)) for (pattern, size), tensor in rows]
        merged = self.merged((*shape[:-1], 4), config, narrow).flatten(0, -2)
        order = merged[:, 0] // 4
        return order if torch.equal(merged, numbers[order]) else None

    def keeps_rows(self, model: Any, shape: Sequence[int]) -> bool:
        """Whether the rows of stored weights of this shape stay whole rows of the parameter that they form."""
        parameter, patterns = model.get_parameter(self.weight).shape, self.converter.source_patterns
        count, rest = divmod(parameter.numel(), prod(shape) * len(patterns))  # weights of every pattern
        if not count or rest or shape[-1] != parameter[-1]:
            return False
        stored = [(pattern, shape) for pattern in patterns for _ in range(count)]
        return self.row_order(parameter, model.config, stored) is not None


class Conversion(NamedTuple):
    """Stored weights that transformers converts together, in other ways than renaming them or stacking experts."""

    sources: tuple[tuple[str, str], ...]  # their names, and the patterns of the converter that they match
    target: Target
    model: nn.Module  # some operations compare with its shapes and configuration

    def parameters(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The model's parameters that the loader makes of stored weights, or masks of such, by their names.

        Weights of other shapes than config.json declares may raise any error.
        """
        return self.target.converted(((pattern, tensors[name]) for name, pattern in self.sources), self.model)


def conversions(model: nn.Module, stored: Iterable[str]) -> list[Conversion]:
    """The conversions of stored weights, such as fused query, key and value, that `loaded_into` does not describe."""
    from transformers.core_model_loading import dot_natural_key  # late: transformers' quantizers import this package

    groups: dict[str, list[tuple[str, Target]]] = {}
    for name, target in _targets(model, sorted(stored, key=dot_natural_key)):
        if target.pattern is not None and not target.fused:
            groups.setdefault(target.weight, []).append((name, target))
    return [
        Conversion(tuple((name, str(target.pattern)) for name, target in group), group[0][1], model)
        for group in groups.values()
    ]


def parameter_names(model: nn.Module, stored: Iterable[str]) -> dict[str, str]:
    """The name in `model.state_dict()` of every stored weight that transformers loads without splitting or merging."""
    state = model.state_dict()
    targets = _targets(model, stored)
    return {name: target.weight for name, target in targets if target.pattern is None and target.weight in state}


def merged_weights(model: nn.Module, stored: Iterable[str]) -> dict[str, Target]:
    """The stored weights that transformers merges into one fused parameter, such as the weights of single experts."""
    return {name: target for name, target in _targets(model, stored) if target.fused}


def _targets(model: nn.Module, stored: Iterable[str]) -> Iterator[tuple[str, Target]]:
    rename_source_key, renamings, converters = _mapping(model)
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    fused = {name for name, parameter in model.named_parameters() if parameter.ndim == 3}
    state = model.state_dict()
    for name in stored:
        weight, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        converter = by_pattern.get(pattern)
        single = converter is not None and len(converter.target_patterns) == 1
        yield name, Target(weight, pattern, converter, single and weight in fused)


def target_names(model: nn.Module, stored: Iterable[str]) -> dict[str, str]:
    """The name in the model that transformers derives from the name of every stored weight, existing or not."""
    return {name: target.weight for name, target in _targets(model, stored)}


def loaded_into(model: nn.Module, stored: Iterable[str]) -> dict[str, str]:
    """The name in `model.state_dict()` that every stored weight is loaded into, alone or merged with others."""
    stored = list(stored)
    merged = {name: target.weight for name, target in merged_weights(model, stored).items()}
    return parameter_names(model, stored) | merged


def followed_names(model: nn.Module, stored: Iterable[str]) -> dict[str, str]:
    """Like `parameter_names`, but only weights whose packed tensors, of any format, are renamed in the same way."""
    names = parameter_names(model, stored)
    new = renamed(model, (name + end for name in names for end in ("", *suffixes())))
    return {
        name: parameter
        for name, parameter in names.items()
        if all(new[name + suffix] == new[name] + suffix for suffix in suffixes())
    }


def renamed(model: nn.Module, stored: Iterable[str]) -> dict[str, str]:
    """The names of stored tensors after transformers has renamed them, before it merges or splits any."""
    rename_source_key, renamings, _ = _mapping(model)
    return {name: rename_source_key(name, renamings, [])[0] for name in stored}


def conversions_of(model: nn.Module, stored: Iterable[str], others: Iterable[Any]) -> list[Any]:
    """The conversions that transformers must store in a loaded model, to reverse them when it saves.

    These are the conversions that any stored name needs, and `others`, which are stored already, each once, in
    transformers' order; conversions that are not of the model's type come first.
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
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key  # late, see above

    mapping = _conversions(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    return rename_source_key, renamings, [entry for entry in mapping if isinstance(entry, WeightConverter)]


def _conversions(model: nn.Module) -> list[Any]:
    from transformers.conversion_mapping import get_model_conversion_mapping  # late, see above

    return get_model_conversion_mapping(cast("PreTrainedModel", model))
