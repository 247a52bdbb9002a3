"""Reduce the hidden size of a model, by statistics of calibration data."""

from typing import Any

from transformers import PreTrainedModel

from ..config import MoonshotConfig
from ..errors import require
from ..pipeline.backoff import enough_memory
from ..pipeline.inputs import prepare
from ..pipeline.selection import Subject, check_dense, select
from ..rotation.stream import observe_stream
from ..rotation.width import WidthReduction, cut_stream

# λ where the configuration has none: both objectives have the same exponent.
LAM = 0.5


@enough_memory()
def narrow_model(
    subject: Subject, config: MoonshotConfig, hidden_size: int, calibration: Any
) -> tuple[PreTrainedModel, WidthReduction]:
    """As `MoonshotPruner.reduce_width`.

    Raises:
        MoonshotError: bad data, or as `reduce_width`; the model is unchanged.
    """
    calibration = config.calibration if calibration is None else calibration
    require(calibration is not None, "directions are ranked on data; give some", field="calibration", value=None)
    check_dense(subject.model, "a smaller hidden size", "narrow")
    require(subject.ranks.size == 1, "reduce_width runs in one process", hint="start it without a launcher")
    prepared = prepare(subject, select(subject.model, config), calibration)
    assert isinstance(prepared.model, PreTrainedModel)
    lam = LAM if config.lam is None else config.lam
    stream = observe_stream(prepared.model, prepared.batches, prepared.probe, lam, subject.loss)
    return cut_stream(stream, hidden_size)
