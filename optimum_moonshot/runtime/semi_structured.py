"""2:4 tensors of torch, for the layers whose products are measured to be faster with them on the GPU."""

import logging
import time
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..devices import wait_for
from ..errors import check_whole, require

_log = logging.getLogger(__name__)
_REPEATS = 20


class PrunedLayer(Protocol):
    """The properties of a pruned layer that are used here: its pattern, such as "2:4", and d_out, d_in."""

    @property
    def pattern(self) -> str: ...

    @property
    def matrix(self) -> tuple[int, int]: ...


def use_semi_structured(
    model: nn.Module, batch_shape: tuple[int, int], layers: Mapping[str, PrunedLayer]
) -> dict[str, str]:
    """Convert 2:4 Linears to `SparseSemiStructuredTensor`s if that is measured to be faster; the others stay dense.

    Args:
        model: a pruned model, on its device.
        batch_shape: samples and tokens per forward pass of a layer.
        layers: the pruned layers, by the names of their weights.

    Returns:
        Pruned layer → its runtime and the reason, also stored as `model.moonshot_runtime`.
    """
    check_batch_shape(batch_shape)
    tokens, chosen = batch_shape[0] * batch_shape[1], {}
    for name, layer in layers.items():
        module = model.get_submodule(name.rpartition(".")[0])
        chosen[name.removesuffix(".weight")] = _choose(module, layer, tokens)
    model.moonshot_runtime = chosen  # type: ignore[assignment] # a module takes any attribute
    sparse = sum(reason.startswith("semi_structured") for reason in chosen.values())
    _log.warning("%d of %d layers run as 2:4 tensors at %d tokens", sparse, len(chosen), tokens)
    for reason in sorted({reason for reason in chosen.values() if reason.startswith("dense: ")}):
        _log.warning("%d layers stay dense: %s", list(chosen.values()).count(reason), reason.removeprefix("dense: "))
    return chosen


def check_batch_shape(batch_shape: tuple[int, int]) -> None:
    """Raise `MoonshotError` unless this is a pair of a number of samples and one of tokens."""
    pair = isinstance(batch_shape, tuple | list) and len(batch_shape) == 2
    require(pair, "give samples and tokens", field="batch_shape", value=batch_shape)
    for size in batch_shape:
        check_whole("batch_shape", size, 1)


def _choose(module: nn.Module, layer: PrunedLayer, tokens: int) -> str:
    reason = unsupported(module, layer)
    if reason:
        return f"dense: {reason}"
    assert isinstance(module, nn.Linear)
    sparse = torch.sparse.to_sparse_semi_structured(module.weight.detach().contiguous())
    inputs = torch.randn(tokens, layer.matrix[1], dtype=module.weight.dtype, device=module.weight.device)
    before, after = milliseconds(inputs, module.weight), milliseconds(inputs, sparse)
    if after >= before:
        return f"dense, measured {before:.3f} ms against {after:.3f} ms as 2:4"
    module.weight = nn.Parameter(sparse, requires_grad=False)
    return f"semi_structured, measured {after:.3f} ms against {before:.3f} ms dense"


def unsupported(module: nn.Module, layer: PrunedLayer) -> str | None:
    """The reason why torch has no 2:4 product for a layer on its device; None if it has one."""
    if layer.pattern not in ("2:4", "1:4", "1:2"):
        return f"its pattern {layer.pattern} is not 2:4"
    if type(module) is not nn.Linear:
        return f"it is a {type(module).__name__}, not a Linear"
    weight = module.weight
    if not weight.is_cuda:
        return f"torch has 2:4 products on NVIDIA GPUs only, the weight is on {weight.device}"
    major = torch.cuda.get_device_capability(weight.device)[0]
    fast = torch.backends.cusparselt.is_available()
    if major < 8 or (major >= 9 and not fast):
        return f"compute capability {major}.x needs {'cuSPARSELt' if major >= 9 else 'at least 8.0'} for 2:4 products"
    if weight.dtype not in (torch.bfloat16, torch.float16):
        return f"2:4 products are for bfloat16 and float16, the weight is {weight.dtype}"
    rows, columns = (16, 16) if fast else (32, 64)
    if weight.shape[0] % rows or weight.shape[1] % columns:
        return f"2:4 products need multiples of {rows}×{columns}, the weight is {weight.shape[0]}×{weight.shape[1]}"
    return None


@torch.no_grad()
def milliseconds(inputs: Tensor, weight: Tensor) -> float:
    """The median time of a forward pass of a Linear [d_out, d_in], dense or 2:4, for inputs [tokens, d_in]."""
    times = []
    for _ in range(_REPEATS + 3):
        wait_for(inputs.device)
        started = time.perf_counter()
        functional.linear(inputs, weight)
        wait_for(inputs.device)
        times.append(1000 * (time.perf_counter() - started))
    return sorted(times[3:])[_REPEATS // 2]
