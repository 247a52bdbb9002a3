"""Models without weights, from their configuration alone, and the class that a configuration names."""

import os
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from ..errors import MoonshotError, check_path, reason


def model_class(config: Any) -> type[Any]:
    """The transformers class that a configuration names; the causal language models' where it names none."""
    from transformers import PreTrainedModel  # after its quantizers, from which this package is imported

    names = getattr(config, "architectures", None)
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
    found = getattr(transformers, name, None)
    return found if isinstance(found, type) and issubclass(found, PreTrainedModel) else AutoModelForCausalLM


def empty_model(config: Any, **options: Any) -> Any:
    """The model of a configuration, on the meta device.

    Args:
        config: of transformers.
        options: for a class that is found by it, such as `trust_remote_code`.

    Raises:
        Exception: whatever the model's code raises: a damaged config.json fails anywhere in it.
    """
    cls = model_class(config)
    with torch.device("meta"):
        return cls.from_config(config, **options) if cls is AutoModelForCausalLM else cls(config)


def named_empty_model(name: Any, config: Any, **options: Any) -> Any:
    """As `empty_model`.

    Args:
        name: of the model, for the message.
        config, options: as there.

    Raises:
        MoonshotError: transformers cannot make it.
    """
    try:
        return empty_model(config, **options)
    except Exception as error:
        raise MoonshotError(f"{name}: transformers cannot make its model ({reason(error)})") from error


def meta_device_model(name_or_config: Any, dtype: Any = None, **options: Any) -> nn.Module:
    """The model that a configuration names, on the meta device.

    Args:
        name_or_config: a Hub repository or a local folder with a config.json, or a configuration of transformers.
        dtype: of its weights; None and "auto" are what the configuration states, else float32.
        options: for `AutoConfig.from_pretrained`.

    Raises:
        MoonshotError: transformers cannot make it.
        OSError: there is no such model.
    """
    config = name_or_config
    if not isinstance(config, PretrainedConfig):
        check_path("name_or_config", name_or_config)
        config = _read(name_or_config, options)
    kind = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    kind = kind or getattr(config, "dtype", None) or torch.float32
    return named_empty_model(name_or_config, config).to(kind).eval()


def _read(name: str | os.PathLike[str], options: dict[str, Any]) -> Any:
    try:
        return AutoConfig.from_pretrained(name, **options)
    except OSError:
        raise
    except Exception as error:  # another damaged file
        raise MoonshotError(f"{name}: its config.json cannot be read ({reason(error)})") from error
