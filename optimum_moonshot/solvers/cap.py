"""CAP (Kuznedelev et al., arXiv 2210.09223) with both objectives: greedy OBS on blocks of a row's inputs.

A block's removals are ranked, with those of all blocks of the layer, by their cumulative loss.
"""

from dataclasses import dataclass
from typing import ClassVar

from ..objective.patterns import Pattern
from ..objective.quadratic import BlockQuadratic
from .base import register_solver
from .hyperparameters import damping_option, hyperparameter
from .ranked import Ranked


@register_solver("cap")
@dataclass(frozen=True)
class CAP(Ranked):
    """Comparison group: the layer. `damping` p adds ``p·mean(diag)`` to the diagonal of every block's matrix.

    `block_size` is the most inputs that a block may have: it is the largest divisor of d_in up to there (for n:m,
    among the multiples of m).
    """

    damping: float = damping_option()
    # The default is that of the original, for DeiT.
    block_size: int = hyperparameter(192, help="the most inputs of a row that have a quadratic together", least=1)

    objective: ClassVar[type] = BlockQuadratic
    cumulative: ClassVar[bool] = True

    def block(self, d_in: int, pattern: Pattern) -> int:
        """Inputs per block of a layer."""
        most = max(self.block_size, pattern.width)
        sizes = range(pattern.width, min(most, d_in) + 1, pattern.width)
        return max(size for size in sizes if d_in % size == 0)
