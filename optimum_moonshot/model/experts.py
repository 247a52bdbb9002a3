"""Experts whose weights are fused to parameters of three dimensions: their normal form, and how their calls are seen.

A mixture of experts keeps the matrices of its E experts in parameters [E, out, in] (or [E, in, out]) of one module,
which calls no Linear: a hook would see nothing. But in its plain implementation the module takes one expert's matrix
after another and multiplies that expert's tokens by it. So while a pass is watched, the module has a stand-in for the
parameter, which behaves as it does and tells of every product with a part of it. No family's forward is written anew,
and none is told from another by its name.

Every expert is a group of the layer's rows, with a Gram matrix of its own, pruned as a matrix of its own.
"""

import copy
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..errors import MoonshotError, require
from .layer_adapters import LayerAdapter, Pair, See

_IMPLEMENTATION = "_experts_implementation"  # of a configuration: transformers' choice of how experts are computed


def expert_keys(module: nn.Module) -> list[str]:
    """The names of a module's parameters that hold one matrix for each expert.

    It counts its experts in some attribute, which has `expert` in its name, as many as the parameters have matrices.
    """
    if isinstance(module, nn.Conv1d | nn.ConvTranspose1d):
        return []
    fused = {key: len(parameter) for key, parameter in module._parameters.items() if _is_fused(parameter)}
    return [key for key, count in fused.items() if count in _counts(module)]


def stacks_experts(module: nn.Module) -> bool:
    """Whether a module has matrices [experts · out, in], one expert below the other, which nothing here takes apart."""
    most = max(_counts(module), default=0)
    parameters = [parameter for parameter in module._parameters.values() if parameter is not None]
    return most > 1 and any(each.ndim == 2 and len(each) > most and len(each) % most == 0 for each in parameters)


def _counts(module: nn.Module) -> set[int]:
    """The numbers in a module's attributes that speak of experts."""
    return {value for name, value in vars(module).items() if "expert" in name and type(value) is int}


@contextmanager
def plain_implementation(module: nn.Module) -> Iterator[None]:
    """Meanwhile a module of experts multiplies them one by one, where its configuration leaves the choice.

    It has a configuration of its own for that time: the one of the model is shared.
    """
    config = vars(module).get("config")
    chooses = "is_transposed" in vars(module) and hasattr(config, _IMPLEMENTATION)  # transformers' decorator sets both
    if chooses:
        vars(module)["config"] = plain = copy.copy(config)
        setattr(plain, f"{_IMPLEMENTATION}_internal", "eager")
    try:
        yield
    finally:
        if chooses:
            vars(module)["config"] = config


def _is_fused(parameter: nn.Parameter | None) -> bool:
    return parameter is not None and parameter.ndim == 3 and min(parameter.shape[1:]) > 1


@dataclass(frozen=True)
class ExpertsAdapter(LayerAdapter):
    """One fused parameter of a module of experts, or some of its experts.

    `span` is the first of them and the one behind the last; None is all. `expert` says whose calls it is the form of,
    where it is one's.
    """

    key: str = ""
    span: tuple[int, int] | None = None
    expert: int | None = None
    everywhere: bool = False  # the calls are those of all tokens, not of those that are sent to an expert

    kind = nn.Module
    dimensions = 3
    separate: ClassVar[bool] = True

    @property
    def parameter(self) -> nn.Parameter | None:
        return self.module._parameters.get(self.key)

    @property
    def axes(self) -> tuple[int, int]:  # type: ignore[override] # it differs from module to module
        return (2, 1) if self.transposed else (1, 2)

    @property
    def transposed(self) -> bool:
        """Whether the matrices are stored [in, out]: as the module says, else as its parameters fit together."""
        told = getattr(self.module, "is_transposed", None)
        if isinstance(told, bool):
            return told
        shapes = [tuple(self.module._parameters[key].shape[1:]) for key in expert_keys(self.module)]
        if len(shapes) < 2:
            return False
        (_, reads), (gives, hidden) = shapes[0], shapes[-1]
        return reads != gives and shapes[0][0] == hidden

    @property
    def experts(self) -> range:
        """The numbers of the experts that it is of."""
        return range(len(self.parameter)) if self.span is None else range(*self.span)

    @property
    def groups(self) -> int:
        return len(self.experts)

    @property
    def shape(self) -> tuple[int, int]:
        out, size = (self.parameter.shape[axis] for axis in self.axes)
        return self.groups * out, size

    @property
    def part(self) -> slice:
        if self.expert is None:
            return slice(None)
        index = self.expert - self.experts.start
        return slice(index, index + 1)

    @property
    def reads(self) -> Hashable:
        return id(self.module), self.key, self.expert

    def as_matrix(self, tensor: Tensor) -> Tensor:
        tensor = self._mine(tensor)
        return (tensor.transpose(1, 2) if self.transposed else tensor).flatten(0, 1)

    def as_parameter(self, matrix: Tensor) -> Tensor:
        parts = matrix.unflatten(0, (self.groups, -1))
        return parts.transpose(1, 2) if self.transposed else parts

    def watch(self, see: See) -> "_Watch":
        return _Watch(self, see)

    def _is_plain(self) -> bool:
        return True

    def token_mask(self, inputs: Tensor, mask: Tensor | None) -> Tensor | None:
        require(
            mask is None or bool(mask.all()),
            "the tokens that an expert reads do not show which are padding: use samples of equal length, or "
            "batch_size=1",
        )
        return None

    def tokens(self, inputs: Tensor, mask: Tensor | None) -> Iterator[Tensor]:
        yield self._grouped(inputs)

    def pairs(self, inputs: Tensor, delta: Tensor, mask: Tensor | None, samples: int) -> Iterator[Pair]:
        require(
            samples == 1,
            f"the tokens that an expert reads do not show which of the batch's {samples} samples they belong to: use "
            "batch_size=1",
        )
        yield Pair(self._grouped(inputs)[None], self._grouped(delta)[None], True)

    def _grouped(self, tensor: Tensor) -> Tensor:
        """[groups, tokens, features] in float32."""
        return (self._mine(tensor) if self.expert is None else tensor.reshape(1, -1, tensor.shape[-1])).float()

    def _mine(self, tensor: Tensor) -> Tensor:
        """The part of what has all experts on its first axis."""
        return tensor if self.span is None else tensor[slice(*self.span)]


class _Watch:
    """One who is told of the products of some experts, until it is removed."""

    def __init__(self, form: ExpertsAdapter, see: See):
        self.adapter, self.see = form, see
        self.watched = _watched(form.module)
        self.watched.add(self)

    def remove(self) -> None:
        self.watched.remove(self)


class _Watched:
    """A module of experts while it is watched: with stand-ins for its parameters, and its plain implementation."""

    def __init__(self, module: nn.Module):
        self.module = module
        self.watches: list[_Watch] = []
        self.showing: int | None = None  # the expert that all tokens are being shown to
        self.due: dict[str, int] = {}  # key → how many of them its product with that expert has not had
        self.changes = ExitStack()  # taken back with the last watch
        self.changes.enter_context(plain_implementation(module))
        self.changes.callback(module.register_forward_pre_hook(self._before, with_kwargs=True).remove)

    def add(self, watch: _Watch) -> None:
        self.watches.append(watch)

    def remove(self, watch: _Watch) -> None:
        self.watches.remove(watch)
        if not any(other.adapter.key == watch.adapter.key for other in self.watches):
            vars(self.module).pop(watch.adapter.key, None)
        if not self.watches:
            self.changes.close()
            _WATCHED.pop(self.module, None)

    def product(self, key: str, expert: int | None, turned: bool, inputs: Tensor, output: Tensor) -> Tensor:
        """A product of some tokens with one expert's matrix, or of each expert's tokens with its own.

        Args:
            key: of the parameter.
            expert: whose; None is all of them.
            turned: whether the matrix was used as [in, out].
            inputs: [..., in].
            output: [..., out].
        """
        for watch in self.watches:
            form = watch.adapter
            if form.key != key or form.everywhere != (self.showing is not None):
                continue
            if expert is not None and (expert not in form.experts or self.showing not in (None, expert)):
                continue
            sizes = form.shape[1], form.shape[0] // form.groups
            fits = turned == form.transposed and (inputs.shape[-1], output.shape[-1]) == sizes
            require(fits, f"{type(self.module).__name__}.{key} is used in another layout than that it seems to have")
            found = watch.see(replace(form, expert=expert), inputs, output)
            output = output if found is None else found
        if expert is not None and expert == self.showing and key in self.due:
            self.due[key] -= inputs[..., 0].numel()
            if not any(self.due.values()):
                raise _AllShown
        return output

    @torch.no_grad()
    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a call: stand-ins for the weights as they are now; and every expert that someone watches everywhere
        computes all tokens of the call.
        """
        for form in {watch.adapter.key: watch.adapter for watch in self.watches}.values():
            vars(module)[form.key] = _StandIn.of(form.parameter, self, form.key)
        wanted: dict[int, set[str]] = {}
        for form in (watch.adapter for watch in self.watches if watch.adapter.everywhere):
            for expert in form.experts:
                wanted.setdefault(expert, set()).add(form.key)
        try:
            for self.showing in sorted(wanted):
                keys = wanted[self.showing]
                tokens, forged_args, forged_kwargs = _routed_to(module, self.showing, args, kwargs)
                self.due = dict.fromkeys(keys, tokens)
                with suppress(_AllShown):
                    module.forward(*forged_args, **forged_kwargs)
        finally:
            self.showing, self.due = None, {}


class _AllShown(Exception):
    """Ends a call whose output nobody wants, once an expert has had all tokens."""


_WATCHED: "WeakKeyDictionary[nn.Module, _Watched]" = WeakKeyDictionary()


def _watched(module: nn.Module) -> _Watched:
    if module not in _WATCHED:
        _WATCHED[module] = _Watched(module)
    return _WATCHED[module]


def routing(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
    """The numbers of every token's experts, int [T, k], and their weights [T, k]; None where a call does not say them.

    Args:
        args, kwargs: of a call of a module of experts.
    """
    given = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
    index = [each for each in given if not each.is_floating_point() and each.ndim == 2]
    weights = [each for each in given if index and each.is_floating_point() and each.shape == index[0].shape]
    return (index[0], weights[0]) if len(index) == 1 and len(weights) == 1 else None


def with_others(
    args: tuple[Any, ...], kwargs: dict[str, Any], *changes: tuple[Tensor, Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with other tensors in the places of some.

    Args:
        args, kwargs: of the call.
        changes: a tensor of any shape among them, and what stands in its place.
    """
    others = {id(old): new for old, new in changes}
    changed = {name: others.get(id(value), value) for name, value in kwargs.items()}
    return tuple(others.get(id(value), value) for value in args), changed


def _routed_to(
    module: nn.Module, expert: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[int, tuple[Any, ...], dict[str, Any]]:
    """The number of tokens, and the arguments of a call, but with one expert as the first choice of all of them.

    The output means nothing. What else they choose is the last expert, which most modules compute after that one; with
    the last as their first choice, they have another expert for every other choice.

    Raises:
        MoonshotError: the module does not take, of every token, the numbers of its experts and their weights.
    """
    found = routing(args, kwargs)
    if found is None:
        raise MoonshotError(
            f"{type(module).__name__} does not say which token it sends to which expert: leave expert_tokens and "
            'under_calibrated_experts at "routed"'
        )
    index, _ = found
    places = torch.arange(index.shape[1], device=index.device)
    last = len(module._parameters[expert_keys(module)[0]]) - 1
    forged = torch.where(places == 0, expert, places - 1 if expert == last else last).expand_as(index)
    return len(index), *with_others(args, kwargs, (index, forged))


class _StandIn(Tensor):
    """A parameter of experts, or one expert's matrix, that tells of its products."""

    watched: _Watched
    key: str
    expert: int | None  # None is the whole parameter
    turned: bool  # whether its last two axes have changed places

    @staticmethod
    def of(tensor: Tensor, watched: _Watched, key: str, expert: int | None = None, turned: bool = False) -> "_StandIn":
        found = tensor.detach().as_subclass(_StandIn)
        found.watched, found.key, found.expert, found.turned = watched, key, expert, turned
        return found

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*(_plain(each) for each in args), **{name: _plain(each) for name, each in kwargs.items()})
        mine = next((each for each in (*args, *kwargs.values()) if isinstance(each, _StandIn)), None)
        if mine is None or not isinstance(result, Tensor):
            return result
        product = _product(func, args, kwargs, mine)
        if product is not None:
            inputs, turned = product
            return mine.watched.product(mine.key, mine.expert, turned != mine.turned, inputs, result)
        return mine.followed(func, args, result)

    def followed(self, func: Callable[..., Any], args: tuple[Any, ...], result: Tensor) -> Tensor:
        """What an operation that is no product makes of it."""
        if result.shape == self.shape and result.is_floating_point() and func in _KEEPING:
            return _StandIn.of(result, self.watched, self.key, self.expert, self.turned)
        if func in _TURNING and result.ndim == self.ndim and result.shape[-2:] == self.shape[:-3:-1]:
            return _StandIn.of(result, self.watched, self.key, self.expert, not self.turned)
        index = args[1] if func is Tensor.__getitem__ else None
        whole = self.expert is None and self.ndim == 3
        if whole and _is_number(index) and result.ndim == 2:
            return _StandIn.of(result, self.watched, self.key, int(index), self.turned)
        module, name = type(self.watched.module).__name__, getattr(func, "__name__", str(func))
        raise MoonshotError(
            f"{module}.{self.key}: its experts are computed by {name}, whose inputs cannot be told "
            "apart by expert; name it in ignore= to leave it dense"
        )


_KEEPING = {Tensor.to, Tensor.type, Tensor.float, Tensor.contiguous, Tensor.detach, Tensor.clone}
_TURNING = {Tensor.transpose, torch.transpose, Tensor.t, torch.t, Tensor.T.__get__, Tensor.mT.__get__, Tensor.permute}
_PRODUCTS = {torch.matmul, torch.mm, torch.bmm, Tensor.matmul, Tensor.mm, Tensor.bmm, Tensor.__matmul__}


def _product(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], mine: "_StandIn"
) -> tuple[Tensor, bool] | None:
    """The inputs of a product with a stand-in, and whether it is [in, out] there; None of any other operation."""
    names = ("input", "weight") if func is functional.linear else ("input", "mat2")
    given = dict(zip(names, args, strict=False)) | {name: kwargs[name] for name in names if name in kwargs}
    inputs, weight = (given.get(name) for name in names)
    if weight is not mine or not isinstance(inputs, Tensor) or isinstance(inputs, _StandIn):
        return None
    if func is functional.linear and mine.expert is not None:
        return inputs, False
    if func in _PRODUCTS and inputs.ndim >= mine.ndim:
        return inputs, True
    return None


def _plain(value: Any) -> Any:
    return value.as_subclass(Tensor) if isinstance(value, _StandIn) else value


def _is_number(index: Any) -> bool:
    return type(index) is int or (isinstance(index, Tensor) and index.numel() == 1 and index.ndim == 0)
