"""The checkpoint of a model: the quantization that transformers undid, weights that it did not load, and other files.

FP8, MXFP4 and GGUF checkpoints become ordinary 16-bit models, but transformers would convert them back while saving.
Weights for which a class has no modules (`mtp.*` of Qwen3-Next, layer 61 of DeepSeek-V3) are only in the files; other
programs predict several tokens with them.

The files that are not weights (pooling, feature extractors, licences, code, chat templates) are copied, so that a new
folder works wherever the source did. Weights in any format, folders of training runs, large files, special files, links
to folders and links to files outside the folder are not; a log message names the files that a user could miss.
"""

import logging
import os
import re
import shutil
import stat
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel
from transformers.utils.hub import cached_file

from ..errors import MoonshotError, reason, require
from ..files import UNFINISHED, is_weights
from ..reports.plots import PLOT_NAME
from ..reports.prune_report import REPORT_NAME, PruneReport
from ..rotate.report import ROTATION_NAME, RotationReport
from ..shrink.report import SHRINK_NAME, ShrinkReport
from .folder import HUB_OPTIONS, Checkpoint, download_others
from .weight_files import StoredTensors, new_names, read_header, read_tensors, target_names, write_json

# The report of a run; without pruned layers, of a rotation or of a smaller vocabulary.
SavedReport = PruneReport | RotationReport | ShrinkReport
_SOURCE = "_moonshot_source"  # attribute of a model: its `Source`
_FLOATS = {"F64", "F32", "F16", "BF16"}
# Fields of config.json with the number of layers for multi-token prediction.
_PREDICTION_LAYERS = re.compile(r"(nextn|mtp)\w*_layers$")
LARGEST = 2**27  # bytes of a file; the largest tokenizers have 35 MB, a sentence-transformers Dense layer up to 67
# Other libraries' formats of the dense model. PyTorch files in sub-folders are the weights of further modules.
_FOREIGN = re.compile(
    r"\.(gguf|ggml|llamafile|onnx(_data.*|\.data)?|h5|keras|msgpack|tflite|ot|mlmodel|ckpt|pdparams|nemo|engine|pte"
    r"|tfevents.*)$|^openvino_.*|\.index\.json$|\.tfevents\."
)
_TORCH = re.compile(r"\.(safetensors|bin|pt|pth)$")
_RUN_FOLDER = re.compile(r"(checkpoint|global_step)[-_]?\d+|runs|wandb|__pycache__|.*\.mlpackage|.*\.partial|\..*")
_RUN_FILES = ("run.json", "trainer_state.json")  # only in folders of runs, of this package and of the Trainer
# Files about the weights of the source, which are not the saved ones.
_OF_SOURCE = {
    "config.json", "README.md", REPORT_NAME, PLOT_NAME, ROTATION_NAME, SHRINK_NAME, "trainer_state.json",
    "quantize_config.json", "quant_config.json", "hf_quant_config.json",
}  # fmt: skip
_log = logging.getLogger(__name__)


class Source(NamedTuple):
    """Where a model was loaded from."""

    name: Any  # a folder or a repository on the Hub
    options: Mapping[str, Any]  # to find its files: `revision`, `subfolder`, `cache_dir`, `token`, …


@dataclass
class Origin:
    """The checkpoint of a model, as far as its saved weights depend on it; empty for a model without one."""

    notes: tuple[str, ...] = ()  # for the report of a run
    unloaded: dict[Path, list[str]] = field(default_factory=dict)  # file → weights that transformers does not load
    whole: bool = True  # whether config.json names the model's class
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)  # of the loaded weights, if some are not

    def to_copy(self, model: nn.Module, report: SavedReport, variant: str | None = None) -> dict[Path, list[str]]:
        """The unloaded weights to save with the model, by file; none if they do not fit it. The report lists them."""
        obstacle = self._obstacle(model, report, variant) if self.unloaded else ""
        entries = report.skipped if isinstance(report, PruneReport) else report.refused
        fate = f"not saved: {obstacle}" if obstacle else "saved as it was"
        groups = dict.fromkeys(_group(name) for names in self.unloaded.values() for name in names)
        entries.update(dict.fromkeys(groups, f"transformers does not load it; {fate}"))
        if obstacle:
            _log.warning("not in the saved checkpoint: %s (%s)", ", ".join(groups), obstacle)
        return {} if obstacle else self.unloaded

    def _obstacle(self, model: nn.Module, report: SavedReport, variant: str | None) -> str:
        if not self.whole:
            return "the model is a part of the one in the checkpoint"
        rotation = report.rotation if isinstance(report, PruneReport) else report
        if isinstance(rotation, RotationReport) and rotation.rotated:
            return "it uses hidden states in the basis before the rotation"
        if _shapes(model) != self.shapes:
            return "it does not fit the smaller model"
        if variant:
            return "a checkpoint with a variant cannot contain it"
        try:
            for path, names in self.unloaded.items():
                with StoredTensors([path]) as stored:
                    if any(stored.dtype(name) not in _FLOATS for name in names):
                        return "it is quantized, unlike the saved model"
        except (OSError, SafetensorError, MoonshotError, KeyError):
            return f"{path} has changed since the model was loaded"
        return ""


def clear_prediction_layers(folder: Path) -> None:
    """Declare in config.json and its nested configurations that there are no layers for multi-token prediction."""

    def cleared(values: dict[str, Any]) -> dict[str, Any]:
        zero = {name: 0 for name, value in values.items() if type(value) is int and _PREDICTION_LAYERS.search(name)}
        nested = {name: cleared(value) for name, value in values.items() if isinstance(value, dict)}
        return {**values, **nested, **zero}

    write_json(folder / "config.json", cleared(Checkpoint(folder).config))


def find_origin(model: nn.Module) -> Origin:
    """The origin of a model that was just loaded; a quantizer that dequantized its weights is detached from it.

    Raises:
        MoonshotError: its weights are quantized, and the quantizer cannot save them.
    """
    if not isinstance(model, PreTrainedModel):
        return Origin()
    method, patterns = _detach_quantizer(model), model._keys_to_ignore_on_load_unexpected
    undone = f"the weights were dequantized ({method}) while the model was loaded; it is saved without"
    notes = (f"{undone} quantization_config",) if method else ()
    folder = _folder(source_of(model)) if patterns else None
    unloaded = {} if folder is None else _unloaded(model, folder, patterns or ())
    if folder is None or not unloaded:
        return Origin(notes)
    names = Checkpoint(folder).config.get("architectures")
    whole = not isinstance(names, list) or type(model).__name__ in names
    return Origin(notes, unloaded, whole, _shapes(model))


def remember_source(model: nn.Module, source: Source) -> None:
    """Store where a model was loaded from."""
    vars(model)[_SOURCE] = source


def source_of(model: nn.Module) -> Source:
    """Where a model was loaded from, by this package or by transformers; the name is "" or None if unknown."""
    commit = getattr(getattr(model, "config", None), "_commit_hash", None)
    remembered: Source | None = vars(model).get(_SOURCE)
    return remembered or Source(getattr(model, "name_or_path", ""), {"revision": commit})


def _detach_quantizer(model: PreTrainedModel) -> str:
    """Detach the quantizer that has dequantized the weights, and return its method; "" if there is none.

    Its entries in the configuration are removed too, and its conversions, which would quantize the saved weights.
    """
    quantizer: Any = getattr(model, "hf_quantizer", None)
    if quantizer is None:
        conversions: Iterable[Any] = getattr(model, "_weight_conversions", None) or ()
        steps = (step for conversion in conversions for step in getattr(conversion, "operations", None) or ())
        quantizer = next((step.hf_quantizer for step in steps if getattr(step, "hf_quantizer", None)), None)
        removed = vars(model).get("is_quantized") is False  # of a quantizer that is gone, also this package's
        if quantizer is None and not (removed and _stored_method(model)):
            return ""
    elif quantizer.quantization_config.quant_method != "gguf" or getattr(quantizer, "packed_modules", None):
        method = _method(quantizer)
        message, hint = f"its weights are quantized ({method}), and {method} cannot save them", "load it dequantized"
        require(quantizer.is_serializable(), message, field="model", hint=f"{hint}, or prune the original model")
        return ""
    vars(model)["_weight_conversions"] = None  # transformers then saves in the format of the class
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            for name in ("hf_quantizer", "quantization_method", "is_quantized"):
                vars(module).pop(name, None)
            for config in (module.config, module.config.get_text_config()):
                for name in ("quantization_config", "_is_quantized"):
                    vars(config).pop(name, None)
    return _stored_method(model) if quantizer is None else _method(quantizer)


def _method(quantizer: Any) -> str:
    method = quantizer.quantization_config.quant_method
    return str(getattr(method, "value", method))


def _stored_method(model: PreTrainedModel) -> str:
    """The method that the checkpoint of a dequantized model declares, of which transformers >= 5.24 keeps no trace.

    "" where it declares none.
    """
    folder = _folder(source_of(model))
    if folder is None:
        return "unknown method"
    declared = Checkpoint(folder).config.get("quantization_config")
    return str(declared.get("quant_method")) if isinstance(declared, Mapping) and declared else ""


def _unloaded(model: PreTrainedModel, folder: Path, patterns: Iterable[str]) -> dict[Path, list[str]]:
    """The weights that match the class's patterns of names to ignore, and for which the model has no module.

    Other names that match, such as GPT-NeoX's `attention.bias`, were buffers of a module.
    """
    try:
        files = Checkpoint(folder).tensor_files()
    except (MoonshotError, OSError):  # weights in another format
        return {}
    ignored, modules = re.compile("|".join(f"({pattern})" for pattern in patterns)), dict(model.named_modules())
    unloaded: dict[Path, list[str]] = {}
    for stored, name in target_names(model, files).items():
        if ignored.search(name) and name.rpartition(".")[0] not in modules:
            unloaded.setdefault(files[stored], []).append(stored)
    return unloaded


def _folder(source: Source) -> Path | None:
    """The folder of a checkpoint, for one of the Hub in the cache; None if there is none."""
    kinds = ("gated_repo", "missing_entries", "connection_errors")
    silent: dict[str, Any] = {f"_raise_exceptions_for_{kind}": False for kind in kinds}
    try:
        path = cached_file(source.name, "config.json", **{**source.options, **silent, "local_files_only": True})
    except (OSError, ValueError, TypeError):  # not a name
        return None
    return None if path is None else Path(path).parent


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def _group(stored: str) -> str:
    """The layer of an unloaded weight, for messages: "model.layers.61", "mtp.layers.0", "mtp"."""
    numbered = re.match(r".*?\.\d+(?=\.)", stored)
    return numbered[0] if numbered else stored.partition(".")[0]


def copy_weights(unloaded: Mapping[Path, Sequence[str]], folder: Path) -> None:
    """Add weights of other files to a dense checkpoint, one file in memory at a time, and write its index."""
    if not unloaded:
        return
    checkpoint = Checkpoint(folder, packed=False)
    names = new_names(len(checkpoint.files) + len(unloaded), False)
    renamed = dict(zip(checkpoint.files, names, strict=False))
    entries = {name: renamed[path] for name, path in checkpoint.tensor_files().items()}
    metadata = checkpoint.index.get("metadata", {})
    for path, name in renamed.items():
        os.replace(path, folder / name)
    for (path, stored), name in zip(unloaded.items(), names[len(renamed) :], strict=True):
        tensors = read_tensors(path, stored)
        save_file(tensors, folder / name, {"format": "pt"})
        entries |= dict.fromkeys(tensors, name)
    metadata = {**metadata, "total_size": sum(read_header(folder / name).bytes for name in names)}
    write_json(checkpoint.index_path, {"metadata": metadata, "weight_map": dict(sorted(entries.items()))})


class SideFiles:
    """The files beside the weights that a model was loaded from; saved like a tokenizer.

    Args:
        source: of the model; nothing is copied for a model that was not loaded.
    """

    def __init__(self, source: Source):
        self.source = source
        self.replaced: set[str] = set()  # names of files at the top that are not copied, since their content changed

    def save_pretrained(self, folder: Path) -> None:
        """Copy the files that `folder` does not have yet; files of a repository are downloaded first."""
        source, options = self.source
        if not isinstance(source, str | os.PathLike) or not source:
            return
        without, subfolder = _OF_SOURCE | self.replaced, options.get("subfolder", "")

        def wanted(name: str, size: int) -> bool:
            return size <= LARGEST and _is_beside(name, without) and not (folder / name).exists()

        if os.path.isdir(source):
            copy_side_files(Path(source, subfolder), folder, without)
            return
        hub = {name: options[name] for name in HUB_OPTIONS if name in options}
        local = download_others(source, wanted, subfolder, **hub)
        if local is not None:
            copy_side_files(local, folder, without)


def copy_side_files(source: Path, target: Path, without: Collection[str] = ()) -> None:
    """Copy all files of a checkpoint except its weights and files that the target already has.

    Args:
        source: its folder; links to files may lead to others in it, or to the Hub's cache.
        target: an existing folder, which may be in the source.
        without: names of further files at the top that are not copied.
    """
    left_out, without, inside = list[str](), {*without, *_indexed(source)}, os.path.realpath(target) + os.sep
    for folder, folders, files in os.walk(source):
        for path in [Path(folder, name) for name in sorted(folders)]:
            if path.is_symlink() and not path.name.startswith("."):
                left_out.append(f"{path.relative_to(source).as_posix()} (a link to a folder)")
            if path.is_symlink() or _is_run(path) or inside.startswith(os.path.realpath(path) + os.sep):
                folders.remove(path.name)
        for path in [Path(folder, name) for name in sorted(files)]:
            name = path.relative_to(source).as_posix()
            if not _is_beside(name, without):
                continue
            if why := _obstacle(path, source):
                left_out.append(f"{name} ({why})")
            elif not (target / name).exists():
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target / name)
    if left_out:
        more = f", and {len(left_out) - 8} others" if len(left_out) > 8 else ""
        _log.warning("not copied from %s: %s%s", source, ", ".join(left_out[:8]), more)


def _is_beside(name: str, without: Collection[str]) -> bool:
    """Whether a relative path is that of a file beside the weights, neither of a model nor of a training run."""
    path = PurePosixPath(name)
    whole_model = len(path.parts) == 1 and (is_weights(Path(path)) or _TORCH.search(path.name) is not None)
    of_model = whole_model or _FOREIGN.search(path.name) is not None or path.name.endswith(UNFINISHED)
    return not of_model and not any(map(_RUN_FOLDER.fullmatch, path.parts)) and name not in without


def _is_run(folder: Path) -> bool:
    return _RUN_FOLDER.fullmatch(folder.name) is not None or any((folder / name).exists() for name in _RUN_FILES)


def _obstacle(path: Path, source: Path) -> str:
    """Why a file cannot be copied, or should not; empty if it can."""
    root, real = Path(os.path.realpath(source)), Path(os.path.realpath(path))
    caches = [parent.parent / "blobs" for parent in root.parents if parent.name == "snapshots"]  # of the Hub
    if path.is_symlink() and not real.is_relative_to(root) and real.parent not in caches:
        return "a link to a file outside the folder"
    try:
        status = path.stat()
    except OSError as error:
        return reason(error)
    if not stat.S_ISREG(status.st_mode):
        return "not a regular file"
    if status.st_size > LARGEST:
        return f"{status.st_size / 2**20:.0f} MiB"
    return "" if os.access(path, os.R_OK) else "not readable"


def _indexed(folder: Path) -> set[str]:
    """The weight files that an index names, which may be in sub-folders."""
    names: set[str] = set()
    for packed in (False, True):
        with suppress(MoonshotError):
            names.update(Checkpoint(folder, packed).weight_map.values())
    return names
