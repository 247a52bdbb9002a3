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
from dataclasses import dataclass, replace
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..errors import MoonshotError, require
from .forms import Form, Pair, See

_IMPLEMENTATION = "_experts_implementation"  # of a configuration: transformers' choice of how experts are computed


def expert_keys(module: nn.Module) -> list[str]:
    """The names of a module's parameters that hold one matrix for each expert.

    It counts its experts in some attribute, which has `expert` in its name, as many as the parameters have matrices.
    """
    if isinstance(module, nn.Conv1d | nn.ConvTranspose1d):
        return []
    fused = {key: len(parameter) for key, parameter in module._parameters.items() if _is_fused(parameter)}
    counts = {value for name, value in vars(module).items() if "expert" in name and type(value) is int}
    return [key for key, count in fused.items() if count in counts]


def _is_fused(parameter: nn.Parameter | None) -> bool:
    return parameter is not None and parameter.ndim == 3 and min(parameter.shape[1:]) > 1


@dataclass(frozen=True)
class ExpertsForm(Form):
    """One fused parameter of a module of experts, or some of its experts.

    `span` is the first of them and the one behind the last; None is all. `expert` says whose calls it is the form of,
    where it is one's.
    """

    key: str = ""
    span: tuple[int, int] | None = None
    expert: int | None = None

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
    """Tells `see` of every product with an expert's matrix, until it is removed."""

    def __init__(self, form: ExpertsForm, see: See):
        self.form, self.see = form, see
        key, module = form.key, form.module
        require(key not in vars(module), f"{type(module).__name__}.{key} is watched already")
        vars(module)[key] = _StandIn.of(form.parameter, self)
        _use_plain(module)

    def remove(self) -> None:
        vars(self.form.module).pop(self.form.key, None)
        _use_own(self.form.module)

    def product(self, expert: int | None, turned: bool, inputs: Tensor, output: Tensor) -> Tensor:
        """A product of some tokens with one expert's matrix, or of each expert's tokens with its own.

        Args:
            expert: whose; None is all of them.
            turned: whether the matrix was used as [in, out].
            inputs: [..., in].
            output: [..., out].
        """
        form = self.form
        out = form.shape[0] // form.groups
        fits = turned == form.transposed and (inputs.shape[-1], output.shape[-1]) == (form.shape[1], out)
        require(fits, f"{type(form.module).__name__}.{form.key} is used in another layout than that it seems to have")
        if expert is not None and expert not in form.experts:
            return output
        found = self.see(replace(form, expert=expert), inputs, output)
        return output if found is None else found


class _StandIn(Tensor):
    """A parameter of experts, or one expert's matrix, that tells of its products."""

    watch: _Watch
    expert: int | None  # None is the whole parameter
    turned: bool  # whether its last two axes have changed places

    @staticmethod
    def of(tensor: Tensor, watch: _Watch, expert: int | None = None, turned: bool = False) -> "_StandIn":
        found = tensor.detach().as_subclass(_StandIn)
        found.watch, found.expert, found.turned = watch, expert, turned
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
            return mine.watch.product(mine.expert, turned != mine.turned, inputs, result)
        return mine.followed(func, args, result)

    def followed(self, func: Callable[..., Any], args: tuple[Any, ...], result: Tensor) -> Tensor:
        """What an operation that is no product makes of it."""
        if result.shape == self.shape and result.is_floating_point() and func in _KEEPING:
            return _StandIn.of(result, self.watch, self.expert, self.turned)
        if func in _TURNING and result.ndim == self.ndim and result.shape[-2:] == self.shape[:-3:-1]:
            return _StandIn.of(result, self.watch, self.expert, not self.turned)
        index = args[1] if func is Tensor.__getitem__ else None
        whole = self.expert is None and self.ndim == 3
        if whole and _is_number(index) and result.ndim == 2:
            return _StandIn.of(result, self.watch, int(index), self.turned)
        form, name = self.watch.form, getattr(func, "__name__", str(func))
        raise MoonshotError(
            f"{type(form.module).__name__}.{form.key}: its experts are computed by {name}, whose inputs cannot be told "
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


# Modules of experts that are watched: by how many watches, and the configuration that they had.
_PLAIN: "WeakKeyDictionary[nn.Module, tuple[int, Any]]" = WeakKeyDictionary()


def _use_plain(module: nn.Module) -> None:
    """Let a module compute its experts one after another, whatever its configuration chooses."""
    count, config = _PLAIN.get(module, (0, vars(module).get("config")))
    if count == 0 and hasattr(config, _IMPLEMENTATION):
        vars(module)["config"] = plain = copy.copy(config)
        setattr(plain, f"{_IMPLEMENTATION}_internal", "eager")
    _PLAIN[module] = count + 1, config


def _use_own(module: nn.Module) -> None:
    """The inverse of `_use_plain`."""
    count, config = _PLAIN[module]
    if count > 1:
        _PLAIN[module] = count - 1, config
        return
    del _PLAIN[module]
    if "config" in vars(module):
        vars(module)["config"] = config
