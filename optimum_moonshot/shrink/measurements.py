"""Measure the losses and costs of the removable parts of a model."""

import dataclasses
from collections.abc import Sequence

from ..model.calls import frozen
from ..objective.patterns import Structured
from ..pipeline.inputs import Prepared, prepare, sample_folder
from ..pipeline.selection import select
from ..pipeline.variant import Variant
from ..progress import progress_bar
from ..prune.layers import prune_layers
from .decision import Tables, measure_tables
from .experts import expert_trials
from .hidden import HiddenSizes, check_reachable, find_hidden, hidden_sizes
from .request import LAM_HEADS, Shrinking, check_tokens
from .trials import Trials
from .widths import find_widths


def measure_parts(run: Shrinking, narrowed: bool = False) -> tuple[Tables, HiddenSizes | None, dict[str, float]]:
    """Measure losses and costs, and hidden sizes (None if fixed, or `narrowed` already); also returns all values."""
    subject, config, model = run.subject, run.config, run.model
    # At λ < 1, so that the samples have labels for the losses.
    selection = select(model, dataclasses.replace(config, lam=LAM_HEADS, recover=None))
    samples = sample_folder(subject, run.folder("measured"))
    prepared = prepare(subject, selection, run.calibration, samples)
    check_tokens(prepared)
    names = {layer.name for layer in selection.layers}
    pattern = config.parsed_pattern
    assert isinstance(pattern, Structured)
    with frozen(model):
        widths, refused = find_widths(model, prepared.probe, names, pattern.group)
        experts, no_experts = expert_trials(prepared, run.target)
        stream, no_hidden = (None, {}) if narrowed else find_hidden(prepared)
        refused = {**refused, **no_experts, **no_hidden}
        reduced = widths if experts is None else [*widths, experts[0]]
        check_reachable(model, reduced, stream, run.target, refused, run.hidden_multiple)
        trials = Trials(prepared, widths, _solve, run.resume_dir)
        try:
            tables = measure_tables(model, trials, widths, refused, run.target, run.batch_shape, experts)
            hidden = None
            if stream is not None:
                hidden = hidden_sizes(
                    prepared, trials, stream, tables, run.target, run.batch_shape, run.hidden_multiple
                )
            return tables, hidden, trials.measurements.values
        finally:
            trials.release()


def _solve(prepared: Prepared, variants: Sequence[Variant]) -> None:
    shown = prepared.subject.progress
    with progress_bar(total=len(prepared.selection.layers), desc="trials", unit="layer", shown=shown) as bar:
        prune_layers(prepared, variants, bar)
