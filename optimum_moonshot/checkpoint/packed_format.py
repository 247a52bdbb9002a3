"""The description of packed weights: an entry in config.json, and one in the metadata of every weight file.

``config.json`` has ``quantization_config``: {quant_method: "moonshot", format: "packed", version}. The metadata of a
file has under "moonshot", as JSON: the version, `layers` (a `PackedLayer` each), of every tensor in the file a SHA-256
(`sha256`), and its dtype and shape (`stored`, such as "bfloat16 [24, 16]"), the number of weight files (`files`), and
the SHA-256 of all this (`checksum`).
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
VERSION = 1
EXPLICIT = "transformers_weights"  # in config.json: a file that transformers reads instead of its usual ones
_FIELDS = {"layers": dict, "sha256": dict, "stored": dict, "files": int}

Tensors = dict[str, Tensor]
Layers = dict[str, PackedLayer]


def config_entry() -> dict[str, Any]:
    """`quantization_config` of a packed checkpoint."""
    return {"quant_method": METHOD, "format": "packed", "version": VERSION}


def check_config_entry(quantization: Mapping[str, Any]) -> None:
    """Raise `MoonshotError` unless this release reads a packed checkpoint, and its entry has no unknown field.

    An unknown field is refused because transformers would pass it on as if the caller had chosen it.

    Args:
        quantization: `quantization_config` of its config.json.

    Raises:
        MoonshotError: another format or version, or an unknown field.
    """
    version, format = quantization.get("version"), quantization.get("format")
    if type(version) is not int or version != VERSION or format != "packed":
        raise MoonshotError(
            f"quantization_config={short(dict(quantization))} in config.json: this release reads format 'packed', "
            f"version {VERSION}; update it"
        )
    unknown = {name: value for name, value in quantization.items() if name not in config_entry()}
    require(not unknown, f"quantization_config in config.json has unknown fields: {short(unknown)}", hint="remove them")


@dataclass(frozen=True)
class Description:
    """The description of the tensors in a weight file."""

    layers: Layers  # by the names of the weights
    digests: dict[str, str]  # SHA-256 of every tensor
    stored: dict[str, str]  # `kind` of every tensor
    files: int  # number of weight files of the checkpoint
    intact: bool = True  # whether its own checksum is right

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], layers: Layers, files: int) -> "Description":
        """Describe the tensors of a file, independently of their order.

        Args:
            tensors: by their names; of any shape, in host memory.
            layers: the packed ones, by the names of the weights.
            files: number of weight files of the checkpoint.
        """
        names = sorted(tensors)
        digests = {name: digest(tensors[name]) for name in names}
        return cls(dict(sorted(layers.items())), digests, {name: kind(tensors[name]) for name in names}, files)

    def to_json(self) -> str:
        """The text for the file's metadata; `read` is the inverse."""
        values = {
            "version": VERSION,
            "layers": {name: layer.describe() for name, layer in self.layers.items()},
            "sha256": self.digests,
            "stored": self.stored,
            "files": self.files,
        }
        return json.dumps({**values, "checksum": _checksum(values)})

    @classmethod
    def read(cls, metadata: Mapping[str, str]) -> "Description | None":
        """Read a description from a file's metadata; None if there is none: the file is not packed.

        Raises:
            MoonshotError: another version, or damaged, with the layer and the field if they are known.
        """
        if METHOD not in metadata:
            return None
        try:
            values = json.loads(metadata[METHOD])
        except (ValueError, RecursionError) as error:
            raise MoonshotError(f"the metadata of the packed layers is damaged ({error})") from None
        require(isinstance(values, dict), "the metadata of the packed layers is damaged: it is not an object")
        version = values.get("version")
        same = type(version) is int and version == VERSION
        require(same, f"version={short(version)} of a packed file: this release reads {VERSION}; update it")
        for name, wanted in _FIELDS.items():
            valid = type(values.get(name)) is wanted
            require(valid, f"the metadata of the packed layers is damaged: {name}={short(values.get(name))}")
        layers = {name: _read_layer(name, entry) for name, entry in values["layers"].items()}
        checksum = values.pop("checksum", None)
        return cls(layers, values["sha256"], values["stored"], values["files"], checksum == _checksum(values))


def _read_layer(name: str, entry: Any) -> PackedLayer:
    with naming(name):
        return PackedLayer.read(entry)


def _checksum(values: dict[str, Any]) -> str:
    return sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def digest(tensor: Tensor) -> str:
    """SHA-256 of a tensor's bytes, in row-major order; of any shape, in host memory."""
    content = tensor.contiguous().flatten()
    return sha256(content.view(torch.uint8).numpy().data if content.numel() else b"").hexdigest()


def kind(tensor: Tensor) -> str:
    """Dtype and shape of a tensor, such as "bfloat16 [24, 16]"."""
    return f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")
