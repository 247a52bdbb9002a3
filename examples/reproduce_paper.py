"""Reproduce the tables of MOONSHOT (arXiv 2604.13287) on any model: the paper's protocol, seeds and layout.

    python examples/reproduce_paper.py --model meta-llama/Llama-3.2-1B --table llama
    python examples/reproduce_paper.py --model facebook/deit-small-patch16-224 --table vision --only CAP \
        --calibration imagenet/train --datasets imagenet/val --samples 4096

Without access to the Hub, pass local folders and files of the same form; `--tasks none` skips the zero-shot tasks. The
best λ is selected as in the paper, by the perplexity (or loss) on the calibration data, for each seed.
docs/how-it-works.md lists every experiment with its command.
"""

import argparse
import itertools
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from optimum_moonshot import MoonshotConfig, MoonshotPruner, SweepReport, accuracy, perplexity
from optimum_moonshot.data.text import window_length
from optimum_moonshot.evaluation.zeroshot import PAPER_TASKS, find_tasks, win_rate, zero_shot
from optimum_moonshot.model.model_info import max_positions, takes_images
from optimum_moonshot.reports.record import versions
from optimum_moonshot.sweep.report import Mean, SweepEntry, baseline_lam, mean

LAMBDAS = {"language": (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0), "vision": (0.0, 0.25, 0.5, 0.75, 1.0)}
SOLVERS = {"language": ("sparsegpt", "wanda"), "vision": ("cap", "obc")}
NAMES = {"sparsegpt": "SparseGPT", "wanda": "Wanda", "osscar": "OSSCAR", "cap": "CAP", "obc": "OBC"}
ALLOCATIONS = {"uniform": "", "alpha": " (AlphaPruning)", "owl": " (OWL)"}
TIMED = (0.5, 0.6, 0.7, 0.8, 0.9)  # sparsities of one run of OBC and CAP

Values = dict[str, float]  # metric → value of one model


class Setting(NamedTuple):
    """A method at one sparsity."""

    solver: str
    sparsity: float | None  # None: follows from n:m
    pattern: str = "unstructured"
    allocation: str = "uniform"
    fisher: str | None = None  # None: from `--fisher`
    recompute: bool = False

    @property
    def label(self) -> str:
        """The paper's first column."""
        if self.sparsity is None:
            return self.pattern
        how = " (structured)" if self.pattern == "structured" else ALLOCATIONS[self.allocation]
        return f"{self.sparsity:g}{how}"

    @property
    def method(self) -> str:
        """The single-objective method."""
        return NAMES[self.solver] + ("++" if self.recompute else "")

    @property
    def moonshot(self) -> str:
        return f"MOONSHOT{' (all)' if self.fisher == 'all' else ''}-{self.method}"

    @property
    def name(self) -> str:
        return f"{self.label}, {self.method}"

    @property
    def family(self) -> tuple:
        """The setting without its sparsity: one sweep covers all settings of a family."""
        return self._replace(sparsity=None if self.sparsity is None else 0.0)


def nm(solver: str, **more: Any) -> Setting:
    return Setting(solver, None, "2:4", **more)


LLAMA = (
    Setting("osscar", 0.1, "structured"),
    *itertools.chain.from_iterable(
        (*(Setting(solver, 0.6, allocation=allocation) for allocation in ALLOCATIONS), nm(solver))
        for solver in SOLVERS["language"]
    ),
)
VISION = (Setting("cap", 0.7), nm("cap"), Setting("obc", 0.9), nm("obc"))


class Row(NamedTuple):
    """A row of a table: means over the seeds, and the λ of each."""

    sparsity: str
    method: str
    values: dict[str, Mean]
    lambdas: tuple[float, ...] = ()

    @property
    def name(self) -> str:
        return ", ".join(part for part in (self.sparsity, self.method) if part)


class Bench:
    """One model, its calibration data and its evaluation."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        pruner = self.pruner(Setting("magnitude", 0.5), options.seeds[0])
        self.kind = "vision" if takes_images(pruner.model) else "language"
        if (
            self.kind == "language" and options.sequence_length is None
        ):  # the paper calibrates on windows of 2,048 tokens
            options.sequence_length = window_length(None, max_positions(pruner.model))
        self.first = pruner
        self.tasks = find_tasks(options.tasks) if options.tasks and self.kind == "language" else None

    def pruner(self, setting: Setting, seed: int, lam: float | None = None) -> MoonshotPruner:
        """A dense model with its configuration."""
        options = self.options
        choice = {name: getattr(setting, name) for name in ("solver", "sparsity", "pattern", "allocation", "recompute")}
        if setting.solver != "magnitude" and self.kind == "language":
            choice["fisher_layers"] = setting.fisher or options.fisher
        if setting.allocation == "alpha":
            choice["alpha_tau"] = options.alpha_tau
        size = {"num_samples": options.samples, "sequence_length": options.sequence_length}
        config = MoonshotConfig(seed=seed, lam=lam, **size, **choice)
        return MoonshotPruner.from_pretrained(options.model, config, dtype=options.dtype)

    def evaluate(self, pruner: MoonshotPruner) -> Values:
        """Perplexity by data set and accuracy by task; top-1 by data set for image models."""
        results: Values = {}
        for dataset in self.options.datasets:
            if self.kind == "vision":
                result = accuracy(pruner.model, dataset, pruner.processor, progress=True)
                results[Path(dataset).name] = 100 * result.value
            else:
                length = self.options.sequence_length
                options = {"sequence_length": length, "bos": False, "progress": True}  # as published numbers
                result = perplexity(pruner.model, pruner.tokenizer, dataset, **options)
                results[Path(dataset).name] = result.value
        if self.tasks:
            result = zero_shot(pruner.model, pruner.tokenizer, self.tasks, progress=True)
            results |= {task: 100 * value for task, value in result.accuracy.items()}
            results["mean"] = 100 * result.mean
        return results

    def sweep(self, settings: Sequence[Setting], lambdas: Sequence[float], seed: int) -> "Swept":
        """Sweep settings of one family with one calibration."""
        pruner = self.pruner(settings[0], seed)
        sparsities = None if settings[0].sparsity is None else [setting.sparsity for setting in settings]
        report = pruner.sweep(self.options.calibration, lambdas=list(lambdas), sparsities=sparsities)
        return Swept(self, pruner, report)

    @property
    def lambdas(self) -> tuple[float, ...]:
        return tuple(self.options.lambdas or LAMBDAS[self.kind])

    def win_rate(self, ours: Values, baseline: Values) -> dict[str, float]:
        """Percentage of tasks that `ours` wins; a tie counts half."""
        if not self.tasks:
            return {}
        return {"win rate": 100 * win_rate(ours, baseline, self.tasks.names)}


class Swept:
    """A sweep of one seed, with lazily evaluated variants."""

    def __init__(self, bench: Bench, pruner: MoonshotPruner, report: SweepReport):
        self.bench, self.pruner, self.report = bench, pruner, report
        self.measured: dict[SweepEntry, Values] = {}

    def entries(self, setting: Setting) -> dict[float, SweepEntry]:
        """The sweep's entries of a setting by λ."""
        same = [e for e in self.report.entries if setting.sparsity in (None, e.sparsity)]
        return {entry.lam: entry for entry in same}

    def best(self, setting: Setting) -> SweepEntry:
        return self.report.best(setting.pattern, next(iter(self.entries(setting).values())).sparsity)

    def values(self, entry: SweepEntry) -> Values:
        if entry not in self.measured:
            with self.pruner.applied(entry):
                self.measured[entry] = self.bench.evaluate(self.pruner)
        return dict(self.measured[entry])


def families(settings: Sequence[Setting]) -> Iterator[list[Setting]]:
    """Group settings by the sweep that covers them."""
    for family in dict.fromkeys(setting.family for setting in settings):
        yield [setting for setting in settings if setting.family == family]


def over_seeds(sparsity: str, method: str, runs: list[Values], lambdas: Sequence[float] = ()) -> Row:
    """Mean and standard error of metrics, given one dictionary per seed."""
    return Row(sparsity, method, {m: mean([run[m] for run in runs]) for m in runs[0]}, tuple(lambdas))


def selected(bench: Bench, settings: Sequence[Setting]) -> Iterator[Row]:
    """Tables 2, 3 and 8, figure of section 5.2: the baseline and the λ selected on the calibration data.

    Both variants of table 8 have the same baseline, because λ = 1 ignores the Fisher loss in all layers.
    """
    for group in families(settings):
        results: dict[Setting, list] = {setting: [] for setting in group}
        for seed in bench.options.seeds:
            swept = bench.sweep(group, bench.lambdas, seed)
            for setting in group:
                best = swept.best(setting)
                single = swept.values(swept.entries(setting)[baseline_lam(setting.solver)])
                ours = swept.values(best)
                rates = bench.win_rate(single, ours), bench.win_rate(ours, single)
                results[setting].append(({**single, **rates[0]}, {**ours, **rates[1]}, best.lam))
        for setting, runs in results.items():
            singles, ours, lambdas = zip(*runs, strict=True)
            if setting.fisher != "all":
                yield over_seeds(setting.label, setting.method, singles, [baseline_lam(setting.solver)] * len(runs))
            yield over_seeds(setting.label, setting.moonshot, ours, lambdas)


def by_lambda(bench: Bench, settings: Sequence[Setting], lambdas: Sequence[float]) -> Iterator[Row]:
    """Every λ: table 1 and section 5.1, the Instruct models, all tables of the last appendix."""
    for group in families(settings):
        results: dict[tuple[Setting, float], list[Values]] = {key: [] for key in itertools.product(group, lambdas)}
        for seed in bench.options.seeds:
            swept = bench.sweep(group, lambdas, seed)
            for setting, lam in results:
                entries = swept.entries(setting)
                values, single = swept.values(entries[lam]), entries.get(baseline_lam(setting.solver))
                rate = bench.win_rate(values, swept.values(single)) if single and single.lam != lam else {}
                results[setting, lam].append({**values, **rate})
        for (setting, lam), runs in results.items():
            yield over_seeds(setting.label, f"{setting.method}, λ = {lam:g}", runs)


def recomputed(bench: Bench, settings: Sequence[Setting], lambdas: Sequence[float]) -> Iterator[Row]:
    """Tables 5 and 6: every λ in a separate run, because the statistics depend on it."""
    for setting in settings:
        results: dict[float, list[Values]] = {lam: [] for lam in lambdas}
        single = baseline_lam(setting.solver)
        for seed in bench.options.seeds:
            runs = {}
            for lam in lambdas:
                pruner = bench.pruner(setting, seed, lam)
                seconds = pruner.prune(bench.options.calibration).seconds["total"]
                runs[lam] = {**bench.evaluate(pruner), "seconds": seconds}
            for lam, values in runs.items():
                rate = bench.win_rate(values, runs[single]) if single in runs and lam != single else {}
                results[lam].append({**values, **rate})
        for lam, values in results.items():
            yield over_seeds(setting.label, f"{setting.method}, λ = {lam:g}", values)


def times(bench: Bench, settings: Sequence[Setting], lambdas: Sequence[float]) -> Iterator[Row]:
    """Table 4: seconds of one run, which covers five sparsities for OBC and CAP."""
    for setting, lam in itertools.product(settings, lambdas):
        several = setting.solver in SOLVERS["vision"] and setting.pattern == "unstructured"
        runs = []
        for seed in bench.options.seeds:
            pruner = bench.pruner(setting, seed, lam)
            started = time.perf_counter()
            if several:
                pruner.prune_path(bench.options.calibration, list(TIMED))
            else:
                pruner.prune(bench.options.calibration)
            runs.append({"seconds": time.perf_counter() - started})
        label = f"{TIMED[0]:g} to {TIMED[-1]:g}" if several else setting.label
        yield over_seeds(label, f"{setting.method}, λ = {lam:g}", runs)


# Table name, or number in the paper → kind of experiment.
TABLES = {
    "objectives": "objectives", "1": "objectives", "vision": "main", "2": "main", "llama": "main", "3": "main",
    "times": "times", "4": "times", "recompute": "recompute", "5": "recompute", "6": "recompute",
    "layers": "layers", "8": "layers", "lambda": "lambda", "sparsity": "sparsity",
    **{str(number): "lambda" for number in range(9, 20)},
}  # fmt: skip
KINDS = {
    "vision": ("vision", "2", "13"), "language": ("llama", "3", "5", "6", "layers", "8", *map(str, range(9, 13)),
    *map(str, range(14, 20))),
}  # fmt: skip
SOLVER_OF = {
    **dict.fromkeys(("5", "9", "11", "15", "18"), "sparsegpt"), **dict.fromkeys(("6", "10", "12", "16", "19"), "wanda"),
    **dict.fromkeys(("14", "17"), "osscar"),
}  # fmt: skip
SPARSITIES = {
    "objectives": {"language": (0.5, 0.6), "vision": (0.5, 0.6, 0.7)},
    "lambda": {"language": (0.5, 0.6, 0.7), "vision": TIMED},
    "recompute": {"language": (0.5, 0.6, 0.7), "vision": TIMED},
    "sparsity": {"language": (0.5, 0.6, 0.7, 0.8), "vision": TIMED},
    "layers": {"language": (0.6,)},
}


def all_settings(what: str, kind: str, sparsities: Sequence[float] | None) -> list[Setting]:
    """All settings of a kind of experiment."""
    if what == "main":
        return list(LLAMA if kind == "language" else VISION)
    if what == "times":
        return [setting for solver in SOLVERS[kind] for setting in (Setting(solver, 0.6), nm(solver))]
    several = sparsities or SPARSITIES[what].get(kind, ())
    settings: list[Setting] = []
    for solver in SOLVERS[kind]:
        if what == "layers":
            settings += [Setting(solver, s, fisher=fisher) for fisher in ("attention", "all") for s in several]
        elif what == "sparsity":
            allocations = ALLOCATIONS if kind == "language" else ("uniform",)
            settings += [Setting(solver, s, allocation=allocation) for allocation in allocations for s in several]
        else:
            again = what == "recompute"
            settings += [*(Setting(solver, s, recompute=again) for s in several), nm(solver, recompute=again)]
    structured = what == "lambda" and kind == "language"
    return [*settings, *([Setting("osscar", 0.1, "structured")] if structured else [])]


def settings_of(bench: Bench, table: str) -> list[Setting]:
    """The settings of a table for this model, filtered by `--only`."""
    options = bench.options
    other = next((kind for kind, names in KINDS.items() if kind != bench.kind and table in names), None)
    if other:
        raise SystemExit(f"--table {table} is for {other} models, unlike {options.model}")
    settings = all_settings(TABLES[table], bench.kind, options.sparsities)
    settings = [setting for setting in settings if SOLVER_OF.get(table) in (None, setting.solver)]
    parts = [part.lower() for part in options.only or [""]]
    chosen = [setting for setting in settings if any(part in setting.name.lower() for part in parts)]
    if not chosen:
        raise SystemExit(f"--only {' '.join(options.only)}: none of {'; '.join(s.name for s in settings)}")
    return chosen


def rows(bench: Bench, table: str) -> Iterator[Row]:
    """The rows of one table."""
    what, settings = TABLES[table], settings_of(bench, table)
    if what == "times":
        return times(bench, settings, bench.options.lambdas or LAMBDAS["vision"])
    if what == "recompute":
        return recomputed(bench, settings, bench.lambdas)
    if what in ("lambda", "objectives"):
        return by_lambda(bench, settings, (0.0, 1.0) if what == "objectives" else bench.lambdas)
    missing = {baseline_lam(setting.solver) for setting in settings} - set(bench.lambdas)
    if missing:
        raise SystemExit(f"--lambdas: add {', '.join(f'{lam:g}' for lam in missing)}, the baseline")
    return selected(bench, settings)


def print_row(row: Row, metrics: list[str], errors: bool) -> None:
    """Print a row in Markdown."""
    values = [row.values.get(metric) for metric in metrics]
    shown = ["" if v is None else f"{v.value:.2f} ± {v.error:.2f}" if errors else f"{v.value:.2f}" for v in values]
    lambdas = "/".join(f"{lam:g}" for lam in dict.fromkeys(row.lambdas))
    print("| " + " | ".join([row.sparsity, row.method, *shown, lambdas]) + " |", flush=True)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder, or name on the Hub")
    parser.add_argument("--table", required=True, choices=list(TABLES), help="name, or number in the paper")
    parser.add_argument("--calibration", default="c4", help="as for pruning; a folder of images for image models")
    parser.add_argument("--datasets", nargs="+", default=["c4", "wikitext2", "ptb"], help="evaluation data sets")
    parser.add_argument("--tasks", nargs="+", default=list(PAPER_TASKS), help="zero-shot tasks, or none")
    parser.add_argument("--samples", type=int, default=128, help="calibration samples; the paper: 128, vision 4096")
    parser.add_argument("--sequence-length", type=int, default=None, help="the model's longest, at most 2048")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--lambdas", nargs="+", type=float, help="default: the paper's")
    parser.add_argument("--sparsities", nargs="+", type=float, help="for tables with several; default: the paper's")
    parser.add_argument("--fisher", default="attention", help="attention, as in the paper, or all")
    parser.add_argument("--alpha-tau", type=float, default=0.1, help="the paper: 0.05 for Llama-3.2-1B, else 0.1")
    parser.add_argument("--only", nargs="+", help="settings whose names contain one of these, such as 2:4 or OWL")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--output", help="a JSON file for the table")
    options = parser.parse_args(arguments)
    options.tasks = [] if options.tasks == ["none"] else options.tasks
    if options.output and not Path(options.output).resolve().parent.is_dir():
        parser.error(f"--output {options.output}: its folder does not exist")
    return options


def main(arguments: list[str] | None = None) -> dict[str, Row]:
    """Print a table row by row as results arrive; returns its rows by name."""
    options = parse(arguments)
    bench = Bench(options)
    results, following = {}, rows(bench, options.table)
    if TABLES[options.table] == "times":
        metrics = ["seconds"]
    else:
        dense = Row("Dense", "", {name: Mean(value, 0.0) for name, value in bench.evaluate(bench.first).items()})
        following = itertools.chain([dense], following)
        rates = ["win rate"] if bench.tasks else []
        metrics = [*dense.values, *rates, *(["seconds"] if TABLES[options.table] == "recompute" else [])]
    print("| " + " | ".join(["Sparsity", "Method", *metrics, "λ"]) + " |\n" + "|---" * (len(metrics) + 3) + "|")
    for row in following:
        results[row.name] = row
        print_row(row, metrics, errors=bool(row.method) and len(options.seeds) > 1)
        if options.output:
            table = [{**r._asdict(), "values": {m: v._asdict() for m, v in r.values.items()}} for r in results.values()]
            document = {"options": vars(options), "versions": versions(), "table": table}
            Path(options.output).write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n")
    return results


if __name__ == "__main__":
    main()
