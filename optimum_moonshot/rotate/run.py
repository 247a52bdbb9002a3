"""Rotate the model of a run: find the spaces, learn on the calibration data, merge the rotations into the weights.

The result is another checkpoint of the same function; `ModelRotation.undo` restores the weights after a failure.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from ..devices import trim_host_memory
from ..errors import require
from ..pipeline.backoff import SMALLER, enough_memory
from ..pipeline.inputs import Prepared
from ..pipeline.variant import Variant, broadcast_first
from ..progress import progress_bar
from .basis import Basis, ModelRotation, check_invariance, check_same, outputs
from .learning import Learned, learn, learning_size, rotations, scale
from .objective import WHERE, Objective, PatternsOf, gather, release_inverses, rotatable_spaces
from .permutation_search import permute_channels
from .report import RotationReport

if TYPE_CHECKING:
    from ..model.layers import PrunableLayer
    from ..objective.patterns import Pattern
    from ..pipeline.store import ResultStore

# Steps of learning after which the state is stored, to survive an interruption.
SAVED_EVERY = 10


@contextmanager
def rotated(prepared: Prepared, variants: Sequence[Variant], stays: bool) -> Iterator[float]:
    """Rotate the dense model for the patterns of the variants, and restore it if the body of the context fails.

    The state of learning is in the store of the first variant. Unless it `stays` rotated, the model is restored at
    the end, and rotated whenever the weights of a variant are written. Yields the seconds of the rotation.
    """

    def patterns(layer: PrunableLayer) -> list[Pattern]:
        return list(dict.fromkeys(variant.pattern_of(layer) for variant in variants))

    rotation = rotate(prepared, variants[0].store, patterns)
    try:
        for variant in variants:
            variant.rotated = rotation
        yield rotation.report.seconds
    except BaseException:
        rotation.undo()
        raise
    if stays:
        rotation.basis.forget()
    else:
        rotation.undo()


@enough_memory(f"{SMALLER}, or set rotation_rows")
def rotate(prepared: Prepared, store: ResultStore, patterns: PatternsOf) -> ModelRotation:
    """Rotate the dense model for the patterns of its layers; `store` has the state of learning.

    Raises:
        MoonshotError: no data, nothing that may be rotated, or a model whose function would change; the model is
            unchanged.
    """
    config, model = prepared.selection.config, prepared.model
    message = "it is learned on calibration data; give some"
    require(prepared.data is not None, message, field="rotation", value=config.rotation)
    started, batch = time.perf_counter(), prepared.probe
    spaces, refused = rotatable_spaces(prepared, patterns)
    expected = outputs(model, batch)
    basis = Basis(model, prepared.selection.structure.blocks, spaces)
    try:
        basis.keep()
        untied = basis.untied_bytes
        state = _from_first(prepared, lambda: None if store.rotation is None else Learned.load(*store.rotation))
        if state is None or not state.finished:
            check_invariance(model, basis, batch, expected)
            objective, unfinished = gather(prepared, spaces, patterns), state
            state = _from_first(prepared, lambda: _learn(prepared, store, basis, objective, unfinished))
        assert state is not None
        changed = state.after < state.before
        changes = rotations(spaces, state) if changed else {}
        if changed:
            basis.write(changes)
            check_same(model, batch, expected, "the learned rotation")
        else:
            basis.restore()
    except BaseException:
        basis.restore()
        raise
    report = RotationReport(
        spaces={space.name: (space.count, space.width) for space in spaces if changed and space.rotated},
        refused=refused,
        objective_before=state.before,
        objective_after=state.after,
        objective_learned=state.learned,
        permuted={space.name: space.width for space in spaces if changed and space.permuted},
        scales={name: float(scales.max() / scales.min()) for name, scales in state.factors.items() if changed},
        steps=state.steps,
        seconds=time.perf_counter() - started,
        weighted=config.rotation_weights,
        untied_bytes=untied if changed else 0,
        rotated=changed,
    )
    return ModelRotation(report, basis, changes, changed)


def _from_first(prepared: Prepared, learn: Callable[[], Learned | None]) -> Learned | None:
    """Return the state that the first process learns or has stored, in all processes."""

    def saved() -> tuple[Any, ...] | None:
        state = learn()
        return None if state is None else state.saved()

    stored = broadcast_first(prepared, saved)
    return None if stored is None else Learned.load(*stored)


def _learn(
    prepared: Prepared, store: ResultStore, basis: Basis, objective: Objective, state: Learned | None
) -> Learned:
    """Learn rotations, then permutations, then scales; resume from the state of an interrupted run."""
    config, device = prepared.selection.config, prepared.storage.device
    steps, rows = learning_size(config, prepared.selection.layers)
    shown = prepared.subject.progress

    def retried(work: Callable[[], None]) -> None:
        prepared.backoff.with_more_memory(WHERE, work, partial(release_inverses, prepared, objective))

    with progress_bar(total=steps + 1, desc="rotating", unit="step", shown=shown) as bar:
        bar.update(state.steps if state else 0)

        def done(state: Learned) -> None:
            trim_host_memory()
            bar.update(1)
            bar.set_postfix_str(f"objective {state.after:.4f}")
            if state.done or state.steps % SAVED_EVERY == 0:
                store.put_rotation(*state.saved())

        state = learn(objective, basis.spaces, steps, config.rotation_lr, device, state, rows, done, retried)
    permuted = [space for space in basis.spaces if space.permuted]
    shown = shown and bool(permuted)
    with progress_bar(total=len(permuted), desc="ordering neurons", unit="layer", shown=shown) as bar:

        def put(state: Learned) -> None:
            bar.update(1)
            store.put_rotation(*state.saved())

        bar.update(len(state.permutations))
        retried(lambda: permute_channels(objective, basis.spaces, state, put))
    scale(basis.spaces, state, objective.moments)
    state.finished = True
    store.put_rotation(*state.saved())
    return state
