"""Removes whole experts from a model, in place: the result is a smaller model of the same class.

The field of the configuration with the number of experts, and the tensors with an axis of experts, are found by search,
not from a table: in a model created from the changed configuration (on the meta device), the parameters of all mixtures
have the remaining number of experts, and every other tensor that differs, such as a router's rows and biases, differs
along one such axis. A test checks that these axes alone identify an expert: the output of a mixture is invariant to a
permutation along all of them. So removing experts has the same effect as never selecting them.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import combinations
from os.path import commonprefix
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..data.batches import Batch
from ..errors import MoonshotError, require
from ..model.calls import first_tensor, recorded, run_model, without_caches
from ..model.compaction import Compaction
from ..model.layers import by_module, onloaded_in_turn, onloading_in, visited
from ..model.mixtures import Mixtures
from ..model.model_info import Edit, edited, last_line, on_meta_device, whole_numbers
from ..model.weights import RESIDENT, Weights, mark_written
from ..objective.patterns import Experts

# Fields with a router's number of groups of experts, and with the number of groups that it selects.
_GROUPS = re.compile(r"(^|\.|_)n_group$|num_expert_groups?$|n_expert_groups?$")
_GROUPS_CHOSEN = re.compile(r"topk_groups?$|limited_groups?$")
# The largest number of fields of a configuration that are changed together.
MOST_FIELDS = 3
# Least fraction of tokens with equal outputs after a permutation: ties in the router's scores may resolve differently.
EQUAL_FRACTION = 0.75


@dataclass(frozen=True)
class Sliced:
    """A tensor with an axis of experts."""

    owner: nn.Module
    key: str
    axis: int
    mixture: str  # its name

    @property
    def tensor(self) -> Tensor:
        tensor = self.owner._parameters.get(self.key, self.owner._buffers.get(self.key))
        assert tensor is not None
        return tensor

    def remaining(self, keep: Mapping[str, Tensor]) -> Tensor:
        """Return the tensor of the experts in `keep` only; see `ExpertRemoval.apply`."""
        tensor = self.tensor.data
        return tensor.index_select(self.axis, keep[self.mixture].to(tensor.device))

    def put(self, tensor: Tensor) -> None:
        """Replace the tensor; a parameter remains the same object."""
        if self.key in self.owner._parameters:
            self.tensor.data = tensor
        else:
            self.owner._buffers[self.key] = tensor


@dataclass(frozen=True, eq=False)
class ExpertRemoval:
    """The removal of a number of experts from every mixture of a model."""

    model: PreTrainedModel
    mixtures: Mixtures
    pattern: Experts  # with the router's groups
    left: int  # remaining experts of a mixture
    edit: Edit  # of the configuration
    sliced: Mapping[str, Sliced]  # by the tensor's name
    attributes: Mapping[str, Mapping[str, Any]]  # module → attribute → its value with fewer experts

    @classmethod
    def plan(cls, model: nn.Module, mixtures: Mixtures, pattern: Experts, probe: Batch) -> "ExpertRemoval":
        """Find out how to remove experts from a model in evaluation mode, and test it on a small batch.

        Raises `MoonshotError` if no or too many experts would be removed, or the architecture does not allow it.
        """
        if not isinstance(model, PreTrainedModel):
            raise MoonshotError(f"model is a {type(model).__name__}", hint="pass a PreTrainedModel")
        pattern = _in_groups(model.config, mixtures, pattern)
        left = mixtures.count - pattern.removed(mixtures.count)
        edit, sliced, attributes = _search(model, mixtures, left)
        plan = cls(model, mixtures, pattern, left, edit, sliced, attributes)
        plan._test_permutation(probe)
        plan._test_run(probe)
        return plan

    def compaction(self, removed: dict[str, int], parameters: tuple[int, int]) -> dict[str, Any]:
        """The report's compaction, with the number of removed experts by mixture, and parameters before and after."""
        changes: dict[str, tuple[int | None, int]] = {
            name: (self.mixtures.count, value) for name, value in self.edit.items()
        }
        return Compaction(changes, removed, {}, parameters).to_dict()

    @contextmanager
    def configured(self) -> Iterator[None]:
        """A context with the attributes and the configuration of the smaller model, but not with its tensors."""
        with ExitStack() as undo:
            self._configure(undo)
            yield

    @torch.no_grad()
    def tensors(self, block: str, keep: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the smaller tensors of an onloaded block, by name in the block; for `keep` see `apply`."""
        inside = {name: sliced for name, sliced in self.sliced.items() if name.startswith(f"{block}.")}
        return {name.removeprefix(f"{block}."): sliced.remaining(keep) for name, sliced in inside.items()}

    @contextmanager
    def removed(self, keep: Mapping[str, Tensor]) -> Iterator[None]:
        """A context in which a model in memory has only the experts in `keep`; see `apply`."""
        with ExitStack() as undo:
            self._cut(self.sliced.values(), lambda sliced: sliced.remaining(keep), undo)
            self._configure(undo)
            yield

    @torch.no_grad()
    def apply(self, keep: Mapping[str, Tensor], finish: Callable[[], None] = lambda: None) -> None:
        """Remove all experts except `keep` (mixture → ascending int64 indices), then call `finish`.

        If either fails, the model is unchanged.
        """
        with ExitStack() as undo:
            for weights, changes in self._by_weights().items():
                undo.callback(weights.restore, weights.changes())
                with weights.onloaded():
                    restored = undo if weights is RESIDENT else ExitStack()
                    self._cut(changes, lambda sliced: sliced.remaining(keep), restored)
                    for sliced in changes:
                        mark_written(sliced.owner, sliced.key)
            self._configure(undo)
            finish()
            undo.pop_all()
        for sliced in self.sliced.values():
            sliced.tensor.grad = None  # the gradient still has the removed experts

    def _by_weights(self) -> dict[Weights, list[Sliced]]:
        """Group the tensors by the `Weights` of their block."""
        weights, groups = by_module(visited(self.model)), dict[Weights, list[Sliced]]()
        for sliced in self.sliced.values():
            groups.setdefault(weights.get(sliced.owner, RESIDENT), []).append(sliced)
        return groups

    @staticmethod
    def _cut(tensors: Iterable[Sliced], smaller: Callable[[Sliced], Tensor], undo: ExitStack) -> None:
        """Replace tensors by smaller tensors, until `undo` is closed."""
        for sliced in tensors:
            undo.callback(sliced.put, sliced.tensor.data)
            sliced.put(smaller(sliced))

    def _configure(self, undo: ExitStack) -> None:
        """Set the attributes and configuration of the smaller model, until `undo` is closed."""
        for name, values in self.attributes.items():
            module = self.model.get_submodule(name)
            for attribute, value in values.items():
                undo.callback(setattr, module, attribute, getattr(module, attribute))
                setattr(module, attribute, value)
        for path, value in self.edit.items():
            for config in _configurations(self.model, path):
                field = path.rpartition(".")[2]
                undo.callback(setattr, config, field, getattr(config, field))
                setattr(config, field, value)

    @torch.no_grad()
    def _test_run(self, probe: Batch) -> None:
        """Run the model with views of the first experts of each mixture, which need no memory."""

        def first(sliced: Sliced) -> Tensor:
            return sliced.tensor.data.narrow(sliced.axis, 0, self.left)

        @contextmanager
        def within(block: nn.Module) -> Iterator[None]:
            modules = set(block.modules())
            with ExitStack() as undo:
                self._cut((sliced for sliced in self.sliced.values() if sliced.owner in modules), first, undo)
                yield

        try:
            with ExitStack() as undo:
                self._cut(self._by_weights().get(RESIDENT, ()), first, undo)
                self._configure(undo)
                undo.enter_context(onloaded_in_turn(visited(self.model), within))
                run_model(self.model, probe)
        except MoonshotError as error:
            message = f"with {self.left} of {self.mixtures.count} experts the model does not run: {error}"
            raise MoonshotError(message, field="pattern", value="experts") from None

    @torch.no_grad()
    def _test_permutation(self, probe: Batch) -> None:
        """Raise `MoonshotError` unless every mixture is invariant to a permutation of its experts."""
        owners: dict[str, str] = {}  # mixture → the smallest module with all tensors that have an axis of its experts
        for mixture in self.mixtures:
            names = [name.split(".") for name, sliced in self.sliced.items() if sliced.mixture == mixture.name]
            owners[mixture.name] = ".".join(commonprefix(names))
        modules = {owner: self.model.get_submodule(owner) for owner in owners.values()}
        with recorded(modules) as calls, onloaded_in_turn(visited(self.model)):
            run_model(self.model, probe)
        size = self.mixtures.count // self.pattern.groups
        order = torch.arange(self.mixtures.count).view(-1, size).roll(1, 1).flatten()
        onloaded = onloading_in(self.model)
        for name, owner in owners.items():
            with onloaded(modules[owner]):
                permuted = {
                    key.removeprefix(f"{owner}."): sliced.remaining({name: order})
                    for key, sliced in self.sliced.items()
                    if sliced.mixture == name
                }
                invariant = owner in calls and _agree(modules[owner], permuted, *calls[owner])
                reason = "its experts cannot be removed: their tokens depend on more than the router's scores"
                require(invariant, f"{owner}: {reason}")


def _in_groups(config: PreTrainedConfig, mixtures: Mixtures, pattern: Experts) -> Experts:
    """The pattern with the router's groups; raises unless it removes some experts, and enough remain."""
    fields, count, chosen = dict(whole_numbers(config)), mixtures.count, mixtures.chosen
    groups = max([value for name, value in fields.items() if _GROUPS.search(name) and value], default=1)
    groups = groups if count % groups == 0 else 1
    selected = [value for name, value in fields.items() if _GROUPS_CHOSEN.search(name) and value]
    grouped = Experts(pattern.sparsity, groups)
    left, size = count - grouped.removed(count), count // groups
    experts = f"{size} experts in each of the {groups} groups" if groups > 1 else f"{count} experts"
    message, hint, sparsity = f"it removes none of {experts}", f"set at least {_least(size):.4g}", pattern.sparsity
    require(left < count, message, field="sparsity", value=sparsity, hint=hint)
    reach = left // groups * (selected[0] if selected and groups > 1 else groups)
    among = f"of the {reach} in its selected groups" if reach < left else "of them"
    message = f"{left // groups} of {experts} would remain, and the router sends a token to {chosen} {among}"
    require(reach >= chosen, message, field="sparsity", value=sparsity)
    return grouped


def _least(size: int) -> float:
    """Return the smallest fraction, to four digits, that removes an expert if there are `size` experts."""
    fraction = round(0.5 / size, 4)
    while round(fraction * size) < 1:
        fraction += 1e-4
    return fraction


def _search(
    model: PreTrainedModel, mixtures: Mixtures, left: int
) -> tuple[Edit, dict[str, Sliced], dict[str, dict[str, Any]]]:
    """The fields to change, the tensors with an axis of experts, and the attributes that change with them."""
    cls, reason = type(model), ""
    counting = [name for name, value in whole_numbers(model.config) if value == mixtures.count]
    counting.sort(key=lambda name: "expert" not in name)  # likely names first
    base = on_meta_device(cls, edited(model.config, {}))
    for number in range(1, min(MOST_FIELDS, len(counting)) + 1):
        for chosen in combinations(counting, number):
            edit = dict.fromkeys(chosen, left)
            try:
                small = on_meta_device(cls, edited(model.config, edit))
            except Exception as error:  # a model class may raise any error for a configuration
                reason = reason or (f" ({last_line(error)})" if all("expert" in name for name in chosen) else "")
                continue
            sliced = _explained(model, mixtures, base, small, left)
            if sliced is not None:
                return edit, sliced, _attributes(base, small)
    message = f"{type(model.config).__name__} has no setting with {left} of {mixtures.count} experts{reason}"
    raise MoonshotError(message, field="pattern", value="experts")


def _explained(
    model: nn.Module, mixtures: Mixtures, base: nn.Module, small: nn.Module, left: int
) -> dict[str, Sliced] | None:
    """The tensors with an axis of experts; None if other differences remain."""
    before, after = _tensors(base), _tensors(small)
    if before.keys() != after.keys():
        return None
    explained: dict[str, Sliced] = {}
    missing = {id(parameter) for mixture in mixtures for parameter in mixture.parameters}
    seen: set[int] = set()
    for name, tensor in _tensors(model).items():
        if name not in before or before[name].shape == after[name].shape or id(tensor) in seen:
            continue
        sizes = enumerate(zip(tensor.shape, after[name].shape, strict=False))
        axes = {axis: pair for axis, pair in sizes if pair[0] != pair[1]}
        mixture = _belongs(name, mixtures)
        alone = tensor.shape == before[name].shape and [*axes.values()] == [(mixtures.count, left)]
        if not alone or mixture is None:
            return None
        seen.add(id(tensor))
        missing.discard(id(tensor))
        (axis,), (owner, _, key) = axes, name.rpartition(".")
        explained[name] = Sliced(model.get_submodule(owner), key, axis, mixture)
    return None if missing else explained


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name; a tied parameter has an entry for each of its names."""
    return dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])


def _belongs(name: str, mixtures: Mixtures) -> str | None:
    """The mixture whose name shares the longest prefix with a tensor's; None if ambiguous."""
    shared = {mixture.name: len(commonprefix([name.split("."), mixture.name.split(".")])) for mixture in mixtures}
    most = max(shared.values())
    nearest = [mixture for mixture, length in shared.items() if length == most]
    return nearest[0] if len(nearest) == 1 else None


def _attributes(base: nn.Module, small: nn.Module) -> dict[str, dict[str, Any]]:
    """The attributes that differ in a model with fewer experts: numbers that modules copied from the configuration."""
    changes: dict[str, dict[str, Any]] = {}
    for name, module in base.named_modules():
        other = vars(small.get_submodule(name))
        for attribute, value in vars(module).items():
            comparable = not attribute.startswith("_") and attribute in other and _is_plain(value)
            if comparable and _is_plain(other[attribute]) and other[attribute] != value:
                changes.setdefault(name, {})[attribute] = other[attribute]
    return changes


def _is_plain(value: Any) -> bool:
    """Whether a value consists of numbers and strings."""
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    return isinstance(value, int | float | str) or (isinstance(value, list | tuple) and all(map(_is_plain, value)))


def _configurations(model: PreTrainedModel, path: str) -> Iterator[PreTrainedConfig]:
    """Yield the configurations that have the field at `path`: the model's, and copies in its modules."""
    *parents, field = path.split(".")
    owner: Any = model.config
    for parent in parents:
        owner = getattr(owner, parent)
    copies = [vars(module).get("config") for module in model.modules()]
    alike = [config for config in copies if type(config) is type(owner) and hasattr(config, field)]
    yield from {id(config): config for config in (owner, *alike)}.values()


def _agree(module: nn.Module, permuted: dict[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether most tokens have the same outputs if the tensors in `permuted` replace the module's tensors."""
    kwargs = without_caches(kwargs)
    expected = first_tensor(module(*args, **kwargs)).float()
    output = first_tensor(torch.func.functional_call(module, permuted, args, kwargs)).float()
    tolerance = 1e-3 if next(module.parameters()).dtype == torch.float32 else 2e-2
    error, scale = (output - expected).norm(dim=-1), expected.norm(dim=-1)
    return float((error <= tolerance * scale + 1e-30).float().mean()) >= EQUAL_FRACTION
