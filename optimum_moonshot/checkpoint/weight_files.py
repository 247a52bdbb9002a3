"""Which files of a folder hold a checkpoint's weights, and what they say before a tensor is read.

A dense checkpoint has transformers' names, ``model.safetensors`` or ``model-00001-of-00002.safetensors`` with an index.
A packed one has names that no other reader looks for, ``moonshot…``, and always an index: transformers without this
package stops at it, in place of making a model of random numbers.
"""

import json
import os
import struct
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

from ..errors import MoonshotError, require
from ..files import read_json
from ..packing import weight_of
from .packed_format import METHOD, read_version

PACKED_INDEX = "moonshot.safetensors.index.json"
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_LONGEST_HEADER = 100_000_000  # bytes; safetensors reads no longer one


class Header(NamedTuple):
    """What a safetensors file says of itself."""

    metadata: dict[str, str]
    names: frozenset[str]  # of its tensors


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a folder.

    Raises:
        MoonshotError: there is none, or it is damaged.
    """
    path = folder / "config.json"
    require(path.is_file(), f"{folder} holds no config.json: give the folder of a checkpoint")
    return read_json(path)


def packed_version(folder: Path) -> int | None:
    """The version of a packed checkpoint, by config.json; None for a dense one.

    Raises:
        MoonshotError: one that this release does not read.
    """
    quantization = read_config(folder).get("quantization_config")
    if not isinstance(quantization, dict) or quantization.get("quant_method") != METHOD:
        return None
    return read_version(quantization)


def checkpoint_format(folder: Path) -> str:
    """ "dense" or "packed", by config.json."""
    return "dense" if packed_version(folder) is None else "packed"


def index_path(folder: Path, version: int | None) -> Path:
    """Where the index of a checkpoint lies, if it has one.

    Args:
        folder: of the checkpoint.
        version: of a packed one; None for a dense one.
    """
    return folder / (_INDEX if version in (None, 1) else PACKED_INDEX)


def weight_files(folder: Path, version: int | None) -> list[Path]:
    """The safetensors files of a checkpoint, in order.

    Args:
        folder: of the checkpoint.
        version: of a packed one; None for a dense one.

    Raises:
        MoonshotError: there are none, one that the index names is missing or outside of the folder, or there are a
            whole model and an index beside each other.
    """
    places = index_places(folder, version)
    for name, file in places.items():
        require(os.path.isfile(folder / file), f"{folder}: {file} is missing, which holds {name}")
    if version not in (None, 1):
        return [folder / file for file in sorted(set(places.values()))]
    single = (folder / _SINGLE).is_file()
    lost = "" if version or not (folder / PACKED_INDEX).is_file() else "; its config.json has no quantization_config"
    require(bool(places) or single, f"{folder} holds no {_SINGLE} and no {_INDEX}{lost}")
    listed = sorted(set(places.values()))
    require(
        not places or not single or listed == [_SINGLE],
        f"{folder} holds {_SINGLE} beside {', '.join(listed[:2])}…, which the index names: transformers would load the "
        "first and leave out the others; remove what does not belong to the model",
    )
    return [folder / file for file in listed or [_SINGLE]]


def index_places(folder: Path, version: int | None) -> dict[str, str]:
    """The file of every tensor, by the index; empty where a dense checkpoint is one file only.

    Args:
        folder: of the checkpoint.
        version: of a packed one; None for a dense one.

    Raises:
        MoonshotError: the index is damaged, missing in a packed checkpoint, or names files outside of the folder.
    """
    path = index_path(folder, version)
    if not path.exists():
        require(version in (None, 1), f"{path} is missing")
        return {}
    places = read_json(path).get("weight_map")
    known = isinstance(places, dict) and bool(places) and all(isinstance(file, str) for file in places.values())
    require(known, f"{path} is damaged: it has no weight_map")
    for file in dict.fromkeys(places.values()):
        require(_inside(folder, file), f"{path} names {file!r}: weights lie in the folder of their index")
    return places


def _inside(folder: Path, file: str) -> bool:
    """Whether a path in an index stays in its folder; links to files are followed, as in the Hub's cache."""
    windows = PureWindowsPath(file)
    if not windows.parts or windows.anchor or PurePosixPath(file).is_absolute() or ".." in windows.parts:
        return False
    try:
        return (folder / file).parent.resolve().is_relative_to(folder.resolve())
    except (OSError, ValueError):  # no path at all
        return False


def new_names(count: int, packed: bool) -> list[str]:
    """What the weight files of a checkpoint are called.

    Args:
        count: how many there are.
        packed: whether it is a packed one.
    """
    stem = METHOD if packed else "model"
    if count == 1:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]


def read_header(path: Path) -> Header:
    """A safetensors file's metadata and names, after checking that the file is as long as its header says.

    Raises:
        MoonshotError: a header that cannot be read; a file that was cut off, with the first layer that is lost.
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
    require(strings, f"{path} is damaged: its metadata holds more than strings")
    cut = [name for name, end in sorted(ends.items(), key=lambda item: item[1]) if end > size]
    if cut:
        raise MoonshotError(
            f"{layer_of(cut[0])}: {path.name} is truncated, it has {size} of {last} bytes; {len(cut)} tensors are lost"
        )
    return Header(metadata, frozenset(header))


def sort_metadata(path: Path) -> None:
    """Put a file's metadata in the order of its names: safetensors writes it in another one each time.

    So the same weights are the same bytes.

    Args:
        path: of a file that safetensors has just written.

    Raises:
        MoonshotError: the sorted header is longer than what was written, which it never should be.
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
    """The layer that a stored tensor belongs to, for messages."""
    return weight_of(stored).removesuffix(".weight")
