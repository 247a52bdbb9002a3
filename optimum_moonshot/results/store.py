"""Pruned weights between solving and writing: the model stays dense until every layer has its result.

With a folder, each result is a file at once, so that a killed run goes on where it was. On disk a result takes the
bytes that its zeros leave.
"""

import dataclasses
import hashlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from ..distributed.ranks import Ranks
from ..mapped import SpillFile
from ..model.layers import PrunableLayer
from ..objective.loss_allocation import LossCurve
from ..packing import weight_of
from ..packing.spill_codec import decode_spilled, encode_spilled, spill_matrix
from ..reports.prune_report import BlockReport, LayerReport
from ..rotation.learning import Learned
from .run_folder import CURVES, LAYERS, RECOVERED, ROTATION, RunFolder

_POINTS = ("sparsities", "losses")  # of a curve
_EXPERTS = "experts"  # the losses of each, where it has any


class ResultStore:
    """Pruned weights in the model's dtype, in host memory or in `folder`.

    Args:
        folder: where each result is written at once; None keeps them in memory.
        fingerprint: of everything that the results depend on. Files of another run are thrown away, with a note.
        field: the argument that the folder came with, for messages.
        spilling: keep them on disk without a folder too, for as long as they are wanted.
        spill_to: a folder for that, which nothing is seen in; None is the system's for temporary files.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None,
        fingerprint: str,
        field: str = "resume_dir",
        spilling: bool = False,
        spill_to: str | None = None,
    ):
        self.folder = None if folder is None else RunFolder(folder, field)
        self.spill = SpillFile(spill_to) if spilling else None
        self.weights: dict[str, Callable[[], Tensor]] = {}  # what gives those that are in no folder
        self.reports: dict[str, LayerReport] = {}
        self.blocks: dict[str, BlockReport] = {}  # recovered
        self.curves: dict[str, LossCurve] = {}  # by which an allocation divides the sparsity
        self.files: dict[str, Path] = {}  # of every layer's latest weight
        self.notes: list[str] = []
        self._rotation: Learned | None = None
        if self.folder is not None:
            same = self.folder.open(fingerprint)
            if same:
                self._restore(self.folder)
            elif same is False:
                self.notes.append("an unfinished run with other settings was discarded")

    def _restore(self, folder: RunFolder) -> None:
        damaged = 0
        for _, values, tensors in folder.saved(CURVES):
            damaged += values is None
            if values is not None:
                sparsities, losses = (tuple(tensors[field].tolist()) for field in _POINTS)
                each = tensors[_EXPERTS].tolist() if _EXPERTS in tensors else []
                experts = (LossCurve(values["size"] // len(each), sparsities, tuple(own)) for own in each)
                self.curves[values["name"]] = LossCurve(values["size"], sparsities, losses, tuple(experts))
        for path, values, _ in folder.saved(LAYERS):
            damaged += values is None
            if values is not None:
                report = LayerReport.from_dict(values)
                self.reports[report.name], self.files[report.name] = report, path
        for path, values, tensors in folder.saved(RECOVERED):
            names = dict.fromkeys(map(weight_of, tensors))
            complete = values is not None and all(name in self.reports for name in names)
            damaged += not complete
            if complete:
                self._recovered(
                    BlockReport.from_dict(values), {name: self._read(name, tensors) for name in names}, path
                )
        if self.reports:
            blocks = f", {len(self.blocks)} recovered blocks" if self.blocks else ""
            self.notes.append(f"{len(self.reports)} layers{blocks} were taken over from an interrupted run")
        for _, values, tensors in folder.saved(ROTATION):
            damaged += values is None
            if values is not None:
                self._rotation = Learned.load(tensors, values)
                steps = len(self._rotation.history) - 1
                self.notes.append(f"{steps} steps of the rotation were taken over from an interrupted run")
        if damaged:
            self.notes.append(f"{damaged} damaged results of an interrupted run were thrown away and made again")

    def __contains__(self, layer: PrunableLayer) -> bool:
        return layer.name in self.reports

    def put(self, report: LayerReport, weight: Tensor) -> None:
        """Keep a layer's result.

        Args:
            report: which names the layer.
            weight: the pruned weight, [d_out, d_in], on any device.

        Raises:
            MoonshotError: the folder cannot be written, or the disk is full.
        """
        weight = weight.cpu().contiguous()
        if self.folder is None:
            self.weights[report.name] = self._kept(report.name, weight)
        else:
            self.files[report.name] = self.folder.save(
                LAYERS, report.name, encode_spilled(report.name, weight), dataclasses.asdict(report)
            )
        self.reports[report.name] = report

    def _kept(self, name: str, weight: Tensor) -> Callable[[], Tensor]:
        """What gives a weight again, where there is no folder."""
        return (lambda: weight) if self.spill is None else spill_matrix(self.spill, name, weight)

    @classmethod
    def of_all(
        cls,
        ranks: Ranks,
        folder: str | os.PathLike[str] | None,
        fingerprint: str,
        field: str = "resume_dir",
        spilling: bool = False,
        spill_to: str | None = None,
    ) -> "ResultStore":
        """The store of each of several processes: that of the first is in the folder, the others' are in memory.

        All hold what the first has found there.

        Args:
            ranks: the processes.
            folder, fingerprint, field, spilling, spill_to: as for `ResultStore`.

        Raises:
            MoonshotError: the folder holds other files, or cannot be written.
        """
        store = cls(folder if ranks.is_main else None, fingerprint, field, spilling, spill_to)
        if ranks.size == 1 or folder is None:
            return store
        found = ranks.broadcast_object((store.reports, store.blocks, store.curves, store.notes))
        store.reports, store.blocks, store.curves, store.notes = found
        for name in store.reports:
            weight = ranks.broadcast_object(store._saved(name)() if ranks.is_main else None)
            if not ranks.is_main:
                store.weights[name] = store._kept(name, weight)
        return store

    def put_curve(self, name: str, curve: LossCurve) -> None:
        """Keep what a layer loses at some sparsities.

        Args:
            name: of the layer.
            curve: in place of one that is there.

        Raises:
            MoonshotError: the folder cannot be written, or the disk is full.
        """
        if self.folder is not None:
            points = {field: torch.tensor(getattr(curve, field), dtype=torch.float64) for field in _POINTS}
            if curve.experts:
                points[_EXPERTS] = torch.tensor([own.losses for own in curve.experts], dtype=torch.float64)
            self.folder.save(CURVES, name, points, {"name": name, "size": curve.size})
        self.curves[name] = curve

    def put_rotation(self, state: Learned) -> None:
        """Keep how far learning a rotation has come.

        Raises:
            MoonshotError: the folder cannot be written, or the disk is full.
        """
        if self.folder is not None:
            self.folder.save(ROTATION, "state", *state.saved())

    def rotation(self) -> Learned | None:
        """How far learning a rotation had come in an earlier run; None where it had not begun."""
        return self._rotation

    def put_block(self, report: BlockReport, weights: dict[str, Tensor]) -> None:
        """Keep the recovered weights of a block's layers, in place of their pruned ones.

        Args:
            report: which names the block.
            weights: layer → its weight, [d_out, d_in], on any device.

        Raises:
            MoonshotError: the folder cannot be written, or the disk is full.
        """
        weights = {name: weight.cpu().contiguous() for name, weight in weights.items()}
        path = None
        if self.folder is not None:
            parts = {part: tensor for name in weights for part, tensor in encode_spilled(name, weights[name]).items()}
            path = self.folder.save(RECOVERED, report.name, parts, dataclasses.asdict(report))
        self._recovered(report, weights, path)

    def _recovered(self, report: BlockReport, weights: dict[str, Tensor], path: Path | None) -> None:
        self.blocks[report.name] = report
        for name, weight in weights.items():
            self.reports[name] = dataclasses.replace(self.reports[name], sparsity=sparsity_of(weight))
        if path is None:
            self.weights |= {name: self._kept(name, weight) for name, weight in weights.items()}
        else:
            self.files.update(dict.fromkeys(weights, path))

    def weight(self, layer: PrunableLayer) -> Tensor:
        """A layer's weight as it will be in the model, [d_out, d_in] in host memory."""
        return self.loader(layer)()

    def loader(self, layer: PrunableLayer) -> Callable[[], Tensor]:
        """What gives `weight`, also after the folder was discarded."""
        return self._saved(layer.name)

    def _saved(self, name: str) -> Callable[[], Tensor]:
        if name in self.weights:
            return self.weights[name]
        file = safe_open(self.files[name], "pt")  # which holds the file's contents when its name is gone
        return lambda: self._unsqueezed(name, set(file.keys()), file.get_tensor)

    def _read(self, name: str, tensors: dict[str, Tensor]) -> Tensor:
        return self._unsqueezed(name, set(tensors), tensors.__getitem__)

    def _unsqueezed(self, name: str, parts: set[str], read: Callable[[str], Tensor]) -> Tensor:
        rows, columns = self.reports[name].shape
        return decode_spilled(name, parts, read, (rows, columns))

    def pop(self, layer: PrunableLayer) -> Tensor:
        """As `weight`, and the last time that it is asked for: memory forgets it."""
        weight = self.weight(layer)
        self.weights.pop(layer.name, None)
        return weight

    def release(self) -> None:
        """Let others use the folder; the files stay until `discard`."""
        if self.folder is not None:
            self.folder.release()

    def discard(self) -> None:
        """Remove the files of a run whose results are safe elsewhere."""
        if self.folder is not None:
            self.folder.discard()


def sparsity_of(weight: Tensor) -> float:
    """The share of a weight that is 0, counted without a temporary: a sum of bools is one of 8 bytes each."""
    return (weight.numel() - int(torch.count_nonzero(weight))) / weight.numel()


def fingerprint(*parts: str, layers: Iterable[PrunableLayer | str]) -> str:
    """SHA-256 of the settings and of the dense weights, by two float64 sums per layer.

    Args:
        parts: the settings, and whatever else the results depend on.
        layers: at their dense weights; or what `weight_sums` said of them.
    """
    digest = hashlib.sha256("\n".join(parts).encode())
    for layer in layers:
        digest.update((layer if isinstance(layer, str) else weight_sums(layer)).encode())
    return digest.hexdigest()


def weight_sums(layer: PrunableLayer) -> str:
    """A layer's name and shape, and two sums by which its dense weight is known again; of experts one by one."""
    first = second = 0.0
    for part in map(layer.expert, range(layer.groups)) if layer.adapter.separate else (layer,):
        weight = part.matrix.double()
        ramp = torch.linspace(1, 2, weight.shape[1], dtype=torch.float64, device=weight.device)
        first, second = first + weight.sum().item(), second + (weight @ ramp).square().sum().item()
    return f"{layer.name} {layer.shape} {first} {second}"
