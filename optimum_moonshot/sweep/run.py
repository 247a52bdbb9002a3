"""Variants of a pruning from one calibration: λ, sparsities and patterns (MOONSHOT, arXiv 2604.13287, section 4.3).

A sweep measures a metric of every variant; the model has the weights of a variant only during its measurement. A
sparsity path is a model at several sparsities from one elimination per layer: a solver that ranks removals
(`solvers/ranked.py`: OBC, CAP) removes all weights once, each sparsity is a prefix of this ranking, and only the values
of the surviving weights are computed for it.
"""

import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from ..config import MoonshotConfig, check_ranked
from ..errors import MoonshotError, require, truncated_repr
from ..model.calls import evaluation_mode
from ..model.losses import is_causal
from ..pipeline.calibration_loss import mean_loss, mean_of, remember_outputs
from ..pipeline.inputs import Prepared
from ..pipeline.run_context import check_idle
from ..pipeline.selection import Subject
from ..pipeline.variant import Variant, broadcast_first
from ..progress import progress_bar
from ..reports.prune_report import PruneReport
from ..reports.record import versions
from .report import SweepEntry, SweepReport
from .variants import Solved, combinations, released_on_failure, select_layers, solve_variants

Metric = Callable[[nn.Module], float]
Grid = tuple[Sequence[float] | None, Sequence[float] | None, Sequence[str] | None]  # λ, sparsities, patterns


class Sweep:
    """Variants that were solved and measured; the model is dense until one is chosen."""

    def __init__(self, solved: Solved, report: SweepReport):
        self.solved, self.report = solved, report

    def _variant(self, entry: SweepEntry) -> Variant:
        message = "it is not of this sweep; give one of the report's entries"
        require(entry in self.report.entries, message, field="entry", value=entry)
        return self.solved.variants[self.report.entries.index(entry)]

    def applied(self, entry: SweepEntry) -> AbstractContextManager[None]:
        """A context in which the model has the weights of a variant."""
        return self._variant(entry).applied()

    def choose(self, entry: SweepEntry) -> PruneReport:
        """Write a variant into the model, and return its report.

        Raises:
            MoonshotError: an entry of another sweep, or a call inside `applied`.
        """
        variant = self._variant(entry)
        check_idle(variant.model, "choose")
        variant.commit()
        seconds = {"calibration": entry.seconds - variant.solving, "solver": variant.solving, "total": entry.seconds}
        return variant.report(self.solved.prepared, seconds)


def sweep(
    subject: Subject,
    config: MoonshotConfig,
    calibration: Any,
    grid: Grid,
    metric: str | Metric,
    maximize: bool,
    work_dir: str | os.PathLike[str] | None,
) -> Sweep:
    """Calibrate once, then solve and measure every variant of the grid; see `MoonshotPruner.sweep`."""
    configs, lambdas = combinations(config, *grid), grid[0]
    message = "give numbers, or leave it out"
    require(lambdas is None or None not in lambdas, message, field="lambdas", value=lambdas)
    selections = select_layers(subject.model, configs)
    started = time.perf_counter()
    valid = metric == "calibration" or callable(metric)
    require(valid, 'give "calibration" or a function of the model', field="metric", value=metric)
    require(isinstance(maximize, bool), "give True or False", field="maximize", value=maximize)
    dense: list[float] = []

    def measure(prepared: Prepared) -> None:
        if callable(metric):
            dense.append(_measure(prepared, metric))
        else:
            remember_outputs(prepared)

    solved = solve_variants(subject, selections, calibration, work_dir, measure)
    prepared, variants = solved.prepared, solved.variants
    with released_on_failure(variants):
        if not dense:  # backward passes have computed the losses of the dense model
            loss = mean_of(prepared, solved.source.losses)
            dense.append(_measure(prepared, metric) if loss is None else _calibration_metric(prepared, loss))
        bar = progress_bar(variants, desc="measuring", unit="variant", shown=subject.progress)
        entries = [_entry(prepared, variant, metric) for variant in bar]
    seconds, spent = time.perf_counter() - started, sum(entry.seconds for entry in entries)
    lead = prepared.selection.config
    report = SweepReport(
        solver=lead.solver,
        metric=_metric_name(prepared, metric),
        maximize=maximize,
        dense=dense[0],
        entries=entries,
        config={k: v for k, v in lead.to_dict().items() if k not in ("lam", "pattern", "sparsity")},
        calibration=prepared.calibration.describe(),
        seconds={"calibration": seconds - spent, "variants": spent, "total": seconds},
        versions=versions(),
    )
    return Sweep(solved, report)


def _metric_name(prepared: Prepared, metric: str | Metric) -> str:
    if not callable(metric):
        return "calibration perplexity" if _has_perplexity(prepared) else "calibration loss"
    name = getattr(metric, "__name__", "metric").replace("_", " ")
    return "metric" if name == "<lambda>" else name


def _has_perplexity(prepared: Prepared) -> bool:
    return is_causal(prepared.model) and prepared.subject.loss is None


def _calibration_metric(prepared: Prepared, loss: float) -> float:
    return math.exp(min(loss, 700.0)) if _has_perplexity(prepared) else loss


def _measure(prepared: Prepared, metric: str | Metric) -> float:
    """Return the metric of the model with its current weights; a function is called in the first process only."""
    with evaluation_mode(prepared.model), torch.no_grad():
        if not callable(metric):
            return float(_calibration_metric(prepared, mean_loss(prepared)))
        measure = metric
        value: Any = broadcast_first(prepared, lambda: measure(prepared.model))
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        message = f"it returned {truncated_repr(value)}; let it return a number"
        raise MoonshotError(message, field="metric") from None


def _entry(prepared: Prepared, variant: Variant, metric: str | Metric) -> SweepEntry:
    started = time.perf_counter()
    with variant.applied():
        value = _measure(prepared, metric)
    config = variant.selection.config
    losses = [loss for layer in variant.layers if (loss := variant.store.reports[layer.name].loss) is not None]
    sparsity = config.sparsity
    if sparsity is None:
        assert config.parsed_pattern is not None
        sparsity = config.parsed_pattern.sparsity
    assert config.lam is not None
    return SweepEntry(
        pattern=config.pattern,
        sparsity=sparsity,
        lam=config.lam,
        metric=value,
        loss=sum(losses) / len(losses) if losses else math.nan,
        seconds=time.perf_counter() - started + variant.solving,
    )


class SparsityPath:
    """The results of `MoonshotPruner.prune_path`. The model is dense until `apply`.

    ```python
    path = pruner.prune_path("c4", [0.5, 0.7, 0.9])
    for sparsity in path.sparsities:
        with path.applied(sparsity):
            print(sparsity, perplexity(pruner.model, pruner.tokenizer, "wikitext2").value)
    report = path.apply(0.7)
    pruner.save_pretrained("pruned-0.7")
    ```
    """

    def __init__(self, solved: Solved, report: Callable[[PruneReport], PruneReport]):
        self._solved, self._report = solved, report
        sparsities = [(variant.selection.config.sparsity, variant) for variant in solved.variants]
        self._variants = {sparsity: variant for sparsity, variant in sparsities if sparsity is not None}

    @property
    def sparsities(self) -> list[float]:
        return list(self._variants)

    def applied(self, sparsity: float) -> AbstractContextManager[None]:
        """A context in which the model has the weights of one sparsity; afterwards it has its previous weights."""
        return self._variant(sparsity).applied()

    def apply(self, sparsity: float) -> PruneReport:
        """Write the weights of one sparsity into the model; others can be applied later.

        Returns:
            The report, which becomes the report of the pruner.

        Raises:
            MoonshotError: a sparsity that is not on the path, or a call inside `applied`.
        """
        variant = self._variant(sparsity)
        check_idle(variant.model, "apply")
        variant.commit(keep=True)
        # All variants share the calibration passes; the solver's time is counted per variant.
        calibrating = self._solved.seconds - sum(variant.solving for variant in self._solved.variants)
        seconds = {"calibration": calibrating, "solver": variant.solving, "total": calibrating + variant.solving}
        return self._report(variant.report(self._solved.prepared, seconds))

    def discard(self) -> None:
        """Delete the folder of the results, if there is one."""
        self._solved.discard()

    def _variant(self, sparsity: float) -> Variant:
        message = f"the path has {', '.join(map(str, self._variants))}"
        require(sparsity in self._variants, message, field="sparsity", value=sparsity)
        return self._variants[sparsity]


def prune_path(
    subject: Subject,
    config: MoonshotConfig,
    calibration: Any,
    sparsities: Sequence[float],
    work_dir: str | os.PathLike[str] | None,
    report: Callable[[PruneReport], PruneReport],
) -> SparsityPath:
    """Implement `MoonshotPruner.prune_path`; `report` is called with the report of every sparsity that is applied."""
    check_ranked(config, sparsities)
    selections = select_layers(subject.model, combinations(config, [config.lam], sparsities, None))
    return SparsityPath(solve_variants(subject, selections, calibration, work_dir), report)
