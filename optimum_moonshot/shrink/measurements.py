"""Measure the losses and costs of the removable parts of a model."""

import dataclasses
import math
from collections.abc import Sequence

from ..errors import MoonshotError
from ..model.calls import frozen
from ..model.losses import token_mask
from ..model.model_info import text_setting
from ..objective.patterns import Structured
from ..pipeline.inputs import Prepared, prepare, sample_folder
from ..pipeline.selection import select
from ..pipeline.variant import Variant
from ..progress import progress_bar
from ..prune.layers import prune_layers
from .decision import Tables, measure_tables
from .experts import expert_trials
from .hidden import HiddenSizes, check_reachable, find_hidden, hidden_sizes
from .request import LAM_HEADS, Shrinking
from .trials import Trials
from .widths import find_widths


def measure_parts(run: Shrinking, narrowed: bool = False) -> tuple[Tables, HiddenSizes | None, dict[str, float]]:
    """The losses and costs, the hidden sizes if reducible and not `narrowed` yet, and all measurements."""
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


def check_tokens(prepared: Prepared) -> None:
    """Check that the calibration data determine a loss.

    Weights are fitted to the data on which the losses are measured: with fewer tokens than directions of the residual
    stream, the model without most of its parts reproduces its hidden states on them.

    Raises:
        MoonshotError: there are fewer tokens than the hidden size.
    """
    masks = [token_mask(batch) for batch in prepared.calibration.batches]
    width = text_setting(prepared.model, "hidden_size")
    tokens = sum(int(mask.sum()) for mask in masks if mask is not None)
    if None in masks or tokens >= width:
        return
    samples = prepared.calibration.num_samples
    least = math.ceil(width * samples / tokens)
    message = f"{tokens} calibration tokens are fewer than the hidden size, {width}: no part would have a loss on them"
    hint = f"give longer samples, or at least {least} of them, better {10 * least}"
    raise MoonshotError(message, field="num_samples", value=samples, hint=hint)


def _solve(prepared: Prepared, variants: Sequence[Variant]) -> None:
    shown = prepared.subject.progress
    with progress_bar(total=len(prepared.selection.layers), desc="trials", unit="layer", shown=shown) as bar:
        prune_layers(prepared, variants, bar)
