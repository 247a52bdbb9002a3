"""Properties of a model and of its configuration: positions, vocabulary, images or text, tokenizer and processor."""

import os
from collections.abc import Iterator, Mapping
from functools import reduce
from operator import getitem
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoProcessor, AutoTokenizer, PreTrainedConfig, PreTrainedModel

# Not from transformers itself: some releases hide it there where torchvision is missing.
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from ..errors import MoonshotError, reason, require
from .layer_kinds import find_layer

Edit = dict[str, int]  # field of a configuration ("text_config.ffn_dim" where it is nested) → new value
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


def max_positions(model: nn.Module) -> int | None:
    """The longest sequence that a model has positions for, in tokens; None if its configuration has no limit."""
    config = text_config(model)
    positions = getattr(config, "max_position_embeddings", None)
    return positions if isinstance(positions, int) and positions > 0 else None


def vocabulary_size(model: nn.Module) -> int:
    """The width of a language model's logits; 1 if the configuration has none."""
    return getattr(text_config(model), "vocab_size", None) or 1


def text_config(model: nn.Module) -> Any:
    """The configuration of a model's language model, which may be nested; None without one."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def text_setting(model: nn.Module, name: str) -> int:
    """A number in the configuration of the language model; 0 if it has none."""
    return getattr(text_config(model), name, None) or 0


def embedded_tokens(model: nn.Module) -> int | None:
    """Number of token embeddings of a model; None if it does not return them."""
    try:
        module: Any = model
        return module.get_input_embeddings().num_embeddings
    except (AttributeError, NotImplementedError):
        return None


def check_tokens(model: nn.Module, ids: Tensor, given_by: str) -> None:
    """Raise `MoonshotError` unless the ids, from the "tokenizer" or "input_ids", are integers with an embedding."""
    name, size = type(model).__name__, embedded_tokens(model)
    whole = not ids.is_floating_point() and not ids.is_complex() and ids.dtype != torch.bool
    require(whole, f"token ids are {ids.dtype}", field=given_by, hint="use integers")
    if size is None or not ids.numel():
        return
    low, high = int(ids.min()), int(ids.max())
    wrong = low if low < 0 else high
    message = f"token {wrong} is outside of the vocabulary of {name}, which has {size} tokens"
    require(low >= 0 and high < size, message, field=given_by, hint="use the tokenizer of the model")


def takes_images(model: nn.Module) -> bool:
    """Whether a model's main input is images: by its attribute, or as a plain module with convolutions."""
    main = getattr(model, "main_input_name", None)
    if main is not None:
        return main == "pixel_values"
    return any(layer is not None and layer.images for layer in map(find_layer, model.modules()))


def load_tokenizer(name_or_path: str | os.PathLike[str], **options: Any) -> Any:
    """A model's tokenizer; None if there is none, as for image models.

    `name_or_path` is a folder or a Hub repository; `options` are passed to `from_pretrained`, also in `load_processor`.
    Raises `MoonshotError` if the folder has a tokenizer that cannot be loaded.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(name_or_path, **options)
        # For a model without a tokenizer, transformers returns one of special tokens and at most two others.
        if len(tokenizer) <= len(tokenizer.all_special_tokens) + 2:
            raise ValueError("it has no vocabulary")
        return tokenizer
    except Exception as error:  # a damaged file fails anywhere in two libraries
        folder = os.path.join(name_or_path, options.get("subfolder", ""))
        names = [options["gguf_file"]] if "gguf_file" in options else TOKENIZER_FILES
        files = [name for name in names if os.path.isfile(os.path.join(folder, name))]
        if files:
            raise MoonshotError(
                f"{name_or_path}: its tokenizer ({', '.join(files)}) cannot be loaded ({reason(error)})",
                hint="repair or remove these files, and pass a tokenizer: MoonshotPruner(model, config, tokenizer)",
            ) from error
        if not isinstance(error, OSError | ValueError | KeyError | ImportError | TypeError):
            raise
        return None


def reads_images_and_text(model: nn.Module) -> bool:
    """Whether a model reads both, as vision–language models do."""
    modalities = getattr(model, "input_modalities", ())
    return not isinstance(modalities, str) and {"image", "text"} <= set(modalities)


def load_processor(model: nn.Module, name_or_path: str | os.PathLike[str], **options: Any) -> Any:
    """The processor of a model that reads images, or images and text; None for other models, or if there is none."""
    options.pop("gguf_file", None)  # which has none
    loaders: list[Any] = [AutoProcessor] if reads_images_and_text(model) else []
    loaders += [AutoImageProcessor] if takes_images(model) else []
    for loader in loaders:
        try:
            return loader.from_pretrained(name_or_path, **options)
        except (OSError, ValueError, KeyError, ImportError, TypeError):
            continue
    return None


def config_fields(config: PreTrainedConfig, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The fields of a configuration and its nested ones ("text_config.ffn_dim"), with their values."""
    for name, value in config.to_dict().items():
        inner = vars(config).get(name)  # some attributes raise an error in models with a configuration per layer
        if isinstance(inner, PreTrainedConfig):
            yield from config_fields(inner, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def whole_numbers(config: PreTrainedConfig) -> Iterator[tuple[str, int | None]]:
    """The fields of `config_fields` that are integers or None."""
    for name, value in config_fields(config):
        if value is None or type(value) is int:
            yield name, value


def edited(config: PreTrainedConfig, edit: Mapping[str, Any]) -> PreTrainedConfig:
    """A copy of the configuration with some fields changed, validated as if loaded from a file."""
    values = config.to_dict()
    for path, value in edit.items():
        *parents, name = path.split(".")
        reduce(getitem, parents, values)[name] = value
    return type(config).from_dict(values)


def on_meta_device(cls: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """A model without weights; a class may refuse its configuration with any exception."""
    with torch.device("meta"):
        return cls(config)


def last_line(error: Exception) -> str:
    """The last line of an error, which has the reason in errors of configurations."""
    return str(error).strip().rpartition("\n")[2].strip()
