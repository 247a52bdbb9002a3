"""Files that appear in a folder together, once all of them are written."""

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from .errors import MoonshotError, check_path, require

# Files of another model, or of an earlier save, that would be loaded in place of, or on top of, the new ones.
WEIGHT_FILES = (
    "model*.safetensors",
    "model*.safetensors.index.json",
    "moonshot*.safetensors",  # packed ones
    "moonshot*.safetensors.index.json",
    "pytorch_model*.bin",
    "pytorch_model*.bin.index.json",
    "adapter_model.*",
    "adapter_config.json",
)
UNFINISHED = ".partial"  # at the end of a file's name until all of it is written
STAGING_PREFIX = ".saving-"  # of the folders in which files wait for each other
OF_THE_SYSTEM = "lost+found"  # where a file system begins
_CONFIG = "config.json"


@contextmanager
def staged(field: str, directory: str | os.PathLike[str], model: bool = True) -> Iterator[Path]:
    """A folder whose files move to `directory` when the block ends, and are thrown away when it fails.

    Args:
        field: the argument that the folder came with, for messages.
        directory: the folder, made if need be.
        model: whether the files are one: weights that lie in `directory` and are not among them are removed.

    Raises:
        MoonshotError: the folder cannot be written, or the disk is full.
    """
    check_folder(field, directory)
    directory = Path(directory)
    with writing(field, directory):
        directory.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            with _in_turn(directory):  # no other save takes a folder for abandoned that is not locked yet
                _remove_abandoned(directory)
                made = tempfile.TemporaryDirectory(prefix=STAGING_PREFIX, dir=directory)
                staging = Path(stack.enter_context(made))
                with contextlib.suppress(OSError):  # a file system without locks
                    stack.enter_context(locked(staging))
            yield staging
            with _in_turn(directory):
                if model:
                    _make_room(staging, directory)
                _move(staging, directory)


@contextmanager
def _in_turn(directory: Path) -> Iterator[None]:
    """Of two saves into a folder, one comes whole after the other, where the file system has locks."""
    with contextlib.ExitStack() as lock:
        with contextlib.suppress(OSError):
            lock.enter_context(locked(directory, wait=True))
        yield


def check_folder(field: str, path: Any) -> None:
    """Raise `MoonshotError` for what is no folder and cannot become one.

    Args:
        field: the argument that the path came with.
        path: of a folder, or of none yet.
    """
    check_path(field, path)
    shown, place = f"{field}={str(path)!r}", Path(path)
    with writing(field, path):  # a name may be too long to be looked for
        dangling = place.is_symlink() and not place.exists()
        file = place.exists() and not place.is_dir()
    require(not dangling, f"{shown} is a link to a folder that does not exist: make it, or give another")
    require(not file, f"{shown} is a file: give a folder")


def replace_file(path: str | os.PathLike[str], content: str) -> None:
    """Write a text file whole or not at all; what UTF-8 lacks, as names of files may have it, is escaped as in JSON.

    Args:
        path: of the file.
        content: its text.
    """
    path = Path(path)
    partial = path.with_name(path.name + UNFINISHED)
    partial.write_text(content, encoding="utf-8", errors="backslashreplace")
    os.replace(partial, path)


def is_weights(path: Path) -> bool:
    """Whether a file holds weights, or says where they are."""
    return any(path.match(pattern) for pattern in WEIGHT_FILES)


def _remove_abandoned(directory: Path) -> None:
    """What saves that were killed have left behind; a save that runs holds the lock of its folder."""
    for path in directory.glob(STAGING_PREFIX + "*"):
        with contextlib.suppress(OSError), locked(path):
            shutil.rmtree(path)


@contextmanager
def locked(folder: str | os.PathLike[str], wait: bool = False) -> Iterator[int]:
    """Hold the lock of a folder, which dies with its process; gives the folder's descriptor.

    Args:
        folder: to be locked.
        wait: until nobody else holds it.

    Raises:
        BlockingIOError: another holds it.
        OSError: no such folder, or a file system without locks.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield handle
    finally:
        os.close(handle)


def _make_room(staging: Path, directory: Path) -> None:
    """Remove the model that was there, config.json first: without it the rest cannot be loaded."""
    if (staging / _CONFIG).exists():
        (directory / _CONFIG).unlink(missing_ok=True)
    for path in directory.iterdir():
        if is_weights(path) and not (staging / path.name).exists():
            path.unlink()


def _move(staging: Path, directory: Path) -> None:
    """config.json comes last: a folder that a kill leaves half old, half new cannot be loaded."""
    for path in sorted(staging.iterdir(), key=lambda path: (path.name == _CONFIG, path.name)):
        target = directory / path.name
        if target.is_dir():
            shutil.rmtree(target)
        os.replace(path, target)


@contextmanager
def writing(field: str, path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn a full disk or a forbidden folder into a `MoonshotError`.

    Args:
        field: the argument that the path came with, for the message.
        path: what is written to inside.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise MoonshotError(f"{field}={str(path)!r} cannot be written: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, or a `MoonshotError` that names the damaged file."""
    require(path.is_file(), f"{path} is no file")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise MoonshotError(f"{path} is damaged: {error}") from None
    require(isinstance(values, dict), f"{path} is damaged: it holds no JSON object")
    return values
