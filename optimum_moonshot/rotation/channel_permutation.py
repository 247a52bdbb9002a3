"""Channel permutations of neurons that minimise what n:m removes, computed after the rotations are learned.

A permutation of the neurons changes one term of the objective, that of the layer that reads them. The residual stream
and the coordinates of heads need none: their rotations include all permutations.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch

from .learning import Learned, rotations
from .objective import Group, Matrix, Objective, removed, rotated_diagonal, scores
from .permutation_search import best_permutation, competing
from .spaces import Space


@torch.no_grad()
def permute_channels(
    objective: Objective,
    spaces: Sequence[Space],
    state: Learned,
    step_done: Callable[[Learned], None] = lambda state: None,
) -> None:
    """Compute the permutations that the state does not yet contain, in its learned basis.

    Args:
        objective: of the model, as used for learning.
        spaces: of the model, including those that may be permuted.
        state: at the end of learning; stores the permutations and their gains.
        step_done: called with the state after every layer.
    """
    learned = rotations(spaces, state)
    leaves = {space: change.float() for space, change in learned.items() if not space.permuted}
    for space, group, matrix, weight, block in _readers(objective, spaces):
        if space.name in state.permutations:
            continue
        with block:
            device = matrix.layer.parameter.device
            diagonal = rotated_diagonal(group.inverse.to(device), None)
            rotated = {each: change.to(device) for each, change in leaves.items()}
            patterns = competing(matrix.patterns)
            # The objective may sample rows or columns, the search uses all: a permutation fitted to some rows gains
            # nothing in the others, whose large weights are in other columns.
            part = weight * float(removed(scores(group, matrix, diagonal, rotated), patterns))
            whole = scores(group, replace(matrix, rows=None, columns=None), diagonal, rotated)
        permutation = best_permutation(whole, patterns)
        before, after = (float(removed(each, patterns)) for each in (whole, whole[:, permutation.to(device)]))
        fraction = max(0.0, 1 - after / before) if before > 0 else 0.0
        state.permutations[space.name] = permutation[None]
        state.permutation_gains[space.name] = part * fraction * len(patterns) / len(matrix.patterns)
        step_done(state)


def _readers(
    objective: Objective, spaces: Sequence[Space]
) -> Iterator[tuple[Space, Group, Matrix, float, AbstractContextManager[None]]]:
    """The matrices whose columns may be permuted, with their weights in the objective and a context that onloads."""
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
