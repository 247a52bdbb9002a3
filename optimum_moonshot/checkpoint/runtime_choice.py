"""The choice between packed and dense weights in memory: obstacles, verdicts, and their entries in a model."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from ..model.layer_kinds import find_layer
from ..packing import PackedLayer, Verdict
from ..runtime.packed_layers import PackedEmbedding, PackedLinear, PackedMixture, lookup_obstacle, mixture_obstacle

PACKED, DENSE = "packed: ", "dense: "  # prefixes of a layer's entry in `model.moonshot_runtime`
_EMBEDDINGS = (nn.Embedding, PackedEmbedding)
_log = logging.getLogger(__name__)


def packing_obstacle(modules: Sequence[nn.Module], layer: PackedLayer) -> str | None:
    """The reason why the weight of one module, or of several that share it, cannot be packed in memory, if any.

    Only embeddings may share a weight, with each other and with heads.
    """
    embeds = layer.codec.looks_up and any(isinstance(module, nn.Embedding) for module in modules)
    alike = all(isinstance(module, nn.Embedding | nn.Linear) for module in modules)
    if len(modules) > 1 and not (embeds and alike):
        return "tied to another weight"
    return next((why for module in modules if (why := _obstacle(module, layer)) is not None), None)


def _obstacle(module: nn.Module, layer: PackedLayer) -> str | None:
    """Like `packing_obstacle`, for one of the modules."""
    if isinstance(module, nn.Embedding) and lookup_obstacle(module) is not None:
        return lookup_obstacle(module)
    adapter = find_layer(module)
    if adapter is not None and adapter.images:
        return f"{type(module).__name__} layers are multiplied dense"
    if adapter is None and not isinstance(module, PackedMixture | nn.Embedding):
        why = mixture_obstacle(module) if len(layer.shape) == 3 else f"{type(module).__name__} is multiplied dense"
        if why is not None:
            return why
    return "accelerate moves it in every call" if hasattr(module, "_hf_hook") else None


def packing_verdict(
    runtime: str,
    modules: Sequence[nn.Module],
    layer: PackedLayer,
    packed_bytes: int,
    dtype: torch.dtype,
    device: torch.device,
    inputs: str,
) -> Verdict:
    """Whether to pack a weight that can be packed: always, or for "auto" if it makes the product of one row faster.

    `packed_bytes`, `dtype` and `device` describe the weight of the modules in memory.
    """
    if runtime == "packed":
        return Verdict(True, "requested")
    module = next((module for module in modules if not isinstance(module, _EMBEDDINGS)), None)
    if module is None:
        return Verdict(True, "rows are looked up")
    count, single = matrices_of(module, layer)
    (d_out, d_in), codec = single.matrix, single.codec.with_inputs(inputs)
    ratio = packed_bytes // count / (d_out * d_in * dtype.itemsize)
    return codec.decoding(single.matrix, single.nm, ratio, dtype, device)


def runtime_entry(verdict: Verdict) -> str:
    """A layer's entry in `model.moonshot_runtime`."""
    return (PACKED if verdict.faster else DENSE) + verdict.why


def log_choices(runtime: str, chosen: Mapping[str, str], packed_bytes: int, dense_bytes: int) -> None:
    """Log the choices of "auto" and their reasons in one line.

    `chosen` has each pruned layer's entry in `model.moonshot_runtime`. The bytes are the sizes of
    the packed weights, packed and dense.
    """
    if runtime != "auto":
        return
    packed, dense = (
        Counter(entry.removeprefix(prefix) for entry in chosen.values() if entry.startswith(prefix))
        for prefix in (PACKED, DENSE)
    )
    sizes = f", {packed_bytes / 2**20:.1f} MiB in place of {dense_bytes / 2**20:.1f}"
    of = f" of {len(chosen)} layers"
    texts = [f"packed: {packed.total()}{of}{sizes} {_reasons(packed)}"] if packed else []
    if dense or not packed:
        texts.append(f"dense: {dense.total()}{'' if packed else of} {_reasons(dense)}")
    _log.warning("runtime='auto': %s", "; ".join(texts))


def _reasons(counts: Counter[str]) -> str:
    """The reasons, the most frequent first."""
    several = len(counts) > 1
    return f"({', '.join(f'{count} {why}' if several else why for why, count in counts.most_common())})"


def matrices_of(module: nn.Module, layer: PackedLayer) -> tuple[int, PackedLayer]:
    """The number of matrices of a weight that can be packed in memory, and the entry of one."""
    if find_layer(module) is not None or isinstance(module, (PackedLinear, *_EMBEDDINGS)):
        return 1, layer
    return layer.shape[0], layer.expert(cast(Any, module).is_transposed)
