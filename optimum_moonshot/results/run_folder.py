"""A folder in which a run keeps its results: for one run at a time, which touches nothing but what runs wrote.

run.json                     which run it is: a fingerprint of everything that its results depend on
run.lock                     held by the process that writes; the system lets go of it when the process dies
curves/NAME.safetensors      what a layer loses at some sparsities, for an allocation
layers/NAME.safetensors      the pruned weight of a layer, with its report
rotation/state.safetensors   what learning a rotation has come to
recovered/NAME.safetensors   those of a block's layers after recovery, with the block's report
samples/                     a folder of the same kind, in which samples/self.safetensors has what the model wrote
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

from ..errors import MoonshotError, require
from ..files import OF_THE_SYSTEM, UNFINISHED, check_folder, read_json, replace_file, writing

CURVES, LAYERS, RECOVERED, ROTATION, SAMPLES = "curves", "layers", "recovered", "rotation", "samples"
_MANIFEST, _LOCK = "run.json", "run.lock"
_KINDS = (CURVES, LAYERS, RECOVERED, ROTATION, SAMPLES)
_BEGUN = ("*.partial", ".tmp*")  # what a kill leaves; safetensors writes to a file of a name by chance first
_WRITTEN = ("*.safetensors", *_BEGUN)


class RunFolder:
    """One run's folder, locked from `open` on until `release` or `discard`.

    Args:
        path: the folder, made if need be; a link to one or a mount point will do.
        field: the argument that it came with, for messages.

    Raises:
        MoonshotError: it is no path.
    """

    def __init__(self, path: str | os.PathLike[str], field: str):
        check_folder(field, path)
        self.path, self.field = Path(path), field
        self.fingerprint = ""
        # One object for all runs of this process: who goes on after a failure is not kept out by itself.
        self._lock = FileLock(self.path.absolute() / _LOCK, timeout=0, is_singleton=True)

    def open(self, fingerprint: str) -> bool | None:
        """Take the folder for a run.

        Returns:
            True where results of the same run are in it, False where those of another were thrown away, None where
            there were none.

        Raises:
            MoonshotError: another process writes there, it holds other files, its run.json is damaged, or it cannot be
                written.
        """
        with writing(self.field, self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            known = self._known()
            self._acquire()
            same = self._recorded() == fingerprint if known else None
            self._clear(_BEGUN if same else _WRITTEN)
            if not same:
                replace_file(self.path / _MANIFEST, json.dumps({"fingerprint": fingerprint}))
        self.fingerprint = fingerprint
        return same

    def _known(self) -> bool:
        """Whether a run was here; files of others are an error."""
        known = (self.path / _MANIFEST).exists()
        foreign = {path.name for path in self.path.iterdir()} - {_LOCK, _MANIFEST + UNFINISHED, OF_THE_SYSTEM, SAMPLES}
        shown = f"{self.field}={str(self.path)!r}"
        require(known or not foreign, f"{shown} holds other files: give an empty or a new folder")
        return known

    def for_samples(self) -> "RunFolder":
        """The folder in this one for what the model writes before the run is known.

        Raises:
            MoonshotError: this one holds other files.
        """
        if self.path.is_dir():
            with writing(self.field, self.path):
                self._known()
        return RunFolder(self.path / SAMPLES, self.field)

    def _acquire(self) -> None:
        try:
            self._lock.acquire()
        except Timeout:
            raise MoonshotError(
                f"{self.field}={str(self.path)!r}: another run writes there; wait for its end, or give another folder"
            ) from None

    def _recorded(self) -> Any:
        try:
            return read_json(self.path / _MANIFEST).get("fingerprint")
        except MoonshotError as error:
            raise MoonshotError(f"{self.field}={str(self.path)!r}: {error}; remove the folder to start anew") from None

    def save(self, kind: str, name: str, tensors: dict[str, Tensor], report: dict[str, Any]) -> Path:
        """Write tensors and a report, whole or not at all.

        Args:
            kind: `CURVES`, `LAYERS`, `RECOVERED`, `ROTATION` or `SAMPLES`.
            name: of the layer or block, "state", or of the samples.
            tensors: of any shape, contiguous, in host memory.
            report: as JSON types.

        Raises:
            MoonshotError: the disk is full, or the folder cannot be written.
        """
        path = self.path / kind / f"{name}.safetensors"
        partial = path.with_suffix(".partial")
        with writing(self.field, self.path):
            path.parent.mkdir(exist_ok=True)
            told = json.dumps(report)
            save_file(tensors, partial, {"report": told, "sha256": _digest(path, told, tensors)})
            os.replace(partial, path)
        return path

    def saved(self, kind: str) -> Iterator[tuple[Path, dict[str, Any] | None, dict[str, Tensor]]]:
        """What was saved of a kind: path, report and tensors; no report where a file is damaged, which is removed."""
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
        """Let go of the lock; the files stay."""
        self._lock.release(force=True)

    def discard(self) -> None:
        """Remove what the run wrote, and the folder if it is empty then; not that of another run that came since."""
        try:
            self._acquire()
        except (MoonshotError, OSError):
            return
        try:
            with contextlib.suppress(OSError, MoonshotError):
                if read_json(self.path / _MANIFEST).get("fingerprint") == self.fingerprint:
                    self._remove()
        finally:
            self.release()

    def _remove(self) -> None:
        """Remove all that a run wrote, and the folder if it is empty then."""
        self._clear()
        (self.path / (_MANIFEST + UNFINISHED)).unlink(missing_ok=True)
        RunFolder.remove_all(self.path / SAMPLES)
        (self.path / _MANIFEST).unlink()
        (self.path / _LOCK).unlink(missing_ok=True)
        self.path.rmdir()  # not a link, a mount point, or a folder with files of others

    @classmethod
    def remove_all(cls, top: Path) -> None:
        """Remove what runs wrote in a folder and in those below it, whoever they were; files of others stay."""
        found = [manifest.parent for manifest in (*top.glob(_MANIFEST), *top.glob(f"*/{_MANIFEST}"))]
        for folder in found:
            with contextlib.suppress(OSError, MoonshotError):
                if "fingerprint" in read_json(folder / _MANIFEST):
                    cls(folder, "folder")._remove()
        with contextlib.suppress(OSError):
            top.rmdir()

    def _clear(self, patterns: tuple[str, ...] = _WRITTEN) -> None:
        """Remove all results, or other files beside them."""
        for kind in _KINDS:
            folder = self.path / kind
            for path in [path for pattern in patterns for path in folder.glob(pattern)]:
                path.unlink()
            with contextlib.suppress(OSError):
                folder.rmdir()


def _digest(path: Path, report: str, tensors: dict[str, Tensor]) -> str:
    """SHA-256 of a result: of what it is, what is told of it, and of its tensors' names, dtypes, shapes and bytes."""
    found = sha256(json.dumps([path.parent.name, path.stem, report]).encode())
    for name, tensor in sorted(tensors.items()):
        found.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        found.update(tensor.contiguous().flatten().view(uint8).numpy().data if tensor.numel() else b"")
    return found.hexdigest()
