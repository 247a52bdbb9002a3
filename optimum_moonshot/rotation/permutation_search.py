"""Channel permutation search for n:m: greedy exchanges of the columns of a matrix.

n:m keeps the n largest scores of every m consecutive columns of a row. With column x at position p, and its other
columns unchanged, a group of m keeps

    T_p + Σ_rows max(q_p, x),    q_p the n-th largest score of the other columns in a row

A table of this sum for every position and column, added to its transpose, is therefore the gain of every exchange of
two columns. Exchanges between disjoint groups are independent: in every round, the best exchange of each two groups
that prefer one another is applied, until none gains.

The table consists of L1 distances, ``max(q, x) = (q + x + |q - x|) / 2``. For a large matrix it is approximated by a
matrix product: ``max(q, x) = q + x - min(q, x)`` with ``min(q, x) ≈ Σ_k w_k a_k(q) a_k(x)`` and ``a_k(x) =
clamp((x - t_k) / w_k, 0, 1)``, which is exact if one of the edges ``t_k`` of the row is between q and x. The gain of an
exchange is recomputed exactly before it is applied.
"""

from collections.abc import Sequence
from math import lcm

import torch
from torch import Tensor

from ..objective.patterns import NM, Pattern

# The search stops after the first round with a smaller relative gain, or after this many rounds.
GAIN, ROUNDS = 1e-4, 200
# The edges of a row, denser at large scores, which decide what is kept: the removed sum is within 0.4% of the exact.
QUANTILES = (0.35, 0.6, 0.8, 0.92, 0.98, 1.0)
# Up to this many pairs of scores, distances are computed exactly, in about 0.2 s on one core.
EXACT = 2**28
# Scores expanded over the intervals at a time, to bound the memory.
SPREAD = 2**20
# Measured cost of a search: full tables per position of a group, and products per exact distance.
TABLES, DISTANCE = 1.6, 18


def competing(patterns: Sequence[Pattern]) -> list[NM]:
    """The n:m patterns, whose loss depends on the permutation of columns.

    Args:
        patterns: of a matrix.
    """
    return [pattern for pattern in patterns if isinstance(pattern, NM) and 0 < pattern.n < pattern.m]


def search_products(shape: tuple[int, int], patterns: Sequence[Pattern]) -> float:
    """The cost of a search, in floating-point operations of matrix products of equal duration.

    Args:
        shape: of the scores, (rows, d_in).
        patterns: of the matrix.
    """
    rows, d_in = shape
    each = DISTANCE if _has_distances(rows, d_in) else len(QUANTILES)
    return rows * d_in**2 * each * sum(TABLES * pattern.m for pattern in competing(patterns))


def _has_distances(rows: int, d_in: int) -> bool:
    """Whether the distances are computed exactly."""
    return d_in * d_in * rows <= EXACT


def best_permutation(scores: Tensor, patterns: Sequence[Pattern]) -> Tensor:
    """A permutation of columns that reduces the scores removed by n:m.

    Args:
        scores: the loss of removing each weight, [rows, d_in], on any device.
        patterns: the sum of their removed scores is reduced.

    Returns:
        int64 [d_in] in host memory: the column at each position. The identity if no better permutation is found.
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
        scores: not negative, [rows, d_in].
    """

    def __init__(self, scores: Tensor):
        self.values = scores.float().T.contiguous()
        self.sums = self.values.sum(1)
        d_in, rows = self.values.shape
        self.exact = _has_distances(rows, d_in)
        step = max(1, SPREAD // d_in)
        self.parts = [] if self.exact else [slice(start, start + step) for start in range(0, rows, step)]
        ranks = [round(quantile * (d_in - 1)) for quantile in QUANTILES]
        self.edges = [self.values[:, part].sort(0).values[ranks] for part in self.parts]  # [intervals, rows of a part]

    def larger(self, others: Tensor) -> Tensor:
        """Σ_rows max(q, x) for every q and column x, approximate for a large matrix: [count, d_in].

        Args:
            others: q, [count, rows].
        """
        sums = others.sum(1)[:, None] + self.sums
        if self.exact:
            return (torch.cdist(others, self.values, p=1.0) + sums) / 2
        for part, edges in zip(self.parts, self.edges, strict=True):
            sums.addmm_(_expand(others[:, part], edges), _expand(self.values[:, part], edges).T, alpha=-1)
        return sums


def _expand(values: Tensor, edges: Tensor) -> Tensor:
    """``√w_k a_k`` of scores [count, rows] for the intervals between edges [intervals, rows]: two dimensions."""
    low = torch.nn.functional.pad(edges[:-1], (0, 0, 1, 0))
    size = edges - low
    parts = (values[:, None] - low).clamp_min_(0)
    torch.minimum(parts, size, out=parts)
    return parts.mul_(size.clamp_min(torch.finfo(size.dtype).tiny).rsqrt()).flatten(1)


class _Table:
    """The scores that one pattern keeps with every column at every position."""

    def __init__(self, columns: _Columns, pattern: NM):
        self.columns, self.pattern = columns, pattern
        d_in = len(columns.values)
        self.kept = columns.values.new_empty(d_in, d_in)  # Σ_rows max(q, x): position, column

    def update(self, order: Tensor, positions: Tensor) -> None:
        """Recompute the rows of some positions, which are whole groups."""
        self.kept[positions] = self.columns.larger(self.others(order, positions).flatten(0, 1))

    def others(self, order: Tensor, positions: Tensor) -> Tensor:
        """q of some positions, which are whole groups: [groups, m, rows]."""
        n, m = self.pattern.n, self.pattern.m
        groups = self.columns.values[order[positions]].unflatten(0, (len(positions) // m, m))
        high = groups.topk(n + 1, dim=1).values
        last, following = high[:, n - 1 : n], high[:, n:]
        return torch.where(groups >= last, following, last)

    def gains(self, order: Tensor) -> Tensor:
        """The gain in kept scores of exchanging two positions, [d_in, d_in]; 0 within a group."""
        gains = self.kept[:, order]
        gains -= gains.diagonal().clone()[:, None]
        gains = gains + gains.T
        m = self.pattern.m
        blocks = gains.view(len(order) // m, m, len(order) // m, m)
        blocks.diagonal(dim1=0, dim2=2).zero_()
        return gains

    def gained(self, order: Tensor, first: Tensor, second: Tensor) -> Tensor:
        """The exact gain in kept scores of independent exchanges, [count].

        Args:
            order: before the exchanges.
            first: positions, int64 [count].
            second: the positions that they are exchanged with, int64 [count].
        """
        m, gained = self.pattern.m, self.columns.sums.new_zeros(len(first))
        for position, other in ((first, second), (second, first)):
            group = (position // m * m)[:, None] + torch.arange(m, device=position.device)
            index = torch.arange(len(position), device=position.device)
            q = self.others(order, group.flatten())[index, position % m]
            here, there = (self.columns.values[order[each]] for each in (position, other))
            gained += (torch.maximum(q, there) - torch.maximum(q, here)).sum(1)
        return gained * (first // m != second // m)  # an exchange within a group changes nothing

    def removed(self, order: Tensor) -> Tensor:
        """The sum of the scores that the pattern removes."""
        groups = self.columns.values[order].view(len(order) // self.pattern.m, self.pattern.m, -1)
        count = self.pattern.m - self.pattern.n
        return groups.topk(count, dim=1, largest=False).values.sum(dtype=torch.float64)


def _select(gains: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Independent exchanges of positions, int64 [count] and [count].

    Args:
        gains: of every exchange, symmetric, [d_in, d_in].
        block: consecutive positions that take part in at most one exchange.
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
