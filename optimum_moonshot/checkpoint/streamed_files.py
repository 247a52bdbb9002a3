"""The weight files of a model whose blocks are elsewhere: block after block, a file at a time in memory.

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
from torch import Tensor, nn

from ..errors import MoonshotError, require
from ..model.layers import Visit, by_visit
from .packed_files import Packer, write_config, write_index
from .packed_format import METHOD, Description
from .weight_files import new_names, sort_metadata

SHARD = "500MB"  # of dense weights in a file, where nothing else is asked for: so much is in memory at once

Tensors = dict[str, Tensor]
Part = list[tuple[Visit, list[str]]]  # of `by_visit`


def save_streamed(model: Any, folder: Path, packed: bool, max_shard_size: int | str = SHARD, **options: Any) -> None:
    """What `save_pretrained` writes, and, of a packed checkpoint, what `pack_files` makes of it.

    Args:
        model: a `PreTrainedModel` whose blocks are elsewhere.
        folder: that exists, and is empty.
        packed: whether pruned layers are packed.
        max_shard_size: dense bytes in a file, such as "5GB"; a block that is larger has a file of its own.
        options: of the model's `save_pretrained`.

    Raises:
        MoonshotError: an option that cannot be kept, a layer that is not n:m, or none that packing makes smaller.
    """
    for name, value in options.items():
        require(name == "save_original_format", f"{name}={value!r}: not for a model that is offloaded")
    try:
        size = convert_file_size_to_int(max_shard_size)
    except ValueError:
        raise MoonshotError(f'max_shard_size={max_shard_size!r}: give a number of bytes, or "5GB"') from None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Attempting to save a model with offloaded modules")  # a block at a time is
        model.save_pretrained(folder, state_dict={})  # everything but weights
    parts, places, total = list(_parts(model, size)), dict[str, str](), 0
    packer = Packer(model) if packed else None
    for part, name in zip(parts, new_names(len(parts), packed), strict=True):
        tensors = _stored(model, part, options.get("save_original_format", True))
        metadata = {"format": "pt"}
        if packer is not None:
            tensors, layers = packer.pack(tensors)
            metadata[METHOD] = Description.of(tensors, layers, len(parts)).to_json()
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / name, metadata)
        sort_metadata(folder / name)
        places |= dict.fromkeys(tensors, name)
        total += sum(tensor.nbytes for tensor in tensors.values())
    if packer is not None:
        packer.check()
        write_config(folder, folder, packed)
    if packed or len(parts) > 1:
        count = model.num_parameters()
        write_index(folder, {"metadata": {"total_parameters": count, "total_size": total}}, places, packed)


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


def _stored(model: nn.Module, part: Part, original: bool) -> Tensors:
    """The weights of a part in host memory, by the names that they have in files."""
    from transformers.core_model_loading import revert_weight_conversion

    tensors: Tensors = {}
    for present, names in part:
        with present():
            state = model.state_dict()
            tensors |= {name: state[name].detach().to("cpu", copy=True) for name in names}
    return revert_weight_conversion(model, tensors) if original else tensors
