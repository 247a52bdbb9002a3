"""The weight files of a model whose blocks are elsewhere, or packed in memory: block after block.

transformers would write it densely, whatever the format, and takes apart what belongs together where a file ends in the
middle of a block. Here a file holds whole blocks, packed before it is written.
"""

import warnings
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from accelerate.utils import convert_file_size_to_int
from safetensors.torch import save_file
from torch import nn

from ..errors import MoonshotError, require
from ..model.layers import Visit, by_visit
from ..model.offload import tie_again
from ..progress import progress_bar, without_transformers_bars
from .packed_files import Packer, write_config, write_index
from .packed_format import METHOD, Description, Layers, Tensors
from .weight_files import new_names, sort_metadata

SHARD = "500MB"  # of dense weights in a file, where nothing else is asked for

Part = list[tuple[Visit, list[str]]]  # of `by_visit`


def save_streamed(model: Any, folder: Path, packed: bool, max_shard_size: int | str = SHARD, **options: Any) -> None:
    """What `save_pretrained` writes, and, of a packed checkpoint, what `pack_files` makes of it.

    Args:
        model: a `PreTrainedModel` with weights that come for a visit.
        folder: that exists, and is empty.
        packed: whether pruned layers are packed.
        max_shard_size: dense bytes in a file, such as "5GB"; a block that is larger has a file of its own.
        options: of the model's `save_pretrained`.

    Raises:
        MoonshotError: an option that cannot be kept, a layer that is not n:m, or none that packing makes smaller.
    """
    for name, value in options.items():
        known = name == "save_original_format"
        require(known, f"{name}={value!r}: not for a model that is offloaded or packed in memory")
    try:
        size = convert_file_size_to_int(max_shard_size)
    except ValueError:
        raise MoonshotError(f'max_shard_size={max_shard_size!r}: give a number of bytes, or "5GB"') from None
    with warnings.catch_warnings(), without_transformers_bars():
        warnings.filterwarnings("ignore", "Attempting to save a model with offloaded modules")  # a block at a time is
        model.save_pretrained(folder, state_dict={})  # everything but weights
    tie_again(model)
    parts, places, total = list(_parts(model, size)), dict[str, str](), 0
    packer = Packer(model) if packed else None
    files = list(zip(parts, new_names(len(parts), packed), strict=True))
    for part, name in progress_bar(files, shown=True, desc="writing", unit="file"):
        tensors: Tensors = {}
        layers: Layers = {}
        for visit in part:  # which is packed before the next one comes
            found = _stored(model, *visit, options.get("save_original_format", True))
            if packer is not None:
                found, packed_here = packer.pack(found)
                layers |= packed_here
            tensors |= found
        metadata = {"format": "pt"}
        if packer is not None:
            metadata[METHOD] = Description.of(tensors, layers, len(parts)).to_json()
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / name, metadata)
        sort_metadata(folder / name)
        places |= dict.fromkeys(tensors, name)
        total += sum(tensor.nbytes for tensor in tensors.values())
    if packer is not None:
        packer.check()
        write_config(folder, folder, packed)
    if packed or len(parts) > 1:
        known = {"total_parameters": model.num_parameters()} if len(parts) > 1 else {}  # as transformers has it
        write_index(folder, {"metadata": {**known, "total_size": total}}, places, packed)


def _parts(model: Any, size: int) -> Iterator[Part]:
    """All weights but tied ones, in parts of up to `size` bytes, or of one visit."""
    from transformers.modeling_utils import remove_tied_weights_from_state_dict  # after transformers' quantizers

    state = remove_tied_weights_from_state_dict(model.state_dict(), model)
    dropped = model._keys_to_ignore_on_save or ()
    bytes_of = {name: tensor.nbytes for name, tensor in state.items() if not any(fnmatch(name, key) for key in dropped)}
    part: Part = []
    room = 0
    for present, names in by_visit(model, bytes_of):
        needed = sum(bytes_of[name] for name in names)
        if part and needed > room:
            yield part
            part = []
        room = (room if part else size) - needed
        part.append((present, names))
    yield part


def _stored(model: nn.Module, present: Visit, names: list[str], original: bool) -> Tensors:
    """The weights of a visit in host memory, by the names that they have in files."""
    from transformers.core_model_loading import revert_weight_conversion

    with present():
        state = model.state_dict()
        tensors = {name: state[name].detach().to("cpu", copy=True) for name in names}
    return revert_weight_conversion(model, tensors) if original else tensors
