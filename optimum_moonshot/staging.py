"""Files that appear in a folder together, once all of them are written."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import require, writing

# Files of another model, or of an earlier save, that would be loaded in place of, or on top of, the new ones.
WEIGHT_FILES = (
    "model*.safetensors",
    "model*.safetensors.index.json",
    "pytorch_model*.bin",
    "pytorch_model*.bin.index.json",
    "adapter_model.*",
    "adapter_config.json",
)


@contextmanager
def staged(field: str, directory: str | os.PathLike) -> Iterator[Path]:
    """A folder whose files move to `directory` when the block ends, and are thrown away when it fails.

    Weights that lie in `directory` and are not among the new files are removed.

    Raises:
        MoonshotError: the folder cannot be written, or the disk is full; it names the argument `field`.
    """
    directory = Path(directory)
    require(not directory.is_file(), f"{field}={str(directory)!r} is a file: give a folder")
    with writing(field, directory):
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".saving-", dir=directory) as staging:
            yield Path(staging)
            _move(Path(staging), directory)


def replace_file(path: str | os.PathLike, content: str) -> None:
    """Write a text file whole or not at all."""
    path = Path(path)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(content, encoding="utf-8")
    os.replace(partial, path)


def is_weights(path: Path) -> bool:
    """Whether a file holds weights, or says where they are."""
    return any(path.match(pattern) for pattern in WEIGHT_FILES)


def _move(staging: Path, directory: Path) -> None:
    for path in directory.iterdir():
        if is_weights(path) and not (staging / path.name).exists():
            path.unlink()
    for path in sorted(staging.iterdir()):
        target = directory / path.name
        if target.is_dir():
            shutil.rmtree(target)
        os.replace(path, target)
