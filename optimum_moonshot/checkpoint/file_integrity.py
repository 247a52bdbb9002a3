"""Whether the weight files of a checkpoint are what was written: names, sizes, and every byte of a packed one."""

import os
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from reprlib import repr as short
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import MoonshotError, naming, require
from ..packing import weight_of
from .packed_format import EXPLICIT, Description, digest, kind
from .weight_files import Header, index_places, layer_of, read_config, read_header, weight_files

_SWITCH = "MOONSHOT_VERIFY"
_DISTRIBUTED = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors$")


def checksums_wanted() -> bool:
    """Whether `from_pretrained` compares checksums: not with MOONSHOT_VERIFY=0 in the environment.

    Raises:
        MoonshotError: the variable is something else than 0 or 1.
    """
    value = os.environ.get(_SWITCH, "1")
    require(value in ("0", "1"), f"{_SWITCH}={value!r}: 0 leaves out the checksums of packed weights, 1 compares them")
    return value == "1"


def check_alone(folder: Path, version: int | None) -> None:
    """Whether transformers loads the weights of a folder from the files that `verify` looks at, and from no others.

    Args:
        folder: of the checkpoint.
        version: of a packed one; None for a dense one.

    Raises:
        MoonshotError: what would be loaded in their place or on top of them.
    """
    for path in sorted(folder.iterdir()):
        other = path.name == "adapter_config.json" or _DISTRIBUTED.match(path.name)
        require(not other, f"{path}: transformers would load it too, unverified; move it to a folder of its own")
    explicit = read_config(folder).get(EXPLICIT)
    usual = explicit is None or version not in (None, 1)
    require(usual, f"{folder}: config.json names {EXPLICIT}={short(explicit)}, not what transformers saves; remove it")


def verify(folder: Path, version: int | None, checksums: bool = True) -> list[Path]:
    """Check every byte of a packed checkpoint, and of a dense one that no file is cut off or missing.

    Args:
        folder: of the checkpoint.
        version: of a packed one; None for a dense one.
        checksums: False leaves out what needs the tensors' bytes.

    Returns:
        The files that hold the weights.

    Raises:
        MoonshotError: with the name of the layer that is damaged, cut off or missing, and of its file.
    """
    files, found = weight_files(folder, version), {}
    for path in files:
        header = read_header(path)
        with _in_file(path):
            description = Description.read(header.metadata)
            if version is None:
                require(description is None, "it holds packed weights, but config.json has no quantization_config")
                with safe_open(path, "pt"):  # it looks at the header more closely
                    pass
            else:
                written = description is not None and description.version == version
                require(written, f"its metadata has no description of its tensors for version {version}")
                _check_packed(path, header, description, checksums)
                complete = description.files in (None, len(files))
                require(complete, f"it is one of {description.files} files, the index names {len(files)}")
        found |= dict.fromkeys(header.names, path.relative_to(folder).as_posix())
    _check_index(index_places(folder, version), found, exact=version not in (None, 1))
    return files


def check_complete(missing: Iterable[str], unknown: Iterable[str], mismatched: Iterable[Any] = ()) -> None:
    """Raise `MoonshotError` for weights that the files do not have, or the model does not, or not in that shape.

    Args:
        missing: names in the model, as transformers tells them after loading.
        unknown: names in the files.
        mismatched: names in the model, alone or with two shapes.
    """
    missing, unknown = sorted(missing), sorted(unknown)
    others = f", nor {len(missing) - 1} others" if len(missing) > 1 else ""
    mend = "it would be random numbers, give a complete checkpoint"
    require(not missing, f"{layer_of((missing or [''])[0])}: no file holds it{others}: {mend}")
    require(not unknown, f"{layer_of((unknown or [''])[0])}: it is in the files and not in the model of config.json")
    other = sorted(str(entry[0] if isinstance(entry, tuple) else entry) for entry in mismatched)
    require(not other, f"{layer_of((other or [''])[0])}: its shape in the files is not the one of config.json")


def _check_packed(path: Path, header: Header, description: Description, checksums: bool) -> None:
    """One file of a packed checkpoint."""
    _check_names(header.names, description)
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in sorted(header.names)}
        if description.stored is not None:
            for name, tensor in tensors.items():
                wanted = description.stored.get(name)
                with naming(layer_of(name)):
                    require(kind(tensor) == wanted, f"{name} is stored as {kind(tensor)}, {wanted} was written")
        if checksums:
            _check_digests(tensors, description)
            for name, layer in description.layers.items():
                with naming(name):
                    layer.check(name, tensors)
    require(description.intact, "the checksum of its metadata differs")


def _check_digests(tensors: dict[str, Tensor], description: Description) -> None:
    """Hashing leaves the interpreter's lock, so that two threads are twice as fast."""
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as threads:
        for name, found in zip(tensors, threads.map(digest, tensors.values()), strict=True):
            with naming(layer_of(name)):
                require(found == description.digests[name], "it is damaged: its checksum differs")


def _check_names(names: Iterable[str], description: Description) -> None:
    names, layers = set(names), description.layers
    wanted = description.digests.keys() | {stored for name, layer in layers.items() for stored in layer.names(name)}
    _none(sorted(wanted - names), "is missing")
    _none(sorted(names - description.digests.keys()), "has no checksum in the file's metadata")
    packed = {name for name in names if weight_of(name) != name and weight_of(name).endswith("weight")}
    _none(sorted(name for name in packed if weight_of(name) not in layers), "has no entry in the file's metadata")


def _none(names: list[str], what: str) -> None:
    """Raise `MoonshotError` with the first of these names, if there are any."""
    require(not names, f"{layer_of((names or [''])[0])}: {', '.join(names[:3])} {what}")


def _check_index(places: dict[str, str], found: dict[str, str], exact: bool) -> None:
    _none(sorted(places.keys() - found.keys()), "is named by the index and in no file")
    if exact:
        _none(sorted(found.keys() - places.keys()), "is in a file and not in the index")
        _none(sorted(name for name in found if places[name] != found[name]), "is in another file than the index says")


@contextmanager
def _in_file(path: Path) -> Iterator[None]:
    """Errors inside the block end with the file's name; those of safetensors become ours."""
    try:
        yield
    except SafetensorError as error:
        raise MoonshotError(f"{path} is damaged: {error}") from None
    except MoonshotError as error:
        raise MoonshotError(str(error) if path.name in str(error) else f"{error} ({path.name})") from None
