"""Check, before a saved folder appears, that plain `from_pretrained` would load it completely."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from ..errors import MoonshotError, reason, require
from ..progress import without_transformers_bars
from .weight_files import EXPLICIT, Checkpoint, Tensors, described_layers, read_header


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
            # Not that of the class, which may read other files.
            _, info = load.__func__(cls, None, config=config, state_dict=_meta_tensors(folder), **options)
    except Exception as error:  # of the class, or of transformers' conversions
        message = f"{cls.__name__}.from_pretrained could not load what would be saved: {type(error).__name__}"
        raise MoonshotError(f"{message}: {reason(error)}") from error
    hint = "if modules share it, declare that in the model's _tied_weights_keys"
    _require_none(info["missing_keys"], "would be in no file, and random in a loaded model", hint)
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
    """No progress bars and warnings of transformers inside the block."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with without_transformers_bars():
            yield
    finally:
        logging.set_verbosity(before)
