"""Many variants of a pruning on one calibration: λ, sparsities and patterns (MOONSHOT, arXiv 2604.13287, section 4.3).

The statistics of a layer depend on none of them. Each layer is visited once and solved by every variant while its
statistics are alive; the model stays dense, and takes each variant's weights only while the metric is measured.
"""

import dataclasses
import itertools
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from ..config import MoonshotConfig
from ..errors import MoonshotError, require
from ..files import writing
from ..model.calls import batch_size, evaluation_mode, frozen, model_device, run_model, to_device
from ..model.layers import PrunableLayer
from ..model.losses import is_causal, sample_losses
from ..reports.environment import versions
from ..reports.prune_report import PruneReport
from ..reports.seeds import SweepEntry
from ..reports.sweep_report import SweepReport
from .result_store import Results
from .run import Run

# Both ends, the single objectives, and what the paper's ablation tries between them.
LAMBDAS = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)


def variants(
    config: MoonshotConfig,
    lambdas: Sequence[float] | None,
    sparsities: Sequence[float] | None,
    patterns: Sequence[str] | None,
) -> list[MoonshotConfig]:
    """`config` with every combination of what is given; None keeps the configuration's own, and `LAMBDAS`.

    Raises:
        MoonshotError: an empty or repeated list, a value out of range, or an option that a sweep cannot share.
    """
    require(not config.recompute, "recompute=True: statistics on pruned layers differ by variant; sweep without it")
    require(config.recover is None, f"recover={config.recover!r}: sweep without it, and recover the chosen model")
    lambdas = LAMBDAS if lambdas is None else lambdas
    patterns = (config.pattern,) if patterns is None else patterns
    own = (config.sparsity,) if sparsities is None else sparsities
    for name, values in (("lambdas", lambdas), ("sparsities", own), ("patterns", patterns)):
        listed = isinstance(values, Sequence) and not isinstance(values, str) and len(values) > 0
        require(listed, f"{name}={values!r}: give a list")
        plain = all(isinstance(value, int | float | str) or value is None for value in values)
        require(plain, f"{name}={list(values)}: give a list of {'strings' if name == 'patterns' else 'numbers'}")
        require(len(set(values)) == len(values), f"{name}={list(values)}: a value is given twice")
    settings = [(p, s) for p in patterns for s in ((None,) if isinstance(p, str) and ":" in p else own)]
    return [
        dataclasses.replace(config, pattern=pattern, sparsity=sparsity, lam=lam)
        for (pattern, sparsity), lam in itertools.product(settings, lambdas)
    ]


class Sweep:
    """One call of `MoonshotPruner.sweep`.

    Args:
        model: stays dense.
        variants: configurations that differ in λ, sparsity and pattern alone.
        tokenizer, loss, progress, processor: as for `Run`.
    """

    def __init__(
        self,
        model: nn.Module,
        variants: list[MoonshotConfig],
        tokenizer: Any,
        loss: Callable | None,
        progress: bool,
        processor: Any = None,
    ):
        options = (tokenizer, loss, progress, processor)
        self.model, self.progress = model, progress
        first: dict[tuple, Run] = {}  # of every pattern and sparsity
        for variant in variants:
            if (variant.pattern, variant.sparsity) not in first:
                first[variant.pattern, variant.sparsity] = Run(model, variant, *options)
        self.runs = [first[variant.pattern, variant.sparsity].at(variant) for variant in variants]
        # The run whose passes all share: the smallest λ needs every statistic that the others do.
        least = min(self.runs, key=lambda run: run.lam)
        self.lead = least.at(least.config)
        for run in self.runs:
            others = {layer.name for layer in self.lead.layers} ^ {layer.name for layer in run.layers}
            require(
                not others,
                f"patterns: {run.config.pattern!r} does not fit the same layers as {self.lead.config.pattern!r}: "
                f"{', '.join(sorted(others)[:3])}; ignore these, or sweep the patterns one by one",
            )
        self.entries: list[SweepEntry] = []
        self.lent = 0  # how many variants are applied at the moment

    def execute(
        self, calibration: Any, metric: str | Callable[[nn.Module], float], maximize: bool, work_dir: Any
    ) -> SweepReport:
        """Calibrate, solve and measure."""
        started = time.perf_counter()
        require(
            metric == "calibration" or callable(metric),
            f'metric={metric!r}: give "calibration" or a function of the model',
        )
        require(isinstance(maximize, bool), f"maximize={maximize!r}: give True or False")
        lead = self.lead
        self.prepare(calibration, work_dir)
        name, measure = self._metric(metric)
        dense = self._value(measure) if callable(metric) else None
        self.solve()
        if dense is None:  # the calibration passes have seen it, where they went backwards
            seen = lead.losses if lead.losses and all(loss is not None for loss in lead.losses) else None
            dense = self._value(measure) if seen is None else self._shown(float(torch.cat(seen).mean()))
        for run in tqdm(self.runs, desc="measuring", unit="variant", disable=not self.progress):
            self.entries.append(self._measure(run, measure))
        seconds = time.perf_counter() - started
        spent = sum(entry.seconds for entry in self.entries)
        config = {k: v for k, v in lead.config.to_dict().items() if k not in ("lam", "pattern", "sparsity")}
        return SweepReport(
            solver=lead.config.solver,
            metric=name,
            maximize=maximize,
            dense=dense,
            entries=self.entries,
            config=config,
            calibration=lead.data.describe(),
            seconds={"calibration": seconds - spent, "variants": spent, "total": seconds},
            versions=versions(),
        )

    def prepare(self, calibration: Any, work_dir: str | os.PathLike | None) -> None:
        """Check the model and read the data."""
        self.lead._prepare(calibration)
        require(self.lead.data is not None, "calibration=None: variants compare on calibration data; give some")
        self._share(work_dir)

    def _share(self, work_dir: str | os.PathLike | None) -> None:
        """Give every run the lead's data, and results of its own."""
        lead = self.lead
        path = work_dir is None or isinstance(work_dir, str | os.PathLike)
        require(path, f"work_dir={work_dir!r}: give the path of a folder")
        if work_dir is not None:
            with writing("work_dir", work_dir):
                Path(work_dir).mkdir(parents=True, exist_ok=True)
        for run in self.runs:
            run.data, run.storage = lead.data, lead.storage
            run.notes += lead.data.notes
            folder = None if work_dir is None else Path(work_dir) / _folder(run)
            run.results = run._results(folder, "work_dir")
            run.notes += run.results.notes
        lead.results = _Together([run.results for run in self.runs])

    def solve(self) -> None:
        """Every layer by every variant."""
        try:
            self._solve()
        except torch.OutOfMemoryError as error:
            raise MoonshotError(f"out of device memory: lower max_memory or num_samples ({error})") from None

    def _solve(self) -> None:
        bar = tqdm(total=len(self.lead.layers), desc="pruning", unit="layer", disable=not self.progress)
        with frozen(self.model), bar:
            scores, known = self.lead._scores(), len(self.lead.notes)
            for run in self.runs:
                run._allocate(scores)
            for layer, statistics in self.lead._statistics(self.runs):
                bar.set_postfix_str(layer.name)
                runs = [run for run in self.runs if layer not in run.results]
                for lam in dict.fromkeys(run._lam(layer) for run in runs):
                    self._solve_layer(layer, statistics, [run for run in runs if run._lam(layer) == lam])
                bar.update(1)
        for run in self.runs:
            run.notes += self.lead.notes[known:]  # of the passes, which were the lead's

    def _solve_layer(self, layer: PrunableLayer, statistics: Any, runs: list[Run]) -> None:
        """A layer by the runs that have one λ for it, together: some solvers remove once for all sparsities.

        Runs that have one pattern for it too share the result, as those of all λ do where the Fisher loss is kept from
        a layer.
        """
        patterns = list(dict.fromkeys(run.patterns[layer.name] for run in runs))
        solved = runs[0]._solve_by(layer, statistics, patterns)
        for pattern, (report, weight) in zip(patterns, solved, strict=True):
            alike = [run for run in runs if run.patterns[layer.name] == pattern]
            for run in alike:
                run._put(dataclasses.replace(report, seconds=report.seconds / len(alike)), weight)

    def _metric(self, metric: str | Callable[[nn.Module], float]) -> tuple[str, Callable[[nn.Module], float]]:
        """The metric's name, and how to measure it."""
        if callable(metric):
            name = getattr(metric, "__name__", "metric")
            return "metric" if name == "<lambda>" else name.replace("_", " "), metric
        name = "calibration perplexity" if self._causal else "calibration loss"
        return name, lambda _: self._shown(mean_loss(self.lead))

    @property
    def _causal(self) -> bool:
        return is_causal(self.model) and self.lead.loss is None

    def _shown(self, loss: float) -> float:
        """The calibration metric at a mean loss."""
        return math.exp(min(loss, 700.0)) if self._causal else loss

    def _value(self, measure: Callable[[nn.Module], float]) -> float:
        """The metric of the model as it stands."""
        with evaluation_mode(self.model), torch.no_grad():
            found = measure(self.model)
        try:
            return float(found)
        except (TypeError, ValueError, RuntimeError):
            raise MoonshotError(f"metric: it returned {found!r}; let it return a number") from None

    def _measure(self, run: Run, measure: Callable[[nn.Module], float]) -> SweepEntry:
        started = time.perf_counter()
        with applied(run.results, run.layers):
            value = self._value(measure)
        losses = [run.results.reports[layer.name].loss for layer in run.layers]
        known = [loss for loss in losses if loss is not None]
        return SweepEntry(
            pattern=run.config.pattern,
            sparsity=run.config.sparsity if run.config.sparsity is not None else run.config.parsed_pattern.sparsity,
            lam=run.config.lam,
            metric=value,
            loss=sum(known) / len(known) if known else math.nan,
            seconds=time.perf_counter() - started + run.solving,
        )

    def _run(self, entry: SweepEntry) -> Run:
        require(entry in self.entries, f"entry={entry}: it is not of this sweep; take one of the report's entries")
        return self.runs[self.entries.index(entry)]

    @contextmanager
    def applied(self, entry: SweepEntry) -> Iterator[None]:
        """Meanwhile the model has a variant's weights."""
        run = self._run(entry)
        self.lent += 1
        try:
            with applied(run.results, run.layers):
                yield
        finally:
            self.lent -= 1

    def choose(self, entry: SweepEntry) -> PruneReport:
        """Write one variant into the model."""
        run = self._run(entry)
        require(not self.lent, "choose: the end of applied() would put the dense weights back; choose after it")
        run.results.commit(run.layers)
        for each in self.runs:
            each.results.discard()
        return run._finish(entry.seconds)


class _Together:
    """What all variants have: a layer is done when each of them has its result."""

    def __init__(self, results: list[Results]):
        self.results = results

    def __contains__(self, layer: PrunableLayer) -> bool:
        return all(layer in results for results in self.results)


@contextmanager
def applied(results: Results, layers: list[PrunableLayer]) -> Iterator[None]:
    """The model with the results' weights; dense again on exit."""
    dense = write(results, layers)
    try:
        yield
    finally:
        with torch.no_grad():
            for layer in layers:
                layer.assign(dense[layer.name])


@torch.no_grad()
def write(results: Results, layers: list[PrunableLayer]) -> dict[str, Tensor]:
    """Write the results' weights into the model, and return the dense ones; if that fails, these are put back."""
    dense: dict[str, Tensor] = {}
    try:
        for layer in layers:
            dense[layer.name] = layer.matrix.to("cpu", copy=True)
            layer.assign(results.weight(layer))
    except BaseException:
        for layer in layers:
            if layer.name in dense:
                layer.assign(dense[layer.name])
        raise
    return dense


def mean_loss(run: Run) -> float:
    """The mean over the calibration samples of ℓ_n, of the model as it stands."""
    total, count = 0.0, 0
    for batch in run.data.batches:
        batch = to_device(batch, model_device(run.model))
        total += float(sample_losses(run.model, run_model(run.model, batch), batch, run.loss).sum())
        count += batch_size(batch)
    return total / count


def _folder(run: Run) -> str:
    config = run.config
    sparsity = "" if config.sparsity is None else f"-{config.sparsity:g}"
    return f"{config.pattern.replace(':', 'of')}{sparsity}-lam{run.lam:g}"
