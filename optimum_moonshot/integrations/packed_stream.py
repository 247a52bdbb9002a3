"""Unpacking of packed weights in a stream of a checkpoint's tensors."""

from collections.abc import Callable, Iterable, Iterator

from torch import Tensor

from ..checkpoint.packed_format import Layers, Tensors
from ..errors import naming, require
from ..packing import weight_of


def unpacked(
    tensors: Iterable[tuple[str, Tensor]], find_layers: Callable[[], Layers], prefix: str = ""
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a dense checkpoint, each packed weight as soon as its last tensor is read.

    Args:
        tensors: names and tensors of any shape, in any order.
        find_layers: returns the packed weights by their names in the files; called at the first tensor with the name
            of a packed one, and never for checkpoints of other programs.
        prefix: of all names in the stream, absent in the files.

    Raises:
        MoonshotError: raised by `find_layers`; tensors that do not unpack, or a weight with a missing tensor.
    """
    layers: Layers | None = None
    waiting: dict[str, Tensors] = {}
    for name, tensor in tensors:
        stored = name.removeprefix(prefix)
        weight = weight_of(stored)
        if weight != stored and layers is None:
            layers = find_layers()
        if weight == stored or not layers or weight not in layers:
            yield name, tensor
            continue
        layer, parts = layers[weight], waiting.setdefault(weight, {})
        parts[stored] = tensor
        if len(parts) == len(layer.names(weight)):
            with naming(weight):
                dense = layer.unpack(weight, waiting.pop(weight))
            yield prefix + weight, dense
    missing = next(iter(waiting), "")
    with naming(missing):
        require(not waiting, "not all of its packed tensors were read")
