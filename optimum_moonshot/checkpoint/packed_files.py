"""Packed checkpoints: dense weight files in, packed ones out, and back.

A packed checkpoint is a dense one in which ``NAME.weight`` of a pruned layer became the tensors of its packed format
(packing/), in as many files of other names (weight_files.py) that describe themselves (packed_format.py).
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig

from ..errors import MoonshotError, naming, reason, require
from ..files import read_json
from ..model.layers import find_structure
from ..objective.patterns import NM, Unstructured
from ..packing import PackedLayer
from ..reports.record import PruningRecord
from .meta_model import named_empty_model
from .packed_format import EXPLICIT, METHOD, VERSION, Description, Layers, Tensors, config_entry, dtype_name
from .weight_files import index_path, new_names, packed_version, read_config, sort_metadata, weight_files
from .weight_names import Merged, merged_weights, parameter_names

FORMATS = ("dense", "packed")
_NOT_HERE = "this checkpoint is packed: pip install optimum-moonshot, and import optimum_moonshot to load it"
# How `pack_files` and `unpack_files` change a file: its tensors and packed layers to the new ones.
Change = Callable[[Tensors, Layers], tuple[Tensors, Layers]]


def check_format(format: str) -> None:
    """Raise `MoonshotError` unless this is a format of checkpoints."""
    require(format in FORMATS, f'format={format!r}: use "dense" or "packed"')


def read_model_config(folder: Path, **options: Any) -> Any:
    """A checkpoint's configuration.

    Args:
        folder: of the checkpoint.
        options: for `AutoConfig`, such as `trust_remote_code`.

    Raises:
        MoonshotError: one that transformers cannot read.
    """
    try:
        return AutoConfig.from_pretrained(folder, **options)
    except Exception as error:  # a damaged file fails anywhere in the class that it names
        raise MoonshotError(f"{folder}: its model is unknown to transformers ({reason(error)})") from error


def model_skeleton(folder: Path, **options: Any) -> nn.Module:
    """The model of a checkpoint, without weights.

    Args:
        folder: of the checkpoint.
        options: for its classes, such as `trust_remote_code`.

    Raises:
        MoonshotError: transformers cannot make it.
    """
    return named_empty_model(folder, read_model_config(folder, **options), **options)


def pruned_layers(model: nn.Module) -> Layers:
    """The weights that the model's record says are pruned, under every name that they have in the model.

    Raises:
        MoonshotError: the model is not a pruned one, or its record is damaged.
    """
    record = PruningRecord.require_of(model)
    chosen = find_structure(model, record.targets, record.ignore).layers()
    layers = [layer for layer in chosen if layer.name not in record.dense]
    patterns = record.layer_patterns(layer.name for layer in layers)
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    found = {}
    for layer in layers:
        pattern = patterns[layer.name] if isinstance(patterns[layer.name], NM) else None
        # Experts that are stored [experts, in, out] are n:m along another axis than their rows in memory.
        stored = None if layer.adapter.separate and layer.adapter.axes == (2, 1) else pattern
        if pattern is None or pattern.fits(layer.shape):
            shape, dtype = tuple(layer.parameter.shape), dtype_name(layer.parameter.dtype)
            transposed = layer.adapter.axes == (1, 0)
            entry = PackedLayer(shape, transposed, str(stored or Unstructured.kind), dtype)
            found |= dict.fromkeys(names[id(layer.parameter)], entry)
    return found


def pack_files(source: Path, target: Path, model: nn.Module) -> None:
    """Write the weights of a dense checkpoint packed, wherever that is smaller, and config.json with the format.

    Args:
        source: folder of the dense checkpoint.
        target: folder of the packed one; of the same, the dense files go.
        model: the pruned model, possibly on the meta device; what is not pruned in it stays dense.

    Raises:
        MoonshotError: a layer that is not n:m, with its name, or no layer that packing makes smaller.
    """
    packer = Packer(model)
    _rewrite(source, target, lambda tensors, _: packer.pack(tensors), packed=True)
    packer.check()


class Packer:
    """Packs the tensors of a pruned model's files, wherever that is smaller.

    Args:
        model: the pruned model, possibly on the meta device.
    """

    def __init__(self, model: nn.Module):
        self.model, self.layers = model, pruned_layers(model)
        self.packed = 0  # how many

    def pack(self, tensors: Tensors) -> tuple[Tensors, Layers]:
        """The tensors of a file with packed ones among them, and what is known of those.

        Args:
            tensors: by the names that they have in the file; changed in place.

        Raises:
            MoonshotError: a layer that is not n:m, with its name.
        """
        stored = list(tensors)
        places, merged = parameter_names(self.model, stored), merged_weights(self.model, stored)
        entries = {}
        for name in stored:
            tensor = tensors[name]
            if name in merged:
                layer = _of_expert(self.layers.get(merged[name].weight), merged[name], tensor)
            else:
                layer = self.layers.get(places.get(name))
            if layer is None or layer.shape != tuple(tensor.shape) or stored_bytes(tensor, layer) == tensor.nbytes:
                continue
            del tensors[name]
            entries[name] = replace(layer, dtype=dtype_name(tensor.dtype))
            with naming(places.get(name, name)):
                tensors |= layer.pack(name, tensor)
        self.packed += len(entries)
        return tensors, entries

    def check(self) -> None:
        """Whether anything was packed.

        Raises:
            MoonshotError: nothing was.
        """
        require(self.packed > 0, 'format="packed" makes no layer smaller: use format="dense"')


def _of_expert(fused: PackedLayer | None, merged: Merged, tensor: Tensor) -> PackedLayer | None:
    """What is known of a stored weight that is a part of a fused parameter; None of one that is not pruned."""
    if fused is None or tensor.ndim < 2:
        return None
    alone = replace(fused, shape=tuple(tensor.shape), transposed=False)
    fits = alone.nm is None or (merged.keeps_rows and alone.nm.fits(alone.matrix))
    return alone if fits else replace(alone, pattern=Unstructured.kind)


def unpack_files(source: Path, target: Path) -> None:
    """The inverse of `pack_files`, of files that `verify` has looked at.

    Args:
        source: folder of the packed checkpoint, of any version.
        target: another folder.
    """

    def change(tensors: Tensors, layers: Layers) -> tuple[Tensors, Layers]:
        for name, layer in layers.items():
            with naming(name):
                tensors[name] = layer.unpack(name, tensors)
            for stored in layer.names(name):
                del tensors[stored]
        return tensors, {}

    _rewrite(source, target, change, packed=False)


def stored_bytes(tensor: Tensor, layer: PackedLayer) -> int:
    """Bytes of a pruned weight in a packed checkpoint, where it stays dense if that is smaller.

    Args:
        tensor: the dense weight, of the layer's `shape`.
        layer: what is known of it.
    """
    return layer.stored_bytes(tensor)


def _rewrite(source: Path, target: Path, change: Change, packed: bool) -> None:
    """Every weight file with other tensors in it, one file in memory at a time, the index of all, and config.json."""
    version = packed_version(source)
    files = weight_files(source, version)
    index_file = index_path(source, version)
    index, places, total = _read_index(index_file), {}, 0
    for path, new in zip(files, new_names(len(files), packed), strict=True):
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            described = Description.read(metadata)
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            tensors, layers = change(found, {} if described is None else described.layers)
        metadata.pop(METHOD, None)
        if packed:
            metadata[METHOD] = Description.of(tensors, layers, len(files)).to_json()
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / new, metadata)
        if metadata:
            sort_metadata(target / new)
        if path.parent == target:
            path.unlink()
        places |= dict.fromkeys(tensors, new)
        total += sum(tensor.nbytes for tensor in tensors.values())
    if target == source:
        index_file.unlink(missing_ok=True)
    if packed or len(files) > 1:
        metadata = {**index.get("metadata", {}), "total_size": total}
        write_index(target, {**index, "metadata": metadata}, places, packed)
    write_config(source, target, packed)


def write_index(folder: Path, index: dict[str, Any], places: dict[str, str], packed: bool) -> None:
    """The index of a checkpoint's files.

    Args:
        folder: of the checkpoint.
        index: what it says beside the places.
        places: the file of every tensor.
        packed: whether it is a packed one.
    """
    path = index_path(folder, VERSION if packed else None)
    _write_json(path, {**index, "weight_map": dict(sorted(places.items()))})


def _read_index(path: Path) -> dict[str, Any]:
    """What an index says beside the places; nothing where there is none."""
    if not path.exists():
        return {}
    index = read_json(path)
    good = isinstance(index.get("metadata", {}), dict)
    require(good, f"{path} is damaged: its metadata is no object")
    return index


def write_config(source: Path, target: Path, packed: bool) -> None:
    """config.json, by which this package knows a packed checkpoint, and others that they do not.

    Args:
        source: where the one of the checkpoint lies.
        target: where it goes, possibly the same.
        packed: whether the checkpoint is a packed one.
    """
    config = read_config(source)
    for name in ("quantization_config", EXPLICIT):
        config.pop(name, None)
    if packed:
        config |= {"quantization_config": config_entry(), EXPLICIT: _NOT_HERE}
    _write_json(target / "config.json", config)


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
