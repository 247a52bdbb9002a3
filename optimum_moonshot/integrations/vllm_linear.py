"""Packed checkpoints in vLLM: its loader unpacks their weights, and its layers pack them again.

Weights are unpacked in the loader's stream of tensors, so that every model class of vLLM gets the names and shapes of a
dense checkpoint, and merges q, k and v, transposes, shards and skips weights as usual. One weight at a time is dense:
each layer packs its weights as soon as they are complete.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import LinearMethodBase, UnquantizedLinearMethod
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info, initialize_online_processing
from vllm.model_executor.model_loader.weight_utils import download_safetensors_index_file_from_hf

from ..checkpoint.folder import Checkpoint, checksums_wanted
from ..checkpoint.weight_files import METHOD, PACKED_INDEX, Layers, described_layers, read_header
from ..devices import trim_host_memory
from ..errors import MoonshotError, error_context, require
from ..objective.grid import Grid
from ..packing import INPUTS, Quantized
from ..runtime.packed_module import Packed, PackedMatrix, pack_if_smaller, packed_parts
from .conversion import unpacked

_log = init_logger(f"vllm.{__name__}")  # vLLM shows only loggers under its own name
_WEIGHT = "weight"
_READ = "_get_weights_iterator"
DONE = "_already_called_process_weights_after_loading"  # vLLM removes it when it reloads a layer


def unpack_while_loading() -> None:
    """Make vLLM's loader unpack packed checkpoints, in this process; idempotent."""
    read: Callable[..., Iterable[tuple[str, Tensor]]] | None = getattr(DefaultModelLoader, _READ, None)
    if read is None:
        raise MoonshotError("this vLLM has another loader", hint="install a release that docs/run.md lists")
    if getattr(read, "unpacks_moonshot", False):
        return

    @wraps(read)
    def read_unpacked(loader: DefaultModelLoader, source: Any) -> Iterator[tuple[str, Tensor]]:
        return unpacked(read(loader, source), lambda: _packed_layers(loader, source), source.prefix)

    vars(read_unpacked)["unpacks_moonshot"] = True
    setattr(DefaultModelLoader, _READ, read_unpacked)


def _packed_layers(loader: DefaultModelLoader, source: Any) -> Layers:
    """Verify the files that vLLM reads, and return their packed weights; empty for files of other programs."""
    where = (source.model_or_path, source.subfolder, source.revision)
    path, files, *_ = loader._prepare_weights(*where, source.fall_back_to_pt, source.allow_patterns_overrides)
    folder, paths = Path(path), sorted(map(Path, files))
    metadata = [read_header(path).metadata for path in paths if path.suffix == ".safetensors"]
    layers = {name: layer for entries in metadata for name, layer in described_layers(entries).items()}
    if not any(METHOD in entries for entries in metadata):
        return {}
    if not (folder / PACKED_INDEX).is_file():
        name, subfolder, revision = where
        download_safetensors_index_file_from_hf(
            name, PACKED_INDEX, loader.load_config.download_dir, subfolder=subfolder, revision=revision
        )
    checkpoint = Checkpoint(folder, packed=True)
    checkpoint.check_files(checksums_wanted())
    require(
        paths == sorted(checkpoint.files),
        f"{folder}: vLLM would not load the files of the index, but {', '.join(map(str, paths))}",
    )
    if loader.enable_weights_track is None:
        loader.enable_weights_track = True  # missing parameters are an error, like in a dense checkpoint
    return layers


@dataclass
class Tally:
    """Packs the weights of a model's layers of one kind, and counts them for vLLM's log."""

    kind: str
    grids: Sequence[Grid] = ()  # of the checkpoint, in any dtype; empty if it is not quantized
    inputs: str = INPUTS[0]  # for products with integer codes, one of `INPUTS`
    codes: int = 0  # weights that are integer codes
    values: list[str] = field(default_factory=list)  # names of the other weights
    packed: int = 0
    dense: int = 0
    bytes: int = 0  # of the weights in memory
    dense_bytes: int = 0  # of the same weights, dense
    reported: bool = False

    def pack(self, name: str, matrix: Tensor) -> Packed | None:
        """Pack a weight [d_out, d_in], as integer codes if it is on a grid; None if that does not make it smaller.

        Args:
            name: the weight's name, for the log.
            matrix: the weight, or its shard in this process.
        """
        packed = pack_if_smaller(matrix, self.grids)
        if packed is None or not isinstance(packed.codec, Quantized):
            self.values.append(f"{name} in {str(matrix.dtype).removeprefix('torch.')}")
            return packed
        self.codes += 1
        return packed._replace(codec=packed.codec.with_inputs(self.inputs))

    def add(self, dense_bytes: int, packed_bytes: int | None = None) -> None:
        """Count a layer by the bytes of its weights; `packed_bytes` is None if it stays dense."""
        self.packed += packed_bytes is not None
        self.dense += packed_bytes is None
        self.bytes += dense_bytes if packed_bytes is None else packed_bytes
        self.dense_bytes += dense_bytes

    def report(self) -> None:
        """Log the counts once after loading, and release unused host memory."""
        if not self.reported:
            self.reported = True
            trim_host_memory()
            sizes = f"{self.bytes / 2**20:.1f} MiB in place of {self.dense_bytes / 2**20:.1f}"
            _log.info("%d %s are packed in memory, %d dense: %s", self.packed, self.kind, self.dense, sizes)
            if self.grids:
                self._report_codes()

    def _report_codes(self) -> None:
        log = _log.info if self.codes else _log.warning
        total = self.codes + len(self.values)
        log("%d of %d weights of %s are integer codes, for %s inputs", self.codes, total, self.kind, self.inputs)
        if self.values:
            grids = " or ".join(f"{grid.bits} bits with groups of {grid.group}" for grid in self.grids)
            log("the others, such as %s, are not on a grid of %s", self.values[0], grids)


class PackingMethod:
    """Loads the dense weights of a vLLM layer, and packs them as soon as they are complete.

    vLLM allocates a dense weight when all of its parts have been read, like a weight that it quantizes online. Each
    process packs its shard. A weight that is not smaller when packed stays dense.
    """

    uses_meta_device = True
    dense: Any  # vLLM's method for dense weights

    def set_up(self, prefix: str, tally: Tally) -> None:
        """Initialize the method of the layer with the name `prefix` in the model."""
        self.prefix, self.tally = prefix, tally
        self.random = get_current_vllm_config().load_config.load_format == "dummy"
        self.packed: dict[str, PackedMatrix] = {}  # the packed weights, by name
        self.plans: dict[str, Any] = {}

    def create_weights(self, layer: Any, *sizes: Any, **attributes: Any) -> None:
        with torch.device("meta"):
            self.dense.create_weights(layer, *sizes, **attributes)
        initialize_online_processing(layer)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Pack the weights; vLLM calls this when the layer is complete, and again when all layers are."""
        if getattr(layer, DONE, False):
            self.tally.report()
            return
        setattr(layer, DONE, True)
        with error_context(self.prefix):
            # A captured graph would keep the old plan.
            require(not self.packed, "it is packed and cannot be reloaded", hint="create a new engine")
            read, total = get_layerwise_info(layer).load_numel, self.count_weights(layer)
            require(self.random or read >= total, f"only {read} of its {total} weights were read from the files")
        self.pack(layer)

    def count_weights(self, layer: Any) -> int:
        """Return the number of weights that must be read from the files."""
        raise NotImplementedError

    def pack(self, layer: Any) -> None:
        """Pack the complete weights of a layer, and count them."""
        raise NotImplementedError

    def pack_weight(self, layer: Any, weight: str, matrix: Tensor, name: str) -> int:
        """Pack a weight of a layer, and return its bytes in memory.

        Args:
            layer: a layer of vLLM.
            weight: the parameter's name in the layer.
            matrix: the parameter as a matrix, or as a stack of matrices, [d_out, d_in].
            name: the weight's name in the model, for the log.
        """
        packed = self.tally.pack(name, matrix)
        if packed is None:
            return matrix.nbytes
        delattr(layer, weight)
        for suffix, stored in packed.codec.names(weight).items():
            part = packed.parts[suffix].to(matrix.device)
            layer.register_parameter(stored, nn.Parameter(part, requires_grad=False))
        parts, shape = packed_parts(layer, packed.codec, weight), (matrix.shape[0], matrix.shape[1])
        self.packed[weight] = PackedMatrix(packed.codec, shape)
        self.plans[weight] = packed.codec.plan(parts, shape)
        return sum(part.nbytes for part in parts.values())


class PackedLinearMethod(PackingMethod, LinearMethodBase):
    """The quantization method of a linear layer in vLLM."""

    def __init__(self, prefix: str, tally: Tally):
        self.dense = UnquantizedLinearMethod()
        self.set_up(prefix, tally)

    def count_weights(self, layer: Any) -> int:
        return int(layer.weight.numel())

    def pack(self, layer: Any) -> None:
        weight = layer.weight
        packed_bytes = self.pack_weight(layer, _WEIGHT, weight.data, self.prefix) if weight.ndim == 2 else 0
        self.tally.add(weight.nbytes, packed_bytes if self.packed else None)
        if not self.packed:
            self.dense.process_weights_after_loading(layer)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if not self.packed:
            outputs: Tensor = self.dense.apply(layer, x, bias)
            return outputs
        codec, shape = self.packed[_WEIGHT]
        return codec.linear(x, packed_parts(layer, codec), shape, bias, self.plans[_WEIGHT])
