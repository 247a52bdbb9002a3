"""The parameters of a block besides its pruned matrices: they train where pruning changes the block's structure.

A layer that lost neurons or heads can only reproduce the dense block as far as its remaining inputs allow. The matrices
that produce these, and the norms before them, are tuned with it.
"""

from collections.abc import Iterable

from torch import nn

from ..model.layers import Block
from ..objective.patterns import MixedNM, Pattern, Structured


def changes_structure(patterns: Iterable[Pattern | MixedNM]) -> bool:
    """Whether patterns of a block's layers remove neurons or heads."""
    return any(isinstance(pattern, Structured) for pattern in patterns)


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """The floating-point parameters of a block by their names in it, without those of embeddings.

    An embedding in a block may produce an argument of other blocks, as the relative positions of T5 do.
    """
    tables = {id(each.weight) for each in module.modules() if isinstance(each, nn.Embedding)}
    named = module.named_parameters()
    return {name: each for name, each in named if each.is_floating_point() and id(each) not in tables}


def shared_names(model: nn.Module, blocks: Iterable[Block]) -> set[str]:
    """The names of parameters in blocks that are also used outside of their block; no block is onloaded."""
    prefixes = [f"{block.name}." for block in blocks]
    uses: dict[int, list[tuple[str, str]]] = {}  # parameter → its names, each with that of the block
    for name, parameter in model.named_parameters(remove_duplicate=False):
        inside = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
        uses.setdefault(id(parameter), []).append((name, inside))
    shared = [names for names in uses.values() if len({inside for _, inside in names}) > 1]
    return {name for names in shared for name, _ in names}
