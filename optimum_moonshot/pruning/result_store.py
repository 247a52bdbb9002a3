"""Pruned weights between solving and writing: the model stays dense until every layer has its result.

With a folder, each result is a file at once, so that a killed run goes on where it was.
"""

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..errors import MoonshotError, require
from ..files import replace_file, writing
from ..model.layers import PrunableLayer
from ..reports.prune_report import BlockReport, LayerReport

_MANIFEST = "run.json"
_RECOVERED = "recovered"  # folder of the recovered blocks, one file each


class ResultStore:
    """Pruned weights in the model's dtype, in host memory or in `folder`.

    Args:
        folder: where each result is written at once; None keeps them in memory.
        fingerprint: of everything that the results depend on. Files of another run are thrown away, with a note.
        field: the argument that the folder came with, for messages.
    """

    def __init__(self, folder: str | os.PathLike | None, fingerprint: str, field: str = "resume_dir"):
        require(
            folder is None or isinstance(folder, str | os.PathLike), f"{field}={folder!r}: give the path of a folder"
        )
        self.field = field
        self.folder = None if folder is None else Path(folder)
        self.weights: dict[str, Tensor] = {}
        self.reports: dict[str, LayerReport] = {}
        self.blocks: dict[str, BlockReport] = {}  # recovered
        self.files: dict[str, Path] = {}  # of every layer's latest weight
        self.notes: list[str] = []
        if self.folder is not None:
            with writing(self.field, self.folder):
                self._open(fingerprint)

    def _open(self, fingerprint: str) -> None:
        manifest = self.folder / _MANIFEST
        if self.folder.exists() and not manifest.exists() and any(self.folder.iterdir()):
            raise MoonshotError(f"{self.field}={str(self.folder)!r} holds other files: give an empty or a new folder")
        if manifest.exists():
            if json.loads(manifest.read_text())["fingerprint"] == fingerprint:
                self._restore()
                return
            self.notes.append("an unfinished run with other settings was discarded")
            shutil.rmtree(self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        replace_file(manifest, json.dumps({"fingerprint": fingerprint}))

    def _restore(self) -> None:
        for path in sorted(self.folder.glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                report = LayerReport.from_dict(json.loads(file.metadata()["report"]))
            self.reports[report.name], self.files[report.name] = report, path
        for path in sorted((self.folder / _RECOVERED).glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                report = BlockReport.from_dict(json.loads(file.metadata()["report"]))
                self._recovered(report, {name: file.get_tensor(name) for name in file.keys()}, path)  # noqa: SIM118
        if self.reports:
            blocks = f", {len(self.blocks)} recovered blocks" if self.blocks else ""
            self.notes.append(f"{len(self.reports)} layers{blocks} were taken over from an interrupted run")

    def __contains__(self, layer: PrunableLayer) -> bool:
        return layer.name in self.reports

    def put(self, report: LayerReport, weight: Tensor) -> None:
        """Keep a layer's pruned weight [d_out, d_in]."""
        weight = weight.cpu().contiguous()
        if self.folder is None:
            self.weights[report.name] = weight
        else:
            self.files[report.name] = self._save(self.folder, report, {report.name: weight})
        self.reports[report.name] = report

    def put_block(self, report: BlockReport, weights: dict[str, Tensor]) -> None:
        """Keep the recovered weights [d_out, d_in] of a block's layers, in place of their pruned ones."""
        weights = {name: weight.cpu().contiguous() for name, weight in weights.items()}
        path = None if self.folder is None else self._save(self.folder / _RECOVERED, report, weights)
        self._recovered(report, weights, path)

    def _recovered(self, report: BlockReport, weights: dict[str, Tensor], path: Path | None) -> None:
        self.blocks[report.name] = report
        for name, weight in weights.items():
            sparsity = int((weight == 0).sum()) / weight.numel()
            self.reports[name] = dataclasses.replace(self.reports[name], sparsity=sparsity)
        if path is None:
            self.weights.update(weights)
        else:
            self.files.update(dict.fromkeys(weights, path))

    def _save(self, folder: Path, report: LayerReport | BlockReport, weights: dict[str, Tensor]) -> Path:
        path = folder / f"{report.name}.safetensors"
        partial = path.with_suffix(".partial")
        with writing(self.field, self.folder):
            folder.mkdir(exist_ok=True)
            save_file(weights, partial, {"report": json.dumps(dataclasses.asdict(report))})
            os.replace(partial, path)
        return path

    def weight(self, layer: PrunableLayer) -> Tensor:
        """A layer's weight as it will be in the model, [d_out, d_in] in host memory."""
        if layer.name in self.weights:
            return self.weights[layer.name]
        with safe_open(self.files[layer.name], "pt") as file:
            return file.get_tensor(layer.name)

    def pop(self, layer: PrunableLayer) -> Tensor:
        """As `weight`, and the last time that it is asked for: memory forgets it."""
        weight = self.weight(layer)
        self.weights.pop(layer.name, None)
        return weight

    def discard(self) -> None:
        """Remove the folder of a finished run."""
        if self.folder is not None:
            shutil.rmtree(self.folder)


def fingerprint(*parts: str, layers: Iterable[PrunableLayer]) -> str:
    """A hash of the settings and of the dense weights, by two float64 sums per layer."""
    digest = hashlib.sha256("\n".join(parts).encode())
    for layer in layers:
        weight = layer.matrix.double()
        ramp = torch.linspace(1, 2, weight.shape[1], dtype=torch.float64, device=weight.device)
        digest.update(
            f"{layer.name} {layer.shape} {weight.sum().item()} {(weight @ ramp).square().sum().item()}".encode()
        )
    return digest.hexdigest()
