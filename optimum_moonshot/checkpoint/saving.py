"""Save pruned and rotated models atomically, or publish them, with their report and model card.

The first of several processes saves; the others wait.
"""

import inspect
import os
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor, nn

from ..distributed.ranks import on_main_process
from ..errors import MoonshotError, check_choice, check_path, reason, require
from ..files import replace_file, staged
from ..model.offload import check_not_source
from ..model.weights import is_offloaded
from ..reports.prune_report import PruneReport
from ..reports.record import PruningRecord
from .card import Facts, render_unpruned, write_card
from .compressed_tensors import export_files, quantized_grids
from .hub import open_repository, upload
from .in_memory import is_packed, to_save
from .measuring import declared_as_measured
from .origin import Origin, SavedReport, clear_prediction_layers, copy_weights
from .packed_files import FORMATS, check_reloads, pack_files, save_streamed, shard_bytes
from .weight_files import EXPORT


def save_model(
    model: nn.Module,
    processors: Iterable[Any],
    report: SavedReport,
    directory: str | os.PathLike[str],
    format: str | None,
    origin: Origin,
    options: dict[str, Any],
) -> None:
    """Save model, tokenizer or processor, report and card in `directory`, where the files appear all at once.

    A plain module, which must be pruned, is saved as model.safetensors, without a card. The default format is the one
    in memory; a model that is only rotated is dense. Weights that exist only in the files of the `origin` are copied.
    Report and configuration describe the current weights, with a note if training has changed them. `options` are for
    the model's `save_pretrained`. `MoonshotError` if the folder cannot be written, or a layer is no longer n:m.
    """
    on_main_process(lambda: _save(model, processors, report, directory, format, None, origin, options))


def publish_model(
    model: nn.Module,
    processors: Iterable[Any],
    report: SavedReport,
    repo_id: str,
    format: str | None,
    origin: Origin,
    options: dict[str, Any],
    *,
    private: bool | None,
    token: str | bool | None,
    exist_ok: bool,
    commit_message: str | None,
) -> str:
    """Upload the files of `save_model` to the Hub in one commit, and return its URL."""
    format = _check_saving(model, report, format, options)

    def upload_model() -> str:
        full = open_repository(repo_id, private=private, token=token, exist_ok=exist_ok)
        with tempfile.TemporaryDirectory() as folder:
            _save(model, processors, report, folder, format, full, origin, options)
            return upload(folder, full, token=token, commit_message=commit_message)

    return on_main_process(upload_model)


def _save(
    model: nn.Module,
    processors: Iterable[Any],
    report: SavedReport,
    directory: str | os.PathLike[str],
    format: str | None,
    name: str | None,
    origin: Origin,
    options: dict[str, Any],
) -> None:
    """Save in this process; the title of the card is `name`, by default the folder's name."""
    format = _check_saving(model, report, format, options)
    plain = not hasattr(model, "save_pretrained")
    if not isinstance(report, PruneReport):
        require(not plain, f"{type(model).__name__} is not a PreTrainedModel", hint="save its state_dict")
    check_path("directory", directory)
    check_not_source(model, directory, "directory")
    with ExitStack() as stack:
        staging = stack.enter_context(staged("directory", directory))
        stack.enter_context(to_save(model))
        if isinstance(report, PruneReport) and not plain:
            report = stack.enter_context(declared_as_measured(model, report, grids=format == "dense"))
        if plain:
            safetensors.torch.save_model(model, str(staging / "model.safetensors"))
        else:
            _write_model(model, staging, format, origin, report, **options)
        _save_processors(processors, staging)
        report.save(staging)
        name = name or Path(directory).resolve().name
        if not isinstance(report, PruneReport):
            replace_file(staging / "README.md", str(render_unpruned(model, report, name)))
        elif not plain:
            write_card(staging, report, Facts.gather(model, name, format))


def _write_model(model: Any, folder: Path, format: str, origin: Origin, report: SavedReport, **options: Any) -> None:
    """Save the configuration and the weights of a `PreTrainedModel`, which may be offloaded."""
    unloaded = origin.to_copy(model, report, options.get("variant"))
    streamed = is_offloaded(model)
    try:
        if streamed:
            save_streamed(model, folder, format == "packed", unloaded, **options)
        else:
            model.save_pretrained(folder, **options)
    except RuntimeError as error:
        if "shared tensors" not in str(error):
            raise
        message = f"it shares weights that its class does not declare as tied: {reason(error)}"
        hint = "give each module a copy of its weight: module.weight = torch.nn.Parameter(module.weight.clone())"
        raise MoonshotError(message, field="model", hint=hint) from error
    except ValueError as error:
        if "GenerationConfig is invalid" not in str(error):
            raise
        why = "; ".join(line[2:] for line in str(error).splitlines() if line.startswith("- ")) or reason(error)
        hint = "change it, such as model.generation_config.temperature = None, and save again"
        raise MoonshotError(why, field="generation_config", hint=hint) from error
    if not streamed:
        copy_weights(unloaded, folder)
        if format == "packed":
            pack_files(folder, folder, model)
    if origin.unloaded and not unloaded:
        clear_prediction_layers(folder)
    check_reloads(model, folder)
    if format == EXPORT:
        export_files(folder, folder, model)


def _save_processors(processors: Iterable[Any], folder: Path) -> None:
    """Save tokenizer and image processor; errors of the tokenizers library, a plain `Exception`, become `OSError`."""
    for processor in processors:
        try:
            if hasattr(processor, "save_pretrained"):
                processor.save_pretrained(folder)
        except Exception as error:
            if type(error) is not Exception:
                raise
            raise OSError(reason(error)) from error


def _check_saving(model: nn.Module, report: SavedReport, format: str | None, options: dict[str, Any]) -> str:
    """Check the format and the options of `save_model`; return the format."""
    if not isinstance(report, PruneReport) and PruningRecord.of(model) is None:
        message = "the model has no zeros to pack; prune it first"
        require(format in (None, "dense"), message, field="format", value=format)
        format = "dense"
    format = format or ("packed" if is_packed(model) else "dense")
    check_choice("format", format, (*FORMATS, EXPORT))
    cls: Any = type(model)
    plain = not hasattr(model, "save_pretrained")
    if plain and format != "dense":
        message = f"{cls.__name__} is not a PreTrainedModel"
        raise MoonshotError(message, field="format", value=format, hint='use "dense"')
    if format == EXPORT:
        with to_save(model):
            quantized_grids(model)
    supported = () if plain else inspect.signature(cls.save_pretrained).parameters
    for name, value in options.items():
        require(name != "push_to_hub", "call the pruner's push_to_hub, which also writes the card", field=name)
        require(name != "is_main_process", "call it in one process, which writes everything", field=name)
        require(name in supported, f"{cls.__name__}.save_pretrained has no such option", field=name, value=value)
        if name == "max_shard_size":
            shard_bytes(value)
        tensors = isinstance(value, Mapping) and all(isinstance(weight, Tensor) for weight in value.values())
        weights = name != "state_dict" or value is None or tensors
        require(weights, "give the weights by their names", field=name, value=value)
        suffix = name != "variant" or value is None or (isinstance(value, str) and Path(value).name == value)
        require(suffix, 'give a name such as "fp16"', field=name, value=value)
        without = name != "variant" or format == "dense"
        require(without, "a packed checkpoint has no variants", field=name, value=value)
    return format
