"""Runtimes, which hold the weights of pruned layers in memory for inference, and their selection."""

import logging
from collections import Counter
from collections.abc import Mapping

import torch

from ..packing import INPUTS, PackedLayer, Verdict

RUNTIMES = ("dense", "packed", "auto")
PACKED, DENSE = "packed: ", "dense: "  # prefixes of a layer's entry in `model.moonshot_runtime`

_log = logging.getLogger(__name__)


def packing_verdict(
    runtime: str,
    layer: PackedLayer,
    packed_bytes: int,
    dtype: torch.dtype,
    device: torch.device,
    inputs: str = INPUTS[0],
) -> Verdict:
    """Whether a layer that can be packed is packed: always, or for "auto" if one row of inputs takes less time so.

    `packed_bytes`, `dtype` and `device` are those of the weight in memory, `inputs` those of `load_pruned`.
    """
    if runtime == "packed":
        return Verdict(True, "requested")
    d_out, d_in = layer.matrix
    ratio = packed_bytes / (d_out * d_in * dtype.itemsize)
    return layer.codec.with_inputs(inputs).decoding(layer.matrix, layer.nm, ratio, dtype, device)


def runtime_entry(verdict: Verdict) -> str:
    """A layer's entry in `model.moonshot_runtime`."""
    return (PACKED if verdict.faster else DENSE) + verdict.why


def log_choices(runtime: str, chosen: Mapping[str, str], packed_bytes: int, dense_bytes: int) -> None:
    """Log the choices of "auto", and their reasons, in one line; other runtimes choose nothing.

    `chosen` has each pruned layer's entry in `model.moonshot_runtime`. The bytes are those of the packed weights and of
    the same weights, dense.
    """
    if runtime != "auto":
        return
    entries = chosen.values()
    packed = Counter(entry.removeprefix(PACKED) for entry in entries if entry.startswith(PACKED))
    dense = Counter(entry.removeprefix(DENSE) for entry in entries if entry.startswith(DENSE))
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
