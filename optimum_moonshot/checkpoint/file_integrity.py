"""Check that the weight files of a checkpoint are as they were written: names, sizes, and the bytes of packed ones."""

import os
import re
from collections.abc import Iterable, Iterator, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from reprlib import repr as short
from typing import Any

from safetensors import SafetensorError

from ..errors import MoonshotError, error_context, require
from ..packing import weight_of
from .weight_files import (
    EXPLICIT,
    Checkpoint,
    Description,
    StoredTensors,
    kind,
    layer_of,
    read_header,
    tensor_digest,
)

_SWITCH = "MOONSHOT_VERIFY"
_DISTRIBUTED = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors$")


def checksums_wanted() -> bool:
    """Whether `from_pretrained` compares checksums: not with MOONSHOT_VERIFY=0 in the environment."""
    value = os.environ.get(_SWITCH, "1")
    require(value in ("0", "1"), f"{_SWITCH}={value!r}: 0 skips the checksums of packed weights, 1 compares them")
    return value == "1"


def check_no_other_weights(checkpoint: Checkpoint) -> None:
    """Raise `MoonshotError` if transformers would load files that `check_files` does not check.

    Such files are an adapter, a distributed checkpoint, or a file that config.json of an unpacked checkpoint names.
    """
    for path in sorted(checkpoint.folder.iterdir()):
        other = path.name == "adapter_config.json" or _DISTRIBUTED.match(path.name)
        require(not other, f"{path}: transformers would load it too, unverified", hint="move it to another folder")
    explicit = checkpoint.config.get(EXPLICIT)
    if explicit is not None and not checkpoint.packed:
        message = f"{checkpoint.folder}: config.json names {EXPLICIT}={short(explicit)}"
        raise MoonshotError(message, hint="remove this entry")


def check_files(checkpoint: Checkpoint, checksums: bool = True) -> None:
    """Check that no weight file is truncated or missing, and every byte of a packed checkpoint.

    Without `checksums`, the tensors' bytes are not compared. `MoonshotError` names the layer that is damaged, truncated
    or missing, and its file.
    """
    files, files_by_name = checkpoint.files, dict[str, str]()
    for path in files:
        header = read_header(path)
        with _in_file(path):
            description = Description.read(header.metadata)
            if not checkpoint.packed:
                require(description is None, "it contains packed weights, but config.json has no quantization_config")
                with StoredTensors([path]):  # safetensors' own checks of the header
                    pass
            elif description is None:
                raise MoonshotError("its metadata has no description of its tensors")
            else:
                _check_packed(path, header.shapes.keys(), description, checksums)
                complete = description.files == len(files)
                require(complete, f"it is one of {description.files} files, the index names {len(files)}")
        files_by_name |= dict.fromkeys(header.shapes, path.relative_to(checkpoint.folder).as_posix())
    weight_map = checkpoint.weight_map
    _require_none(weight_map.keys() - files_by_name.keys(), "is named by the index and in no file")
    if checkpoint.packed:
        _require_none(files_by_name.keys() - weight_map.keys(), "is in a file and not in the index")
        moved = (name for name, file in files_by_name.items() if weight_map[name] != file)
        _require_none(moved, "is in another file than the index says")


def check_complete(missing: Iterable[str], unknown: Iterable[str], mismatched: Iterable[Any] = ()) -> None:
    """Raise `MoonshotError` unless transformers has loaded exactly the model's weights, with their shapes."""
    missing, unknown = sorted(missing), sorted(unknown)
    others = f", nor {len(missing) - 1} others" if len(missing) > 1 else ""
    first = layer_of((missing or [""])[0])
    hint = "its values would be random: give a complete checkpoint"
    require(not missing, f"{first}: no file contains it{others}", hint=hint)
    require(not unknown, f"{layer_of((unknown or [''])[0])}: it is in the files and not in the model of config.json")
    other = sorted(str(entry[0] if isinstance(entry, tuple) else entry) for entry in mismatched)
    require(not other, f"{layer_of((other or [''])[0])}: its shape in the files is not the one of config.json")


def _check_packed(path: Path, names: Set[str], description: Description, checksums: bool) -> None:
    """Check one file of a packed checkpoint."""
    layers = description.layers
    expected = description.digests.keys() | {stored for name, layer in layers.items() for stored in layer.names(name)}
    _require_none(expected - names, "is missing")
    _require_none(names - description.digests.keys(), "has no checksum in the file's metadata")
    packed = {name for name in names if weight_of(name) != name and weight_of(name).endswith("weight")}
    _require_none((name for name in packed if weight_of(name) not in layers), "has no entry in the file's metadata")
    with StoredTensors([path]) as stored:
        tensors = {name: stored[name] for name in sorted(names)}
        for name, tensor in tensors.items():
            written = description.stored.get(name)
            with error_context(layer_of(name)):
                require(kind(tensor) == written, f"{name} is stored as {kind(tensor)}, {written} was written")
        if checksums:
            with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as threads:  # hashing releases the interpreter's lock
                for name, value in zip(tensors, threads.map(tensor_digest, tensors.values()), strict=True):
                    with error_context(layer_of(name)):
                        require(value == description.digests[name], "it is damaged: its checksum differs")
            for name, layer in layers.items():
                with error_context(name):
                    layer.check(name, tensors)
    require(description.intact, "the checksum of its metadata differs")


def _require_none(names: Iterable[str], problem: str) -> None:
    """Raise `MoonshotError` with the first of these names, if there are any."""
    names = sorted(names)
    require(not names, f"{layer_of((names or [''])[0])}: {', '.join(names[:3])} {problem}")


@contextmanager
def _in_file(path: Path) -> Iterator[None]:
    """Add the file's name to errors inside the block; errors of safetensors become `MoonshotError`."""
    try:
        yield
    except SafetensorError as error:
        raise MoonshotError(f"{path} is damaged: {error}") from None
    except MoonshotError as error:
        raise MoonshotError(str(error) if path.name in str(error) else f"{error} ({path.name})") from None
