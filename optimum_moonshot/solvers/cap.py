"""CAP (Kuznedelev et al., arXiv 2210.09223) with both objectives: greedy OBS on column blocks.

Each row is split into blocks of consecutive inputs, and each block has its own quadratic. The removals of all blocks
of the layer are ranked together by cumulative loss.
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

    `block_size` bounds the inputs of a column block, which has the largest divisor of d_in up to that size (for n:m,
    among the multiples of m).
    """

    # 192 is the value of the original implementation, for DeiT.
    block_size: int = hyperparameter(192, help="largest number of inputs in a column block", least=1)

    cumulative: ClassVar[bool] = True

    def column_block(self, d_in: int, pattern: Pattern) -> int:
        most = max(self.block_size, pattern.width)
        sizes = range(pattern.width, min(most, d_in) + 1, pattern.width)
        return max(size for size in sizes if d_in % size == 0)
