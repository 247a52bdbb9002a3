"""Pruned weights before they are written into the model, which stays dense until every layer is solved.

With a folder, each result is stored in a file when it is computed, so that a killed run resumes. Files store only the
surviving weights.
"""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from ..mapped import SpillFile
from ..model.layers import NamedParameter, PrunableLayer
from ..objective.loss_allocation import LossCurve
from ..objective.patterns import sparsity_of
from ..packing import weight_of
from ..packing.layer import decode_spilled, encode_spilled, spill_tensor
from ..reports.prune_report import BlockReport, LayerReport
from .run_folder import CURVES, LAYERS, RECOVERED, ROTATION, TRAINING, Parts, RunFolder

_POINTS = ("sparsities", "losses")  # fields of a `LossCurve`
_QUANTIZED = "quantized"
_PARAMETER = "parameter of the model: "  # prefix of a name in the file of a recovered block
_EXPERTS = "experts"  # the losses of each expert, in the file of a mixture's curve


State = tuple[dict[str, Tensor], dict[str, Any]]  # of learning: tensors, and JSON types


class ResultStore:
    """Pruned weights in the model's dtype: in files of `folder`, named by `field` in messages, or in host memory.

    A recovery replaces them, and adds parameters that are not matrices of pruned layers, by their names in the model.

    `parts` are everything that the results depend on: files of another run are set aside, with a note.
    Without a folder, `spilling` keeps the weights in an unlinked temporary file in `spill_to` (None: the system's).

    Raises:
        MoonshotError: the folder contains other files, or cannot be written.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None,
        parts: Parts,
        field: str = "resume_dir",
        spilling: bool = False,
        spill_to: str | os.PathLike[str] | None = None,
    ):
        self.folder = None if folder is None else RunFolder(folder, field)
        self.spill = SpillFile(spill_to) if spilling else None
        self.weights: dict[str, Callable[[], Tensor]] = {}  # readers of weights and parameters without a file
        self.reports: dict[str, LayerReport] = {}
        self.blocks: dict[str, BlockReport] = {}  # of recovered blocks
        self.recovered: dict[str, tuple[str, ...]] = {}  # block → its layers and parameters with recovered values
        self.parameters: set[str] = set()  # names of recovered parameters that are not matrices of pruned layers
        self.curves: dict[str, LossCurve] = {}  # of layers, for an allocation
        self.files: dict[str, Path] = {}  # with each layer's latest weight, and each parameter
        # Readers of the weights before a recovery, which an interrupted run has replaced.
        self.before_recovery: dict[str, Callable[[], Tensor]] = {}
        self.notes: list[str] = []
        self.rotation: State | None = None  # of learning a rotation in an interrupted run
        if self.folder is not None:
            same = self.folder.open(parts)
            if same:
                with self.folder.released_on_error():
                    self._restore(self.folder)
            elif same is False:
                self.notes.append(f"an unfinished run was set aside until this one is done: {self.folder.difference}")

    def _restore(self, folder: RunFolder) -> None:
        damaged = 0
        for _, values, tensors in folder.saved(CURVES):
            damaged += values is None
            if values is not None:
                sparsities, losses = (tuple(tensors[field].tolist()) for field in _POINTS)
                losses_by_expert = tensors[_EXPERTS].tolist() if _EXPERTS in tensors else []
                size, (dead, *of_experts) = values["size"], values["dead"]
                experts = (
                    LossCurve(size // len(losses_by_expert), sparsities, tuple(losses_of), dead=dead_of)
                    for losses_of, dead_of in zip(losses_by_expert, of_experts, strict=True)
                )
                rounded = zip(values["bits"], tensors[_QUANTIZED].tolist(), strict=True) if values["bits"] else ()
                quantized = {bits: tuple(losses_of) for bits, losses_of in rounded}
                self.curves[values["name"]] = LossCurve(size, sparsities, losses, tuple(experts), quantized, dead)
        for path, values, _ in folder.saved(LAYERS):
            damaged += values is None
            if values is not None:
                report = LayerReport.from_dict(values)
                self.reports[report.name], self.files[report.name] = report, path
        for path, values, tensors in folder.saved(RECOVERED):
            named = [name for name in tensors if name.startswith(_PARAMETER)]
            parameters = {name.removeprefix(_PARAMETER): tensors.pop(name) for name in named}
            names = dict.fromkeys(name if name in self.reports else weight_of(name) for name in tensors)
            if values is None or not all(name in self.reports for name in names):
                damaged += 1
                continue
            weights = {name: self._decoded(name, set(tensors), tensors.__getitem__) for name in names}
            self.before_recovery |= {name: self.loader(name) for name in names}
            self._recovered(BlockReport.from_dict(values), weights, parameters, path)
        if self.reports:
            blocks = f", {len(self.blocks)} recovered blocks" if self.blocks else ""
            self.notes.append(f"{len(self.reports)} layers{blocks} were reused from an interrupted run")
        for _, values, tensors in folder.saved(ROTATION):
            damaged += values is None
            if values is not None:
                self.rotation, steps = (tensors, values), len(values["history"]) - 1
                self.notes.append(f"{steps} steps of the rotation were reused from an interrupted run")
        if damaged:
            self.notes.append(f"{damaged} damaged results of an interrupted run were discarded and recomputed")

    def put(self, report: LayerReport, weight: Tensor) -> None:
        """Store the report and the pruned weight [d_out, d_in] of a layer.

        Raises:
            MoonshotError: the folder cannot be written, or the disk is full.
        """
        weight = weight.cpu().contiguous()
        if self.folder is None:
            self.weights[report.name] = self._reader(report.name, weight)
        else:
            self.files[report.name] = self.folder.save(
                LAYERS, report.name, encode_spilled(report.name, weight), dataclasses.asdict(report)
            )
        self.reports[report.name] = report

    def _reader(self, name: str, weight: Tensor) -> Callable[[], Tensor]:
        """Store a weight without a folder, and return a function that reads it."""
        return (lambda: weight) if self.spill is None else spill_tensor(self.spill, name, weight)

    def share(self, broadcast: Callable[[Any], Any]) -> None:
        """Give the stores of other processes, which have no folder, the results that the folder contains.

        Args:
            broadcast: gives all processes the value of the one that has the folder.
        """
        restored = broadcast((self.reports, self.blocks, self.recovered, self.parameters, self.curves, self.notes))
        self.reports, self.blocks, self.recovered, self.parameters, self.curves, self.notes = restored

        def receive(name: str, read: Callable[[str], Callable[[], Tensor]], into: dict[str, Any]) -> None:
            weight = broadcast(None if self.folder is None else read(name)())
            if weight is not None and self.folder is None:
                into[name] = self._reader(name, weight)

        for name in (*self.reports, *sorted(self.parameters)):
            receive(name, self.loader, self.weights)
        for name in broadcast(list(self.before_recovery)):
            receive(name, self.before_recovery.__getitem__, self.before_recovery)

    def put_curve(self, name: str, curve: LossCurve) -> None:
        """Store the losses of a layer at several sparsities.

        Raises:
            MoonshotError: the folder cannot be written, or the disk is full.
        """
        if self.folder is not None:
            points = {field: torch.tensor(getattr(curve, field), dtype=torch.float64) for field in _POINTS}
            if curve.experts:
                points[_EXPERTS] = torch.tensor([expert.losses for expert in curve.experts], dtype=torch.float64)
            if curve.quantized:
                points[_QUANTIZED] = torch.tensor(list(curve.quantized.values()), dtype=torch.float64)
            dead = [member.dead for member in (curve, *curve.experts)]
            values = {"name": name, "size": curve.size, "bits": list(curve.quantized), "dead": dead}
            self.folder.save(CURVES, name, points, values)
        self.curves[name] = curve

    def put_rotation(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Store the state of learning a rotation, which `rotation` returns in a resumed run.

        Raises:
            MoonshotError: the folder cannot be written, or the disk is full.
        """
        if self.folder is not None:
            self.folder.save(ROTATION, "state", tensors, values)

    def put_training(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Store the state of training the whole model in the folder, in place of an earlier one.

        Raises:
            MoonshotError: the folder cannot be written, or the disk is full.
        """
        if self.folder is not None:
            self.folder.save(TRAINING, "state", tensors, values)

    def training(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """The state of training the whole model in an interrupted run; None without an intact one."""
        saved = [] if self.folder is None else list(self.folder.saved(TRAINING))
        return next(((tensors, values) for _, values, tensors in saved if values is not None), None)

    def put_block(
        self, report: BlockReport, weights: dict[str, Tensor], parameters: dict[str, Tensor] | None = None
    ) -> None:
        """Store what the recovery of a block has changed.

        Args:
            report: of the block; its name identifies the result.
            weights: [d_out, d_in] of pruned layers, by the layer's name; they replace the pruned ones.
            parameters: all other parameters that have changed, by their names in the model, of any shape.

        Raises:
            MoonshotError: the folder cannot be written, or the disk is full.
        """
        weights = {name: weight.cpu().contiguous() for name, weight in weights.items()}
        parameters = {name: tensor.cpu().contiguous() for name, tensor in (parameters or {}).items()}
        path = None
        if self.folder is not None:
            parts = {part: tensor for name in weights for part, tensor in encode_spilled(name, weights[name]).items()}
            parts |= {_PARAMETER + name: tensor for name, tensor in parameters.items()}
            path = self.folder.save(RECOVERED, report.name, parts, dataclasses.asdict(report))
        self._recovered(report, weights, parameters, path)

    def _recovered(
        self, report: BlockReport, weights: dict[str, Tensor], parameters: dict[str, Tensor], path: Path | None
    ) -> None:
        self.blocks[report.name] = report
        for name, weight in weights.items():
            self.reports[name] = dataclasses.replace(self.reports[name], sparsity=sparsity_of(weight))
        self.parameters |= parameters.keys()
        tensors = {**weights, **parameters}
        self.recovered[report.name] = tuple(tensors)
        if path is None:
            self.weights |= {name: self._reader(name, tensor) for name, tensor in tensors.items()}
        else:
            self.files.update(dict.fromkeys(tensors, path))

    def weight(self, layer: PrunableLayer | NamedParameter) -> Tensor:
        """The final weight of a layer, [d_out, d_in], or a recovered parameter, in host memory."""
        return self.loader(layer.name)()

    def loader(self, name: str) -> Callable[[], Tensor]:
        """A function that returns the weight of a layer or a parameter, even after the folder was discarded."""
        if name in self.weights:
            return self.weights[name]
        file = safe_open(self.files[name], "pt")  # mapped: readable after the file was deleted
        if name in self.parameters:
            return lambda: file.get_tensor(_PARAMETER + name)
        return lambda: self._decoded(name, set(file.keys()), file.get_tensor)

    def _decoded(self, name: str, parts: set[str], read: Callable[[str], Tensor]) -> Tensor:
        rows, columns = self.reports[name].shape
        return decode_spilled(name, parts, read, (rows, columns))

    def pop(self, layer: PrunableLayer | NamedParameter) -> Tensor:
        """Return the weight of a layer, and release it from memory."""
        load = self.loader(layer.name)
        self.weights.pop(layer.name, None)
        return load()

    def release(self) -> None:
        """Release the lock of the folder; the files remain until `discard`."""
        if self.folder is not None:
            self.folder.release()

    def discard(self) -> None:
        """Delete the files, once the results are saved in the model or a checkpoint."""
        if self.folder is not None:
            self.folder.discard()
