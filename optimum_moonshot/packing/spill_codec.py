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
    """The inverse of `encode_spilled`, except for the sign of zeros; `names` are those of the stored tensors.

    Raises:
        MoonshotError: a tensor is missing, or they do not have this shape.
    """
    if name in names:
        return read(name)
    layer = _layer(shape, "float32")
    return layer.unpack(name, {part: read(part) for part in layer.names(name) if part in names})


def spill_matrix(file: SpillFile, name: str, matrix: Tensor) -> Callable[[], Tensor]:
    """Write a matrix in host memory to disk; returns a function that reads it again.

    Raises:
        MoonshotError: the folder cannot be written, or the disk is full.
    """
    field = "TMPDIR" if file.folder is None else "offload_dir"
    with writing(field, Path(file.folder or gettempdir())):
        parts = {part: file.put(tensor) for part, tensor in encode_spilled(name, matrix).items()}
    shape = (matrix.shape[0], matrix.shape[1])
    return lambda: decode_spilled(name, set(parts), lambda part: parts[part](), shape)


def spill_tensor(file: SpillFile, name: str, tensor: Tensor) -> Callable[[], Tensor]:
    """Like `spill_matrix`, but for a tensor of any shape."""
    shape = tuple(tensor.shape)
    load = spill_matrix(file, name, tensor.reshape((shape[0], -1) if len(shape) > 1 else (1, -1)))
    return lambda: load().reshape(shape)


def _layer(shape: tuple[int, ...], dtype: str) -> PackedLayer:
    return PackedLayer(tuple(shape), False, Unstructured.kind, dtype)
