"""Model and data made ready: the value that a run, a sweep and a sparsity path work on."""

import dataclasses
from typing import Any

from torch import nn

from ..calibration.memory import Storage
from ..data.batches import Batch, split_batches
from ..data.images import load_images, open_images
from ..data.text import CalibrationData, load_calibration
from ..errors import require
from ..model.calls import model_device
from ..model.facts import check_tokens, max_positions, takes_images, vocabulary_size
from ..model.losses import Loss, add_masked_labels, needs_masked_labels
from ..objective.allocation_rules import NEEDING_DATA
from .selection import Selection, check_weights

# A batch's logits, with their gradient, stay below this: with a large vocabulary fewer samples pass at a time.
LOGITS_BYTES = 2 * 2**30


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model with what belongs to it, as a caller of the pruner gives them.

    `loss` (model output, inputs) → [B] takes the place of the cross-entropy that the Fisher loss starts from.
    """

    model: nn.Module
    tokenizer: Any = None
    processor: Any = None
    loss: Loss | None = None
    progress: bool = True  # show bars


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A model that was checked, data that were read, and a budget of memory.

    `selection` says which statistics are gathered: those serve every variant whose layers are the same, whose solver is
    the same, and whose λ is not smaller.
    """

    subject: Subject
    selection: Selection
    data: CalibrationData | None
    storage: Storage

    @property
    def model(self) -> nn.Module:
        return self.subject.model

    @property
    def batches(self) -> list[Batch]:
        """The calibration batches; none without data."""
        return [] if self.data is None else self.data.batches


def prepare(subject: Subject, selection: Selection, calibration: Any) -> Prepared:
    """Check the model and read the data.

    Args:
        subject: the model, which stays as it is.
        selection: of `select` for that model.
        calibration: what `MoonshotPruner.prune` takes; None for a solver that needs no data.

    Raises:
        MoonshotError: weights that cannot be pruned, data that cannot be read, or none where some are needed.
    """
    check_weights(selection)
    data = None if calibration is None else _read(subject, selection, calibration)
    if data is None:
        _check_without_data(selection)
    config = selection.config
    storage = Storage(model_device(subject.model), config.max_memory_bytes, config.offload_dir)
    return Prepared(subject, selection, data, storage)


def _check_without_data(selection: Selection) -> None:
    config = selection.config
    require(
        not config.recompute,
        "recompute=True: without calibration data there is nothing to recompute; give some, or leave it out",
    )
    require(
        config.allocation not in NEEDING_DATA,
        f'calibration=None: allocation="{config.allocation}" needs data to see what a layer does; give some, or use '
        '"alpha"',
    )
    require(
        not selection.solver.calibrated,
        f'calibration=None: solver={config.solver!r} needs data, such as "c4", a text file, or a '
        "folder of images for an image model",
    )


def _read(subject: Subject, selection: Selection, calibration: Any) -> CalibrationData:
    """Exactly `num_samples` samples, with labels where the loss needs them, in batches whose logits have room."""
    model, config = subject.model, selection.config
    gradients = selection.needs_losses
    options = {name: getattr(config, name) for name in ("num_samples", "batch_size", "seed")}
    if takes_images(model) and (source := open_images(calibration)) is not None:
        labels = gradients and (subject.loss is None or source.label is not None)
        return load_images(source, model, subject.processor, labels=labels, **options)
    options["sequence_length"] = config.sequence_length
    data = load_calibration(calibration, subject.tokenizer, max_positions=max_positions(model), **options)
    given_by = "input_ids" if data.given else "tokenizer"
    for ids in (batch["input_ids"] for batch in data.batches if "input_ids" in batch):
        check_tokens(model, ids, given_by)
    if gradients and subject.loss is None and needs_masked_labels(model, data.batches[0]):
        labelled = add_masked_labels(data.batches, subject.tokenizer, config.seed)
        data = dataclasses.replace(data, batches=labelled, notes=(*data.notes, "15% of tokens masked"))
    if (gradients or config.allocation == "owl") and data.sequence_length:
        itemsize = selection.layers[0].parameter.dtype.itemsize
        per_sample = 2 * data.sequence_length * vocabulary_size(model) * itemsize
        data = dataclasses.replace(data, batches=split_batches(data.batches, max(1, LOGITS_BYTES // per_sample)))
    return data
