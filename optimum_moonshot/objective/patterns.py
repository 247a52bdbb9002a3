"""Sparsity patterns: unstructured, n:m, structured (input columns) and whole experts.

A pattern turns the scores of a comparison group into a mask `keep`, True where a weight survives. It removes exactly
``round(sparsity · total)`` entries, groups of columns or experts with the smallest scores; of equal scores, those with
the lowest index. "n:m" retains n of every m consecutive inputs of a row.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from ..devices import is_gpu
from ..errors import MoonshotError, require
from .grid import Grid
from .linalg import CPU_BYTES, split_within

# Memory of a selection per score: mostly the copy that `kthvalue` makes and the running count of ties.
SELECTION_BYTES = 24
# Most scores of a comparison group whose ranks are found by comparing all pairs: the work is quadratic.
NARROW = 32


@dataclass(frozen=True, kw_only=True)
class _Pattern:
    grid: Grid | None = field(default=None, repr=False)  # of the surviving weights; None does not quantize them

    kind: ClassVar[str]

    @property
    def width(self) -> int:
        """The number of inputs of a row must be a multiple of it."""
        return 1

    def fits(self, shape: tuple[int, int]) -> bool:
        """Whether the pattern can be applied to a weight [d_out, d_in]."""
        return shape[-1] % self.width == 0

    def __str__(self) -> str:
        return self.kind


@dataclass(frozen=True)
class Unstructured(_Pattern):
    """Any weight of a comparison group can be removed: ``Unstructured(0.6)`` removes 60% of it.

    With ``exact``, exactly ``round(sparsity · total)`` weights of a layer are removed, although it has several
    comparison groups: the count of each group is rounded up or down. An allocation between layers needs this to reach
    its overall sparsity.
    """

    sparsity: float
    exact: bool = False

    kind: ClassVar[str] = "unstructured"

    def keep(self, scores: Tensor, before: int = 0) -> Tensor:
        """The mask of one comparison group of any shape: bool, False for the smallest scores.

        `before` is the number of weights in the layer's previous comparison groups.
        """
        count = round(self.sparsity * scores.numel())
        if self.exact:
            count = self.up_to(before + scores.numel()) - self.up_to(before)
        return ~smallest(scores.flatten()[None], count).view_as(scores)

    def keep_per_row(self, scores: Tensor) -> Tensor:
        """The mask, bool like `scores` [rows, d_in], where each row is a comparison group.

        With ``exact``, all rows lose the same number of weights, and those with the smallest next score one more.
        """
        if not self.exact:
            return ~smallest(scores, round(self.sparsity * scores.shape[-1]))
        count, extra = divmod(self.up_to(scores.numel()), len(scores))
        removed = smallest(scores, count)
        if extra:
            following = smallest(scores, count + 1) & ~removed
            rows = smallest(scores[following][None], extra)[0]
            removed |= following & rows[:, None]
        return ~removed

    def up_to(self, total: int) -> int:
        """Number of weights to remove from the first `total` of a layer."""
        return math.floor(self.sparsity * total + 0.5)

    def times(self, fraction: float) -> "Unstructured":
        """The pattern with `fraction`, in [0, 1], of its sparsity."""
        return replace(self, sparsity=fraction * self.sparsity)


@dataclass(frozen=True)
class PerExpert(Unstructured):
    """A sparsity for each expert of a layer; `sparsity` is that of the whole layer."""

    experts: tuple[float, ...] = ()  # sparsity of each

    def keep(self, scores: Tensor, before: int = 0) -> Tensor:
        """The mask of the whole layer, where each expert is a comparison group."""
        return _keep_parts([self.of(expert) for expert in range(len(self.experts))], scores)

    def keep_per_row(self, scores: Tensor) -> Tensor:
        parts = scores.chunk(len(self.experts))
        return torch.cat([self.of(expert).keep_per_row(part) for expert, part in enumerate(parts)])

    def of(self, expert: int) -> Unstructured:
        """The pattern of one expert, which is pruned as a separate matrix."""
        return Unstructured(self.experts[expert], exact=True, grid=self.grid)

    def times(self, fraction: float) -> "PerExpert":
        experts = tuple(fraction * sparsity for sparsity in self.experts)
        return replace(self, sparsity=fraction * self.sparsity, experts=experts)


@dataclass(frozen=True)
class NM(_Pattern):
    """``NM(2, 4)`` retains 2 of every 4 consecutive inputs of each row."""

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

    def __str__(self) -> str:
        return f"{self.n}:{self.m}"


@dataclass(frozen=True)
class Structured(_Pattern):
    """Removes whole input columns from all rows: ``Structured(0.25, group=64)`` removes a quarter of the heads.

    Columns are removed in groups of ``group`` consecutive ones, exactly ``round(sparsity · groups)`` of them.
    """

    sparsity: float
    group: int = 1

    kind: ClassVar[str] = "structured"

    @property
    def width(self) -> int:
        return self.group

    def keep(self, scores: Tensor) -> Tensor:
        """Bool, like `scores` [d_out, d_in] with group | d_in: a group's score is the sum over its columns and rows."""
        keep = self.keep_groups(scores.double().sum(0).view(-1, self.group).sum(1))
        return self.columns(keep).expand_as(scores).clone()

    keep_per_row = keep

    def keep_groups(self, scores: Tensor) -> Tensor:
        """Bool [groups]: False for the smallest scores [groups]."""
        return ~smallest(scores[None], round(self.sparsity * len(scores)))[0]

    def columns(self, groups: Tensor) -> Tensor:
        """Values of groups [d_in / group], repeated for each of their columns [d_in]."""
        return groups.repeat_interleave(self.group)

    def times(self, fraction: float) -> "Structured":
        return replace(self, sparsity=fraction * self.sparsity)

    def __str__(self) -> str:
        return self.kind if self.group == 1 else f"{self.kind} in {self.group} columns"


@dataclass(frozen=True)
class Experts(_Pattern):
    """Removes whole experts of a mixture: ``Experts(0.25)`` removes a quarter of them.

    A mixture has one row of weights, a 1 for each expert. If its router first selects among ``groups`` equal runs of
    consecutive experts, each of these loses ``round(sparsity · size)``.
    """

    sparsity: float
    groups: int = 1

    kind: ClassVar[str] = "experts"

    def keep(self, scores: Tensor) -> Tensor:
        """Bool, like `scores` [..., experts] with groups | experts: False for the smallest of every group."""
        groups = scores.reshape(-1, scores.shape[-1] // self.groups)
        return ~smallest(groups, self.removed(scores.shape[-1]) // self.groups).view_as(scores)

    keep_per_row = keep

    def removed(self, experts: int) -> int:
        """Number of experts to remove from a mixture of `experts`."""
        return self.groups * round(self.sparsity * (experts // self.groups))

    def fits(self, shape: tuple[int, int]) -> bool:
        return shape[-1] % self.groups == 0


Pattern = Unstructured | NM | Structured | Experts


@dataclass(frozen=True)
class MixedNM(_Pattern):
    """``pattern="n:4"`` for a whole model: each matrix is assigned 1:4, 2:4, 3:4, or is left dense.

    The overall sparsity is at most `sparsity`. An allocation replaces it by an `NM` for each layer, before solvers run.
    """

    sparsity: float
    m: int

    kind: ClassVar[str] = "n:m"

    @property
    def width(self) -> int:
        return self.m

    @property
    def choices(self) -> tuple[NM, ...]:
        """The n:m patterns from dense to the sparsest."""
        return tuple(NM(n, self.m) for n in range(self.m, 0, -1))

    @property
    def nearest(self) -> NM:
        """The choice whose sparsity is nearest to `sparsity`, as an estimate before the allocation."""
        return min(self.choices, key=lambda choice: abs(choice.sparsity - self.sparsity))

    def __str__(self) -> str:
        return f"n:{self.m}"


@dataclass(frozen=True)
class _StackedUnstructured(Unstructured):
    parts: tuple[Unstructured, ...] = ()

    def keep(self, scores: Tensor, before: int = 0) -> Tensor:
        return _keep_parts(self.parts, scores)


@dataclass(frozen=True)
class _StackedNM(NM):
    parts: tuple[NM, ...] = ()

    def keep(self, scores: Tensor) -> Tensor:
        return _keep_parts(self.parts, scores)


def _keep_parts(patterns: Sequence[Unstructured | NM], scores: Tensor) -> Tensor:
    """The mask of matrices that are stacked along the rows, each with its own pattern."""
    parts = zip(patterns, scores.chunk(len(patterns)), strict=True)
    return torch.cat([pattern.keep(part) for pattern, part in parts])


def stacked(patterns: Sequence[Pattern]) -> Pattern | None:
    """One pattern for several copies of a matrix, stacked along the rows, each with its own pattern.

    Its `keep` takes the scores of all copies. None unless all patterns are unstructured and not exact, or n:m with
    equal m.
    """
    unstructured = tuple(pattern for pattern in patterns if isinstance(pattern, Unstructured) and not pattern.exact)
    nm = tuple(pattern for pattern in patterns if isinstance(pattern, NM))
    if len(unstructured) == len(patterns):
        return _StackedUnstructured(unstructured[0].sparsity, parts=unstructured)
    if len(nm) == len(patterns) and len({pattern.m for pattern in nm}) == 1:
        return _StackedNM(nm[0].n, nm[0].m, nm)
    return None


def sparsity_of(weight: Tensor) -> float:
    """The fraction of zeros in a weight, of any shape; `(weight == 0).sum()` would allocate temporaries."""
    return (weight.numel() - int(torch.count_nonzero(weight))) / weight.numel()


def nonzeros(weight: Tensor) -> Tensor | None:
    """Bool like a weight, False where it is zero; None without zeros, or without anything else."""
    count = int(torch.count_nonzero(weight))
    return None if count in (0, weight.numel()) else weight != 0


def keep_alive(keep: Callable[[Tensor], Tensor], scores: Tensor, alive: Tensor | None) -> Tensor:
    """The mask ``keep(scores)`` of a pattern where only the weights in `alive` (None: all) can survive.

    The others have the smallest scores, so that the pattern's count includes them.
    """
    if alive is None:
        return keep(scores)
    return keep(scores.masked_fill(~alive, -torch.inf)) & alive


def smallest(scores: Tensor, count: int) -> Tensor:
    """Select exactly `count` smallest scores of each comparison group [groups, size]; of ties, the first."""
    if count <= 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    if count >= scores.shape[-1]:
        return torch.ones_like(scores, dtype=torch.bool)
    selected = torch.empty_like(scores, dtype=torch.bool)
    # Small slices even on a GPU, whose memory a solver may have filled; the result does not depend on their size.
    for rows in split_within(len(scores), SELECTION_BYTES * scores.shape[-1], CPU_BYTES):
        part = scores[rows]
        selected[rows] = _by_order(part, count) if part.shape[-1] <= NARROW else _by_threshold(part, count)
    return selected


def _by_threshold(scores: Tensor, count: int) -> Tensor:
    """`smallest` of rows [rows, size]; `topk` has no defined order of ties, and a stable sort is slower."""
    threshold = kth_smallest(scores, count)
    below, tied = scores < threshold, scores == threshold
    missing = count - below.sum(-1, keepdim=True)
    # On a CPU the running count would take a quarter of the time; a GPU would wait for the comparison.
    if not is_gpu(scores.device) and bool((tied.sum(-1, keepdim=True) == missing).all()):
        return below | tied
    return below | (tied & (tied.cumsum(-1) <= missing))


def _by_order(scores: Tensor, count: int) -> Tensor:
    """`smallest` of rows [rows, size] by comparing all pairs: 7 times as fast as a threshold for 4 scores, 3 for 16."""
    columns = scores.T.contiguous()
    place = torch.zeros(columns.shape, dtype=torch.int8, device=scores.device)
    for later in range(1, len(columns)):
        less = (columns[later] < columns[:later]).view(torch.int8)  # equal scores keep their order
        place[:later] += less
        place[later] += later - less.sum(0, dtype=torch.int8)
    return (place < count).T


def kth_smallest(values: Tensor, count: int) -> Tensor:
    """The `count`-th smallest value, counted from 1, of each row [rows, size], as [rows, 1]."""
    # On a GPU, `kthvalue` processes a row on a single multiprocessor, whereas `sort` uses all of them. On a CPU it
    # takes twice the time of numpy's vectorised selection (13 and 6 ms for 0.9 million values).
    if is_gpu(values.device) and len(values) < 8:
        return values.sort(-1).values[:, count - 1, None]
    if values.device.type == "cpu" and values.dtype in (torch.float32, torch.float64):
        return torch.from_numpy(np.partition(values.numpy(), count - 1, axis=-1)[:, count - 1, None])
    return values.kthvalue(count, dim=-1, keepdim=True).values


def implies_sparsity(pattern: object) -> bool:
    """Whether a pattern implies its sparsity, as "2:4" does and "n:4" does not."""
    return isinstance(pattern, str) and ":" in pattern and not pattern.startswith("n:")


def parse_pattern(pattern: str, sparsity: float | None, group_size: int = 1) -> "Pattern | MixedNM":
    """Parse ``pattern``, ``sparsity`` and ``group_size`` of a configuration.

    `sparsity` may be None for "2:4", which implies it; `group_size` is for "structured" only.

    Raises:
        MoonshotError: an unknown pattern, a sparsity outside [0, 1], or one that contradicts n:m.
    """
    usage = 'use "unstructured", "structured", "experts" or "n:m", such as "2:4" (keeps 2 of every 4)'
    require(isinstance(pattern, str), usage, field="pattern", value=pattern)
    if group_size != 1 and pattern != Structured.kind:
        message = f"pattern={pattern!r} has no groups of columns"
        raise MoonshotError(message, field="group_size", value=group_size, hint="leave it out")
    parts = re.fullmatch(r"(n|\d+):(\d+)", pattern)
    if parts is None:
        kinds = (Unstructured.kind, Structured.kind, Experts.kind)
        require(pattern in kinds, usage, field="pattern", value=pattern)
        fraction = _given(pattern, sparsity)
        usage = "the fraction of weights to remove must be between 0 and 1"
        require(0 <= fraction <= 1, usage, field="sparsity", value=sparsity)
        if pattern == Structured.kind:
            return Structured(fraction, group_size)
        return Experts(fraction) if pattern == Experts.kind else Unstructured(fraction)
    m = int(parts[2])
    if parts[1] == "n":
        require(m > 1, "m must be at least 2", field="pattern", value=pattern)
        fraction, most = _given(pattern, sparsity), 1 - 1 / m
        if not 0 <= fraction <= most:
            message = f"pattern={pattern!r} keeps at least 1 of every {m}"
            raise MoonshotError(message, field="sparsity", value=sparsity, hint=f"give 0 to {most:g}")
        return MixedNM(fraction, m)
    usage = "n:m keeps n of every m, so n must be between 1 and m"
    require(0 < int(parts[1]) <= m, usage, field="pattern", value=pattern)
    parsed = NM(int(parts[1]), m)
    if sparsity is not None and not abs(sparsity - parsed.sparsity) < 1e-9:
        message = f"it contradicts pattern={pattern!r}, which has sparsity {parsed.sparsity:g}"
        raise MoonshotError(message, field="sparsity", value=sparsity, hint="leave it out")
    return parsed


def _given(pattern: str, sparsity: float | None) -> float:
    if sparsity is None:
        message = f"pattern={pattern!r} needs one, such as sparsity=0.5"
        raise MoonshotError(message, field="sparsity", value=None)
    return float(sparsity)
