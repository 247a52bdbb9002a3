"""Models without weights, on the meta device, from their configuration."""

import os
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from ..errors import MoonshotError, check_path, reason


def model_class(config: Any) -> type[Any]:
    """The transformers class that a configuration names; `AutoModelForCausalLM` if it names none."""
    from transformers import PreTrainedModel  # imported late: transformers' quantizers import this package

    names = getattr(config, "architectures", None)
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
    cls = getattr(transformers, name, None)
    return cls if isinstance(cls, type) and issubclass(cls, PreTrainedModel) else AutoModelForCausalLM


def empty_model(config: Any, **options: Any) -> Any:
    """The model of a configuration, on the meta device.

    Args:
        config: of transformers.
        options: of `AutoModelForCausalLM.from_config`, such as `trust_remote_code`.

    Raises:
        Exception: any error of the model's code, for a damaged config.json.
    """
    cls = model_class(config)
    with torch.device("meta"):
        return cls.from_config(config, **options) if cls is AutoModelForCausalLM else cls(config)


def _empty_model(name: Any, config: Any, **options: Any) -> Any:
    """As `empty_model`, with `MoonshotError` for any error."""
    try:
        return empty_model(config, **options)
    except Exception as error:
        raise MoonshotError(f"{name}: transformers cannot create its model ({reason(error)})") from error


def read_model_config(folder: Path, **options: Any) -> Any:
    """Read the configuration of a checkpoint.

    Args:
        folder: of the checkpoint.
        options: for `AutoConfig`, such as `trust_remote_code`.

    Raises:
        MoonshotError: transformers cannot read it.
    """
    try:
        return AutoConfig.from_pretrained(folder, **options)
    except Exception as error:  # a damaged file can cause any error in the class that it names
        raise MoonshotError(f"{folder}: its model is unknown to transformers ({reason(error)})") from error


def checkpoint_meta_model(folder: Path, **options: Any) -> nn.Module:
    """The model of a checkpoint, on the meta device.

    Args:
        folder: of the checkpoint.
        options: for its classes, such as `trust_remote_code`.

    Raises:
        MoonshotError: transformers cannot create it.
    """
    return _empty_model(folder, read_model_config(folder, **options), **options)


def meta_device_model(name_or_config: Any, dtype: Any = None, **options: Any) -> nn.Module:
    """The model that a configuration names, on the meta device.

    Args:
        name_or_config: a Hub repository or a local folder with a config.json, or a configuration of transformers.
        dtype: of its weights; None and "auto": that of the configuration, or float32.
        options: for `AutoConfig.from_pretrained`.

    Raises:
        MoonshotError: transformers cannot create it.
        OSError: there is no such model.
    """
    config = name_or_config
    if not isinstance(config, PretrainedConfig):
        check_path("name_or_config", name_or_config)
        config = _read(name_or_config, options)
    kind = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    kind = kind or getattr(config, "dtype", None) or torch.float32
    return _empty_model(name_or_config, config).to(kind).eval()


def _read(name: str | os.PathLike[str], options: dict[str, Any]) -> Any:
    try:
        return AutoConfig.from_pretrained(name, **options)
    except OSError:
        raise
    except Exception as error:
        raise MoonshotError(f"{name}: its config.json cannot be read ({reason(error)})") from error
