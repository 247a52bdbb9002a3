"""The objective of a rotation: inverse Gram matrices of a model whose norms' gains are folded, from one pass."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from torch import Tensor

from ..calibration.accumulators import GradientPlan
from ..calibration.observer import Observer
from ..errors import MoonshotError, require
from ..model.calls import frozen
from ..model.layers import Block, PrunableLayer
from ..objective.patterns import Pattern, Unstructured
from ..pipeline.inputs import Prepared
from ..pipeline.loop import run_pipeline
from ..pipeline.model_pipeline import ModelPipeline
from ..pipeline.walk import Stage
from .objective import (
    FisherAtZero,
    Group,
    Matrix,
    Objective,
    OutputMoments,
    competing,
    coordinates,
    inverse,
    set_totals,
)
from .spaces import Space, find_all_spaces

# In messages: the phase of the run, and its cached tensors.
WHERE, INVERSE = "the rotation", "inverse for the rotation"
PatternsOf = Callable[[PrunableLayer], Sequence[Pattern]]


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
    prepared = dataclasses.replace(prepared, selection=selection.of_the_dense_model(0.5 if fisher else 1.0))
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
