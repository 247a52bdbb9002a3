"""Packed formats of a matrix W [d_out, d_in]: their interface and registry.

A format represents a matrix by a few tensors. A checkpoint stores each under the weight's name with a suffix
(``NAME.weight_packed``, …), and a layer that is packed in memory has them as buffers of the same names. Code outside
this package uses the codec only: it depends neither on the suffixes nor on the number of tensors.

To add a format, add a file with a subclass of `Codec`, and one line in ``__init__.py``.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, device, dtype
from torch.nn import functional

from ..errors import MoonshotError, require
from ..objective.patterns import NM

Parts = Mapping[str, Tensor]  # the tensors of a packed matrix, by suffix
Shape = tuple[int, int]  # d_out, d_in
# Inputs of products with integer codes: rounded to 8 bits per row and group, where that is faster, or never rounded.
INPUTS = ("int8", "float")


class Verdict(NamedTuple):
    """Whether products with a packed matrix are faster than with a dense one, and why."""

    faster: bool
    why: str  # such as "amx kernels", or "Triton is missing"


class Codec(ABC):
    """A packed format. Stateless: all methods get the tensors of a matrix as an argument.

    In all methods, `parts` has all tensors of one matrix by suffix, and `shape` is its (d_out, d_in); `pattern` is the
    n:m of all its rows, or None if rows differ; `plan` is the result of the method `plan` for these tensors, and is
    computed if it is None; inputs have the dtype and the device of the values.
    """

    name: str  # in the metadata of files
    suffixes: ClassVar[tuple[str, ...]]  # appended to the weight's name for each tensor
    looks_up: ClassVar[bool] = False  # whether `lookup` unpacks the rows alone

    @abstractmethod
    def pack(self, matrix: Tensor, pattern: NM | None) -> Parts:
        """Pack a floating-point matrix in host memory, of any strides; without a pattern, exactly the nonzeros.

        Raises:
            MoonshotError: m consecutive inputs have more than n nonzeros.
        """

    @abstractmethod
    def check(self, parts: Parts, shape: Shape, dtype: dtype | None = None, pattern: NM | None = None) -> None:
        """Raise `MoonshotError` unless the tensors are those of a matrix; all other methods require valid ones.

        A `dtype` or a `pattern` of None allows any.
        """

    @abstractmethod
    def unpack(self, parts: Parts, shape: Shape, plan: Any = None) -> Tensor:
        """The dense matrix [d_out, d_in], on the device of `parts`."""

    @abstractmethod
    def packed_bytes(self, matrix: Tensor, pattern: NM | None) -> int:
        """Bytes of the result of `pack`, without packing."""

    @abstractmethod
    def rows(self, parts: Parts, shape: Shape, first: int, stop: int, plan: Any = None) -> tuple[Parts, Any]:
        """The tensors of rows `first` to `stop` − 1, views where possible, and their plan."""

    def stack(self, matrices: Sequence[Parts], shapes: Sequence[Shape]) -> Parts:
        """The tensors of one matrix with the rows of several of one dtype and d_in; by default, concatenated."""
        return {suffix: torch.cat([parts[suffix] for parts in matrices]) for suffix in self.suffixes}

    def plan(self, parts: Parts, shape: Shape) -> Any:
        """Precompute data for `unpack` and `linear`, valid until the contents of the tensors change."""
        return None

    def linear(
        self, inputs: Tensor, parts: Parts, shape: Shape, bias: Tensor | None = None, plan: Any = None
    ) -> Tensor:
        """The product x Wᵀ + bias: [..., d_in] → [..., d_out]; by default, the matrix is unpacked at each call."""
        return functional.linear(inputs, self.unpack(parts, shape, plan), bias)

    def lookup(self, rows: Tensor, parts: Parts, shape: Shape, plan: Any = None) -> Tensor:
        """The dense rows with these indices, of any shape, as an embedding: [*rows.shape, d_in].

        By default, the matrix is unpacked at each call.
        """
        return functional.embedding(rows, self.unpack(parts, shape, plan))

    def direct(
        self, parts: Parts, shape: Shape, bias: Tensor | None = None, plan: Any = None
    ) -> Callable[[Tensor], Tensor | None] | None:
        """`linear` as one call of the compiled library, with precomputed arguments; None if there is no such call.

        A call of a torch operator takes 45 µs, more than the product of a small matrix. The function is
        for contiguous inputs in host memory without gradients, and valid while the tensors keep their addresses; it
        returns None for numbers of rows for which `linear` is faster.
        """
        return None

    def grouped(self, inputs: Tensor, counts: Tensor, parts: Parts, shape: Shape, plan: Any = None) -> Tensor:
        """Multiply each group of inputs by its own matrix; these matrices are stacked to one packed matrix.

        By default, one call of `linear` for each group with inputs.

        Args:
            inputs: [rows, d_in], group after group.
            counts: int64 [groups], rows of inputs of each group; the rows after these have outputs 0.
            parts: of the packed matrix.
            shape: groups · d_out, d_in.
            plan: of the packed matrix.

        Returns:
            [rows, d_out].
        """
        d_out, first, outputs = shape[0] // len(counts), 0, []
        for group, count in enumerate(counts.tolist()):
            if count:
                rows, planned = self.rows(parts, shape, group * d_out, (group + 1) * d_out, plan)
                outputs.append(self.linear(inputs[first : first + count], rows, (d_out, shape[1]), None, planned))
                first += count
        outputs.append(inputs.new_zeros(len(inputs) - first, d_out))
        return torch.cat(outputs)

    def decoding(self, shape: Shape, pattern: NM | None, fraction: float, dtype: dtype, device: device) -> Verdict:
        """Whether `linear` is faster than the dense product for one row of inputs, as in decoding.

        `fraction` are the bytes of the packed tensors, relative to the dense matrix; values and inputs have this dtype
        and device.
        """
        return Verdict(False, f"{self.name} weights are unpacked at every call")

    def with_inputs(self, inputs: str) -> "Codec":
        """This format, for products with inputs in one of `INPUTS`; the same if it never rounds inputs."""
        return self

    def named(self, name: str) -> "Codec | None":
        """The format of this name, if it is this one or another one of its family."""
        return self if name == self.name else None

    def names(self, weight: str) -> dict[str, str]:
        """Names of the tensors of a weight, by suffix."""
        return {suffix: weight + suffix for suffix in self.suffixes}


_CODECS: dict[str, Codec] = {}


def register_codec(codec: Codec) -> None:
    """Register a format by its name; `MoonshotError` if the name is taken."""
    require(codec.name not in _CODECS, f"the packed format {codec.name!r} is already registered")
    _CODECS[codec.name] = codec


def find_codec(name: str) -> Codec:
    """The format of a name, which is registered or of the family of a registered one; `MoonshotError` for others."""
    for codec in _CODECS.values() if isinstance(name, str) else ():
        named = codec.named(name)
        if named is not None:
            return named
    message = f"codec={name!r}: this release reads {', '.join(sorted(_CODECS))}"
    raise MoonshotError(message, hint="update the package")


def suffixes() -> tuple[str, ...]:
    """The suffixes of all formats, longest first."""
    unique = {suffix for codec in _CODECS.values() for suffix in codec.suffixes}
    return tuple(sorted(unique, key=lambda suffix: (-len(suffix), suffix)))


def weight_of(stored: str) -> str:
    """The weight of a stored tensor: its name without the suffix of a format."""
    return next((stored.removesuffix(suffix) for suffix in suffixes() if stored.endswith(suffix)), stored)


def register_operators(
    library: torch.library.Library,
    products: Sequence[tuple[str, Callable[..., Any], Callable[..., Any]]],
    gradients: Sequence[tuple[str, Callable[..., Any], Callable[..., Any]]],
) -> None:
    """Implement the operators that a library of the namespace "moonshot" has defined.

    Args:
        library: defines the signatures.
        products: the name of each operator, its function, and a function for the shape of its output.
        gradients: the name of each differentiable operator, its backward pass, and a function that saves its context.
    """
    for name, compute, fake in products:
        library.impl(name, compute, "CompositeExplicitAutograd")
        torch.library.register_fake(f"moonshot::{name}", fake, lib=library)
    for name, backward, remember in gradients:
        torch.library.register_autograd(f"moonshot::{name}", backward, setup_context=remember, lib=library)
