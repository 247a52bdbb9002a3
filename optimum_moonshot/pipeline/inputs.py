"""Model and data made ready: the value that a run, a sweep and a sparsity path work on."""

import dataclasses
import os
from collections.abc import Iterable
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import nn

from ..calibration.samples import unshown_samples
from ..calibration.storage import Storage
from ..data.batches import Batch, batch_size, samples_between, shorten, split_batches, without_padding
from ..data.image_text import ImageTextSource, load_image_text, open_image_text, reads_both
from ..data.images import load_images, open_images
from ..data.self_calibration import SelfCalibration
from ..data.text import CalibrationData, load_calibration
from ..distributed.ranks import SINGLE_PROCESS, Ranks
from ..errors import Option, Text, require
from ..model.calls import frozen, model_device, to_device
from ..model.layers import PrunableLayer
from ..model.losses import Loss, add_masked_labels, needs_masked_labels, token_mask
from ..model.model_info import check_tokens, max_positions, reads_images_and_text, takes_images, vocabulary_size
from ..model.onloading import RESIDENT, onloaded_in_turn
from ..objective.allocation_rules import NEEDING_DATA
from ..results.run_folder import RunFolder
from ..results.store import weight_sums
from .backoff import Backoff, enough_memory
from .block_probe import Extras, probe_blocks
from .generated_samples import load_self
from .selection import Selection, check_attention, check_weight, check_weights

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
    ranks: Ranks = SINGLE_PROCESS  # the processes of the run


class BlockProbe(NamedTuple):
    """What a first look at a model says whose blocks are elsewhere."""

    extras: Extras | None  # of the blocks, by which passes go through them one by one; None without data
    sums: list[str]  # of `weight_sums`, in the layers' order


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
    backoff: Backoff
    kept: RunFolder | None = None  # the folder of samples that the model wrote, where it wrote some
    block_probe: "BlockProbe | None" = None  # where blocks are elsewhere

    @property
    def model(self) -> nn.Module:
        return self.subject.model

    @property
    def ranks(self) -> Ranks:
        return self.subject.ranks

    @property
    def calibration(self) -> CalibrationData:
        """The data of a run that cannot do without."""
        assert self.data is not None
        return self.data

    @property
    def batches(self) -> list[Batch]:
        """The calibration batches, of several processes those with this one's samples; none without data.

        They are as small as the device's memory has turned out to ask for.
        """
        samples = self.backoff.samples
        return self._own_batches if samples is None else split_batches(self._own_batches, samples)

    @cached_property
    def _own_batches(self) -> list[Batch]:
        if self.data is None or self.ranks.size == 1:
            return [] if self.data is None else self.data.batches
        samples = self.ranks.shard(self.data.num_samples)
        return samples_between(self.data.batches, samples.start, samples.stop)

    @property
    def probe(self) -> Batch:
        """The first samples of the data, short, on the model's device: what a pass that looks around runs on."""
        return to_device(shorten(self.calibration.batches[0]), model_device(self.model))


def sample_folder(
    subject: Subject, folder: str | os.PathLike[str] | None, field: str = "resume_dir"
) -> RunFolder | None:
    """The folder of generated samples in that of a run ("resume_dir") or of variants ("work_dir").

    None: in memory, or this process does not write.
    """
    if folder is None or not subject.ranks.is_main:
        return None
    return RunFolder(folder, field).for_samples(of_one_run=field == "resume_dir")


@enough_memory()
def prepare(subject: Subject, selection: Selection, calibration: Any, kept: RunFolder | None = None) -> Prepared:
    """Check the model and read the data; of several processes the first one reads them for all.

    Args:
        subject: the model, which stays as it is.
        selection: of `select` for that model.
        calibration: what `MoonshotPruner.prune` takes; None for a solver that needs no data.
        kept: a folder for samples that the model writes; None keeps them in memory.

    Raises:
        MoonshotError: weights that cannot be pruned, data that cannot be read, or none where some are needed; another
            process has another model or configuration; too little memory to look at a sample.
    """
    check_attention(selection)
    elsewhere = any(block.weights is not RESIDENT for block in selection.structure.blocks)
    if not elsewhere:
        check_weights(selection)
    if subject.ranks.size > 1:
        subject.ranks.check_equal("the configuration", f"{selection.config.fingerprint()} {selection.lam}")
        subject.ranks.check_equal("the model", _told(selection, elsewhere))
    data = None
    if calibration is not None and subject.ranks.is_main:
        data = _read(subject, selection, calibration, kept)
        data = data if elsewhere else _with_samples_shown(subject, selection, data)
    data = subject.ranks.broadcast_object(data)
    if data is None:
        _check_without_data(selection)
    config = selection.config
    storage = Storage(model_device(subject.model), config.max_memory_bytes, config.offload_dir)
    own = SelfCalibration.of(calibration) is not None
    prepared = Prepared(subject, selection, data, storage, Backoff(storage, subject.ranks), kept if own else None)
    return _with_block_probe(prepared) if elsewhere else prepared


def _with_block_probe(prepared: Prepared) -> Prepared:
    """Look at every block once: its weights, how the model calls it, and whether its layers show the samples."""
    selection, subject, data = prepared.selection, prepared.subject, prepared.data
    structure, sums, extras = selection.structure, dict[str, str](), None

    def look(layers: Iterable[PrunableLayer]) -> None:
        for layer in layers:
            check_weight(layer)
            sums[layer.name] = weight_sums(layer)

    look(structure.outside)
    with frozen(subject.model):
        if data is None:
            look(layer for layer in structure.layers_onloaded() if layer not in structure.outside)
        else:
            own = lambda block: look(block.layers)  # noqa: E731
            two = _two_samples(selection, data)
            probe = prepared.probe if two is None else to_device(two, model_device(subject.model))
            extras, unshown = probe_blocks(
                subject.model, structure.blocks, probe, selection.needs_losses, subject.loss, own
            )
            if two is not None:
                unshown += unshown_samples(subject.model, structure.outside, probe) if structure.outside else []
                data = _one_by_one(data, unshown)
    block_probe = BlockProbe(extras, [sums[layer.name] for layer in structure.layers()])
    if subject.ranks.size > 1:
        subject.ranks.check_equal("the model", "\n".join(block_probe.sums))
    return dataclasses.replace(prepared, data=data, block_probe=block_probe)


def _told(selection: Selection, elsewhere: bool) -> str:
    """What several processes compare of their models, or would wait for each other in vain.

    Args:
        selection: of this process.
        elsewhere: whether blocks are: then where, and their weights are compared once they are brought.
    """
    if elsewhere:
        away = [block.name for block in selection.structure.blocks if block.weights is not RESIDENT]
        return "\n".join([*away, *(f"{layer.name} {layer.shape}" for layer in selection.layers)])
    sums = []
    for layer in selection.structure.layers_onloaded():
        bits = layer.parameter.detach().contiguous().view(torch.uint8)
        sums.append(f"{layer.name} {layer.shape} {layer.parameter.dtype} {int(bits.sum(dtype=torch.int64))}")
    return "\n".join(sums)


def _read_pairs(subject: Subject, selection: Selection, pairs: ImageTextSource) -> CalibrationData:
    """Images with text; the loss is that of the text."""
    config = selection.config
    options = {name: getattr(config, name) for name in ("num_samples", "sequence_length", "seed")}
    data = load_image_text(pairs, subject.processor, max_positions=max_positions(subject.model), **options)
    _check_ids(subject.model, data, "processor")
    return data


def _check_ids(model: nn.Module, data: CalibrationData, given_by: str) -> None:
    for ids in (batch["input_ids"] for batch in data.batches if "input_ids" in batch):
        check_tokens(model, ids, given_by)


def _with_samples_shown(subject: Subject, selection: Selection, data: CalibrationData) -> CalibrationData:
    """The data in batches in which every layer shows whose inputs it reads: of one sample each where some do not.

    A forward pass of two samples and one of a sample tell, where it matters: for gradients, or with padding.
    """
    two, structure = _two_samples(selection, data), selection.structure
    if two is None:
        return data
    with frozen(subject.model), onloaded_in_turn(structure.blocks):
        probe = to_device(two, model_device(subject.model))
        return _one_by_one(data, unshown_samples(subject.model, list(structure.layers()), probe))


def _two_samples(selection: Selection, data: CalibrationData) -> Batch | None:
    """Two samples to ask whether the layers show them; None where it does not matter."""
    batch = next((batch for batch in data.batches if batch_size(batch) > 1), None)
    padded = next((each for each in data.batches if batch_size(each) > 1 and _is_padded(each)), None)
    if batch is None or (padded is None and not selection.needs_losses):
        return None
    return shorten(batch if padded is None else padded, samples=2)


def _one_by_one(data: CalibrationData, unshown: list[str]) -> CalibrationData:
    """The data in batches of one sample, where some layers do not show them, with a note."""
    if not unshown:
        return data
    more = f" and {len(unshown) - 1} more" if len(unshown) > 1 else ""
    note = f"one sample at a time: the inputs of {unshown[0]}{more} do not show which sample they belong to"
    batches = [without_padding(each) for each in split_batches(data.batches, 1)]
    return dataclasses.replace(data, batches=batches, notes=(*data.notes, note))


def _is_padded(batch: Batch) -> bool:
    mask = token_mask(batch)
    return mask is not None and not bool(mask.all())


def _check_without_data(selection: Selection) -> None:
    config = selection.config
    message = "without calibration data there is nothing to recompute; give some, or leave it out"
    require(not config.recompute, message, field="recompute", value=True)
    require(
        config.allocation not in NEEDING_DATA,
        Text("{} needs data to see what a layer does", Option("allocation", config.allocation)),
        field="calibration",
        value=None,
        hint=Text("give some, or use {}", Option("allocation", "alpha")),
    )
    such = 'such as "c4", a text file, or a folder of images for an image model'
    needed = Text(f"{{}} needs data, {such}", Option("solver", config.solver))
    require(not selection.solver.calibrated, needed, field="calibration", value=None)


def _read(subject: Subject, selection: Selection, calibration: Any, kept: RunFolder | None) -> CalibrationData:
    """Exactly `num_samples` samples, with labels where the loss needs them, in batches whose logits have room."""
    model, config = subject.model, selection.config
    written = SelfCalibration.of(calibration)
    if written is not None:
        data = load_self(model, subject.tokenizer, selection, written, kept, subject.progress)
        return with_room(data, selection, model)
    gradients = selection.needs_losses
    options = {name: getattr(config, name) for name in ("num_samples", "batch_size", "seed")}
    if reads_images_and_text(model) and (pairs := open_image_text(calibration)) is not None:
        require(
            reads_both(subject.processor),
            f"{pairs.name} has images and text, which need the model's processor",
            field="processor",
            hint="give AutoProcessor.from_pretrained(...), or batches of model inputs",
        )
        return _read_pairs(subject, selection, pairs)
    if takes_images(model) and (source := open_images(calibration)) is not None:
        labels = gradients and (subject.loss is None or source.label is not None)
        return load_images(source, model, subject.processor, labels=labels, **options)
    options["sequence_length"] = config.sequence_length
    data = load_calibration(calibration, subject.tokenizer, max_positions=max_positions(model), **options)
    _check_ids(model, data, "input_ids" if data.model_inputs else "tokenizer")
    if gradients and subject.loss is None and needs_masked_labels(model, data.batches[0]):
        labelled = add_masked_labels(data.batches, subject.tokenizer, config.seed)
        data = dataclasses.replace(data, batches=labelled, notes=(*data.notes, "15% of tokens masked"))
    return with_room(data, selection, model)


def with_room(data: CalibrationData, selection: Selection, model: nn.Module) -> CalibrationData:
    """The data in batches whose logits, with their gradient, stay below `LOGITS_BYTES`, where there are any.

    Args:
        data: in any batches.
        selection: which says whether logits are wanted.
        model: whose vocabulary they have.
    """
    if (selection.needs_losses or selection.config.allocation == "owl") and data.sequence_length:
        itemsize = selection.layers[0].parameter.dtype.itemsize
        per_sample = 2 * data.sequence_length * vocabulary_size(model) * itemsize
        data = dataclasses.replace(data, batches=split_batches(data.batches, max(1, LOGITS_BYTES // per_sample)))
    return data
