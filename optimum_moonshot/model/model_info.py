"""What a model says of itself: positions, vocabulary, images or text, tokenizer and processor."""

import os
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoProcessor, AutoTokenizer

# Not from transformers itself: some releases hide it there where torchvision is missing.
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from ..errors import MoonshotError, reason, require
from .layer_adapters import find_adapter

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


def max_positions(model: nn.Module) -> int | None:
    """The longest sequence that a model has positions for, in tokens; None where its configuration names none."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None)
    return positions if isinstance(positions, int) and positions > 0 else None


def vocabulary_size(model: nn.Module) -> int:
    """The width of a language model's logits; 1 where the configuration names none."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return getattr(text, "vocab_size", None) or 1


def embedded_tokens(model: nn.Module) -> int | None:
    """How many token ids a model has embeddings for; None where it does not say where they are."""
    try:
        return model.get_input_embeddings().num_embeddings
    except (AttributeError, NotImplementedError):
        return None


def check_tokens(model: nn.Module, ids: Tensor, given_by: str) -> None:
    """Every token id is one that the model has an embedding for.

    Args:
        model: a language model.
        ids: of any shape.
        given_by: where they come from: "tokenizer" or "input_ids".

    Raises:
        MoonshotError: ids that are no whole numbers, or outside of the vocabulary.
    """
    name, size = type(model).__name__, embedded_tokens(model)
    whole = not ids.is_floating_point() and not ids.is_complex() and ids.dtype != torch.bool
    require(whole, f"{given_by}: token ids are {ids.dtype}, give whole numbers")
    if size is None or not ids.numel():
        return
    low, high = int(ids.min()), int(ids.max())
    wrong = low if low < 0 else high
    mend = f"{given_by}: it gives token {wrong}, {name} has {size}: use the tokenizer of the model"
    require(low >= 0 and high < size, mend)


def takes_images(model: nn.Module) -> bool:
    """Whether a model's main input is images: it says so, or it is a plain module with convolutions."""
    main = getattr(model, "main_input_name", None)
    if main is not None:
        return main == "pixel_values"
    return any(form is not None and form.images for form in map(find_adapter, model.modules()))


def load_tokenizer(name_or_path: str | os.PathLike[str], **options: Any) -> Any:
    """A model's tokenizer; None where there is none, as for image models: text calibration then says so.

    Args:
        name_or_path: of the model, a folder or a Hub repository.
        options: for `AutoTokenizer`, such as `trust_remote_code`.

    Raises:
        MoonshotError: one lies in the model's folder and cannot be loaded.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(name_or_path, **options)
        # transformers makes one up where a model has none.
        if len(tokenizer) <= len(tokenizer.all_special_tokens):
            raise ValueError("it has no vocabulary")
        return tokenizer
    except Exception as error:  # a damaged file fails anywhere in two libraries
        found = [name for name in TOKENIZER_FILES if os.path.isfile(os.path.join(name_or_path, name))]
        if found:
            raise MoonshotError(
                f"{name_or_path}: its tokenizer ({', '.join(found)}) cannot be loaded ({reason(error)}); mend these "
                "files, or remove them and give a tokenizer, MoonshotPruner(model, config, tokenizer)"
            ) from error
        if not isinstance(error, OSError | ValueError | KeyError | ImportError):
            raise
        return None


def reads_images_and_text(model: nn.Module) -> bool:
    """Whether a model reads both, as vision–language models do."""
    modalities = getattr(model, "input_modalities", ())
    return not isinstance(modalities, str) and {"image", "text"} <= set(modalities)


def load_processor(model: nn.Module, name_or_path: str | os.PathLike[str], **options: Any) -> Any:
    """The processor that lies beside a model which reads images: of images and text where it reads both.

    None for other models, or where there is none: calibration on images then says so.

    Args:
        model: which says what it reads.
        name_or_path: where it was loaded from, a folder or a Hub repository.
        options: for `from_pretrained`, such as `trust_remote_code`.
    """
    loaders = [AutoProcessor] if reads_images_and_text(model) else []
    for loader in [*loaders, AutoImageProcessor] if takes_images(model) else loaders:
        try:
            return loader.from_pretrained(name_or_path, **options)
        except (OSError, ValueError, KeyError, ImportError, TypeError):
            continue
    return None
