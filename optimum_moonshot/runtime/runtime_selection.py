"""How pruned layers are held in memory for inference: the names of the ways, what speaks for one, and what is said."""

import logging
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..errors import require
from ..packing import PackedLayer, Verdict

RUNTIMES = ("dense", "packed", "semi_structured", "auto")
PACKED, DENSE = "packed: ", "dense: "  # how what became of a layer begins

_log = logging.getLogger(__name__)


def check_runtime(runtime: str, names: Sequence[str] = RUNTIMES) -> None:
    """Raise `MoonshotError` unless this is a way to hold layers.

    Args:
        runtime: what the caller chose.
        names: of the ways that there are.
    """
    known = isinstance(runtime, str) and runtime in names
    require(known, f"runtime={runtime!r}: use one of {', '.join(names)}")


def wanted(runtime: str, layer: PackedLayer, packed_bytes: int, dtype: torch.dtype, device: torch.device) -> Verdict:
    """Whether a layer that can be packed shall be.

    Args:
        runtime: "packed": all that can be; "auto": what is multiplied faster so, by one row of inputs.
        layer: what is known of its weight.
        packed_bytes: that it takes in memory, packed.
        dtype: of the weight in memory.
        device: that it is on.
    """
    if runtime == "packed":
        return Verdict(True, "asked for")
    d_out, d_in = layer.matrix
    share = packed_bytes / (d_out * d_in * dtype.itemsize)
    return layer.codec.decoding(layer.matrix, layer.nm, share, dtype, device)


def said(verdict: Verdict) -> str:
    """What became of a layer, for `model.moonshot_runtime`."""
    return (PACKED if verdict.faster else DENSE) + verdict.why


def held_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Bytes of some tensors together."""
    return sum(tensor.nbytes for tensor in tensors.values())


def tell(runtime: str, chosen: Mapping[str, str], packed_bytes: int, dense_bytes: int) -> None:
    """Log in one line what "auto" chose, and why.

    Args:
        runtime: what the caller chose; nothing is said but for "auto".
        chosen: what became of every pruned layer.
        packed_bytes: of those that are packed.
        dense_bytes: of the same, dense.
    """
    if runtime != "auto":
        return
    groups: dict[str, int] = {}
    for what in chosen.values():
        groups[what] = groups.get(what, 0) + 1
    packed = {what.removeprefix(PACKED): count for what, count in groups.items() if what.startswith(PACKED)}
    dense = {what.removeprefix(DENSE): count for what, count in groups.items() if what.startswith(DENSE)}
    count, of = sum(packed.values()), f"of {len(chosen)} layers"
    told = [_reasons(f"dense: {sum(dense.values())} {of}" if not packed else f"dense: {sum(dense.values())}", dense)]
    if packed:
        sizes = f"{packed_bytes / 2**20:.1f} MiB in place of {dense_bytes / 2**20:.1f}"
        told = [_reasons(f"packed: {count} {of}, {sizes}", packed), *(told if dense else [])]
    _log.warning("runtime='auto': %s", "; ".join(told))


def _reasons(what: str, counts: Mapping[str, int]) -> str:
    """A count with its reasons, the most frequent first."""
    several = len(counts) > 1
    ordered = sorted(counts, key=lambda reason: -counts[reason])
    return f"{what} ({', '.join(f'{counts[why]} {why}' if several else why for why in ordered)})"
