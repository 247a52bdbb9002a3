"""Which vector spaces inside a model may change their basis, found from how its tensors depend on each other.

What every node reads and gives is an end. Ends that hold the same vectors up to a mixing of tokens are of one space; a
space that something reads coordinate by coordinate is fixed. Those that are left may be rotated: the residual stream,
latent spaces between two matrices, and what a key-value head carries from v to o (heads.py).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from .norms import Norm
from .trace import Axis, Node, Reading, Trace

RESIDUAL = "residual stream"


@dataclass(frozen=True, eq=False)
class Place:
    """Where coordinates of a space lie on an axis of a parameter."""

    at: Axis
    index: Tensor | None = None  # int64 [count, copies, width]; None: the axis is the space, in its order
    gives: bool = False  # whether a node gives the coordinates there, or reads them


@dataclass(frozen=True, eq=False)
class Folding:
    """A norm whose gain goes into the matrices behind it."""

    norm: Norm
    readers: tuple[Axis, ...]


@dataclass(frozen=True, eq=False)
class Space:
    """`count` vector spaces of `width` coordinates, and every axis that holds them.

    A rotation R multiplies each axis from the right: p → p R for what reads, and for what gives (y → Rᵀ y). Where
    coordinates may only be `permuted`, R is an order of them. Where they may be `scaled`, positive factors multiply
    what gives, and divide what reads.
    """

    name: str
    width: int
    count: int
    fixes_ones: bool  # R must fix the vector of ones
    places: tuple[Place, ...]
    foldings: tuple[Folding, ...] = ()
    permuted: bool = False
    scaled: bool = False
    follows: "Space | None" = None  # in whose basis, or order, the coordinates are that may be scaled


def occupied_axes(spaces: Iterable[Space]) -> set[tuple[nn.Module, str, int]]:
    """Every axis of a parameter that some spaces lie on: the module, the parameter's name, and which axis."""
    return {(place.at.holder, place.at.name, place.at.axis) for space in spaces for place in space.places}


@dataclass(eq=False)
class _Ends:
    """Ends in classes: 2 · place is what a node reads, 2 · place + 1 what it gives."""

    parents: list[int]
    fixed: dict[int, str] = field(default_factory=dict)  # end → why its class keeps its basis

    def root(self, end: int) -> int:
        while self.parents[end] != end:
            self.parents[end] = self.parents[self.parents[end]]
            end = self.parents[end]
        return end

    def join(self, first: int, second: int) -> None:
        low, high = sorted((self.root(first), self.root(second)))
        self.parents[high] = low

    def fix(self, end: int, why: str) -> None:
        self.fixed.setdefault(end, why)

    def classes(self) -> list[list[int]]:
        found: dict[int, list[int]] = {}
        for end in range(len(self.parents)):
            found.setdefault(self.root(end), []).append(end)
        return [members for members in found.values() if len(members) > 1]


def find_spaces(trace: Trace, blocks: Sequence[str]) -> tuple[list[Space], dict[str, str]]:
    """The spaces that whole axes of weights hold.

    Args:
        trace: of the model.
        blocks: the names of its decoder layers. What several of them share is a residual stream.

    Returns:
        The spaces that may be rotated, and the reason why there is no residual stream among them, by its name.
    """
    readings = list(trace.readings())
    ends = _Ends(list(range(2 * len(trace.nodes))))
    foldable = _foldable(trace, readings)
    for place, node in enumerate(trace.nodes):
        if node.norm is not None:
            _join_norm(ends, place, node, place in foldable, _multiplied(trace, readings, place))
        elif not node.raw and not node.reads and node.inputs:
            ends.fix(2 * place, f"{node.name} reads groups of it")
            ends.fix(2 * place + 1, f"{node.name} makes groups of it")
    _join_shared(ends, trace)
    for reading in readings:
        _join(ends, trace, reading)
    spaces, refused = [], {}
    for members in sorted(ends.classes(), key=len, reverse=True):
        nodes = [trace.nodes[end // 2] for end in members]
        shared = len({_block(node.name, blocks) for node in nodes}) > 1
        width = _width(nodes[0])
        why = next((ends.fixed[end] for end in members if end in ends.fixed), None)
        why = why or (_unreached(trace, readings, width) if shared else None)
        if why is None and width > 1:
            number = sum(space.name.startswith(RESIDUAL) for space in spaces)
            name = nodes[0].name if not shared else RESIDUAL + (f" {number + 1}" if number else "")
            spaces.append(_space(trace, members, name, width, foldable))
        elif shared and why is not None:
            refused.setdefault(RESIDUAL, why)
    if any(space.name == RESIDUAL for space in spaces):
        refused = {}
    elif not refused:
        refused = {RESIDUAL: "no vectors that pass from one decoder layer to the next were found"}
    return spaces, refused


def _join_shared(ends: _Ends, trace: Trace) -> None:
    """Embeddings that share their weights, as those of an encoder and a decoder, give vectors of one space."""
    first: dict[int, int] = {}
    for place, node in enumerate(trace.nodes):
        if node.leaves and node.writes and not node.reads and not node.raw:
            ends.join(2 * place + 1, 2 * first.setdefault(id(node.writes[0].parameter), place) + 1)


def _foldable(trace: Trace, readings: list[Reading]) -> dict[int, tuple[Axis, ...]]:
    """The norms that matrices alone read, which read nothing else: place → the axes of those matrices."""
    sources: dict[Node | None, set[frozenset[int]]] = {}
    for reading in readings:
        sources.setdefault(reading.node, set()).add(reading.alike | reading.other)
    found = {}
    for place, node in enumerate(trace.nodes):
        readers = [reader for reader, sets in sources.items() if any(place in each for each in sets)]
        alone = all(
            reader is not None and reader.norm is None and reader.reads and sources[reader] == {frozenset([place])}
            for reader in readers
        )
        if node.norm is not None and readers and alone:
            found[place] = tuple(axis for reader in readers if reader is not None for axis in reader.reads)
    return found


def _multiplied(trace: Trace, readings: list[Reading], place: int) -> str | None:
    """A parameter that multiplies what a node gives in a way that is not known, by its name."""
    for reading in readings:
        if place in reading.other:
            nodes = (trace.nodes[other] for other in reading.other)
            found = next((node.name for node in nodes if node.raw and node.leaves[0].ndim > 1), None)
            if found is not None:
                return found
    return None


def _join_norm(ends: _Ends, place: int, node: Node, foldable: bool, multiplied: str | None) -> None:
    """A norm reads and gives vectors of one space, unless its gain has nowhere to go."""
    norm = node.norm
    gain, shift = norm.gain, norm.shift
    why = None
    if multiplied is not None:
        why = f"{multiplied}, a parameter of no Linear, multiplies what {node.name} gives"
    elif gain is not None and not _uniform(gain) and not foldable:
        why = f"{node.name} scales its coordinates where no matrix follows that could take its gain"
    elif gain is not None and not _uniform(gain) and shift is not None and bool(((gain == 0) & (shift != 0)).any()):
        why = f"{node.name} has gains of 0 beside its shift"
    if why is not None:
        ends.fix(2 * place, why)
        ends.fix(2 * place + 1, why)
    else:
        ends.join(2 * place, 2 * place + 1)


def _join(ends: _Ends, trace: Trace, reading: Reading) -> None:
    if reading.node is None:
        for place in reading.other:
            ends.fix(2 * place + 1, f"{trace.nodes[place].name} is part of the model's result")
        return
    end, name = 2 * trace.place[reading.node.name], reading.node.name
    if reading.alike and reading.whole:
        for place in reading.alike:
            ends.join(end, 2 * place + 1)
    else:
        ends.fix(end, f"{name} reads more than sums of what weights give")
        for place in reading.alike:
            ends.fix(2 * place + 1, f"{name} reads more than sums of what {trace.nodes[place].name} and others give")
    for place in reading.other:
        ends.fix(2 * place + 1, f"{trace.nodes[place].name} reaches {name} coordinate by coordinate, or mixed")


def _uniform(gain: Tensor) -> bool:
    return bool((gain == gain[0]).all())


def _block(name: str, blocks: Sequence[str]) -> str | None:
    return next((block for block in blocks if name.startswith(block + ".")), None)


def _width(node: Node) -> int:
    return node.channels_last([*node.leaves, *node.inputs][0]).shape[-1]


def _unreached(trace: Trace, readings: list[Reading], width: int) -> str | None:
    """A weight of this width that the probe did not reach: nobody knows whether it belongs to the space."""
    read = {place for reading in readings for place in reading.alike | reading.other}
    for place, node in enumerate(trace.nodes):
        reached = place in read if node.raw else bool(node.leaves)
        sizes = [axis.parameter.shape[axis.axis] for axis in (*node.reads, *node.writes)]
        if not reached and width in sizes:
            return f"the probe did not reach {node.name}, which may belong to it"
    return None


def _space(trace: Trace, members: list[int], name: str, width: int, foldable: dict[int, tuple[Axis, ...]]) -> Space:
    places, foldings, fixes_ones = [], [], False
    for end in members:
        node, gives = trace.nodes[end // 2], end % 2 == 1
        places += [Place(axis, writes=gives) for axis in (node.writes if gives else node.reads)]
        if node.norm is None or not gives:
            continue
        fixes_ones |= node.norm.fixes_ones
        if node.norm.bias is not None:
            places.append(Place(Axis(node.norm.module, node.norm.bias, 0)))
        gain = node.norm.gain
        if gain is not None and not _uniform(gain):
            foldings.append(Folding(node.norm, foldable[end // 2]))
    return Space(name, width, 1, fixes_ones, tuple(places), tuple(foldings))
