"""Which weights may go, and exactly how many: unstructured, n:m and structured; and whole experts.

`keep` is True where a weight survives; "n:m" keeps n of every m consecutive inputs of a row; "structured" removes whole
input columns, in groups; "experts" removes members of a mixture. A pattern removes exactly ``round(sparsity · total)``
entries (or groups of columns) of the comparison group that it is given, ties by index, the first index first.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from ..devices import is_gpu
from ..errors import MoonshotError, require
from .row_slices import row_slices

# What choosing holds for every score of a slice, its copy for the selection and the running count of ties above all.
CHOOSING_BYTES = 24


@dataclass(frozen=True)
class Unstructured:
    """Any weight of a comparison group may go: ``Unstructured(0.6)`` removes 60% of it.

    With ``exact``, a layer's comparison groups share its count without a remainder: ``round(sparsity · total)`` of the
    layer go, and of a group its share rounded up or down. An allocation between layers needs that for its total.
    """

    sparsity: float
    exact: bool = False

    kind: ClassVar[str] = "unstructured"
    width: ClassVar[int] = 1  # consecutive inputs that belong together; a row must divide into so many

    def keep(self, scores: Tensor, before: int = 0) -> Tensor:
        """Which weights survive.

        Args:
            scores: any shape, one comparison group.
            before: how many weights of the layer the comparison groups before this one hold.

        Returns:
            Bool, like `scores`: False for the smallest.
        """
        count = round(self.sparsity * scores.numel())
        if self.exact:
            count = self.up_to(before + scores.numel()) - self.up_to(before)
        return ~smallest(scores.flatten()[None], count).view_as(scores)

    def keep_per_row(self, scores: Tensor) -> Tensor:
        """Bool, like `scores` [rows, d_in], each row a comparison group of its own.

        With ``exact``, the rows lose equally many, and those whose next score is the smallest one more.
        """
        if not self.exact:
            return ~smallest(scores, round(self.sparsity * scores.shape[-1]))
        count, extra = divmod(self.up_to(scores.numel()), len(scores))
        gone = smallest(scores, count)
        if extra:
            following = smallest(scores, count + 1) & ~gone
            rows = smallest(scores[following][None], extra)[0]
            gone |= following & rows[:, None]
        return ~gone

    def up_to(self, total: int) -> int:
        """How many of a layer's first `total` weights go."""
        return math.floor(self.sparsity * total + 0.5)

    def fits(self, shape: tuple[int, int]) -> bool:
        return True

    def times(self, share: float) -> "Unstructured":
        """The same with so much of its sparsity.

        Args:
            share: in [0, 1].
        """
        return replace(self, sparsity=share * self.sparsity)

    def __str__(self) -> str:
        return "unstructured"


@dataclass(frozen=True)
class PerExpert(Unstructured):
    """What a layer of experts gets where each has a sparsity of its own; `sparsity` is that of the whole layer."""

    experts: tuple[float, ...] = ()  # sparsity of each, exact

    def keep(self, scores: Tensor, before: int = 0) -> Tensor:
        """As `Unstructured.keep`, of the whole layer: every expert is a comparison group of its own."""
        parts = scores.chunk(len(self.experts))
        return torch.cat([self.of(expert).keep(some) for expert, some in enumerate(parts)])

    def keep_per_row(self, scores: Tensor) -> Tensor:
        """As `Unstructured.keep_per_row`, of the whole layer."""
        parts = scores.chunk(len(self.experts))
        return torch.cat([self.of(expert).keep_per_row(some) for expert, some in enumerate(parts)])

    def of(self, expert: int) -> Unstructured:
        """What one expert gets, which is what a solver sees."""
        return Unstructured(self.experts[expert], exact=True)

    def times(self, share: float) -> "PerExpert":
        return replace(self, sparsity=share * self.sparsity, experts=tuple(share * each for each in self.experts))


@dataclass(frozen=True)
class NM:
    """``NM(2, 4)`` keeps 2 of every 4 consecutive inputs of each row."""

    n: int
    m: int

    kind: ClassVar[str] = "n:m"

    @property
    def sparsity(self) -> float:
        return 1 - self.n / self.m

    @property
    def width(self) -> int:
        return self.m

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


@dataclass(frozen=True)
class Structured:
    """Whole input columns go, for all rows alike: ``Structured(0.25, group=64)`` removes a quarter of the heads.

    ``group`` consecutive columns go or stay together; exactly ``round(sparsity · groups)`` groups go.
    """

    sparsity: float
    group: int = 1

    kind: ClassVar[str] = "structured"

    @property
    def width(self) -> int:
        return self.group

    def keep(self, scores: Tensor) -> Tensor:
        """Bool, like `scores` [d_out, d_in] with group | d_in: a group's score is the sum over its columns and rows."""
        kept = self.keep_groups(scores.double().sum(0).view(-1, self.group).sum(1))
        return self.columns(kept).expand_as(scores).clone()

    keep_per_row = keep

    def keep_groups(self, scores: Tensor) -> Tensor:
        """Bool [groups]: False for the smallest scores [groups]."""
        return ~smallest(scores[None], round(self.sparsity * len(scores)))[0]

    def columns(self, groups: Tensor) -> Tensor:
        """What holds for groups [d_in / group], for each of their columns [d_in]."""
        return groups.repeat_interleave(self.group)

    def times(self, share: float) -> "Structured":
        """As `Unstructured.times`."""
        return replace(self, sparsity=share * self.sparsity)

    def fits(self, shape: tuple[int, int]) -> bool:
        """Whether the columns of a [d_out, d_in] weight divide into groups."""
        return shape[-1] % self.group == 0

    def __str__(self) -> str:
        return self.kind if self.group == 1 else f"{self.kind} in {self.group} columns"


@dataclass(frozen=True)
class Experts:
    """Whole experts of a mixture go: ``Experts(0.25)`` removes a quarter of them.

    A mixture has one row of weights, a 1 for each expert that is there. Where its router chooses among ``groups`` equal
    runs of consecutive experts first, each of these loses ``round(sparsity · size)``.
    """

    sparsity: float
    groups: int = 1

    kind: ClassVar[str] = "experts"
    width: ClassVar[int] = 1

    def keep(self, scores: Tensor) -> Tensor:
        """Bool, like `scores` [..., experts] with groups | experts: False for the smallest of every group."""
        groups = scores.reshape(-1, scores.shape[-1] // self.groups)
        return ~smallest(groups, self.removed(scores.shape[-1]) // self.groups).view_as(scores)

    keep_per_row = keep

    def removed(self, experts: int) -> int:
        """How many of so many experts go."""
        return self.groups * round(self.sparsity * (experts // self.groups))

    def fits(self, shape: tuple[int, int]) -> bool:
        """Whether the experts of a [rows, experts] weight divide into groups."""
        return shape[-1] % self.groups == 0

    def __str__(self) -> str:
        return self.kind


Pattern = Unstructured | NM | Structured | Experts


@dataclass(frozen=True)
class MixedNM:
    """What a whole run is asked for by ``pattern="n:4"``: each matrix gets 1:4, 2:4, 3:4 or stays dense.

    Together they have at most so much sparsity. No solver sees it: an allocation puts an `NM` in its place.
    """

    sparsity: float
    m: int

    kind: ClassVar[str] = "n:m"

    @property
    def width(self) -> int:
        return self.m

    @property
    def choices(self) -> tuple[NM, ...]:
        """From the dense one to the sparsest."""
        return tuple(NM(n, self.m) for n in range(self.m, 0, -1))

    @property
    def nearest(self) -> NM:
        """The choice whose sparsity is nearest to the asked one: what a layer gets, as far as nobody knows better."""
        return min(self.choices, key=lambda choice: abs(choice.sparsity - self.sparsity))

    def fits(self, shape: tuple[int, int]) -> bool:
        """Whether every row of a [d_out, d_in] weight divides into groups of m."""
        return shape[-1] % self.m == 0

    def __str__(self) -> str:
        return f"n:{self.m}"


@dataclass(frozen=True)
class _StackedUnstructured(Unstructured):
    parts: tuple[Unstructured, ...] = ()

    def keep(self, scores: Tensor, before: int = 0) -> Tensor:
        shares = zip(self.parts, scores.chunk(len(self.parts)), strict=True)
        return torch.cat([pattern.keep(some) for pattern, some in shares])


@dataclass(frozen=True)
class _StackedNM(NM):
    parts: tuple[NM, ...] = ()

    def keep(self, scores: Tensor) -> Tensor:
        return torch.cat(
            [pattern.keep(some) for pattern, some in zip(self.parts, scores.chunk(len(self.parts)), strict=True)]
        )


def stacked(patterns: Sequence[Pattern]) -> Pattern | None:
    """One pattern for scores [rows, …] of several copies of a matrix, one below the other, each by its own pattern.

    Args:
        patterns: of the copies, in their order.

    Returns:
        A pattern whose `keep` takes the scores of all; None unless all are unstructured, or n:m with the same m.
    """
    shares = tuple(pattern for pattern in patterns if isinstance(pattern, Unstructured) and not pattern.exact)
    groups = tuple(pattern for pattern in patterns if isinstance(pattern, NM))
    if len(shares) == len(patterns):
        return _StackedUnstructured(shares[0].sparsity, parts=shares)
    if len(groups) == len(patterns) and len({pattern.m for pattern in groups}) == 1:
        return _StackedNM(groups[0].n, groups[0].m, groups)
    return None


def smallest(scores: Tensor, count: int) -> Tensor:
    """Exactly so many smallest scores of every comparison group, ties by index.

    Args:
        scores: [comparison groups, size].
        count: how many of each.

    Returns:
        Bool, like `scores`: True for the smallest.
    """
    if count <= 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    if count >= scores.shape[-1]:
        return torch.ones_like(scores, dtype=torch.bool)
    found = torch.empty_like(scores, dtype=torch.bool)
    for rows in row_slices(slice(0, len(scores)), CHOOSING_BYTES * scores.shape[-1], scores.device):
        some = scores[rows]
        threshold = kth_smallest(some, count)
        below = some < threshold
        tied = some == threshold
        room = count - below.sum(-1, keepdim=True)
        found[rows] = below | (tied & (tied.cumsum(-1) <= room))
    return found


def kth_smallest(values: Tensor, count: int) -> Tensor:
    """The largest of so many smallest values of every row.

    Args:
        values: [rows, size].
        count: in [1, size].

    Returns:
        [rows, 1].
    """
    # A GPU finds the k-th value of one long row with a single one of its processors, and sorts with all.
    if is_gpu(values.device) and len(values) < 8:
        return values.sort(-1).values[:, count - 1, None]
    return values.kthvalue(count, dim=-1, keepdim=True).values


def own_sparsity(pattern: object) -> bool:
    """Whether the text of a pattern says the sparsity, as "2:4" does, and "n:4" does not."""
    return isinstance(pattern, str) and ":" in pattern and not pattern.startswith("n:")


def parse_pattern(pattern: str, sparsity: float | None, group_size: int = 1) -> "Pattern | MixedNM":
    """The pattern that ``pattern=``, ``sparsity=`` and ``group_size=`` of a configuration name.

    Args:
        pattern: "unstructured", "structured", "experts", "n:m", such as "2:4", or "n:4" with a literal n, for any n.
        sparsity: share to remove, in [0, 1]; None, or the same, where n:m says it.
        group_size: columns that go or stay together, of "structured" alone.

    Raises:
        MoonshotError: an unknown pattern, a sparsity outside [0, 1], or one that contradicts n:m.
    """
    usage = (
        f'pattern={pattern!r}: use "unstructured", "structured", "experts" or "n:m", such as "2:4" (keeps 2 of every 4)'
    )
    require(isinstance(pattern, str), usage)
    require(
        group_size == 1 or pattern == Structured.kind,
        f"group_size={group_size}: pattern={pattern!r} has no groups of columns; leave it out",
    )
    if pattern in (Unstructured.kind, Structured.kind, Experts.kind):
        if sparsity is None:
            raise MoonshotError(f'sparsity=None: pattern="{pattern}" needs one, such as sparsity=0.5')
        require(0 <= sparsity <= 1, f"sparsity={sparsity}: the share of weights to remove lies between 0 and 1")
        share = float(sparsity)
        if pattern == Experts.kind:
            return Experts(share)
        return Unstructured(share) if pattern == Unstructured.kind else Structured(share, group_size)
    mixed = re.fullmatch(r"n:(\d+)", pattern)
    if mixed is not None:
        return _parse_mixed(pattern, sparsity, int(mixed[1]))
    match = re.fullmatch(r"(\d+):(\d+)", pattern)
    if match is None:
        raise MoonshotError(usage)
    n, m = int(match[1]), int(match[2])
    require(0 < n <= m, f"pattern={pattern!r}: n:m keeps n of every m, so n must lie between 1 and m")
    parsed = NM(n, m)
    require(
        sparsity is None or abs(sparsity - parsed.sparsity) < 1e-9,
        f"sparsity={sparsity} contradicts pattern={pattern!r}, which has sparsity {parsed.sparsity:g}: leave it out",
    )
    return parsed


def _parse_mixed(pattern: str, sparsity: float | None, m: int) -> MixedNM:
    require(m > 1, f"pattern={pattern!r}: m is at least 2")
    if sparsity is None:
        raise MoonshotError(f'sparsity=None: pattern="{pattern}" needs one, such as sparsity=0.5')
    most = 1 - 1 / m
    require(
        0 <= sparsity <= most,
        f"sparsity={sparsity}: pattern={pattern!r} keeps at least 1 of every {m}; give 0 to {most:g}",
    )
    return MixedNM(float(sparsity), m)
