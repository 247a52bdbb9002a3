"""Packed checkpoints: dense weight files in, packed ones out, and back.

A packed checkpoint is a dense one in which ``NAME.weight`` of a pruned layer became the tensors of its packed format
(see packing/), in the same files. ``config.json`` names the format under
``quantization_config``; the metadata of every file holds, as JSON under "moonshot", what its layers were and a SHA-256
of every tensor in it.
"""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from ..errors import MoonshotError, naming, require
from ..files import read_json
from ..model.layers import find_structure
from ..objective.patterns import NM, Unstructured
from ..packing import PackedLayer
from ..reports.record import PruningRecord
from .keys import parameter_names

FORMATS = ("dense", "packed")
VERSION = 1
METHOD = "moonshot"  # `quant_method` in config.json, and the key in the files' metadata
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"

Tensors = dict[str, Tensor]
Layers = dict[str, PackedLayer]


def check_format(format: str) -> None:
    """Raise `MoonshotError` unless this is a format of checkpoints."""
    require(format in FORMATS, f'format={format!r}: use "dense" or "packed"')


def model_class(config: Any) -> type:
    """The transformers class that a configuration names."""
    architecture = (getattr(config, "architectures", None) or [""])[0]
    return getattr(transformers, architecture, AutoModelForCausalLM)


def read_model_config(folder: Path, **options: Any) -> Any:
    """A checkpoint's configuration, or a `MoonshotError` for one that transformers cannot read."""
    try:
        return AutoConfig.from_pretrained(folder, **options)
    except (OSError, ValueError, KeyError) as error:
        raise MoonshotError(f"{folder}: its model is unknown to transformers ({error})") from error


def pruned_layers(model: nn.Module) -> Layers:
    """The weights that the model's record says are pruned, under every name that they have in the model.

    Raises:
        MoonshotError: the model is not a pruned one, or its record is damaged.
    """
    record = PruningRecord.require_of(model)
    layers = list(find_structure(model, record.targets, record.ignore).layers())
    patterns = record.layer_patterns(layer.name for layer in layers)
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    found = {}
    for layer in layers:
        pattern = patterns[layer.name] if isinstance(patterns[layer.name], NM) else None
        if pattern is None or pattern.fits(layer.shape):
            shape, dtype = tuple(layer.parameter.shape), dtype_name(layer.parameter.dtype)
            transposed = isinstance(layer.modules[0], Conv1D)
            entry = PackedLayer(shape, transposed, str(pattern or Unstructured.kind), dtype)
            found |= dict.fromkeys(names[id(layer.parameter)], entry)
    return found


def pack_files(source: Path, target: Path, model: nn.Module) -> None:
    """Write the weights of a dense checkpoint packed, wherever that is smaller, and config.json with the format.

    Args:
        source: folder of the dense checkpoint.
        target: folder of the packed one; may be the same.
        model: the pruned model, possibly on the meta device; what is not pruned in it stays dense.

    Raises:
        MoonshotError: a layer that is not n:m, with its name, or no layer that packing makes smaller.
    """
    layers, packed = pruned_layers(model), []
    places = parameter_names(model, _stored_names(source))

    def change(tensors: Tensors, _: Layers) -> tuple[Tensors, Layers]:
        entries = {}
        for name in list(tensors):
            layer = layers.get(places.get(name))
            tensor = tensors[name]
            if layer is None or layer.shape != tuple(tensor.shape) or stored_bytes(tensor, layer) == tensor.nbytes:
                continue
            del tensors[name]
            entries[name] = replace(layer, dtype=dtype_name(tensor.dtype))
            with naming(places[name]):
                tensors |= layer.pack(name, tensor)
        packed.extend(entries)
        return tensors, entries

    _rewrite(source, target, change)
    require(bool(packed), 'format="packed" makes no layer smaller: use format="dense"')
    _write_config(source, target, {"quant_method": METHOD, "format": "packed", "version": VERSION})


def unpack_files(source: Path, target: Path) -> None:
    """The inverse of `pack_files`."""

    def change(tensors: Tensors, layers: Layers) -> tuple[Tensors, None]:
        for name, layer in layers.items():
            with naming(name):
                tensors[name] = layer.unpack(name, tensors)
            for stored in layer.names(name):
                del tensors[stored]
        return tensors, None

    _rewrite(source, target, change)
    _write_config(source, target, None)


def stored_bytes(tensor: Tensor, layer: PackedLayer) -> int:
    """What a pruned weight takes in a packed checkpoint, where it stays dense if that is smaller."""
    return layer.stored_bytes(tensor)


def _stored_names(folder: Path) -> list[str]:
    names = []
    for path in weight_files(folder):
        with safe_open(path, "pt") as file:
            names += file.keys()
    return names


def _rewrite(source: Path, target: Path, change: Callable[[Tensors, Layers], tuple[Tensors, Layers | None]]) -> None:
    """Every weight file with other tensors in it, one file in memory at a time, and the index of all.

    `change` gets a file's tensors and packed layers and gives the new ones; no layers at all is the dense format.
    """
    places, total = {}, 0
    for path in weight_files(source):
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors, layers = change({name: file.get_tensor(name) for name in file.keys()}, packed_layers(metadata)[0])  # noqa: SIM118
        metadata.pop(METHOD, None)
        if layers is not None:
            metadata[METHOD] = _describe(tensors, layers)
        partial = target / (path.name + ".partial")
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial, metadata)
        os.replace(partial, target / path.name)
        places |= dict.fromkeys(tensors, path.name)
        total += sum(tensor.nbytes for tensor in tensors.values())
    if (source / _INDEX).exists():
        index = read_json(source / _INDEX)
        metadata = {**index.get("metadata", {}), "total_size": total}
        _write_json(target / _INDEX, {**index, "metadata": metadata, "weight_map": dict(sorted(places.items()))})


def _describe(tensors: Tensors, layers: Layers) -> str:
    digests = {name: digest(tensor) for name, tensor in tensors.items()}
    entries = {name: layer.describe() for name, layer in layers.items()}
    return json.dumps({"version": VERSION, "layers": entries, "sha256": digests})


def packed_layers(metadata: dict[str, str]) -> tuple[Layers, dict[str, str]]:
    """The layers packed in a file and the SHA-256 of each of its tensors, by the file's metadata.

    Raises:
        MoonshotError: metadata of a newer version, or damaged.
    """
    if METHOD not in metadata:
        return {}, {}
    try:
        described = json.loads(metadata[METHOD])
        version = described["version"]
        layers = {name: _read_layer(name, entry) for name, entry in described["layers"].items()}
        digests = dict(described["sha256"])
    except MoonshotError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise MoonshotError(f"the metadata of the packed layers is damaged ({error!r})") from None
    require(version == VERSION, f"version={version!r} of packed checkpoints: this release reads {VERSION}")
    return layers, digests


def _read_layer(name: str, entry: Any) -> PackedLayer:
    with naming(name):
        return PackedLayer.read(entry)


def digest(tensor: Tensor) -> str:
    """SHA-256 of a tensor's bytes, in row-major order."""
    content = tensor.contiguous().flatten()
    return sha256(content.view(torch.uint8).numpy().data if content.numel() else b"").hexdigest()


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint, in order.

    Raises:
        MoonshotError: there are none, or one that the index names is missing.
    """
    places = index_places(folder)
    for name, file in places.items():
        require((folder / file).is_file(), f"{folder}: {file} is missing, which holds {name}")
    require(bool(places) or (folder / _SINGLE).is_file(), f"{folder} holds no {_SINGLE} and no {_INDEX}")
    return [folder / file for file in sorted(set(places.values()) or {_SINGLE})]


def index_places(folder: Path) -> dict[str, str]:
    """The file of every tensor of a checkpoint in several files; empty where there is one file only."""
    path = folder / _INDEX
    if not path.exists():
        return {}
    places = read_json(path).get("weight_map")
    known = isinstance(places, dict) and all(isinstance(file, str) for file in places.values())
    require(known, f"{path} is damaged: it has no weight_map")
    return places


def checkpoint_format(folder: Path) -> str:
    """ "dense" or "packed", by config.json."""
    config = _read_config(folder)
    quantization = config.get("quantization_config") or {}
    if not isinstance(quantization, dict) or quantization.get("quant_method") != METHOD:
        return "dense"
    check_version(quantization)
    return quantization["format"]


def check_version(quantization: dict[str, Any]) -> None:
    """Raise `MoonshotError` unless this release reads what config.json says of the packed weights."""
    known = quantization.get("format") == "packed" and quantization.get("version") == VERSION
    require(
        known, f"quantization_config={quantization}: this release reads format 'packed', version {VERSION}; update it"
    )


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    require(path.is_file(), f"{folder} holds no config.json: give the folder of a checkpoint")
    return read_json(path)


def _write_config(source: Path, target: Path, quantization: dict[str, Any] | None) -> None:
    config = _read_config(source)
    config.pop("quantization_config", None)
    if quantization is not None:
        config["quantization_config"] = quantization
    _write_json(target / "config.json", config)


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
