"""Which inputs of a matrix compete for the places of an n:m pattern: an order of its columns, found by exchanges.

n:m keeps the n largest scores of every m consecutive columns of a row. What a group of m keeps with the column x at a
place p, the others left, is

    T_p + Σ_rows max(q_p, x),    q_p the n-th largest score of the others in a row

so that one matrix of L1 distances, ``max(q, x) = (q + x + |q - x|) / 2``, has what every column would bring at every
place, and with its transpose what every exchange of two columns gains. Exchanges between different groups do not
touch each other: the best of each pair of groups that prefer one another are made together, until none gains.
"""

from collections.abc import Sequence
from math import lcm

import torch
from torch import Tensor

from ..objective.patterns import NM, Pattern

# It ends with the first round of exchanges that removes less than this share less, and after so many rounds.
GAIN, ROUNDS = 1e-4, 200


def competing(patterns: Sequence[Pattern]) -> list[NM]:
    """The patterns by which the order of columns matters.

    Args:
        patterns: of a matrix, several weigh alike.
    """
    return [pattern for pattern in patterns if isinstance(pattern, NM) and 0 < pattern.n < pattern.m]


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
    columns = scores.float().T.contiguous()
    tables = [_Table(columns, pattern) for pattern in patterns]
    least = GAIN * sum(float(table.removed(order)) for table in tables)
    changed = order
    for _ in range(ROUNDS):
        for table in tables:
            table.update(order, changed)
        gains = sum(table.gains(order) for table in tables)
        first, second, gained = _chosen(gains, block)
        if gained <= least:
            break
        order[first], order[second] = order[second], order[first]
        changed = (torch.stack([first, second]).flatten() // block).unique()
        changed = (changed[:, None] * block + torch.arange(block, device=changed.device)).flatten()
    return order.cpu()


class _Table:
    """What one pattern keeps with every column at every place."""

    def __init__(self, columns: Tensor, pattern: NM):
        self.columns, self.pattern = columns, pattern
        self.sums = columns.sum(1)
        self.kept = columns.new_empty(len(columns), len(columns))  # Σ_rows max(q, x): place, column

    def update(self, order: Tensor, places: Tensor) -> None:
        """Compute the rows of some places, whole groups, anew."""
        n, m = self.pattern.n, self.pattern.m
        groups = self.columns[order[places]].view(len(places) // m, m, -1)
        high = groups.topk(n + 1, dim=1).values
        last, following = high[:, n - 1 : n], high[:, n:]
        other = torch.where(groups >= last, following, last).flatten(0, 1)
        distance = torch.cdist(other, self.columns, p=1.0)
        self.kept[places] = (distance + other.sum(1)[:, None] + self.sums) / 2

    def gains(self, order: Tensor) -> Tensor:
        """What exchanging the columns of two places adds to what is kept, [d_in, d_in]; nothing within a group."""
        found = self.kept[:, order]
        found -= found.diagonal().clone()[:, None]
        found = found + found.T
        m = self.pattern.m
        blocks = found.view(len(order) // m, m, len(order) // m, m)
        blocks.diagonal(dim1=0, dim2=2).zero_()
        return found

    def removed(self, order: Tensor) -> Tensor:
        """The sum of what the pattern removes."""
        groups = self.columns[order].view(len(order) // self.pattern.m, self.pattern.m, -1)
        count = self.pattern.m - self.pattern.n
        return groups.topk(count, dim=1, largest=False).values.sum(dtype=torch.float64)


def _chosen(gains: Tensor, block: int) -> tuple[Tensor, Tensor, float]:
    """Exchanges of places that do not touch each other, and what they gain.

    Args:
        gains: of every exchange, symmetric, [d_in, d_in].
        block: consecutive places in one of which no second exchange may happen.
    """
    count = len(gains) // block
    pairs = gains.view(count, block, count, block)
    free = pairs.amax((1, 3)).clamp_min_(0)
    first, second, total = [], [], 0.0
    index = torch.arange(count, device=gains.device)
    while True:
        best, partner = free.max(1)
        mutual = (partner[partner] == index) & (best > 0) & (index <= partner)
        ones, others = index[mutual], partner[mutual]
        if not len(ones):
            break
        gained, at = pairs[ones, :, others].flatten(1).max(1)
        first.append(ones * block + at // block)
        second.append(others * block + at % block)
        total += float(gained.sum(dtype=torch.float64))
        taken = torch.cat([ones, others])
        free[taken] = 0
        free[:, taken] = 0
    nothing = index[:0]
    return torch.cat([nothing, *first]), torch.cat([nothing, *second]), total
