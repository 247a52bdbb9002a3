"""OBC (Frantar & Alistarh, arXiv 2208.11580, "ExactOBS") with row-specific Hessians.

Each row is one quadratic, eliminated greedily; the removals of the layer are ranked by their individual losses.
"""

from dataclasses import dataclass
from typing import ClassVar

from .base import register_solver
from .ranked import Ranked


@register_solver("obc")
@dataclass(frozen=True)
class OBC(Ranked):
    """Comparison group: the layer. `damping` p adds ``μ_k = p·mean(diag F_k)`` to the diagonal of F_k."""

    cumulative: ClassVar[bool] = False
