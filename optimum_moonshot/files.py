"""Write files atomically: the files of a folder appear together, once all are complete."""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock
from safetensors import SafetensorError

from .errors import MoonshotError, check_path, require

# Weights of another model or of an earlier save, which transformers would load instead of the new ones or beside them.
WEIGHT_FILES = (
    "model*.safetensors",
    "model*.safetensors.index.json",
    "moonshot*.safetensors",  # packed
    "moonshot*.safetensors.index.json",
    "pytorch_model*.bin",
    "pytorch_model*.bin.index.json",
    "adapter_model.*",
    "adapter_config.json",
)
UNFINISHED = ".partial"  # suffix of a file until it is complete
STAGING_PREFIX = ".saving-"  # of temporary folders, and of the lock file that orders concurrent saves
OF_THE_SYSTEM = "lost+found"  # at the root of a file system
_CONFIG, _LOCK = "config.json", ".lock"


@contextmanager
def staged(field: str, directory: str | os.PathLike[str], model: bool = True) -> Iterator[Path]:
    """A temporary folder whose files move to `directory`, created if missing, if the block succeeds.

    The files of a `model` replace all weight files of `directory`, which `field` names in messages.

    Raises:
        MoonshotError: the folder cannot be written, or the disk is full.
    """
    check_folder(field, directory)
    directory = Path(directory)
    with writing(field, directory):
        directory.mkdir(parents=True, exist_ok=True)
        with temporary_folder(STAGING_PREFIX, directory) as staging:
            yield staging
            with _serialized(STAGING_PREFIX, directory):
                if model:
                    _remove_model(staging, directory)
                _move(staging, directory)


@contextmanager
def temporary_folder(prefix: str, directory: Path) -> Iterator[Path]:
    """A folder in `directory`, deleted on exit; folders with this prefix of killed processes are deleted first."""
    with contextlib.ExitStack() as stack:
        with _serialized(prefix, directory):  # nobody must see the folder as abandoned before it is locked
            _remove_abandoned(prefix, directory)
            made = tempfile.TemporaryDirectory(prefix=prefix, dir=directory, ignore_cleanup_errors=True)
            folder = Path(stack.enter_context(made))
            with contextlib.suppress(OSError):  # a file system without locks
                stack.enter_context(locked(folder / _LOCK))
        yield folder


@contextmanager
def _serialized(prefix: str, directory: Path) -> Iterator[None]:
    """Processes that use a prefix in a folder run this block one after another, if the file system supports locks."""
    with contextlib.ExitStack() as lock:
        with contextlib.suppress(OSError):
            lock.enter_context(locked(directory / f"{prefix}lock", timeout=-1))
        yield


@contextmanager
def locked(path: Path, timeout: float = 0) -> Iterator[None]:
    """Hold a lock file, which is deleted at the end; the system releases the lock of a process that dies.

    A negative timeout, in seconds, waits without limit.

    Raises:
        filelock.Timeout: another process or thread holds it.
        OSError: the folder is missing, or its file system does not support locks.
    """
    with FileLock(path, timeout=timeout):
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                path.unlink()  # while held: filelock never grants a lock on a deleted file


def check_folder(field: str, path: Any) -> None:
    """Raise `MoonshotError` for a path that is not a folder that can be written, and cannot become one."""
    check_path(field, path)
    folder = Path(path)
    with writing(field, path):  # a name may be too long for `exists`
        dangling = folder.is_symlink() and not folder.exists()
        file = folder.exists() and not folder.is_dir()
    link = "is a link to a folder that does not exist"
    require(not dangling, link, field=field, value=folder, hint="create that folder, or give another")
    require(not file, "is a file", field=field, value=folder, hint="give a folder")
    writable = not folder.is_dir() or os.access(folder, os.W_OK)
    require(writable, "cannot be written: it is read-only", field=field, value=folder, hint="give another folder")


def replace_file(path: str | os.PathLike[str], content: str) -> None:
    """Write a text file atomically; lone surrogates, as file names may contain them, are escaped as in JSON."""
    path = Path(path)
    partial = path.with_name(path.name + UNFINISHED)
    partial.write_text(content, encoding="utf-8", errors="backslashreplace")
    os.replace(partial, path)


def is_weights(path: Path) -> bool:
    """Whether a file contains weights, or is an index of such files."""
    return any(path.match(pattern) for pattern in WEIGHT_FILES)


def _remove_abandoned(prefix: str, directory: Path) -> None:
    """Delete the temporary folders of killed processes: one that still runs holds the lock of its folder."""
    for path in directory.glob(prefix + "*"):
        with contextlib.suppress(OSError), locked(path / _LOCK):
            shutil.rmtree(path)


def _remove_model(staging: Path, directory: Path) -> None:
    """Delete the previous model, config.json first: without it, a folder that a kill leaves cannot be loaded."""
    if (staging / _CONFIG).exists():
        (directory / _CONFIG).unlink(missing_ok=True)
    for path in directory.iterdir():
        if is_weights(path) and not (staging / path.name).exists():
            path.unlink()


def _move(staging: Path, directory: Path) -> None:
    """Move all files, config.json last: a kill in between leaves a folder that cannot be loaded."""
    files = (path for path in staging.iterdir() if path.name != _LOCK)
    for path in sorted(files, key=lambda path: (path.name == _CONFIG, path.name)):
        target = directory / path.name
        if target.is_dir():
            shutil.rmtree(target)
        os.replace(path, target)


@contextmanager
def writing(field: str, path: str | os.PathLike[str]) -> Iterator[None]:
    """Convert the block's errors of a full disk or of missing permissions to `MoonshotError`."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise MoonshotError(f"cannot be written: {error}", field=field, value=Path(path)) from error


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        MoonshotError: the file does not exist, or does not contain a JSON object.
    """
    require(path.is_file(), f"{path} is not a file")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise MoonshotError(f"{path} is damaged: {error}") from None
    require(isinstance(values, dict), f"{path} is damaged: it does not contain a JSON object")
    return values
