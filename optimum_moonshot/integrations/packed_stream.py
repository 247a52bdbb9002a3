"""A stream of a checkpoint's tensors in which packed weights become dense ones."""

from collections.abc import Callable, Iterable, Iterator

from torch import Tensor

from ..checkpoint.packed_format import Layers, Tensors
from ..errors import naming, require
from ..packing import weight_of


def unpacked(
    tensors: Iterable[tuple[str, Tensor]], find_layers: Callable[[], Layers], prefix: str = ""
) -> Iterator[tuple[str, Tensor]]:
    """The same tensors by the names of a dense checkpoint, each packed weight as soon as all its tensors were there.

    Args:
        tensors: names and tensors of any shape, in any order.
        find_layers: the packed weights of the files, by their names there; called when the first tensor comes that has
            a packed one's name, and not at all for others' checkpoints.
        prefix: of all names in the stream, which the files do not have.

    Raises:
        MoonshotError: what `find_layers` says; tensors that make no weight, or a weight of which one is missing.
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
    require(not waiting, f"{missing.removesuffix('.weight')}: not all of its packed tensors were read")
