"""Every kind of layer as one product of matrices: the normal form that statistics, masks and packing know.

A layer multiplies the features of every token by a matrix. Where it has groups, each group of features has one of its
own, and rows of its own come out:

    y[n, g, t] = W[g] x[n, g, t]  (+ bias)

Tensor format, in every file that takes these tensors; samples and tokens have one axis each:

    W   weight             [groups, out, in]   joined to a matrix [d_out, d_in]: d_out = groups·out, d_in = in
    x   inputs             [samples, groups, tokens, in]    float32
    δ   output gradients   [samples, groups, tokens, out]   float32, ∂ℓ_n/∂y

so that sample n has the gradient ``A_n[g] = Σ_t δ[n, g, t] x[n, g, t]ᵀ`` and group g the Gram matrix Σ x xᵀ over all
samples and tokens, whose inputs follow one another as [groups, tokens, in]. (curvlinops brings its layers to one form
in the same way, in ``computers/kfac_math.py``.) A linear layer has one group. A convolution's tokens are its output
positions, and their features the patches of its input.

A kind of layer is one class here and one entry in `ADAPTERS`; nothing else in the package asks what kind a layer is.
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

from ..errors import require
from .convolution import batched, geometry, joined, strip_of, strips


class See(Protocol):
    """What a watched call is shown to."""

    def __call__(self, form: "LayerAdapter", inputs: Tensor, output: Tensor) -> Tensor | None:
        """A call.

        Args:
            form: of what was called; of one expert, where the layer is many.
            inputs: what it read.
            output: what it gave.

        Returns:
            What is given instead; None for the output itself.
        """


class Watch(Protocol):
    """What ends a watch."""

    def remove(self) -> None: ...


class Pair(NamedTuple):
    """The inputs and the output gradients of some tokens."""

    inputs: Tensor  # [samples, groups, tokens, in]
    delta: Tensor  # [samples, groups, tokens, out]
    last: bool  # no other tokens of the call follow


@dataclass(frozen=True)
class LayerAdapter(ABC):
    """The normal form of one module's weight, of what it reads, and of the gradients at what it gives."""

    module: nn.Module

    kind: ClassVar[type[nn.Module]]
    axes: ClassVar[tuple[int, int]] = (0, 1)  # of the parameter: the one along its outputs, and along its inputs
    images: ClassVar[bool] = False  # it reads images [B, C, H, W], not features on the last axis
    dimensions: ClassVar[int] = 2  # of the parameter
    separate: ClassVar[bool] = False  # its groups are matrices of their own, each pruned alone

    @property
    def parameter(self) -> nn.Parameter | None:
        """The weight; None where the module computes it from something else."""
        return self.module._parameters.get("weight")

    @property
    def groups(self) -> int:
        """How many equal slices of the matrix's rows read inputs of their own."""
        return 1

    @property
    def part(self) -> slice:
        """Which of the layer's groups the calls that this form reads are of."""
        return slice(None)

    @property
    def shape(self) -> tuple[int, int]:
        """[d_out, d_in] of the matrix."""
        shape = self.parameter.shape
        return shape[0], shape[1:].numel()

    @abstractmethod
    def as_matrix(self, tensor: Tensor) -> Tensor:
        """[d_out, d_in] of a tensor that is laid out as the parameter: a view where its memory allows."""

    @abstractmethod
    def as_parameter(self, matrix: Tensor) -> Tensor:
        """The inverse of `as_matrix`."""

    @property
    def reads(self) -> Hashable:
        """What two calls share that read the same inputs from the same tensor."""
        return None

    def watch(self, see: See) -> "Watch":
        """Show every call of the module, until what this returns is removed.

        Args:
            see: what is shown every call.
        """

        def hook(_: nn.Module, args: tuple[Any, ...], named: dict[str, Tensor], output: Tensor) -> Tensor | None:
            return see(self, args[0] if args else next(iter(named.values())), output)

        return self.module.register_forward_hook(hook, with_kwargs=True)

    def unprunable(self) -> str | None:
        """Why this module cannot be pruned although its kind can; None where it can."""
        name, weight = type(self.module).__name__, self.parameter
        if weight is None:
            return f"its weight is computed ({name}): remove the parametrization to prune it"
        plain = type(weight.data) is Tensor and weight.is_floating_point() and weight.dtype.itemsize > 1
        if not plain or weight.ndim != self.dimensions:
            return f"quantized: {name}, {weight.dtype}"
        return None if self._is_plain() else f"{name} has a forward of its own, not that of {self.kind.__name__}"

    @abstractmethod
    def _is_plain(self) -> bool:
        """Whether the module computes the product that its kind stands for."""

    @abstractmethod
    def token_mask(self, inputs: Tensor, mask: Tensor | None) -> Tensor | None:
        """Which tokens of a call count, laid out as the call's inputs; None where all do.

        Args:
            inputs: what the module read: [samples, tokens, in], or whatever its kind takes.
            mask: bool [samples, tokens] of the batch, None where every token counts.

        Raises:
            MoonshotError: there is padding, and the inputs do not show where.
        """

    @abstractmethod
    def tokens(self, inputs: Tensor, mask: Tensor | None) -> Iterator[Tensor]:
        """The inputs of the tokens that count, [groups, tokens, in] in float32, in pieces.

        Args:
            inputs: what the module read.
            mask: of this call, as `token_mask` gives it.
        """

    @abstractmethod
    def pairs(self, inputs: Tensor, delta: Tensor, mask: Tensor | None, samples: int) -> Iterator[Pair]:
        """The inputs [samples, groups, tokens, in] and output gradients [samples, groups, tokens, out], in pieces.

        Gradients of padding are 0.

        Args:
            inputs: what the module read.
            delta: the gradient at what it gave, of its output's shape.
            mask: of this call, as `token_mask` gives it.
            samples: in the batch.

        Raises:
            MoonshotError: the tensors do not show which sample a token belongs to.
        """


class LinearForm(LayerAdapter):
    """`nn.Linear`: features on the last axis, samples and tokens on those before, or on one axis together."""

    kind = nn.Linear

    def as_matrix(self, tensor: Tensor) -> Tensor:
        return tensor

    def as_parameter(self, matrix: Tensor) -> Tensor:
        return matrix

    def _is_plain(self) -> bool:
        return type(self.module).forward is self.kind.forward or self._multiplies()

    def _multiplies(self) -> bool:
        """Whether a forward of its own gives the same product: tried with a tiny weight in place of the module's.

        So it is tried wherever the weights are, and nothing of the module changes.
        """
        own = self.module
        if own._modules or own._buffers or not {*own._parameters} <= {"weight", "bias"}:
            return False
        twin, bias = copy.copy(own), None
        with torch.no_grad():
            weight = torch.arange(12.0, device="cpu").cos().view(3, 4)
            twin._parameters = {"weight": nn.Parameter(self.as_parameter(weight)), "bias": None}
            if own._parameters.get("bias") is not None:
                bias = torch.arange(3.0, device="cpu").sin()
                twin._parameters["bias"] = nn.Parameter(bias)
            twin.training = False
            inputs = torch.arange(24.0, device="cpu").sin().view(2, 3, 4)
            expected = functional.linear(inputs, weight, bias)
            try:
                found = type(own).forward(twin, inputs)
                return found.shape == expected.shape and torch.allclose(found, expected, atol=1e-5)
            except Exception:  # whatever it needs besides its input, it is another product
                return False

    def token_mask(self, inputs: Tensor, mask: Tensor | None) -> Tensor | None:
        lead = inputs.shape[:-1]
        if mask is None or lead == mask.shape:
            return mask
        if lead.numel() == mask.numel():
            return mask.reshape(lead)
        require(
            bool(mask.all()),
            f"inputs of shape {list(inputs.shape)} do not show which tokens are padding: use samples of equal length, "
            "or batch_size=1",
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


class Conv1DForm(LinearForm):
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


class Conv2dForm(LayerAdapter):
    """`nn.Conv2d`: its patches times its flattened kernels, strip by strip of output rows; see convolution.py.

    Every position counts, whatever the batch's mask.
    """

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
        cls = type(self.module)
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
            parts = strip.patches, strip_of(delta, strip.rows, self.groups).float()
            if len(images) != samples:  # several images of one sample
                parts = (joined(part)[None] for part in parts)
            yield Pair(*parts, strip.last)


ADAPTERS: tuple[type[LayerAdapter], ...] = (LinearForm, Conv1DForm, Conv2dForm)


def find_adapter(module: nn.Module) -> LayerAdapter | None:
    """The form of a module's weight; None where no entry of `ADAPTERS` is of its kind, as for norms and embeddings."""
    return next((form(module) for form in ADAPTERS if isinstance(module, form.kind)), None)


def _per_sample(tensor: Tensor, mask: Tensor | None, samples: int) -> Tensor:
    """[…, d] as [samples, tokens, d]: with samples on the first axis, or one after another where the mask has them."""
    shown = tensor.shape[0] == samples or (mask is not None and tensor.shape[:-1].numel() == mask.numel())
    _check_samples(tensor, shown, samples)
    return tensor.reshape(samples, -1, tensor.shape[-1])


def _check_samples(tensor: Tensor, shown: bool, samples: int) -> None:
    require(
        shown or samples == 1,
        f"inputs of shape {list(tensor.shape)} do not show which of the batch's {samples} samples they belong to: use "
        "batch_size=1",
    )
