"""Many variants of a pruning on one calibration: λ, sparsities and patterns (MOONSHOT, arXiv 2604.13287, section 4.3).

The statistics of a layer depend on none of them. Each layer is seen once and solved by every variant while its
statistics are alive; the model stays dense, and takes each variant's weights only while the metric is measured.
"""

import dataclasses
import itertools
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..config import MoonshotConfig
from ..data.batches import batch_size
from ..errors import MoonshotError, Text, require, shown
from ..files import writing
from ..model.calls import evaluation_mode, frozen, model_device, run_model, to_device
from ..model.losses import is_causal, sample_losses
from ..objective.patterns import Experts, own_sparsity
from ..pipeline.backoff import enough_memory
from ..pipeline.inputs import Prepared, prepare
from ..pipeline.model_pipeline import ModelPipeline
from ..pipeline.selection import Selection, Subject, select
from ..pipeline.variant import Variant
from ..progress import progress_bar
from ..reports.measurement import versions
from ..reports.prune_report import PruneReport
from ..reports.seeds import SweepEntry
from ..reports.sweep_report import SweepReport
from ..results.run_folder import SAMPLES, RunFolder
from ..results.store import ResultStore
from .layers import prune_layers
from .rotate import rotated

# Both ends, the single objectives, and what the paper's ablation tries between them.
LAMBDAS = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)


def variants(
    config: MoonshotConfig,
    lambdas: Sequence[float | None] | None,
    sparsities: Sequence[float] | None,
    patterns: Sequence[str] | None,
) -> list[MoonshotConfig]:
    """A configuration with every combination of what is given.

    Args:
        config: what all have in common.
        lambdas: λ in [0, 1], or None in the list for the default; None in place of it is `LAMBDAS`.
        sparsities: shares of the weights to remove; None is the configuration's own. They do not touch n:m.
        patterns: None is the configuration's own.

    Raises:
        MoonshotError: an empty or repeated list, a value out of range, or an option that a sweep cannot share.
    """
    message = "statistics on pruned layers differ by variant; sweep without it"
    require(not config.recompute, message, field="recompute", value=True)
    message = "sweep without it, and recover the chosen model"
    require(config.recover is None, message, field="recover", value=config.recover)
    lambdas = LAMBDAS if lambdas is None else lambdas
    patterns = (config.pattern,) if patterns is None else patterns
    message = "variants have one model's weights in turn, and this makes it smaller; prune once each"
    require(Experts.kind not in patterns, message, field="pattern", value=Experts.kind)
    own = (config.sparsity,) if sparsities is None else sparsities
    for name, values in (("lambdas", lambdas), ("sparsities", own), ("patterns", patterns)):
        listed = isinstance(values, Sequence) and not isinstance(values, str) and len(values) > 0
        require(listed, "give a list", field=name, value=values)
        plain = all(isinstance(value, int | float | str) or value is None for value in values)
        kind = "strings" if name == "patterns" else "numbers"
        require(plain, f"give a list of {kind}", field=name, value=list(values))
        require(len(set(values)) == len(values), "a value is given twice", field=name, value=list(values))
    settings = [(p, s) for p in patterns for s in ((None,) if own_sparsity(p) else own)]
    return [
        dataclasses.replace(config, pattern=pattern, sparsity=sparsity, lam=lam)
        for (pattern, sparsity), lam in itertools.product(settings, lambdas)
    ]


@dataclasses.dataclass(frozen=True)
class Solved:
    """Variants of one preparation, each with the results of all layers; the model is dense.

    What sweeps and sparsity paths have in common.
    """

    prepared: Prepared
    variants: list[Variant]
    source: ModelPipeline
    seconds: float  # of all of it, from reading the data on

    @property
    def stores(self) -> list[ResultStore | RunFolder]:
        """What keeps the results, and the samples that the model wrote."""
        kept = self.prepared.kept
        return [*(variant.store for variant in self.variants), *([] if kept is None else [kept])]

    def discard(self) -> None:
        """Remove the folders of the results, if they are in some."""
        for store in self.stores:
            store.discard()


def choose_layers(model: nn.Module, configs: list[MoonshotConfig]) -> list[Selection]:
    """What each configuration prunes; they must differ in λ, sparsity and pattern alone, and choose the same layers.

    Raises:
        MoonshotError: a pattern that does not fit the layers of another.
    """
    first: dict[tuple[str, float | None], Selection] = {}  # of every pattern and sparsity
    for config in configs:
        if (config.pattern, config.sparsity) not in first:
            first[config.pattern, config.sparsity] = select(model, config)
    selections = [first[config.pattern, config.sparsity].with_lam(config, model) for config in configs]
    lead = leading(selections)
    for selection in selections:
        others = {layer.name for layer in lead.layers} ^ {layer.name for layer in selection.layers}
        require(
            not others,
            f"{selection.config.pattern!r} does not fit the same layers as {lead.config.pattern!r}: "
            f"{', '.join(sorted(others)[:3])}",
            field="patterns",
            hint=Text("{} these, or sweep the patterns one by one", "ignore"),
        )
    return selections


def leading(selections: list[Selection]) -> Selection:
    """The one whose passes serve all: the smallest λ needs every statistic that the others do."""
    return min(selections, key=lambda selection: selection.lam)


def open_variants(
    subject: Subject, selections: list[Selection], calibration: Any, work_dir: str | os.PathLike[str] | None
) -> tuple[Prepared, list[Variant]]:
    """Check the model, read the data, and open a store of results for each selection.

    Args:
        subject: the model and what belongs to it.
        selections: of `choose_layers`.
        calibration: what `MoonshotPruner.prune` takes.
        work_dir: for a folder of each, so that a killed call goes on from there; None keeps the results in memory.

    Raises:
        MoonshotError: bad weights or data, none at all, or a folder that cannot be used.
    """
    path = work_dir is None or isinstance(work_dir, str | os.PathLike)
    require(path, "give the path of a folder", field="work_dir", value=work_dir)
    kept = None
    if work_dir is not None and subject.is_main:
        with writing("work_dir", work_dir):
            Path(work_dir).mkdir(parents=True, exist_ok=True)
        kept = RunFolder(Path(work_dir) / SAMPLES, "work_dir")
    prepared = prepare(subject, leading(selections), calibration, kept)
    message = "variants compare on calibration data; give some"
    require(prepared.data is not None, message, field="calibration", value=None)
    folders = [None if work_dir is None else Path(work_dir) / _folder(selection) for selection in selections]
    opened: list[Variant] = []
    with released_on_failure(opened):
        for selection, folder in zip(selections, folders, strict=True):
            opened.append(Variant.open(prepared, selection, folder, "work_dir"))
    return prepared, opened


@contextmanager
def released_on_failure(variants: list[Variant]) -> Iterator[None]:
    """Others may use the variants' folders if the block fails."""
    try:
        yield
    except BaseException:
        for variant in variants:
            variant.store.release()
        raise


def solve_variants(prepared: Prepared, variants: list[Variant]) -> ModelPipeline:
    """Every layer by every variant.

    Args:
        prepared: the model, dense, and the data.
        variants: which get the results.

    Raises:
        MoonshotError: a layer's data or statistics are bad, or the device's memory is too small.
    """
    total = len(prepared.selection.layers)
    bar = progress_bar(total=total, desc="pruning", unit="layer", shown=prepared.subject.progress)
    with enough_memory(Text("lower {} or {}", "max_memory", "num_samples")), frozen(prepared.model), bar:
        source = prune_layers(prepared, variants, bar)
        prepared.backoff.share()
        return source


class Sweep:
    """Variants that were solved and measured; the model is dense until one is chosen.

    Args:
        solved: the variants.
        entries: the report's, one for each in the same order.
    """

    def __init__(self, solved: Solved, entries: list[SweepEntry]):
        self.solved, self.entries = solved, entries
        self.lent = 0  # how many variants are applied at the moment

    def _variant(self, entry: SweepEntry) -> Variant:
        message = "it is not of this sweep; take one of the report's entries"
        require(entry in self.entries, message, field="entry", value=entry)
        return self.solved.variants[self.entries.index(entry)]

    @contextmanager
    def applied(self, entry: SweepEntry) -> Iterator[None]:
        """Meanwhile the model has a variant's weights.

        Raises:
            MoonshotError: an entry of another sweep.
        """
        variant = self._variant(entry)
        self.lent += 1
        try:
            with variant.applied():
                yield
        finally:
            self.lent -= 1

    def choose(self, entry: SweepEntry) -> PruneReport:
        """Write one variant into the model.

        Raises:
            MoonshotError: an entry of another sweep, or inside of `applied`.
        """
        variant = self._variant(entry)
        require(not self.lent, "choose: the end of applied() would put the dense weights back; choose after it")
        variant.commit()
        calibrating = entry.seconds - variant.solving
        seconds = {"calibration": calibrating, "solver": variant.solving, "total": entry.seconds}
        return variant.report(self.solved.prepared, seconds)


def sweep(
    subject: Subject,
    configs: list[MoonshotConfig],
    calibration: Any,
    metric: str | Callable[[nn.Module], float],
    maximize: bool,
    work_dir: str | os.PathLike[str] | None,
) -> tuple[Sweep, SweepReport]:
    """Calibrate once, solve and measure every variant.

    Args:
        subject: the model, which stays dense, and what belongs to it.
        configs: of `variants`.
        calibration: as for `MoonshotPruner.sweep`.
        metric: as for `MoonshotPruner.sweep`.
        maximize: as for `MoonshotPruner.sweep`.
        work_dir: as for `MoonshotPruner.sweep`.

    Raises:
        MoonshotError: bad values, data, layers or statistics.
    """
    selections = choose_layers(subject.model, configs)
    started = time.perf_counter()
    known = metric == "calibration" or callable(metric)
    require(known, 'give "calibration" or a function of the model', field="metric", value=metric)
    require(isinstance(maximize, bool), "give True or False", field="maximize", value=maximize)
    prepared, opened = open_variants(subject, selections, calibration, work_dir)
    with released_on_failure(opened):
        meter = Meter(prepared, metric)
        dense = meter.value() if callable(metric) else None
        with rotated(prepared, opened, stays=False):
            source = solve_variants(prepared, opened)
        solved = Solved(prepared, opened, source, time.perf_counter() - started)
        if dense is None:
            dense = meter.seen(solved.source.losses)
        bar = progress_bar(opened, desc="measuring", unit="variant", shown=subject.progress)
        entries = [_measure(variant, meter) for variant in bar]
    seconds = time.perf_counter() - started
    spent = sum(entry.seconds for entry in entries)
    lead = prepared.selection.config
    report = SweepReport(
        solver=lead.solver,
        metric=meter.name,
        maximize=maximize,
        dense=dense,
        entries=entries,
        config={k: v for k, v in lead.to_dict().items() if k not in ("lam", "pattern", "sparsity")},
        calibration=prepared.calibration.describe(),
        seconds={"calibration": seconds - spent, "variants": spent, "total": seconds},
        versions=versions(),
    )
    return Sweep(solved, entries), report


class Meter:
    """What the variants of a sweep are compared by.

    Args:
        prepared: the model and the data.
        metric: "calibration", or a function of the model.
    """

    def __init__(self, prepared: Prepared, metric: str | Callable[[nn.Module], float]):
        self.prepared = prepared
        self.causal = is_causal(prepared.model) and prepared.subject.loss is None
        self.of_user = callable(metric)
        if callable(metric):
            name = getattr(metric, "__name__", "metric")
            self.name, self.measure = "metric" if name == "<lambda>" else name.replace("_", " "), metric
        else:
            self.name = "calibration perplexity" if self.causal else "calibration loss"
            self.measure = lambda _: self._shown(mean_loss(prepared))

    def _shown(self, loss: float) -> float:
        """The calibration metric at a mean loss."""
        return math.exp(min(loss, 700.0)) if self.causal else loss

    def seen(self, losses: list[torch.Tensor | None]) -> float:
        """The calibration metric of the dense model, which passes that went backwards have seen on the way."""
        ranks = self.prepared.subject.ranks
        if ranks.size > 1:
            found = ranks.all_gather_object([None if loss is None else loss.cpu() for loss in losses])
            losses = [loss for own in found for loss in own]
        seen = [loss for loss in losses if loss is not None]
        if seen and len(seen) == len(losses):
            return self._shown(float(torch.cat(seen).mean()))
        return self.value()

    def value(self) -> float:
        """The metric of the model as it stands; a user's is measured by the first of several processes.

        Raises:
            MoonshotError: a metric that returns no number.
        """
        model, ranks = self.prepared.model, self.prepared.subject.ranks
        found: Any = None
        with evaluation_mode(model), torch.no_grad():
            if ranks.is_main or not self.of_user:
                found = self.measure(model)
        found = ranks.broadcast_object(found) if self.of_user else found
        try:
            return float(found)
        except (TypeError, ValueError, RuntimeError):
            message = f"it returned {shown(found)}; let it return a number"
            raise MoonshotError(message, field="metric") from None


def _measure(variant: Variant, meter: Meter) -> SweepEntry:
    started = time.perf_counter()
    with variant.applied():
        value = meter.value()
    selection = variant.selection
    losses = [variant.store.reports[layer.name].loss for layer in variant.layers]
    known = [loss for loss in losses if loss is not None]
    config, sparsity = selection.config, selection.config.sparsity
    if sparsity is None:
        assert config.parsed_pattern is not None
        sparsity = config.parsed_pattern.sparsity
    assert config.lam is not None
    return SweepEntry(
        pattern=config.pattern,
        sparsity=sparsity,
        lam=config.lam,
        metric=value,
        loss=sum(known) / len(known) if known else math.nan,
        seconds=time.perf_counter() - started + variant.solving,
    )


@enough_memory(Text("lower {}", "batch_size"))
def mean_loss(prepared: Prepared) -> float:
    """The mean over the calibration samples of ℓ_n, of the model as it stands.

    Raises:
        MoonshotError: too little memory for one sample.
    """
    backoff = prepared.backoff
    own = backoff.repeated("the calibration loss", partial(_sum_of_losses, prepared), lambda: prepared.batches)
    sums = prepared.subject.ranks.all_gather_object(own)
    backoff.share()
    return sum(total for total, _ in sums) / sum(count for _, count in sums)


def _sum_of_losses(prepared: Prepared) -> tuple[float, int]:
    """Σ ℓ_n of this process's samples, and how many they are."""
    total, count = 0.0, 0
    for batch in prepared.batches:
        batch = to_device(batch, model_device(prepared.model))
        output = run_model(prepared.model, batch)
        total += float(sample_losses(prepared.model, output, batch, prepared.subject.loss).sum())
        count += batch_size(batch)
    return total, count


def _folder(selection: Selection) -> str:
    config = selection.config
    sparsity = "" if config.sparsity is None else f"-{config.sparsity:g}"
    return f"{config.pattern.replace(':', 'of')}{sparsity}-lam{selection.lam:g}"
