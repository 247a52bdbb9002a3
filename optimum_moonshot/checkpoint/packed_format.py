"""What a packed checkpoint says of itself: one entry in config.json, and a description in the metadata of every file.

``config.json`` has ``quantization_config``: {quant_method: "moonshot", format: "packed", version}. A file's metadata
has under "moonshot", as JSON: the version, `layers` (a `PackedLayer` each), and of every tensor in the file a SHA-256
(`sha256`) and what it is (`stored`, such as "bfloat16 [24, 16]"); how many weight files there are (`files`), and the
SHA-256 of all this (`checksum`).

Version 1 lacks `stored`, `files` and `checksum`, and its files are called as those of a dense checkpoint.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from reprlib import repr as short
from typing import Any

import torch
from torch import Tensor

from ..errors import MoonshotError, naming, require
from ..packing import PackedLayer

METHOD = "moonshot"  # `quant_method` in config.json, and the key in the files' metadata
VERSION = 2
EXPLICIT = "transformers_weights"  # in config.json: a file that transformers reads in place of its usual ones
_READABLE = (1, VERSION)

Tensors = dict[str, Tensor]
Layers = dict[str, PackedLayer]


def config_entry() -> dict[str, Any]:
    """`quantization_config` of a packed checkpoint."""
    return {"quant_method": METHOD, "format": "packed", "version": VERSION}


def read_version(quantization: Mapping[str, Any]) -> int:
    """The version of a packed checkpoint.

    Args:
        quantization: `quantization_config` of its config.json.

    Raises:
        MoonshotError: a version or a format that this release does not read, or a field that no release writes: what
            a file says must not be mistaken for what the caller chose.
    """
    version, format = quantization.get("version"), quantization.get("format")
    require(
        type(version) is int and version in _READABLE and format == "packed",
        f"quantization_config={short(dict(quantization))} in config.json: this release reads format 'packed', versions "
        f"{' and '.join(map(str, _READABLE))}; update it",
    )
    unknown = {name: value for name, value in quantization.items() if name not in config_entry()}
    require(not unknown, f"quantization_config in config.json has unknown fields: {short(unknown)}; remove them")
    return version


@dataclass(frozen=True)
class Description:
    """What a file's metadata says of its tensors."""

    version: int
    layers: Layers  # by the names of the weights
    digests: dict[str, str]  # SHA-256 of every tensor
    stored: dict[str, str] | None = None  # what every tensor is, as `kind` has it; None in version 1
    files: int | None = None  # weight files of the checkpoint; None in version 1
    intact: bool = True  # whether its own checksum holds

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], layers: Layers, files: int) -> "Description":
        """Of the tensors of a file, `layers` the packed among them; the same in whatever order they come.

        Args:
            tensors: of any shape, in host memory, by their names.
            layers: by the names of the weights.
            files: how many the checkpoint has.
        """
        names = sorted(tensors)
        digests = {name: digest(tensors[name]) for name in names}
        return cls(VERSION, dict(sorted(layers.items())), digests, {name: kind(tensors[name]) for name in names}, files)

    def to_json(self) -> str:
        """For a file's metadata; `read` is the inverse."""
        values = {
            "version": self.version,
            "layers": {name: layer.describe() for name, layer in self.layers.items()},
            "sha256": self.digests,
            "stored": self.stored,
            "files": self.files,
        }
        return json.dumps({**values, "checksum": _checksum(values)})

    @classmethod
    def read(cls, metadata: Mapping[str, str]) -> "Description | None":
        """From a file's metadata; None where it has none: the file is not packed.

        Raises:
            MoonshotError: a newer version, or damaged, with the layer and the field where they can be told.
        """
        if METHOD not in metadata:
            return None
        try:
            values = json.loads(metadata[METHOD])
        except (ValueError, RecursionError) as error:
            raise MoonshotError(f"the metadata of the packed layers is damaged ({error})") from None
        require(isinstance(values, dict), "the metadata of the packed layers is damaged: it is no object")
        version = values.get("version")
        known = type(version) is int and version in _READABLE
        require(known, f"version={short(version)} of a packed file: this release reads up to {VERSION}; update it")
        wanted = {"layers": dict, "sha256": dict} | ({"stored": dict, "files": int} if version > 1 else {})
        for name, wants in wanted.items():
            right = type(values.get(name)) is wants
            require(right, f"the metadata of the packed layers is damaged: {name}={short(values.get(name))}")
        layers = {name: _read_layer(name, entry) for name, entry in values["layers"].items()}
        checksum = values.pop("checksum", None)
        intact = version == 1 or checksum == _checksum(values)
        return cls(version, layers, values["sha256"], values.get("stored"), values.get("files"), intact)


def _read_layer(name: str, entry: Any) -> PackedLayer:
    with naming(name):
        return PackedLayer.read(entry)


def _checksum(values: dict[str, Any]) -> str:
    return sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def digest(tensor: Tensor) -> str:
    """SHA-256 of a tensor's bytes, in row-major order."""
    content = tensor.contiguous().flatten()
    return sha256(content.view(torch.uint8).numpy().data if content.numel() else b"").hexdigest()


def kind(tensor: Tensor) -> str:
    """Dtype and shape of a tensor, such as "bfloat16 [24, 16]"."""
    return f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"


def dtype_name(dtype: torch.dtype) -> str:
    """As "bfloat16"."""
    return str(dtype).removeprefix("torch.")
