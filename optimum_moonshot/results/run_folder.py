"""The folder in which a run stores its results, so that the same call resumes after an interruption.

run.json                     fingerprint of everything that the results depend on
run.lock                     held by the process that writes; the system releases it when the process dies
curves/NAME.safetensors      losses of a layer at several sparsities, for an allocation
layers/NAME.safetensors      the pruned weight of a layer, with its report
rotation/state.safetensors   the state of learning a rotation
recovered/NAME.safetensors   the recovered weights of a block's layers, with the block's report
samples/                     a folder of the same kind, with generated samples in samples/self.safetensors

One run writes at a time, and deletes only files that runs have written.
"""

import contextlib
import json
import os
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, uint8

from ..errors import MoonshotError
from ..files import OF_THE_SYSTEM, UNFINISHED, check_folder, read_json, replace_file, writing

CURVES, LAYERS, RECOVERED, ROTATION, SAMPLES = "curves", "layers", "recovered", "rotation", "samples"
_MANIFEST, _LOCK = "run.json", "run.lock"
_KINDS = (CURVES, LAYERS, RECOVERED, ROTATION, SAMPLES)
_INCOMPLETE = ("*.partial", ".tmp*")  # left by a kill: safetensors writes to a file of a random name first
_WRITTEN = ("*.safetensors", *_INCOMPLETE)


class RunFolder:
    """One run's folder, locked from `open` until `release` or `discard`.

    Args:
        path: the folder, created if missing; may be a link or a mount point.
        field: the argument that names it, for messages.

    Raises:
        MoonshotError: not a path of a folder.
    """

    def __init__(self, path: str | os.PathLike[str], field: str):
        check_folder(field, path)
        self.path, self.field = Path(path), field
        self.fingerprint = ""
        # One lock for all runs of this process: a run that failed must not block the next.
        self._lock = FileLock(self.path.absolute() / _LOCK, timeout=0, is_singleton=True)

    def open(self, fingerprint: str) -> bool | None:
        """Lock the folder for a run, and delete the results of any other run.

        Returns:
            True if the folder contains results of the same run, False if those of another one were deleted, None if
            there were none.

        Raises:
            MoonshotError: another process writes there, the folder contains other files, its run.json is damaged, or
                it cannot be written.
        """
        with writing(self.field, self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            resumes = self._check_contents()
            self._acquire()
            try:
                same = read_json(self.path / _MANIFEST).get("fingerprint") == fingerprint if resumes else None
            except MoonshotError as error:
                raise self._error(str(error), "remove the folder to start again") from None
            self._clear(_INCOMPLETE if same else _WRITTEN)
            if not same:
                replace_file(self.path / _MANIFEST, json.dumps({"fingerprint": fingerprint}))
        self.fingerprint = fingerprint
        return same

    def _check_contents(self) -> bool:
        """Whether the folder is that of a run; raises for other files."""
        resumes = (self.path / _MANIFEST).exists()
        foreign = {path.name for path in self.path.iterdir()} - {_LOCK, _MANIFEST + UNFINISHED, OF_THE_SYSTEM, SAMPLES}
        if foreign and not resumes:
            raise self._error("contains other files", "give an empty or a new folder")
        return resumes

    def _error(self, message: str, hint: str) -> MoonshotError:
        return MoonshotError(message, field=self.field, value=self.path, hint=hint)

    def for_samples(self, of_one_run: bool = True) -> "RunFolder":
        """The folder inside this one for generated samples, which exist before the run's fingerprint does.

        Raises:
            MoonshotError: this is the folder of one run, and contains other files.
        """
        if of_one_run and self.path.is_dir():
            with writing(self.field, self.path):
                self._check_contents()
        return RunFolder(self.path / SAMPLES, self.field)

    def _acquire(self) -> None:
        try:
            self._lock.acquire()
        except Timeout:
            raise self._error("another run writes there", "wait for its end, or give another folder") from None

    def save(self, kind: str, name: str, tensors: dict[str, Tensor], report: dict[str, Any]) -> Path:
        """Write contiguous tensors in host memory with a report, atomically; returns the path of the file.

        `kind` is `CURVES`, `LAYERS`, `RECOVERED`, `ROTATION` or `SAMPLES`.

        Raises:
            MoonshotError: the disk is full, or the folder cannot be written.
        """
        path = self.path / kind / f"{name}.safetensors"
        partial = path.with_suffix(".partial")
        with writing(self.field, self.path):
            path.parent.mkdir(exist_ok=True)
            text = json.dumps(report)
            save_file(tensors, partial, {"report": text, "sha256": _digest(path, text, tensors)})
            os.replace(partial, path)
        return path

    def saved(self, kind: str) -> Iterator[tuple[Path, dict[str, Any] | None, dict[str, Tensor]]]:
        """The path, report and tensors of all results of a kind; None and {} for a damaged file, which is deleted."""
        for path in sorted((self.path / kind).glob("*.safetensors")):
            try:
                with safe_open(path, "pt") as file:
                    metadata = file.metadata() or {}
                    tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                intact = metadata["sha256"] == _digest(path, metadata["report"], tensors)
                report = json.loads(metadata["report"]) if intact else None
            except (SafetensorError, KeyError, ValueError):
                report, tensors = None, {}
            if report is None:
                path.unlink()
            yield path, report, tensors

    def release(self) -> None:
        """Release the lock; the files remain."""
        self._lock.release(force=True)

    def discard(self) -> None:
        """Delete the run's files, and the folder if it is empty then; keep those of another run that started since."""
        with contextlib.suppress(OSError, MoonshotError):
            self._acquire()
            try:
                if read_json(self.path / _MANIFEST).get("fingerprint") == self.fingerprint:
                    self._remove()
            finally:
                self.release()

    def _remove(self) -> None:
        self._clear()
        (self.path / (_MANIFEST + UNFINISHED)).unlink(missing_ok=True)
        RunFolder.remove_all(self.path / SAMPLES)
        (self.path / _MANIFEST).unlink()
        (self.path / _LOCK).unlink(missing_ok=True)
        self.path.rmdir()  # fails for a link, a mount point, or a folder with other files, which remain

    @classmethod
    def remove_all(cls, top: Path) -> None:
        """Delete the files of all runs in a folder and its subfolders; other files remain."""
        manifests = (*top.glob(_MANIFEST), *top.glob(f"*/{_MANIFEST}"))
        for folder in [manifest.parent for manifest in manifests]:
            with contextlib.suppress(OSError, MoonshotError):
                if "fingerprint" in read_json(folder / _MANIFEST):
                    cls(folder, "folder")._remove()
        with contextlib.suppress(OSError):
            top.rmdir()

    def _clear(self, patterns: tuple[str, ...] = _WRITTEN) -> None:
        """Delete the results whose file names match one of the patterns."""
        for kind in _KINDS:
            folder = self.path / kind
            for path in [path for pattern in patterns for path in folder.glob(pattern)]:
                path.unlink()
            with contextlib.suppress(OSError):
                folder.rmdir()


def _digest(path: Path, report: str, tensors: dict[str, Tensor]) -> str:
    """SHA-256 of a result: its kind, name and report, and the names, dtypes, shapes and bytes of its tensors."""
    digest = sha256(json.dumps([path.parent.name, path.stem, report]).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.contiguous().flatten().view(uint8).numpy().data if tensor.numel() else b"")
    return digest.hexdigest()
