"""Write a pruned model as a plain dense checkpoint: all of it or nothing."""

import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import nn

from .errors import require, writing
from .report import PruneReport

# Weight files of an earlier save would be loaded in place of, or next to, the new ones.
_WEIGHT_FILES = (
    "model*.safetensors",
    "model*.safetensors.index.json",
    "pytorch_model*.bin",
    "pytorch_model*.bin.index.json",
)


def save_model(model: nn.Module, processors: Iterable[Any], report: PruneReport, directory: str | os.PathLike) -> None:
    """Model, tokenizer or processor, and report in `directory`; the files appear there only when all are written.

    Of a plain module, the weights go to model.safetensors.

    Raises:
        MoonshotError: the folder cannot be written, or the disk is full.
    """
    directory = Path(directory)
    require(not directory.is_file(), f"directory={str(directory)!r} is a file: give a folder")
    with writing("directory", directory):
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".saving-", dir=directory) as staging:
            if hasattr(model, "save_pretrained"):
                model.save_pretrained(staging)
            else:
                safetensors.torch.save_model(model, str(Path(staging) / "model.safetensors"))
            for processor in processors:
                if hasattr(processor, "save_pretrained"):
                    processor.save_pretrained(staging)
            report.save(staging)
            _move(Path(staging), directory)


def _move(staging: Path, directory: Path) -> None:
    for pattern in _WEIGHT_FILES:
        for stale in directory.glob(pattern):
            if not (staging / stale.name).exists():
                stale.unlink()
    for path in sorted(staging.iterdir()):
        target = directory / path.name
        if target.is_dir():
            shutil.rmtree(target)
        os.replace(path, target)
