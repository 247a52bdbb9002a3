"""The weight files of a checkpoint: their names, index and headers, and the description of packed weights.

A dense checkpoint has transformers' names, ``model.safetensors`` or ``model-00001-of-00002.safetensors`` with an index.
A packed one has names that no other reader looks for, ``moonshot…``, and always an index: without this package,
transformers raises an error instead of initializing the missing weights at random.

``config.json`` of a packed checkpoint has ``quantization_config``: {quant_method: "moonshot", format: "packed",
version}. The metadata of a file has under "moonshot", as JSON: the version, `layers` (a `PackedLayer` each), of every
tensor in the file a SHA-256 (`sha256`), and its dtype and shape (`stored`, such as "bfloat16 [24, 16]"), the number of
weight files (`files`), and the SHA-256 of all this (`checksum`).
"""

import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path, PurePosixPath, PureWindowsPath
from reprlib import repr as short
from typing import Any

import torch
from torch import Tensor

from ..errors import MoonshotError, naming, require
from ..files import read_json
from ..packing import PackedLayer, weight_of

EXPORT = "compressed-tensors"  # the format for other readers, and `quant_method` in config.json
METHOD = "moonshot"  # `quant_method` in config.json, and the key in the files' metadata
VERSION = 1
EXPLICIT = "transformers_weights"  # in config.json: a file that transformers reads instead of its usual ones
PACKED_INDEX = "moonshot.safetensors.index.json"
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_LONGEST_HEADER = 100_000_000  # bytes, the limit of safetensors
_FIELDS = {"layers": dict, "sha256": dict, "stored": dict, "files": int}

Tensors = dict[str, Tensor]
Layers = dict[str, PackedLayer]


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json of a folder; `MoonshotError` if it is missing or damaged."""
    path = folder / "config.json"
    require(path.is_file(), f"{folder} holds no config.json", hint="give the folder of a checkpoint")
    return read_json(path)


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write config.json or an index, as transformers does."""
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def config_entry() -> dict[str, Any]:
    """`quantization_config` of a packed checkpoint."""
    return {"quant_method": METHOD, "format": "packed", "version": VERSION}


def check_config_entry(quantization: Mapping[str, Any]) -> None:
    """Raise `MoonshotError` unless this release reads a packed checkpoint with this `quantization_config`.

    An unknown field is refused because transformers would pass it on as if the caller had chosen it.
    """
    version, format = quantization.get("version"), quantization.get("format")
    if type(version) is not int or version != VERSION or format != "packed":
        raise MoonshotError(
            f"quantization_config={short(dict(quantization))} in config.json: this release reads format 'packed', "
            f"version {VERSION}; update it"
        )
    unknown = {name: value for name, value in quantization.items() if name not in config_entry()}
    require(not unknown, f"quantization_config in config.json has unknown fields: {short(unknown)}", hint="remove them")


def is_packed_checkpoint(folder: Path) -> bool:
    """Whether config.json declares a packed checkpoint; `MoonshotError` if this release does not read its version."""
    quantization = read_config(folder).get("quantization_config")
    if not isinstance(quantization, dict) or quantization.get("quant_method") != METHOD:
        return False
    check_config_entry(quantization)
    return True


def stored_format(folder: Path) -> str:
    """The format of a checkpoint, by config.json: that of other tools is "dense". Raises as `is_packed_checkpoint`."""
    if is_packed_checkpoint(folder):
        return "packed"
    quantization = read_config(folder).get("quantization_config")
    exported = isinstance(quantization, dict) and quantization.get("quant_method") == EXPORT
    return EXPORT if exported else "dense"


def index_path(folder: Path, packed: bool) -> Path:
    """The path of a checkpoint's index, which a dense one of a single file does not have."""
    return folder / (PACKED_INDEX if packed else _INDEX)


def weight_files(folder: Path, packed: bool) -> list[Path]:
    """The safetensors files of a checkpoint, in order; `MoonshotError` if any is missing, or the folder has others."""
    weight_map = check_index(folder, packed)
    listed = sorted(set(weight_map.values()))
    if packed:
        return [folder / file for file in listed]
    single = (folder / _SINGLE).is_file()
    if not weight_map and not single:
        lost = "; its config.json has no quantization_config" if (folder / PACKED_INDEX).is_file() else ""
        raise MoonshotError(f"{folder} holds no {_SINGLE} and no {_INDEX}{lost}")
    if weight_map and single and listed != [_SINGLE]:
        raise MoonshotError(
            f"{folder} holds {_SINGLE} beside {', '.join(listed[:2])}…, which the index names: transformers would load "
            "the first and ignore the others",
            hint="remove the files that do not belong to the model",
        )
    return [folder / file for file in listed or [_SINGLE]]


def check_index(folder: Path, packed: bool) -> dict[str, str]:
    """As `read_weight_map`; `MoonshotError` also if a file is missing."""
    weight_map = read_weight_map(folder, packed)
    for name, file in weight_map.items():
        require(os.path.isfile(folder / file), f"{folder}: {file} is missing, which holds {name}")
    return weight_map


def read_weight_map(folder: Path, packed: bool) -> dict[str, str]:
    """The file of every tensor, by the index; empty for a dense checkpoint of a single file.

    `MoonshotError` if the index is damaged, missing in a packed checkpoint, or names files outside of the folder.
    """
    path = index_path(folder, packed)
    if not path.exists():
        require(not packed, f"{path} is missing")
        return {}
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(f, str) for f in weight_map.values()):
        raise MoonshotError(f"{path} is damaged: it has no weight_map")
    for file in dict.fromkeys(weight_map.values()):
        require(_is_inside(folder, file), f"{path} names {file!r}: weights must be in the folder of their index")
    return weight_map


def _is_inside(folder: Path, file: str) -> bool:
    """Whether a path in an index stays in its folder; links to files are allowed, as in the Hub's cache."""
    windows = PureWindowsPath(file)
    if not windows.parts or windows.anchor or PurePosixPath(file).is_absolute() or ".." in windows.parts:
        return False
    try:
        return (folder / file).parent.resolve().is_relative_to(folder.resolve())
    except (OSError, ValueError):  # not a path
        return False


def new_names(count: int, packed: bool) -> list[str]:
    """The names of `count` new weight files."""
    stem = METHOD if packed else "model"
    if count == 1:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]


def read_header(path: Path) -> tuple[dict[str, str], frozenset[str]]:
    """The metadata and tensor names of a safetensors file; `MoonshotError` names the first layer lost by truncation."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length) if length <= min(size, _LONGEST_HEADER) else b"")
        metadata = header.pop("__metadata__", None) or {}
        ends = {name: 8 + length + entry["data_offsets"][1] for name, entry in header.items()}
        last = max(ends.values(), default=0)
        strings = all(isinstance(value, str) for value in metadata.values())
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        raise MoonshotError(f"{path} is damaged: its header cannot be read") from None
    require(strings, f"{path} is damaged: its metadata contains other values than strings")
    cut = [name for name, end in sorted(ends.items(), key=lambda item: item[1]) if end > size]
    if cut:
        raise MoonshotError(
            f"{layer_of(cut[0])}: {path.name} is truncated, it has {size} of {last} bytes; {len(cut)} tensors are lost"
        )
    return metadata, frozenset(header)


def read_shapes(path: Path) -> tuple[dict[str, str], dict[str, tuple[int, ...]]]:
    """The metadata of a new safetensors file, and the shapes of its tensors; safetensors opens no path of any bytes."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    metadata = header.pop("__metadata__", {})
    return metadata, {name: tuple(entry["shape"]) for name, entry in header.items()}


def tensor_bytes(path: Path) -> int:
    """The bytes of all tensors in a new safetensors file."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
    return path.stat().st_size - 8 - int(length)


def sort_metadata(path: Path) -> None:
    """Sort the metadata of a new file, so that equal weights are equal bytes: safetensors writes it in random order."""
    with path.open("r+b") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        require(len(text) <= length, f"{path}: safetensors wrote a header of {length} bytes for one of {len(text)}")
        file.seek(8)
        file.write(text.ljust(length))


def layer_of(stored: str) -> str:
    """The layer of a stored tensor, for messages."""
    return weight_of(stored).removesuffix(".weight")


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
        """Describe the tensors of a file, which are in host memory, independently of their order."""
        names = sorted(tensors)
        digests = {name: tensor_digest(tensors[name]) for name in names}
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
        """The description in a file's metadata; None if it has none. `MoonshotError` names a damaged layer or field."""
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
        layers = Layers()
        for name, entry in values["layers"].items():
            with naming(name):
                layers[name] = PackedLayer.read(entry)
        checksum = values.pop("checksum", None)
        return cls(layers, values["sha256"], values["stored"], values["files"], checksum == _checksum(values))


def described_layers(metadata: Mapping[str, str] | None) -> Layers:
    """The packed layers that a file's metadata describes; none for a dense file. Raises as `Description.read`."""
    description = Description.read(metadata or {})
    return {} if description is None else description.layers


def _checksum(values: dict[str, Any]) -> str:
    return sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def tensor_digest(tensor: Tensor) -> str:
    """SHA-256 of the bytes, in row-major order, of a tensor in host memory."""
    content = tensor.contiguous().flatten()
    return sha256(content.view(torch.uint8).numpy().data if content.numel() else b"").hexdigest()


def kind(tensor: Tensor) -> str:
    """Dtype and shape of a tensor, such as "bfloat16 [24, 16]"."""
    return f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")
