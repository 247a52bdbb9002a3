"""Write a pruned model as a checkpoint, dense or packed, with its report and model card: all of it or nothing."""

import inspect
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import nn

from ..errors import check_path, reason, require
from ..files import is_weights, staged, writing
from ..model.offload import is_offloaded
from ..reports.measurement import Measured
from ..reports.prune_report import REPORT_NAME, PruneReport
from .card import Facts, update_evaluations, write_card
from .file_integrity import check_alone, verify
from .in_memory import is_packed, to_save
from .loading import HUB_OPTIONS, local_folder
from .packed_files import check_format, model_skeleton, pack_files, unpack_files
from .streamed_files import save_streamed
from .weight_files import checkpoint_format, packed_version


def save_model(
    model: nn.Module,
    processors: Iterable[Any],
    report: PruneReport,
    directory: str | os.PathLike[str],
    format: str | None = None,
    name: str | None = None,
    **options: Any,
) -> None:
    """Model, tokenizer or processor, report and card in `directory`; the files appear there only when all are written.

    Of a plain module, the weights go to model.safetensors, and there is no card.

    Args:
        model: pruned, with its record.
        processors: tokenizer and image processor; None among them is left out.
        report: of the run.
        directory: the folder, made if need be.
        format: "dense", or "packed": the pruned layers' surviving values and one bit per weight; None: as the model is
            held in memory.
        name: of the model in its card; None is the folder's.
        options: of the model's `save_pretrained`, such as `max_shard_size`.

    Raises:
        MoonshotError: the folder cannot be written, the disk is full, or a layer is not n:m any more.
    """
    format = check_saving(model, format, options)
    plain = not hasattr(model, "save_pretrained")
    with staged("directory", directory) as staging, to_save(model):
        if plain:
            safetensors.torch.save_model(model, str(staging / "model.safetensors"))
        else:
            write_model(model, staging, format == "packed", **options)
        for processor in processors:
            if hasattr(processor, "save_pretrained"):
                save_processor(processor, staging)
        report.save(staging)
        if not plain:
            write_card(staging, report, Facts.gather(model, name or Path(directory).resolve().name, format))


def write_model(model: Any, folder: Path, packed: bool, **options: Any) -> None:
    """The configuration and the weights of a `PreTrainedModel`, wherever these are.

    Args:
        model: pruned, or rotated.
        folder: that exists.
        packed: whether pruned layers are packed.
        options: of its `save_pretrained`.

    Raises:
        MoonshotError: as for `save_streamed`.
    """
    if is_offloaded(model):
        save_streamed(model, folder, packed, **options)
        return
    model.save_pretrained(folder, **options)
    if packed:
        pack_files(folder, folder, model)


def save_processor(processor: Any, folder: Path) -> None:
    """Write a tokenizer or an image processor; the tokenizers library raises a bare Exception where it cannot.

    Args:
        processor: with a `save_pretrained`.
        folder: that exists.

    Raises:
        OSError: it cannot be written.
    """
    try:
        processor.save_pretrained(folder)
    except Exception as error:
        if type(error) is not Exception:
            raise
        raise OSError(reason(error)) from error


def check_saving(model: nn.Module, format: str | None, options: dict[str, Any]) -> str:
    """Raise `MoonshotError` for a format or for options that `save_model` does not take: transformers takes any.

    Args:
        model: to be saved.
        format: "dense", "packed", or None.
        options: for its `save_pretrained`.

    Returns:
        The format; for None that in which the model is held in memory.
    """
    format = format or ("packed" if is_packed(model) else "dense")
    check_format(format)
    plain, cls = not hasattr(model, "save_pretrained"), type(model).__name__
    require(not plain or format == "dense", f"format='packed': {cls} is no PreTrainedModel; use 'dense'")
    known = () if plain else inspect.signature(type(model).save_pretrained).parameters
    for name, value in options.items():
        require(name != "push_to_hub", "push_to_hub: call the pruner's own push_to_hub, which writes the card too")
        require(name != "is_main_process", "is_main_process: call it in one process, which writes everything")
        require(name in known, f"{name}={value!r}: {cls}.save_pretrained has no such option")
        require(name != "variant" or format == "dense", f"variant={value!r}: a packed checkpoint has no variants")
    return format


def convert(source: str | os.PathLike[str], output: str | os.PathLike[str], format: str, **loading: Any) -> None:
    """Write a pruned checkpoint in the other format; everything else in its folder is copied, its card adjusted.

    The weights are verified first, as by `load_pruned`. Their files get new names, in the folder itself.

    Args:
        source: folder of a checkpoint that this package pruned, or its name on the Hub.
        output: folder of the new one; may be the same.
        format: "dense" or "packed".
        loading: for the configuration, such as `trust_remote_code`, and `revision`, `token`, … of a name on the Hub.

    Raises:
        MoonshotError: no pruned checkpoint, one that has the format already, or one that is damaged.
    """
    check_format(format)
    check_path("source", source)
    hub = {name: loading.pop(name) for name in HUB_OPTIONS if name in loading}
    folder = local_folder(source, whole=True, **hub)
    version = packed_version(folder)
    require((version is None) != (format == "dense"), f"{source} is a {format} checkpoint already")
    weights = {path.resolve() for path in verify(folder, version)}
    check_alone(folder, version)
    model = model_skeleton(folder, **loading) if format == "packed" else None
    inside = [path.resolve() for path in (Path(output), *Path(output).parents)]
    entries = [path for path in folder.iterdir() if path.resolve() not in inside]
    with staged("output", output) as staging:
        for path in entries:
            if path.is_dir() and not path.name.startswith("."):
                shutil.copytree(path, staging / path.name, ignore=lambda at, names: _among(weights, at, names))
            elif path.is_file() and not is_weights(path):
                shutil.copy2(path, staging)
        if model is None:
            unpack_files(folder, staging)
        else:
            pack_files(folder, staging, model)
        facts = Facts.read(staging, Path(output).resolve().name, format)
        if facts is not None and (staging / REPORT_NAME).is_file():
            write_card(staging, PruneReport.load(staging), facts)


def record(folder: str | os.PathLike[str], pruned: Measured, dense: Measured | None = None) -> bool:
    """Note measurements in the report and in the model card of a saved model.

    Args:
        folder: of the model, as `save_pretrained` or `moonshot prune` wrote it.
        pruned: what `perplexity`, `accuracy`, `zero_shot` or `EvalReport.load` returned for it.
        dense: the same for the dense model, if it is known.

    Returns:
        Whether the card was changed too: one that this package did not write stays as it is.

    Raises:
        MoonshotError: a folder without a report, or two results that were measured in different ways.
    """
    folder = Path(folder)
    report = saved_report(folder)
    report.record(pruned, dense)
    facts = Facts.read(folder, None, checkpoint_format(folder))
    with writing("folder", folder):
        report.save(folder)
        if facts is not None:
            update_evaluations(folder, report, facts)
    return facts is not None


def saved_report(folder: Path) -> PruneReport:
    """The report that lies beside a saved model.

    Raises:
        MoonshotError: there is none, or it is damaged.
    """
    found = (folder / REPORT_NAME).is_file()
    require(found, f"{folder} holds no {REPORT_NAME}: give the folder of a model that this package pruned and saved")
    return PruneReport.load(folder)


def _among(weights: set[Path], folder: str, names: list[str]) -> list[str]:
    """Those of the names in a folder that are weights."""
    return [name for name in names if Path(folder, name).resolve() in weights]
