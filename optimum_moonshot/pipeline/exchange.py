"""Results that several processes have found, each of some layers: afterwards all have all of them."""

from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import torch

from ..model.layers import PrunableLayer
from ..objective.loss_allocation import LossCurve
from ..reports.prune_report import LayerReport
from ..rotation.learning import Learned
from .inputs import Prepared
from .variant import Variant

Value = TypeVar("Value")


def share_results(prepared: Prepared, variants: Sequence[Variant], solved: Sequence[PrunableLayer]) -> int:
    """Give every process what others have solved since the last time.

    Of a layer that several have solved, the result of the first of them holds: all end with the same bits.

    Args:
        prepared: with the processes.
        variants: of the run, in the same order everywhere.
        solved: the layers of this process.

    Returns:
        How many more layers have their results.
    """
    ranks = prepared.ranks
    if ranks.size == 1:
        return 0
    mine = [
        (index, variant.store.reports[layer.name])
        for layer in solved
        for index, variant in enumerate(variants)
        if layer in variant.store
    ]
    layers = {layer.name: layer for layer in prepared.selection.layers}
    known: set[tuple[int, str]] = set()
    for rank, found in enumerate(ranks.all_gather_object(mine)):
        for index, report in found:
            if (index, report.name) not in known:
                known.add((index, report.name))
                _share(prepared, variants[index], layers[report.name], report, rank)
    return len({name for _, name in known}) - len(solved)


def _share(prepared: Prepared, variant: Variant, layer: PrunableLayer, report: LayerReport, rank: int) -> None:
    ranks = prepared.ranks
    own = variant.weight(layer) if ranks.rank == rank else None
    like = torch.empty(layer.shape, dtype=layer.parameter.dtype, device="meta")
    weight = ranks.broadcast(own, like, rank)
    if ranks.rank != rank:
        variant.store.put(report, weight)  # the seconds are another's


def share_curves(prepared: Prepared, variants: Sequence[Variant], found: list[tuple[int, str, LossCurve]]) -> None:
    """Give every process the curves that others have found since the last time.

    Args:
        prepared: with the processes.
        variants: of the run.
        found: by this process: for which variant, of which layer, and the curve.
    """
    ranks = prepared.ranks
    if ranks.size == 1:
        return
    for curves in reversed(ranks.all_gather_object(found)):  # of the first, where several have one
        for index, name, curve in curves:
            variants[index].store.put_curve(name, curve)


def share_recovered(prepared: Prepared, variant: Variant) -> None:
    """Give every process the blocks that the first one has recovered.

    Args:
        prepared: with the processes.
        variant: with all results.
    """
    ranks, store = prepared.ranks, variant.store
    if ranks.size == 1:
        return
    for block in prepared.selection.structure.blocks:
        report = ranks.broadcast_object(store.blocks.get(block.name))
        if report is None:
            continue
        inside = {id(parameter) for parameter in block.module.parameters()}
        layers = [layer for layer in variant.layers if id(layer.parameter) in inside]
        weights = {}
        for layer in layers:
            like = torch.empty(layer.shape, dtype=layer.parameter.dtype, device="meta")
            weights[layer.name] = ranks.broadcast(store.weight(layer) if ranks.is_main else None, like, 0)
        if not ranks.is_main:
            store.put_block(report, weights)


def learned_in_first(prepared: Prepared, learn: Callable[[], Learned | None]) -> Learned | None:
    """The state of a rotation that the first process learns or has stored, in all processes."""
    ranks = prepared.ranks
    state = learn() if ranks.is_main else None
    if ranks.size == 1:
        return state
    saved = ranks.broadcast_object(None if state is None else state.saved())
    return None if saved is None else Learned.load(*saved)


def broadcast_first(prepared: Prepared, work: Callable[[], Value]) -> Value:
    """The result of work that the first process does while the others wait, in all processes."""
    ranks = prepared.ranks
    return ranks.broadcast_object(cast(Value, work() if ranks.is_main else None))
