"""Runtimes, which hold the weights of pruned layers in memory for inference, and their selection."""

import logging
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..errors import check_choice
from ..packing import PackedLayer, Verdict

RUNTIMES = ("dense", "packed", "semi_structured", "auto")
PACKED, DENSE = "packed: ", "dense: "  # prefixes of a layer's entry in `model.moonshot_runtime`

_log = logging.getLogger(__name__)


def check_runtime(runtime: str, names: Sequence[str] = RUNTIMES) -> None:
    """Raise `MoonshotError` unless this is a runtime.

    Args:
        runtime: the caller's choice.
        names: the runtimes to choose from.
    """
    check_choice("runtime", runtime, names)


def wanted(runtime: str, layer: PackedLayer, packed_bytes: int, dtype: torch.dtype, device: torch.device) -> Verdict:
    """Decide whether a layer that can be packed is packed.

    Args:
        runtime: "packed": always; "auto": if the product with one row of inputs is faster.
        layer: the description of its weight.
        packed_bytes: size of the packed weight in memory.
        dtype: of the weight in memory.
        device: of the weight.
    """
    if runtime == "packed":
        return Verdict(True, "asked for")
    d_out, d_in = layer.matrix
    ratio = packed_bytes / (d_out * d_in * dtype.itemsize)
    return layer.codec.decoding(layer.matrix, layer.nm, ratio, dtype, device)


def said(verdict: Verdict) -> str:
    """Return a layer's entry in `model.moonshot_runtime`."""
    return (PACKED if verdict.faster else DENSE) + verdict.why


def held_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Return the total size of some tensors in bytes."""
    return sum(tensor.nbytes for tensor in tensors.values())


def tell(runtime: str, chosen: Mapping[str, str], packed_bytes: int, dense_bytes: int) -> None:
    """Log in one line the choices of "auto", and the reasons.

    Args:
        runtime: the caller's choice; only "auto" is logged.
        chosen: pruned layer → its entry in `model.moonshot_runtime`.
        packed_bytes: size of the packed weights.
        dense_bytes: size of the same weights, dense.
    """
    if runtime != "auto":
        return
    groups: dict[str, int] = {}
    for entry in chosen.values():
        groups[entry] = groups.get(entry, 0) + 1
    packed = {entry.removeprefix(PACKED): count for entry, count in groups.items() if entry.startswith(PACKED)}
    dense = {entry.removeprefix(DENSE): count for entry, count in groups.items() if entry.startswith(DENSE)}
    count, of = sum(packed.values()), f"of {len(chosen)} layers"
    parts = [_reasons(f"dense: {sum(dense.values())} {of}" if not packed else f"dense: {sum(dense.values())}", dense)]
    if packed:
        sizes = f"{packed_bytes / 2**20:.1f} MiB in place of {dense_bytes / 2**20:.1f}"
        parts = [_reasons(f"packed: {count} {of}, {sizes}", packed), *(parts if dense else [])]
    _log.warning("runtime='auto': %s", "; ".join(parts))


def _reasons(text: str, counts: Mapping[str, int]) -> str:
    """Append the reasons to a count, the most frequent first."""
    several = len(counts) > 1
    ordered = sorted(counts, key=lambda reason: -counts[reason])
    return f"{text} ({', '.join(f'{counts[why]} {why}' if several else why for why in ordered)})"
