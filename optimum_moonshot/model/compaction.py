"""Remove the dead neurons and heads of a model: `compact_model`.

A structured group whose input columns are all zero is dead: it contributes nothing, so its columns and the rows that
produce them can be removed (structured_groups.py finds both). The smaller model must be of the same class with another
configuration. The fields to change are searched, without a table: a configuration is accepted if a model created from
it (on the meta device) has exactly the remaining shapes. Dead groups stay as zeros if no configuration fits.
"""

import copy
import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedConfig, PreTrainedModel

from ..data.batches import Batch
from ..errors import MoonshotError, reason, require
from ..progress import without_transformers_bars
from .calls import (
    check_usable,
    close,
    evaluation_mode,
    first_tensor,
    model_device,
    model_result,
    recorded,
    split_hidden,
    to_device,
    without_caches,
)
from .layers import PrunableLayer, find_blocks, find_structure
from .model_info import Edit, edited, last_line, on_meta_device, whole_numbers
from .structured_groups import StructuredGroups, find_structured_groups, probe_inputs

Shapes = dict[str, tuple[int, ...]]
Pair = tuple[tuple[str, nn.Module], tuple[str, nn.Module]]  # name and module of a decoder layer in two models
# The indices of groups that may be removed from a layer, int64 [matrices, groups]: equally many from all its matrices.
Dead = Callable[[PrunableLayer, StructuredGroups], Tensor]

# Largest error of a decoder layer by float32 rounding, relative to the change that the layer makes to a token.
BLOCK_TOLERANCE = 1e-3
# The neurons of experts remain a multiple of it: torch's grouped product, by which transformers multiplies experts,
# needs rows of a multiple of 16 bytes.
EXPERT_MULTIPLE = 8
# Fields with a number of heads, not the size of one.
_HEADS = re.compile(r"^(?!.*(dim|size)).*head")


@dataclasses.dataclass(frozen=True)
class Compaction:
    """The changes by `compact_model`, or by a run that removed experts."""

    config: dict[str, tuple[int | None, int]]  # changed field → value before and after
    removed: dict[str, int]  # layer → removed input columns; mixture → removed experts
    zeros: dict[str, str]  # layer, or kind of layer → what remains as zeros, and why
    parameters: tuple[int, int]  # before and after

    def to_dict(self) -> dict[str, Any]:
        """As JSON types."""
        values = dataclasses.asdict(self)
        changes = {name: list(change) for name, change in self.config.items()}
        return {**values, "config": changes, "parameters": list(self.parameters)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Compaction":
        """The inverse of `to_dict`; `MoonshotError` for anything else, as in a damaged config.json."""
        try:
            config = {name: (before, after) for name, (before, after) in values["config"].items()}
            before, after = values["parameters"]
            return cls(config, dict(values["removed"]), dict(values["zeros"]), (before, after))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise MoonshotError(f"compaction: damaged ({reason(error)})") from error


@dataclasses.dataclass(frozen=True, eq=False)
class Family:
    """The same layer of all decoder layers: a configuration has one width for them."""

    name: str
    size: int  # of a group
    count: int
    members: tuple[tuple[PrunableLayer, StructuredGroups, Tensor], ...]  # the tensor: see `Dead`

    @property
    def dead(self) -> int:
        """Number of groups that can be removed from all members; one has to stay."""
        return self._most - self._most % self.multiple

    @property
    def multiple(self) -> int:
        """The number of removed groups is a multiple of it."""
        return math.gcd(self.count, EXPERT_MULTIPLE) if self.members[0][0].separate else 1

    @property
    def _most(self) -> int:
        return min(self.count - 1, *(dead.shape[1] for _, _, dead in self.members))

    def obstacle(self, number: int) -> str | None:
        """The reason why not more than `number` groups can be removed, apart from the configuration's; None if none."""
        if number < self.dead:
            return None
        if number < self._most:
            return f"a multiple of {self.multiple} neurons remains in an expert, for the products of transformers"
        return "other layers of its kind have fewer, and the configuration has one width for all"


def compact_model(model: PreTrainedModel, inputs: Batch | None = None) -> tuple[PreTrainedModel, Compaction]:
    """A smaller model with the same outputs, without the neurons and heads whose columns are all zero.

    Args:
        model: after structured pruning; unchanged.
        inputs: for the probes, in place of random tokens or pixels.

    Returns:
        A new model of the same class, dtype and device, which `save_pretrained` and `from_pretrained` support, and the
        changes. `model` itself if the architecture allows none.

    Raises:
        MoonshotError: nothing is dead, or the smaller model has other outputs.
    """
    require(isinstance(model, PreTrainedModel), f"model is a {type(model).__name__}", hint="pass a PreTrainedModel")
    check_one_device(model)
    inputs = inputs or probe_inputs(model)
    search = GroupSearch(model, inputs, _dead_groups)
    config, removed = search.configuration()
    zeros = search.remaining(removed)
    if not removed:
        hint = "prune with pattern='structured' first"
        require(bool(zeros), "nothing to compact: no neuron or head has only zeros", hint=hint)
        return model, Compaction({}, {}, zeros, (model.num_parameters(),) * 2)
    small = build_smaller(model, config, search.state(removed))
    try:
        verify_smaller(model, small, inputs, zip(find_blocks(model), find_blocks(small), strict=True))
    except (RuntimeError, TypeError, IndexError) as error:
        raise MoonshotError(f"the smaller {type(model).__name__} does not run: {error}") from error
    before = dict(whole_numbers(model.config))
    after = {name: value for name, value in whole_numbers(config) if value is not None}
    changes = {name: (before.get(name), value) for name, value in after.items() if before.get(name) != value}
    columns = {layer.name: family.size * count for family, count in removed.items() for layer, _, _ in family.members}
    return small, Compaction(changes, columns, zeros, (model.num_parameters(), small.num_parameters()))


def check_one_device(model: nn.Module) -> None:
    """Raise `MoonshotError` if a model's weights are on several devices."""
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    require(len(devices) == 1, f"its weights are on {', '.join(devices)}", field="model", hint="load it on one device")


class GroupSearch:
    """The removable groups of a model, and the configuration of the rest.

    `dead` selects the groups of a layer that may be removed, by their indices.
    """

    def __init__(self, model: PreTrainedModel, inputs: Batch, dead: Dead):
        self.model = model
        structure = find_structure(model)
        self.layers = {layer.name: layer for layer in structure.layers()}
        self.names: dict[int, list[str]] = {}  # of a parameter; tied ones have several
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self.names.setdefault(id(parameter), []).append(name)
        self.shapes = _shapes(model)
        structured, _ = find_structured_groups(model, inputs)
        families: dict[tuple[str, int, int], list[tuple[PrunableLayer, StructuredGroups, Tensor]]] = {}
        for block in structure.blocks:
            for groups in (structured[layer.name] for layer in block.layers if layer.name in structured):
                name = f"{block.name.rpartition('.')[0]}.*{groups.name.removeprefix(block.name)}"
                layer = self.layers[groups.name]
                member = (layer, groups, dead(layer, groups))
                families.setdefault((name, groups.size, groups.count), []).append(member)
        self.families = [Family(*key, tuple(members)) for key, members in families.items()]
        self.reasons: dict[Family, str] = {}

    def configuration(self) -> tuple[PreTrainedConfig, dict[Family, int]]:
        """The configuration without as many groups as possible, and the number removed from each family."""
        config: PreTrainedConfig = self.model.config
        removed: dict[Family, int] = {}
        for family in self.families:
            if family not in removed:  # by a field that it shares with another family
                smaller = self._smaller(config, family, self._edits(config, family), removed)
                config, removed = smaller or (config, removed)
        return config, removed

    def without(self, family: Family, count: int) -> tuple[PreTrainedConfig | None, dict[Family, int]]:
        """The configuration with `count` fewer groups in a family, and in others with the same fields, or None."""
        config: PreTrainedConfig = self.model.config
        return self._smaller(config, family, self._edits_of(config, family, [count]), {}) or (None, {})

    def _smaller(
        self, config: PreTrainedConfig, family: Family, edits: Iterable[Edit], removed: dict[Family, int]
    ) -> tuple[PreTrainedConfig, dict[Family, int]] | None:
        """The first edited configuration that removes groups of one more family, and the number removed from each."""
        fields = dict(whole_numbers(config))
        for edit in edits:
            try:
                trial = edited(config, edit)
                shapes = _shapes(on_meta_device(type(self.model), trial))
            except Exception as error:
                if all(fields[name] is not None for name in edit if name in fields):
                    self.reasons.setdefault(family, last_line(error))
                continue
            explained = self._explain(shapes)
            if explained and family in explained and removed.items() <= explained.items():
                return trial, explained
        return None

    def _edits(self, config: PreTrainedConfig, family: Family) -> Iterator[Edit]:
        """Changes that may remove groups of a family, the most first."""
        numbers: Iterable[int] = range(family.dead, 0, -1)
        if family.size == 1:
            numbers = sorted({other.dead for other in self.families if 0 < other.dead <= family.dead}, reverse=True)
        return self._edits_of(config, family, numbers)

    def _edits_of(self, config: PreTrainedConfig, family: Family, numbers: Iterable[int]) -> Iterator[Edit]:
        """Changes that may remove one of some numbers of groups."""
        fields = dict(whole_numbers(config))
        if family.size == 1:
            for number in numbers:
                matching = [name for name, value in fields.items() if value == family.count]
                for name in matching + [name for name, value in fields.items() if value is None]:
                    yield {name: family.count - number}
            return
        counts = {name: value for name, value in fields.items() if value}
        heads: dict[str, list[str]] = {}  # by their configuration: nested ones belong to other parts
        for name, value in counts.items():
            owner, _, field = name.rpartition(".")
            if _HEADS.search(field) and value % family.count == 0:
                heads.setdefault(owner, []).append(name)
        subsets = [
            chosen
            for names in heads.values()
            for together in range(len(names), 0, -1)
            for chosen in itertools.combinations(names, together)
        ]
        for number, chosen in itertools.product(numbers, subsets):
            scaled = {name: counts[name] // family.count * (family.count - number) for name in chosen}
            yield {**scaled, **_head_size(config, counts, chosen, family)}

    def _explain(self, shapes: Shapes) -> dict[Family, int] | None:
        """Number of groups of each family whose removal explains these shapes; None if it does not."""
        removed = {}
        for family in self.families:
            layer = family.members[0][0]
            name = self.names[id(layer.parameter)][0]
            width = shapes.get(name, (0, 0))[layer.axes[1]]
            number, remainder = divmod(family.size * family.count - width, family.size)
            if remainder or number % family.multiple or not 0 <= number <= family.dead:
                return None
            if number:
                removed[family] = number
        expected = dict(self.shapes)
        for name, cuts in self._cuts(removed).items():
            shape = list(expected[name])
            for dim, keep in cuts:
                shape[dim] = int(keep[0].sum())
            expected[name] = tuple(shape)
        return removed if shapes == expected else None

    def _cuts(self, removed: dict[Family, int]) -> dict[str, list[tuple[int, Tensor]]]:
        """Name of a parameter → dimensions to cut, and the masks to keep: [1, size], or [experts, size]."""
        cuts: dict[str, list[tuple[int, Tensor]]] = {}

        def cut(parameter: nn.Parameter | None, dim: int, keep: Tensor) -> None:
            for name in self.names[id(parameter)] if parameter is not None else ():
                cuts.setdefault(name, []).append((dim, keep))

        for family, number in removed.items():
            for layer, groups, dead in family.members:
                cut(layer.parameter, layer.axes[1], _without(groups.columns, dead[:, :number]))
                for producer, served in groups.rows.items():
                    source, keep = self.layers[producer], _without(served, dead[:, :number])
                    cut(source.parameter, source.axes[0], keep)
                    cut(source.bias, 1 if source.separate else 0, keep)
        return cuts

    def state(self, removed: dict[Family, int]) -> dict[str, Tensor]:
        """Copies of the smaller model's tensors."""
        cuts, tensors = self._cuts(removed), self.model.state_dict()
        state = copied({name: tensor for name, tensor in tensors.items() if name not in cuts})
        for name in cuts:
            state[name] = tensors[name]
            for dim, keep in cuts[name]:
                state[name] = _selected(state[name], dim, keep)
        return state

    def remaining(self, removed: dict[Family, int]) -> dict[str, str]:
        """Dead groups that remain as zeros: by family if equal in all its layers, else by layer."""
        zeros: dict[str, str] = {}
        for family in self.families:
            number = removed.get(family, 0)
            reason = family.obstacle(number)
            if reason is None:
                reason = f"{type(self.model.config).__name__} has no setting without them"
                reason += f" ({self.reasons[family]})" if family in self.reasons else ""
            by_layer = {
                layer.name: f"{dead.shape[1] - number} of {family.count} neurons or heads remain as zeros: {reason}"
                for layer, _, dead in family.members
                if dead.shape[1] > number
            }
            alike = len(by_layer) == len(family.members) and len({*by_layer.values()}) == 1
            zeros |= {family.name: next(iter(by_layer.values()))} if alike else by_layer
        return zeros


def _dead_groups(layer: PrunableLayer, groups: StructuredGroups) -> Tensor:
    """The groups whose columns are all zero; of an expert that has more than others, the first."""
    columns = (layer.matrix.unflatten(0, (layer.matrices, -1)) != 0).any(1)
    dead = ~columns.view(layer.matrices, groups.count, groups.size).any(2)
    fewest = int(dead.sum(1).min())
    return torch.stack([of_matrix.nonzero().flatten()[:fewest] for of_matrix in dead]).cpu()


def _without(group_of: Tensor, dropped: Tensor) -> Tensor:
    """Bool [matrices, size], False where the group is dropped; `group_of` is [size], `dropped` [matrices, groups]."""
    return torch.stack([~torch.isin(group_of, of_matrix) for of_matrix in dropped])


def _selected(tensor: Tensor, dim: int, keep: Tensor) -> Tensor:
    """The part of a tensor to keep in a dimension: by [1, size], or by [experts, size] for each expert, on axis 0."""
    if len(keep) == 1:
        return tensor.index_select(dim, keep[0].nonzero().flatten().to(tensor.device))
    experts = zip(tensor, keep, strict=True)
    return torch.stack([_selected(of_expert, dim - 1, mask[None]) for of_expert, mask in experts])


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of tensors; tied ones are copied once."""
    copies: dict[tuple[int, torch.Size], Tensor] = {}
    for tensor in tensors.values():
        if (key := (tensor.data_ptr(), tensor.shape)) not in copies:
            copies[key] = tensor.clone()
    return {name: copies[tensor.data_ptr(), tensor.shape] for name, tensor in tensors.items()}


def _shapes(model: nn.Module) -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def _head_size(config: PreTrainedConfig, fields: dict[str, int], heads: tuple[str, ...], family: Family) -> Edit:
    """The size of a head, if the configuration derives it from the number of heads."""
    prefix, dot, _ = heads[0].rpartition(".")
    for field in prefix.split(".") if prefix else ():
        config = getattr(config, field)
    name = f"{prefix}{dot}head_dim"
    if fields.get(name) or isinstance(getattr(type(config), "head_dim", None), property):
        return {}
    return {name: family.size * family.count // max(fields[head] for head in heads)}


def build_smaller(
    model: PreTrainedModel,
    config: PreTrainedConfig,
    state: Mapping[str, Tensor],
    sources: Mapping[str, str] = MappingProxyType({}),
) -> PreTrainedModel:
    """A smaller model, loaded by transformers.

    Args:
        model: the larger model, for device, dtype, modes and settings.
        config: of the smaller model.
        state: its tensors, by name.
        sources: name of a parameter of the smaller model → its name in the larger one, where these differ.

    Raises:
        MoonshotError: the architecture cannot be created in this size.
    """
    try:
        with without_transformers_bars():
            attention = model.config._attn_implementation
            small = type(model).from_pretrained(
                None, config=config, state_dict=dict(state), dtype=model.dtype, attn_implementation=attention
            )
    except ArithmeticError as error:  # RWKV divides by its number of blocks - 1 when it initializes weights
        raise MoonshotError(f"{type(model).__name__} of this size cannot be created ({reason(error)})") from error
    nn.Module.to(small, model_device(model))
    originals = dict(model.named_parameters(remove_duplicate=False))  # tied ones by all their names
    for name, parameter in small.named_parameters():
        parameter.data = state[name]  # exact where a model mixes dtypes
        parameter.requires_grad_(originals[sources.get(name, name)].requires_grad)
    if getattr(model, "generation_config", None) is not None:
        small.generation_config = copy.deepcopy(model.generation_config)
    small.config.name_or_path, small.name_or_path = model.config.name_or_path, model.name_or_path
    return small.train(model.training)


@torch.no_grad()
def verify_smaller(model: PreTrainedModel, small: PreTrainedModel, inputs: Batch, pairs: Iterable[Pair]) -> None:
    """Compare the remaining decoder layers in float32, and the models' results in their dtype, up to rounding errors.

    Args:
        model: the larger model, in which the weights to be removed have no effect.
        small: the smaller model.
        inputs: of both models.
        pairs: a decoder layer of the model, with its name, and the one of the smaller model.

    Raises:
        MoonshotError: they differ.
    """
    inputs = to_device(inputs, model_device(model))
    name, pairs = type(model).__name__, list(pairs)
    with evaluation_mode(model), evaluation_mode(small):
        with recorded(dict(block for block, _ in pairs)) as calls:
            expected, result = model_result(model, inputs), model_result(small, inputs)
        message = f"the smaller {name} differs from the pruned one in its results: nothing changed"
        require(close(result, expected), message)
        for (block, module), (_, other) in pairs:
            error = _block_error(module, other, *calls[block]) if block in calls else 0.0
            message = f"{block}: the smaller {name} differs here by {error:.2g}: nothing changed"
            require(error <= BLOCK_TOLERANCE, message)
    check_usable(model, small, inputs)


def _block_error(block: nn.Module, other: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """The largest error of a token's change in a decoder layer, relative to that change."""
    arguments = args, without_caches(kwargs)
    args, kwargs = tree_map_only(Tensor, lambda x: x.float() if x.is_floating_point() else x, arguments)
    outputs = []
    for module in (block, other):
        if any(parameter.dtype != torch.float32 for parameter in module.parameters()):
            module = copy.deepcopy(module).float()
        outputs.append(first_tensor(module(*args, **kwargs)))
    hidden = split_hidden(args, kwargs)[0]
    change = outputs[0] - hidden if outputs[0].shape == hidden.shape else outputs[0]
    error, scale = (outputs[1] - outputs[0]).norm(dim=-1), change.norm(dim=-1)
    return float((error / scale.clamp(min=torch.finfo(torch.float32).tiny)).max())
