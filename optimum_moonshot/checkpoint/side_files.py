"""Copy the files of a model that are not its weights: pooling, feature extractors, licences, code, chat templates.

A new folder then works wherever the source did. Weights in any format, folders of training runs, large files, special
files and links to files outside the folder are not copied; a log message names those that a user could miss.
"""

import logging
import os
import re
import shutil
import stat
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

from ..errors import MoonshotError, reason
from ..files import UNFINISHED, is_weights
from ..reports.plots import PLOT_NAME
from ..reports.prune_report import REPORT_NAME
from ..rotate.report import ROTATION_NAME
from .hub import HUB_OPTIONS, download_others
from .origin import Source
from .weight_files import Checkpoint

LARGEST = 2**27  # bytes of a file; the largest tokenizers have 35 MB, a sentence-transformers Dense layer up to 67
# Formats of other libraries: always the dense model. PyTorch's are weights of modules beside the model in sub-folders.
_FOREIGN = re.compile(
    r"\.(gguf|ggml|llamafile|onnx(_data.*|\.data)?|h5|keras|msgpack|tflite|ot|mlmodel|ckpt|pdparams|nemo|engine|pte"
    r"|tfevents.*)$|^openvino_.*|\.index\.json$|\.tfevents\."
)
_TORCH = re.compile(r"\.(safetensors|bin|pt|pth)$")
_RUN_FOLDER = re.compile(r"(checkpoint|global_step)[-_]?\d+|runs|wandb|__pycache__|.*\.mlpackage|.*\.partial|\..*")
_RUN_FILES = ("run.json", "trainer_state.json")  # only in folders of runs, of this package and of the Trainer
# About the weights of the source, which a saved model does not have.
_OF_SOURCE = {
    "config.json", "README.md", REPORT_NAME, PLOT_NAME, ROTATION_NAME, "trainer_state.json", "quantize_config.json",
    "quant_config.json", "hf_quant_config.json",
}  # fmt: skip
_log = logging.getLogger(__name__)


class SideFiles:
    """The files beside the weights that a model was loaded from; saved like a tokenizer.

    Args:
        source: of the model; nothing is copied for a model that was not loaded.
    """

    def __init__(self, source: Source):
        self.source = source

    def save_pretrained(self, folder: Path) -> None:
        """Copy the files that `folder` does not have yet; those of a repository are downloaded first."""
        source, options = self.source
        if not isinstance(source, str | os.PathLike) or not source:
            return

        def wanted(name: str, size: int) -> bool:
            path = PurePosixPath(name)
            in_run = any(_RUN_FOLDER.fullmatch(part) for part in path.parts)
            copied = not in_run and not _is_model(path) and name not in _OF_SOURCE and size <= LARGEST
            return copied and not (folder / name).exists()

        subfolder = options.get("subfolder", "")
        if os.path.isdir(source):
            local: Path | None = Path(source, subfolder)
        else:
            hub = {name: options[name] for name in HUB_OPTIONS if name in options}
            local = download_others(source, wanted, subfolder, **hub)
        if local is not None:
            copy_side_files(local, folder, _OF_SOURCE)


def copy_side_files(source: Path, target: Path, without: Collection[str] = ()) -> None:
    """Copy all files of a checkpoint but its weights, except those that the target has already.

    Args:
        source: its folder; links may lead to other files in it, or to the Hub's cache.
        target: an existing folder, which may be in the source.
        without: names of further files at the top that are not copied.
    """
    left_out: list[str] = []
    for name, path in _files(source, target, left_out):
        copy = target / name
        if name not in without and not copy.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
    if left_out:
        more = f", and {len(left_out) - 8} others" if len(left_out) > 8 else ""
        _log.warning("not copied from %s: %s%s", source, ", ".join(left_out[:8]), more)


def _files(source: Path, target: Path, left_out: list[str]) -> Iterator[tuple[str, Path]]:
    """The files to copy with their names relative to the source; the others join `left_out` with the reason."""
    root, inside, weights = Path(os.path.realpath(source)), os.path.realpath(target), _indexed(source)
    followed, open_folders = {str(root)}, [source]  # one link leads to each folder, so that loops end
    for folder in open_folders:  # grows: nearest folders first
        for path in sorted(folder.iterdir()):
            name, real = path.relative_to(source).as_posix(), os.path.realpath(path)
            if path.name.startswith(".") or _is_model(PurePosixPath(name)) or name in weights:
                continue
            if path.is_symlink() and not _stays(Path(real), root):
                left_out.append(f"{name} (a link to a file outside the folder)")
            elif path.is_dir():
                if path.is_symlink() and real in followed:
                    left_out.append(f"{name} (another link to the same folder)")
                elif not _is_run(path) and not (inside + os.sep).startswith(real + os.sep):
                    open_folders.append(path)
                    followed.update([real] if path.is_symlink() else [])
            elif why := _obstacle(path):
                left_out.append(f"{name} ({why})")
            else:
                yield name, path


def _obstacle(path: Path) -> str:
    """Why a file cannot be copied, or should not; empty if it can."""
    try:
        status = path.stat()
    except OSError as error:
        return reason(error)
    if not stat.S_ISREG(status.st_mode):
        return "not a regular file"
    if status.st_size > LARGEST:
        return f"{status.st_size / 2**20:.0f} MiB"
    return "" if os.access(path, os.R_OK) else "not readable"


def _is_model(path: PurePosixPath) -> bool:
    """Whether a file is that of the whole model in some format, or unfinished, by its relative path."""
    top = len(path.parts) == 1
    of_model = top and (is_weights(Path(path)) or _TORCH.search(path.name) is not None)
    return of_model or _FOREIGN.search(path.name) is not None or path.name.endswith(UNFINISHED)


def _is_run(folder: Path) -> bool:
    run = _RUN_FOLDER.fullmatch(folder.name) is not None
    return run or any((folder / name).exists() for name in _RUN_FILES)


def _stays(real: Path, root: Path) -> bool:
    """Whether the target of a link is in the folder, or in the blobs of the Hub's cache that the folder belongs to."""
    caches = (parent.parent / "blobs" for parent in root.parents if parent.name == "snapshots")
    return real.is_relative_to(root) or any(real.parent == blobs for blobs in caches)


def _indexed(folder: Path) -> set[str]:
    """The weight files that an index names, which may be in sub-folders."""
    names: set[str] = set()
    for packed in (False, True):
        with suppress(MoonshotError):
            names.update(Checkpoint(folder, packed).weight_map.values())
    return names
