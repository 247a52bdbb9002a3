"""The weight files of a checkpoint: their names, their index and their headers.

A dense checkpoint has transformers' names, ``model.safetensors`` or ``model-00001-of-00002.safetensors`` with an index.
A packed one has names that no other reader looks for, ``moonshot…``, and always an index: without this package,
transformers raises an error instead of initializing the missing weights at random.
"""

import json
import os
import struct
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

from ..errors import MoonshotError, require
from ..files import read_json
from ..packing import weight_of
from .packed_format import METHOD, check_config_entry

PACKED_INDEX = "moonshot.safetensors.index.json"
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_LONGEST_HEADER = 100_000_000  # bytes, the limit of safetensors


class Header(NamedTuple):
    """The header of a safetensors file."""

    metadata: dict[str, str]
    names: frozenset[str]  # of the tensors


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json of a folder.

    Raises:
        MoonshotError: there is none, or it is damaged.
    """
    path = folder / "config.json"
    require(path.is_file(), f"{folder} holds no config.json", hint="give the folder of a checkpoint")
    return read_json(path)


def is_packed_checkpoint(folder: Path) -> bool:
    """Whether a checkpoint is packed, by config.json.

    Raises:
        MoonshotError: this release does not read its version.
    """
    quantization = read_config(folder).get("quantization_config")
    if not isinstance(quantization, dict) or quantization.get("quant_method") != METHOD:
        return False
    check_config_entry(quantization)
    return True


def index_path(folder: Path, packed: bool) -> Path:
    """The path of a checkpoint's index, which a dense one of a single file does not have.

    Args:
        folder: of the checkpoint.
        packed: whether it is packed.
    """
    return folder / (PACKED_INDEX if packed else _INDEX)


def weight_files(folder: Path, packed: bool) -> list[Path]:
    """The safetensors files of a checkpoint, in order.

    Args:
        folder: of the checkpoint.
        packed: whether it is packed.

    Raises:
        MoonshotError: there are none, a file of the index is missing or outside of the folder, or the folder contains
            both a whole model and an index of others.
    """
    weight_map = read_weight_map(folder, packed)
    for name, file in weight_map.items():
        require(os.path.isfile(folder / file), f"{folder}: {file} is missing, which holds {name}")
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


def read_weight_map(folder: Path, packed: bool) -> dict[str, str]:
    """The file of every tensor, by the index; empty for a dense checkpoint of a single file.

    Args:
        folder: of the checkpoint.
        packed: whether it is packed.

    Raises:
        MoonshotError: the index is damaged, missing in a packed checkpoint, or names files outside of the folder.
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
    """The names of new weight files.

    Args:
        count: number of files.
        packed: whether the checkpoint is packed.
    """
    stem = METHOD if packed else "model"
    if count == 1:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]


def read_header(path: Path) -> Header:
    """Read a safetensors file's metadata and names, and check that the file is not truncated.

    Raises:
        MoonshotError: the header cannot be read, or the file is truncated, with the first layer that is lost.
    """
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
    return Header(metadata, frozenset(header))


def sort_metadata(path: Path) -> None:
    """Sort the metadata of a file, so that equal weights are equal bytes: safetensors writes it in random order.

    Args:
        path: of a file that safetensors has just written.

    Raises:
        MoonshotError: the sorted header is longer than the original, which cannot happen.
    """
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
