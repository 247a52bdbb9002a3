"""Which inputs of a matrix compete for the places of an n:m pattern: an order of its columns, found by exchanges.

n:m keeps the n largest scores of every m consecutive columns of a row. What a group of m keeps with the column x at a
place p, the others left, is

    T_p + Σ_rows max(q_p, x),    q_p the n-th largest score of the others in a row

so that one matrix has what every column would bring at every place, and with its transpose what every exchange of two
columns gains. Exchanges between different groups do not touch each other: the best of each pair of groups that prefer
one another are made together, until none gains.

The matrix is one of L1 distances, ``max(q, x) = (q + x + |q - x|) / 2``. Of a large matrix a product finds it nearly:
``max(q, x) = q + x - min(q, x)`` with ``min(q, x) ≈ Σ_k w_k a_k(q) a_k(x)``, ``a_k(x) = clamp((x - t_k) / w_k, 0, 1)``.
That is exact for q and x with an edge of their row, one of the ``t_k``, between them. What an exchange gains is
computed exactly before it is made.
"""

from collections.abc import Sequence
from math import lcm

import torch
from torch import Tensor

from ..objective.patterns import NM, Pattern

# It ends with the first round of exchanges that removes less than this share less, and after so many rounds.
GAIN, ROUNDS = 1e-4, 200
# The edges of a row: its smallest scores matter least. What is removed is within 0.4% of what distances lead to.
QUANTILES = (0.35, 0.6, 0.8, 0.92, 0.98, 1.0)
# Distances of so many pairs of scores are computed one by one, in about a fifth of a second of one core.
EXACT = 2**28
# So many scores are spread over the intervals at once.
SPREAD = 2**20
# What a search costs, as counted on a few matrices: whole tables for each place of a group, a distance in products.
TABLES, DISTANCE = 1.6, 18


def competing(patterns: Sequence[Pattern]) -> list[NM]:
    """The patterns by which the order of columns matters.

    Args:
        patterns: of a matrix, several weigh alike.
    """
    return [pattern for pattern in patterns if isinstance(pattern, NM) and 0 < pattern.n < pattern.m]


def search_products(shape: tuple[int, int], patterns: Sequence[Pattern]) -> float:
    """About how many floating-point operations in products of matrices finding an order takes as long as.

    Args:
        shape: of the scores, (rows, d_in).
        patterns: by which it is sought.
    """
    rows, d_in = shape
    each = DISTANCE if _has_distances(rows, d_in) else len(QUANTILES)
    return rows * d_in**2 * each * sum(TABLES * pattern.m for pattern in competing(patterns))


def _has_distances(rows: int, d_in: int) -> bool:
    """Whether every distance is computed."""
    return d_in * d_in * rows <= EXACT


def best_order(scores: Tensor, patterns: Sequence[Pattern]) -> Tensor:
    """An order of columns in which n:m removes little.

    Args:
        scores: what removing a weight costs, [rows, d_in], on any device.
        patterns: by which; the sum of what they remove is lowered.

    Returns:
        int64 [d_in] in host memory: the column at each place. The order as it is, where none that is found is better.
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
        first, second = _chosen(sum(table.gains(order) for table in tables), block)
        gained = sum((table.gained(order, first, second) for table in tables), scores.new_zeros(len(first)))
        first, second, gained = (each[gained > 0] for each in (first, second, gained))
        if float(gained.sum(dtype=torch.float64)) <= least:
            break
        order[first], order[second] = order[second], order[first]
        changed = (torch.stack([first, second]).flatten() // block).unique()
        changed = (changed[:, None] * block + torch.arange(block, device=changed.device)).flatten()
    return order.cpu()


class _Columns:
    """The columns of a matrix of scores.

    Args:
        scores: none is negative, [rows, d_in].
    """

    def __init__(self, scores: Tensor):
        self.values = scores.float().T.contiguous()
        self.sums = self.values.sum(1)
        d_in, rows = self.values.shape
        self.exact = _has_distances(rows, d_in)
        step = max(1, SPREAD // d_in)
        self.parts = [] if self.exact else [slice(start, start + step) for start in range(0, rows, step)]
        places = [round(share * (d_in - 1)) for share in QUANTILES]
        self.edges = [self.values[:, part].sort(0).values[places] for part in self.parts]  # [intervals, rows of a part]

    def larger(self, others: Tensor) -> Tensor:
        """Σ_rows max(q, x) of every q with every column, nearly where the matrix is large: [count, d_in].

        Args:
            others: q, each a column's score in every row, [count, rows].
        """
        sums = others.sum(1)[:, None] + self.sums
        if self.exact:
            return (torch.cdist(others, self.values, p=1.0) + sums) / 2
        for part, edges in zip(self.parts, self.edges, strict=True):
            sums.addmm_(_spread(others[:, part], edges), _spread(self.values[:, part], edges).T, alpha=-1)
        return sums


def _spread(values: Tensor, edges: Tensor) -> Tensor:
    """``√w_k a_k`` of scores [count, rows], in every interval between two edges [intervals, rows]: two dimensions."""
    low = torch.nn.functional.pad(edges[:-1], (0, 0, 1, 0))
    size = edges - low
    parts = (values[:, None] - low).clamp_min_(0)
    torch.minimum(parts, size, out=parts)
    return parts.mul_(size.clamp_min(torch.finfo(size.dtype).tiny).rsqrt()).flatten(1)


class _Table:
    """What one pattern keeps with every column at every place."""

    def __init__(self, columns: _Columns, pattern: NM):
        self.columns, self.pattern = columns, pattern
        d_in = len(columns.values)
        self.kept = columns.values.new_empty(d_in, d_in)  # Σ_rows max(q, x): place, column

    def update(self, order: Tensor, places: Tensor) -> None:
        """Compute the rows of some places, whole groups, anew."""
        self.kept[places] = self.columns.larger(self.others(order, places).flatten(0, 1))

    def others(self, order: Tensor, places: Tensor) -> Tensor:
        """q of some places, whole groups: [groups, m, rows]."""
        n, m = self.pattern.n, self.pattern.m
        groups = self.columns.values[order[places]].unflatten(0, (len(places) // m, m))
        high = groups.topk(n + 1, dim=1).values
        last, following = high[:, n - 1 : n], high[:, n:]
        return torch.where(groups >= last, following, last)

    def gains(self, order: Tensor) -> Tensor:
        """What exchanging the columns of two places adds to what is kept, [d_in, d_in]; nothing within a group."""
        found = self.kept[:, order]
        found -= found.diagonal().clone()[:, None]
        found = found + found.T
        m = self.pattern.m
        blocks = found.view(len(order) // m, m, len(order) // m, m)
        blocks.diagonal(dim1=0, dim2=2).zero_()
        return found

    def gained(self, order: Tensor, first: Tensor, second: Tensor) -> Tensor:
        """What exchanges that do not touch each other add to what is kept, [count], exactly.

        Args:
            order: without them.
            first, second: places, int64 [count].
        """
        m, found = self.pattern.m, self.columns.sums.new_zeros(len(first))
        for place, other in ((first, second), (second, first)):
            group = (place // m * m)[:, None] + torch.arange(m, device=place.device)
            some = self.others(order, group.flatten())[torch.arange(len(place), device=place.device), place % m]
            here, there = (self.columns.values[order[each]] for each in (place, other))
            found += (torch.maximum(some, there) - torch.maximum(some, here)).sum(1)
        return found * (first // m != second // m)  # within a group they change nothing

    def removed(self, order: Tensor) -> Tensor:
        """The sum of what the pattern removes."""
        groups = self.columns.values[order].view(len(order) // self.pattern.m, self.pattern.m, -1)
        count = self.pattern.m - self.pattern.n
        return groups.topk(count, dim=1, largest=False).values.sum(dtype=torch.float64)


def _chosen(gains: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Exchanges of places that do not touch each other, int64 [count] and [count].

    Args:
        gains: of every exchange, symmetric, [d_in, d_in].
        block: consecutive places in one of which no second exchange may happen.
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
        taken = torch.cat([ones, others])
        free[taken] = 0
        free[:, taken] = 0
    nothing = index[:0]
    return torch.cat([nothing, *first]), torch.cat([nothing, *second])
