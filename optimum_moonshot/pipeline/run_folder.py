"""The folder in which a run stores its results, so that the same call resumes after an interruption.

run.json                     everything that the results depend on, by section and name
run.lock                     held by the process that writes; the system releases it when the process dies
curves/NAME.safetensors      losses of a layer at several sparsities, for an allocation
layers/NAME.safetensors      the pruned weight of a layer, with its report
measured/NAME.safetensors    a measurement of the dense model
rotation/state.safetensors   the state of learning a rotation
recovered/NAME.safetensors   the recovered weights of a block's layers and its parameters, with the block's report
training/state.safetensors   the state of training the whole model
samples/                     a folder of the same kind, with generated samples in samples/self.safetensors
earlier/                     the results of the run before, if this one differs from it, until this one is done

One run writes at a time, and deletes only files that runs have written. The checksum of a result includes run.json, its
kind and its name: a file of another run, or of another layer, counts as damaged.
"""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, uint8

from ..approximate import same_text
from ..errors import MoonshotError
from ..files import OF_THE_SYSTEM, UNFINISHED, check_folder, read_json, replace_file, writing

CURVES, LAYERS, MEASURED, RECOVERED = "curves", "layers", "measured", "recovered"
ROTATION, SAMPLES, TRAINING = "rotation", "samples", "training"
_MANIFEST, _LOCK, _EARLIER = "run.json", "run.lock", "earlier"
_PARTS = "parts"  # the entry of the manifest
_KINDS = (CURVES, LAYERS, MEASURED, RECOVERED, ROTATION, SAMPLES, TRAINING)
_INCOMPLETE = ("*.partial", ".tmp*")  # left by a kill: safetensors writes to a file of a random name first
Parts = Mapping[str, Mapping[str, str]]  # what a run depends on, by section and name
_WRITTEN = ("*.safetensors", *_INCOMPLETE)
_START_AGAIN = "remove the folder to start again"


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
        self.difference = ""  # from the run whose results were in the folder
        self._parts: dict[str, dict[str, str]] = {}  # of the run whose results are in the folder
        # One lock for all runs of this process: a run that failed must not block the next.
        self._lock = FileLock(self.path.absolute() / _LOCK, timeout=0, is_singleton=True)

    def open(self, parts: Parts) -> bool | None:
        """Lock the folder for a run, and set the results of another run aside.

        Args:
            parts: everything that the results depend on, by section and name.

        Returns:
            True if the folder contains results of the same run, False if results of another run were set aside, None if
            there were none.

        Raises:
            MoonshotError: another process writes there, the folder contains other files, its run.json is damaged, or
                it cannot be written.
        """
        with writing(self.field, self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            resumes = self._check_contents()
            self._acquire()
            with self.released_on_error():
                try:
                    before = self._parts_in(self.path) if resumes else {}
                except MoonshotError as error:
                    raise self._error(str(error), _START_AGAIN) from None
                self.difference = difference(before, parts) if resumes else ""
                same = (not self.difference or self._set_aside(parts)) if resumes else None
                self._clear(_INCOMPLETE if same else _WRITTEN)
                if not same:
                    manifest = {_PARTS: {name: {**part} for name, part in parts.items()}}
                    replace_file(self.path / _MANIFEST, json.dumps(manifest))
                self._parts = self._parts_in(self.path)
        return same

    @contextlib.contextmanager
    def released_on_error(self) -> Iterator[None]:
        """Release the lock if the block fails, so that it does not keep other processes out."""
        try:
            yield
        except BaseException:
            self.release()
            raise

    @staticmethod
    def _parts_in(folder: Path) -> dict[str, dict[str, str]]:
        """The parts of the run whose results are in a folder."""
        return read_json(folder / _MANIFEST).get(_PARTS, {})

    def _check_contents(self) -> bool:
        """Whether the folder is that of a run; raises for other files."""
        resumes = (self.path / _MANIFEST).exists()
        ours = {_LOCK, _MANIFEST + UNFINISHED, OF_THE_SYSTEM, SAMPLES, _EARLIER, _EARLIER + UNFINISHED}
        foreign = {path.name for path in self.path.iterdir()} - ours
        if foreign and not resumes:
            raise self._error("contains other files", "give an empty or a new folder")
        return resumes

    def _set_aside(self, parts: Parts) -> bool:
        """Move the results to `earlier`, and restore earlier results of this run; return whether there are any."""
        earlier, unfinished = self.path / _EARLIER, self.path / (_EARLIER + UNFINISHED)
        self._remove_all(unfinished)
        _move_results(self.path, unfinished)
        returns = (earlier / _MANIFEST).exists() and not difference(self._parts_in(earlier), parts)
        if returns:
            _move_results(earlier, self.path)
        self._remove_all(earlier)
        unfinished.rename(earlier)
        return returns

    @staticmethod
    def _remove_all(folder: Path) -> None:
        """Delete a folder that `_set_aside` has written."""
        for path in [*folder.glob("*/*"), *folder.glob("*")]:
            path.rmdir() if path.is_dir() else path.unlink()
        with contextlib.suppress(FileNotFoundError):
            folder.rmdir()

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

        `kind` is one of `_KINDS`.

        Raises:
            MoonshotError: the disk is full, or the folder cannot be written.
        """
        path = self.path / kind / f"{name}.safetensors"
        partial = path.with_suffix(".partial")
        with writing(self.field, self.path):
            path.parent.mkdir(exist_ok=True)
            text = json.dumps(report)
            save_file(tensors, partial, {"report": text, "sha256": self._digest(path, text, tensors)})
            os.replace(partial, path)
        return path

    def saved(self, kind: str) -> Iterator[tuple[Path, dict[str, Any] | None, dict[str, Tensor]]]:
        """The path, report and tensors of all results of a kind; None and {} for a damaged file, which is deleted.

        Raises:
            MoonshotError: a file cannot be read, or is a folder.
        """
        for path in sorted((self.path / kind).glob("*.safetensors")):
            try:
                with safe_open(path, "pt") as file:
                    metadata = file.metadata() or {}
                    tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                intact = metadata["sha256"] == self._digest(path, metadata["report"], tensors)
                report = json.loads(metadata["report"]) if intact else None
            except (SafetensorError, KeyError, ValueError):
                report, tensors = None, {}
            except OSError as error:
                raise self._error(f"{path} is not a file that can be read: {error}", _START_AGAIN) from None
            if report is None:
                path.unlink()
            yield path, report, tensors

    def _digest(self, path: Path, report: str, tensors: dict[str, Tensor]) -> str:
        """SHA-256 of a result: run, kind, name and report, and the names, dtypes, shapes and bytes of its tensors."""
        run = json.dumps(self._parts, sort_keys=True)
        digest = sha256(json.dumps([run, path.parent.name, path.stem, report]).encode())
        for name, tensor in sorted(tensors.items()):
            digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
            digest.update(tensor.contiguous().flatten().view(uint8).numpy().data if tensor.numel() else b"")
        return digest.hexdigest()

    def release(self) -> None:
        """Release the lock; the files remain."""
        self._lock.release(force=True)

    def discard(self) -> None:
        """Delete the run's files, and the folder if it is empty then, unless another run has started there since."""
        with contextlib.suppress(OSError, MoonshotError):
            self._acquire()
            try:
                if self._parts_in(self.path) == self._parts:
                    self._remove()
            finally:
                self.release()

    def _remove(self) -> None:
        self._clear()
        (self.path / (_MANIFEST + UNFINISHED)).unlink(missing_ok=True)
        RunFolder.remove_all(self.path / SAMPLES)
        for name in (_EARLIER, _EARLIER + UNFINISHED):
            self._remove_all(self.path / name)
        (self.path / _MANIFEST).unlink()
        (self.path / _LOCK).unlink(missing_ok=True)
        self.path.rmdir()  # fails for a link, a mount point, or a folder with other files, which remain

    @classmethod
    def remove_all(cls, top: Path) -> None:
        """Delete the files of all runs in a folder and its subfolders, at any depth; other files remain."""
        emptied = {top}
        for folder, _, names in os.walk(top, topdown=False):
            path = Path(folder)
            with contextlib.suppress(OSError, MoonshotError):
                if _MANIFEST in names and _PARTS in read_json(path / _MANIFEST):
                    cls(path, "folder")._remove()
                elif names and {*names} <= {_LOCK, _MANIFEST + UNFINISHED}:  # a kill in `_remove` or `open` left them
                    for name in names:
                        (path / name).unlink()
                    path.rmdir()
                elif path in emptied:
                    path.rmdir()
                else:
                    continue
                emptied.add(path.parent)

    def _clear(self, patterns: tuple[str, ...] = _WRITTEN) -> None:
        """Delete the results whose file names match one of the patterns."""
        for kind in _KINDS:
            folder = self.path / kind
            for path in [path for pattern in patterns for path in folder.glob(pattern)]:
                path.unlink()
            with contextlib.suppress(OSError):
                folder.rmdir()


def difference(before: Parts, now: Parts) -> str:
    """The first difference between two runs, as "the model differs in lm_head.weight and 2 others"; "" for none."""
    for section in {**now, **before}:
        values, other = now.get(section, {}), before.get(section, {})
        names = [name for name in {**other, **values} if not same_text(values.get(name), other.get(name))]
        if names:
            more = f" and {len(names) - 1} others" if len(names) > 1 else ""
            return f"{section} differs in {names[0]}{more}"
    return ""


def _move_results(source: Path, target: Path) -> None:
    """Move the results of a run; its manifest is the last, so that results are never without one after a kill."""
    target.mkdir(exist_ok=True)
    for kind in _KINDS:
        if (source / kind).is_dir() and not (source / kind / _MANIFEST).exists():  # the samples' own folder stays
            (source / kind).rename(target / kind)
    (source / _MANIFEST).rename(target / _MANIFEST)
