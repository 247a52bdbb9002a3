"""Measure the losses and costs of the removable parts of a model."""

import dataclasses

from ..model.calls import frozen
from ..objective.patterns import Structured
from ..pipeline.inputs import prepare
from ..pipeline.selection import select
from .decision import Tables, measure_tables, useful_widths
from .experts import expert_trials
from .hidden import HiddenSizes, check_reachable, find_hidden, hidden_sizes
from .request import LAM_HEADS, Shrinking, check_tokens
from .trials import Trials
from .widths import find_widths


def measure_parts(run: Shrinking, dense: Tables | None = None) -> tuple[Tables, HiddenSizes | None, dict[str, float]]:
    """Measure losses and costs, and hidden sizes (None if fixed); also returns all measured values.

    Args:
        run: the request.
        dense: the tables of the dense model if directions of its stream were removed since: the losses are theirs.
    """
    subject, config, model = run.subject, run.config, run.model
    # At λ < 1, so that the samples have labels for the losses.
    selection = select(model, dataclasses.replace(config, lam=LAM_HEADS, recover=None))
    prepared = prepare(subject, selection, run.calibration, run.folder("measured"))
    check_tokens(prepared)
    names = {layer.name for layer in selection.layers}
    pattern = config.parsed_pattern
    assert isinstance(pattern, Structured)
    with frozen(model):
        widths, refused = find_widths(model, prepared.probe, names, pattern.group)
        experts, no_experts = expert_trials(prepared, run.target)
        stream, no_hidden = (None, {}) if dense is not None else find_hidden(prepared)
        refused = {**refused, **no_experts, **no_hidden}
        reduced = widths if experts is None else [*widths, experts[0]]
        check_reachable(run, reduced, stream, refused)
        widths = useful_widths(model, widths, run.target)
        trials = Trials(prepared, widths, run.folder("measured"))
        try:
            tables = measure_tables(run, trials, widths, refused, experts, dense)
            hidden = None if stream is None else hidden_sizes(run, prepared, trials, stream, tables)
            return tables, hidden, trials.measurements.values
        finally:
            trials.measurements.release()
