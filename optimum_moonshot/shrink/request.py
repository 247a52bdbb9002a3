"""A request to make a model smaller, with the folders of its runs."""

import contextlib
import dataclasses
import math
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from ..config import MoonshotConfig
from ..errors import MoonshotError, require
from ..model.calls import Forward
from ..model.layers import require_resident
from ..model.losses import token_mask
from ..model.model_info import text_setting
from ..objective.patterns import Structured
from ..pipeline.inputs import Prepared
from ..pipeline.run_folder import RunFolder
from ..pipeline.selection import DenseTeacher, Subject, check_dense
from .costs import check_timed, dense_cost, model_latency
from .report import Target, check_batch_shape

# λ where the configuration has none, with and without the removal of heads: for neurons alone the Fisher loss gains
# nothing, and without it no backward pass is needed (benchmarks/results/shrink.json).
LAM_HEADS, LAM_NEURONS = 0.5, 1.0


@dataclasses.dataclass(frozen=True)
class Shrinking:
    """A request to make a model smaller."""

    subject: Subject
    config: MoonshotConfig
    calibration: Any
    target: Target
    batch_shape: tuple[int, int]  # of a forward pass, for a target in seconds
    forward: Forward | None
    resume_dir: Path | None
    hidden_multiple: int | None = None  # a smaller hidden size is a multiple of it

    @property
    def model(self) -> PreTrainedModel:
        assert isinstance(self.subject.model, PreTrainedModel)
        return self.subject.model

    @property
    def teacher(self) -> PreTrainedModel:
        """The model that a recovery reproduces: the dense one, with all parts."""
        teacher = self.subject.teacher
        model = self.model if teacher is None else teacher.model
        assert isinstance(model, PreTrainedModel)
        return model

    def smaller(self, model: PreTrainedModel, blocks: tuple[int, ...], merged: tuple[int, ...]) -> Subject:
        """A copy of the model without some blocks, as the subject of a run that recovers the dense model's outputs."""
        teacher = self.subject.teacher or DenseTeacher(self.model)
        teacher = dataclasses.replace(teacher, removed=blocks, merged=merged)
        return dataclasses.replace(self.subject, model=model, teacher=teacher)

    def cost_of(self, model: PreTrainedModel) -> float:
        """The cost of a smaller model, in the unit of the target."""
        return model_cost(model, self.target, self.batch_shape)

    def of_narrowed(self, model: PreTrainedModel, basis: Tensor, dense: float) -> "Shrinking":
        """The request for the other parts of a model with a smaller hidden size; `dense` is the cost without that."""
        subject = dataclasses.replace(self.subject, model=model, teacher=DenseTeacher(self.teacher, basis=basis))
        target = dataclasses.replace(self.target, dense=dense)
        return dataclasses.replace(self, subject=subject, target=target, resume_dir=self.folder("narrowed"))

    def folder(self, name: str) -> Path | None:
        return None if self.resume_dir is None else self.resume_dir / name

    def discard(self) -> None:
        """Delete the files of the run."""
        if self.resume_dir is not None:
            for name in ("measured", "trial-*", "narrowed", "experts", "run"):
                for folder in self.resume_dir.glob(name):
                    RunFolder.remove_all(folder)
            with contextlib.suppress(OSError):  # it has other files
                self.resume_dir.rmdir()


def model_cost(model: PreTrainedModel, target: Target, batch_shape: tuple[int, int]) -> float:
    """The cost of a model in the unit of a target, in seconds for a forward pass of this shape."""
    return model_latency(model, batch_shape) if target.field == "latency" else dense_cost(model, target.unit)


def check_request(
    subject: Subject,
    config: MoonshotConfig,
    calibration: Any,
    target: Target,
    batch_shape: tuple[int, int],
    hidden_multiple: int | None,
) -> None:
    """Check that the configuration and the model can be shrunk to a target.

    Args:
        subject: the dense model.
        config: of the run.
        calibration: the data, not yet read.
        target: of the run.
        batch_shape: of a forward pass, for a target in seconds.
        hidden_multiple: a smaller hidden size is a multiple of it.

    Raises:
        MoonshotError: a field that contradicts a target, no data, several processes, offloaded blocks, or a model
            that is sparse, small enough already, or whose latency cannot be measured.
    """
    check_batch_shape(batch_shape)
    valid = hidden_multiple is None or (type(hidden_multiple) is int and hidden_multiple > 0)
    require(valid, "use a positive integer", field="hidden_multiple", value=hidden_multiple)
    model, pattern = subject.model, config.parsed_pattern
    require(isinstance(model, PreTrainedModel), f"model is a {type(model).__name__}", hint="pass a PreTrainedModel")
    hint = f"use solver='osscar', pattern={Structured.kind!r}"
    message = "a smaller model has fewer neurons and heads"
    require(isinstance(pattern, Structured), message, field="pattern", value=config.pattern, hint=hint)
    message = "the target determines it; leave it at 0"
    require(not config.sparsity, message, field="sparsity", value=config.sparsity)
    message = "the target determines the sparsity of every layer"
    require(config.allocation == "uniform", message, field="allocation", value=config.allocation)
    require(calibration is not None, "losses are measured on data; give some", field="calibration", value=None)
    subject.require_one_process("shrink")
    require_resident(model)
    check_dense(model, "a smaller model", "shrink")
    assert isinstance(model, PreTrainedModel)
    if target.field == "latency":
        check_timed(model, batch_shape)
    else:
        target.budget(dense_cost(model, target.unit))


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
