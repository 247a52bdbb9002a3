"""Compact storage of matrices that are temporarily spilled to disk: packed where that is smaller."""

from collections.abc import Callable
from pathlib import Path
from tempfile import gettempdir

from torch import Tensor

from ..files import writing
from ..mapped import SpillFile
from ..objective.patterns import Unstructured
from .layer import PackedLayer

Read = Callable[[str], Tensor]  # returns a stored tensor by its name


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
