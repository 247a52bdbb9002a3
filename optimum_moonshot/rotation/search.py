"""The spaces of a model that may be rotated, and checks that the model's function does not change."""

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
from .heads import find_heads
from .neurons import find_neurons, find_scales
from .spaces import RESIDUAL, Space, find_spaces
from .trace import parameter_slots, plain_experts, tolerance_of, trace


def find(
    model: nn.Module, batch: Batch, heads_only: bool, ordered: Collection[str] = (), scaled: Collection[str] = ()
) -> tuple[list[Space], dict[str, str]]:
    """The spaces of a model that may be rotated, permuted or scaled.

    Args:
        model: offloaded blocks are onloaded one at a time.
        batch: a small sample; its values do not matter.
        heads_only: leave out the residual stream, and with it untied embeddings.
        ordered: the names of layers whose neurons to permute.
        scaled: the names of layers whose inputs to scale.

    Returns:
        The spaces, and the reasons why others are excluded.

    Raises:
        MoonshotError: there are none, or the model does not run on the batch.
    """
    traced = trace(model, batch)
    spaces, refused = find_spaces(traced, [name for name, _ in find_blocks(model)])
    shared = _shared(model)
    spaces = [space for space in spaces if space.name.startswith(RESIDUAL) or not _touches(space, shared)]
    with plain_experts(model):
        groups, _ = find_structured_groups(model, batch)
    spaces += find_heads(traced, groups, spaces)
    spaces += [space for space in find_neurons(traced, groups, ordered, spaces) if not _touches(space, shared)]
    spaces += [space for space in find_scales(traced, groups, scaled, spaces) if not _touches(space, shared)]
    if heads_only:
        spaces = [space for space in spaces if not space.name.startswith(RESIDUAL)]
        refused = {}
    if not spaces:
        reasons = "; ".join(f"{name}: {why}" for name, why in refused.items())
        message = f"nothing in {type(model).__name__} can be rotated ({reasons or 'no heads'})"
        raise MoonshotError(message, field="rotation")
    return spaces, refused


def _shared(model: nn.Module) -> set[int]:
    """The ids of parameters that several modules share."""
    seen: set[int] = set()
    shared: set[int] = set()
    for _, _, parameter in parameter_slots(model):
        (shared if id(parameter) in seen else seen).add(id(parameter))
    return shared


def _touches(space: Space, parameters: set[int]) -> bool:
    axes = [place.at for place in space.places] + [at for each in space.foldings for at in each.readers]
    return any(id(at.parameter) in parameters for at in axes)


@torch.no_grad()
def outputs(model: nn.Module, batch: Batch) -> list[Tensor]:
    """The floating-point outputs of a model for a batch, in host memory.

    Args:
        model: in any mode.
        batch: its inputs.
    """
    with frozen(model), onloaded_in_turn(visited(model)):
        result = run_model(model, to_device(batch, model_device(model)))
    return [leaf.cpu() for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def check_same(model: nn.Module, batch: Batch, expected: Sequence[Tensor], step: str) -> None:
    """Raise `MoonshotError` unless the model's outputs are unchanged up to rounding.

    Args:
        model: after the step.
        batch: its inputs.
        expected: from `outputs` before the step, of any shape.
        step: its name in the error.

    Raises:
        MoonshotError: the outputs differ by more than rounding explains.
    """
    for after, before in zip(outputs(model, batch), expected, strict=True):
        error = float((after.double() - before.double()).norm() / before.double().norm().clamp_min(1e-30))
        limit = tolerance_of(_coarsest(model, before))
        if not error <= limit:  # also for NaN
            name, hint = type(model).__name__, Text("leave it out, or try {}", Option("rotation", "heads"))
            message = f"{step} changes the outputs of {name} by {error:.2g} of their norm, where rounding explains"
            raise MoonshotError(f"{message} {limit:g}", field="rotation", hint=hint)


def _coarsest(model: nn.Module, output: Tensor) -> torch.dtype:
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    return min({output.dtype, *dtypes} - {torch.float64} or {torch.float64}, key=lambda dtype: dtype.itemsize)


def check_invariance(model: nn.Module, basis: Basis, batch: Batch, expected: Sequence[Tensor]) -> None:
    """Check that the model's function is invariant under folding the norms and a random change of basis.

    The random basis is a permutation, with signs where possible: products with it are exact in any dtype.

    Args:
        model: of the basis; its weights are in the folded basis afterwards.
        basis: which stores the dense weights.
        batch: inputs of the model.
        expected: from `outputs` of the dense model, of any shape.

    Raises:
        MoonshotError: the function changes.
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
