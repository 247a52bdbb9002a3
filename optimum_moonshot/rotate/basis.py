"""Writes another basis into a model's weights, restores the dense weights, and checks that the function is the same.

The gains of norms are folded into the matrices that follow, then every axis with coordinates of a space is multiplied
by the rotation of that space. Both start from the dense weights, in float64 (float32 for 16-bit weights and on MPS),
and round once.

The dense weights of resident blocks are copied to host memory. The dense weights of offloaded blocks stay at their
source, and changes are stored separately (model/weights.py), block by block.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..data.batches import Batch
from ..errors import MoonshotError, require
from ..model.calls import frozen, model_device, run_model, to_device
from ..model.layers import Block, by_module, onloaded_in_turn, visited
from ..model.weights import RESIDENT, Weights, mark_written
from .report import RotationReport
from .spaces import Place, Space
from .trace import Axis, parameter_slots, tolerance_of


@dataclass(eq=False)
class _Change:
    """The change of one parameter in one module."""

    at: Axis
    gains: list[tuple[int, Tensor]] = field(default_factory=list)  # axis, γ
    shrink: Tensor | None = None  # γ by which a norm's shift is divided
    value: float | None = None  # replaces a folded gain
    places: list[tuple[Space, Place]] = field(default_factory=list)

    def same(self, other: "_Change") -> bool:
        """Whether both change the parameter in the same way."""
        ours, theirs = (
            [(space, place.at.axis, None if place.index is None else place.index.tolist()) for space, place in places]
            for places in (self.places, other.places)
        )
        return self is other or (ours == theirs and not (self.gains or other.gains))


class Basis:
    """The basis of a dense model's weights in some spaces; offloaded blocks are onloaded one at a time."""

    def __init__(self, model: nn.Module, blocks: Sequence[Block], spaces: Sequence[Space]):
        self.model, self.blocks, self.spaces = model, blocks, list(spaces)
        self.changes = _changes(self.spaces, model)
        self.untied: list[tuple[Axis, nn.Parameter]] = []  # untied uses, with the shared parameter
        self.settings: list[tuple[Any, Any]] = []  # configurations, with their tie_word_embeddings
        self.dense: dict[int, Tensor] = {}  # id of a parameter → its dense value, in host memory
        self.stored: dict[Weights, Any] = {}  # offloaded weights of a block → their dense state
        inputs, outputs = (_embeddings(model, f"get_{end}_embeddings") for end in ("input", "output"))
        for at in self._to_untie():
            tied = at.holder is outputs and getattr(inputs, at.name, None) is at.parameter and bool(_tying(model))
            message = f"{at.name} of a {type(at.holder).__name__} is shared by modules that would need it in different"
            require(tied, f"{message} bases")

    @property
    def untied_bytes(self) -> int:
        """The additional memory of the parameters that `keep` has untied."""
        return sum(at.parameter.nbytes for at, _ in self.untied)

    def _to_untie(self) -> list[Axis]:
        """The uses of shared parameters that change differently from the input embeddings, else from the first use."""
        inputs = _embeddings(self.model, "get_input_embeddings")
        first: dict[int, _Change] = {}
        for change in sorted(self.changes, key=lambda change: change.at.holder is not inputs):
            first.setdefault(id(change.at.parameter), change)
        return [change.at for change in self.changes if not change.same(first[id(change.at.parameter)])]

    def keep(self) -> None:
        """Untie parameters that need two bases, and copy the parameters that will change to host memory.

        The configuration then ties no parameters, so all other tied parameters are untied too, such as the bias of a
        head and the bias of a layer in it: after saving and loading, they would be separate anyway.
        """
        tied = _tied_names(self.model)
        for at in self._to_untie():
            self._untie(at)
        self.settings = [(config, config.tie_word_embeddings) for config in _tying(self.model) if self.untied]
        for config, _ in self.settings:
            config.tie_word_embeddings = False
        uses = Counter(id(parameter) for _, _, parameter in parameter_slots(self.model))
        for name in tied - _tied_names(self.model):
            holder, _, key = name.rpartition(".")
            at = Axis(self.model.get_submodule(holder), key, 0)
            if uses[id(at.holder._parameters.get(key))] > 1:
                uses[id(at.parameter)] -= 1
                self._untie(at)
        for weights, changes in self._by_block():
            if weights is not RESIDENT:
                self.stored[weights] = weights.changes()
                continue
            for parameter in (change.at.parameter for change in changes):
                if id(parameter) not in self.dense:
                    self.dense[id(parameter)] = parameter.detach().to("cpu", copy=True)

    def _untie(self, at: Axis) -> None:
        shared = at.parameter
        self.untied.append((at, shared))
        setattr(at.holder, at.name, nn.Parameter(shared.detach().clone(), requires_grad=shared.requires_grad))
        mark_written(at.holder, at.name)

    def _by_block(self) -> list[tuple[Weights, list[_Change]]]:
        """The changes by the weights of their block, resident weights last."""
        weights, by_block = by_module(self.blocks), dict[Weights, list[_Change]]()
        for change in self.changes:
            by_block.setdefault(weights.get(change.at.holder, RESIDENT), []).append(change)
        return sorted(by_block.items(), key=lambda item: item[0] is RESIDENT)

    @torch.no_grad()
    def write(self, rotations: Mapping[Space, Tensor]) -> None:
        """Write the weights in the basis of `rotations` (see `_transform`); {} only folds the gains of norms."""
        for weights, changes in self._by_block():
            if weights is not RESIDENT:
                weights.restore(self.stored[weights])
            with weights.onloaded():
                by_parameter = {id(change.at.parameter): change for change in reversed(changes)}
                for change in by_parameter.values():  # once, if several modules share it
                    parameter = change.at.parameter
                    dense = self.dense.get(id(parameter), parameter).to(parameter.device)
                    parameter.copy_(_apply(change, dense, rotations))
                    mark_written(change.at.holder, change.at.name)

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the dense model, bit by bit."""
        for weights, changes in self.stored.items():
            weights.restore(changes)
        for at in (change.at for change in self.changes):
            if id(at.parameter) in self.dense:
                at.parameter.copy_(self.dense[id(at.parameter)])
                mark_written(at.holder, at.name)
        for at, shared in self.untied:
            setattr(at.holder, at.name, shared)
            mark_written(at.holder, at.name)
        for config, tied in self.settings:
            config.tie_word_embeddings = tied
        self.untied, self.settings = [], []
        self.forget()

    def forget(self) -> None:
        """Free the copies of the dense weights; the model keeps its basis."""
        self.dense.clear()
        self.stored.clear()


@dataclass(eq=False)
class ModelRotation:
    """The learned rotations of a model, which can be written into its weights and undone."""

    report: RotationReport
    basis: Basis  # has the dense weights while the model is rotated
    rotations: Mapping[Space, Tensor]  # [count, width, width] each; empty if no basis improves the objective
    written: bool

    def write(self) -> None:
        """Write the weights in the new basis, unless they are already; on failure, restore the model."""
        if self.written or not self.rotations:
            return
        try:
            self.basis.keep()
            self.basis.write(self.rotations)
        except BaseException:
            self.basis.restore()
            raise
        self.written = True

    def undo(self) -> None:
        """Restore the dense weights, bit by bit."""
        if self.written:
            self.basis.restore()
            self.written = False

    @contextmanager
    def applied(self) -> Iterator[None]:
        """A context in which the weights are in the new basis."""
        before = self.written
        self.write()
        try:
            yield
        finally:
            if not before:
                self.undo()


def _changes(spaces: Sequence[Space], model: nn.Module) -> list[_Change]:
    """The change of every parameter, once per module that has it, including modules where it keeps its basis."""
    changes: dict[tuple[nn.Module, str], _Change] = {}

    def change(at: Axis) -> _Change:
        return changes.setdefault((at.holder, at.name), _Change(at))

    for space in spaces:
        for folding in space.foldings:
            norm, gain = folding.norm, folding.norm.gain
            assert norm.weight is not None and gain is not None  # a norm without a gain has no folding
            change(Axis(norm.module, norm.weight, 0)).value = norm.neutral
            if norm.bias is not None:
                change(Axis(norm.module, norm.bias, 0)).shrink = gain
            for at in folding.readers:
                change(at).gains.append((at.axis, gain))
        for place in space.places:
            change(place.at).places.append((space, place))
    changed = {id(change.at.parameter) for change in changes.values()}
    for module, name, parameter in parameter_slots(model):
        if id(parameter) in changed:
            change(Axis(module, name, 0))
    return list(changes.values())


def _embeddings(model: nn.Module, getter: str) -> Any:
    """A model's input or output embeddings; None if it does not define them."""
    try:
        return getattr(model, getter)()
    except (AttributeError, NotImplementedError):
        return None


def _tying(model: nn.Module) -> list[Any]:
    """The configurations that tie the head to the embeddings."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    configs = {id(config): config, id(text): text}.values()
    return [owner for owner in configs if getattr(owner, "tie_word_embeddings", False)]


def _tied_names(model: nn.Module) -> set[str]:
    """The names of the parameters that the configurations of a `PreTrainedModel` and its parts tie to others."""
    expanded = getattr(model, "get_expanded_tied_weights_keys", None)
    return set() if expanded is None else set(expanded(all_submodels=True))


def _apply(change: _Change, dense: Tensor, rotations: Mapping[Space, Tensor]) -> Tensor:
    """Return a dense parameter in the new basis, in the dtype of the computation."""
    if change.value is not None:
        return torch.full_like(dense, change.value)
    work = torch.float32 if dense.dtype.itemsize <= 2 or dense.device.type == "mps" else torch.float64
    value = dense.to(work)
    if change.shrink is not None:
        value = torch.where(value == 0, 0, value / change.shrink.to(value))
    for axis, gain in change.gains:
        value = _multiply(value, axis, gain.to(value))
    for space, place in change.places:
        if space in rotations:
            rotation = 1 / rotations[space] if space.scaled and not place.writes else rotations[space]
            value = _transform(value, place.at.axis, place.index, rotation)
    return value


def _multiply(value: Tensor, axis: int, factors: Tensor) -> Tensor:
    return value * factors.view([-1 if dim == axis else 1 for dim in range(value.ndim)])


def _transform(value: Tensor, axis: int, index: Tensor | None, change: Tensor) -> Tensor:
    """Rotate, permute or scale the coordinates of a weight that are at `Place.index` on one axis.

    `change` has orthogonal matrices [count, width, width], permutations int64 [count, width] (the source of each
    position), or factors [count, width].
    """
    if change.ndim == 3:
        return rotate_axis(value, axis, index, change.to(value))
    index = None if index is None else index.to(value.device)
    if change.is_floating_point():
        change = change.to(value)
        whole = change[0]
        if index is not None:
            whole = change.new_ones(value.shape[axis])
            whole[index.flatten()] = change[:, None].expand_as(index).flatten()
        return _multiply(value, axis, whole)
    change = change.to(value.device)
    if index is None:
        return value.index_select(axis, change[0])
    source = index.gather(-1, change[:, None].expand_as(index))
    return value.index_copy(axis, index.flatten(), value.index_select(axis, source.flatten()))


def rotate_axis(value: Tensor, axis: int, index: Tensor | None, rotation: Tensor) -> Tensor:
    """``value · R`` along the axis, for an axis that writes the space ``Rᵀ`` from the left.

    The coordinates are at `Place.index`; R is [count, width, width], in the value's dtype and on its device.
    """
    if index is None and value.ndim == 2:
        return value @ rotation[0] if axis == 1 else rotation[0].mT @ value
    last = value.movedim(axis, -1)
    if index is None:
        return (last @ rotation[0]).movedim(-1, axis)
    index = index.to(value.device)
    rotated = torch.einsum("...cri,cij->...crj", last[..., index], rotation).flatten(-3)
    flat = index.flatten()
    if flat.numel() == last.shape[-1]:
        return rotated[..., flat.argsort()].movedim(-1, axis)
    return last.index_copy(-1, flat, rotated).movedim(-1, axis)


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
            name, hint = type(model).__name__, "leave it out, or try rotation='heads'"
            message = f"{step} changes the outputs of {name} by {error:.2g} of their norm, where rounding explains"
            raise MoonshotError(f"{message} {limit:g}", field="rotation", hint=hint)


def check_invariance(model: nn.Module, basis: Basis, batch: Batch, expected: Sequence[Tensor]) -> None:
    """Check that folding the norms, and a random change of basis, preserve the outputs `expected` of the dense model.

    The random basis is a permutation, with signs where possible: products with it are exact in any dtype. Afterwards
    the weights are in the folded basis.
    """
    basis.write({})
    check_same(model, batch, expected, "folding the norms into the matrices that follow them")
    generator = torch.Generator().manual_seed(0)
    basis.write({space: _permutation(space, generator) for space in basis.spaces})
    check_same(model, batch, expected, f"a change of basis ({', '.join(space.name for space in basis.spaces[:3])})")
    basis.write({})


def _permutation(space: Space, generator: torch.Generator) -> Tensor:
    """Return a random change of a space's basis for `_transform`.

    Spaces to rotate get signed permutations (without signs if R must fix the vector of ones), spaces to scale powers
    of 2.
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
