"""Variants of a pruning that share one calibration, for a sweep or a sparsity path.

The statistics of a layer do not depend on λ, sparsity and pattern, so each layer is solved for every variant while its
statistics are in memory. The model stays dense.
"""

import dataclasses
import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from torch import nn

from ..config import MoonshotConfig
from ..errors import require
from ..model.calls import frozen
from ..objective.patterns import Experts, implies_sparsity
from ..pipeline.backoff import enough_memory
from ..pipeline.inputs import Prepared, prepare
from ..pipeline.model_pipeline import ModelPipeline
from ..pipeline.selection import Selection, Subject, select
from ..pipeline.variant import Variant
from ..progress import progress_bar
from ..prune.layers import prune_layers
from ..rotate.run import rotated

# The single objectives, and the values between them in the paper's ablation.
LAMBDAS = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)


def combinations(
    config: MoonshotConfig,
    lambdas: Sequence[float | None] | None,
    sparsities: Sequence[float] | None,
    patterns: Sequence[str] | None,
) -> list[MoonshotConfig]:
    """Combine the configuration with all given values; None stands for `LAMBDAS`, or the configuration's value.

    An n:m pattern implies its sparsity, and occurs once for each λ; a λ of None is the default.

    Raises:
        MoonshotError: an empty list, a repeated value or one out of range, or an option that variants cannot share.
    """
    message = "statistics on pruned layers differ by variant; sweep without it"
    require(not config.recompute, message, field="recompute", value=True)
    message = "sweep without it, and recover the chosen model"
    require(config.recover is None, message, field="recover", value=config.recover)
    lambdas = LAMBDAS if lambdas is None else lambdas
    patterns = (config.pattern,) if patterns is None else patterns
    message = "variants share one model, which this makes smaller; prune once for each"
    require(Experts.kind not in patterns, message, field="pattern", value=Experts.kind)
    numbers = (config.sparsity,) if sparsities is None else sparsities
    for name, values in (("lambdas", lambdas), ("sparsities", numbers), ("patterns", patterns)):
        listed = isinstance(values, Sequence) and not isinstance(values, str) and len(values) > 0
        require(listed, "give a list", field=name, value=values)
        plain = all(isinstance(value, int | float | str) or value is None for value in values)
        kind = "strings" if name == "patterns" else "numbers"
        require(plain, f"give a list of {kind}", field=name, value=list(values))
        require(len(set(values)) == len(values), "a value is given twice", field=name, value=list(values))
    settings = [(p, s) for p in patterns for s in ((None,) if implies_sparsity(p) else numbers)]
    return [
        dataclasses.replace(config, pattern=pattern, sparsity=sparsity, lam=lam, recompute=False)
        for (pattern, sparsity), lam in itertools.product(settings, lambdas)
    ]


@dataclasses.dataclass(frozen=True)
class Solved:
    """Variants with the results of all layers; the model is dense."""

    prepared: Prepared
    variants: list[Variant]
    source: ModelPipeline
    seconds: float  # including the preparation of the data

    def discard(self) -> None:
        """Delete the folders of the results and of generated samples, if there are any."""
        for variant in self.variants:
            variant.store.discard()
        if self.prepared.samples_folder is not None:
            self.prepared.samples_folder.discard()


def select_layers(model: nn.Module, configs: list[MoonshotConfig]) -> list[Selection]:
    """Return the selection of each configuration; the configurations differ in λ, sparsity and pattern.

    Raises:
        MoonshotError: a pattern that does not fit the same layers as another.
    """
    by_pattern: dict[tuple[str, float | None], Selection] = {}
    for config in configs:
        if (config.pattern, config.sparsity) not in by_pattern:
            by_pattern[config.pattern, config.sparsity] = select(model, config)
    selections = [by_pattern[config.pattern, config.sparsity].with_lam(config) for config in configs]
    lead = _widest(selections)
    for selection in selections:
        others = {layer.name for layer in lead.layers} ^ {layer.name for layer in selection.layers}
        require(
            not others,
            f"{selection.config.pattern!r} does not fit the same layers as {lead.config.pattern!r}: "
            f"{', '.join(sorted(others)[:3])}",
            field="patterns",
            hint="`ignore` these, or sweep the patterns one by one",
        )
    return selections


def _widest(selections: list[Selection]) -> Selection:
    """Return the selection with the smallest λ, whose statistics suffice for all others."""
    return min(selections, key=lambda selection: selection.lam)


def solve_variants(
    subject: Subject,
    selections: list[Selection],
    calibration: Any,
    work_dir: str | os.PathLike[str] | None,
    measure: Callable[[Prepared], None] = lambda _: None,
) -> Solved:
    """Read the data, and solve every layer for every variant; results are stored in a folder per variant in `work_dir`.

    `measure` is called when the data have been read, while the model is dense and not rotated.
    """
    started = time.perf_counter()
    prepared = prepare(subject, _widest(selections), calibration, work_dir, "work_dir")
    message = "variants compare on calibration data; give some"
    require(prepared.data is not None, message, field="calibration", value=None)
    variants: list[Variant] = []
    with released_on_failure(variants):
        for selection in selections:
            config = selection.config
            sparsity = "" if config.sparsity is None else f"-{config.sparsity:g}"
            name = f"{config.pattern.replace(':', 'of')}{sparsity}-lam{selection.lam:g}"
            folder = None if work_dir is None else Path(work_dir) / name
            variants.append(Variant.open(prepared, selection, folder, "work_dir"))
        measure(prepared)
        rotation = prepared.selection.config.rotation
        with nullcontext() if rotation is None else rotated(prepared, variants, stays=False):
            total = len(prepared.selection.layers)
            bar = progress_bar(total=total, desc="pruning", unit="layer", shown=subject.progress)
            with enough_memory("lower max_memory or num_samples"), frozen(subject.model), bar:
                source = prune_layers(prepared, variants, bar)
                prepared.backoff.share()
    return Solved(prepared, variants, source, time.perf_counter() - started)


@contextmanager
def released_on_failure(variants: list[Variant]) -> Iterator[None]:
    """A context that, if its body fails, releases the folders of the variants for other runs."""
    try:
        yield
    except BaseException:
        for variant in variants:
            variant.store.release()
        raise
