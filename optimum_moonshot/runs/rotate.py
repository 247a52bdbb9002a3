"""A run's rotation: find what may be rotated, learn it on the calibration data, merge it into the weights.

The model is another checkpoint of the same function afterwards, and everything that follows sees nothing else. If that
fails, `ModelRotation.undo` puts the weights back as they were.
"""

import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..calibration.accumulators import GradientPlan
from ..calibration.observer import Observer
from ..calibration.storage import Storage
from ..config import MoonshotConfig
from ..data.batches import Batch
from ..errors import MoonshotError, Option, Text, require
from ..malloc_trim import trim_host_memory
from ..model.calls import frozen, model_device
from ..model.layers import Block, PrunableLayer
from ..objective.patterns import Pattern, Unstructured
from ..pipeline.backoff import SMALLER, enough_memory
from ..pipeline.inputs import Prepared, prepare, sample_folder
from ..pipeline.loop import run_pipeline
from ..pipeline.model_pipeline import ModelPipeline
from ..pipeline.selection import Subject, select
from ..pipeline.stages import Stage
from ..pipeline.variant import Variant, share_rotation
from ..progress import progress_bar
from ..reports.rotation_report import RotationReport
from ..results.store import ResultStore
from ..rotation.basis import Basis, ModelRotation
from ..rotation.learning import Learned, learn, rotations
from ..rotation.objective import (
    FisherAtZero,
    Group,
    Matrix,
    Objective,
    coordinates,
    inverse,
    sampled,
    set_totals,
    widest,
)
from ..rotation.permutation_search import competing, permute_channels
from ..rotation.scaling import OutputMoments, scale
from ..rotation.search import check_invariance, check_same, find, outputs
from ..rotation.spaces import Space

# How many steps of learning pass between two states that outlive a kill.
SAVED_EVERY = 10
# In messages: where the run is, and what it keeps there.
WHERE, INVERSE = "the rotation", "inverse for the rotation"
PatternsOf = Callable[[PrunableLayer], Sequence[Pattern]]


@contextmanager
def rotated(prepared: Prepared, variants: Sequence[Variant], stays: bool) -> Iterator[float]:
    """Rotate the model as its configuration says; if the block fails, it is put back as it was.

    Args:
        prepared: the model, dense, and the data.
        variants: for whose patterns it is learned, and whose reports say what was done. The first one's store keeps the
            state of learning.
        stays: whether the model stays in its new basis; otherwise each variant brings it there with its weights.

    Yields:
        The seconds it took; 0 where the configuration asks for no rotation.

    Raises:
        MoonshotError: as `rotate`.
    """
    if prepared.selection.config.rotation is None:
        yield 0.0
        return

    def patterns(layer: PrunableLayer) -> list[Pattern]:
        return list(dict.fromkeys(variant.pattern_of(layer) for variant in variants))

    done = rotate(prepared, variants[0].store, patterns)
    try:
        for variant in variants:
            variant.rotated = done
        yield done.report.seconds
    except BaseException:
        done.undo()
        raise
    if stays:
        done.basis.forget()
    else:
        done.undo()


def run_rotation(
    subject: Subject, config: MoonshotConfig, calibration: Any, resume_dir: str | os.PathLike[str] | None
) -> tuple[RotationReport, ResultStore]:
    """Rotate a model, and leave it at that.

    Args:
        subject: the model and what belongs to it.
        config: for which pattern, and how.
        calibration: what `MoonshotPruner.prune` takes.
        resume_dir: a folder that keeps the state of learning, or None.

    Returns:
        The report, and what holds the state: its files outlive the run, to be discarded once the model is saved.

    Raises:
        MoonshotError: as `rotate`, and bad data.
    """
    selection = select(subject.model, config)
    prepared = prepare(subject, selection, calibration, sample_folder(subject, resume_dir))
    variant = Variant.open(prepared, selection, resume_dir, "resume_dir")
    try:
        with rotated(prepared, [variant], stays=True):
            pass
    finally:
        variant.store.release()
    assert variant.rotated is not None
    return variant.rotated.report, variant.store


@enough_memory(Text("{}, or set {}", SMALLER, "rotation_rows"))
def rotate(prepared: Prepared, store: ResultStore, patterns: PatternsOf) -> ModelRotation:
    """Rotate a model for the patterns that it is going to be pruned by.

    Args:
        prepared: the model, dense, and the data; its configuration says how.
        store: of the run, which keeps the state of learning.
        patterns: of a layer, one or several.

    Raises:
        MoonshotError: no data, nothing that may be rotated, or a model whose function would change; the model is as it
            was.
    """
    config = prepared.selection.config
    learned = "it is learned on calibration data; give some"
    require(prepared.data is not None, learned, field="rotation", value=config.rotation)
    started, model = time.perf_counter(), prepared.model
    structure = prepared.selection.structure
    batch = prepared.probe
    ordered = [layer.name for layer in prepared.selection.layers if competing(patterns(layer))]
    spaces, refused = find(model, batch, config.rotation == "heads", ordered, _compared(prepared, patterns))
    expected = outputs(model, batch)
    basis = Basis(model, structure.blocks, spaces)
    untied = basis.untied_bytes
    try:
        basis.keep()
        state = _learned(prepared, store, patterns, basis, batch, expected)
        changed = state.after < state.before
        found = rotations(spaces, state) if changed else {}
        if changed:
            basis.write(found)
            check_same(model, batch, expected, "the learned rotation")
        else:
            basis.restore()
    except BaseException:
        basis.restore()
        raise
    report = RotationReport(
        spaces={space.name: (space.count, space.width) for space in spaces if changed and _is_rotated(space)},
        refused=refused,
        objective_before=state.before,
        objective_after=state.after,
        objective_learned=state.learned,
        permuted={space.name: space.width for space in spaces if changed and space.permuted},
        scales={name: float(found.max() / found.min()) for name, found in state.factors.items() if changed},
        steps=len(state.history) - 1,
        seconds=time.perf_counter() - started,
        weighted=config.rotation_weights,
        untied_bytes=untied if changed else 0,
        rotated=changed,
    )
    return ModelRotation(report, basis, found, changed)


def _learned(
    prepared: Prepared, store: ResultStore, patterns: PatternsOf, basis: Basis, batch: Batch, expected: list[Tensor]
) -> Learned:
    """The state at the end of learning, from the store as far as it is there.

    Several processes gather the objective together; the first one learns.
    """
    state = share_rotation(prepared, store.rotation())
    if state is not None and state.finished:
        return state
    check_invariance(prepared.model, basis, batch, expected)
    objective = gather(prepared, basis.spaces, patterns)
    if prepared.subject.is_main:
        state = _finished(prepared, store, basis, objective, state)
    state = share_rotation(prepared, state)
    assert state is not None
    return state


def _finished(
    prepared: Prepared, store: ResultStore, basis: Basis, objective: Objective, state: Learned | None
) -> Learned:
    """Learn from a state on, to the end."""
    config, device = prepared.selection.config, model_device(prepared.model)
    steps, shown = config.rotation_steps, prepared.subject.progress
    relieved = partial(prepared.backoff.relieved, WHERE, offload=partial(_move, objective, prepared.storage))
    with progress_bar(total=steps + 1, desc="rotating", unit="step", shown=shown) as bar:
        bar.update(len(state.history) if state else 0)

        def done(state: Learned) -> None:
            trim_host_memory()
            bar.update(1)
            bar.set_postfix_str(f"objective {state.after:.4f}")
            if state.done or len(state.history) % SAVED_EVERY == 0:
                store.put_rotation(state)

        state = learn(objective, basis.spaces, steps, config.rotation_lr, device, state, done, relieved)
    ordered = [space for space in basis.spaces if space.permuted]
    with progress_bar(total=len(ordered), desc="ordering neurons", unit="layer", shown=shown and bool(ordered)) as bar:

        def put(state: Learned) -> None:
            bar.update(1)
            store.put_rotation(state)

        bar.update(len(state.permutations))
        relieved(lambda: permute_channels(objective, basis.spaces, state, put))
    scale(basis.spaces, state, objective.moments)
    state.finished = True
    store.put_rotation(state)
    return state


def _move(objective: Objective, storage: Storage) -> int:
    """Caches of the objective leave the device; the bytes that they had there."""
    before = storage.cached
    objective.move(lambda tensor: storage.away(tensor, INVERSE))
    return before - storage.cached


def _is_rotated(space: Space) -> bool:
    return not space.permuted and not space.scaled


def _compared(prepared: Prepared, patterns: PatternsOf) -> list[str]:
    """The layers whose rows are compared with each other, where gradients show what they cost."""
    selection = prepared.selection
    if not selection.rotates_by_gradients or selection.solver.objective.diagonal_only:
        return []
    asked = ((layer, pattern) for layer in selection.layers for pattern in patterns(layer))
    return list(dict.fromkeys(layer.name for layer, pattern in asked if isinstance(pattern, Unstructured)))


def gather(prepared: Prepared, spaces: Sequence[Space], patterns: PatternsOf) -> Objective:
    """The objective of a model whose norms' gains are folded, from one pass over the data.

    Args:
        prepared: the model and the data.
        spaces: that may be rotated.
        patterns: of a layer.

    Raises:
        MoonshotError: bad data or statistics, or no memory for them.
    """
    selection = prepared.selection
    fisher = selection.rotates_by_gradients
    # The passes go backwards where λ < 1, whatever it is.
    prepared = dataclasses.replace(prepared, selection=selection.of_the_dense_model(0.5 if fisher else 1.0))

    gathering = _Gathering(prepared, spaces, patterns)
    try:
        with frozen(prepared.model):
            run_pipeline(gathering, gathering.visit, prepared.backoff, lambda: prepared.batches, lambda: WHERE)
    except MoonshotError as error:
        if not fisher or selection.needs_gradients:
            raise
        hints = (error.hint, Text("{} needs no gradients", Option("rotation_weights", "equal")))
        texts = [each if isinstance(each, Text) else Text(each) for each in hints if each]
        error.hint = Text("; ".join("{}" for _ in texts), *texts)
        raise error.within(Option("rotation_weights", "fisher")) from None
    objective = gathering.objective()
    found = next(objective.matrices, None) is not None
    require(found, "no calibration data reached a layer that it could be learned for", field="rotation")
    fisher_losses = gathering.fisher if fisher else None
    kept = partial(_move, objective, prepared.storage)
    prepared.backoff.relieved(WHERE, lambda: set_totals(objective, fisher_losses), kept)
    return objective


class _Gathering:
    """Groups of matrices that read the same inputs, stage by stage; as a pipeline, the stages of all layers."""

    def __init__(self, prepared: Prepared, spaces: Sequence[Space], patterns: PatternsOf):
        self.prepared, self.patterns = prepared, patterns
        self.spaces = [space for space in spaces if _is_rotated(space)]
        self.output_moments = OutputMoments.of(spaces)
        self.fisher: dict[str, float] = {}
        self.moments: dict[str, Tensor] = {}
        self.found: dict[str | None, list[Group]] = {}
        self.block_of = {layer.name: block for block in prepared.selection.structure.blocks for layer in block.layers}

    def __iter__(self) -> Iterator[Stage]:
        self.fisher, self.moments, self.found = {}, {}, {}
        return iter(ModelPipeline(self.prepared, self))

    def lacks(self, layer: PrunableLayer) -> bool:
        """As `model_pipeline.Results.lacks`: all layers are observed."""
        return True

    def skip(self, layer: PrunableLayer) -> None:
        """As `model_pipeline.Results.skip`: the run itself reports layers without data."""

    def visit(self, stage: Stage) -> None:
        """Pass the data once for the layers of a stage, and keep the statistics that learning needs."""
        layers = [layer for layer in stage.layers if layer.groups == 1 and not layer.images]
        if not layers:
            return
        samples, storage = self.prepared.calibration.num_samples, self.prepared.storage
        wanted = {layer.name for layer in layers} if self.prepared.selection.needs_gradients else set()
        plans = {name: GradientPlan(nothing=True) for name in wanted}
        extra = (FisherAtZero, self.output_moments) if wanted else ()
        backoff = self.prepared.backoff
        here = backoff.samples_here(samples)
        gathered = Observer(layers, False, wanted, samples, storage, plans, extra=extra, here=here)
        with backoff.passing(gathered) as observer:
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
        for gram, sharing in together.values():
            if bool(gram.any()):
                self._add(gram, sharing)

    def _add(self, gram: Tensor, sharing: list[PrunableLayer]) -> None:
        reads, _ = coordinates(sharing[0], self.spaces)
        needed = inverse(gram, reads)
        kept = self.prepared.storage.put(needed, f"{sharing[0].name}: {INVERSE}")
        group = Group([self._matrix(layer, reads is None) for layer in sharing], reads, kept, [])
        block = self.block_of.get(sharing[0].name)
        self.found.setdefault(None if block is None else block.name, []).append(group)

    def _matrix(self, layer: PrunableLayer, free: bool) -> Matrix:
        """A layer, with some of its rows, or of its columns, where a rotation does not mix these."""
        config = self.prepared.selection.config
        _, gives = coordinates(layer, self.spaces)
        patterns = tuple(self.patterns(layer))
        generator = torch.Generator().manual_seed(config.seed)
        rows = columns = None
        if not gives:
            rows = sampled(layer.shape[0], config.rotation_rows, 1, generator)
        elif free:
            columns = sampled(layer.shape[1], config.rotation_rows, widest(patterns), generator)
        return Matrix(layer, patterns, gives, rows, columns)

    def objective(self) -> Objective:
        """All groups, in the model's order."""
        blocks: list[tuple[Block | None, list[Group]]] = [
            (block, self.found[block.name])
            for block in self.prepared.selection.structure.blocks
            if block.name in self.found
        ]
        return Objective(blocks + ([(None, self.found[None])] if None in self.found else []), self.moments)
