"""What pruning would remove in a basis: the objective that a rotation is learned by, streamed over decoder layers.

For a matrix W in a rotated basis, with ``H = G + damping · mean diag G · I`` of its inputs,

    S_kj = w_kj² / [H⁻¹]_jj,    w → Lᵀ w R,    H⁻¹ → Rᵀ H⁻¹ R

is what removing a weight costs, as SparseGPT scores it (arXiv 2301.00774). The objective is the sum of the S that a
pattern removes: the smallest share of a matrix, or the smallest of every m; relative to the sum of all S of the matrix
as it was, and a mean over the matrices by their weights.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ..model.layers import Block, PrunableLayer
from ..objective.patterns import NM, Pattern, kth_smallest
from .basis import rotate_axis
from .spaces import Space

# The threshold of a share is taken from so many scores, evenly chosen, of a matrix that has more. The objective is
# stationary in the threshold, so that its error counts in the second order alone.
SAMPLED_SCORES = 2**17


class Coordinates(NamedTuple):
    """The coordinates of a space on an axis of a matrix [d_out, d_in]."""

    space: Space
    index: Tensor | None  # as `Place.index`


@dataclass(frozen=True, eq=False)
class Matrix:
    """A matrix that is going to be pruned."""

    layer: PrunableLayer
    patterns: tuple[Pattern, ...]  # by which; several weigh alike
    gives: tuple[Coordinates, ...]  # on its rows
    rows: Tensor | None = None  # int64: those that stand for all; None is all
    columns: Tensor | None = None  # the same of its columns


@dataclass(eq=False)
class Group:
    """Matrices that read the same inputs."""

    matrices: list[Matrix]
    reads: Coordinates | None  # on the columns of all
    inverse: Tensor  # of H: [d_in, d_in], its blocks [count, copies, width, width], or the diagonal [d_in]
    weights: list[float]  # of each matrix in the objective, divided by the sum of all its scores as it was


@dataclass(eq=False)
class Objective:
    """The groups of a model, by block; a block's weights are present while they are looked at."""

    blocks: list[tuple[Block | None, list[Group]]] = field(default_factory=list)
    moments: dict[str, Tensor] = field(default_factory=dict)  # of the spaces that may be scaled; see scaling.py

    @property
    def matrices(self) -> Iterator[Matrix]:
        for _, groups in self.blocks:
            for group in groups:
                yield from group.matrices

    @property
    def spaces(self) -> list[Space]:
        """Those that some matrix has coordinates of, in a fixed order."""
        found: dict[Space, None] = {}
        for _, groups in self.blocks:
            for group in groups:
                found |= dict.fromkeys([group.reads.space] if group.reads else [])
                found |= dict.fromkeys(each.space for matrix in group.matrices for each in matrix.writes)
        return list(found)

    def move(self, move: Callable[[Tensor], Tensor]) -> None:
        """Put all that is kept of the matrices' inputs elsewhere.

        Args:
            move: gives a tensor's copy, of any shape.
        """
        for _, groups in self.blocks:
            for group in groups:
                group.inverse = move(group.inverse)

    def value(self, rotations: Mapping[Space, Tensor]) -> float:
        """The objective, and its gradient added to that of the rotations that ask for one.

        Args:
            rotations: [count, width, width] in float32 of every space, leaves of the graph.
        """
        total = 0.0
        for block, groups in self.blocks:
            if block is None:
                total += sum(_group_value(group, rotations) for group in groups)
            else:
                with block.onloaded():
                    total += sum(_group_value(group, rotations) for group in groups)
        return total


def _group_value(group: Group, rotations: Mapping[Space, Tensor]) -> float:
    """Of one group; it goes backwards matrix by matrix, so that the graph of one alone is alive."""
    device = group.matrices[0].layer.parameter.device
    reads = None if group.reads is None else rotations[group.reads.space].to(device)
    found = torch.zeros((), device=device)
    with torch.set_grad_enabled(any(rotation.requires_grad for rotation in rotations.values())):
        diagonal = rotated_diagonal(group.inverse.to(device), reads)
        shared = diagonal.detach().requires_grad_(diagonal.requires_grad)
        for matrix, weight in zip(group.matrices, group.weights, strict=True):
            part = weight * removed(scores(group, matrix, shared, rotations), matrix.patterns)
            if part.requires_grad:
                torch.autograd.backward(part)
            found += part.detach()
        if shared.grad is not None:
            torch.autograd.backward(diagonal, shared.grad)
    return float(found)


def scores(group: Group, matrix: Matrix, diagonal: Tensor, rotations: Mapping[Space, Tensor]) -> Tensor:
    """S of a matrix, [rows, columns] of those that stand for all.

    Args:
        group: of the matrix.
        matrix: at its dense weight.
        diagonal: of H⁻¹ in the rotated basis, [d_in].
        rotations: of every space.
    """
    weight = matrix.layer.matrix.detach().float()
    weight = weight if matrix.rows is None else weight[matrix.rows.to(weight.device)]
    if matrix.columns is not None:
        columns = matrix.columns.to(weight.device)
        weight, diagonal = weight[:, columns], diagonal[columns]
    if group.reads is not None:
        weight = rotate_axis(weight, 1, group.reads.index, rotations[group.reads.space].to(weight))
    for coordinates in matrix.writes:
        weight = rotate_axis(weight, 0, coordinates.index, rotations[coordinates.space].to(weight))
    return weight.square() / diagonal


def rotated_diagonal(inverse: Tensor, rotation: Tensor | None) -> Tensor:
    """The diagonal [d_in] of ``Rᵀ H⁻¹ R``.

    Args:
        inverse: as `Group.inverse`.
        rotation: [count, width, width]; None where the inverse is given by its diagonal.
    """
    if rotation is None:
        return inverse
    blocks = inverse[None, None] if inverse.ndim == 2 else inverse
    turned = rotation[:, None]
    return (turned * (blocks @ turned)).sum(-2).flatten()


def removed(values: Tensor, patterns: Sequence[Pattern]) -> Tensor:
    """The sum of the scores that a pattern removes, a mean over patterns; differentiable.

    Args:
        values: S, [rows, columns].
        patterns: unstructured or n:m.
    """
    return sum((_removed(values, pattern) for pattern in patterns), values.new_zeros(())) / len(patterns)


def _removed(values: Tensor, pattern: Pattern) -> Tensor:
    if isinstance(pattern, NM):
        return _smallest_of_groups(values.reshape(-1, pattern.m), pattern.m - pattern.n)
    count = round(pattern.sparsity * values.numel())
    if count == 0:
        return values.new_zeros(())
    # Σ of the smallest = max over t of Σ min(S, t) - (size - count) · t, reached where t is the largest of them.
    some = _evenly(values.detach())
    place = min(len(some), max(1, round(count * len(some) / values.numel())))
    threshold = kth_smallest(some[None], place)[0, 0]
    return values.clamp(max=threshold).sum() - (values.numel() - count) * threshold


def _evenly(values: Tensor) -> Tensor:
    """At least `SAMPLED_SCORES` of the values [rows, columns], all where they are fewer, of every column alike."""
    stride = max(1, values.numel() // SAMPLED_SCORES)
    while math.gcd(stride, values.shape[1]) > 1:
        stride -= 1
    return values.flatten()[::stride]


def _smallest_of_groups(groups: Tensor, count: int) -> Tensor:
    """The sum of so many smallest of every row; by comparisons alone where a row is short."""
    size = groups.shape[1]
    if count == 0:
        return groups.new_zeros(())
    if count == 1:
        return groups.amin(1).sum()
    if count == size - 1:
        return groups.sum() - groups.amax(1).sum()
    if (count, size) == (2, 4):
        low, high = groups.view(-1, 2, 2).aminmax(dim=2)
        pairs = torch.stack([(low + high)[:, 0], (low + high)[:, 1], low.sum(1)])
        return pairs.amin(0).sum()
    return groups.topk(count, largest=False, sorted=False).values.sum()


def set_totals(objective: Objective, fisher: Mapping[str, float] | None) -> None:
    """Weigh every matrix, relative to the sum of its scores as it is.

    Args:
        objective: whose weights are set.
        fisher: layer → its absolute Fisher loss at W = 0; None weighs all alike.
    """
    names = [matrix.layer.name for matrix in objective.matrices]
    raw = {name: 1.0 if fisher is None else fisher[name] for name in names}
    whole = sum(raw.values())
    raw = raw if whole else dict.fromkeys(names, 1.0)
    whole = whole or float(len(names))
    identity: dict[Space, Tensor] = {
        space: torch.eye(space.width).expand(space.count, -1, -1) for space in objective.spaces
    }
    for block, groups in objective.blocks:
        for group in groups:
            with block.onloaded() if block else torch.no_grad():
                device = group.matrices[0].layer.parameter.device
                reads = None if group.reads is None else identity[group.reads.space].to(device)
                diagonal = rotated_diagonal(group.inverse.to(device), reads)
                totals = [float(scores(group, matrix, diagonal, identity).sum()) for matrix in group.matrices]
            group.weights = [
                raw[matrix.layer.name] / whole / total if total > 0 else 0.0
                for matrix, total in zip(group.matrices, totals, strict=True)
            ]


def sampled(count: int, most: int | None, together: int, generator: torch.Generator) -> Tensor | None:
    """Some of `count` rows or columns, at most `most` and a whole number of `together`; None for all.

    Args:
        count: how many there are.
        most: to choose.
        together: consecutive ones that stay together.
        generator: of the choice.
    """
    if most is None or count <= most or count % together:
        return None
    first = torch.randperm(count // together, generator=generator)[: max(1, most // together)].sort().values
    return (first[:, None] * together + torch.arange(together)).flatten()


def widest(patterns: Sequence[Pattern]) -> int:
    """How many consecutive inputs belong together in some of the patterns: their least common multiple."""
    sizes = [pattern.m for pattern in patterns if isinstance(pattern, NM)]
    return next(n for n in itertools.count(1) if all(n % size == 0 for size in sizes))
