"""Reading of packed checkpoints in vLLM: unpacks the weights in its loader's stream of tensors.

So every model class of vLLM gets the names and shapes of a dense checkpoint, and merges q, k and v, transposes, shards
and skips weights as usual. One weight at a time is dense; vllm_linear.py packs each layer as soon as it is complete.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any

from torch import Tensor
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.weight_utils import download_safetensors_index_file_from_hf

from ..checkpoint.file_integrity import check_files, checksums_wanted
from ..checkpoint.packed_format import Description, Layers
from ..checkpoint.weight_files import PACKED_INDEX, read_header
from ..errors import MoonshotError, require
from .packed_stream import unpacked

_METHOD = "_get_weights_iterator"


def unpack_while_loading() -> None:
    """Make vLLM's loader unpack packed checkpoints, in this process; idempotent.

    Raises:
        MoonshotError: this release of vLLM has another loader.
    """
    read: Callable[..., Iterable[tuple[str, Tensor]]] | None = getattr(DefaultModelLoader, _METHOD, None)
    if read is None:
        raise MoonshotError("this vLLM has another loader", hint="install a release that docs/vllm.md lists")
    if getattr(read, "unpacks_moonshot", False):
        return

    @wraps(read)
    def read_unpacked(loader: DefaultModelLoader, source: Any) -> Iterator[tuple[str, Tensor]]:
        return unpacked(read(loader, source), lambda: _packed_layers(loader, source), source.prefix)

    vars(read_unpacked)["unpacks_moonshot"] = True
    setattr(DefaultModelLoader, _METHOD, read_unpacked)


def _packed_layers(loader: DefaultModelLoader, source: Any) -> Layers:
    """Verify the files that vLLM reads and return their packed weights; none for files of other programs.

    Raises:
        MoonshotError: they are damaged, or not the files of the checkpoint's index.
    """
    where = (source.model_or_path, source.subfolder, source.revision)
    path, files, *_ = loader._prepare_weights(*where, source.fall_back_to_pt, source.allow_patterns_overrides)
    folder, paths = Path(path), sorted(map(Path, files))
    described = [Description.read(read_header(path).metadata) for path in paths if path.suffix == ".safetensors"]
    ours = [description for description in described if description is not None]
    if not ours:
        return {}
    if not (folder / PACKED_INDEX).is_file():
        name, subfolder, revision = where
        download_safetensors_index_file_from_hf(
            name, PACKED_INDEX, loader.load_config.download_dir, subfolder=subfolder, revision=revision
        )
    checked = sorted(check_files(folder, True, checksums_wanted()))
    require(paths == checked, f"{folder}: vLLM would not load the files of the index, but {', '.join(map(str, paths))}")
    if loader.enable_weights_track is None:
        loader.enable_weights_track = True  # missing parameters are an error, as for a dense checkpoint
    return {name: layer for description in ours for name, layer in description.layers.items()}
