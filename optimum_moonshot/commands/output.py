"""The output folder DIR of a command, and DIR.partial, from which it resumes.

DIR.partial/command.json   the request, and whether DIR is being written
DIR.partial/run            results of `moonshot prune` or `rotate`, layer by layer
DIR.partial/shrink         results of the runs of `moonshot shrink`, and its measurements
DIR.partial/seed-N         results of `moonshot sweep`
DIR.partial/seed-N.json    the report of a finished seed
"""

import argparse
import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import Timeout

from ..errors import MoonshotError
from ..files import OF_THE_SYSTEM, STAGING_PREFIX, UNFINISHED, check_folder, locked, read_json, replace_file, writing
from ..options import OF_THE_MACHINE
from .common import (
    UsageError,
    calibration_source,
    check_data,
    expect,
    find_device,
    load_pruner,
    pruner_metric,
    usage_errors,
)
from .launch import is_first

if TYPE_CHECKING:
    from ..config import MoonshotConfig
    from ..pruner import MoonshotPruner


RESUMED_HELP = "a killed run leaves DIR.partial, and resumes when you rerun the command"
_MANIFEST, _LOCK = "command.json", "command.lock"
_WRITTEN = ("seed-*.json*", "command.json*")  # with their temporary files
# Options that do not change the result.
_NEUTRAL = ("output", "overwrite", "device", *OF_THE_MACHINE)
_PATHS = ("model", "calibration", "vocabulary", "prompts", "metric", "allocation")


class Output:
    """The output folder of a command, locked by `open_output`; only the first of several processes writes."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.writes = args, is_first()
        self.path = Path(args.output).resolve()
        self.partial = self.path.with_name(self.path.name + ".partial")
        self.request, self.seed_request = _request(args), _request(args, ("seeds", "save", "format"))

    def begin(self) -> None:
        """Record that this command writes to the folder, until `finish`."""
        if self.writes:
            self._record(writing=True)

    def finish(self) -> None:
        """Remove the partial results once everything is written."""
        if self.writes:
            self._remove(*self.partial.glob("*/"))
            for path in [path for pattern in _WRITTEN for path in self.partial.glob(pattern)]:
                path.unlink()

    def work(self, seed: int | None = None, several: bool = False) -> Path:
        """The folder for the results of a run, of the sweep of a seed, or of the several runs of `moonshot shrink`."""
        return self.partial / ("shrink" if several else "run" if seed is None else f"seed-{seed}")

    def discard(self, seed: int) -> None:
        """Remove the results of a seed whose report is stored."""
        if self.writes:
            self._remove(self.work(seed))

    def report(self, seed: int) -> dict[str, Any] | None:
        """The report that `keep_report` stored for the same request, if any."""
        path = self.partial / f"seed-{seed}.json"
        with contextlib.suppress(MoonshotError, KeyError):
            stored = read_json(path) if path.is_file() else {}
            return stored["report"] if (stored["request"], stored["seed"]) == (self.seed_request, seed) else None
        return None

    def keep_report(self, seed: int, report: dict[str, Any]) -> None:
        """Store the report of a finished seed, as JSON types."""
        if self.writes:
            with writing("output", self.args.output):
                text = json.dumps({"request": self.seed_request, "seed": seed, "report": report})
                replace_file(self.partial / f"seed-{seed}.json", text)

    def _remove(self, *folders: Path) -> None:
        from ..pipeline.run_folder import RunFolder

        for folder in folders:
            RunFolder.remove_all(folder)

    def _expect(self, condition: bool, message: str) -> None:
        expect(condition, message, field="output", value=self.args.output)

    def _begun(self) -> bool:
        """Whether the same command was writing here when it was interrupted."""
        with contextlib.suppress(MoonshotError, OSError):
            return read_json(self.partial / _MANIFEST) == {"request": self.request, "writing": True}
        return False

    def _record(self, writing: bool) -> None:
        replace_file(self.partial / _MANIFEST, json.dumps({"request": self.request, "writing": writing}))

    @contextlib.contextmanager
    def reserved(self) -> Iterator[None]:
        """Check and lock the folder; at the end, remove DIR.partial if it has nothing to resume from."""
        with usage_errors():
            check_folder("output", self.args.output)
        model = Path(self.args.model)
        inside = model.is_dir() and model.resolve() in (self.path, *self.path.parents)
        self._expect(not inside, "it is the model's own folder, or in it; choose another")
        try:
            with contextlib.ExitStack() as lock:
                self._lock(lock)
                usable = (self.partial / _MANIFEST).exists() or not _filled(self.partial)
                self._expect(usable, f"{self.partial} has other files; remove it, or choose another folder")
                # Checked with the lock: another command may have written before.
                usable = self.args.overwrite or not self.path.is_dir() or self._begun() or not _filled(self.path)
                self._expect(usable, "it is not empty; --overwrite writes there anyway")
                if not self._begun():
                    self._record(writing=False)
                try:
                    yield
                finally:
                    self._clean_up()
        finally:
            with contextlib.suppress(OSError):  # files remain, or another command has locked the folder by now
                self.partial.rmdir()

    def _lock(self, lock: contextlib.ExitStack) -> None:
        """Lock DIR.partial, after making it if it is missing."""
        while True:
            self.partial.mkdir(parents=True, exist_ok=True)
            try:
                # Not 0: a lock file that is being deleted counts as locked.
                lock.enter_context(locked(self.partial / _LOCK, timeout=0.2))
            except Timeout:
                message = "another command writes there; wait for its end, or choose another"
                raise UsageError(message, field="output", value=self.args.output) from None
            except FileNotFoundError:  # another command has deleted the folder at its end
                continue
            except OSError:  # a file system without locks
                pass
            return

    def _clean_up(self) -> None:
        folders = self.partial.glob("*/")
        self._remove(*(folder for folder in folders if not any(folder.rglob("*.safetensors"))))
        with contextlib.suppress(OSError):
            written = self._begun() and self.path.is_dir() and _filled(self.path)
            if {path.name for path in self.partial.iterdir()} - {_LOCK} == {_MANIFEST} and not written:
                (self.partial / _MANIFEST).unlink()


@contextlib.contextmanager
def open_output(args: argparse.Namespace) -> Iterator[Output]:
    """The output folder of a command, which the first process checks and locks by `Output.reserved`."""
    output = Output(args)
    with contextlib.ExitStack() as stack:
        if output.writes:
            with writing("output", args.output):
                stack.enter_context(output.reserved())
        yield output


def _filled(folder: Path) -> bool:
    """Whether a folder has files other than those of the file system or of an interrupted write."""
    names = {path.name for path in folder.iterdir()} - {OF_THE_SYSTEM, _LOCK, _MANIFEST + UNFINISHED}
    return any(not name.startswith(STAGING_PREFIX) for name in names)


def _request(args: argparse.Namespace, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """The options that change the result of a command, with size and time of their files, as JSON types."""
    options = {k: v for k, v in vars(args).items() if k not in (*_NEUTRAL, *without) and not callable(v)}
    files = {name: _files(Path(str(options[name])).expanduser()) for name in _PATHS if options.get(name) is not None}
    return json.loads(json.dumps({"options": options, "files": files}, default=str))


def _files(path: Path) -> list[Any]:
    """The files of a path, each with its size and time."""
    paths = [path] if path.is_file() else sorted(path.iterdir()) if path.is_dir() else []
    return [[str(p.resolve()), p.stat().st_size, p.stat().st_mtime_ns] for p in paths if p.is_file()]


Change = Callable[["MoonshotPruner", Any, Output], list[str]]


def change_and_save(args: argparse.Namespace, config: "MoonshotConfig", started: float, change: Change) -> None:
    """Load a model, change it, and save it, with `--eval` before and after.

    Args:
        args: of the command, with the options of a model, an output, calibration data and `--eval`.
        config: of the run.
        started: `time.perf_counter()` at the start of the command.
        change: changes the model of a pruner by calibration data, and returns the lines to print first.
    """
    device = find_device(args.device)
    calibration = calibration_source(args, config) or "c4"
    check_data("eval", args.eval)
    with open_output(args) as output:
        pruner, references = load_pruner(args, config, device), dict[str, Any]()
        metric = pruner_metric(pruner, references)
        before = {dataset: metric.measure(dataset) for dataset in args.eval if is_first()}
        tokenizer, lines = pruner.tokenizer, change(pruner, calibration, output)
        comparable = pruner.tokenizer is tokenizer or metric.name != "perplexity"
        record = {"record": pruner.report.record} if pruner.report is not None and comparable else {}
        lines += pruner_metric(pruner, references).changes(before, **record)
        if before and not comparable:
            lines.append("note        per token, which other vocabularies make incomparable")
        output.begin()
        pruner.save_pretrained(output.path)
        output.finish()
    if is_first():
        print(*lines, f"saved       {args.output}", f"seconds     {time.perf_counter() - started:.1f}", sep="\n")
