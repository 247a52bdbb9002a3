"""Model and data made ready: the value that a run, a sweep and a sparsity path work on."""

import dataclasses
import os
from functools import cached_property
from typing import Any, NamedTuple

from torch import nn

from ..calibration.storage import Storage
from ..data.batches import Batch, sample_count, shorten, split_batches
from ..data.text import CalibrationData, SelfCalibration
from ..errors import require
from ..model.calls import frozen, model_device, to_device
from ..model.layers import Block, onloaded_in_turn
from ..model.losses import OutputLoss
from ..model.weight_sums import block_sums, model_function, model_parts, model_sums, rest_sums
from ..model.weights import FOLDERS, RESIDENT
from .backoff import Backoff
from .block_sequences import Extras, probe_blocks
from .calibration_data import (
    check_without_data,
    one_by_one,
    read_data,
    two_samples,
    unshown_samples,
)
from .run_folder import RunFolder
from .selection import Selection, Subject, check_weight


class BlockProbe(NamedTuple):
    """The result of a first pass of a model whose blocks are offloaded."""

    extras: Extras | None  # of the blocks, for passes block by block; None without data
    sums: dict[str, str]  # of all weights, by name
    function: dict[str, str]  # `function_values` of the model


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A model that was checked, data that were read, and a budget of memory.

    `selection` determines which statistics are collected. They serve every variant with the same layers, the same
    solver and a λ that is not smaller.
    """

    subject: Subject
    selection: Selection
    data: CalibrationData | None
    storage: Storage
    backoff: Backoff
    samples_folder: RunFolder | None = None  # of samples that the model has generated, if any
    block_probe: "BlockProbe | None" = None  # where blocks are offloaded

    @property
    def model(self) -> nn.Module:
        return self.subject.model

    @property
    def calibration(self) -> CalibrationData:
        """The data of a run that requires some."""
        assert self.data is not None
        return self.data

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on the conditions of the run and on the data, for the report."""
        return (*self.subject.notes, *(self.data.notes if self.data else ()))

    @property
    def batches(self) -> list[Batch]:
        """The calibration batches of this process, as small as the device's memory requires; none without data.

        Processes share whole batches: a model's rounding depends on the shape of a batch, in bfloat16 so much that the
        masks would differ from the masks of one process.
        """
        samples = self.backoff.samples.size
        return self._shard if samples is None else split_batches(self._shard, samples)

    @cached_property
    def _shard(self) -> list[Batch]:
        if self.data is None or self.backoff.ranks.size == 1:
            return [] if self.data is None else self.data.batches
        shard = self.subject.ranks.shard(len(self.data.batches))
        return self.data.batches[shard.start : shard.stop]

    @property
    def local_samples(self) -> int:
        """The number of samples that this process observes."""
        return sample_count(self._shard)

    @property
    def first_sample(self) -> int:
        """The index of the first sample that this process observes, among all."""
        batches = self.calibration.batches
        return sample_count(batches[: self.backoff.ranks.shard(len(batches)).start])

    @property
    def probe(self) -> Batch:
        """The first samples of the data, short, on the model's device: for passes that probe its structure."""
        return to_device(shorten(self.calibration.batches[0]), model_device(self.model))

    @cached_property
    def function(self) -> dict[str, str]:
        """The `function_values` of the dense model, from the first pass where blocks are offloaded; {} without data.

        The first access computes them, and has to come before the model changes. A caller's loss may need labels,
        which data have only where losses are needed.
        """
        if self.block_probe is not None or self.data is None:
            return self.block_probe.function if self.block_probe else {}
        return model_function(self.model, self.probe, self.subject.loss if self.selection.needs_losses else None)


def prepare(
    subject: Subject,
    selection: Selection,
    calibration: Any,
    folder: str | os.PathLike[str] | None = None,
    field: str = "resume_dir",
) -> Prepared:
    """Check the model, which stays as it is, and read the data; of several processes the first one reads them for all.

    `calibration` is data in any form that `MoonshotPruner.prune` accepts. Samples that the model generates are in the
    folder of a run (`field` "resume_dir") or of variants ("work_dir"), else in memory.

    Raises:
        MoonshotError: weights that cannot be pruned, data that cannot be read, or none where some are needed; another
            process has another model or configuration; too little memory for a pass over a sample.
    """
    config, ranks, samples_folder = selection.config, subject.ranks, None
    if folder is not None and ranks.is_main:
        samples_folder = RunFolder(folder, field).for_samples(of_one_run=field == "resume_dir")
    require(
        config.fisher_layers == "all" or any(layer.attention for layer in selection.layers),
        "no chosen layer belongs to an attention",
        field="fisher_layers",
        value="attention",
        hint="use fisher_layers='all'",
    )
    offloaded = [block.name for block in selection.structure.blocks if block.weights is not RESIDENT]
    for layer in selection.structure.layers() if not offloaded else ():
        check_weight(layer)
    if ranks.size > 1:
        ranks.check_equal("the configuration", selection.settings)
        blocks = {name: "offloaded" for name in offloaded}  # their weights are compared once they are onloaded
        sums = blocks or model_sums(subject.model, selection.structure.blocks)
        for part, values in model_parts(subject.model, sums).items():
            ranks.check_equal(part, values)
    data = None
    if calibration is not None and ranks.is_main:
        data = read_data(subject, selection, calibration, samples_folder)
        data = data if offloaded else with_samples_shown(subject, selection, data)
    data = ranks.broadcast_object(data)
    if data is None:
        check_without_data(selection)
    elif selection.needs_losses and isinstance(subject.loss, OutputLoss):  # the model has no head
        data = dataclasses.replace(data, notes=(*data.notes, f"Fisher loss: {subject.loss}"))
    storage = Storage(model_device(subject.model), config.max_memory_bytes, config.offload_dir)
    FOLDERS[subject.model] = config.offload_dir  # of the weights that the run writes to offloaded blocks
    samples_folder = None if SelfCalibration.of(calibration) is None else samples_folder
    prepared = Prepared(subject, selection, data, storage, Backoff(storage, ranks), samples_folder)
    prepared = _with_block_probe(prepared) if offloaded else prepared
    if ranks.size > 1:
        ranks.check_equal("the model's function", prepared.function)
    return prepared


def _with_block_probe(prepared: Prepared) -> Prepared:
    """Onload every block once: check its weights, how the model calls it, and whether its layers show the samples."""
    selection, subject, data = prepared.selection, prepared.subject, prepared.data
    structure, extras = selection.structure, None
    sums, function = dict[str, str](), dict[str, str]()

    def check(block: Block) -> None:
        for layer in block.layers:
            check_weight(layer)
        sums.update(block_sums(block))

    for layer in structure.outside:
        check_weight(layer)
    with frozen(subject.model):
        if data is None:
            for block in structure.blocks:
                with block.onloaded():
                    check(block)
        else:
            two = two_samples(selection, data)
            probe = prepared.probe if two is None else to_device(two, model_device(subject.model))
            losses = selection.needs_losses
            arguments = probe, losses, subject.loss, check
            extras, unshown, function = probe_blocks(subject.model, structure.blocks, *arguments)
            if two is not None:
                unshown += unshown_samples(subject.model, structure.outside, probe) if structure.outside else []
                data = one_by_one(data, unshown)
    block_probe = BlockProbe(extras, sums | rest_sums(subject.model, sums), function)
    if prepared.backoff.ranks.size > 1:
        subject.ranks.check_equal("the model", block_probe.sums)
    return dataclasses.replace(prepared, data=data, block_probe=block_probe)


def with_samples_shown(subject: Subject, selection: Selection, data: CalibrationData) -> CalibrationData:
    """The data in batches of one sample where some layer's inputs do not show which sample they belong to.

    A forward pass of two samples is compared with one of a sample, where it matters: for gradients, or with padding.
    """
    two, structure = two_samples(selection, data), selection.structure
    if two is None:
        return data
    with frozen(subject.model), onloaded_in_turn(structure.blocks):
        probe = to_device(two, model_device(subject.model))
        return one_by_one(data, unshown_samples(subject.model, list(structure.layers()), probe))
