"""The vector spaces of a model whose basis may change, derived from the dependences between its tensors.

The inputs and the outputs of every node are endpoints. Endpoints whose vectors are equal, up to a mixing of tokens, are
in one space. A space is fixed if an operation acts on its coordinates separately. All others may be rotated: the
residual stream, latent spaces between two matrices, and the values of key-value heads.

Attention mixes the tokens of a head's values but not their channels. The derivative of o's inputs with respect to the
outputs of v is therefore a token mixing times an identity: a factor on one column is a factor on one row, the same at
every token. This identifies v's rows in any order of a fused projection, and distinguishes them from q's and k's.

A neuron's column is computed from one row of each preceding matrix (found by model/structured_groups.py) by the same
activation for all neurons. A channel permutation of the neurons therefore preserves the function; it determines which
weights an n:m pattern compares. Neurons are not permuted if another parameter, such as a gain, acts on each of them.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from ..data.batches import Batch
from ..errors import MoonshotError
from ..model.layers import find_blocks
from ..model.structured_groups import StructuredGroups, find_structured_groups
from .norms import Norm
from .trace import Axis, Node, Reading, Trace, parameter_slots, plain_experts, random_like, tolerance_of, vjp

RESIDUAL = "residual stream"
# The columns of a head have factors from 1 to this: a range in which 16 bits distinguish 512 of them.
LARGEST_FACTOR = 2.0**8
Groups = Mapping[str, StructuredGroups]  # layer → the structured groups of its columns


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


def find_all_spaces(
    model: nn.Module, batch: Batch, heads_only: bool, ordered: Collection[str] = (), scaled: Collection[str] = ()
) -> tuple[list[Space], dict[str, str]]:
    """The spaces of a model that may be rotated, permuted or scaled, and the reasons why others are excluded.

    The batch is small, and its values do not matter. `heads_only` excludes the residual stream, so that no embeddings
    are untied. Neurons are permuted in the layers `ordered`, inputs are scaled in the layers `scaled`.
    """
    trace = Trace(model, batch)
    spaces, refused = find_spaces(trace, [name for name, _ in find_blocks(model)])
    with plain_experts(model):
        groups, _ = find_structured_groups(model, batch)
    counts = Counter(id(parameter) for _, _, parameter in parameter_slots(model))

    def without_shared(candidates: list[Space]) -> list[Space]:
        """The spaces without parameters that several modules share."""
        return [space for space in candidates if all(counts[id(at.parameter)] <= 1 for at in space.axes)]

    spaces = [space for space in spaces if space.name.startswith(RESIDUAL) or without_shared([space])]
    spaces += _find_heads(trace, groups, spaces)
    spaces += without_shared(_find_neurons(trace, groups, ordered, spaces))
    spaces += without_shared(_find_scales(trace, groups, scaled, spaces))
    if heads_only:
        spaces = [space for space in spaces if not space.name.startswith(RESIDUAL)]
        refused = {}
    if not spaces:
        reasons = "; ".join(f"{name}: {why}" for name, why in refused.items())
        message = f"nothing in {type(model).__name__} can be rotated ({reasons or 'no heads'})"
        raise MoonshotError(message, field="rotation")
    return spaces, refused


def _find_heads(trace: Trace, groups: Groups, spaces: Collection[Space]) -> list[Space]:
    """A space for every layer whose columns are heads, with a rotation for each key-value head.

    A single head is skipped: it is among the `spaces` of whole axes.
    """
    heads: list[Space] = []
    sizes: dict[int, int] = {}  # columns of a group → the head size, the first guess for other layers
    for node, group in _free_readers(trace, groups, groups, occupied_axes(spaces)):
        if group.size >= 2 and len(node.inputs) == 1:
            space = _head_space(trace, node, group, sizes.get(group.size))
            if space is not None:
                sizes[group.size] = space.width
                heads.append(space)
    return heads


def _find_neurons(trace: Trace, groups: Groups, layers: Collection[str], spaces: Collection[Space]) -> list[Space]:
    """A space to permute for each of the layers whose columns are neurons, unless they are coordinates of `spaces`."""
    neurons = []
    for node, group in _free_readers(trace, groups, layers, occupied_axes(spaces)):
        makers = _makers(trace, node, group)
        if makers and _depends_on_only(trace, node, makers):
            places = [Place(axis) for axis in node.reads]
            places += [Place(axis, _rows(group, maker.name), writes=True) for maker in makers for axis in maker.writes]
            neurons.append(Space(f"{node.name} neurons", group.count, 1, False, tuple(places), permuted=True))
    return neurons


def _find_scales(trace: Trace, groups: Groups, layers: Collection[str], spaces: Collection[Space]) -> list[Space]:
    """The spaces to scale in some layers: heads, and neurons that are homogeneous in a row.

    A gated MLP's columns are linear in the rows of up, and ReLU is positively homogeneous. `spaces` include the heads,
    and the neurons that may be permuted.
    """
    heads = [space for space in spaces if space.name in {f"{name} heads" for name in layers}]
    scales = [replace(space, name=f"{space.name}, scaled", scaled=True, follows=space) for space in heads]
    permuted = {space.name: space for space in spaces if space.permuted}
    for node, group in _free_readers(trace, groups, layers, occupied_axes(spaces) - occupied_axes(permuted.values())):
        for maker in _makers(trace, node, group):
            index = _homogeneous(node, group, maker)
            if index is not None:
                places = [Place(axis) for axis in node.reads]
                places += [Place(axis, index, writes=True) for axis in maker.writes]
                name = f"{node.name} neurons"
                scale = Space(f"{name}, scaled", group.count, 1, False, tuple(places), scaled=True)
                scales.append(replace(scale, follows=permuted.get(name)))
                break
    return scales


def _free_readers(
    trace: Trace, groups: Groups, layers: Collection[str], occupied: set[Axis]
) -> Iterator[tuple[Node, StructuredGroups]]:
    """The nodes of some layers whose columns are not in other spaces, with their structured groups."""
    for name, group in groups.items():
        node = trace.by_name.get(name)
        if node is not None and name in layers and occupied.isdisjoint(node.reads):
            yield node, group


def _head_space(trace: Trace, node: Node, group: StructuredGroups, expected: int | None) -> Space | None:
    """The space of a layer's heads; None if its columns are not heads, or a column does not depend on one row."""
    makers = [trace.by_name[name] for name in group.rows if name in trace.by_name]
    makers = [maker for maker in makers if len(maker.leaves) == 1]
    (inputs,) = node.inputs
    if not makers or not inputs.requires_grad:
        return None
    cotangent = random_like(inputs, torch.Generator().manual_seed(2))
    leaves = [maker.leaves[0] for maker in makers]
    plain = vjp(inputs, cotangent, leaves)
    served = torch.cat([group.rows[maker.name] for maker in makers])
    sizes = [size for size in range(group.size, 1, -1) if group.size % size == 0]
    for size in dict.fromkeys([expected, *sizes] if expected else sizes):
        factors = LARGEST_FACTOR ** (torch.arange(size, dtype=torch.float64) / size)
        scale = factors.repeat(inputs.shape[-1] // size).to(inputs.device, inputs.dtype)
        scaled = vjp(inputs, cotangent * scale, leaves)
        rows = torch.cat([_positions(*three, factors) for three in zip(leaves, plain, scaled, strict=True)])
        index = _index(rows, served, group, size)
        if index is not None:
            return _space_of_heads(node, makers, group, size, index)
    return None


def _positions(leaf: Tensor, plain: Tensor | None, scaled: Tensor | None, factors: Tensor) -> Tensor:
    """The only column of a head that each row computes, int64 [rows]; -1 if there is none."""
    if plain is None or scaled is None:
        return torch.full((leaf.shape[-1],), -1)
    before, after = (gradient.flatten(0, -2).double().cpu() for gradient in (plain, scaled))
    size = before.square().sum(0)
    ratio = (before * after).sum(0) / size.clamp_min(1e-300)
    error = (after - before * ratio).norm(dim=0)
    constant = (size > 0) & (error <= tolerance_of(plain.dtype) * after.norm(dim=0)) & (ratio > 0)
    nearest = (ratio.clamp_min(1e-300).log()[:, None] - factors.log()).abs().argmin(1)
    exact = (ratio / factors[nearest] - 1).abs() <= 0.2 * (LARGEST_FACTOR ** (1 / len(factors)) - 1)
    return torch.where(constant & exact, nearest, -1)


def _index(positions: Tensor, served: Tensor, group: StructuredGroups, size: int) -> Tensor | None:
    """The row of each column of each key-value head, int64 [heads, size]; None unless there is exactly one."""
    valid = positions >= 0
    if not valid.any() or (served[valid] < -1).any():
        return None
    shared = bool((served[valid] == -1).all())  # one key-value head for all query heads
    if not shared and (served[valid] < 0).any():
        return None
    heads = 1 if shared else group.count
    column = positions[valid] + (0 if shared else size * served[valid])
    if not torch.equal(column.sort().values, torch.arange(heads * size)):
        return None
    return valid.nonzero()[:, 0][column.argsort()].view(heads, size)


def _space_of_heads(node: Node, makers: list[Node], group: StructuredGroups, size: int, rows: Tensor) -> Space | None:
    heads = len(rows)
    columns = torch.arange(group.count * group.size).view(heads, -1, size)
    places = [Place(axis, columns) for axis in node.reads]
    first = 0
    for maker in makers:
        count = maker.leaves[0].shape[-1]
        inside = (rows >= first) & (rows < first + count)
        if inside.any():
            if not inside.all() or not _mixes_tokens(node.inputs[0], maker.leaves[0], rows - first):
                return None  # values of several matrices or heads, or that a gate multiplies
            places += [Place(axis, (rows - first)[:, None], writes=True) for axis in maker.writes]
        first += count
    return Space(f"{node.name} heads", size, heads, False, tuple(places))


def _mixes_tokens(inputs: Tensor, leaf: Tensor, rows: Tensor) -> bool:
    """Whether heads depend on their rows [heads, size] of a leaf only by mixing tokens, all channels in the same way.

    This excludes gates, which act on separate channels, and two heads taken for one. Like in `Trace`, the derivative of
    a head then commutes with a signed permutation of its channels.
    """
    generator = torch.Generator().manual_seed(5)
    order = torch.randperm(rows.shape[1], generator=generator)
    signs = torch.randn(rows.shape[1], generator=generator).sign().to(inputs.device, inputs.dtype)
    cotangent = random_like(inputs, generator)
    permuted = (cotangent.unflatten(-1, (-1, rows.shape[1]))[..., order.to(inputs.device)] * signs).flatten(-2)
    before, after = (vjp(inputs, vector, [leaf])[0] for vector in (cotangent, permuted))
    if before is None or after is None:
        return False
    expected = before[..., rows[:, order].to(leaf.device)] * signs
    error = float((after[..., rows.to(leaf.device)] - expected).norm())
    return error <= tolerance_of(leaf.dtype) * float(expected.norm())


def _makers(trace: Trace, node: Node, group: StructuredGroups) -> list[Node]:
    """The nodes that compute a layer's neurons; empty if its columns are not neurons, or a node is missing."""
    makers = [trace.by_name[maker] for maker in group.rows if maker in trace.by_name]
    complete = len(makers) == len(group.rows) and all(len(maker.leaves) == 1 for maker in makers)
    return makers if complete and group.size == 1 and len(node.inputs) == 1 else []


def _homogeneous(node: Node, group: StructuredGroups, maker: Node) -> Tensor | None:
    """The rows of a maker, int64 [1, 1, neurons], in which the columns are positively homogeneous of degree 1.

    By Euler's theorem a column is then the inner product of the row and the column's gradient with respect to it.
    """
    (inputs,), (leaf,) = node.inputs, maker.leaves
    cotangent = random_like(inputs, torch.Generator().manual_seed(4))
    (gradient,) = vjp(inputs, cotangent, [leaf])
    if gradient is None:
        return None
    grown = (gradient.double() * leaf.detach().double()).flatten(0, -2).sum(0).cpu()
    whole = (cotangent.double() * inputs.detach().double()).flatten(0, -2).sum(0).cpu()
    for rows in _rows(group, maker.name)[0]:
        if float((grown[rows] - whole).norm()) <= tolerance_of(inputs.dtype) * float(whole.norm()):
            return rows[None, None]
    return None


def _depends_on_only(trace: Trace, node: Node, makers: list[Node]) -> bool:
    (inputs,) = node.inputs
    if not inputs.requires_grad:
        return False
    cotangent = random_like(inputs, torch.Generator().manual_seed(3))
    flat = [(other, leaf) for other in trace.nodes for leaf in other.leaves]
    gradients = vjp(inputs, cotangent, [leaf for _, leaf in flat])
    reached = {other.name for (other, _), gradient in zip(flat, gradients, strict=True) if gradient is not None}
    return reached == {maker.name for maker in makers}


def _rows(group: StructuredGroups, maker: str) -> Tensor:
    """The rows of a layer that compute each neuron, int64 [1, copies, neurons]."""
    served = group.rows[maker]
    rows = (served >= 0).nonzero()[:, 0]
    rows = rows[served[rows].argsort(stable=True)]
    return rows.view(1, group.count, -1).mT.contiguous()
