"""Write the result of a pruner to a folder or to the Hub; the first of several processes does, the others wait."""

import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..distributed.ranks import on_main_process
from ..errors import require
from ..reports.prune_report import PruneReport
from ..rotate.report import RotationReport
from .hub import open_repository, upload
from .origin import Origin
from .saving import check_saving, save_model


def save_result(
    model: nn.Module,
    processors: Iterable[Any],
    report: PruneReport | RotationReport,
    directory: str | os.PathLike[str],
    format: str | None,
    origin: Origin,
    options: dict[str, Any],
) -> None:
    """As `save_model`; a model that is only rotated has the dense format."""

    def save() -> None:
        save_model(model, processors, report, directory, _format(report, format), origin=origin, **options)

    on_main_process(save)


def _format(report: PruneReport | RotationReport, format: str | None) -> str | None:
    """The format of a model with this report; None is that in memory."""
    if isinstance(report, PruneReport):
        return format
    message = "a rotated model has no zeros to pack; prune it first"
    require(format in (None, "dense"), message, field="format", value=format)
    return "dense"


@dataclass(frozen=True)
class Repository:
    """A repository of the Hub, with the options of `open_repository`."""

    repo_id: str
    private: bool | None = None
    token: str | bool | None = None
    exist_ok: bool = False


def publish(
    model: nn.Module,
    processors: Iterable[Any],
    report: PruneReport | RotationReport,
    repository: Repository,
    format: str | None,
    origin: Origin,
    commit_message: str | None,
    options: dict[str, Any],
) -> str:
    """Upload the files of `save_result` in one commit; returns its address."""
    format = check_saving(model, _format(report, format), options)

    def upload_model() -> str:
        full = open_repository(**vars(repository))
        with tempfile.TemporaryDirectory() as folder:
            save_model(model, processors, report, folder, format, full, origin, **options)
            return upload(folder, full, token=repository.token, commit_message=commit_message)

    return on_main_process(upload_model)
