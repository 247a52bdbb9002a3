"""What a model says of itself: positions, vocabulary, images or text, tokenizer and processor."""

import os
from typing import Any

from torch import nn
from transformers import AutoImageProcessor, AutoTokenizer

from .forms import find_form


def max_positions(model: nn.Module) -> int | None:
    """The longest sequence that a model has positions for, in tokens; None where its configuration names none."""
    config = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None)
    return positions if isinstance(positions, int) and positions > 0 else None


def vocabulary_size(model: nn.Module) -> int:
    """The width of a language model's logits; 1 where the configuration names none."""
    config = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return getattr(text, "vocab_size", None) or 1


def takes_images(model: nn.Module) -> bool:
    """Whether a model's main input is images: it says so, or it is a plain module with convolutions."""
    main = getattr(model, "main_input_name", None)
    if main is not None:
        return main == "pixel_values"
    return any(form is not None and form.images for form in map(find_form, model.modules()))


def load_tokenizer(name_or_path: str | os.PathLike, **options: Any) -> Any:
    """A model's tokenizer; None where there is none, as for image models: text calibration then says so."""
    try:
        return AutoTokenizer.from_pretrained(name_or_path, **options)
    except (OSError, ValueError, KeyError):
        return None


def load_processor(model: nn.Module, name_or_path: str | os.PathLike, **options: Any) -> Any:
    """The image processor that lies beside an image model; None for other models, or where there is none."""
    if not takes_images(model):
        return None
    try:
        return AutoImageProcessor.from_pretrained(name_or_path, **options)
    except (OSError, ValueError, KeyError, ImportError):
        return None  # calibration on images then says so
