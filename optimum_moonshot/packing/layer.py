"""What the files' metadata says of a packed weight, and the way between the weight as it is stored and its matrix."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from reprlib import repr as short
from typing import Any

import torch
from torch import Tensor

from ..errors import require
from ..objective.patterns import NM, Unstructured, parse_pattern
from .codec import Codec, Parts, find_codec

_FIRST = "bitmask"  # the format of entries that name none
_PATTERN = re.compile(r"[1-9]\d{0,5}:[1-9]\d{0,5}")
_LARGEST = 2**62  # weights in a tensor


@dataclass(frozen=True)
class PackedLayer:
    """What a packed weight was.

    Every method takes the weight in the layout it is stored in, `shape`; the codecs see its matrix [d_out, d_in].
    """

    shape: tuple[int, ...]  # as stored in a dense checkpoint
    transposed: bool  # stored [d_in, d_out], as GPT-2's Conv1D
    pattern: str  # "n:m" or "unstructured"
    dtype: str  # of the dense weight, as "bfloat16"
    format: str = _FIRST  # the codec's name

    @classmethod
    def read(cls, entry: Any) -> "PackedLayer":
        """From an entry of the metadata, which anything may have happened to.

        Raises:
            MoonshotError: an entry that no release wrote, with the field; one of a later release.
        """
        require(isinstance(entry, dict), f"its entry in the metadata is {short(entry)}, no object")
        known = ("shape", "transposed", "pattern", "dtype", "codec")
        missing, unknown = [name for name in known[:4] if name not in entry], sorted(entry.keys() - set(known))
        require(not missing, f"its entry in the metadata lacks {', '.join(missing)}")
        require(not unknown, f"its entry in the metadata has unknown fields: {short(unknown)}")
        codec = find_codec(entry.get("codec", _FIRST))
        layer = cls(_read_shape(entry["shape"]), entry["transposed"], entry["pattern"], entry["dtype"], codec.name)
        layer._check()
        return layer

    def describe(self) -> dict[str, Any]:
        """The entry of the metadata; `read` is the inverse."""
        entry = {"shape": list(self.shape), "transposed": self.transposed, "pattern": self.pattern, "dtype": self.dtype}
        return entry if self.format == _FIRST else {**entry, "codec": self.format}

    def _check(self) -> None:
        require(isinstance(self.transposed, bool), f"transposed={short(self.transposed)}: it is true or false")
        require(not self.transposed or len(self.shape) == 2, f"shape={list(self.shape)}: only a matrix is transposed")
        text = self.pattern if isinstance(self.pattern, str) else ""
        named = text == Unstructured.kind or _PATTERN.fullmatch(text) is not None
        require(named, f'pattern={short(self.pattern)}: it is "n:m" or "{Unstructured.kind}"')
        fits = self.nm is None or self.nm.fits(self.matrix)
        require(fits, f"pattern={self.pattern!r} does not divide rows of {self.matrix[1]} weights")
        dtype = getattr(torch, self.dtype, None) if isinstance(self.dtype, str) else None
        known = isinstance(dtype, torch.dtype) and dtype.is_floating_point
        require(known, f"dtype={short(self.dtype)}: it is a floating-point type of torch")

    @property
    def matrix(self) -> tuple[int, int]:
        """d_out, d_in."""
        if self.transposed:
            return self.shape[1], self.shape[0]
        return self.shape[0], int(torch.Size(self.shape[1:]).numel())

    @property
    def nm(self) -> NM | None:
        """The pattern where it is n:m; None for all others, whose rows may differ in length."""
        found = parse_pattern(self.pattern, None) if ":" in self.pattern else None
        return found if isinstance(found, NM) else None

    @property
    def codec(self) -> Codec:
        """The format."""
        return find_codec(self.format)

    def names(self, weight: str) -> list[str]:
        """What the packed tensors of a weight of this name are called."""
        return list(self.codec.names(weight).values())

    def pack(self, weight: str, tensor: Tensor) -> dict[str, Tensor]:
        """The packed tensors of a weight, by their names.

        Args:
            weight: its name.
            tensor: the dense weight, of this `shape`, in host memory.

        Raises:
            MoonshotError: it is not n:m.
        """
        names = self.codec.names(weight)
        return {names[suffix]: part for suffix, part in self.codec.pack(self.as_matrix(tensor), self.nm).items()}

    def check(self, weight: str, tensors: Mapping[str, Tensor]) -> None:
        """Raise `MoonshotError` unless the packed tensors are all there and of this `shape`, dtype and pattern.

        Args:
            weight: the weight's name.
            tensors: the packed ones by their names; others among them do not matter.

        Raises:
            MoonshotError: what is missing or does not fit.
        """
        self.codec.check(self.parts(weight, tensors), self.matrix, getattr(torch, self.dtype), self.nm)

    def unpack(self, weight: str, tensors: Mapping[str, Tensor]) -> Tensor:
        """The dense weight, of this `shape`, on the device and in the dtype of the packed tensors.

        Args:
            weight: its name.
            tensors: the packed ones by their names, in any floating-point dtype; others among them do not matter.

        Raises:
            MoonshotError: a tensor is missing, or they are no weight of this shape.
        """
        parts = self.parts(weight, tensors)
        self.codec.check(parts, self.matrix)
        dense = self.codec.unpack(parts, self.matrix)
        return dense.T.contiguous() if self.transposed else dense.view(self.shape)

    def parts(self, weight: str, tensors: Mapping[str, Tensor]) -> Parts:
        """The packed tensors of a weight as its codec takes them, by their suffixes.

        Args:
            weight, tensors: as for `unpack`.

        Raises:
            MoonshotError: one is missing.
        """
        names = self.codec.names(weight)
        missing = [name for name in names.values() if name not in tensors]
        require(not missing, f"{', '.join(missing)} is missing")
        return {suffix: tensors[name] for suffix, name in names.items()}

    def stored_bytes(self, tensor: Tensor) -> int:
        """Bytes of a weight in a packed checkpoint, where it stays dense if that is smaller."""
        return min(tensor.nbytes, self.codec.packed_bytes(self.as_matrix(tensor), self.nm))

    def as_matrix(self, tensor: Tensor) -> Tensor:
        """[d_out, d_in] of a tensor of this `shape`."""
        return tensor.T if self.transposed else tensor.flatten(1)


def _read_shape(shape: Any) -> tuple[int, ...]:
    sizes = isinstance(shape, list) and len(shape) > 1 and all(type(size) is int and size > 0 for size in shape)
    total = 1
    for size in shape if sizes else ():
        total *= size
    require(sizes and total <= _LARGEST, f"shape={short(shape)}: it is a list of two or more sizes")
    return tuple(shape)
