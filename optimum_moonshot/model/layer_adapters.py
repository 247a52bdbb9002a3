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

A kind of layer is one class here and one entry in `ADAPTERS`; no other code depends on the kind.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from ..errors import Option, Text, require
from .convolution import batched, geometry, joined, strip_of, strips


class See(Protocol):
    """The callback of a watched layer."""

    def __call__(self, adapter: "LayerAdapter", inputs: Tensor, output: Tensor) -> Tensor | None:
        """Receive a call.

        Args:
            adapter: of the layer that was called, or of one of its experts.
            inputs: of the call, in the layer's layout; any shape.
            output: of the call; any shape.

        Returns:
            A replacement of the output; None keeps it.
        """


class Watch(Protocol):
    """The handle that ends a watch."""

    def remove(self) -> None: ...


class Pair(NamedTuple):
    """The inputs and the output gradients of some tokens."""

    inputs: Tensor  # [samples, groups, tokens, in]
    delta: Tensor  # [samples, groups, tokens, out]
    last: bool  # no other tokens of the call follow


@dataclass(frozen=True)
class LayerAdapter(ABC):
    """The normal form of one module's weight, inputs and output gradients."""

    module: nn.Module

    kind: ClassVar[type[nn.Module]]
    axes: ClassVar[tuple[int, int]] = (0, 1)  # of the parameter: output axis, input axis
    images: ClassVar[bool] = False  # it reads images [B, C, H, W], not features on the last axis
    dimensions: ClassVar[int] = 2  # of the parameter
    separate: ClassVar[bool] = False  # each group is pruned as a separate matrix

    @property
    def weight(self) -> nn.Parameter | None:
        """The parameter; None if the module computes it."""
        return self.module._parameters.get("weight")

    @property
    def parameter(self) -> nn.Parameter:
        """The weight of a module that has one, see `unprunable`."""
        weight = self.weight
        assert weight is not None
        return weight

    @property
    def groups(self) -> int:
        """Number of equal slices of the matrix's rows with separate inputs."""
        return 1

    @property
    def part(self) -> slice:
        """The layer's groups that take part in the calls of this adapter."""
        return slice(None)

    @property
    def shape(self) -> tuple[int, int]:
        """[d_out, d_in] of the matrix."""
        shape = self.parameter.shape
        return shape[0], shape[1:].numel()

    @abstractmethod
    def as_matrix(self, tensor: Tensor) -> Tensor:
        """[d_out, d_in] of a tensor in the parameter's layout; a view if possible."""

    @abstractmethod
    def as_parameter(self, matrix: Tensor) -> Tensor:
        """The inverse of `as_matrix`."""

    @property
    def reads(self) -> Hashable:
        """A key that is equal for layers that derive the same inputs from one tensor."""
        return None

    def watch(self, see: See) -> "Watch":
        """Pass every call of the module to a callback until the returned handle is removed.

        Args:
            see: the callback.
        """

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Tensor], output: Tensor) -> Tensor | None:
            return see(self, args[0] if args else next(iter(kwargs.values())), output)

        return self.module.register_forward_hook(hook, with_kwargs=True)

    def unprunable(self) -> str | None:
        """The reason why this module cannot be pruned although its kind can; None if it can."""
        name, weight = type(self.module).__name__, self.weight
        if weight is None:
            return f"its weight is computed ({name}): remove the parametrization to prune it"
        plain = type(weight.data) is Tensor and weight.is_floating_point() and weight.dtype.itemsize > 1
        if not plain or weight.ndim != self.dimensions:
            return f"quantized: {name}, {weight.dtype}"
        return None if self._is_plain() else f"{name} overrides the forward of {self.kind.__name__}"

    @abstractmethod
    def _is_plain(self) -> bool:
        """Whether the module computes the product of its kind."""

    @abstractmethod
    def token_mask(self, inputs: Tensor, mask: Tensor | None) -> Tensor | None:
        """The mask of the tokens that count, in the layout of the call's inputs; None if all count.

        Args:
            inputs: of the module: [samples, tokens, in], or the layout of its kind.
            mask: bool [samples, tokens] of the batch; None if every token counts.

        Raises:
            MoonshotError: there is padding, and the shape of the inputs does not show where.
        """

    @abstractmethod
    def tokens(self, inputs: Tensor, mask: Tensor | None) -> Iterator[Tensor]:
        """The inputs of the tokens that count, [groups, tokens, in] in float32, in pieces.

        Args:
            inputs: of the module.
            mask: of this call, from `token_mask`.
        """

    @abstractmethod
    def pairs(self, inputs: Tensor, delta: Tensor, mask: Tensor | None, samples: int) -> Iterator[Pair]:
        """The inputs [samples, groups, tokens, in] and output gradients [samples, groups, tokens, out], in pieces.

        Gradients of padding are 0.

        Args:
            inputs: of the module.
            delta: the gradient at its output, of the same shape.
            mask: of this call, from `token_mask`.
            samples: number of samples in the batch.

        Raises:
            MoonshotError: the shapes do not show which sample a token belongs to.
        """


class LinearAdapter(LayerAdapter):
    """`nn.Linear`: features on the last axis, samples and tokens on the axes before, or flattened to one."""

    kind: ClassVar[type[nn.Module]] = nn.Linear

    def as_matrix(self, tensor: Tensor) -> Tensor:
        return tensor

    def as_parameter(self, matrix: Tensor) -> Tensor:
        return matrix

    def _is_plain(self) -> bool:
        return type(self.module).forward is self.kind.forward or self._multiplies()

    def _multiplies(self) -> bool:
        """Whether an overridden forward computes the same product, tested on a copy with a tiny weight.

        So the test works with offloaded weights, and leaves the module unchanged.
        """
        module = self.module
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
        require(
            bool(mask.all()),
            f"inputs of shape {list(inputs.shape)} do not show which tokens are padding",
            hint=Text("use samples of equal length, or {}", Option("batch_size", 1)),
        )
        return None

    def tokens(self, inputs: Tensor, mask: Tensor | None) -> Iterator[Tensor]:
        kept = inputs if mask is None else inputs[mask]
        yield kept.reshape(-1, kept.shape[-1]).float()[None]

    def pairs(self, inputs: Tensor, delta: Tensor, mask: Tensor | None, samples: int) -> Iterator[Pair]:
        inputs, delta = (_per_sample(tensor, mask, samples) for tensor in (inputs, delta))
        if mask is not None:
            delta = delta.masked_fill(~mask.reshape(delta.shape[:2])[..., None], 0)
        yield Pair(inputs.float()[:, None], delta.float()[:, None], True)


class Conv1DAdapter(LinearAdapter):
    """transformers' `Conv1D`, GPT-2's linear layer, whose weight is stored as [d_in, d_out]."""

    kind = Conv1D
    axes = (1, 0)

    @property
    def shape(self) -> tuple[int, int]:
        d_in, d_out = self.parameter.shape
        return d_out, d_in

    def as_matrix(self, tensor: Tensor) -> Tensor:
        return tensor.T

    def as_parameter(self, matrix: Tensor) -> Tensor:
        return matrix.T


class Conv2dAdapter(LayerAdapter):
    """`nn.Conv2d`: its patches times its flattened kernels, in strips of output rows; see convolution.py.

    Every position counts, whatever the batch's mask.
    """

    module: nn.Conv2d

    kind = nn.Conv2d
    images = True
    dimensions = 4

    @property
    def groups(self) -> int:
        return self.module.groups

    @property
    def reads(self) -> Hashable:
        return geometry(self.module)

    def as_matrix(self, tensor: Tensor) -> Tensor:
        return tensor.flatten(1)

    def as_parameter(self, matrix: Tensor) -> Tensor:
        return matrix.reshape(self.parameter.shape)

    def _is_plain(self) -> bool:
        cls: type[nn.Conv2d] = type(self.module)
        return cls.forward is nn.Conv2d.forward and cls._conv_forward is nn.Conv2d._conv_forward

    def token_mask(self, inputs: Tensor, mask: Tensor | None) -> Tensor | None:
        return None

    def tokens(self, inputs: Tensor, mask: Tensor | None) -> Iterator[Tensor]:
        for strip in strips(self.module, batched(inputs)):
            yield joined(strip.patches)

    def pairs(self, inputs: Tensor, delta: Tensor, mask: Tensor | None, samples: int) -> Iterator[Pair]:
        images, delta = batched(inputs), batched(delta)
        _check_samples(images, len(images) == samples, samples)
        for strip in strips(self.module, images):
            patches, deltas = strip.patches, strip_of(delta, strip.rows, self.groups).float()
            if len(images) != samples:  # several images of one sample
                patches, deltas = joined(patches)[None], joined(deltas)[None]
            yield Pair(patches, deltas, strip.last)


ADAPTERS: tuple[type[LayerAdapter], ...] = (LinearAdapter, Conv1DAdapter, Conv2dAdapter)


def find_adapter(module: nn.Module) -> LayerAdapter | None:
    """The adapter of a module; None if no entry of `ADAPTERS` matches, as for norms and embeddings."""
    return next((adapter(module) for adapter in ADAPTERS if isinstance(module, adapter.kind)), None)


def _per_sample(tensor: Tensor, mask: Tensor | None, samples: int) -> Tensor:
    """[…, d] as [samples, tokens, d]; samples are on the first axis, or flattened with the tokens as in the mask."""
    separable = tensor.shape[0] == samples or (mask is not None and tensor.shape[:-1].numel() == mask.numel())
    _check_samples(tensor, separable, samples)
    return tensor.reshape(samples, -1, tensor.shape[-1])


def _check_samples(tensor: Tensor, separable: bool, samples: int) -> None:
    require(
        separable or samples == 1,
        f"inputs of shape {list(tensor.shape)} do not show which of the batch's {samples} samples they belong to",
        hint=Text("use {}", Option("batch_size", 1)),
    )
