"""The word embeddings of a model and its LM head, tied or not: which these are, and their rounding to a grid.

They have 20% to 60% of the parameters of a small language model and no input statistics. They are rounded to nearest,
which at 8 bits costs less than measurements resolve. A packed checkpoint stores all codes of a row, without a bitmask.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import MoonshotError
from ..objective.grid import DTYPES, Grid
from ..objective.patterns import NM
from ..packing import Quantized
from .layers import NamedParameter, PrunableLayer, other_parameters

STORED = NM(1, 1)  # the pattern of packed word embeddings
_KINDS: dict[str, Any] = {"get_input_embeddings": nn.Embedding, "get_output_embeddings": nn.Linear}
_PROBED = 8  # rows that show for most matrices that they are not on a grid


def word_embeddings(model: nn.Module, layers: Iterable[PrunableLayer]) -> list[NamedParameter]:
    """The weights of the input embeddings and heads that a model of transformers and its parts declare, tied ones once.

    The weights of `layers`, which are pruned, are not among them.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for layer in layers:
        names.pop(id(layer.parameter), None)
    embeddings = []
    for module in model.modules():
        for getter, kind in _KINDS.items():
            embedding: Any = _declared(module, getter)
            if isinstance(embedding, kind) and embedding.weight.dtype in DTYPES:
                name = names.pop(id(embedding.weight), None)
                embeddings += [] if name is None else [NamedParameter.of(model, name)]
    return embeddings


def _declared(module: nn.Module, getter: str) -> Any:
    """The result of a getter of a model; None for other modules, and for models that do not define it."""
    try:
        return getattr(module, getter, lambda: None)()
    except (NotImplementedError, AttributeError):
        return None


@torch.no_grad()
def rounded_to(grid: Grid, weight: Tensor) -> Tensor:
    """A matrix [rows, d_in] rounded to nearest on a grid; one that is on the grid already stays as it is."""
    grid = grid.with_dtype(weight.dtype)
    try:
        for rows in (weight[:: max(1, len(weight) // _PROBED)], weight):
            grid.scales_of(rows)
    except MoonshotError:
        return grid.rounded(weight, grid.search(weight, torch.ones(1, weight.shape[1], device=weight.device)))
    return weight


def bytes_beside(model: nn.Module, layers: Sequence[PrunableLayer], grid: Grid | None) -> int:
    """Bytes of the parameters outside of pruned layers in a packed checkpoint, with word embeddings on a grid, if any.

    A weight may be on the meta device.
    """
    total = sum(parameter.nbytes for parameter in other_parameters(model, layers))
    if grid is not None:
        codec, weights = Quantized.of(grid), [embedding.matrix for embedding in word_embeddings(model, layers)]
        total -= sum(max(0, weight.nbytes - codec.packed_bytes(weight, STORED)) for weight in weights)
    return total
