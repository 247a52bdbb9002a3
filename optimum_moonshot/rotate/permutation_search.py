"""Channel permutations of neurons for n:m, by greedy exchanges of columns, after the rotations are learned.

A permutation of the neurons changes only the objective of the layer whose inputs they are. The residual stream and the
coordinates of heads are not permuted, because their rotations include all permutations.

n:m keeps the n largest scores of every m consecutive columns of a row. With column x at position p, and the other
columns unchanged, a group of m keeps

    T_p + Σ_rows max(q_p, x),    q_p the n-th largest score of the other columns in a row

A table of this sum for every position and column, added to its transpose, is therefore the gain of every exchange of
two columns. Exchanges between disjoint groups are independent. In every round, groups that prefer each other apply
their best exchange, until no exchange has a gain.

The table consists of L1 distances, ``max(q, x) = (q + x + |q - x|) / 2``. For a large matrix it is approximated by a
matrix product: ``max(q, x) = q + x - min(q, x)`` with ``min(q, x) ≈ Σ_k w_k a_k(q) a_k(x)`` and ``a_k(x) =
clamp((x - t_k) / w_k, 0, 1)``, which is exact if one of the edges ``t_k`` of the row is between q and x. The gain of an
exchange is recomputed exactly before it is applied.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import lcm

import torch
from torch import Tensor

from ..objective.patterns import NM, Pattern
from .learning import Learned, rotations
from .objective import Group, Matrix, Objective, competing, removed, rotated_diagonal, scores
from .spaces import Space

# The search stops after the first round with a smaller relative gain, or after this many rounds.
GAIN, ROUNDS = 1e-4, 200
# The edges of a row, denser at the large scores that decide the kept columns: the removed sum is ≤ 0.4% too large.
QUANTILES = (0.35, 0.6, 0.8, 0.92, 0.98, 1.0)
# Up to this many pairs of scores, distances are computed exactly, in about 0.2 s on one core.
EXACT = 2**28
# Scores expanded over the intervals at a time, to bound the memory.
SPREAD = 2**20
# Measured cost of a search: full tables per position of a group, and products per exact distance.
TABLES, DISTANCE = 1.6, 18


@torch.no_grad()
def permute_channels(
    objective: Objective,
    spaces: Sequence[Space],
    state: Learned,
    step_done: Callable[[Learned], None] = lambda state: None,
) -> None:
    """Add the missing permutations and their gains to a learned state; `step_done` is called after every layer."""
    learned = rotations(spaces, state)
    leaves = {space: change.float() for space, change in learned.items() if not space.permuted}
    for space, group, matrix, weight, block in _readers(objective, spaces):
        if space.name in state.permutations:
            continue
        with block:
            device = matrix.layer.parameter.device
            diagonal = rotated_diagonal(group.inverse.to(device), None)
            rotated = {leaf: change.to(device) for leaf, change in leaves.items()}
            patterns = competing(matrix.patterns)
            # All rows: a permutation fitted to a sample has no gain in other rows, whose large weights are elsewhere.
            values = scores(group, matrix, diagonal, rotated)
        permutation = best_permutation(values, patterns)
        before, after = (float(removed(scored, patterns)) for scored in (values, values[:, permutation.to(device)]))
        state.permutations[space.name] = permutation[None]
        gain = weight * max(0.0, before - after)
        state.permutation_gains[space.name] = gain * len(patterns) / len(matrix.patterns)
        step_done(state)


def _readers(
    objective: Objective, spaces: Sequence[Space]
) -> Iterator[tuple[Space, Group, Matrix, float, AbstractContextManager[None]]]:
    """Yield the matrices whose columns may be permuted, with weights in the objective and an onloading context."""
    places = [(space, place) for space in spaces if space.permuted for place in space.places]
    by_parameter = {id(place.at.parameter): space for space, place in places if place.index is None}
    for block, groups in objective.blocks:
        for group in groups:
            for matrix, weight in zip(group.matrices, group.weights, strict=True):
                space = by_parameter.get(id(matrix.layer.parameter))
                if space is not None and group.reads is None and competing(matrix.patterns):
                    yield space, group, matrix, weight, block.onloaded() if block else nullcontext()


def search_products(shape: tuple[int, int], patterns: Sequence[Pattern]) -> float:
    """The cost of a search over scores [rows, d_in], in floating-point operations of products that take as long."""
    rows, d_in = shape
    per_entry = DISTANCE if _is_exact(rows, d_in) else len(QUANTILES)
    return rows * d_in**2 * per_entry * sum(TABLES * pattern.m for pattern in competing(patterns))


def _is_exact(rows: int, d_in: int) -> bool:
    """Whether the distances are computed exactly."""
    return d_in * d_in * rows <= EXACT


def best_permutation(scores: Tensor, patterns: Sequence[Pattern]) -> Tensor:
    """Search for a permutation of columns that reduces the sum of the scores [rows, d_in] that n:m patterns remove.

    The result is the column at each position, int64 [d_in] in host memory; the identity if nothing better is found.
    """
    patterns, d_in = competing(patterns), scores.shape[1]
    order = torch.arange(d_in, device=scores.device)
    block = lcm(*(pattern.m for pattern in patterns)) if patterns else d_in
    if block >= d_in or d_in % block:
        return order.cpu()
    columns = _Columns(scores)
    tables = [_Table(columns, pattern) for pattern in patterns]
    least = GAIN * sum(float(table.removed(order)) for table in tables)
    changed = order
    for _ in range(ROUNDS):
        for table in tables:
            table.update(order, changed)
        first, second = _select(sum((table.gains(order) for table in tables), scores.new_zeros(())), block)
        gained = sum((table.gained(order, first, second) for table in tables), scores.new_zeros(len(first)))
        first, second, gained = (tensor[gained > 0] for tensor in (first, second, gained))
        if float(gained.sum(dtype=torch.float64)) <= least:
            break
        order[first], order[second] = order[second], order[first]
        changed = (torch.stack([first, second]).flatten() // block).unique()
        changed = (changed[:, None] * block + torch.arange(block, device=changed.device)).flatten()
    return order.cpu()


class _Columns:
    """The columns of a matrix of scores [rows, d_in], which are not negative."""

    def __init__(self, scores: Tensor):
        self.values = scores.float().T.contiguous()
        self.sums = self.values.sum(1)
        d_in, rows = self.values.shape
        self.exact = _is_exact(rows, d_in)
        step = max(1, SPREAD // d_in)
        self.slices = [] if self.exact else [slice(start, start + step) for start in range(0, rows, step)]
        positions = [round(quantile * (d_in - 1)) for quantile in QUANTILES]
        # one [intervals, rows] per slice
        self.edges = [self.values[:, rows].sort(0).values[positions] for rows in self.slices]

    def larger(self, others: Tensor) -> Tensor:
        """Σ_rows max(q, x) for every q of [count, rows] and column x, approximate for a large matrix: [count, d_in]."""
        sums = others.sum(1)[:, None] + self.sums
        if self.exact:
            return (torch.cdist(others, self.values, p=1.0) + sums) / 2
        for rows, edges in zip(self.slices, self.edges, strict=True):
            sums.addmm_(_expand(others[:, rows], edges), _expand(self.values[:, rows], edges).T, alpha=-1)
        return sums


def _expand(values: Tensor, edges: Tensor) -> Tensor:
    """``√w_k a_k`` of scores [count, rows] for intervals between edges [intervals, rows]: [count, intervals · rows]."""
    low = torch.nn.functional.pad(edges[:-1], (0, 0, 1, 0))
    size = edges - low
    inside = (values[:, None] - low).clamp_min_(0)
    torch.minimum(inside, size, out=inside)
    return inside.mul_(size.clamp_min(torch.finfo(size.dtype).tiny).rsqrt()).flatten(1)


class _Table:
    """The scores that one pattern keeps with every column at every position."""

    def __init__(self, columns: _Columns, pattern: NM):
        self.columns, self.pattern = columns, pattern
        d_in = len(columns.values)
        self.table = columns.values.new_empty(d_in, d_in)  # Σ_rows max(q, x): position, column

    def update(self, order: Tensor, positions: Tensor) -> None:
        """Recompute the rows of some positions, which are whole groups."""
        self.table[positions] = self.columns.larger(self.others(order, positions).flatten(0, 1))

    def others(self, order: Tensor, positions: Tensor) -> Tensor:
        """q, the n-th largest of the other scores in a group, at positions of whole groups: [groups, m, rows]."""
        n, m = self.pattern.n, self.pattern.m
        groups = self.columns.values[order[positions]].unflatten(0, (len(positions) // m, m))
        high = groups.topk(n + 1, dim=1).values
        last, following = high[:, n - 1 : n], high[:, n:]
        return torch.where(groups >= last, following, last)

    def gains(self, order: Tensor) -> Tensor:
        """The gain in kept scores of exchanging two positions, [d_in, d_in]; 0 within a group."""
        gains = self.table[:, order]
        gains -= gains.diagonal().clone()[:, None]
        gains = gains + gains.T
        m = self.pattern.m
        blocks = gains.view(len(order) // m, m, len(order) // m, m)
        blocks.diagonal(dim1=0, dim2=2).zero_()
        return gains

    def gained(self, order: Tensor, first: Tensor, second: Tensor) -> Tensor:
        """The exact gains in kept scores, [count], of independent exchanges; `first` and `second` are int64 [count]."""
        m, gained = self.pattern.m, self.columns.sums.new_zeros(len(first))
        for position, other in ((first, second), (second, first)):
            group = (position // m * m)[:, None] + torch.arange(m, device=position.device)
            index = torch.arange(len(position), device=position.device)
            q = self.others(order, group.flatten())[index, position % m]
            here, there = (self.columns.values[order[index]] for index in (position, other))
            gained += (torch.maximum(q, there) - torch.maximum(q, here)).sum(1)
        return gained * (first // m != second // m)  # an exchange within a group changes nothing

    def removed(self, order: Tensor) -> Tensor:
        """The sum of the scores that the pattern removes."""
        groups = self.columns.values[order].view(len(order) // self.pattern.m, self.pattern.m, -1)
        count = self.pattern.m - self.pattern.n
        return groups.topk(count, dim=1, largest=False).values.sum(dtype=torch.float64)


def _select(gains: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Independent exchanges of positions, int64 [count] and [count], from the gains [d_in, d_in] of all exchanges.

    Each `block` of consecutive positions takes part in at most one exchange.
    """
    count = len(gains) // block
    pairs = gains.view(count, block, count, block)
    free = pairs.amax((1, 3)).clamp_min_(0)
    first, second = [], []
    index = torch.arange(count, device=gains.device)
    while True:
        best, partner = free.max(1)
        mutual = (partner[partner] == index) & (best > 0) & (index <= partner)
        ones, others = index[mutual], partner[mutual]
        if not len(ones):
            break
        at = pairs[ones, :, others].flatten(1).argmax(1)
        first.append(ones * block + at // block)
        second.append(others * block + at % block)
        used = torch.cat([ones, others])
        free[used] = 0
        free[:, used] = 0
    nothing = index[:0]
    return torch.cat([nothing, *first]), torch.cat([nothing, *second])
