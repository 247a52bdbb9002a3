"""Correct the report of a run: weights may have changed since, and measurements are added to a saved model's."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import MoonshotError, check_path, require
from ..files import writing
from ..model.layers import by_visit
from ..objective.grid import DTYPES
from ..packing import PackedLayer, Quantized
from ..reports.prune_report import REPORT_NAME, Measured, PruneReport, mean_over_weights
from ..reports.record import PruningRecord
from .card import Facts, update_evaluations
from .folder import Checkpoint
from .packed_files import packed_weights, pruned_layers


@contextmanager
def declared_as_measured(model: Any, report: PruneReport, grids: bool) -> Iterator[PruneReport]:
    """The report, corrected for the current weights; inside the block, the model's configuration declares the same.

    A layer that is no longer on its grid counts as not quantized, as do word embeddings, and a layer with fewer zeros
    than reported has its current sparsity; a note names them. A layer that is no longer n:m is reported unchanged, so
    that `load_pruned` raises an error. After a compaction, no zeros are declared.

    Args:
        model: a pruned `PreTrainedModel`.
        report: of its run.
        grids: whether to compare with grids; packing does so itself, and raises an error for a layer off its grid.
    """
    before = PruningRecord.require_of(model)
    off, zeros = ([], {}) if report.compaction else _changed(model, report, grids)
    moved = _moved_embeddings(model) if grids else []
    if not off and not zeros and not moved:
        yield report
        return
    layers = [replace(layer, sparsity=zeros.get(layer.name, layer.sparsity)) for layer in report.layers]
    layers = [replace(layer, bits=None, packed_bytes=None) if layer.name in off else layer for layer in layers]
    dense_values = "are no longer on their grid, so they are not quantized"
    changes = {dense_values: off, "have fewer zeros than after the run": list(zeros)}
    count = f"of {len(layers)} layers"
    notes = [f"{len(names)} {count} {change}, such as {names[0]}" for change, names in changes.items() if names]
    notes += [f"word embeddings are no longer on their grid: {', '.join(moved)}"] if moved else []
    measured = replace(report, layers=layers, notes=[*report.notes, *notes])
    bits = {layer.name: layer.bits for layer in layers if layer.bits is not None} if off else before.bits
    changed = replace(before, sparsity=mean_over_weights(layers, "sparsity"), bits=bits)
    if moved:
        measured = replace(measured, embedding_bits=None, other_bytes=None)
        changed = replace(changed, embedding_bits=None)
    changed.attach(model)
    try:
        yield measured
    finally:
        before.attach(model)


def _changed(model: Any, report: PruneReport, grids: bool) -> tuple[list[str], dict[str, float]]:
    """The layers that are no longer on their grid, and the sparsity of layers with fewer zeros than reported."""
    entries = pruned_layers(model)
    layers = {key: layer for layer in report.layers for key in (f"{layer.name}.weight", layer.name) if key in entries}
    off, zeros = list[str](), dict[str, float]()
    for visit, keys in by_visit(model, layers):
        with visit():
            for key in keys:
                weight, layer = model.get_parameter(key).detach(), layers[key]
                count = weight.numel() - int(torch.count_nonzero(weight))
                if entries[key].nm is None and count < round(layer.sparsity * weight.numel()):
                    zeros[layer.name] = count / weight.numel()
                if grids and layer.bits is not None and not _is_on_grid(entries[key], weight):
                    off.append(layer.name)
    return off, zeros


def _moved_embeddings(model: Any) -> list[str]:
    """The word embeddings that are no longer on their grid."""
    pruned = pruned_layers(model)
    embeddings = {name: layer for name, layer in packed_weights(model).items() if name not in pruned}
    moved = []
    for visit, names in by_visit(model, embeddings):
        with visit():
            moved += [name for name in names if not _is_on_grid(embeddings[name], model.get_parameter(name).detach())]
    return moved


def _is_on_grid(entry: PackedLayer, weight: Tensor) -> bool:
    codec = entry.codec
    if not isinstance(codec, Quantized) or weight.dtype not in DTYPES:
        return False
    try:
        codec.grid(weight.dtype).scales_of(entry.as_matrix(weight))
    except MoonshotError:
        return False
    return True


def record(folder: str | os.PathLike[str], pruned: Measured, dense: Measured | None = None) -> bool:
    """Add the measurements of a saved model, and of the dense one if available, to its report and its model card.

    Returns whether the card was changed: a foreign card is not. `MoonshotError` for a folder without a report, or two
    results that were measured in different ways.
    """
    check_path("folder", folder)
    folder = Path(folder)
    report = saved_report(folder)
    report.record(pruned, dense)
    facts = Facts.read(folder, None, Checkpoint(folder).format)
    with writing("folder", folder):
        report.save(folder)
        if facts is not None:
            update_evaluations(folder, report, facts)
    return facts is not None


def saved_report(folder: Path) -> PruneReport:
    """The report of a saved model; `MoonshotError` if there is none, or it is damaged."""
    exists = (folder / REPORT_NAME).is_file()
    hint = "give the folder of a model that this package pruned and saved"
    require(exists, f"{folder} has no {REPORT_NAME}", hint=hint)
    return PruneReport.load(folder)
