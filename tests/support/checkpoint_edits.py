"""Edits to the files of a checkpoint: JSON values, tensors, metadata and headers."""

import json

from safetensors import safe_open
from safetensors.torch import save_file


def change_json(path, change):
    """Rewrites a JSON file after `change(values)`."""
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def change_config(folder, **values):
    """Overwrites entries of config.json."""
    change_json(folder / "config.json", lambda config: config.update(values))


def change_file(path, change):
    """Rewrites a safetensors file after `change(tensors, metadata)`."""
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        metadata = dict(file.metadata())
    change(tensors, metadata)
    save_file(tensors, path, metadata)


def change_description(path, change):
    """Rewrites the description of the packed layers in a file's metadata after `change(description)`."""

    def change_entry(_, metadata):
        description = json.loads(metadata["moonshot"])
        change(description)
        metadata["moonshot"] = json.dumps(description)

    change_file(path, change_entry)


def read_header(path):
    """The header of a safetensors file and the position of its first tensor."""
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:start]), start


def write_header(path, header):
    """Replaces the header by the given text; the tensors stay."""
    data = path.read_bytes()[read_header(path)[1] :]
    path.write_bytes(len(header.encode()).to_bytes(8, "little") + header.encode() + data)
