"""Where a command writes: DIR, and DIR.partial beside it, which the same command goes on from.

DIR.partial/command.json   what was asked for, and whether DIR is being written
DIR.partial/run            results of `moonshot prune`, layer by layer
DIR.partial/seed-N         those of `moonshot sweep`
DIR.partial/seed-N.json    the report of a seed that is finished
"""

import argparse
import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from filelock import Timeout

from ..errors import MoonshotError
from ..files import OF_THE_SYSTEM, STAGING_PREFIX, UNFINISHED, check_folder, locked, read_json, replace_file, writing
from .common import UsageError, expect
from .launched import is_first

_MANIFEST, _LOCK = "command.json", "command.lock"
_WRITTEN = ("seed-*.json*", "command.json*")  # also what a kill leaves of them
# Options that say where and how, not what.
_PLACES = ("output", "overwrite", "device", "max_memory", "offload_dir", "batch_size")
_PATHS = ("model", "calibration", "prompts", "metric", "allocation")


class Output:
    """A command's output folder, of which it has sole use inside of `open_output`.

    Args:
        args: of the command, as they were parsed.
    """

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.path = Path(args.output).resolve()
        self.partial = self.path.with_name(self.path.name + ".partial")
        self.asked = asked(args)

    def check(self) -> None:
        """Raise `UsageError` for a place where nothing can be written."""
        shown = f"--output {self.args.output}"
        try:
            check_folder("output", self.args.output)
        except MoonshotError as error:
            raise UsageError(str(error)) from None
        model = Path(self.args.model)
        inside = model.is_dir() and model.resolve() in (self.path, *self.path.parents)
        expect(not inside, f"{shown}: it is the model's own folder, or in it; choose another")

    def check_empty(self) -> None:
        """Raise `UsageError` where files lie that are not of this command, unless it may overwrite them."""
        if self.args.overwrite or not self.path.is_dir() or self._begun():
            return
        expect(not _filled(self.path), f"--output {self.args.output}: it is not empty; --overwrite writes there anyway")

    def begin(self) -> None:
        """From here on, what lies in the folder is of this command, until `finish`."""
        self._record(writing=True)

    def finish(self) -> None:
        """All is written: remove what a command would go on from."""
        from ..results.run_folder import RunFolder

        for folder in (self.work(), *self.partial.glob("seed-*/")):
            RunFolder.remove_all(folder)
        for path in [path for pattern in _WRITTEN for path in self.partial.glob(pattern)]:
            path.unlink()

    def work(self, seed: int | None = None) -> Path:
        """The folder for the results of a run, or of a seed's sweep."""
        return self.partial / ("run" if seed is None else f"seed-{seed}")

    def discard(self, seed: int) -> None:
        """Remove the results of a seed whose report is kept."""
        from ..results.run_folder import RunFolder

        RunFolder.remove_all(self.work(seed))

    def report(self, seed: int) -> dict[str, Any] | None:
        """What `keep_report` kept for the same request; None where there is nothing."""
        path = self._report_path(seed)
        with contextlib.suppress(MoonshotError, KeyError):
            kept = read_json(path) if path.is_file() else {}
            return kept["report"] if kept["asked"] == asked(self.args, ("seeds", "save", "format")) else None
        return None

    def keep_report(self, seed: int, report: dict[str, Any]) -> None:
        """Keep the report of a finished seed, as JSON types."""
        values = {"asked": asked(self.args, ("seeds", "save", "format")), "report": report}
        with writing("output", self.args.output):
            replace_file(self._report_path(seed), json.dumps(values))

    def _report_path(self, seed: int) -> Path:
        return self.partial / f"seed-{seed}.json"

    def _begun(self) -> bool:
        """Whether the same command was writing here when it ended too early."""
        with contextlib.suppress(MoonshotError, OSError):
            return read_json(self.partial / _MANIFEST) == {"asked": self.asked, "writing": True}
        return False

    def _record(self, writing: bool) -> None:
        replace_file(self.partial / _MANIFEST, json.dumps({"asked": self.asked, "writing": writing}))

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Sole use of the folder; what was nothing to go on from leaves no trace.

        Raises:
            UsageError: another command writes there, or it holds files that are not of this command.
        """
        shown = f"--output {self.args.output}"
        try:
            with contextlib.ExitStack() as lock:
                self._take(lock)
                own = (self.partial / _MANIFEST).exists() or not _filled(self.partial)
                expect(own, f"{shown}: {self.partial} holds other files; remove it, or choose another folder")
                self.check_empty()
                if not self._begun():
                    self._record(writing=False)
                try:
                    yield
                finally:
                    self._leave()
        finally:
            with contextlib.suppress(OSError):  # files remain, or another command has locked the folder by now
                self.partial.rmdir()

    def _take(self, lock: contextlib.ExitStack) -> None:
        """Create and lock the folder that keeps results."""
        while True:
            self.partial.mkdir(parents=True, exist_ok=True)
            try:
                # Not 0: a lock file that is just being deleted counts as held.
                lock.enter_context(locked(self.partial / _LOCK, timeout=0.2))
            except Timeout:
                shown = f"--output {self.args.output}"
                message = f"{shown}: another command writes there; wait for its end, or choose another"
                raise UsageError(message) from None
            except FileNotFoundError:  # a command that has just ended deleted the folder
                continue
            except OSError:  # a file system without locks
                pass
            return

    def _leave(self) -> None:
        from ..results.run_folder import RunFolder

        for folder in (self.work(), *self.partial.glob("seed-*/")):
            if not any(folder.rglob("*.safetensors")):
                RunFolder.remove_all(folder)
        with contextlib.suppress(OSError):
            written = self._begun() and self.path.is_dir() and _filled(self.path)
            if {path.name for path in self.partial.iterdir()} - {_LOCK} == {_MANIFEST} and not written:
                (self.partial / _MANIFEST).unlink()


class Elsewhere(Output):
    """The output folder of a command of several processes, for those that do not write."""

    def begin(self) -> None:
        """The first process does."""

    def finish(self) -> None:
        """The first process does."""

    def discard(self, seed: int) -> None:
        """The first process does."""

    def keep_report(self, seed: int, report: dict[str, Any]) -> None:
        """The first process does.

        Args:
            seed, report: as for `Output.keep_report`.
        """


@contextlib.contextmanager
def open_output(args: argparse.Namespace) -> Iterator[Output]:
    """The output folder of a command, for it alone; of several processes the first one alone writes there.

    Raises:
        UsageError: it is a file or a link to nothing, lies in the model's folder, holds something without
            `--overwrite`, or another command writes there.
    """
    output = Output(args) if is_first() else Elsewhere(args)
    if not is_first():
        yield output
        return
    output.check()
    output.check_empty()
    with contextlib.ExitStack() as stack:
        with writing("output", args.output):
            stack.enter_context(output.held())
        yield output


def _filled(folder: Path) -> bool:
    """Whether files lie there, beside those that a file system or a kill leaves."""
    names = {path.name for path in folder.iterdir()} - {OF_THE_SYSTEM, _LOCK, _MANIFEST + UNFINISHED}
    return any(not name.startswith(STAGING_PREFIX) for name in names)


def asked(args: argparse.Namespace, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """What a command is to do, as JSON types: its options, and the size and time of the files that they name.

    Args:
        args: as they were parsed.
        without: further options that make no difference.
    """
    known = {k: v for k, v in vars(args).items() if k not in (*_PLACES, *without) and not callable(v)}
    files = {name: _files(Path(os.path.expanduser(str(known[name])))) for name in _PATHS if known.get(name) is not None}
    return json.loads(json.dumps({"options": known, "files": files}, default=str))


def _files(path: Path) -> list[Any]:
    """The files that a path names, each with its size and time; none where it is no path here."""
    paths = [path] if path.is_file() else sorted(path.iterdir()) if path.is_dir() else []
    return [[str(p.resolve()), p.stat().st_size, p.stat().st_mtime_ns] for p in paths if p.is_file()]
