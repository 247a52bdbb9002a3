"""Packed formats of a matrix W [d_out, d_in]: what each of them can do, and which there are.

A format makes a few tensors of a matrix. A checkpoint stores each under the weight's own name and a suffix
(``NAME.weight_packed``, …), and a layer that stays packed in memory holds them as buffers of the same names. What
stands outside this folder asks the codec: it knows neither the suffixes nor how many tensors there are.

A new format is a file with a subclass of `Codec`, and one line in ``__init__.py``.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, device, dtype
from torch.nn import functional

from ..errors import require
from ..objective.patterns import NM

Parts = dict[str, Tensor]  # the tensors of a packed matrix, by their suffixes


class Verdict(NamedTuple):
    """Whether a packed matrix is multiplied faster than a dense one, and why."""

    faster: bool
    why: str  # such as "amx kernels", or "Triton is missing"


class Codec(ABC):
    """A packed format. It has no state: the tensors are passed to every method, by their suffixes."""

    name: ClassVar[str]  # of the format, in the files' metadata
    suffixes: ClassVar[tuple[str, ...]]  # of the tensors' names, after the weight's own

    @abstractmethod
    def pack(self, matrix: Tensor, pattern: NM | None) -> Parts:
        """The tensors of a matrix.

        Args:
            matrix: [d_out, d_in], floating point, in host memory; it need not be contiguous.
            pattern: the n:m that every row has; None stores exactly the nonzeros.

        Raises:
            MoonshotError: m consecutive inputs with more than n nonzeros.
        """

    @abstractmethod
    def check(
        self,
        parts: Mapping[str, Tensor],
        shape: tuple[int, int],
        dtype: dtype | None = None,
        pattern: NM | None = None,
    ) -> None:
        """Whether these tensors are one matrix: `unpack` and `linear` take only what passed.

        Args:
            parts: all tensors, by their suffixes.
            shape: d_out, d_in.
            dtype: of the dense matrix; None allows any.
            pattern: the n:m that every row has; None allows any.

        Raises:
            MoonshotError: what does not fit, with both sizes.
        """

    @abstractmethod
    def unpack(self, parts: Mapping[str, Tensor], shape: tuple[int, int], plan: Any = None) -> Tensor:
        """The dense matrix [d_out, d_in], on the device of `parts`; `check` must hold.

        Args:
            parts: all tensors, by their suffixes.
            shape: d_out, d_in.
            plan: what `plan` said of these tensors; None looks again.
        """

    @abstractmethod
    def packed_bytes(self, matrix: Tensor, pattern: NM | None) -> int:
        """Bytes of what `pack` would make of a matrix.

        Args:
            matrix, pattern: as for `pack`.
        """

    def plan(self, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> Any:
        """What `unpack` and `linear` would find out at every call; it holds for as long as the contents stay.

        Args:
            parts, shape: as for `unpack`.
        """
        return None

    def linear(
        self,
        inputs: Tensor,
        parts: Mapping[str, Tensor],
        shape: tuple[int, int],
        bias: Tensor | None = None,
        plan: Any = None,
    ) -> Tensor:
        """The product with a packed matrix: unpacked for this call, unless the format knows better.

        Args:
            inputs: [..., d_in], in the dtype and on the device of the values.
            parts: all tensors, by their suffixes.
            shape: d_out, d_in.
            bias: [d_out], or None.
            plan: what `plan` said of these tensors; None looks again.

        Returns:
            [..., d_out].
        """
        return functional.linear(inputs, self.unpack(parts, shape, plan), bias)

    def decoding(
        self, shape: tuple[int, int], pattern: NM | None, share: float, dtype: dtype, device: device
    ) -> Verdict:
        """Whether `linear` of one row of inputs, as a decoder has them, is faster than the dense product.

        Args:
            shape: d_out, d_in.
            pattern: the n:m that every row has; None where rows differ.
            share: bytes of the packed tensors, in bytes of the dense matrix.
            dtype: of the values and the inputs.
            device: that they are on.
        """
        return Verdict(False, f"{self.name} weights are unpacked at every call")

    def names(self, weight: str) -> dict[str, str]:
        """What the tensors of a weight are called, by their suffixes."""
        return {suffix: weight + suffix for suffix in self.suffixes}


_CODECS: dict[str, Codec] = {}


def register_codec(codec: Codec) -> None:
    """Make a format known by its name.

    Raises:
        MoonshotError: the name is taken.
    """
    require(codec.name not in _CODECS, f"the packed format {codec.name!r} is registered already")
    _CODECS[codec.name] = codec


def find_codec(name: str) -> Codec:
    """The format of a name.

    Raises:
        MoonshotError: there is none, in this release.
    """
    known = isinstance(name, str) and name in _CODECS
    require(known, f"codec={name!r}: this release reads {', '.join(sorted(_CODECS))}; update it")
    return _CODECS[name]


def suffixes() -> tuple[str, ...]:
    """Those of all formats, longest first."""
    found = {suffix for codec in _CODECS.values() for suffix in codec.suffixes}
    return tuple(sorted(found, key=lambda suffix: (-len(suffix), suffix)))


def weight_of(stored: str) -> str:
    """The name of the weight that a stored tensor belongs to: without the suffix, if it has one."""
    return next((stored.removesuffix(suffix) for suffix in suffixes() if stored.endswith(suffix)), stored)
