"""Load a pruned checkpoint, verified: as dense weights, packed in memory, or as torch's 2:4 tensors on a GPU."""

import json
import os
import struct
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoConfig

from .checkpoint import (
    META,
    PACKED,
    PackedLayer,
    checkpoint_format,
    digest,
    dtype_name,
    model_class,
    naming,
    packed_layers,
    parsed,
    weight_files,
)
from .errors import MoonshotError, require
from .packing import check_packed, is_nm
from .report import REPORT_NAME, PruneReport

RUNTIMES = ("dense", "packed", "semi_structured")
_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.py")
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
    require(runtime in RUNTIMES, f"runtime={runtime!r}: use one of {', '.join(RUNTIMES)}")
    hub = {name: model_kwargs.pop(name) for name in _HUB_OPTIONS if name in model_kwargs}
    folder = local_folder(name_or_path, **hub)
    format = verify(folder)
    shared = {name: model_kwargs[name] for name in ("trust_remote_code",) if name in model_kwargs}
    config = AutoConfig.from_pretrained(folder, **shared)
    require(hasattr(config, "moonshot"), f"{name_or_path}: config.json has no entry moonshot: the model is not pruned")
    if runtime == "packed":
        mend = "convert it with `optimum-cli moonshot convert DIR --format packed`"
        require(format == "packed", f"runtime='packed': {name_or_path} is a dense checkpoint; {mend}")
        config.quantization_config["runtime"] = "packed"
    model = model_class(config).from_pretrained(folder, config=config, **model_kwargs)
    if runtime == "semi_structured":
        from .semi_structured import use_semi_structured

        use_semi_structured(model, batch_shape)
    return model


def local_folder(name_or_path: str | os.PathLike, **hub: Any) -> Path:
    """The folder of a checkpoint; a Hub repository is downloaded.

    Raises:
        MoonshotError: neither a folder nor a repository that can be read.
    """
    if os.path.isdir(name_or_path):
        return Path(name_or_path)
    try:
        return Path(snapshot_download(str(name_or_path), allow_patterns=list(_FILES), **hub))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise MoonshotError(f"{name_or_path} is no folder, and no repository that can be read: {error}") from error


def verify(folder: Path) -> str:
    """Check every byte of a packed checkpoint, and of a dense one what can be: lengths, and the zeros of its report.

    Returns:
        Its format, "dense" or "packed".

    Raises:
        MoonshotError: with the name of the layer that is damaged, cut off or missing.
    """
    format, found = checkpoint_format(folder), set()
    zeros = _reported_zeros(folder) if format == "dense" else {}
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
                        _check_layer(file.get_tensor(name + PACKED), file.get_tensor(name + META), layer)
                for name in names & zeros.keys():
                    counted = int((file.get_tensor(name) == 0).sum())
                    with naming(name):
                        require(counted >= zeros[name], f"it has {counted} zeros, its report says {zeros[name]}")
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
    return tensor.removesuffix(PACKED).removesuffix(META).removesuffix(".weight")


def _check_names(names: set[str], layers: dict[str, PackedLayer], digests: dict[str, str], format: str) -> None:
    wanted = digests.keys() | {name + suffix for name in layers for suffix in (PACKED, META)}
    missing = sorted(wanted - names)
    require(not missing, f"{_layer((missing or [''])[0])}: {', '.join(missing)} is missing")
    unknown = sorted(names - digests.keys())
    require(
        format == "dense" or not unknown, f"{_layer((unknown or [''])[0])}: the file's metadata has no checksum of it"
    )


def _check_layer(values, meta, layer: PackedLayer) -> None:
    check_packed(values, meta, layer.matrix)
    require(dtype_name(values.dtype) == layer.dtype, f"its values are {values.dtype}, {layer.dtype} was written")
    pattern = parsed(layer.pattern)
    require(pattern is None or is_nm(meta, layer.matrix[1], pattern), f"it is not {pattern}")


def _reported_zeros(folder: Path) -> dict[str, int]:
    """How many zeros each weight of a dense checkpoint has at least; empty without a report, or after compaction."""
    if not (folder / REPORT_NAME).is_file():
        return {}
    report = PruneReport.load(folder)
    layers = () if report.compaction else report.layers
    return {f"{layer.name}.weight": round(layer.sparsity * layer.shape[0] * layer.shape[1]) for layer in layers}


def _check_index(folder: Path, found: set[str]) -> None:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        missing = sorted(json.loads(index.read_text(encoding="utf-8"))["weight_map"].keys() - found)
        require(not missing, f"{_layer((missing or [''])[0])}: the index names it, no file holds it")
