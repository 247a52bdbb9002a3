"""Zero-shot accuracy through lm-eval (the `[eval]` extra): the seven tasks of the pruning literature, or any other.

The metric is `acc`, as in the tables of MOONSHOT (arXiv 2604.13287, section 4.1); two models are compared by their
mean over the tasks and by the share of tasks that one of them wins.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from ..errors import MoonshotError, check_whole, reason, require
from ..model.calls import evaluation_mode
from ..progress import bars_are_wanted
from ..reports.conform import check_fields
from ..reports.environment import versions
from ..reports.measurement import Measurement

PAPER_TASKS = ("boolq", "hellaswag", "winogrande", "arc_easy", "arc_challenge", "piqa", "openbookqa")
PAPER = "paper"  # all of them by one word
METRIC = "acc,none"


def share_won(ours: Mapping[str, float], baseline: Mapping[str, float], tasks: Iterable[str]) -> float:
    """Share of the tasks, in [0, 1], where one model is above another; a tie counts half.

    Args:
        ours: accuracy by task, of the model that may win.
        baseline: that of the other.
        tasks: which count; both have been measured on all of them.
    """
    pairs = [(ours[task], baseline[task]) for task in tasks]
    return statistics.mean(1.0 if mine > other else 0.5 if mine == other else 0.0 for mine, other in pairs)


@dataclasses.dataclass(frozen=True)
class ZeroShot:
    """Accuracies in [0, 1] by task, with lm-eval's standard errors, and the versions they were measured with."""

    accuracy: dict[str, float]
    stderr: dict[str, float | None]
    num_fewshot: int
    limit: int | None  # documents per task; None is all
    versions: dict[str, str]

    @property
    def mean(self) -> float:
        """Mean accuracy over the tasks."""
        return statistics.mean(self.accuracy.values())

    def win_rate(self, baseline: ZeroShot) -> float:
        """Share of the tasks where this accuracy is above the baseline's; a tie counts half.

        Raises:
            MoonshotError: the two were not measured on the same tasks in the same way.
        """
        self.check_comparable(list(baseline.accuracy), baseline.num_fewshot, baseline.limit)
        return share_won(self.accuracy, baseline.accuracy, self.accuracy)

    def check_comparable(self, tasks: Sequence[str], num_fewshot: int, limit: int | None) -> None:
        """Raise `MoonshotError` unless this was measured as another result was.

        Args:
            tasks: names, in any order.
            num_fewshot: solved examples before each question.
            limit: documents per task; None is all.
        """
        mine, other = sorted(self.accuracy), sorted(tasks)
        require(mine == other, f"baseline: one is of the tasks {', '.join(mine)}, the other of {', '.join(other)}")
        for field, value in (("num_fewshot", num_fewshot), ("limit", limit)):
            mine = getattr(self, field)
            require(mine == value, f"baseline: one was measured with {field}={mine}, the other with {value}")

    def measurements(self) -> dict[str, Measurement]:
        """Every task's accuracy, and the mean of several."""
        settings = {"num_fewshot": self.num_fewshot, "limit": self.limit}
        found = {name: Measurement("accuracy", value, settings) for name, value in self.accuracy.items()}
        if len(found) > 1:
            name, tasks = f"mean of {len(found)} zero-shot tasks", sorted(found)
            found[name] = Measurement("accuracy", self.mean, {**settings, "tasks": tasks})
        return found

    def to_dict(self) -> dict[str, Any]:
        """As JSON types; `from_dict` is its inverse."""
        return {**dataclasses.asdict(self), "mean": self.mean}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ZeroShot:
        """From what `to_dict` gave.

        Raises:
            MoonshotError: a field is missing.
        """
        fields = {field.name for field in dataclasses.fields(cls)}
        missing = sorted(fields - set(values))
        require(not missing, f"baseline: no zero-shot result, it lacks {', '.join(missing)}")
        found = {name: values[name] for name in fields}
        check_fields(cls, found)
        return cls(**found)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ZeroShot:
        """Read a JSON file that `to_dict` was written to, alone or under "zero_shot".

        Raises:
            MoonshotError: a file that cannot be read, or holds something else.
        """
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            require(False, f"baseline: {path} cannot be read as JSON ({error})")
        require(isinstance(values, dict), f"baseline: {path} holds no JSON object")
        return cls.from_dict(values.get("zero_shot", values))


class Tasks(NamedTuple):
    """Tasks that lm-eval knows, as `find_tasks` found them."""

    names: list[str]
    manager: Any  # lm-eval's TaskManager


def find_tasks(tasks: str | Sequence[str | os.PathLike[str]]) -> Tasks:
    """Look tasks up, which takes lm-eval some seconds; nothing is downloaded yet.

    Args:
        tasks: names that lm-eval knows, "paper" for the seven of the literature, or paths of YAML task files.

    Raises:
        MoonshotError: lm-eval is not installed, or a task is unknown or given twice.
    """
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        require(False, f"zero-shot accuracy needs lm-eval: pip install 'optimum-moonshot[eval]' ({error})")
    names, folders = _names(tasks)
    own = len(folders) == len(names)  # reading lm-eval's own list takes seconds
    manager = TaskManager(include_path=list(dict.fromkeys(folders)) or None, include_defaults=not own)
    for name in names:
        require(name in manager.all_tasks, f"tasks: lm-eval knows no {name!r}; give a name of its list or a YAML file")
    return Tasks(names, manager)


def zero_shot(
    model: nn.Module,
    tokenizer: Any,
    tasks: str | Sequence[str | os.PathLike[str]] | Tasks = PAPER_TASKS,
    *,
    batch_size: int = 8,
    num_fewshot: int = 0,
    limit: int | None = None,
    progress: bool = False,
) -> ZeroShot:
    """Accuracy of a causal language model on multiple-choice tasks, without training on them.

    Args:
        model: a causal language model; left as it was.
        tokenizer: the model's Hugging Face tokenizer.
        tasks: as for `find_tasks`, or what it returned.
        batch_size: requests that pass through the model at a time.
        num_fewshot: solved examples put before each question; 0 is the protocol of the literature.
        limit: the first so many documents per task only, for a quick look; None is all.
        progress: show a bar of the requests.

    Raises:
        MoonshotError: lm-eval is not installed, or a task is unknown, cannot be loaded or has no accuracy.
    """
    check_whole("batch_size", batch_size, 1)
    check_whole("num_fewshot", num_fewshot, 0)
    if limit is not None:
        check_whole("limit", limit, 1)
    require(tokenizer is not None, "tokenizer=None: zero-shot tasks need the model's tokenizer")
    tasks = tasks if isinstance(tasks, Tasks) else find_tasks(tasks)
    results = _measure(model, tokenizer, tasks, batch_size, progress, num_fewshot=num_fewshot, limit=limit)
    for name, values in results.items():
        measured = sorted(key for key in values if "," in key and "stderr" not in key)
        require(METRIC in values, f"tasks: {name} has no accuracy, only {', '.join(measured)}")
    errors = {name: values.get("acc_stderr,none") for name, values in results.items()}
    return ZeroShot(
        accuracy={name: float(values[METRIC]) for name, values in results.items()},
        stderr={name: value if isinstance(value, float) else None for name, value in errors.items()},
        num_fewshot=num_fewshot,
        limit=limit,
        versions={**versions(), "lm_eval": version("lm_eval")},
    )


def _measure(
    model: nn.Module, tokenizer: Any, tasks: Tasks, batch_size: int, progress: bool, **options: Any
) -> dict[str, dict[str, Any]]:
    """lm-eval's results by task."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    seeds = {f"{kind}_random_seed": None for kind in ("numpy", "torch")}  # the caller's random state stays as it is
    options |= {"task_manager": tasks.manager, "log_samples": False, "random_seed": None, **seeds}
    with evaluation_mode(model):
        wrapped = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
        wrapped.loglikelihood = partial(wrapped.loglikelihood, disable_tqdm=not (progress and bars_are_wanted()))
        try:
            found = simple_evaluate(model=wrapped, tasks=tasks.names, **options)
        except Exception as error:  # of loading the data, and whatever a mistake in a task's file leads to
            names, kind = ", ".join(tasks.names), type(error).__name__
            raise MoonshotError(f"tasks: {names} cannot be measured ({kind}: {reason(error)})") from error
    return {name: found["results"][name] for name in tasks.names}


def _names(tasks: Any) -> tuple[list[str], list[str]]:
    """Task names, and the folders where those given as YAML files lie."""
    given = [tasks] if isinstance(tasks, str | os.PathLike) else tasks
    require(isinstance(given, list | tuple), f"tasks={tasks!r}: give a list of names or YAML files")
    require(len(given) > 0, "tasks: none given")
    given = [name for task in given for name in (PAPER_TASKS if task == PAPER else (task,))]
    names, folders = [], []
    for task in given:
        require(isinstance(task, str | os.PathLike), f"tasks: {task!r} is neither a name nor a path")
        path = Path(task)
        if path.suffix not in (".yaml", ".yml"):
            names.append(str(task))
            continue
        require(path.is_file(), f"tasks: there is no file {task}")
        names.append(_task_name(path))
        folders.append(str(path.resolve().parent))
    require(len(set(names)) == len(names), f"tasks: one is given twice in {', '.join(names)}")
    return names, folders


def _task_name(path: Path) -> str:
    """The name that a YAML task file gives itself; its `!function` tags need not be understood."""
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("task:"):
            return line.partition(":")[2].strip().strip("'\"")
    raise MoonshotError(f"tasks: {path} names no task")
