"""Load a dense model, offloaded if wanted, with its tokenizer and image processor."""

import inspect
import logging
import os
import warnings
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from ..errors import MoonshotError, check_choice, check_path, require
from ..model.model_info import load_processor, load_tokenizer
from ..model.offload import hold_weights
from .file_integrity import check_complete
from .hub import CHECKPOINT_OPTIONS, FILE_OPTIONS, find_checkpoint, repository
from .meta_model import PLACES, load_config, meta_device_model, model_class, offload_folder, offload_map
from .origin import Source, remember_source
from .weight_files import METHOD, Checkpoint


def load_dense(
    name_or_path: str | os.PathLike[str], options: dict[str, Any], offload: str | None, offload_dir: str | None
) -> tuple[Any, Any, Any]:
    """A model of the class that its configuration names, its tokenizer, and its image processor, each None without one.

    Raises:
        MoonshotError: the checkpoint lacks weights of the model, is damaged or quantized.
        OSError: there is no such model.
    """
    check_path("name_or_path", name_or_path)
    message = "from_pretrained returns a pruner"
    require("output_loading_info" not in options, message, field="output_loading_info")
    given = options.get("config")
    valid = given is None or isinstance(given, PretrainedConfig | str | os.PathLike)
    require(valid, "give a configuration of transformers, or its folder", field="config", value=given)
    asked, (name, options) = options, find_checkpoint(name_or_path, options)
    shared = {key: options[key] for key in CHECKPOINT_OPTIONS if key in options}
    message, hint = "not for a GGUF file", "save its model with transformers, and give that folder"
    require(offload != "disk" or "gguf_file" not in shared, message, field="offload", value=offload, hint=hint)
    model, info = _load(name, shared, options, offload, offload_dir)
    check_complete(info["missing_keys"], (), info["mismatched_keys"])
    if "gguf_file" in shared:
        model.name_or_path = model.config.name_or_path = repository(name_or_path)
    source, found = repository(name_or_path) if "gguf_file" in shared else name, {**asked, **options}
    remember_source(model, Source(source, {key: found[key] for key in FILE_OPTIONS if key in found}))
    if given is not None:
        shared["config"] = model.config
    return model, load_tokenizer(name, **shared), load_processor(model, name, **shared)


def load_meta(name_or_config: Any, offload: str | None, options: dict[str, Any]) -> nn.Module:
    """As `meta_device_model`, after a check of the place in which its blocks would be."""
    if offload is not None:
        check_choice("offload", offload, PLACES)
    return meta_device_model(name_or_config, **options)


def _load(
    name_or_path: str | os.PathLike[str],
    shared: dict[str, Any],
    options: dict[str, Any],
    offload: str | None,
    folder: str | None,
) -> tuple[Any, Any]:
    """A model and the loading info of transformers; `shared` are the options of the configuration."""
    quantized = None
    try:
        config = options.get("config")
        if not isinstance(config, PretrainedConfig):
            config = load_config(name_or_path if config is None else config, **shared)
        quantized = getattr(config, "quantization_config", None)
        options = {**_dequantizing(config, shared), **options}
        with ExitStack() as stack:
            if offload is not None:
                place = {"device_map": offload_map(config, offload, options.get("device_map"))}
                options = {**options, **place, "offload_folder": str(stack.enter_context(offload_folder(folder)))}
            with _without_offload_warning(), warnings.catch_warnings():
                warnings.filterwarnings("ignore", "You passed `quantization_config`")
                loaded = model_class(config).from_pretrained(name_or_path, output_loading_info=True, **options)
            hold_weights(loaded[0])
            weakref.finalize(loaded[0], stack.pop_all().close)
        return loaded
    except MoonshotError:
        raise
    except Exception as error:  # a damaged file, or a library that is missing, fails anywhere in transformers
        Checkpoint(Path(name_or_path, shared.get("subfolder", "")), packed=False).check_index()
        if isinstance(error, OSError):
            raise
        message = " ".join(str(error).split())[:300] or type(error).__name__
        if quantized is None:
            raise MoonshotError(f"{name_or_path}: cannot be loaded ({message})") from error
        method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized
        raise MoonshotError(
            f"{name_or_path}: its weights are quantized ({method}) and cannot be loaded ({message}); "
            "prune the model that they were made from"
        ) from error


def _dequantizing(config: Any, shared: dict[str, Any]) -> dict[str, Any]:
    """The options by which `from_pretrained` dequantizes the weights of a checkpoint, where transformers can.

    Without them, it depends on the machine whether FP8, MXFP4 and GGUF weights remain quantized.
    """
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING  # late: quantizers import this package

    entry: Any = {"quant_method": "gguf"} if "gguf_file" in shared else None
    for part in (config, config.get_text_config()):
        entry = entry or getattr(part, "quantization_config", None)
    method = entry.get("quant_method") if isinstance(entry, dict) else METHOD
    cls: Any = AUTO_QUANTIZATION_CONFIG_MAPPING.get(str(method))
    if cls is None or method == METHOD or "dequantize" not in inspect.signature(cls).parameters:
        return {}
    return {"quantization_config": cls.from_dict({**entry, "dequantize": True})}


@contextmanager
def _without_offload_warning() -> Iterator[None]:
    """Drop accelerate's warning that parameters are on the meta device, as offloading requires."""
    logger = logging.getLogger("accelerate.big_modeling")

    def keep(record: logging.LogRecord) -> bool:
        return "on the meta device because they were offloaded" not in record.getMessage()

    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)
