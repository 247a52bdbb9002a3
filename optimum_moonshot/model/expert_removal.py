"""Take whole experts out of a model, in place: what is left is a smaller model of the same class.

Which field of the configuration counts the experts, and which tensors have an axis of experts, is searched, not tabled:
of a model made of the changed configuration (on the meta device), the parameters of all mixtures have as many experts
as are left, and every other tensor that differs, such as a router's rows and biases, differs along one such axis. That
experts have no other mark than these axes is tried: where they change places along all of them, a mixture gives what it
gave. So the model without some experts is the model whose router does not know them.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..data.batches import Batch
from ..errors import MoonshotError, require
from ..objective.patterns import Experts
from .calls import first_tensor, run_model, without_caches
from .configurations import Edit, edited, whole_numbers
from .layers import onloading_in, visited
from .mixtures import Mixture, Mixtures
from .offload import Offloaded, mark_written
from .onloading import RESIDENT, Weights, by_module, onloaded_in_turn

# Fields that count a router's groups of experts, and how many of them it looks into.
_GROUPS = re.compile(r"(^|\.|_)n_group$|num_expert_groups?$|n_expert_groups?$")
_GROUPS_CHOSEN = re.compile(r"topk_groups?$|limited_groups?$")
# Fields of one configuration that may have to change together.
MOST_FIELDS = 3
# Tokens that must have the same experts after these have changed places: ties in the router's scores may turn.
SAME_TOKENS = 0.75

Cut = Callable[[Tensor, int, str], Tensor]  # (tensor, axis, name of the mixture) → what is left


@dataclass(frozen=True)
class Sliced:
    """A tensor with an axis of experts."""

    owner: nn.Module
    key: str
    axis: int
    mixture: str  # the name of the one that it belongs to

    @property
    def tensor(self) -> Tensor:
        owned = self.owner._parameters if self.key in self.owner._parameters else self.owner._buffers
        return owned[self.key]

    def put(self, tensor: Tensor) -> None:
        """Another tensor in its place; a parameter stays the one that it is."""
        if self.key in self.owner._parameters:
            self.tensor.data = tensor
        else:
            self.owner._buffers[self.key] = tensor


@dataclass(frozen=True, eq=False)
class ExpertRemoval:
    """How so many experts leave every mixture of a model."""

    model: PreTrainedModel
    mixtures: Mixtures
    pattern: Experts  # with the router's groups
    left: int  # experts of a mixture that stay
    edit: Edit  # of the configuration
    sliced: Mapping[str, Sliced]  # by the tensor's name
    attributes: Mapping[str, Mapping[str, Any]]  # module → attribute → its value with fewer experts

    @classmethod
    def plan(cls, model: nn.Module, mixtures: Mixtures, pattern: Experts, probe: Batch) -> "ExpertRemoval":
        """Find how, and try it.

        Args:
            model: in evaluation mode; it is as it was afterwards.
            mixtures: all of it.
            pattern: which share goes.
            probe: a small batch on the model's device.

        Raises:
            MoonshotError: no or too many experts go, or the architecture does not allow it; the message says why.
        """
        require(isinstance(model, PreTrainedModel), f"model is a {type(model).__name__}: give a PreTrainedModel")
        pattern = _in_groups(model.config, mixtures, pattern)
        left = mixtures.count - pattern.removed(mixtures.count)
        edit, sliced, attributes = _search(model, mixtures, left)
        plan = cls(model, mixtures, pattern, left, edit, sliced, attributes)
        plan._try_other_places(probe)
        plan._rehearse(probe)
        return plan

    @property
    def changes(self) -> dict[str, tuple[int | None, int]]:
        """Changed field of the configuration → its value before and after."""
        return {name: (self.mixtures.count, value) for name, value in self.edit.items()}

    @torch.no_grad()
    def apply(self, keep: Mapping[str, Tensor]) -> None:
        """Take the experts out; if that is interrupted, the model is as it was.

        Args:
            keep: mixture → the numbers of the experts that stay, int64, ascending.
        """

        def cut(tensor: Tensor, axis: int, name: str) -> Tensor:
            return tensor.index_select(axis, keep[name].to(tensor.device))

        with ExitStack() as undo:
            for weights, some in self._by_place().items():
                if isinstance(weights, Offloaded):
                    undo.callback(weights.restore, weights.changes())
                with weights.onloaded():
                    self._cut(some, cut, undo if weights is RESIDENT else ExitStack())
                    for each in some:
                        mark_written(each.owner, each.key)
            self._configure(undo)
            undo.pop_all()
        for each in self.sliced.values():
            each.tensor.grad = None  # it was that of all experts

    def _by_place(self) -> dict[Weights, list[Sliced]]:
        """The tensors by where the weights of their block come from."""
        inside, found = by_module(visited(self.model)), dict[Weights, list[Sliced]]()
        for each in self.sliced.values():
            found.setdefault(inside.get(each.owner, RESIDENT), []).append(each)
        return found

    @staticmethod
    def _cut(sliced: Iterable[Sliced], cut: Cut, undo: ExitStack) -> None:
        """Smaller tensors, until `undo` is closed."""
        for each in sliced:
            old = each.tensor.data
            undo.callback(each.put, old)
            each.put(cut(old, each.axis, each.mixture))

    def _configure(self, undo: ExitStack) -> None:
        """The attributes and settings of the smaller model, until `undo` is closed."""
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
    def _rehearse(self, probe: Batch) -> None:
        """Run the model with the first experts of each mixture alone: views, which take no memory.

        Raises:
            MoonshotError: it does not run.
        """

        def cut(tensor: Tensor, axis: int, name: str) -> Tensor:
            return tensor.narrow(axis, 0, self.left)

        @contextmanager
        def within(block: nn.Module) -> Iterator[None]:
            modules = set(block.modules())
            with ExitStack() as undo:
                self._cut((each for each in self.sliced.values() if each.owner in modules), cut, undo)
                yield

        try:
            with ExitStack() as undo:
                self._cut(self._by_place().get(RESIDENT, ()), cut, undo)
                self._configure(undo)
                undo.enter_context(onloaded_in_turn(visited(self.model), within))
                run_model(self.model, probe)
        except MoonshotError as error:
            raise MoonshotError(
                f"pattern='experts': with {self.left} of {self.mixtures.count} experts it does not run: {error}"
            ) from None

    @torch.no_grad()
    def _try_other_places(self, probe: Batch) -> None:
        """Compare every mixture with itself after its experts have changed places.

        Raises:
            MoonshotError: something else than their scores says which tokens an expert gets.
        """
        calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        owners = {mixture.name: self._owner(mixture) for mixture in self.mixtures}
        with ExitStack() as hooks:
            for name in {*owners.values()}:

                def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], name: str = name) -> None:
                    calls.setdefault(name, (args, kwargs))

                module = self.model.get_submodule(name)
                hooks.callback(module.register_forward_pre_hook(keep, with_kwargs=True).remove)
            hooks.enter_context(onloaded_in_turn(visited(self.model)))
            run_model(self.model, probe)
        size = self.mixtures.count // self.pattern.groups
        order = torch.arange(self.mixtures.count).view(-1, size).roll(1, 1).flatten()
        present = onloading_in(self.model)
        for name, owner in owners.items():
            module = self.model.get_submodule(owner)
            with present(module):
                turned = {
                    key.removeprefix(f"{owner}."): each.tensor.index_select(each.axis, order.to(each.tensor.device))
                    for key, each in self.sliced.items()
                    if each.mixture == name
                }
                require(
                    owner in calls and _agree(module, turned, *calls[owner]),
                    f"{owner}: its experts cannot leave: something else than the router's scores says which tokens "
                    "they get",
                )

    def _owner(self, mixture: Mixture) -> str:
        """The name of the smallest module with all tensors that have an axis of this mixture's experts."""
        names = [name.split(".") for name, each in self.sliced.items() if each.mixture == mixture.name]
        return ".".join(_common(names))


def _in_groups(config: PreTrainedConfig, mixtures: Mixtures, pattern: Experts) -> Experts:
    """The pattern with the router's groups; an error unless it removes some experts, and leaves enough."""
    fields, count, chosen = dict(whole_numbers(config)), mixtures.count, mixtures.chosen
    groups = max([value for name, value in fields.items() if _GROUPS.search(name) and value], default=1)
    groups = groups if count % groups == 0 else 1
    looked = [value for name, value in fields.items() if _GROUPS_CHOSEN.search(name) and value]
    found = Experts(pattern.sparsity, groups)
    left, size = count - found.removed(count), count // groups
    each = f"each of the {groups} groups of {size}" if groups > 1 else f"{count}"
    told = f"sparsity={pattern.sparsity:g}: of {each} experts"
    require(left < count, f"{told} that rounds to none; give at least {_least(size):.4g}")
    reach = left // groups * (looked[0] if looked and groups > 1 else groups)
    of_the = f"of the {reach} that it chooses among" if reach < left else "of them"
    require(reach >= chosen, f"{told} that leaves {left // groups}, and the router sends a token to {chosen} {of_the}")
    return found


def _least(size: int) -> float:
    """The smallest share, of four digits, that is one of so many experts."""
    share = round(0.5 / size, 4)
    while round(share * size) < 1:
        share += 1e-4
    return share


def _search(
    model: PreTrainedModel, mixtures: Mixtures, left: int
) -> tuple[Edit, dict[str, Sliced], dict[str, dict[str, Any]]]:
    """The fields to change, the tensors with an axis of experts, and the attributes that change with them."""
    cls, reason = type(model), ""
    counting = [name for name, value in whole_numbers(model.config) if value == mixtures.count]
    counting.sort(key=lambda name: "expert" not in name)  # what is called so, first
    with torch.device("meta"):
        base = cls(edited(model.config, {}))
    for number in range(1, min(MOST_FIELDS, len(counting)) + 1):
        for chosen in combinations(counting, number):
            edit = dict.fromkeys(chosen, left)
            try:
                with torch.device("meta"):
                    small = cls(edited(model.config, edit))
            except Exception as error:  # a model may refuse its configuration in any way
                told = str(error).strip().rpartition("\n")[2].strip()
                reason = reason or (f" ({told})" if all("expert" in name for name in chosen) else "")
                continue
            sliced = _explained(model, mixtures, base, small, left)
            if sliced is not None:
                return edit, sliced, _attributes(base, small)
    name = type(model.config).__name__
    raise MoonshotError(f"pattern='experts': {name} has no setting with {left} of {mixtures.count} experts{reason}")


def _explained(
    model: nn.Module, mixtures: Mixtures, base: nn.Module, small: nn.Module, left: int
) -> dict[str, Sliced] | None:
    """The tensors with an axis of experts; None where what differs is not just that."""
    before, after = _tensors(base), _tensors(small)
    if before.keys() != after.keys():
        return None
    found: dict[str, Sliced] = {}
    own = {id(parameter) for mixture in mixtures for parameter in mixture.parameters}
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
        own.discard(id(tensor))
        (axis,), (owner, _, key) = axes, name.rpartition(".")
        found[name] = Sliced(model.get_submodule(owner), key, axis, mixture)
    return None if own else found


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, tied ones under every name."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def _belongs(name: str, mixtures: Mixtures) -> str | None:
    """The mixture whose name has the most in common with a tensor's; None where two have as much."""
    shared = {mixture.name: len(_common([name.split("."), mixture.name.split(".")])) for mixture in mixtures}
    most = max(shared.values())
    nearest = [mixture for mixture, length in shared.items() if length == most]
    return nearest[0] if len(nearest) == 1 else None


def _common(names: list[list[str]]) -> list[str]:
    """The parts that several names begin with."""
    found = []
    for parts in zip(*names, strict=False):
        if len({*parts}) > 1:
            break
        found.append(parts[0])
    return found


def _attributes(base: nn.Module, small: nn.Module) -> dict[str, dict[str, Any]]:
    """What else a model with fewer experts has otherwise: numbers that its modules took from the configuration."""
    found: dict[str, dict[str, Any]] = {}
    for name, module in base.named_modules():
        other = vars(small.get_submodule(name))
        for attribute, value in vars(module).items():
            mine = not attribute.startswith("_") and attribute in other and _is_plain(value)
            if mine and _is_plain(other[attribute]) and other[attribute] != value:
                found.setdefault(name, {})[attribute] = other[attribute]
    return found


def _is_plain(value: Any) -> bool:
    """Whether it is made of numbers and strings alone."""
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    return isinstance(value, int | float | str) or (isinstance(value, list | tuple) and all(map(_is_plain, value)))


def _configurations(model: PreTrainedModel, path: str) -> Iterator[PreTrainedConfig]:
    """The configurations in a model that have a field: the model's own, and copies that its parts have."""
    *parents, field = path.split(".")
    owner: Any = model.config
    for parent in parents:
        owner = getattr(owner, parent)
    held = [vars(module).get("config") for module in model.modules()]
    alike = [config for config in held if type(config) is type(owner) and hasattr(config, field)]
    yield from {id(config): config for config in (owner, *alike)}.values()


def _agree(module: nn.Module, turned: dict[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a module gives most tokens the same with other tensors in place of its own."""
    kwargs = without_caches(kwargs)
    expected = first_tensor(module(*args, **kwargs)).float()
    found = first_tensor(torch.func.functional_call(module, turned, args, kwargs)).float()
    tolerance = 1e-3 if next(module.parameters()).dtype == torch.float32 else 2e-2
    error, scale = (found - expected).norm(dim=-1), expected.norm(dim=-1)
    return float((error <= tolerance * scale + 1e-30).float().mean()) >= SAME_TOKENS
