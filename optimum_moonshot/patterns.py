"""Which weights may go, and exactly how many: unstructured and n:m.

`keep` is True where a weight survives; "n:m" keeps n of every m consecutive inputs of a row. A pattern removes exactly
``round(sparsity · total)`` entries of the group that it is given, ties by index, the first index first.
"""

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import MoonshotError, require


@dataclass(frozen=True)
class Unstructured:
    """Any weight of a comparison group may go: ``Unstructured(0.6)`` removes 60% of it."""

    sparsity: float

    def keep(self, scores: Tensor) -> Tensor:
        """Bool, like `scores` (any shape, one comparison group): False for the smallest scores."""
        return ~smallest(scores.flatten()[None], round(self.sparsity * scores.numel())).view_as(scores)

    def keep_per_row(self, scores: Tensor) -> Tensor:
        """Bool, like `scores` [rows, d_in], each row a comparison group of its own."""
        return ~smallest(scores, round(self.sparsity * scores.shape[-1]))

    def fits(self, shape: tuple[int, int]) -> bool:
        return True

    def __str__(self) -> str:
        return "unstructured"


@dataclass(frozen=True)
class NM:
    """``NM(2, 4)`` keeps 2 of every 4 consecutive inputs of each row."""

    n: int
    m: int

    @property
    def sparsity(self) -> float:
        return 1 - self.n / self.m

    def keep(self, scores: Tensor) -> Tensor:
        """Bool, like `scores` [..., d_in] with m | d_in: True for the n largest of every m."""
        groups = scores.reshape(-1, self.m)
        return ~smallest(groups, self.m - self.n).view_as(scores)

    keep_per_row = keep

    def fits(self, shape: tuple[int, int]) -> bool:
        """Whether every row of a [d_out, d_in] weight divides into groups of m."""
        return shape[-1] % self.m == 0

    def __str__(self) -> str:
        return f"{self.n}:{self.m}"


Pattern = Unstructured | NM


def smallest(scores: Tensor, count: int) -> Tensor:
    """Bool, like `scores` [groups, size]: True for exactly `count` smallest scores of every group, ties by index."""
    if count <= 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    if count >= scores.shape[-1]:
        return torch.ones_like(scores, dtype=torch.bool)
    threshold = scores.kthvalue(count, dim=-1, keepdim=True).values
    below = scores < threshold
    tied = scores == threshold
    room = count - below.sum(-1, keepdim=True)
    return below | (tied & (tied.cumsum(-1) <= room))


def parse_pattern(pattern: str, sparsity: float | None) -> Pattern:
    """The pattern that ``pattern=`` and ``sparsity=`` of a configuration name.

    Raises:
        MoonshotError: an unknown pattern, a sparsity outside [0, 1], or one that contradicts n:m.
    """
    require(isinstance(pattern, str), f'pattern={pattern!r}: use "unstructured" or "n:m", such as "2:4"')
    if pattern == "unstructured":
        require(sparsity is not None, 'sparsity=None: pattern="unstructured" needs one, such as sparsity=0.5')
        require(0 <= sparsity <= 1, f"sparsity={sparsity}: the share of weights to remove lies between 0 and 1")
        return Unstructured(float(sparsity))
    match = re.fullmatch(r"(\d+):(\d+)", pattern)
    if match is None:
        raise MoonshotError(f'pattern={pattern!r}: use "unstructured" or "n:m", such as "2:4" (keeps 2 of every 4)')
    n, m = int(match[1]), int(match[2])
    require(0 < n <= m, f"pattern={pattern!r}: n:m keeps n of every m, so n must lie between 1 and m")
    parsed = NM(n, m)
    require(
        sparsity is None or abs(sparsity - parsed.sparsity) < 1e-9,
        f"sparsity={sparsity} contradicts pattern={pattern!r}, which has sparsity {parsed.sparsity:g}: leave it out",
    )
    return parsed
