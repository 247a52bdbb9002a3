"""CAP (Kuznedelev et al., arXiv 2210.09223) with both objectives: greedy OBS on column blocks.

A row's inputs fall into blocks of consecutive ones, each with a quadratic of its own. A block's removals are ranked,
with those of all blocks of the layer, by their cumulative loss.
"""

from dataclasses import dataclass
from typing import ClassVar

from ..objective.patterns import Pattern
from .base import hyperparameter, register_solver
from .ranked import Ranked


@register_solver("cap")
@dataclass(frozen=True)
class CAP(Ranked):
    """Comparison group: the layer. `damping` p adds ``p·mean(diag)`` to the diagonal of every block's matrix.

    `block_size` is the most inputs that a column block may have: they are the largest divisor of d_in up to there (for
    n:m, among the multiples of m).
    """

    # The default is that of the original, for DeiT.
    block_size: int = hyperparameter(192, help="the most inputs of a row that have a quadratic together", least=1)

    cumulative: ClassVar[bool] = True

    def column_block(self, d_in: int, pattern: Pattern) -> int:
        most = max(self.block_size, pattern.width)
        sizes = range(pattern.width, min(most, d_in) + 1, pattern.width)
        return max(size for size in sizes if d_in % size == 0)
