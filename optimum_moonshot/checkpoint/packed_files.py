"""Write packed checkpoints, from dense weight files and back, or block by block from a model, and check new folders.

A packed checkpoint is a dense one in which ``NAME.weight`` of a pruned layer is replaced by the tensors of its packed
format (packing/), in files of other names with a description (weight_files.py).
"""

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import convert_file_size_to_int
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict
from transformers.utils import logging

from ..errors import MoonshotError, error_context, reason, require
from ..files import UNFINISHED
from ..model.layers import PrunableLayer, Visit, by_visit, find_structure
from ..model.weights import tie_again
from ..model.word_embeddings import STORED, word_embeddings
from ..objective.grid import Grid
from ..objective.patterns import NM, MixedNM, Pattern, Unstructured
from ..packing import PackedLayer, Quantized
from ..progress import progress_bar, without_transformers_bars
from ..reports.record import PruningRecord
from .folder import Checkpoint
from .weight_files import (
    EXPLICIT,
    METHOD,
    Description,
    Layers,
    StoredTensors,
    Target,
    Tensors,
    config_entry,
    described_layers,
    dtype_name,
    merged_weights,
    new_names,
    parameter_names,
    read_header,
    read_tensors,
    sort_metadata,
    write_json,
)

FORMATS = ("dense", "packed")
_NOT_HERE = "this checkpoint is packed: pip install optimum-moonshot, and import optimum_moonshot to load it"
SHARD = "500MB"  # default of `max_shard_size`
Change = Callable[[Tensors, Layers], tuple[Tensors, Layers]]  # tensors and packed layers of a file → the new ones
Visits = list[tuple[Visit, list[str]]]  # of one file, with the names of their weights


def pruned_layers(model: nn.Module) -> Layers:
    """The pruned weights according to the model's record, by every name that they have in the model."""
    record = PruningRecord.require_of(model)
    selected = find_structure(model, record.targets, record.ignore).layers()
    layers = [layer for layer in selected if layer.name not in record.dense]
    selected_names = [layer.name for layer in layers]
    patterns, grids = record.pattern_rules.of(selected_names), record.layer_grids(selected_names)
    names, entries = shared_names(model), Layers()
    for layer in layers:
        pattern = patterns[layer.name]
        if not isinstance(pattern, NM) or pattern.fits(layer.shape):
            entries |= dict.fromkeys(names[layer.weight_name], _entry(layer, pattern, grids[layer.name]))
    return entries


def packed_weights(model: nn.Module) -> Layers:
    """All weights that a packed checkpoint has packed: the `pruned_layers`, and word embeddings on a grid."""
    record, entries = PruningRecord.require_of(model), pruned_layers(model)
    if record.embedding_grid is None:
        return entries
    layers, names = find_structure(model, record.targets, record.ignore).layers(), shared_names(model)
    codec = Quantized.of(record.embedding_grid)
    for embedding in word_embeddings(model, layers):
        shape, dtype = embedding.shape, dtype_name(embedding.parameter.dtype)
        entry = PackedLayer(shape, False, str(STORED), dtype, codec.name)
        entries |= dict.fromkeys(names[embedding.name], entry)
    return entries


def bytes_on_disk(model: nn.Module) -> tuple[int, int]:
    """Bytes of a pruned model's weights on disk, dense and packed."""
    state = model.state_dict()
    dense = sum({tensor.data_ptr() or name: tensor.nbytes for name, tensor in state.items()}.values())
    # Tied weights count once.
    unique = {model.get_parameter(name): (name, layer) for name, layer in packed_weights(model).items()}
    layers = dict(unique.values())
    saved = 0
    for visit, names in by_visit(model, layers):
        with visit():
            for name in names:
                tensor = model.get_parameter(name)
                saved += tensor.nbytes - layers[name].stored_bytes(tensor)
    return dense, dense - saved


def shared_names(model: nn.Module) -> dict[str, list[str]]:
    """All names of each parameter of a model, by each of them."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {name: of_parameter for of_parameter in names.values() for name in of_parameter}


def _entry(layer: PrunableLayer, rule: Pattern | MixedNM, grid: Grid | None) -> PackedLayer:
    pattern = rule if isinstance(rule, NM) else None
    shape, dtype = tuple(layer.parameter.shape), dtype_name(layer.parameter.dtype)
    if grid is not None:
        kind, transposed = str(pattern or Unstructured.kind), layer.axes in ((1, 0), (2, 1))
        return PackedLayer(shape, transposed, kind, dtype, Quantized.of(grid).name, stacked=layer.separate)
    # Experts stored [experts, in, out] have n:m along an axis that is not contiguous in the file.
    stored = None if layer.separate and layer.axes == (2, 1) else pattern
    return PackedLayer(shape, layer.axes == (1, 0), str(stored or Unstructured.kind), dtype)


class Packer:
    """Packs the tensors of a pruned model's files that become smaller; the model may be on the meta device."""

    def __init__(self, model: nn.Module):
        self.model, self.layers = model, packed_weights(model)
        self.packed = 0  # number of weights
        self.keeps_rows: dict[Any, bool] = {}  # pattern and shape of merged weights → `Target.keeps_rows`

    def pack(self, tensors: Tensors) -> tuple[Tensors, Layers]:
        """Pack the pruned weights among the tensors of a file, in place, and return an entry for each."""
        stored = list(tensors)
        names, merged = parameter_names(self.model, stored), merged_weights(self.model, stored)
        entries: Layers = {}
        for name in stored:
            tensor = tensors[name]
            layer = self._of_expert(merged[name], tensor) if name in merged else self.layers.get(names.get(name, ""))
            if layer is None or layer.shape != tuple(tensor.shape) or layer.stored_bytes(tensor) == tensor.nbytes:
                continue
            del tensors[name]
            entries[name] = replace(layer, dtype=dtype_name(tensor.dtype))
            with error_context(names.get(name, name)):
                tensors |= layer.pack(name, tensor)
        self.packed += len(entries)
        return tensors, entries

    def _of_expert(self, merged: Target, tensor: Tensor) -> PackedLayer | None:
        """The entry of a stored weight that is merged into a fused parameter; None if the parameter is not pruned."""
        fused = self.layers.get(merged.weight)
        if fused is None or tensor.ndim < 2:
            return None
        key = merged.pattern, tuple(tensor.shape)
        if key not in self.keeps_rows:
            self.keeps_rows[key] = merged.keeps_rows(self.model, tensor.shape)
        alone = replace(fused, shape=tuple(tensor.shape), stacked=fused.stacked and tensor.ndim == 3)
        fits = self.keeps_rows[key] and (alone.nm is None or alone.nm.fits(alone.matrix))
        alone = alone if fits else replace(alone, pattern=Unstructured.kind)
        if self.keeps_rows[key]:
            return alone
        # The groups of a grid consist of consecutive inputs of a row.
        return replace(alone, format=PackedLayer.format, transposed=False, stacked=False)

    def check(self) -> None:
        """Raise `MoonshotError` if nothing was packed."""
        hint = "use format='dense'"
        require(self.packed > 0, "packing makes no layer smaller", field="format", value="packed", hint=hint)


def pack_files(source: Path, target: Path, model: nn.Module) -> None:
    """Pack the pruned weights of a dense checkpoint that become smaller, and write config.json with the format.

    The model may be on the meta device. If source and target are one folder, the dense files are deleted.
    `MoonshotError` names a layer that is not n:m, or no longer on its grid.
    """
    packer = Packer(model)
    rewrite(Checkpoint(source), target, lambda tensors, _: packer.pack(tensors), packed=True)
    packer.check()


def unpack_files(source: Path, target: Path) -> None:
    """Unpack files that passed `Checkpoint.check_files` into another folder; the inverse of `pack_files`."""

    def change(tensors: Tensors, layers: Layers) -> tuple[Tensors, Layers]:
        for name, layer in layers.items():
            with error_context(name):
                tensors[name] = layer.unpack(name, tensors)
            for stored in layer.names(name):
                del tensors[stored]
        return tensors, {}

    rewrite(Checkpoint(source), target, change, packed=False)


def rewrite(
    source: Checkpoint, target: Path, change: Change, packed: bool, entry: Mapping[str, Any] | None = None
) -> None:
    """Change the tensors of every weight file, one file in memory at a time, and write the index and config.json.

    Args:
        source: the checkpoint to read.
        target: existing folder; if it is the source's own, the files are replaced.
        change: function of the tensors and the packed layers of a file that returns the new ones.
        packed: whether the new files are packed.
        entry: `quantization_config` if the new files are not packed.
    """
    valid = isinstance(source.index.get("metadata", {}), dict)
    require(valid, f"{source.index_path} is damaged: its metadata is not an object")
    writer = _Writer(target, len(source.files), packed)
    for path in source.files:
        with StoredTensors([path]) as stored:
            tensors, layers = change(dict(stored), stored.layers)
            metadata = {key: value for key, value in stored.metadata.items() if key != METHOD} or {"format": "pt"}
        written = writer.write(tensors, layers, metadata)
        if path.parent == target and path != written:
            path.unlink()
    if target == source.folder:
        source.index_path.unlink(missing_ok=True)
    writer.finish(source.index)
    _write_config(source, target, config_entry() if packed else entry)


class _Writer:
    """Writes the weight files of a checkpoint one after another, and then their index."""

    def __init__(self, folder: Path, count: int, packed: bool):
        self.folder, self.count, self.packed = folder, count, packed
        self.names = iter(new_names(count, packed))
        self.weight_map: dict[str, str] = {}
        self.total = 0  # bytes of all tensors

    def write(self, tensors: Tensors, layers: Layers, metadata: dict[str, str]) -> Path:
        """Write the next file, with a description of its `layers` in a packed checkpoint, and return its path."""
        if self.packed:
            metadata = {**metadata, METHOD: Description.of(tensors, layers, self.count).to_json()}
        path = self.folder / next(self.names)
        partial = path.with_name(path.name + UNFINISHED)  # a file with this name may be mapped by the tensors
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, partial, metadata)
        if metadata:
            sort_metadata(partial)
        os.replace(partial, path)
        self.weight_map |= dict.fromkeys(tensors, path.name)
        self.total += sum(tensor.nbytes for tensor in tensors.values())
        return path

    def finish(self, index: dict[str, Any]) -> None:
        """Write the index, if the checkpoint has one, with the other entries of `index`."""
        if self.packed or self.count > 1:
            metadata = {**index.get("metadata", {}), "total_size": self.total}
            index = {**index, "metadata": metadata, "weight_map": dict(sorted(self.weight_map.items()))}
            write_json(Checkpoint(self.folder, self.packed).index_path, index)


def _write_config(source: Checkpoint, target: Path, entry: Mapping[str, Any] | None) -> None:
    """Write config.json with a `quantization_config`.

    Without this package, transformers raises an error for a packed checkpoint that names the package.
    """
    config = {name: value for name, value in source.config.items() if name not in ("quantization_config", EXPLICIT)}
    if entry is not None:
        config["quantization_config"] = entry
    if entry == config_entry():
        config[EXPLICIT] = _NOT_HERE
    write_json(target / "config.json", config)


def save_streamed(
    model: Any,
    folder: Path,
    packed: bool,
    unloaded: Mapping[Path, Sequence[str]] = {},
    max_shard_size: int | str = SHARD,
    **options: Any,
) -> None:
    """Write a `PreTrainedModel` that is offloaded or packed in memory, block by block, into an empty folder.

    transformers would write it dense, and fails to merge tensors of a block that are in different files. Here, a file
    contains whole blocks of up to `max_shard_size` dense bytes, or a larger one; the `unloaded` weights of other files
    are copied.
    """
    for name, value in options.items():
        supported = name == "save_original_format"
        require(supported, "not for a model that is offloaded or packed in memory", field=name, value=value)
    size = shard_bytes(max_shard_size)
    with warnings.catch_warnings(), without_transformers_bars():
        warnings.filterwarnings("ignore", "Attempting to save a model with offloaded modules")
        model.save_pretrained(folder, state_dict={})  # all files but the weights
    tie_again(model)
    files, packer = list(_divide(model, size)), Packer(model) if packed else None
    writer = _Writer(folder, len(files) + len(unloaded), packed)
    for visits in progress_bar(files, shown=True, desc="writing", unit="file"):
        tensors, layers = Tensors(), Layers()
        for visit, names in visits:  # packed before the next visit is onloaded
            visited = _onloaded(model, visit, names)
            if options.get("save_original_format", True):
                visited = revert_weight_conversion(model, visited)
            if packer is not None:
                visited, entries = packer.pack(visited)
                layers |= entries
            tensors |= visited
        writer.write(tensors, layers, {"format": "pt"})
    for path, names in unloaded.items():
        writer.write(read_tensors(path, names), Layers(), {"format": "pt"})
    if packer is not None:
        packer.check()
        _write_config(Checkpoint(folder), folder, config_entry())
    count = {"total_parameters": model.num_parameters()} if writer.count > 1 else {}  # as transformers writes it
    writer.finish({"metadata": count})


def shard_bytes(size: Any) -> int:
    """`max_shard_size` as a number; `MoonshotError` unless it is a number of bytes or text such as "5GB"."""
    try:
        require(isinstance(size, int | str) and not isinstance(size, bool), "")
        return convert_file_size_to_int(size)
    except ValueError:
        message = 'give a number of bytes, or "5GB"'
        raise MoonshotError(message, field="max_shard_size", value=size) from None


def _divide(model: Any, size: int) -> Iterator[Visits]:
    """All weights, tied ones once, divided into files of up to `size` bytes, or of one visit."""
    state = remove_tied_weights_from_state_dict(model.state_dict(), model)
    dropped = model._keys_to_ignore_on_save or ()
    bytes_of = {name: tensor.nbytes for name, tensor in state.items() if not any(fnmatch(name, key) for key in dropped)}
    visits: Visits = []
    free = 0
    for visit, names in by_visit(model, bytes_of):
        needed = sum(bytes_of[name] for name in names)
        if visits and needed > free:
            yield visits
            visits = []
        free = (free if visits else size) - needed
        visits.append((visit, names))
    yield visits


def _onloaded(model: nn.Module, visit: Visit, names: list[str]) -> Tensors:
    """Copies of the weights of a visit in host memory; no reference keeps the onloaded ones, here or in the caller."""
    with visit():
        state = model.state_dict()
        return {name: state[name].detach().to("cpu", copy=True) for name in names}


def check_reloads(model: PreTrainedModel, folder: Path) -> None:
    """Raise `MoonshotError` unless `from_pretrained` would find every weight of a `PreTrainedModel` in a folder.

    transformers itself compares the names and shapes, with tensors on the meta device, so that no weight is read. The
    packed weights count by their names in a dense checkpoint. If another tool has quantized the model, its own loader
    defines the names, and nothing is compared.
    """
    cls, checkpoint = type(model), Checkpoint(folder)
    if checkpoint.config.get("quantization_config") is not None and not checkpoint.packed:
        return
    config = type(model.config).from_pretrained(folder)
    for entry in ("quantization_config", EXPLICIT):
        vars(config).pop(entry, None)
    load: Any = PreTrainedModel.from_pretrained
    options = dict(device_map="meta", ignore_mismatched_sizes=True, output_loading_info=True)
    try:
        with _silent():
            # Not the class's own method, which may read other files.
            _, info = load.__func__(cls, None, config=config, state_dict=_meta_tensors(folder), **options)
    except Exception as error:  # of the class, or of transformers' conversions
        message = f"{cls.__name__}.from_pretrained could not load what would be saved: {type(error).__name__}"
        raise MoonshotError(f"{message}: {reason(error)}") from error
    hint = "if modules share it, declare that in the model's _tied_weights_keys"
    _require_none(info["missing_keys"], "would be missing in the files, and random in a loaded model", hint)
    _require_none(info["unexpected_keys"], "would be in a file, and missing in a loaded model")
    _require_none(info["mismatched_keys"], "would have another shape than config.json says")


def _require_none(names: Iterable[Any], problem: str, hint: str = "") -> None:
    texts = sorted(str(entry[0] if isinstance(entry, tuple) else entry) for entry in names)
    others = f" and {len(texts) - 3} others" if len(texts) > 3 else ""
    require(not texts, f"{', '.join(texts[:3])}{others} {problem}", hint=hint)


def _meta_tensors(folder: Path) -> Tensors:
    """The tensors of a checkpoint on the meta device, packed weights as in a dense one."""
    tensors = Tensors()
    for path in sorted(folder.glob("*.safetensors")):
        header = read_header(path)
        layers = described_layers(header.metadata)
        packed = {stored for name, layer in layers.items() for stored in layer.names(name)}
        shapes = {name: shape for name, shape in header.shapes.items() if name not in packed}
        shapes |= {name: layer.shape for name, layer in layers.items()}
        tensors |= {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    return tensors


@contextmanager
def _silent() -> Iterator[None]:
    """A context without progress bars and warnings of transformers."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with without_transformers_bars():
            yield
    finally:
        logging.set_verbosity(before)
