"""Other bases written into a model's weights, and the weights as they were put back.

Norms' gains go into the matrices behind them, then every axis that holds coordinates of a space is multiplied by its
rotation. Both are computed from the weights as they were, in float64 (float32 for 16 bits), and rounded once.

Of blocks that are in the model all the time, a copy in host memory says what they were. Those that come for a visit
alone come as they were, and what they become is put beside that (model/offload.py), a block at a time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import require
from ..model.layers import Block
from ..model.offload import Changes, Offloaded, mark_written
from ..model.onloading import RESIDENT, Weights, by_module
from .spaces import Place, Space
from .trace import Axis, places_of_parameters


@dataclass(eq=False)
class _Change:
    """What happens to one parameter of one module."""

    at: Axis
    gains: list[tuple[int, Tensor]] = field(default_factory=list)  # axis, γ
    shrink: Tensor | None = None  # γ that a norm's shift is divided by
    value: float | None = None  # all that is left of a gain that was folded
    places: list[tuple[Space, Place]] = field(default_factory=list)

    def same(self, other: "_Change") -> bool:
        """Whether it does to the parameter what another does."""
        mine, others = (
            [(space, place.at.axis, None if place.index is None else place.index.tolist()) for space, place in places]
            for places in (self.places, other.places)
        )
        return mine == others and not self.gains and not other.gains


class Basis:
    """A model's weights, in whatever basis they are.

    Args:
        model: dense; its blocks' weights are brought where they are elsewhere.
        blocks: of the model.
        spaces: of the model that may change their basis.

    Raises:
        MoonshotError: a parameter that two places share, in two roles, and that cannot be untied.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[Block], spaces: Sequence[Space]):
        self.model, self.blocks, self.spaces = model, blocks, list(spaces)
        self.changes = _changes(self.spaces, model)
        self.untied: list[tuple[nn.Module, str, nn.Parameter]] = []  # with what they shared
        self.settings: list[tuple[Any, Any]] = []  # configurations, with their tie_word_embeddings
        self.dense: dict[int, Tensor] = {}  # parameter → as it was, in host memory
        self.elsewhere: dict[Offloaded, Changes] = {}  # weights of a block → as they were
        self._check_ties()

    @property
    def untied_bytes(self) -> int:
        """What the parameters of their own take that shared one before."""
        return sum(parameter.nbytes for _, _, parameter in self._doubled())

    def _doubled(self) -> list[tuple[nn.Module, str, nn.Parameter]]:
        """Where a parameter has another role than where it gives embeddings, or where it is met first."""
        inputs = _end(self.model, "get_input_embeddings")
        first: dict[int, _Change] = {}
        for change in sorted(self.changes, key=lambda change: change.at.holder is not inputs):
            first.setdefault(id(change.at.parameter), change)
        known = [(change, first[id(change.at.parameter)]) for change in self.changes]
        return [
            (change.at.holder, change.at.name, change.at.parameter)
            for change, other in known
            if change is not other and not change.same(other)
        ]

    def _check_ties(self) -> None:
        model = self.model
        ends = [_end(model, name) for name in ("get_input_embeddings", "get_output_embeddings")]
        for holder, name, parameter in self._doubled():
            tied = holder is ends[1] and getattr(ends[0], name, None) is parameter and bool(_tying(model))
            kind = type(holder).__name__
            require(tied, f"{name} of a {kind} is shared by modules that would need it in different bases")

    def keep(self) -> None:
        """Untie what has two roles, and copy to host memory what is about to change."""
        for holder, name, parameter in self._doubled():
            own = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
            setattr(holder, name, own)
            mark_written(holder, name)
            self.untied.append((holder, name, parameter))
        if self.untied:
            self.settings = [(config, config.tie_word_embeddings) for config in _tying(self.model)]
            for config, _ in self.settings:
                config.tie_word_embeddings = False
        for block, changes in self._by_block():
            if isinstance(block, Offloaded):
                self.elsewhere[block] = block.changes()
                continue
            for parameter in (change.at.parameter for change in changes):
                if id(parameter) not in self.dense:
                    self.dense[id(parameter)] = parameter.detach().to("cpu", copy=True)

    def _by_block(self) -> list[tuple[Weights, list[_Change]]]:
        """The changes by where the weights of their block come from, those of all that are in the model last."""
        inside, found = by_module(self.blocks), dict[Weights, list[_Change]]()
        for change in self.changes:
            found.setdefault(inside.get(change.at.holder, RESIDENT), []).append(change)
        return sorted(found.items(), key=lambda each: each[0] is RESIDENT)

    @torch.no_grad()
    def write(self, rotations: Mapping[Space, Tensor]) -> None:
        """Write the weights in a basis, from what they were.

        Args:
            rotations: orthogonal matrices [count, width, width] of some spaces, orders int64 [count, width] of those
                that may only be permuted, factors [count, width] of those that may be scaled; the others keep their
                basis. A space whose norms' gains are folded stays the function that it was at any rotation, the
                identity too.
        """
        for block, changes in self._by_block():
            if isinstance(block, Offloaded):
                block.restore(self.elsewhere[block])
            with block.onloaded():
                by_parameter = {id(change.at.parameter): change for change in reversed(changes)}
                for change in by_parameter.values():  # once, where several places hold it
                    parameter = change.at.parameter
                    dense = self.dense.get(id(parameter), parameter).to(parameter.device)
                    parameter.copy_(_changed(change, dense, rotations))
                    mark_written(change.at.holder, change.at.name)

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back as it was, bit by bit."""
        for block, changes in self.elsewhere.items():
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
        """No longer keep the weights as they were."""
        self.dense.clear()
        self.elsewhere.clear()


def _changes(spaces: Sequence[Space], model: nn.Module) -> list[_Change]:
    """What happens to every parameter, once for each module that holds it; also to one that keeps its basis there."""
    found: dict[tuple[nn.Module, str], _Change] = {}

    def change(at: Axis) -> _Change:
        return found.setdefault((at.holder, at.name), _Change(at))

    for space in spaces:
        for folding in space.foldings:
            norm, gain = folding.norm, folding.norm.gain
            change(Axis(norm.module, norm.weight, 0)).value = norm.neutral
            if norm.bias is not None:
                change(Axis(norm.module, norm.bias, 0)).shrink = gain
            for at in folding.readers:
                change(at).gains.append((at.axis, gain))
        for place in space.places:
            change(place.at).places.append((space, place))
    changed = {id(each.at.parameter) for each in found.values()}
    for module, name, parameter in places_of_parameters(model):
        if id(parameter) in changed:
            change(Axis(module, name, 0))
    return list(found.values())


def _end(model: nn.Module, getter: str) -> Any:
    """A model's input or output embeddings; None where it names none."""
    try:
        return getattr(model, getter)()
    except (AttributeError, NotImplementedError):
        return None


def _tying(model: nn.Module) -> list[Any]:
    """The configurations that say that the head has the embedding's weights."""
    config = getattr(model, "config", None)
    found = [config, config.get_text_config()] if hasattr(config, "get_text_config") else [config]
    return [each for each in {id(each): each for each in found}.values() if getattr(each, "tie_word_embeddings", False)]


def _changed(change: _Change, dense: Tensor, rotations: Mapping[Space, Tensor]) -> Tensor:
    """A parameter in another basis, in the dtype it was computed in."""
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
            change = rotations[space]
            value = moved(value, place.at.axis, place.index, 1 / change if space.scaled and not place.gives else change)
    return value


def moved(value: Tensor, axis: int, index: Tensor | None, change: Tensor) -> Tensor:
    """A weight with the coordinates of one axis in another basis, in another order, or in other units.

    Args:
        value: of any shape.
        axis: which holds the coordinates.
        index: where on it, int64 [count, copies, width]; None where they are the axis, in its order.
        change: a rotation [count, width, width]; int64 [count, width], the coordinate that each place gets; or factors
            [count, width].
    """
    if change.ndim == 3:
        return rotated(value, axis, index, change.to(value))
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


def rotated(value: Tensor, axis: int, index: Tensor | None, rotation: Tensor) -> Tensor:
    """A weight with the coordinates of one axis in another basis.

    Args:
        value: of any shape.
        axis: which holds the coordinates.
        index: where on it, int64 [count, copies, width]; None where they are the axis, in its order.
        rotation: orthogonal, [count, width, width], in the value's dtype and on its device.

    Returns:
        ``value · R`` along the axis: what reads the space and, as ``Rᵀ`` from the left, what gives it.
    """
    if index is None and value.ndim == 2:
        return value @ rotation[0] if axis in (1, -1) else rotation[0].mT @ value
    last = value.movedim(axis, -1)
    if index is None:
        return (last @ rotation[0]).movedim(-1, axis)
    index = index.to(value.device)
    turned = torch.einsum("...cri,cij->...crj", last[..., index], rotation)
    flat = index.flatten()
    if flat.numel() == last.shape[-1]:
        return turned.flatten(-3)[..., flat.argsort()].movedim(-1, axis)
    return last.index_copy(-1, flat, turned.flatten(-3)).movedim(-1, axis)
