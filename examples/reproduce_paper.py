"""The tables of MOONSHOT (arXiv 2604.13287) on any model: the paper's protocol, over seeds, in the paper's layout.

    python examples/reproduce_paper.py --model meta-llama/Llama-3.2-1B --table llama
    python examples/reproduce_paper.py --model facebook/deit-small-patch16-224 --table vision \
        --calibration imagenet/train --datasets imagenet/val --samples 4096

Without a hub, give local folders and files of the same form; `--tasks none` leaves the zero-shot tasks out. The best λ
is selected as in the paper, by the perplexity (or loss) on the calibration data. docs/paper.md lists every experiment
with its command and the paper's numbers.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from optimum_moonshot import MoonshotConfig, MoonshotPruner, accuracy, perplexity
from optimum_moonshot.images import takes_images
from optimum_moonshot.sweep_report import Mean, mean
from optimum_moonshot.zeroshot import PAPER_TASKS, zero_shot

LAMBDAS = {"language": (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0), "vision": (0.0, 0.25, 0.5, 0.75, 1.0)}
SPARSITIES = (0.5, 0.6, 0.7, 0.8)
Values = dict[str, float]  # metric → value of one model


class Setting(NamedTuple):
    """A row group of a table: what the baseline and MOONSHOT have in common."""

    name: str
    config: dict[str, Any]
    baseline: float = 1.0  # λ of the single-objective method


LLAMA = (
    Setting("0.1 structured, OSSCAR", {"solver": "osscar", "pattern": "structured", "sparsity": 0.1}),
    *(
        Setting(f"{name}, {solver}", {"solver": solver, **choice})
        for solver in ("sparsegpt", "wanda")
        for name, choice in (
            ("0.6", {"sparsity": 0.6}),
            ("0.6 AlphaPruning", {"sparsity": 0.6, "allocation": "alpha"}),
            ("0.6 OWL", {"sparsity": 0.6, "allocation": "owl"}),
            ("2:4", {"pattern": "2:4"}),
        )
    ),
)
VISION = (
    Setting("0.7, CAP", {"solver": "cap", "sparsity": 0.7}, 0.0),
    Setting("2:4, CAP", {"solver": "cap", "pattern": "2:4"}, 0.0),
    Setting("0.9, OBC", {"solver": "obc", "sparsity": 0.9}),
    Setting("2:4, OBC", {"solver": "obc", "pattern": "2:4"}),
)


class Bench:
    """One model, its calibration data and how it is measured."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        first = self.pruner({"solver": "magnitude", "sparsity": 0.5}, options.seeds[0])
        self.kind = "vision" if takes_images(first.model) else "language"
        self.dense = self.evaluate(first)

    def pruner(self, choice: dict[str, Any], seed: int) -> MoonshotPruner:
        """A dense model with its configuration."""
        if getattr(self, "kind", "language") == "language" and choice["solver"] != "magnitude":
            choice = {"fisher": self.options.fisher, **choice}
        config = MoonshotConfig(
            seed=seed, num_samples=self.options.samples, sequence_length=self.options.sequence_length, **choice
        )
        return MoonshotPruner.from_pretrained(self.options.model, config, dtype=self.options.dtype)

    def evaluate(self, pruner: MoonshotPruner) -> Values:
        """Perplexity by data set and accuracy by task; top-1 by data set for image models."""
        found: Values = {}
        for dataset in self.options.datasets:
            if takes_images(pruner.model):
                found[Path(dataset).name] = 100 * accuracy(pruner.model, dataset, pruner.processor).value
            else:
                length = self.options.sequence_length
                result = perplexity(pruner.model, pruner.tokenizer, dataset, sequence_length=length)
                found[Path(dataset).name] = result.value
        if self.options.tasks and not takes_images(pruner.model):
            result = zero_shot(pruner.model, pruner.tokenizer, self.options.tasks)
            found |= {task: 100 * value for task, value in result.accuracy.items()}
            found["mean"] = 100 * result.mean
        return found

    def sweep(self, setting: Setting, lambdas: tuple[float, ...], seed: int, all_of_them: bool) -> dict[str, Values]:
        """The baseline's and the best λ's values; those of every λ with `all_of_them`."""
        pruner = self.pruner(setting.config, seed)
        report = pruner.sweep(self.options.calibration, lambdas=lambdas)
        baseline = next(entry for entry in report.entries if entry.lam == setting.baseline)
        wanted = {"baseline": baseline, "MOONSHOT": report.best()}
        if all_of_them:
            wanted = {f"λ = {entry.lam:g}": entry for entry in report.entries}
        measured: dict[float, Values] = {}
        for entry in wanted.values():
            if entry.lam not in measured:
                with pruner.applied(entry):
                    measured[entry.lam] = {**self.evaluate(pruner), "λ": entry.lam}
        return {row: dict(measured[entry.lam]) for row, entry in wanted.items()}

    def prune(self, choice: dict[str, Any], lam: float, seed: int) -> Values:
        """One run; its values and seconds."""
        pruner = self.pruner({**choice, "lam": lam}, seed)
        report = pruner.prune(self.options.calibration)
        return {**self.evaluate(pruner), "seconds": report.seconds["total"]}


def win_rate(ours: Values, baseline: Values, tasks: list[str]) -> float:
    """Percentage of the tasks that `ours` wins; a tie counts half."""
    wins = [1.0 if ours[t] > baseline[t] else 0.5 if ours[t] == baseline[t] else 0.0 for t in tasks]
    return 100 * statistics.mean(wins)


def over_seeds(runs: list[dict[str, Values]]) -> dict[str, dict[str, Mean]]:
    """Row → metric → mean with standard error, of one dictionary of rows per seed."""
    rows = runs[0]
    return {row: {m: mean([run[row][m] for run in runs]) for m in rows[row]} for row in rows}


def selected(bench: Bench, settings: tuple[Setting, ...]) -> Iterator[tuple[str, dict[str, Mean]]]:
    """Rows of tables 2 and 3: the baseline against the λ that the calibration data select."""
    for setting in settings:
        runs = []
        for seed in bench.options.seeds:
            found = bench.sweep(setting, bench.options.lambdas or LAMBDAS[bench.kind], seed, False)
            if bench.options.tasks and bench.kind == "language":
                tasks = list(bench.options.tasks)
                ours, theirs = found["MOONSHOT"], found["baseline"]
                ours["win rate"], theirs["win rate"] = win_rate(ours, theirs, tasks), win_rate(theirs, ours, tasks)
            runs.append(found)
        for row, values in over_seeds(runs).items():
            yield f"{setting.name}: {row}", values


def by_lambda(bench: Bench, settings: tuple[Setting, ...]) -> Iterator[tuple[str, dict[str, Mean]]]:
    """Every λ (section 5.1, and the tables of appendix A.11)."""
    for setting in settings:
        lambdas = bench.options.lambdas or LAMBDAS[bench.kind]
        runs = [bench.sweep(setting, lambdas, seed, True) for seed in bench.options.seeds]
        for row, values in over_seeds(runs).items():
            yield f"{setting.name}: {row}", {name: value for name, value in values.items() if name != "λ"}


def by_sparsity(bench: Bench, settings: tuple[Setting, ...]) -> Iterator[tuple[str, dict[str, Mean]]]:
    """The best λ and the baseline at several sparsities (section 5.2)."""
    for setting in settings:
        if setting.config.get("pattern", "unstructured") == "unstructured" and "allocation" not in setting.config:
            solver = setting.config["solver"]
            several = [
                Setting(f"{s:g}, {solver}", {**setting.config, "sparsity": s}, setting.baseline)
                for s in bench.options.sparsities
            ]
            yield from selected(bench, tuple(several))


def runs_of_their_own(
    bench: Bench, settings: tuple[Setting, ...], changes: dict[str, dict[str, Any]], lambdas: tuple[float, ...]
) -> Iterator[tuple[str, dict[str, Mean]]]:
    """Rows that no sweep can share: pruning times, recomputation, attention against all layers."""
    for setting in settings:
        for name, change in changes.items():
            for lam in lambdas:
                choice = {**setting.config, **change}
                runs = [{"row": bench.prune(choice, lam, seed)} for seed in bench.options.seeds]
                yield f"{setting.name}{name}: λ = {lam:g}", over_seeds(runs)["row"]


def rows(bench: Bench, table: str) -> Iterator[tuple[str, dict[str, Mean]]]:
    """The rows of one table: its name, and a mean per metric."""
    settings = VISION if bench.kind == "vision" else LLAMA
    if bench.options.only:
        settings = tuple(s for s in settings if any(part in s.name for part in bench.options.only))
    plain = tuple(s for s in settings if "allocation" not in s.config and s.config["solver"] != "osscar")
    lambdas = tuple(bench.options.lambdas or LAMBDAS[bench.kind])
    tables: dict[str, Callable[[], Iterator]] = {
        "main": lambda: selected(bench, settings),
        "lambda": lambda: by_lambda(bench, settings),
        "sparsity": lambda: by_sparsity(bench, settings),
        "times": lambda: runs_of_their_own(bench, plain, {"": {}}, lambdas),
        "recompute": lambda: runs_of_their_own(bench, plain, {"": {}, " ++": {"recompute": True}}, lambdas),
        "layers": lambda: runs_of_their_own(
            bench, plain, {" (attention)": {"fisher": "attention"}, " (all)": {"fisher": "all"}}, (0.9, 1.0)
        ),
    }
    return tables[TABLES[table]]()


# What the paper calls them, and where they are there.
TABLES = {
    "vision": "main", "2": "main", "llama": "main", "3": "main", "times": "times", "4": "times",
    "recompute": "recompute", "5": "recompute", "6": "recompute", "layers": "layers", "8": "layers",
    "lambda": "lambda", "sparsity": "sparsity",
}  # fmt: skip


def print_row(name: str, values: dict[str, Mean], metrics: list[str]) -> None:
    """A Markdown row."""
    cells = [f"{v.value:.2f} ± {v.error:.2f}" if (v := values.get(m)) else "" for m in metrics]
    print("| " + " | ".join([name, *cells]) + " |", flush=True)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder, or name on the Hub")
    parser.add_argument("--table", required=True, choices=list(TABLES), help="by name, or by its number in the paper")
    parser.add_argument("--calibration", default="c4", help="as for pruning; a folder of images for image models")
    parser.add_argument("--datasets", nargs="+", default=["c4", "wikitext2", "ptb"], help="to measure on")
    parser.add_argument("--tasks", nargs="+", default=list(PAPER_TASKS), help="zero-shot tasks, or none")
    parser.add_argument("--samples", type=int, default=128, help="calibration samples; the paper: 128, vision 4096")
    parser.add_argument("--sequence-length", type=int, default=None, help="the model's longest, at most 2048")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--lambdas", nargs="+", type=float, help="default: the paper's")
    parser.add_argument("--sparsities", nargs="+", type=float, default=list(SPARSITIES), help="of --table sparsity")
    parser.add_argument("--fisher", default="attention", help="attention, as in the paper, or all")
    parser.add_argument("--only", nargs="+", help="settings whose names contain one of these, such as 2:4 or OWL")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--output", help="a JSON file for the table")
    options = parser.parse_args(arguments)
    options.tasks = [] if options.tasks == ["none"] else options.tasks
    return options


def main(arguments: list[str] | None = None) -> dict[str, dict[str, Mean]]:
    """Print a table, row by row as they are measured; returns it."""
    options = parse(arguments)
    bench = Bench(options)
    metrics = [*bench.dense, *(["win rate"] if options.tasks else []), "λ", "seconds"]
    print("| | " + " | ".join(metrics) + " |")
    print("|---" * (len(metrics) + 1) + "|")
    found = {"dense": {name: Mean(value, 0.0) for name, value in bench.dense.items()}}
    print_row("dense", found["dense"], metrics)
    for name, values in rows(bench, options.table):
        found[name] = values
        print_row(name, values, metrics)
        if options.output:
            table = {row: {m: v._asdict() for m, v in cells.items()} for row, cells in found.items()}
            document = {"options": vars(options), "table": table}
            Path(options.output).write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n")
    return found


if __name__ == "__main__":
    main()
