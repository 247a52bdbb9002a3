"""Numbers that identify a model, for the resumption of a run and the comparison of processes.

Its weights are identified by sums. Its function also depends on code, on attributes of modules and on a caller's
functions, which cannot be compared: the outputs for a small sample are compared instead, up to rounding.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedConfig

from ..approximate import approximate
from ..data.batches import Batch, batch_size
from ..devices import preserved_random_state
from .calls import frozen, model_device, run_model, tolerance_of
from .layers import Block
from .losses import Loss, sample_losses

LOSSES = "losses"  # the name of a caller's losses among `function_values`
_CHUNK = 2**22  # numbers that are summed at a time
_NUMBERS = 64  # of each output that are compared
_NEUTRAL = ("_name_or_path", "transformers_version", "architectures", "use_cache")  # fields that change no function


def model_sums(model: nn.Module, blocks: Iterable[Block]) -> dict[str, str]:
    """The sums of all parameters and buffers of a model, by name; offloaded blocks are onloaded in turn."""
    sums: dict[str, str] = {}
    for block in blocks:
        with block.onloaded():
            sums |= block_sums(block)
    return sums | rest_sums(model, sums)


def model_parts(model: nn.Module, sums: Mapping[str, str]) -> dict[str, Mapping[str, str]]:
    """The weights of a model, by their sums, and its configuration, as parts of a run."""
    config = getattr(model, "config", None)
    values = config.to_dict() if isinstance(config, PreTrainedConfig) else {}
    fields = {name: json.dumps(value, default=str) for name, value in values.items() if name not in _NEUTRAL}
    return {"the model's configuration": fields, "the model": sums}


def model_function(model: nn.Module, batch: Batch, loss: Loss | None) -> dict[str, str]:
    """The `function_values` of a model, whose blocks are onloaded, for a batch on its device."""
    with frozen(model), torch.no_grad(), preserved_random_state(model_device(model)):
        torch.manual_seed(0)  # for models that draw random numbers
        return function_values(model, run_model(model, batch), batch, loss)


@torch.no_grad()
def function_values(model: nn.Module, output: Any, batch: Batch, loss: Loss | None = None) -> dict[str, str]:
    """Numbers of a model's output for the first sample of a batch, and of a caller's loss, which identify the function.

    Some numbers of each suffice: a change of the function changes nearly all of them.
    """
    leaves = [leaf for leaf in tree_leaves(getattr(output, "logits", output)) if isinstance(leaf, Tensor)]
    samples = batch_size(batch)
    values = {"outputs": [leaf[:1] if leaf.shape[:1] == (samples,) else leaf for leaf in leaves]}
    if loss is not None:
        values[LOSSES] = [sample_losses(model, output, batch, loss)]
    tolerance = tolerance_of(next(model.parameters()).dtype)
    return {
        name if index == 0 else f"{name} {index}": approximate(_spread_numbers(tensor), tolerance)
        for name, tensors in values.items()
        for index, tensor in enumerate(tensors)
        if tensor.is_floating_point() and tensor.numel()
    }


def _spread_numbers(tensor: Tensor) -> list[float]:
    """At most `_NUMBERS` of a tensor's numbers, evenly spread; 0 for those that are not finite."""
    indices = torch.linspace(0, tensor.numel() - 1, min(_NUMBERS, tensor.numel()), dtype=torch.float64)
    numbers = tensor.flatten()[indices.long().to(tensor.device)].double()
    return torch.nan_to_num(numbers, nan=0.0, posinf=0.0, neginf=0.0).tolist()


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
        chunk = rows[start : start + step].double()
        ramp = torch.linspace(1, 2, chunk.shape[1], dtype=torch.float64, device=chunk.device)
        factors = torch.arange(start + 1, start + len(chunk) + 1, dtype=torch.float64, device=chunk.device)
        first, second = first + chunk.sum().item(), second + ((chunk @ ramp) * factors).square().sum().item()
    return f"{tensor.dtype} {tuple(tensor.shape)} {first} {second}"


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    tensors = chain(module.named_parameters(), module.named_buffers())
    return ((name, tensor) for name, tensor in tensors if tensor.device.type != "meta" and not tensor.is_complex())
