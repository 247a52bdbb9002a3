"""Sums that identify the weights of a model, for the fingerprint of a run and the comparison of processes."""

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from .layers import Block

_CHUNK = 2**22  # numbers that are summed at a time
_NEUTRAL = (
    "_name_or_path",
    "transformers_version",
    "architectures",
    "use_cache",
)  # fields without an effect on weights


def model_sums(model: nn.Module, blocks: Iterable[Block]) -> dict[str, str]:
    """The sums of all parameters and buffers of a model, by name; offloaded blocks are onloaded in turn."""
    sums: dict[str, str] = {}
    for block in blocks:
        with block.onloaded():
            sums |= block_sums(block)
    return sums | rest_sums(model, sums)


def model_parts(model: nn.Module, sums: Mapping[str, str]) -> dict[str, Mapping[str, str]]:
    """The weights of a model, by their sums, and its configuration, as parts of a run's fingerprint."""
    config = getattr(model, "config", None)
    values = config.to_dict() if isinstance(config, PreTrainedConfig) else {}
    fields = {name: json.dumps(value, default=str) for name, value in values.items() if name not in _NEUTRAL}
    return {"the model's configuration": fields, "the model": sums}


def block_sums(block: Block) -> dict[str, str]:
    """The sums of a block, which is onloaded."""
    return {f"{block.name}.{name}": tensor_sums(tensor) for name, tensor in _tensors(block.module)}


def rest_sums(model: nn.Module, without: Iterable[str]) -> dict[str, str]:
    """The sums of a model's other parameters and buffers, which are onloaded."""
    without = frozenset(without)
    return {name: tensor_sums(tensor) for name, tensor in _tensors(model) if name not in without}


def tensor_sums(tensor: Tensor) -> str:
    """Dtype and shape of a tensor, and two sums over its values, one of which depends on their order."""
    first = second = 0.0
    rows = tensor.detach().reshape(1, -1) if tensor.ndim < 2 else tensor.detach().flatten(1)
    step = max(1, _CHUNK // max(1, rows.shape[1]))
    for start in range(0, len(rows), step):
        part = rows[start : start + step].double()
        ramp = torch.linspace(1, 2, part.shape[1], dtype=torch.float64, device=part.device)
        factors = torch.arange(start + 1, start + len(part) + 1, dtype=torch.float64, device=part.device)
        first, second = first + part.sum().item(), second + ((part @ ramp) * factors).square().sum().item()
    return f"{tensor.dtype} {tuple(tensor.shape)} {first} {second}"


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    tensors = chain(module.named_parameters(), module.named_buffers())
    return ((name, tensor) for name, tensor in tensors if tensor.device.type != "meta" and not tensor.is_complex())
