"""The vector spaces of a model whose basis may change, derived from the dependences between its tensors.

The inputs and the outputs of every node are endpoints. Endpoints whose vectors are equal, up to a mixing of tokens, are
in one space. A space is fixed if an operation acts on its coordinates separately. All others may be rotated: the
residual stream, latent spaces between two matrices, and the values of key-value heads (group_spaces.py).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from .norms import Norm
from .trace import Axis, Reading, Trace

RESIDUAL = "residual stream"


@dataclass(frozen=True, eq=False)
class Place:
    """The positions of a space's coordinates on an axis of a parameter."""

    at: Axis
    index: Tensor | None = None  # int64 [count, copies, width]; None: the axis is the space, in its order
    writes: bool = False  # whether the parameter computes the coordinates, rather than reads them


@dataclass(frozen=True, eq=False)
class Folding:
    """A norm, and the matrices that follow it, into which its gain can be folded."""

    norm: Norm
    readers: tuple[Axis, ...]  # empty unless only matrices read its outputs, and have no other inputs


@dataclass(frozen=True, eq=False)
class Space:
    """`count` vector spaces of `width` coordinates, and all axes with these coordinates.

    A rotation R multiplies the axes of all parameters from the right, p → p R, whether they read or write the space
    (y → Rᵀ y). If the coordinates are `permuted`, R is a permutation. If they are `scaled`, positive factors multiply
    the parameters that write, and divide the parameters that read.
    """

    name: str
    width: int
    count: int
    fixes_ones: bool  # R must fix the vector of ones
    places: tuple[Place, ...]
    foldings: tuple[Folding, ...] = ()  # norms whose gains are not uniform
    norms: tuple[Folding, ...] = ()  # all norms
    permuted: bool = False
    scaled: bool = False
    follows: "Space | None" = None  # the space whose rotation or permutation applies before the scaling

    @property
    def rotated(self) -> bool:
        """Whether the space is rotated, rather than permuted or scaled."""
        return not self.permuted and not self.scaled

    @property
    def axes(self) -> list[Axis]:
        """All axes that a change of the basis changes."""
        return [place.at for place in self.places] + [at for folding in self.foldings for at in folding.readers]


def occupied_axes(spaces: Iterable[Space]) -> set[Axis]:
    """Return the axes that have coordinates of the given spaces."""
    return {place.at for space in spaces for place in space.places}


@dataclass(eq=False)
class _Endpoints:
    """A union–find of endpoints: 2 · place are the inputs of a node, 2 · place + 1 its outputs."""

    parents: list[int]
    fixed: dict[int, str] = field(default_factory=dict)  # endpoint → why its space keeps its basis

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
        by_root: dict[int, list[int]] = {}
        for end in range(len(self.parents)):
            by_root.setdefault(self.root(end), []).append(end)
        return [members for members in by_root.values() if len(members) > 1]


def find_spaces(trace: Trace, blocks: Sequence[str]) -> tuple[list[Space], dict[str, str]]:
    """The spaces of whole axes that may be rotated, and name → reason if the residual stream is not among them.

    A space that extends over several of the decoder layers with the names `blocks` is a residual stream.
    """
    readings = list(trace.readings())
    ends = _Endpoints(list(range(2 * len(trace.nodes))))
    foldable = _foldable(trace, readings)
    _join_nodes(ends, trace, readings, foldable)
    for reading in readings:
        _join(ends, trace, reading)
    spaces: list[Space] = []
    refused: dict[str, str] = {}
    for members in sorted(ends.classes(), key=len, reverse=True):
        nodes = [trace.nodes[end // 2] for end in members]
        inside = {next((block for block in blocks if node.name.startswith(block + ".")), None) for node in nodes}
        shared = len(inside) > 1
        width = _width(trace, members)
        why = next((ends.fixed[end] for end in members if end in ends.fixed), None)
        why = why or _unreached(trace, readings, width, shared)
        if why is None and width > 1:
            number = sum(space.name.startswith(RESIDUAL) for space in spaces)
            name = nodes[0].name if not shared else RESIDUAL + (f" {number + 1}" if number else "")
            spaces.append(_space(trace, members, name, width, foldable))
        elif shared and why is not None:
            refused.setdefault(RESIDUAL, why)
    if any(space.name == RESIDUAL for space in spaces):
        refused = {}
    elif not refused:
        refused = {RESIDUAL: "no vectors pass from one decoder layer to the next"}
    return spaces, refused


def _width(trace: Trace, members: Sequence[int]) -> int:
    """The number of coordinates at endpoints that are in one space; 0 if the trace has no tensor there."""
    for node, writes in ((trace.nodes[end // 2], end % 2 == 1) for end in members):
        for tensor in node.leaves if writes else node.inputs:
            return node.channels_last(tensor).shape[-1]
    return 0


def _foldable(trace: Trace, readings: list[Reading]) -> dict[int, tuple[Axis, ...]]:
    """The norms that are read only by matrices without other inputs: index → the axes of these matrices."""
    sources: dict[int | None, set[frozenset[int]]] = {}
    for reading in readings:
        sources.setdefault(reading.node, set()).add(reading.alike | reading.other)
    foldable = {}
    for place, node in enumerate(trace.nodes):
        if node.norm is None:
            continue
        readers = [reader for reader, sets in sources.items() if any(place in nodes for nodes in sets)]
        nodes = [
            trace.nodes[reader] for reader in readers if reader is not None and sources[reader] == {frozenset([place])}
        ]
        if nodes and len(nodes) == len(readers) and all(reader.norm is None and reader.reads for reader in nodes):
            foldable[place] = tuple(axis for reader in nodes for axis in reader.reads)
    return foldable


def _join_nodes(ends: _Endpoints, trace: Trace, readings: list[Reading], foldable: dict[int, tuple[Axis, ...]]) -> None:
    """Join or fix the endpoints of norms, of groups, and of embeddings that share their weights."""
    embeddings: dict[int, int] = {}
    for place, node in enumerate(trace.nodes):
        if node.norm is not None:
            why = _unfoldable(trace, readings, place, place in foldable)
            if why is None:
                ends.join(2 * place, 2 * place + 1)
            else:
                ends.fix(2 * place, why)
                ends.fix(2 * place + 1, why)
        elif not node.raw and not node.reads and node.inputs:
            ends.fix(2 * place, f"{node.name} reads groups of it")
            ends.fix(2 * place + 1, f"{node.name} makes groups of it")
        if node.leaves and node.writes and not node.reads and not node.raw:
            first = embeddings.setdefault(id(node.writes[0].parameter), place)
            ends.join(2 * place + 1, 2 * first + 1)


def _unfoldable(trace: Trace, readings: list[Reading], place: int, foldable: bool) -> str | None:
    """The reason why the gain of a norm cannot be folded; None if it can, or if it is uniform."""
    node = trace.nodes[place]
    assert node.norm is not None
    others = (trace.nodes[other] for reading in readings if place in reading.other for other in reading.other)
    multiplied = next((other.name for other in others if other.raw and other.leaves[0].ndim > 1), None)
    if multiplied is not None:
        return f"{multiplied}, a parameter of no Linear, multiplies the outputs of {node.name}"
    gain, shift = node.norm.gain, node.norm.shift
    if gain is None or _uniform(gain):
        return None
    if not foldable:
        return f"{node.name} scales its coordinates, and no matrix follows into which its gain could be folded"
    if shift is not None and bool(((gain == 0) & (shift != 0)).any()):
        return f"{node.name} has gains of 0 and a shift, which cannot be divided by them"
    return None


def _join(ends: _Endpoints, trace: Trace, reading: Reading) -> None:
    if reading.node is None:
        for place in reading.other:
            ends.fix(2 * place + 1, f"{trace.nodes[place].name} is part of the model's result")
        return
    end, name = 2 * reading.node, trace.nodes[reading.node].name
    if reading.alike and reading.whole:
        for place in reading.alike:
            ends.join(end, 2 * place + 1)
    else:
        ends.fix(end, f"the inputs of {name} are not a sum of outputs of weights")
        for place in reading.alike:
            outputs = f"the outputs of {trace.nodes[place].name} and others"
            ends.fix(2 * place + 1, f"the inputs of {name} are not a sum of {outputs}")
    for place in reading.other:
        why = f"{name} reads the outputs of {trace.nodes[place].name} after an operation on separate coordinates"
        ends.fix(2 * place + 1, why)


def _uniform(gain: Tensor) -> bool:
    return bool((gain == gain[0]).all())


def _unreached(trace: Trace, readings: list[Reading], width: int, shared: bool) -> str | None:
    """A message about a weight of this width that may belong to a space although the trace does not show it.

    Its inputs have no gradients, or, if the space is `shared` by several layers, the probe did not reach it.
    """
    read = {place for reading in readings for place in reading.alike | reading.other}
    for place, node in enumerate(trace.nodes):
        hidden = node.hidden and not node.inputs
        reached = place in read if node.raw else bool(node.leaves) and not hidden
        sizes = [axis.parameter.shape[axis.axis] for axis in (*node.reads, *node.writes)]
        if not reached and (shared or hidden) and width in sizes:
            how = "gradients do" if hidden else "the probe did"
            return f"{how} not reach {node.name}, which may belong to it"
    return None


def _space(trace: Trace, members: list[int], name: str, width: int, foldable: dict[int, tuple[Axis, ...]]) -> Space:
    places, norms, fixes_ones = [], [], False
    for end in members:
        node, writes = trace.nodes[end // 2], end % 2 == 1
        places += [Place(axis, writes=writes) for axis in (node.writes if writes else node.reads)]
        if node.norm is None or not writes:
            continue
        fixes_ones |= node.norm.fixes_ones
        if node.norm.bias is not None:
            places.append(Place(Axis(node.norm.module, node.norm.bias, 0)))
        norms.append(Folding(node.norm, foldable.get(end // 2, ())))
    foldings = [folding for folding in norms if folding.norm.gain is not None and not _uniform(folding.norm.gain)]
    return Space(name, width, 1, fixes_ones, tuple(places), tuple(foldings), tuple(norms))
