"""The spaces of a model that may be rotated, and whether the model stays the function that it is."""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..data.batches import Batch
from ..errors import MoonshotError, require
from ..model.calls import frozen, model_device, run_model, to_device
from ..model.layers import find_blocks, visited
from ..model.onloading import onloaded_in_turn
from ..model.structured_groups import find_structured_groups
from .basis import Basis
from .heads import find_heads
from .neurons import find_neurons, find_scales
from .spaces import RESIDUAL, Space, find_spaces
from .trace import places_of_parameters, plain_experts, tolerance_of, trace


def find(
    model: nn.Module, batch: Batch, heads_only: bool, ordered: Collection[str] = (), scaled: Collection[str] = ()
) -> tuple[list[Space], dict[str, str]]:
    """What may be rotated, or permuted, in a model.

    Args:
        model: its blocks' weights are brought one after the other where they are elsewhere.
        batch: a small sample; its values do not matter.
        heads_only: leave out the residual stream, and whatever else would untie embeddings.
        ordered: the names of layers that the order of their neurons matters to.
        scaled: the names of layers that may take what they read in other units.

    Returns:
        The spaces, and the reasons why there are no others.

    Raises:
        MoonshotError: there are none, or the model does not run on the batch.
    """
    found = trace(model, batch)
    spaces, refused = find_spaces(found, [name for name, _ in find_blocks(model)])
    shared = _shared(model)
    spaces = [space for space in spaces if space.name.startswith(RESIDUAL) or not _touches(space, shared)]
    with plain_experts(model):
        units, _ = find_structured_groups(model, batch)
    spaces += find_heads(found, units, spaces)
    spaces += [space for space in find_neurons(found, units, ordered, spaces) if not _touches(space, shared)]
    spaces += [space for space in find_scales(found, units, scaled, spaces) if not _touches(space, shared)]
    if heads_only:
        spaces = [space for space in spaces if not space.name.startswith(RESIDUAL)]
        refused = {}
    reasons = "; ".join(f"{name}: {why}" for name, why in refused.items())
    require(bool(spaces), f"rotation: nothing in {type(model).__name__} can be rotated ({reasons or 'no heads'})")
    return spaces, refused


def _shared(model: nn.Module) -> set[int]:
    """The ids of parameters that several modules hold."""
    seen: set[int] = set()
    found: set[int] = set()
    for _, _, parameter in places_of_parameters(model):
        (found if id(parameter) in seen else seen).add(id(parameter))
    return found


def _touches(space: Space, parameters: set[int]) -> bool:
    axes = [place.at for place in space.places] + [at for each in space.foldings for at in each.readers]
    return any(id(at.parameter) in parameters for at in axes)


@torch.no_grad()
def outputs(model: nn.Module, batch: Batch) -> list[Tensor]:
    """What a model returns for a batch, in host memory.

    Args:
        model: in any mode.
        batch: its inputs.
    """
    with frozen(model), onloaded_in_turn(visited(model)):
        result = run_model(model, to_device(batch, model_device(model)))
    return [leaf.cpu() for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def check_same(model: nn.Module, batch: Batch, expected: Sequence[Tensor], step: str) -> None:
    """The model returns what it did, up to rounding.

    Args:
        model: as it is now.
        batch: its inputs.
        expected: of `outputs`, before, of any shape.
        step: what was done since.

    Raises:
        MoonshotError: it does not.
    """
    for found, before in zip(outputs(model, batch), expected, strict=True):
        error = float((found.double() - before.double()).norm() / before.double().norm().clamp_min(1e-30))
        limit = tolerance_of(_coarsest(model, before))
        if not error <= limit:
            raise MoonshotError(
                f"rotation: {step} changes what {type(model).__name__} computes, by {error:.2g} of its result where "
                f'rounding explains {limit:g}; leave it out, or try rotation="heads"'
            )


def _coarsest(model: nn.Module, output: Tensor) -> torch.dtype:
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    return min({output.dtype, *dtypes} - {torch.float64} or {torch.float64}, key=lambda dtype: dtype.itemsize)


def verify(model: nn.Module, basis: Basis, batch: Batch, expected: Sequence[Tensor]) -> None:
    """Fold the norms, then change the basis at random, and look whether the function stays what it is.

    The random basis is a permutation, with signs where these may be: products with it are exact in any dtype.

    Args:
        model: the basis's; its weights are in the folded basis afterwards.
        basis: which keeps the weights as they were.
        batch: inputs of the model.
        expected: what it returned for them, of any shape.

    Raises:
        MoonshotError: the function changes.
    """
    basis.write({})
    check_same(model, batch, expected, "folding the norms into the matrices behind them")
    generator = torch.Generator().manual_seed(0)
    basis.write({space: _permutation(space, generator) for space in basis.spaces})
    check_same(model, batch, expected, f"a change of basis ({', '.join(space.name for space in basis.spaces[:3])})")
    basis.write({})


def _permutation(space: Space, generator: torch.Generator) -> Tensor:
    """Random signed permutations [count, width, width]; unsigned where the vector of ones must stay, or as orders."""
    if space.permuted:
        return torch.stack([torch.randperm(space.width, generator=generator) for _ in range(space.count)])
    if space.scaled:
        return 2.0 ** torch.randint(-2, 3, (space.count, space.width), generator=generator)
    found = torch.zeros(space.count, space.width, space.width)
    for matrix in found:
        order = torch.randperm(space.width, generator=generator)
        signs = torch.randn(space.width, generator=generator).sign()
        matrix[torch.arange(space.width), order] = 1.0 if space.fixes_ones else signs
    return found
