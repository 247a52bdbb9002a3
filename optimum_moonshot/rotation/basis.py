"""Writes another basis into a model's weights, and restores the dense weights.

Norms' gains are folded into the matrices that follow them, then every axis with coordinates of a space is multiplied by
the rotation of that space. Both are computed from the dense weights in float64 (float32 for 16-bit weights and on MPS),
and rounded once.

The dense weights of resident blocks are copied to host memory. Offloaded blocks keep theirs at their source, and the
changes are stored separately (model/offload.py), block by block.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import require
from ..model.layers import Block, by_module
from ..model.offload import RESIDENT, Changes, Offloaded, Weights, mark_written
from .spaces import Place, Space
from .trace import Axis, parameter_slots


@dataclass(eq=False)
class _Change:
    """The change of one parameter of one module."""

    at: Axis
    gains: list[tuple[int, Tensor]] = field(default_factory=list)  # axis, γ
    shrink: Tensor | None = None  # γ that a norm's shift is divided by
    value: float | None = None  # replaces a folded gain
    places: list[tuple[Space, Place]] = field(default_factory=list)

    def same(self, other: "_Change") -> bool:
        """Whether both change the parameter in the same way."""
        here, there = (
            [(space, place.at.axis, None if place.index is None else place.index.tolist()) for space, place in places]
            for places in (self.places, other.places)
        )
        return here == there and not self.gains and not other.gains


class Basis:
    """The basis of a model's weights.

    Args:
        model: dense; offloaded blocks are onloaded one at a time.
        blocks: of the model.
        spaces: of the model whose basis may change.

    Raises:
        MoonshotError: a parameter that two modules share and need in different bases, and that cannot be untied.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[Block], spaces: Sequence[Space]):
        self.model, self.blocks, self.spaces = model, blocks, list(spaces)
        self.changes = _changes(self.spaces, model)
        self.untied: list[tuple[nn.Module, str, nn.Parameter]] = []  # with the shared parameter
        self.settings: list[tuple[Any, Any]] = []  # configurations, with their tie_word_embeddings
        self.dense: dict[int, Tensor] = {}  # id of a parameter → its dense value, in host memory
        self.offloaded: dict[Offloaded, Changes] = {}  # weights of a block → their dense state
        self._check_ties()

    @property
    def untied_bytes(self) -> int:
        """The additional memory of the parameters that are untied."""
        return sum(parameter.nbytes for _, _, parameter in self._to_untie())

    def _to_untie(self) -> list[tuple[nn.Module, str, nn.Parameter]]:
        """The uses of shared parameters that change differently from the input embeddings, else from the first use."""
        inputs = _embeddings(self.model, "get_input_embeddings")
        first: dict[int, _Change] = {}
        for change in sorted(self.changes, key=lambda change: change.at.holder is not inputs):
            first.setdefault(id(change.at.parameter), change)
        pairs = [(change, first[id(change.at.parameter)]) for change in self.changes]
        return [
            (change.at.holder, change.at.name, change.at.parameter)
            for change, other in pairs
            if change is not other and not change.same(other)
        ]

    def _check_ties(self) -> None:
        model = self.model
        inputs, outputs = (_embeddings(model, f"get_{end}_embeddings") for end in ("input", "output"))
        for holder, name, parameter in self._to_untie():
            tied = holder is outputs and getattr(inputs, name, None) is parameter and bool(_tying(model))
            kind = type(holder).__name__
            require(tied, f"{name} of a {kind} is shared by modules that would need it in different bases")

    def keep(self) -> None:
        """Untie parameters that need two bases, and copy the parameters that will change to host memory."""
        for holder, name, parameter in self._to_untie():
            untied = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
            setattr(holder, name, untied)
            mark_written(holder, name)
            self.untied.append((holder, name, parameter))
        if self.untied:
            self.settings = [(config, config.tie_word_embeddings) for config in _tying(self.model)]
            for config, _ in self.settings:
                config.tie_word_embeddings = False
        for block, changes in self._by_block():
            if isinstance(block, Offloaded):
                self.offloaded[block] = block.changes()
                continue
            for parameter in (change.at.parameter for change in changes):
                if id(parameter) not in self.dense:
                    self.dense[id(parameter)] = parameter.detach().to("cpu", copy=True)

    def _by_block(self) -> list[tuple[Weights, list[_Change]]]:
        """The changes by the weights of their block, resident weights last."""
        weights, by_block = by_module(self.blocks), dict[Weights, list[_Change]]()
        for change in self.changes:
            by_block.setdefault(weights.get(change.at.holder, RESIDENT), []).append(change)
        return sorted(by_block.items(), key=lambda each: each[0] is RESIDENT)

    @torch.no_grad()
    def write(self, rotations: Mapping[Space, Tensor]) -> None:
        """Write the weights in a basis, computed from the dense weights.

        Args:
            rotations: orthogonal matrices [count, width, width] of some spaces, permutations int64 [count, width] of
                those that may only be permuted, factors [count, width] of those that may be scaled; the others keep
                their basis. Norms' gains are folded whatever the rotations, so that {} writes the folded basis.
        """
        for block, changes in self._by_block():
            if isinstance(block, Offloaded):
                block.restore(self.offloaded[block])
            with block.onloaded():
                by_parameter = {id(change.at.parameter): change for change in reversed(changes)}
                for change in by_parameter.values():  # once, if several modules share it
                    parameter = change.at.parameter
                    dense = self.dense.get(id(parameter), parameter).to(parameter.device)
                    parameter.copy_(_changed(change, dense, rotations))
                    mark_written(change.at.holder, change.at.name)

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the dense model, bit by bit."""
        for block, changes in self.offloaded.items():
            block.restore(changes)
        for at in (change.at for change in self.changes):
            if id(at.parameter) in self.dense:
                at.parameter.copy_(self.dense[id(at.parameter)])
                mark_written(at.holder, at.name)
        for holder, name, parameter in self.untied:
            setattr(holder, name, parameter)
            mark_written(holder, name)
        for config, value in self.settings:
            config.tie_word_embeddings = value
        self.untied, self.settings = [], []
        self.forget()

    def forget(self) -> None:
        """Free the copies of the dense weights."""
        self.dense.clear()
        self.offloaded.clear()


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
    changed = {id(each.at.parameter) for each in changes.values()}
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
    configs = [config, config.get_text_config()] if hasattr(config, "get_text_config") else [config]
    unique = {id(each): each for each in configs}.values()
    return [each for each in unique if getattr(each, "tie_word_embeddings", False)]


def _changed(change: _Change, dense: Tensor, rotations: Mapping[Space, Tensor]) -> Tensor:
    """A parameter in another basis, in the dtype of the computation."""
    if change.value is not None:
        return torch.full_like(dense, change.value)
    work = torch.float32 if dense.dtype.itemsize <= 2 or dense.device.type == "mps" else torch.float64
    value = dense.to(work)
    if change.shrink is not None:
        value = torch.where(value == 0, 0, value / change.shrink.to(value))
    for axis, gain in change.gains:
        shape = [1] * value.ndim
        shape[axis] = -1
        value = value * gain.to(value).view(shape)
    for space, place in change.places:
        if space in rotations:
            rotation = 1 / rotations[space] if space.scaled and not place.writes else rotations[space]
            value = transform_axis(value, place.at.axis, place.index, rotation)
    return value


def transform_axis(value: Tensor, axis: int, index: Tensor | None, change: Tensor) -> Tensor:
    """A weight with the coordinates of one axis rotated, permuted or scaled.

    Args:
        value: of any shape.
        axis: of the coordinates.
        index: their positions on it, int64 [count, copies, width]; None if they are the whole axis, in its order.
        change: a rotation [count, width, width]; a permutation int64 [count, width], the source of each position; or
            factors [count, width].
    """
    if change.ndim == 3:
        return rotate_axis(value, axis, index, change.to(value))
    if change.is_floating_point():
        return _scaled(value, axis, index, change.to(value))
    change = change.to(value.device)
    if index is None:
        return value.index_select(axis, change[0])
    index = index.to(value.device)
    source = index.gather(-1, change[:, None].expand_as(index))
    return value.index_copy(axis, index.flatten(), value.index_select(axis, source.flatten()))


def _scaled(value: Tensor, axis: int, index: Tensor | None, factors: Tensor) -> Tensor:
    whole = factors[0]
    if index is not None:
        index = index.to(value.device)
        whole = factors.new_ones(value.shape[axis])
        whole[index.flatten()] = factors[:, None].expand_as(index).flatten()
    shape = [1] * value.ndim
    shape[axis] = -1
    return value * whole.view(shape)


def rotate_axis(value: Tensor, axis: int, index: Tensor | None, rotation: Tensor) -> Tensor:
    """A weight with the coordinates of one axis in another basis.

    Args:
        value: of any shape.
        axis: of the coordinates.
        index: their positions on it, int64 [count, copies, width]; None if they are the whole axis, in its order.
        rotation: orthogonal, [count, width, width], in the value's dtype and on its device.

    Returns:
        ``value · R`` along the axis: for an axis that writes the space this is ``Rᵀ`` from the left.
    """
    if index is None and value.ndim == 2:
        return value @ rotation[0] if axis in (1, -1) else rotation[0].mT @ value
    last = value.movedim(axis, -1)
    if index is None:
        return (last @ rotation[0]).movedim(-1, axis)
    index = index.to(value.device)
    parts = torch.einsum("...cri,cij->...crj", last[..., index], rotation).flatten(-3)
    flat = index.flatten()
    if flat.numel() == last.shape[-1]:
        return parts[..., flat.argsort()].movedim(-1, axis)
    return last.index_copy(-1, flat, parts).movedim(-1, axis)
