"""The spaces of a model that may be rotated, and checks that the model's function does not change."""

from collections import Counter
from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..data.batches import Batch
from ..errors import MoonshotError, Option, Text
from ..model.calls import frozen, model_device, run_model, to_device
from ..model.layers import find_blocks, onloaded_in_turn, visited
from ..model.structured_groups import find_structured_groups
from .basis import Basis
from .group_spaces import find_heads, find_neurons, find_scales
from .spaces import RESIDUAL, Space, find_spaces
from .trace import Axis, Trace, parameter_slots, plain_experts, tolerance_of


def find(
    model: nn.Module, batch: Batch, heads_only: bool, ordered: Collection[str] = (), scaled: Collection[str] = ()
) -> tuple[list[Space], dict[str, str]]:
    """The spaces of a model that may be rotated, permuted or scaled, and the reasons why others are excluded.

    The values of the batch, a small sample, do not matter. `heads_only` leaves out the residual stream, and with it
    untied embeddings; `ordered` are the layers whose neurons to permute, `scaled` those whose inputs to scale.
    """
    trace = Trace(model, batch)
    spaces, refused = find_spaces(trace, [name for name, _ in find_blocks(model)])
    with plain_experts(model):
        groups, _ = find_structured_groups(model, batch)
    counts = Counter(id(parameter) for _, _, parameter in parameter_slots(model))

    def without_shared(candidates: list[Space]) -> list[Space]:
        """Leave out spaces with a parameter that several modules share."""
        return [space for space in candidates if all(counts[id(at.parameter)] <= 1 for at in _axes(space))]

    spaces = [space for space in spaces if space.name.startswith(RESIDUAL) or without_shared([space])]
    spaces += find_heads(trace, groups, spaces)
    spaces += without_shared(find_neurons(trace, groups, ordered, spaces))
    spaces += without_shared(find_scales(trace, groups, scaled, spaces))
    if heads_only:
        spaces = [space for space in spaces if not space.name.startswith(RESIDUAL)]
        refused = {}
    if not spaces:
        reasons = "; ".join(f"{name}: {why}" for name, why in refused.items())
        message = f"nothing in {type(model).__name__} can be rotated ({reasons or 'no heads'})"
        raise MoonshotError(message, field="rotation")
    return spaces, refused


def _axes(space: Space) -> list[Axis]:
    return [place.at for place in space.places] + [at for folding in space.foldings for at in folding.readers]


@torch.no_grad()
def outputs(model: nn.Module, batch: Batch) -> list[Tensor]:
    """The floating-point outputs of a model, in any mode, for a batch; in host memory."""
    with frozen(model), onloaded_in_turn(visited(model)):
        result = run_model(model, to_device(batch, model_device(model)))
    return [leaf.cpu() for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def check_same(model: nn.Module, batch: Batch, expected: Sequence[Tensor], step: str) -> None:
    """Raise `MoonshotError` if a step has changed the model's outputs by more than rounding explains."""
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    for after, before in zip(outputs(model, batch), expected, strict=True):
        error = float((after.double() - before.double()).norm() / before.double().norm().clamp_min(1e-30))
        inexact = {before.dtype, *dtypes} - {torch.float64} or {torch.float64}
        limit = tolerance_of(min(inexact, key=lambda dtype: dtype.itemsize))
        if not error <= limit:  # also for NaN
            name, hint = type(model).__name__, Text("leave it out, or try {}", Option("rotation", "heads"))
            message = f"{step} changes the outputs of {name} by {error:.2g} of their norm, where rounding explains"
            raise MoonshotError(f"{message} {limit:g}", field="rotation", hint=hint)


def check_invariance(model: nn.Module, basis: Basis, batch: Batch, expected: Sequence[Tensor]) -> None:
    """Check with `check_same` that folding the norms and a random change of basis preserve the function.

    The random basis is a permutation, with signs where possible: products with it are exact in any dtype. The weights
    are in the folded basis afterwards. `expected` are the outputs of the dense model.
    """
    basis.write({})
    check_same(model, batch, expected, "folding the norms into the matrices that follow them")
    generator = torch.Generator().manual_seed(0)
    basis.write({space: _permutation(space, generator) for space in basis.spaces})
    check_same(model, batch, expected, f"a change of basis ({', '.join(space.name for space in basis.spaces[:3])})")
    basis.write({})


def _permutation(space: Space, generator: torch.Generator) -> Tensor:
    """Random signed permutations [count, width, width]; unsigned if the vector of ones is fixed.

    For spaces to permute their indices [count, width], for spaces to scale powers of 2 [count, width].
    """
    if space.permuted:
        return torch.stack([torch.randperm(space.width, generator=generator) for _ in range(space.count)])
    if space.scaled:
        return 2.0 ** torch.randint(-2, 3, (space.count, space.width), generator=generator)
    matrices = torch.zeros(space.count, space.width, space.width)
    for matrix in matrices:
        order = torch.randperm(space.width, generator=generator)
        signs = torch.randn(space.width, generator=generator).sign()
        matrix[torch.arange(space.width), order] = 1.0 if space.fixes_ones else signs
    return matrices
