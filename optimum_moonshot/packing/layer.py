"""The metadata of a packed weight in files, the conversion between the stored weight and its matrix, and the compact
storage of matrices that are temporarily spilled to disk: packed where that is smaller.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from reprlib import repr as short
from tempfile import gettempdir
from typing import Any

import torch
from torch import Tensor

from ..errors import require
from ..files import writing
from ..mapped import SpillFile
from ..objective.patterns import NM, Unstructured, parse_pattern
from .codec import Codec, Parts, find_codec

Read = Callable[[str], Tensor]  # returns a stored tensor by its name

_DEFAULT = "bitmask"  # the format of entries without a "codec"
_PATTERN = re.compile(r"[1-9]\d{0,5}:[1-9]\d{0,5}")
_LARGEST = 2**62  # weights in a tensor


@dataclass(frozen=True)
class PackedLayer:
    """A packed weight.

    All methods use the weight in its stored layout, `shape`; codecs use its matrix [d_out, d_in]. Packed tensors are
    passed by name, possibly with tensors of other weights.
    """

    shape: tuple[int, ...]  # as stored in a dense checkpoint
    transposed: bool  # stored as [d_in, d_out], like GPT-2's Conv1D
    pattern: str  # "n:m" or "unstructured"
    dtype: str  # of the dense weight, such as "bfloat16"
    format: str = _DEFAULT  # the codec's name
    stacked: bool = False  # matrices of experts, [experts, d_out, d_in], or [experts, d_in, d_out] if transposed

    @classmethod
    def read(cls, entry: Any) -> "PackedLayer":
        """Parse an entry of the metadata; `MoonshotError` for a damaged one, or a format of a later release."""
        require(isinstance(entry, dict), f"its entry in the metadata is {short(entry)}, not an object")
        fields = ("shape", "transposed", "pattern", "dtype", "codec", "stacked")
        missing, unknown = [name for name in fields[:4] if name not in entry], sorted(entry.keys() - set(fields))
        require(not missing, f"its entry in the metadata has no {', '.join(missing)}")
        require(not unknown, f"its entry in the metadata has unknown fields: {short(unknown)}")
        codec = find_codec(entry.get("codec", _DEFAULT))
        sizes, stacked = entry["shape"], entry.get("stacked", False)
        valid = isinstance(sizes, list) and len(sizes) > 1 and all(type(size) is int and size > 0 for size in sizes)
        fits = valid and prod(sizes) <= _LARGEST
        require(fits, f"shape={short(sizes)}: it must be a list of two or more sizes")
        shape = tuple(sizes)
        layer = cls(shape, entry["transposed"], entry["pattern"], entry["dtype"], codec.name, stacked)
        transposed, pattern, dtype = layer.transposed, layer.pattern, layer.dtype
        for name, flag in (("transposed", transposed), ("stacked", stacked)):
            require(isinstance(flag, bool), f"{name}={short(flag)}: it must be true or false")
        require(not stacked or len(shape) == 3, f"shape={list(shape)}: only matrices of one size can be stacked")
        matrix = not transposed or stacked or len(shape) == 2
        require(matrix, f"shape={list(shape)}: only a matrix can be transposed")
        text = pattern if isinstance(pattern, str) else ""
        valid = text == Unstructured.kind or _PATTERN.fullmatch(text) is not None
        require(valid, f'pattern={short(pattern)}: it must be "n:m" or "{Unstructured.kind}"')
        fits = layer.nm is None or layer.nm.fits(layer.matrix)
        require(fits, f"pattern={pattern!r}: m must divide the {layer.matrix[1]} weights of a row")
        kind = getattr(torch, dtype, None) if isinstance(dtype, str) else None
        valid = isinstance(kind, torch.dtype) and kind.is_floating_point
        require(valid, f"dtype={short(dtype)}: it must be a floating-point type of torch")
        return layer

    def describe(self) -> dict[str, Any]:
        """The entry of the metadata; `read` is the inverse."""
        entry = {"shape": list(self.shape), "transposed": self.transposed, "pattern": self.pattern, "dtype": self.dtype}
        entry |= {} if self.format == _DEFAULT else {"codec": self.format}
        return {**entry, "stacked": True} if self.stacked else entry

    @property
    def matrix(self) -> tuple[int, int]:
        """d_out, d_in."""
        if self.stacked:
            count, rows, columns = self.shape
            return (count * columns, rows) if self.transposed else (count * rows, columns)
        if self.transposed:
            return self.shape[1], self.shape[0]
        return self.shape[0], int(torch.Size(self.shape[1:]).numel())

    def expert(self, transposed: bool) -> "PackedLayer":
        """The entry of one of the experts' matrices, of a weight [E, out, in], or [E, in, out] if `transposed`."""
        return replace(self, shape=self.shape[1:], transposed=transposed, stacked=False)

    @property
    def nm(self) -> NM | None:
        """The pattern if it is n:m; None for others, whose rows may have different numbers of values."""
        pattern = parse_pattern(self.pattern, None) if ":" in self.pattern else None
        return pattern if isinstance(pattern, NM) else None

    @property
    def codec(self) -> Codec:
        """The format."""
        return find_codec(self.format)

    def names(self, weight: str) -> list[str]:
        """Names of the packed tensors of a weight."""
        return list(self.codec.names(weight).values())

    def pack(self, weight: str, tensor: Tensor) -> dict[str, Tensor]:
        """Pack a weight in host memory; `MoonshotError` if it is not n:m, or not on the grid of the format."""
        names = self.codec.names(weight)
        return {names[suffix]: part for suffix, part in self.codec.pack(self.as_matrix(tensor), self.nm).items()}

    def check(self, weight: str, tensors: Mapping[str, Tensor]) -> None:
        """Raise `MoonshotError` unless the packed tensors are complete and of this `shape`, dtype and pattern."""
        self.codec.check(self.parts(weight, tensors), self.matrix, getattr(torch, self.dtype), self.nm)

    def unpack(self, weight: str, tensors: Mapping[str, Tensor]) -> Tensor:
        """The dense weight, on the device and in the dtype of the packed tensors; raises like `checked`."""
        parts = self.checked(weight, tensors)
        dense = self.codec.unpack(parts, self.matrix)
        if self.stacked and self.transposed:
            return dense.view(self.shape[0], -1, self.shape[1]).mT.contiguous()
        return dense.T.contiguous() if self.transposed else dense.view(self.shape)

    def checked(self, weight: str, tensors: Mapping[str, Tensor]) -> Parts:
        """Like `parts`, but `MoonshotError` also for tensors, in any dtype, that do not have this shape."""
        parts = self.parts(weight, tensors)
        self.codec.check(parts, self.matrix)
        return parts

    def parts(self, weight: str, tensors: Mapping[str, Tensor]) -> Parts:
        """The packed tensors of a weight, by suffix, for its codec; `MoonshotError` if one is missing."""
        names = self.codec.names(weight)
        missing = [name for name in names.values() if name not in tensors]
        require(not missing, f"{', '.join(missing)} is missing")
        return {suffix: tensors[name] for suffix, name in names.items()}

    def stored_bytes(self, tensor: Tensor) -> int:
        """Bytes of a weight in a packed checkpoint, which stores it dense if that is smaller."""
        return min(tensor.nbytes, self.codec.packed_bytes(self.as_matrix(tensor), self.nm))

    def as_matrix(self, tensor: Tensor) -> Tensor:
        """A tensor of this `shape` as a matrix [d_out, d_in]."""
        if self.stacked:
            return (tensor.mT if self.transposed else tensor).flatten(0, 1)
        return tensor.T if self.transposed else tensor.flatten(1)


def encode_spilled(name: str, matrix: Tensor) -> dict[str, Tensor]:
    """The tensors that represent a matrix in host memory: packed if that is smaller, else the matrix itself.

    The names of packed tensors have suffixes in addition to `name`.
    """
    layer = _layer(matrix.shape, str(matrix.dtype).removeprefix("torch."))
    if layer.stored_bytes(matrix) >= matrix.nbytes:
        return {name: matrix.contiguous()}
    return layer.pack(name, matrix)


def decode_spilled(name: str, names: set[str], read: Read, shape: tuple[int, int]) -> Tensor:
    """The inverse of `encode_spilled`, except for the sign of zeros; `names` are the names of the stored tensors."""
    if name in names:
        return read(name)
    layer = _layer(shape, "float32")
    return layer.unpack(name, {stored: read(stored) for stored in layer.names(name) if stored in names})


def spill_tensor(file: SpillFile, name: str, tensor: Tensor) -> Callable[[], Tensor]:
    """Write a tensor in host memory, of any shape, to disk; returns a function that reads it again."""
    shape, matrix = tensor.shape, tensor.flatten(1) if tensor.ndim > 1 else tensor.reshape(1, -1)
    size, field = (matrix.shape[0], matrix.shape[1]), "TMPDIR" if file.folder is None else "offload_dir"
    with writing(field, Path(file.folder or gettempdir())):
        load = {stored: file.put(part) for stored, part in encode_spilled(name, matrix).items()}
    return lambda: decode_spilled(name, {*load}, lambda stored: load[stored](), size).reshape(shape)


def _layer(shape: tuple[int, ...], dtype: str) -> PackedLayer:
    return PackedLayer(tuple(shape), False, Unstructured.kind, dtype)
