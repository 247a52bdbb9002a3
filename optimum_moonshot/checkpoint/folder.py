"""The reader of a checkpoint folder, which is downloaded if it is a repository of the Hub.

It reads config.json, the weight files and their index, and checks their integrity.
"""

import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from glob import escape
from pathlib import Path, PurePosixPath, PureWindowsPath
from reprlib import repr as short
from typing import Any

import torch
from huggingface_hub import HfApi, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError
from huggingface_hub.hf_api import RepoFile
from safetensors import SafetensorError
from transformers.utils import CONFIG_NAME
from transformers.utils.hub import cached_file
from transformers.utils.peft_utils import find_adapter_config_file

from ..errors import MoonshotError, error_context, reason, require
from ..files import read_json
from ..packing import weight_of
from .weight_files import (
    EXPLICIT,
    EXPORT,
    METHOD,
    PACKED_INDEX,
    Description,
    StoredTensors,
    check_config_entry,
    kind,
    layer_of,
    read_header,
    tensor_digest,
)

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_SWITCH = "MOONSHOT_VERIFY"
_DISTRIBUTED = re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors$")
HUB_OPTIONS = ("revision", "token", "cache_dir", "local_files_only")
FILE_OPTIONS = (*HUB_OPTIONS, "force_download", "proxies", "subfolder")  # where a file is, and how it is downloaded
CHECKPOINT_OPTIONS = (*FILE_OPTIONS, "trust_remote_code", "code_revision", "gguf_file")  # of all parts of a checkpoint
_HUB_NAME = re.compile(r"(?:hf://)?([^/@\s]+/[^/@\s]+)(?:@([^/\s]+))?(?:/(.+\.gguf))?")
# Weights in other files than safetensors, and models of other libraries.
_OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.h5", "*.msgpack", "*.onnx*", "original/*")
_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.py")
_log = logging.getLogger(__name__)


class Checkpoint:
    """A folder with a checkpoint: its config.json, its weight files and their index, each read on first use.

    Args:
        folder: of the checkpoint.
        packed: whether its weight files are packed; None: as config.json declares.
    """

    def __init__(self, folder: Path, packed: bool | None = None):
        self.folder = folder
        if packed is not None:
            self.packed = packed

    @classmethod
    def find(cls, name_or_path: str | os.PathLike[str], whole: bool = False, **hub: Any) -> "Checkpoint":
        """The checkpoint of a folder or of a repository on the Hub, with the arguments of `local_folder`."""
        return cls(local_folder(name_or_path, whole, **hub))

    @cached_property
    def config(self) -> dict[str, Any]:
        """The content of config.json; `MoonshotError` if it is missing or damaged."""
        path = self.folder / "config.json"
        require(path.is_file(), f"{self.folder} has no config.json", hint="give the folder of a checkpoint")
        return read_json(path)

    @property
    def quant_method(self) -> str | None:
        """The `quant_method` in config.json: `METHOD`, or another tool's; None without quantization_config."""
        quantization = self.config.get("quantization_config")
        return str(quantization.get("quant_method", "unknown")) if isinstance(quantization, dict) else None

    @cached_property
    def packed(self) -> bool:
        """Whether config.json declares a packed checkpoint; `MoonshotError` for a version that is not supported."""
        if self.quant_method != METHOD:
            return False
        check_config_entry(self.config["quantization_config"])
        return True

    @property
    def format(self) -> str:
        """The format: "packed", `EXPORT`, or "dense", also for the formats of other tools; raises like `packed`."""
        return "packed" if self.packed else EXPORT if self.quant_method == EXPORT else "dense"

    @property
    def index_path(self) -> Path:
        """The path of the index, which a dense checkpoint with a single file does not have."""
        return self.folder / (PACKED_INDEX if self.packed else _INDEX)

    @cached_property
    def index(self) -> dict[str, Any]:
        """The content of the index; empty without one."""
        return read_json(self.index_path) if self.index_path.exists() else {}

    @cached_property
    def weight_map(self) -> dict[str, str]:
        """The file of every tensor, by the index; empty without one.

        `MoonshotError` if the index is damaged, missing in a packed checkpoint, or names files outside of the folder.
        """
        if not self.index_path.exists():
            require(not self.packed, f"{self.index_path} is missing")
            return {}
        files = self.index.get("weight_map")
        if not isinstance(files, dict) or not files or not all(isinstance(file, str) for file in files.values()):
            raise MoonshotError(f"{self.index_path} is damaged: it has no weight_map")
        for file in dict.fromkeys(files.values()):
            inside = _is_inside(self.folder, file)
            require(inside, f"{self.index_path} names {file!r}: weights must be in the folder of their index")
        return files

    def check_index(self) -> None:
        """Raise `MoonshotError` if the index is damaged, or names a file that is missing."""
        for name, file in self.weight_map.items():
            require(os.path.isfile(self.folder / file), f"{self.folder}: {file} with {name} is missing")

    @cached_property
    def files(self) -> list[Path]:
        """The safetensors files, in order; `MoonshotError` if any is missing, or the folder contains others."""
        self.check_index()
        folder, listed = self.folder, sorted(set(self.weight_map.values()))
        if not self.packed:
            single = (folder / _SINGLE).is_file()
            if not listed and not single:
                undeclared = "; its config.json has no quantization_config" if (folder / PACKED_INDEX).is_file() else ""
                raise MoonshotError(f"{folder} has neither {_SINGLE} nor {_INDEX}{undeclared}")
            if listed and single and listed != [_SINGLE]:
                raise MoonshotError(
                    f"{folder} has {_SINGLE} beside {', '.join(listed[:2])}…, which the index names: transformers "
                    "would load the first and ignore the others",
                    hint="remove the files that do not belong to the model",
                )
        return [folder / file for file in listed or [_SINGLE]]

    def tensor_files(self) -> dict[str, Path]:
        """The file of every tensor, also without an index; raises like `files`, and for a damaged file."""
        if self.files and self.weight_map:
            return {name: self.folder / file for name, file in self.weight_map.items()}
        return {name: path for path in self.files for name in sorted(read_header(path).shapes)}

    def open(self) -> "StoredTensors":
        """Open all weight files."""
        return StoredTensors(self.files)

    def check_files(self, checksums: bool = True) -> None:
        """Check that no weight file is truncated or missing, and every byte of a packed checkpoint.

        Without `checksums`, the tensors' bytes are not compared. `MoonshotError` names the layer that is damaged,
        truncated or missing, and its file.
        """
        files, files_by_name = self.files, dict[str, str]()
        for path in files:
            header = read_header(path)
            with _in_file(path):
                description = Description.read(header.metadata)
                if not self.packed:
                    undeclared = "it contains packed weights, but config.json has no quantization_config"
                    require(description is None, undeclared)
                    with StoredTensors([path]):  # safetensors' own checks of the header
                        pass
                elif description is None:
                    raise MoonshotError("its metadata has no description of its tensors")
                else:
                    _check_packed(path, header.shapes.keys(), description, checksums)
                    complete = description.files == len(files)
                    require(complete, f"it is one of {description.files} files, the index names {len(files)}")
            files_by_name |= dict.fromkeys(header.shapes, path.relative_to(self.folder).as_posix())
        weight_map = self.weight_map
        _require_none(weight_map.keys() - files_by_name.keys(), "is named by the index and in no file")
        if self.packed:
            _require_none(files_by_name.keys() - weight_map.keys(), "is in a file and not in the index")
            moved = (name for name, file in files_by_name.items() if weight_map[name] != file)
            _require_none(moved, "is in another file than the index says")

    def check_no_other_weights(self) -> None:
        """Raise `MoonshotError` if transformers would load files that `check_files` does not check.

        Such files are an adapter, a distributed checkpoint, or a file that config.json of an unpacked checkpoint names.
        """
        for path in sorted(self.folder.iterdir()):
            other = path.name == "adapter_config.json" or _DISTRIBUTED.match(path.name)
            require(not other, f"{path}: transformers would load it too, unverified", hint="move it to another folder")
        explicit = self.config.get(EXPLICIT)
        if explicit is not None and not self.packed:
            message = f"{self.folder}: config.json names {EXPLICIT}={short(explicit)}"
            raise MoonshotError(message, hint="remove this entry")


def _is_inside(folder: Path, file: str) -> bool:
    """Whether a path in an index is inside its folder; links to files are allowed, as in the Hub's cache."""
    windows = PureWindowsPath(file)
    if not windows.parts or windows.anchor or PurePosixPath(file).is_absolute() or ".." in windows.parts:
        return False
    try:
        return (folder / file).parent.resolve().is_relative_to(folder.resolve())
    except (OSError, ValueError):  # not a path
        return False


def checksums_wanted() -> bool:
    """Whether `from_pretrained` compares checksums: not with MOONSHOT_VERIFY=0 in the environment."""
    value = os.environ.get(_SWITCH, "1")
    require(value in ("0", "1"), f"{_SWITCH}={value!r}: 0 skips the checksums of packed weights, 1 compares them")
    return value == "1"


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


def find_checkpoint(name_or_path: Any, options: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The name or folder of a checkpoint for `from_pretrained` of transformers, and its options.

    A GGUF file ("model.gguf", "owner/repo/model.gguf", "hf://owner/repo@revision/model.gguf", or an option) becomes the
    folder that it is downloaded to, and `gguf_file`; the default dtype is bfloat16.

    Raises:
        OSError: there is no such file.
    """
    name, options, file = os.fspath(name_or_path), dict(options), options.get("gguf_file")
    hub = _hub_name(name)
    if hub is not None:
        name, revision, hub_file = hub.groups()
        file = file or hub_file
        options |= {} if revision is None else {"revision": revision}
    elif file is None and name.endswith(".gguf"):
        name, file = os.path.split(os.path.abspath(name))
    if file is None:
        return name, options
    path: Any = cached_file(name, file, **{key: options.pop(key) for key in FILE_OPTIONS if key in options})
    folder, file = os.path.split(path)
    dtype = options.get("dtype", options.get("torch_dtype"))
    dtype = {"dtype": torch.bfloat16} if dtype in (None, "auto") else {}
    return folder, {**options, "gguf_file": file, **dtype}


def repository(name_or_path: Any) -> str:
    """The repository of a file on the Hub; any other name is returned unchanged."""
    hub = _hub_name(os.fspath(name_or_path))
    return os.fspath(name_or_path) if hub is None else hub[1]


def _hub_name(name: str) -> "re.Match[str] | None":
    """The repository, the revision and the GGUF file of a name on the Hub with an owner; None for other names."""
    return None if os.path.exists(name) else _HUB_NAME.fullmatch(name)


def local_folder(name_or_path: str | os.PathLike[str], whole: bool = False, **hub: Any) -> Path:
    """The folder of a checkpoint, downloaded from the Hub, with `HUB_OPTIONS`, if it is the name of a repository.

    With `whole`, files that loading does not need are downloaded too, such as the card.
    """
    folder = Path(name_or_path)
    if not os.path.isdir(name_or_path):
        try:
            ignored, allowed = (list(_OTHER_WEIGHTS), None) if whole else (None, list(_FILES))
            folder = Path(snapshot_download(str(name_or_path), ignore_patterns=ignored, allow_patterns=allowed, **hub))
        except (HfHubHTTPError, HFValidationError, HTTPError, OSError) as error:
            raise MoonshotError(f"{name_or_path} is neither a folder nor a readable repository: {error}") from error
    if not (folder / CONFIG_NAME).is_file():
        refuse_adapter(name_or_path, folder)
    return folder


def refuse_adapter(name_or_path: str | os.PathLike[str], folder: str | os.PathLike[str], **hub: Any) -> None:
    """Raise `MoonshotError` if a folder (or repository, with `HUB_OPTIONS`) without a model contains a PEFT adapter.

    `name_or_path` is the user's name for it.
    """
    try:
        file = find_adapter_config_file(os.fspath(folder), **hub)
        base = None if file is None else json.loads(Path(file).read_text(encoding="utf-8"))["base_model_name_or_path"]
    except Exception:  # the caller's error about the missing model is clearer
        return
    if file is not None:
        message = f"{name_or_path} is a PEFT adapter of {base}, not a model"
        merge = "AutoPeftModelForCausalLM.from_pretrained(…).merge_and_unload().save_pretrained(folder)"
        hint = f"merge the two, and give the result: {merge}"
        raise MoonshotError(message, hint=hint)


def download_others(
    name: Any,
    wanted: Callable[[str, int], bool],
    subfolder: str = "",
    revision: str | None = None,
    cache_dir: Any = None,
    **hub: Any,
) -> Path | None:
    """The folder in the cache of a repository that a model was loaded from, with `HUB_OPTIONS`; None if there is none.

    The files of the loaded commit and subfolder for which `wanted(path, bytes)` is true, with paths in the subfolder,
    are downloaded. If that fails, a log message says that only the cached ones are used, so that saving a model does
    not depend on the network.
    """
    top = f"{subfolder.strip('/')}/" if subfolder else ""
    try:
        cached = try_to_load_from_cache(name, f"{top}config.json", cache_dir=cache_dir, revision=revision)
    except HFValidationError:  # a folder that no longer exists
        return None
    if not isinstance(cached, str):
        return None
    folder = Path(cached).parent
    commit = folder.parents[top.count("/") - 1].name if top else folder.name
    try:
        if not hub.get("local_files_only"):
            tree = HfApi(token=hub.get("token")).list_repo_tree(name, top or None, revision=commit, recursive=True)
            files = [file for file in tree if isinstance(file, RepoFile)]
            names = [escape(file.path) for file in files if wanted(file.path.removeprefix(top), file.size)]
            snapshot_download(name, revision=commit, cache_dir=cache_dir, allow_patterns=names, **hub)
    except (HfHubHTTPError, HTTPError, OSError) as error:
        _log.warning("%s: of its other files, only those in the cache are copied: %s", name, reason(error))
    return folder
