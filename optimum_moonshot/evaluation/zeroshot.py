"""Zero-shot accuracy by lm-eval (the `[eval]` extra): the seven tasks of the pruning literature, or any others.

The metric is `acc`, as in the tables of MOONSHOT (arXiv 2604.13287, section 4.1). Two models are compared by their mean
over the tasks, and by the fraction of tasks that one of them wins.
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

from ..errors import MoonshotError, check_path, check_whole, reason, require
from ..model.calls import evaluation_mode
from ..model.isolation import isolated, wide_products
from ..progress import bars_are_wanted
from ..reports.json_files import check_fields
from ..reports.prune_report import Measurement
from ..reports.record import versions

PAPER_TASKS = ("boolq", "hellaswag", "winogrande", "arc_easy", "arc_challenge", "piqa", "openbookqa")
PAPER = "paper"  # the name of the seven tasks
METRIC = "acc,none"


def win_rate(accuracy: Mapping[str, float], baseline: Mapping[str, float], tasks: Iterable[str]) -> float:
    """Fraction of the `tasks`, in [0, 1], where one model is above another; a tie counts half."""
    pairs = [(accuracy[task], baseline[task]) for task in tasks]
    return statistics.mean(1.0 if value > other else 0.5 if value == other else 0.0 for value, other in pairs)


@dataclasses.dataclass(frozen=True)
class ZeroShot:
    """Accuracies in [0, 1] by task, with lm-eval's standard errors, and the versions of the libraries."""

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
        """Fraction of the tasks where this accuracy is above the baseline's; a tie counts half.

        Raises:
            MoonshotError: the two were not measured on the same tasks in the same way.
        """
        self.check_comparable(list(baseline.accuracy), baseline.num_fewshot, baseline.limit)
        return win_rate(self.accuracy, baseline.accuracy, self.accuracy)

    def check_comparable(self, tasks: Sequence[str], num_fewshot: int, limit: int | None) -> None:
        """Raise `MoonshotError` unless another result has the same tasks, in any order, and the same settings."""
        names, others = ", ".join(sorted(self.accuracy)), ", ".join(sorted(tasks))
        require(names == others, f"one is of the tasks {names}, the other of {others}", field="baseline")
        for name, value in (("num_fewshot", num_fewshot), ("limit", limit)):
            setting = getattr(self, name)
            message = f"one was measured with {name}={setting}, the other with {value}"
            require(setting == value, message, field="baseline")

    def measurements(self) -> dict[str, Measurement]:
        """The accuracy of every task, and their mean if there are several."""
        settings = {"num_fewshot": self.num_fewshot, "limit": self.limit}
        figures = {name: Measurement("accuracy", value, settings) for name, value in self.accuracy.items()}
        if len(figures) > 1:
            name, tasks = f"mean of {len(figures)} zero-shot tasks", sorted(figures)
            figures[name] = Measurement("accuracy", self.mean, {**settings, "tasks": tasks})
        return figures

    def to_dict(self) -> dict[str, Any]:
        """Convert the result to JSON types; `from_dict` is the inverse."""
        return {**dataclasses.asdict(self), "mean": self.mean}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ZeroShot:
        """The inverse of `to_dict`; raise `MoonshotError` for a field that is missing or of another type."""
        names = {field.name for field in dataclasses.fields(cls)}
        missing = sorted(names - set(values))
        require(not missing, f"not a zero-shot result, {', '.join(missing)} is missing", field="baseline")
        return check_fields(cls, {name: values[name] for name in names})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ZeroShot:
        """Read a JSON file with the result of `to_dict`, alone or under "zero_shot".

        Raises:
            MoonshotError: a file that cannot be read, or has other content.
        """
        check_path("path", path)
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise MoonshotError(f"{path} cannot be read as JSON ({error})", field="baseline") from None
        require(isinstance(values, dict), f"{path} does not contain a JSON object", field="baseline")
        return cls.from_dict(values.get("zero_shot", values))


class Tasks(NamedTuple):
    """Tasks of lm-eval, from `find_tasks`."""

    names: list[str]
    manager: Any  # lm-eval's TaskManager


def find_tasks(tasks: str | Sequence[str | os.PathLike[str]]) -> Tasks:
    """Look up tasks, which takes several seconds in lm-eval but downloads nothing.

    Args:
        tasks: names of lm-eval's tasks, "paper" for the seven of the literature, or paths of YAML task files.

    Raises:
        MoonshotError: lm-eval is not installed, or a task is unknown or given twice.
    """
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        install = "pip install 'optimum-moonshot[eval]'"
        raise MoonshotError(f"zero-shot accuracy needs lm-eval ({error})", hint=install) from error
    names, folders = _names(tasks)
    # lm-eval's list, which is slow to read, is needed only for names.
    defaults = len(folders) < len(names)
    manager = TaskManager(include_path=list(dict.fromkeys(folders)) or None, include_defaults=defaults)
    for name in names:
        give = "give a name of its list or a YAML file"
        require(name in manager.all_tasks, f"lm-eval has no {name!r}", field="tasks", hint=give)
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
        model: a causal language model; not changed.
        tokenizer: the model's Hugging Face tokenizer.
        tasks: see `find_tasks`, or its result.
        batch_size: requests per forward pass.
        num_fewshot: solved examples before each question; 0 is the protocol of the literature.
        limit: the largest number of documents per task, for a quick estimate; None is all.
        progress: show a progress bar of the requests.

    Raises:
        MoonshotError: lm-eval is not installed, or a task is unknown, cannot be loaded or has no accuracy.
    """
    check_whole("batch_size", batch_size, 1)
    check_whole("num_fewshot", num_fewshot, 0)
    if limit is not None:
        check_whole("limit", limit, 1)
    needed = "zero-shot tasks need the model's tokenizer"
    require(tokenizer is not None, needed, field="tokenizer", value=None)
    tasks = tasks if isinstance(tasks, Tasks) else find_tasks(tasks)
    results = _measure(model, tokenizer, tasks, batch_size, progress, num_fewshot=num_fewshot, limit=limit)
    for name, values in results.items():
        measured = sorted(key for key in values if "," in key and "stderr" not in key)
        require(METRIC in values, f"{name} has no accuracy, only {', '.join(measured)}", field="tasks")
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
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    # Without seeds the caller's random state does not change.
    seeds = dict.fromkeys(("random_seed", "numpy_random_seed", "torch_random_seed"))
    options |= {"task_manager": tasks.manager, "log_samples": False, **seeds}
    with isolated(model) as model, evaluation_mode(model), wide_products(model):
        wrapped = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
        wrapped.loglikelihood = partial(wrapped.loglikelihood, disable_tqdm=not (progress and bars_are_wanted()))
        try:
            results = simple_evaluate(model=wrapped, tasks=tasks.names, **options)["results"]
        except Exception as error:  # a failed download, or any error in a task file
            names, kind = ", ".join(tasks.names), type(error).__name__
            message = f"{names} cannot be measured ({kind}: {reason(error)})"
            raise MoonshotError(message, field="tasks") from error
    return {name: results[name] for name in tasks.names}


def _names(tasks: Any) -> tuple[list[str], list[str]]:
    """Task names, and the folders of YAML files."""
    listed = [tasks] if isinstance(tasks, str | os.PathLike) else tasks
    accepted = "give a list of names or YAML files"
    require(isinstance(listed, list | tuple) and len(listed) > 0, accepted, field="tasks", value=tasks)
    names, folders = [], []
    for task in (name for given in listed for name in (PAPER_TASKS if given == PAPER else (given,))):
        require(isinstance(task, str | os.PathLike), f"{task!r} is neither a name nor a path", field="tasks")
        path = Path(task)
        if path.suffix not in (".yaml", ".yml"):
            names.append(str(task))
            continue
        require(path.is_file(), f"{task}: no such file", field="tasks")
        # Read line by line, because a YAML parser would need lm-eval's `!function` tags.
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        name = next((line for line in lines if line.startswith("task:")), None)
        if name is None:
            raise MoonshotError(f"{path} has no task name", field="tasks")
        names.append(name.partition(":")[2].strip().strip("'\""))
        folders.append(str(path.resolve().parent))
    require(len(set(names)) == len(names), f"duplicates in {', '.join(names)}", field="tasks")
    return names, folders
