"""A model without weights, from its configuration alone: what a plan looks at where the weights are not there."""

import os
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from ..errors import MoonshotError, check_path, reason
from .packed_files import model_class


def skeleton(name_or_config: Any, dtype: Any = None, **options: Any) -> nn.Module:
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
    cls = model_class(config)
    try:
        with torch.device("meta"):
            made = cls.from_config(config) if cls is AutoModelForCausalLM else cls(config)
    except Exception as error:  # a damaged config.json fails anywhere in the model's code
        raise MoonshotError(f"{name_or_config}: transformers cannot make its model ({reason(error)})") from error
    return made.to(kind).eval()


def _read(name: str | os.PathLike[str], options: dict[str, Any]) -> Any:
    try:
        return AutoConfig.from_pretrained(name, **options)
    except OSError:
        raise
    except Exception as error:  # another damaged file
        raise MoonshotError(f"{name}: its config.json cannot be read ({reason(error)})") from error
