"""The packed weights in a folder."""

from checkpoints import tensors

from optimum_moonshot.packing import weight_of


def packed_names(folder):
    """The names of the weights that `folder` stores packed."""
    return {weight_of(name) for name in tensors(folder) if weight_of(name) != name}
