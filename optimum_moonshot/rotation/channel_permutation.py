"""The orders of neurons that let n:m remove little, found once the rotations are learned.

An order of the neurons changes one matrix's part of the objective, that of the layer which reads them. What rotations
reach needs none: they hold every order of the stream and of a head's coordinates.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch

from .exchange import best_order, competing
from .learning import Learned, rotations
from .objective import Group, Matrix, Objective, removed, rotated_diagonal, scores
from .spaces import Space


@torch.no_grad()
def order_neurons(
    objective: Objective,
    spaces: Sequence[Space],
    state: Learned,
    step_done: Callable[[Learned], None] = lambda state: None,
) -> None:
    """Find the orders that the state lacks, in the basis that it has come to.

    Args:
        objective: of the model, as it was learned by.
        spaces: of the model. Those that may be permuted get an order.
        state: at the end of learning; it gets the orders, and what they gain.
        step_done: called after every layer with the state.
    """
    found = rotations(spaces, state)
    leaves = {space: change.float() for space, change in found.items() if not space.permuted}
    for space, group, matrix, weight, block in _readers(objective, spaces):
        if space.name in state.orders:
            continue
        with block:
            device = matrix.layer.parameter.device
            diagonal = rotated_diagonal(group.inverse.to(device), None)
            turned = {each: change.to(device) for each, change in leaves.items()}
            patterns = competing(matrix.patterns)
            # Some rows or columns may stand for all in the objective. An order that is chosen by some rows is worth
            # nothing to the others, which have large weights elsewhere.
            part = weight * float(removed(scores(group, matrix, diagonal, turned), patterns))
            whole = scores(group, replace(matrix, rows=None, columns=None), diagonal, turned)
        order = best_order(whole, patterns)
        before, after = (float(removed(each, patterns)) for each in (whole, whole[:, order.to(device)]))
        share = max(0.0, 1 - after / before) if before > 0 else 0.0
        state.orders[space.name] = order[None]
        state.gains[space.name] = part * share * len(patterns) / len(matrix.patterns)
        step_done(state)


def _readers(
    objective: Objective, spaces: Sequence[Space]
) -> Iterator[tuple[Space, Group, Matrix, float, AbstractContextManager[None]]]:
    """The matrices whose columns may be permuted, with their weights in the objective and the block's presence."""
    by_parameter = {
        id(place.at.parameter): space
        for space in spaces
        if space.permuted
        for place in space.places
        if place.index is None
    }
    for block, groups in objective.blocks:
        for group in groups:
            for matrix, weight in zip(group.matrices, group.weights, strict=True):
                space = by_parameter.get(id(matrix.layer.parameter))
                if space is not None and group.reads is None and competing(matrix.patterns):
                    yield space, group, matrix, weight, block.onloaded() if block else nullcontext()
