"""One-shot pruning with two objectives at once (MOONSHOT, arXiv 2604.13287)."""

from .config import MoonshotConfig
from .prune_weight import prune_weight

__all__ = ["MoonshotConfig", "prune_weight"]
