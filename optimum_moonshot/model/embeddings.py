"""The output of a model without a head: its embeddings, else its last hidden state, pooled as its checkpoint says.

`modules.json` of a sentence-transformers checkpoint lists what follows the model: `Pooling`, whose folder names the
mode, `Normalize`, and rarely others, such as `Dense`, which are ignored and reported.
"""

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HFValidationError, LocalEntryNotFoundError
from huggingface_hub.utils import validate_repo_id
from torch import Tensor, nn
from torch.nn import functional

from ..errors import NO_BACKWARD, MoonshotError, reason, require

MODULES = "modules.json"
# The modes in the order of their concatenation, by the field of older configurations.
MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pooling:
    """One vector per sample from its hidden states [T, D]; without modes, the hidden states are unchanged."""

    modes: tuple[str, ...] = ()  # concatenated
    normalized: bool = False
    ignored: tuple[str, ...] = ()  # modules after these, which are left out

    def __call__(self, hidden: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Pool hidden states.

        Args:
            hidden: [B, T, D], or [B, D] of a model that pools by itself.
            mask: bool [B, T], True where a token counts; None where all do.

        Returns:
            [B, D'] in float32 and None; without modes the arguments.
        """
        if not self.modes:
            return hidden, mask
        pooled = hidden.float()
        if pooled.ndim == 3:
            mask = torch.ones(pooled.shape[:2], dtype=torch.bool, device=pooled.device) if mask is None else mask
            pooled = torch.cat([_pooled(pooled, mask, mode) for mode in self.modes], 1)
        return functional.normalize(pooled, dim=1) if self.normalized else pooled, None

    def __str__(self) -> str:
        """The output for reports."""
        if not self.modes:
            return "output"
        more = f", without the {' and '.join(self.ignored)} that would follow" if self.ignored else ""
        return f"{' and '.join(self.modes)}-pooled{', normalized' * self.normalized} embedding{more}"


def _pooled(hidden: Tensor, mask: Tensor, mode: str) -> Tensor:
    """One mode of sentence-transformers: hidden states [B, T, D] and a bool mask [B, T] → [B, D]."""
    if mode == "max":
        return hidden.masked_fill(~mask[..., None], -torch.inf).max(1).values
    position = mask.cumsum(1) * mask  # 1 … n at the tokens that count
    count = mask.sum(1, keepdim=True)
    weights = {
        "cls": position == 1,
        "lasttoken": position == count,
        "mean": mask / count,
        "mean_sqrt_len_tokens": mask / count.sqrt(),
        "weightedmean": position / position.sum(1, keepdim=True),
    }[mode]
    weights = weights.masked_fill(~mask, 0).to(hidden)
    return torch.einsum("bt,btd->bd", weights, hidden.masked_fill(~mask[..., None], 0))


def find_pooling(model: nn.Module) -> Pooling:
    """The pooling of the checkpoint that a model was loaded from; none without `modules.json`.

    Raises:
        MoonshotError: a file that is damaged, or names a pooling mode that is unknown.
    """
    source = getattr(model, "name_or_path", "")
    modules = _read(model, MODULES)
    if modules is None:
        return Pooling()
    modes, normalized = tuple[str, ...](), False
    named = isinstance(modules, list) and all(isinstance(module, Mapping) for module in modules)
    require(named, f"{source}: {MODULES} is not a list of modules")
    for index, module in enumerate(modules):
        kind, path = str(module.get("type")).rpartition(".")[2], str(module.get("path", ""))
        if kind == "Pooling":
            require(not Path(path).is_absolute() and ".." not in Path(path).parts, f"{source}: {MODULES} names {path}")
            modes = _modes(_read(model, f"{path}/config.json"), f"{source}: {path}/config.json")
        elif kind == "Normalize":
            normalized = True
        elif kind not in ("Transformer", "Dropout"):
            rest = [str(ignored.get("type")).rpartition(".")[2] for ignored in modules[index:]]
            return Pooling(modes, normalized, tuple(rest))
    return Pooling(modes, normalized)


def _modes(values: Any, where: str) -> tuple[str, ...]:
    require(isinstance(values, Mapping), f"{where} is missing, or no pooling")
    given = values.get("pooling_mode") or [mode for field, mode in MODES.items() if values.get(field)] or "mean"
    modes = (given,) if isinstance(given, str) else tuple(given)
    wrong = [mode for mode in modes if mode not in MODES.values()]
    require(not wrong, f"{where}: unknown pooling mode {wrong[:1]}", hint=f"use one of {', '.join(MODES.values())}")
    return modes


def _read(model: nn.Module, name: str) -> Any:
    """A JSON file of the checkpoint that a model was loaded from; None without one."""
    source = getattr(model, "name_or_path", "")
    path = Path(source) / name if os.path.isdir(source) else _downloaded(model, source, name)
    if path is None or not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise MoonshotError(f"{path} cannot be read ({reason(error)})") from error


def _downloaded(model: nn.Module, source: str, name: str) -> Path | None:
    """A file of a repository on the Hub; None without one, or with a warning if the Hub cannot be reached."""
    revision = getattr(getattr(model, "config", None), "_commit_hash", None)
    try:
        validate_repo_id(source)
        return Path(hf_hub_download(source, name, revision=revision))
    except HFValidationError:
        return None
    except Exception as error:  # of the network
        if not isinstance(error, EntryNotFoundError) or isinstance(error, LocalEntryNotFoundError):
            _log.warning("%s of %s cannot be read, so its output is not pooled: %s", name, source, reason(error))
        return None


def output_values(model: nn.Module, output: Any) -> Tensor:
    """The embeddings in a model's output, [B, D], else its last hidden state, [B, T, D].

    Tensors of other shapes, such as feature maps, become [B, D].

    Raises:
        MoonshotError: the output has neither.
    """
    if isinstance(output, Tensor):
        values = [output]
    else:
        named: Mapping[str, Any] = output if isinstance(output, Mapping) else vars(output)
        values = [value for name, value in named.items() if name.endswith("_embeds") and isinstance(value, Tensor)]
        for name in ("last_hidden_state", "feature_maps", "logits"):
            value = named.get(name)
            values = values or ([value] if isinstance(value, Tensor) else list(value or ()))
    if not values:
        hint = f"load it with a head, give a loss, or {NO_BACKWARD}"
        raise MoonshotError(f"{type(model).__name__} returns neither logits nor hidden states", hint=hint)
    if len(values) > 1:
        return torch.cat([value.flatten(1) for value in values], 1)
    return values[0] if values[0].ndim in (2, 3) else values[0].flatten(1)
