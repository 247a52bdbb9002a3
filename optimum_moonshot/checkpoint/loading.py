"""Load a pruned checkpoint, verified: as dense weights, packed in memory, or as torch's 2:4 tensors on a GPU."""

import json
import os
import struct
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError
from safetensors import SafetensorError, safe_open
from torch import nn

from ..config import MoonshotConfig
from ..errors import MoonshotError, check_path, naming, require
from ..packing import PackedLayer, weight_of
from ..reports.prune_report import REPORT_NAME, PruneReport
from ..reports.record import NOT_PRUNED, PruningRecord
from ..runtime.semi_structured import check_batch_shape, use_semi_structured
from .keys import parameter_names
from .packed_files import (
    checkpoint_format,
    digest,
    index_places,
    model_class,
    packed_layers,
    pruned_layers,
    read_model_config,
    weight_files,
)

RUNTIMES = ("dense", "packed", "semi_structured")
_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.py")
# They load what was not verified, or something else than a model.
_REFUSED = ("config", "gguf_file", "output_loading_info", "state_dict", "subfolder", "use_safetensors", "variant")
_HUB_OPTIONS = ("revision", "token", "cache_dir", "local_files_only")


def load_pruned(
    name_or_path: str | os.PathLike,
    runtime: str = "dense",
    *,
    batch_shape: tuple[int, int] = (1, 1),
    **model_kwargs: Any,
) -> nn.Module:
    """Load a pruned model after checking its files, as the class that its configuration names.

    Args:
        name_or_path: a local folder or a Hub repository.
        runtime: "dense" rebuilds the weights; "packed" keeps them packed in memory and unpacks a layer in every
            forward pass: less memory, slower; "semi_structured" turns 2:4 layers into torch's 2:4 tensors on a GPU,
            each only if its forward pass measures faster than dense.
        batch_shape: samples and tokens that a layer sees at once, for which "semi_structured" measures.
        model_kwargs: for the model's `from_pretrained`, such as `dtype`, `device_map`, `revision`, `token`.

    Returns:
        The model in evaluation mode. After "semi_structured", `model.moonshot_runtime` says what each layer became.

    Raises:
        MoonshotError: a missing, truncated or damaged file, with the name of the layer it happened to; counts or shapes
            that do not fit; a checkpoint that is not pruned.
    """
    check_path("name_or_path", name_or_path)
    require(runtime in RUNTIMES, f"runtime={runtime!r}: use one of {', '.join(RUNTIMES)}")
    check_batch_shape(batch_shape)
    _check_options(name_or_path, model_kwargs)
    hub = {name: model_kwargs.pop(name) for name in _HUB_OPTIONS if name in model_kwargs}
    folder = local_folder(name_or_path, **hub)
    format = verify(folder)
    shared = {name: model_kwargs[name] for name in ("trust_remote_code",) if name in model_kwargs}
    config = read_model_config(folder, **shared)
    require(PruningRecord.read(config) is not None, f"{name_or_path}: {NOT_PRUNED}")
    if runtime == "packed":
        mend = "convert it with `optimum-cli moonshot convert DIR --format packed`"
        require(format == "packed", f"runtime='packed': {name_or_path} is a dense checkpoint; {mend}")
        config.quantization_config["runtime"] = "packed"
    model, info = model_class(config).from_pretrained(folder, config=config, output_loading_info=True, **model_kwargs)
    check_complete(info, name_or_path)
    unknown = sorted(info["unexpected_keys"])
    require(not unknown, f"{_layer((unknown or [''])[0])}: it is in the files and not in the model of config.json")
    if format == "dense":
        _check_zeros(folder, model)
    if runtime == "semi_structured":
        use_semi_structured(model, batch_shape, pruned_layers(model))
    return model


def _check_options(name_or_path: str | os.PathLike, options: dict[str, Any]) -> None:
    for name in _REFUSED:
        require(name not in options, f"{name}: load_pruned takes none; call the model's from_pretrained with it")
    again = isinstance(options.get("quantization_config"), MoonshotConfig)
    require(not again, f"quantization_config: {name_or_path} is pruned already; load it without one")


def local_folder(name_or_path: str | os.PathLike, **hub: Any) -> Path:
    """The folder of a checkpoint; a Hub repository is downloaded.

    Raises:
        MoonshotError: neither a folder nor a repository that can be read.
    """
    if os.path.isdir(name_or_path):
        return Path(name_or_path)
    try:
        return Path(snapshot_download(str(name_or_path), allow_patterns=list(_FILES), **hub))
    except (HfHubHTTPError, HFValidationError, HTTPError, OSError) as error:
        raise MoonshotError(f"{name_or_path} is no folder, and no repository that can be read: {error}") from error


def verify(folder: Path) -> str:
    """Check every byte of a packed checkpoint, and of a dense one that no file is cut off or missing.

    Returns:
        Its format, "dense" or "packed".

    Raises:
        MoonshotError: with the name of the layer that is damaged, cut off or missing.
    """
    format, found = checkpoint_format(folder), set()
    for path in weight_files(folder):
        metadata = _header(path)
        try:
            layers, digests = packed_layers(metadata)
            with safe_open(path, "pt") as file:
                names = set(file.keys())
                for name in sorted(names & digests.keys()):
                    with naming(_layer(name)):
                        intact = digest(file.get_tensor(name)) == digests[name]
                        require(intact, f"{path.name} is damaged: its checksum differs")
                _check_names(names, layers, digests, format)
                for name, layer in layers.items():
                    with naming(name):
                        layer.check(name, {stored: file.get_tensor(stored) for stored in layer.names(name)})
        except SafetensorError as error:
            raise MoonshotError(f"{path} is damaged: {error}") from None
        found |= names
    _check_index(folder, found)
    return format


def _header(path: Path) -> dict[str, str]:
    """A safetensors file's metadata, after checking that the file is as long as its header says."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(min(length, size)))
        metadata = header.pop("__metadata__", {})
        ends = {name: 8 + length + entry["data_offsets"][1] for name, entry in header.items()}
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, IndexError):
        raise MoonshotError(f"{path} is damaged: its header cannot be read") from None
    cut = [name for name, end in sorted(ends.items(), key=lambda item: item[1]) if end > size]
    if cut:
        raise MoonshotError(
            f"{_layer(cut[0])}: {path.name} is truncated, it has {size} of {max(ends.values())} bytes; "
            f"{len(cut)} tensors are lost"
        )
    return metadata


def _layer(tensor: str) -> str:
    return weight_of(tensor).removesuffix(".weight")


def _check_names(names: set[str], layers: dict[str, PackedLayer], digests: dict[str, str], format: str) -> None:
    wanted = digests.keys() | {stored for name, layer in layers.items() for stored in layer.names(name)}
    missing = sorted(wanted - names)
    require(not missing, f"{_layer((missing or [''])[0])}: {', '.join(missing)} is missing")
    unknown = sorted(names - digests.keys())
    require(
        format == "dense" or not unknown, f"{_layer((unknown or [''])[0])}: the file's metadata has no checksum of it"
    )


def _check_index(folder: Path, found: set[str]) -> None:
    missing = sorted(index_places(folder).keys() - found)
    require(not missing, f"{_layer((missing or [''])[0])}: the index names it, no file holds it")


def check_complete(info: dict[str, Any], name_or_path: str | os.PathLike) -> None:
    """Every weight of a model came from its files.

    Args:
        info: transformers' loading info.
        name_or_path: where the model was loaded from.

    Raises:
        MoonshotError: with the first weight that is missing, or has another shape in the files.
    """
    missing = sorted(info["missing_keys"])
    missing += sorted(key[0] if isinstance(key, tuple) else key for key in info.get("mismatched_keys", ()))
    more = f", nor {len(missing) - 1} others" if len(missing) > 1 else ""
    require(
        not missing,
        f"{_layer((missing or [''])[0])}: no file of {name_or_path} holds it{more}: they would be random numbers; "
        "give a complete checkpoint",
    )


def _check_zeros(folder: Path, model: nn.Module) -> None:
    """Raise `MoonshotError` for a layer of a dense checkpoint with fewer zeros than its report says."""
    zeros = _reported_zeros(folder)
    for path in weight_files(folder) if zeros else ():
        with safe_open(path, "pt") as file:
            for stored, name in parameter_names(model, file.keys()).items():
                if name in zeros:
                    counted = int((file.get_tensor(stored) == 0).sum())
                    with naming(name):
                        require(counted >= zeros[name], f"it has {counted} zeros, its report says {zeros[name]}")


def _reported_zeros(folder: Path) -> dict[str, int]:
    """How many zeros each weight of a dense checkpoint has at least; empty without a report, or after compaction."""
    if not (folder / REPORT_NAME).is_file():
        return {}
    report = PruneReport.load(folder)
    layers = () if report.compaction else report.layers
    return {f"{layer.name}.weight": round(layer.sparsity * layer.shape[0] * layer.shape[1]) for layer in layers}
