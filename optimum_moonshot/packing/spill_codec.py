"""A matrix on disk in as few bytes as its zeros allow, for results and weights that wait there."""

from collections.abc import Callable
from pathlib import Path
from tempfile import gettempdir

from torch import Tensor

from ..files import writing
from ..mapped import SpillFile
from ..objective.patterns import Unstructured
from .layer import PackedLayer

Read = Callable[[str], Tensor]  # from a stored tensor's name to it


def encode_spilled(name: str, matrix: Tensor) -> dict[str, Tensor]:
    """The tensors that stand for a matrix: packed where that is smaller, else the matrix itself.

    Args:
        name: of it; packed ones have suffixes after it.
        matrix: [d_out, d_in] in host memory, floating point.
    """
    layer = _layer(matrix.shape, str(matrix.dtype).removeprefix("torch."))
    if layer.stored_bytes(matrix) >= matrix.nbytes:
        return {name: matrix.contiguous()}
    return layer.pack(name, matrix)


def decode_spilled(name: str, names: set[str], read: Read, shape: tuple[int, int]) -> Tensor:
    """The inverse of `encode_spilled`, but for the sign of zeros.

    Args:
        name: of the matrix.
        names: of the tensors that are there.
        read: gives each of them.
        shape: d_out, d_in.

    Raises:
        MoonshotError: a tensor is missing, or they are no matrix of this shape.
    """
    if name in names:
        return read(name)
    layer = _layer(shape, "float32")
    return layer.unpack(name, {part: read(part) for part in layer.names(name) if part in names})


def spill_matrix(file: SpillFile, name: str, matrix: Tensor) -> Callable[[], Tensor]:
    """Write a matrix to disk, encode_spilled; what is returned reads it again.

    Args:
        file: where it goes.
        name: of it, for messages.
        matrix: [d_out, d_in] in host memory, floating point.

    Raises:
        MoonshotError: the folder cannot be written, or the disk is full.
    """
    field = "TMPDIR" if file.folder is None else "offload_dir"
    with writing(field, Path(file.folder or gettempdir())):
        parts = {part: file.put(tensor) for part, tensor in encode_spilled(name, matrix).items()}
    shape = (matrix.shape[0], matrix.shape[1])
    return lambda: decode_spilled(name, set(parts), lambda part: parts[part](), shape)


def _layer(shape: tuple[int, ...], dtype: str) -> PackedLayer:
    return PackedLayer(tuple(shape), False, Unstructured.kind, dtype)
