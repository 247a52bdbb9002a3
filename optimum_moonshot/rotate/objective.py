"""The objective that rotations minimise: the scores that pruning removes in a basis, streamed over decoder layers.

For a matrix W in a rotated basis, with ``H = G + damping · mean diag G · I`` of its inputs,

    S_kj = w_kj² / [H⁻¹]_jj,    w → Lᵀ w R,    H⁻¹ → Rᵀ H⁻¹ R

is SparseGPT's score (arXiv 2301.00774), the loss of removing a weight. The objective is the sum of the S that a pattern
removes, the smallest of a matrix or of every m, relative to the sum of all S of the dense matrix, as a weighted mean
over the matrices. `gather` collects the H⁻¹ of a model, whose norms' gains are folded, by one pass over the data.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from ..calibration.accumulators import GradientPlan, GradientStatistic
from ..calibration.observer import Observer
from ..calibration.storage import Storage
from ..distributed.sharing import Merger
from ..errors import MoonshotError, require
from ..model.calls import frozen
from ..model.layers import Block, PrunableLayer
from ..objective.linalg import damped_inverse_factor, escalate
from ..objective.patterns import NM, Pattern, Unstructured, kth_smallest
from ..pipeline.inputs import Prepared
from ..pipeline.loop import run_pipeline
from ..pipeline.model_pipeline import ModelPipeline
from ..pipeline.walk import Stage
from .basis import rotate_axis
from .spaces import Space, find_all_spaces

DAMPING = 0.01
# In larger matrices the threshold of an unstructured pattern is estimated from this many scores: the objective is
# stationary in the threshold, so an error in the threshold has only a second-order effect.
SAMPLED_SCORES = 2**17
# In messages: the phase of the run, and its cached tensors.
WHERE, INVERSE = "the rotation", "inverse for the rotation"
PatternsOf = Callable[[PrunableLayer], Sequence[Pattern]]


@dataclass(frozen=True, eq=False)
class Coordinates:
    """The coordinates of a space on an axis of a matrix [d_out, d_in]."""

    space: Space
    index: Tensor | None  # see `Place.index`


@dataclass(frozen=True, eq=False)
class Matrix:
    """A matrix to be pruned."""

    layer: PrunableLayer
    patterns: tuple[Pattern, ...]  # with equal weights
    writes: tuple[Coordinates, ...]  # on its rows
    rows: Tensor | None = None  # int64: the sampled rows; None is all
    columns: Tensor | None = None  # int64: the sampled columns; None is all


@dataclass(eq=False)
class Group:
    """Matrices that read the same inputs."""

    matrices: list[Matrix]
    reads: Coordinates | None  # on the columns of all matrices
    inverse: Tensor  # H⁻¹ [d_in, d_in], its blocks [count, copies, width, width], or its diagonal [d_in]
    weights: list[float]  # of each matrix in the objective, divided by the sum of its dense scores

    def sampled(self, count: int, generator: torch.Generator) -> "Group":
        """The group with a sample of each matrix's rows, or else of its columns, where no rotation mixes them."""
        matrices, weights = [], []
        for matrix, weight in zip(self.matrices, self.weights, strict=True):
            size, chosen = matrix.layer.shape[0], None
            if not matrix.writes:
                chosen = sampled(size, count, 1, generator)
                matrix = replace(matrix, rows=chosen)
            elif self.reads is None:
                size = matrix.layer.shape[1]
                chosen = sampled(size, count, widest(matrix.patterns), generator)
                matrix = replace(matrix, columns=chosen)
            matrices.append(matrix)
            weights.append(weight if chosen is None else weight * size / len(chosen))
        return Group(matrices, self.reads, self.inverse, weights)


@dataclass(eq=False)
class Objective:
    """The groups of a model, by block; a block is onloaded while its groups are evaluated."""

    blocks: list[tuple[Block | None, list[Group]]] = field(default_factory=list)
    moments: dict[str, Tensor] = field(default_factory=dict)  # space to scale → its output moments (`OutputMoments`)

    @property
    def groups(self) -> list[Group]:
        return [group for _, groups in self.blocks for group in groups]

    @property
    def matrices(self) -> Iterator[Matrix]:
        return (matrix for group in self.groups for matrix in group.matrices)

    @property
    def spaces(self) -> list[Space]:
        """The spaces with coordinates on some matrix, in a fixed order."""
        spaces: dict[Space, None] = {}
        for group in self.groups:
            spaces |= dict.fromkeys([group.reads.space] if group.reads else [])
            spaces |= dict.fromkeys(coordinates.space for matrix in group.matrices for coordinates in matrix.writes)
        return list(spaces)

    def sampled(self, count: int, seed: int) -> "Objective":
        """An estimate of the objective from `count` rows or columns of each matrix."""
        generator = torch.Generator().manual_seed(seed)
        return Objective(
            [(block, [group.sampled(count, generator) for group in groups]) for block, groups in self.blocks]
        )

    def value(self, rotations: Mapping[Space, Tensor]) -> float:
        """Return the objective, and accumulate its gradient in the rotations that require gradients.

        The rotations of all spaces, [count, width, width] in float32, must be leaves of the graph.
        """
        total = 0.0
        for block, groups in self.blocks:
            with block.onloaded() if block else nullcontext():
                total += sum(_group_value(group, rotations) for group in groups)
        return total


def _group_value(group: Group, rotations: Mapping[Space, Tensor]) -> float:
    """The objective of one group; one backward pass per matrix, so that the graph of one matrix is in memory."""
    device = group.matrices[0].layer.parameter.device
    reads = None if group.reads is None else rotations[group.reads.space].to(device)
    total = torch.zeros((), device=device)
    with torch.set_grad_enabled(any(rotation.requires_grad for rotation in rotations.values())):
        diagonal = rotated_diagonal(group.inverse.to(device), reads)
        shared = diagonal.detach().requires_grad_(diagonal.requires_grad)
        for matrix, weight in zip(group.matrices, group.weights, strict=True):
            value = weight * removed(scores(group, matrix, shared, rotations), matrix.patterns)
            if value.requires_grad:
                torch.autograd.backward(value)
            total += value.detach()
        if shared.grad is not None:
            torch.autograd.backward(diagonal, shared.grad)
    return float(total)


def scores(group: Group, matrix: Matrix, diagonal: Tensor, rotations: Mapping[Space, Tensor]) -> Tensor:
    """S of the sampled [rows, columns] of a matrix, from the diagonal [d_in] of H⁻¹ in the rotated basis."""
    weight = matrix.layer.matrix.detach().float()
    weight = weight if matrix.rows is None else weight[matrix.rows.to(weight.device)]
    if matrix.columns is not None:
        columns = matrix.columns.to(weight.device)
        weight, diagonal = weight[:, columns], diagonal[columns]
    if group.reads is not None:
        weight = rotate_axis(weight, 1, group.reads.index, rotations[group.reads.space].to(weight))
    for coordinates in matrix.writes:
        weight = rotate_axis(weight, 0, coordinates.index, rotations[coordinates.space].to(weight))
    return weight.square() / diagonal


def rotated_diagonal(inverse: Tensor, rotation: Tensor | None) -> Tensor:
    """The diagonal [d_in] of ``Rᵀ H⁻¹ R``; without a rotation, `Group.inverse` is the diagonal itself."""
    if rotation is None:
        return inverse
    blocks = inverse[None, None] if inverse.ndim == 2 else inverse
    rotation = rotation[:, None]
    return (rotation * (blocks @ rotation)).sum(-2).flatten()


def removed(values: Tensor, patterns: Sequence[Pattern]) -> Tensor:
    """The sum of the scores [rows, columns] that a pattern removes, averaged over the patterns; differentiable."""
    return sum((_removed(values, pattern) for pattern in patterns), values.new_zeros(())) / len(patterns)


def _removed(values: Tensor, pattern: Pattern) -> Tensor:
    if isinstance(pattern, NM):
        return _smallest_of_groups(values.reshape(-1, pattern.m), pattern.m - pattern.n)
    count = round(pattern.sparsity * values.numel())
    if count == 0:
        return values.new_zeros(())
    # Σ of the smallest = max over t of Σ min(S, t) - (size - count) · t, attained if t is the largest of them. This
    # needs no sort, and its gradient passes through `clamp` only.
    stride = max(1, values.numel() // SAMPLED_SCORES)
    while math.gcd(stride, values.shape[1]) > 1:  # so that every column is sampled equally
        stride -= 1
    sample = values.detach().flatten()[::stride]
    position = min(len(sample), max(1, round(count * len(sample) / values.numel())))
    threshold = kth_smallest(sample[None], position)[0, 0]
    return values.clamp(max=threshold).sum() - (values.numel() - count) * threshold


def _smallest_of_groups(groups: Tensor, count: int) -> Tensor:
    """The sum of the `count` smallest of every row; by minima for short rows, which are faster than topk."""
    size = groups.shape[1]
    if count == 0:
        return groups.new_zeros(())
    if count == 1:
        return groups.amin(1).sum()
    if count == size - 1:
        return groups.sum() - groups.amax(1).sum()
    if (count, size) == (2, 4):
        low, high = groups.view(-1, 2, 2).aminmax(dim=2)
        pairs = torch.stack([(low + high)[:, 0], (low + high)[:, 1], low.sum(1)])
        return pairs.amin(0).sum()
    return groups.topk(count, largest=False, sorted=False).values.sum()


def set_totals(objective: Objective, fisher: Mapping[str, float] | None) -> None:
    """Set the weight of every matrix: its Fisher loss at W = 0, or 1, divided by the sum of its dense scores."""
    names = [matrix.layer.name for matrix in objective.matrices]
    raw = {name: 1.0 if fisher is None else fisher[name] for name in names}
    if not sum(raw.values()):
        raw = dict.fromkeys(names, 1.0)
    whole = sum(raw.values())
    identity = {space: torch.eye(space.width).expand(space.count, -1, -1) for space in objective.spaces}
    for block, groups in objective.blocks:
        for group in groups:
            with block.onloaded() if block else nullcontext():
                device = group.matrices[0].layer.parameter.device
                reads = None if group.reads is None else identity[group.reads.space].to(device)
                diagonal = rotated_diagonal(group.inverse.to(device), reads)
                totals = [float(scores(group, matrix, diagonal, identity).sum()) for matrix in group.matrices]
            group.weights = [
                raw[matrix.layer.name] / whole / total if total > 0 else 0.0
                for matrix, total in zip(group.matrices, totals, strict=True)
            ]


def sampled(count: int, most: int, together: int, generator: torch.Generator) -> Tensor | None:
    """At most `most` of the `count` rows or columns, chosen at random in runs of `together`; None for all."""
    if count <= most or count % together:
        return None
    first = torch.randperm(count // together, generator=generator)[: max(1, most // together)].sort().values
    return (first[:, None] * together + torch.arange(together)).flatten()


def widest(patterns: Sequence[Pattern]) -> int:
    """The least common multiple of the group sizes m of the patterns."""
    return math.lcm(*(pattern.m for pattern in patterns if isinstance(pattern, NM)))


def competing(patterns: Sequence[Pattern]) -> list[NM]:
    """The n:m patterns of a matrix, whose loss depends on the permutation of its columns."""
    return [pattern for pattern in patterns if isinstance(pattern, NM) and 0 < pattern.n < pattern.m]


class FisherAtZero(GradientStatistic):
    """``L_F(0) = 1/N Σ_n Σ_k (a_nk · w_k)²`` of a layer, the Fisher estimate of the increase in loss without it.

    Because ``a_nk · w_k = Σ_t δ_tk (w_k · x_t)``, no weight gradients are needed.
    """

    def __init__(self, layer: PrunableLayer, samples: int, storage: Storage):
        super().__init__(layer, samples, storage)
        self.total = 0.0
        self.products: Tensor | None = None

    def add(self, inputs: Tensor, delta: Tensor, done: bool, groups: slice) -> None:
        weight = self.layer.matrix.float().view(self.layer.groups, -1, self.layer.shape[1])
        products = (delta * (inputs @ weight[groups].mT)).sum(2)  # [samples, groups, out]
        if self.products is None:
            self.products = products.new_zeros(len(products), self.layer.groups, products.shape[2])
        self.products[:, groups] += products
        if done:
            self.total += float(self.products.double().square().sum()) / self.samples
            self.products = None

    def merge(self, merger: Merger) -> None:
        self.total = sum(merger.values(self.total))

    def result(self) -> float:
        return self.total


class OutputMoments(GradientStatistic):
    """Second moments of the gradients at a layer's outputs in the spaces that may be scaled, summed over all tokens.

    Matrices [count, width, width] for spaces that are rotated, diagonals [count, width] for others.
    """

    spaces: Sequence[Space] = ()

    @classmethod
    def of(cls, spaces: Sequence[Space]) -> type["OutputMoments"]:
        """The statistic for the spaces of a model that may be scaled."""
        return type("OutputMoments", (cls,), {"spaces": [space for space in spaces if space.scaled]})

    def __init__(self, layer: PrunableLayer, samples: int, storage: Storage):
        super().__init__(layer, samples, storage)
        self.outputs = [  # the spaces whose coordinates are rows of the layer, and these rows, int64 [count, width]
            (space, place.index[:, 0])
            for space in self.spaces
            for place in space.places
            if place.writes and place.index is not None and place.at.parameter is layer.parameter
        ]
        self.totals: dict[str, Tensor] = {}

    def add(self, inputs: Tensor, delta: Tensor, done: bool, groups: slice) -> None:
        for space, rows in self.outputs:
            outputs = delta.flatten(0, -2)[:, rows.to(delta.device)]
            rotated = space.follows is not None and not space.follows.permuted
            moment = torch.einsum("tci,tcj->cij", outputs, outputs) if rotated else outputs.square().sum(0)
            self.totals[space.name] = self.totals.get(space.name, 0) + moment.double().cpu()

    def merge(self, merger: Merger) -> None:
        processes = merger.values(self.totals)
        names = dict.fromkeys(name for totals in processes for name in totals)
        self.totals = {name: torch.stack([t[name] for t in processes if name in t]).sum(0) for name in names}

    def result(self) -> dict[str, Tensor]:
        return self.totals


def inverse(gram: Tensor, reads: Coordinates | None) -> Tensor:
    """`Group.inverse` in float32 from the Gram matrix [d_in, d_in] of the inputs: the entries that a rotation needs."""
    unit = float(gram.diagonal().double().mean())
    factor, _ = escalate(DAMPING, lambda damping: damped_inverse_factor(gram, unit, damping))
    if reads is None:
        return factor.square().sum(0).float()
    if reads.index is None:
        return (factor.mT @ factor).float()
    columns = factor.T[reads.index.to(factor.device)]  # [count, copies, width, d_in]
    return (columns @ columns.mT).float()


def coordinates(layer: PrunableLayer, spaces: Sequence[Space]) -> tuple[Coordinates | None, tuple[Coordinates, ...]]:
    """The coordinates of spaces on the columns of a layer that is not a convolution, and on its rows."""
    reads: list[Coordinates] = []
    writes: list[Coordinates] = []
    for space in spaces:
        for place in space.places:
            if place.at.holder in layer.modules and place.at.parameter is layer.parameter:
                axes = writes if place.at.axis == layer.axes[0] else reads
                axes.append(Coordinates(space, place.index))
    return (reads[0] if reads else None), tuple(writes)


def rotatable_spaces(prepared: Prepared, patterns: PatternsOf) -> tuple[list[Space], dict[str, str]]:
    """The spaces of a model that may be rotated, permuted or scaled, and the reasons why others are excluded."""
    selection = prepared.selection
    by_layer = {layer.name: patterns(layer) for layer in selection.layers}
    permuted = [name for name, of_layer in by_layer.items() if competing(of_layer)]
    # Rows that the solver compares with each other are scaled by their gradients, if it uses them.
    weighted = selection.config.rotation_weights == "fisher" and not selection.solver.objective.diagonal_only
    compared = [name for name, of_layer in by_layer.items() if any(isinstance(one, Unstructured) for one in of_layer)]
    heads = selection.config.rotation == "heads"
    return find_all_spaces(prepared.model, prepared.probe, heads, permuted, compared if weighted else [])


def release_inverses(prepared: Prepared, objective: Objective) -> int:
    """Move the cached inverses of the objective off the device, and return the bytes that this frees on the device."""
    storage, before = prepared.storage, prepared.storage.cached
    for group in objective.groups:
        group.inverse = storage.away(group.inverse, INVERSE)
    return before - storage.cached


def gather(prepared: Prepared, spaces: Sequence[Space], patterns: PatternsOf) -> Objective:
    """Collect the objective over the spaces that may be rotated, in one pass over the data.

    Raises:
        MoonshotError: bad data or statistics, or too little memory.
    """
    selection = prepared.selection
    fisher = selection.config.rotation_weights == "fisher"
    # Every λ < 1 requires the same backward passes.
    prepared = replace(prepared, selection=selection.of_the_dense_model(0.5 if fisher else 1.0))
    gathering = _Gathering(prepared, spaces, patterns)
    try:
        with frozen(prepared.model):
            run_pipeline(gathering, gathering.visit, prepared.backoff, lambda: prepared.batches, lambda: WHERE)
    except MoonshotError as error:
        if not fisher or selection.needs_gradients:
            raise
        error.hint = "; ".join(filter(None, [error.hint, "rotation_weights='equal' needs no gradients"]))
        raise error.within("rotation_weights='fisher'") from None
    objective = gathering.objective()
    reached = next(objective.matrices, None) is not None
    require(reached, "no calibration data reached a layer that it could be learned for", field="rotation")
    losses = gathering.fisher if fisher else None
    release = partial(release_inverses, prepared, objective)
    prepared.backoff.with_more_memory(WHERE, lambda: set_totals(objective, losses), release)
    return objective


class _Gathering:
    """A pipeline over all layers, whose stages yield groups of matrices with the same inputs."""

    def __init__(self, prepared: Prepared, spaces: Sequence[Space], patterns: PatternsOf):
        self.prepared, self.patterns = prepared, patterns
        self.spaces = [space for space in spaces if space.rotated]
        self.output_moments = OutputMoments.of(spaces)
        self.fisher: dict[str, float] = {}
        self.moments: dict[str, Tensor] = {}
        self.groups: dict[str | None, list[Group]] = {}
        self.block_of = {layer.name: block for block in prepared.selection.structure.blocks for layer in block.layers}

    def __iter__(self) -> Iterator[Stage]:
        self.fisher, self.moments, self.groups = {}, {}, {}
        return iter(ModelPipeline(self.prepared, self))

    def lacks(self, layer: PrunableLayer) -> bool:
        return True

    def skip(self, layer: PrunableLayer) -> None:
        """Do nothing: the pruning that follows reports layers without data."""

    def visit(self, stage: Stage) -> None:
        """Collect the statistics of a stage's layers by one pass."""
        layers = [layer for layer in stage.layers if layer.groups == 1 and not layer.images]
        if not layers:
            return
        samples, storage = self.prepared.calibration.num_samples, self.prepared.storage
        wanted = {layer.name for layer in layers} if self.prepared.selection.needs_gradients else set()
        plans = {name: GradientPlan(nothing=True) for name in wanted}
        extra = (FisherAtZero, self.output_moments) if wanted else ()
        backoff, local_samples = self.prepared.backoff, self.prepared.local_samples
        watched = Observer(layers, False, wanted, samples, storage, plans, extra=extra, local_samples=local_samples)
        with backoff.passing(watched) as observer:
            stage.observe(observer, advance=True)
        with backoff.together():
            self._take(observer, layers)

    def _take(self, observer: Observer, layers: Sequence[PrunableLayer]) -> None:
        together: dict[int, tuple[Tensor, list[PrunableLayer]]] = {}
        for layer in layers:
            if observer.reached(layer):
                statistics = observer.take(layer)
                self.fisher[layer.name] = statistics.extra.get(FisherAtZero, 0.0)
                self.moments |= statistics.extra.get(self.output_moments, {})
                together.setdefault(id(statistics.inputs), (statistics.inputs, []))[1].append(layer)
        for gram, (first, *rest) in together.values():
            if not bool(gram.any()):
                continue
            reads, _ = coordinates(first, self.spaces)
            inputs = self.prepared.storage.put(inverse(gram, reads), f"{first.name}: {INVERSE}")
            group = Group([self._matrix(layer) for layer in (first, *rest)], reads, inputs, [])
            block = self.block_of.get(first.name)
            self.groups.setdefault(None if block is None else block.name, []).append(group)

    def _matrix(self, layer: PrunableLayer) -> Matrix:
        _, gives = coordinates(layer, self.spaces)
        return Matrix(layer, tuple(self.patterns(layer)), gives)

    def objective(self) -> Objective:
        """All groups, in the order of the model."""
        blocks: list[Block | None] = [*self.prepared.selection.structure.blocks, None]
        named = [(block, None if block is None else block.name) for block in blocks]
        return Objective([(block, self.groups[name]) for block, name in named if name in self.groups], self.moments)
