"""The layers of a report by their kind, for tables and plots."""

import re

from .prune_report import LayerReport, PruneReport

PLOT_NAME = "moonshot_report.png"


def split_name(name: str) -> tuple[str, str]:
    """Split a layer's name into block and kind: "model.layers.3.mlp.up_proj" → "model.layers.3", "mlp.up_proj"."""
    match = re.match(r"(.*\.\d+)\.([^0-9]*[^.]*)$", name)
    return (match[1], match[2]) if match else ("", name)


def by_kind(report: PruneReport) -> dict[str, list[tuple[int, LayerReport]]]:
    """The layers of every kind, with the index of their block; layers outside of blocks have the last index.

    Kinds and layers are in the model's order.
    """
    blocks: dict[str, int] = {}
    for layer in report.layers:
        if split_name(layer.name)[0]:
            blocks.setdefault(split_name(layer.name)[0], len(blocks))
    kinds: dict[str, list[tuple[int, LayerReport]]] = {}
    for layer in report.layers:
        block, kind = split_name(layer.name)
        kinds.setdefault(kind, []).append((blocks.get(block, len(blocks)), layer))
    return kinds
