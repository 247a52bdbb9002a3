"""The packed weights in a folder."""

from safetensors import safe_open

from optimum_moonshot.checkpoint.weight_files import described_layers


def packed_names(folder):
    """The names of the weights that `folder` stores packed."""
    names = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            names |= set(described_layers(file.metadata()))
    return names
