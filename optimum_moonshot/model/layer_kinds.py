"""Every kind of layer as one matrix product: the normal form that statistics, masks and packing work on.

A layer multiplies the features of every token by a matrix. A layer with groups multiplies each group of features by a
separate one:

    y[n, g, t] = W[g] x[n, g, t]  (+ bias)

Tensor format, in every file with these tensors:

    W   weight             [groups, out, in]   joined to a matrix [d_out, d_in]: d_out = groups·out, d_in = in
    x   inputs             [samples, groups, tokens, in]    float32
    δ   output gradients   [samples, groups, tokens, out]   float32, ∂ℓ_n/∂y

so that sample n has the gradient ``A_n[g] = Σ_t δ[n, g, t] x[n, g, t]ᵀ`` and group g the Gram matrix Σ x xᵀ over all
samples and tokens, concatenated to [groups, tokens, in]. (curvlinops normalizes its layers in the same way, in
``computers/kfac_math.py``.) A linear layer has one group. A convolution's tokens are its output positions, and their
features the patches of its input.

A kind of layer is one class here and one entry in `KINDS`; experts.py has fused experts. No other code depends on the
kind.
"""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from ..errors import require
from ..objective.patterns import nonzeros
from .weights import mark_written

WEIGHT = "weight"  # the name of the parameter in a module with one matrix
# Bytes of the patches of a strip of a convolution, unless a single output row has more.
STRIP_BYTES = 64 * 2**20

_Layer = TypeVar("_Layer", bound="PrunableLayer")
# The callback of a watched layer: (layer with the module that was called, or one of its experts, inputs, output) → a
# replacement of the output, or None.
See = Callable[["PrunableLayer", Tensor, Tensor], Tensor | None]


class Pair(NamedTuple):
    """The inputs and the output gradients of some tokens."""

    inputs: Tensor  # [samples, groups, tokens, in]
    delta: Tensor  # [samples, groups, tokens, out]
    last: bool  # no other tokens of the call follow


@dataclass(frozen=True)
class PrunableLayer(ABC):
    """A weight with its modules, in the normal form; the base of all kinds.

    Modules that share the parameter (tied weights) are one layer and stay tied.
    """

    name: str
    modules: tuple[nn.Module, ...]
    attention: bool = False
    key: str = WEIGHT  # the name of the parameter in the modules
    # Of fused experts: their range [first, stop), None for all, and whether every expert reads all tokens, not only
    # those routed to it.
    span: tuple[int, int] | None = None
    everywhere: bool = False
    substitute: nn.Parameter | None = None  # in place of the modules' parameter: of a block that trains

    kind: ClassVar[type[nn.Module]]
    axes: ClassVar[tuple[int, int]] = (0, 1)  # of the parameter: output axis, input axis
    images: ClassVar[bool] = False  # it reads images [B, C, H, W], not features on the last axis
    dimensions: ClassVar[int] = 2  # of the parameter
    separate: ClassVar[bool] = False  # each group is pruned as a separate matrix
    groups: ClassVar[int] = 1  # number of equal slices of rows with separate inputs
    called_groups: ClassVar[slice] = slice(None)  # whose inputs are in its calls
    input_key: ClassVar[Hashable] = None  # equal for layers that derive the same inputs from one tensor

    @property
    def module(self) -> nn.Module:
        """The first of its modules."""
        return self.modules[0]

    @property
    def parameter(self) -> nn.Parameter:
        """The weight, of a module that has one; see `unprunable`."""
        weight = self.module._parameters[self.key] if self.substitute is None else self.substitute
        assert weight is not None
        return weight

    @property
    def bias(self) -> nn.Parameter | None:
        """The bias of its outputs, [d_out], or [experts, out] of fused experts; None without one."""
        return self.module._parameters.get("bias" if self.key == WEIGHT else f"{self.key}_bias")

    @property
    def matrices(self) -> int:
        """Number of matrices that are pruned separately: the experts of a fused parameter, else 1."""
        return self.groups if self.separate else 1

    @property
    def weight_name(self) -> str:
        """The name of the parameter in the model."""
        return self.name if self.name.endswith(f".{self.key}") and self.key != WEIGHT else f"{self.name}.{WEIGHT}"

    @property
    def shape(self) -> tuple[int, int]:
        """[d_out, d_in] of the matrix."""
        sizes = list(self.parameter.shape)
        d_out = sizes.pop(self.axes[0])
        return d_out, math.prod(sizes)

    @property
    def matrix(self) -> Tensor:
        """The weight as [d_out, d_in], to read."""
        return self.as_matrix(self.parameter.detach())

    @property
    def alive(self) -> Tensor | None:
        """The `nonzeros` of the model's weight, [d_out, d_in], even if a substitute trains: a run keeps its zeros."""
        weight = self.module._parameters[self.key]
        assert weight is not None
        return nonzeros(self.as_matrix(weight.detach()))

    def expert(self: _Layer, index: int) -> _Layer:
        """A single one of its fused experts, by its index relative to the first."""
        first = index + (self.span[0] if self.span else 0)
        return replace(self, span=(first, first + 1))

    def assign(self, matrix: Tensor) -> None:
        """Copy a [d_out, d_in] matrix into the parameter; an offloaded block drops it on exit."""
        self.parameter.detach().copy_(self.as_parameter(matrix))

    def write(self, matrix: Tensor) -> None:
        """Like `assign`, but an offloaded block stores the weight on exit."""
        self.assign(matrix)
        mark_written(self.module, self.key)

    def watch(self, see: See, hooks: ExitStack) -> None:
        """Pass every call of the layer's modules to a callback, until `hooks` closes."""

        def hook(
            called: PrunableLayer, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Tensor], output: Tensor
        ) -> Tensor | None:
            return see(called, args[0] if args else next(iter(kwargs.values())), output)

        for module in self.modules:
            called = partial(hook, replace(self, modules=(module,)))
            hooks.callback(module.register_forward_hook(called, with_kwargs=True).remove)

    def unprunable(self) -> str | None:
        """The reason why the module cannot be pruned although its kind can; None if it can."""
        name, weight = type(self.module).__name__, self.module._parameters.get(self.key)
        if weight is None:
            stored = (*self.module.parameters(recurse=False), *self.module.buffers(recurse=False))
            codes = [x.dtype for x in stored if not x.is_floating_point() or x.dtype.itemsize == 1]
            if codes:  # such as `weight_packed` of compressed-tensors
                return f"quantized: {name}, {codes[0]}: load the model dequantized to prune it"
            return f"its weight is computed ({name}): remove the parametrization to prune it"
        plain = type(weight.data) is Tensor and weight.is_floating_point() and weight.dtype.itemsize > 1
        if not plain or weight.ndim != self.dimensions:
            return f"quantized: {name}, {weight.dtype}"
        return None if self._is_plain() else f"{name} overrides the forward of {self.kind.__name__}"

    @abstractmethod
    def as_matrix(self, tensor: Tensor) -> Tensor:
        """[d_out, d_in] of a tensor in the parameter's layout; a view if possible."""

    @abstractmethod
    def as_parameter(self, matrix: Tensor, /) -> Tensor:
        """The inverse of `as_matrix`."""

    @abstractmethod
    def _is_plain(self) -> bool:
        """Whether the module computes the product of its kind."""

    @abstractmethod
    def token_mask(self, inputs: Tensor, mask: Tensor | None) -> Tensor | None:
        """The batch's mask, bool [samples, tokens], in the layout of a call's inputs; None if every token counts.

        Raises `MoonshotError` if there is padding, and the shape of the inputs does not show where.
        """

    @abstractmethod
    def tokens(self, inputs: Tensor, mask: Tensor | None) -> Iterator[Tensor]:
        """The inputs of the tokens that count, [groups, tokens, in] in float32, in pieces.

        `mask` is the result of `token_mask`, also in `pairs`.
        """

    @abstractmethod
    def pairs(self, inputs: Tensor, delta: Tensor, mask: Tensor | None, samples: int) -> Iterator[Pair]:
        """Inputs and output gradients of a batch of `samples`, in pieces; gradients of padding are 0.

        Raises `MoonshotError` if the shapes do not show which sample a token belongs to.
        """


class LinearLayer(PrunableLayer):
    """`nn.Linear`: features on the last axis, samples and tokens on the axes before, or flattened to one."""

    kind: ClassVar[type[nn.Module]] = nn.Linear

    def as_matrix(self, tensor: Tensor) -> Tensor:
        return tensor if self.axes == (0, 1) else tensor.T

    as_parameter = as_matrix  # a transposition is its own inverse

    def _is_plain(self) -> bool:
        """Whether its forward is the kind's, or computes the same on a copy of the module with a tiny weight.

        The copy makes the test work for offloaded weights, without a change of the module.
        """
        module = self.module
        if type(module).forward is self.kind.forward:
            return True
        if module._modules or module._buffers or not {*module._parameters} <= {"weight", "bias"}:
            return False
        twin, bias = copy.copy(module), None
        with torch.no_grad():
            weight = torch.arange(12.0, device="cpu").cos().view(3, 4)
            twin._parameters = {"weight": nn.Parameter(self.as_parameter(weight)), "bias": None}
            if module._parameters.get("bias") is not None:
                bias = torch.arange(3.0, device="cpu").sin()
                twin._parameters["bias"] = nn.Parameter(bias)
            twin.training = False
            inputs = torch.arange(24.0, device="cpu").sin().view(2, 3, 4)
            expected = functional.linear(inputs, weight, bias)
            try:
                output = type(module).forward(twin, inputs)
                return output.shape == expected.shape and torch.allclose(output, expected, atol=1e-5)
            except Exception:  # it needs more than its input: another product
                return False

    def token_mask(self, inputs: Tensor, mask: Tensor | None) -> Tensor | None:
        lead = inputs.shape[:-1]
        if mask is None or lead == mask.shape:
            return mask
        if lead.numel() == mask.numel():
            return mask.reshape(lead)
        message = f"inputs of shape {list(inputs.shape)} do not show which tokens are padding"
        hint = "use samples of equal length, or batch_size=1"
        require(bool(mask.all()), message, hint=hint)
        return None

    def tokens(self, inputs: Tensor, mask: Tensor | None) -> Iterator[Tensor]:
        inputs = inputs if mask is None else inputs[mask]
        yield inputs.reshape(-1, inputs.shape[-1]).float()[None]

    def pairs(self, inputs: Tensor, delta: Tensor, mask: Tensor | None, samples: int) -> Iterator[Pair]:
        # Samples are on the first axis, or flattened with the tokens as in the mask.
        for tensor in (inputs, delta):
            flattened = mask is not None and tensor.shape[:-1].numel() == mask.numel()
            _check_samples(tensor, flattened or tensor.shape[0] == samples, samples)
        inputs, delta = (tensor.reshape(samples, -1, tensor.shape[-1]) for tensor in (inputs, delta))
        if mask is not None:
            delta = delta.masked_fill(~mask.reshape(delta.shape[:2])[..., None], 0)
        yield Pair(inputs.float()[:, None], delta.float()[:, None], True)


class Conv1DLayer(LinearLayer):
    """transformers' `Conv1D`, GPT-2's linear layer, whose weight is stored as [d_in, d_out]."""

    kind = Conv1D
    axes = (1, 0)


class Conv2dLayer(PrunableLayer):
    """`nn.Conv2d`: the patches of its input times its flattened kernels.

    Images x [B, C, H, W] have patches [B, groups, T, C/groups·kh·kw], one for each of the T output positions, and
    output channel k of group g is ``patches[:, g] @ W[k]``. All patches together need kh·kw times the memory of the
    input, so they are computed in strips of output rows. Every position counts, whatever the batch's mask.
    """

    modules: tuple[nn.Conv2d, ...]

    kind = nn.Conv2d
    images = True
    dimensions = 4

    @property
    def groups(self) -> int:  # type: ignore[override] # depends on the module
        return self.modules[0].groups

    @property
    def input_key(self) -> Hashable:  # type: ignore[override] # depends on the module
        conv = self.modules[0]
        return conv.kernel_size, conv.stride, conv.padding, conv.dilation, conv.padding_mode, conv.groups

    def as_matrix(self, tensor: Tensor) -> Tensor:
        return tensor.flatten(1)

    def as_parameter(self, matrix: Tensor) -> Tensor:
        return matrix.reshape(self.parameter.shape)

    def _is_plain(self) -> bool:
        cls = type(self.modules[0])
        return cls.forward is nn.Conv2d.forward and cls._conv_forward is nn.Conv2d._conv_forward

    def token_mask(self, inputs: Tensor, mask: Tensor | None) -> Tensor | None:
        return None

    def tokens(self, inputs: Tensor, mask: Tensor | None) -> Iterator[Tensor]:
        for _, patches, _ in strips(self.modules[0], _batched(inputs)):
            yield _joined(patches)

    def pairs(self, inputs: Tensor, delta: Tensor, mask: Tensor | None, samples: int) -> Iterator[Pair]:
        images, delta = _batched(inputs), _batched(delta)
        _check_samples(images, len(images) == samples, samples)
        for rows, patches, last in strips(self.modules[0], images):
            deltas = delta[:, :, rows].flatten(2).unflatten(1, (self.groups, -1)).mT.float()
            if len(images) != samples:  # several images of one sample
                patches, deltas = _joined(patches)[None], _joined(deltas)[None]
            yield Pair(patches, deltas, last)


def strips(conv: nn.Conv2d, images: Tensor) -> Iterator[tuple[slice, Tensor, bool]]:
    """Slices of output rows, their patches [B, groups, T, C/groups·kh·kw] in float32, and whether they are the last."""
    borders = conv._reversed_padding_repeated_twice  # "same" may pad one side more
    mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
    padded = functional.pad(images.float(), borders, mode) if any(borders) else images.float()
    (height, width), (down, _), (spread, _) = conv.kernel_size, conv.stride, conv.dilation
    reach = spread * (height - 1) + 1  # input rows that one output row sees
    across = (padded.shape[3] - conv.dilation[1] * (width - 1) - 1) // conv.stride[1] + 1
    count = (padded.shape[2] - reach) // down + 1
    row = 4 * len(padded) * padded.shape[1] * height * width * across
    step = max(1, STRIP_BYTES // row)
    for first in range(0, count, step):
        stop = min(first + step, count)
        visible = padded[:, :, first * down : (stop - 1) * down + reach]
        patches = functional.unfold(visible, conv.kernel_size, conv.dilation, 0, conv.stride)
        yield slice(first, stop), patches.unflatten(1, (conv.groups, -1)).mT, stop == count


def _joined(patches: Tensor) -> Tensor:
    """The patches of all images [B, groups, T, d] one after another, [groups, B·T, d]."""
    # `unfold` stores [B, groups, d, T]: this order copies contiguous runs of T.
    return patches.mT.permute(1, 2, 0, 3).flatten(2).mT


def _batched(images: Tensor) -> Tensor:
    """[B, C, H, W], also of a single image [C, H, W]."""
    return images if images.ndim == 4 else images[None]


def _check_samples(tensor: Tensor, separable: bool, samples: int) -> None:
    shape = list(tensor.shape)
    message = f"inputs of shape {shape} do not show which of the batch's {samples} samples they belong to"
    require(separable or samples == 1, message, hint="use batch_size=1")


KINDS: tuple[type[PrunableLayer], ...] = (LinearLayer, Conv1DLayer, Conv2dLayer)


def find_layer(module: nn.Module, name: str = "") -> PrunableLayer | None:
    """The layer of a module; None if it is of none of the `KINDS`, such as a norm or an embedding."""
    return next((kind(name, (module,)) for kind in KINDS if isinstance(module, kind.kind)), None)


def expert_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """A module's parameters that hold one matrix per expert, by name.

    An attribute of the module with `expert` in its name equals the number of matrices. Attribute access would return
    the stand-ins of a watched module.
    """
    if isinstance(module, nn.Conv1d | nn.ConvTranspose1d):
        return {}
    counts = {value for name, value in vars(module).items() if "expert" in name and type(value) is int}
    return {
        key: weight
        for key, weight in module._parameters.items()
        if weight is not None and weight.ndim == 3 and min(weight.shape[1:]) > 1 and len(weight) in counts
    }


def stacks_experts(module: nn.Module) -> bool:
    """Whether a module has matrices [experts · out, in] that stack experts along the rows, which is unsupported."""
    counts = (value for name, value in vars(module).items() if "expert" in name and type(value) is int)
    most = max(counts, default=0)
    weights = [weight for weight in module._parameters.values() if weight is not None and weight.ndim == 2]
    return most > 1 and any(len(weight) > most and len(weight) % most == 0 for weight in weights)
