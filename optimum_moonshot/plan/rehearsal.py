"""A rehearsal of a run: its own walk over the first blocks of every kind and a few samples, under a timer and a probe
of the memory, with some rows of every matrix solved.

The other blocks return their input meanwhile. Two rehearsals differ by one block or one sample: their difference is
multiplied by the numbers of blocks and samples.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..data.batches import Batch
from ..devices import preserved_random_state
from ..model.calls import frozen
from ..model.layers import Block
from ..model.weights import RESIDENT
from ..pipeline.backoff import Backoff
from ..pipeline.block_sequences import passing_on
from ..pipeline.inputs import BlockProbe
from ..pipeline.loop import run_pipeline, solve_parts
from ..pipeline.walk import Stage
from .memory import Point, Rehearsed, RunSpec, extrapolated
from .trials import ENOUGH, SOLVERS, LiveBytes, RoomyStorage, Solve, TrialTask, clock

# A rehearsal has so many tokens, an image counting as IMAGE_TOKENS, and four times as many samples until it takes half
# of ENOUGH seconds: work that does not depend on the samples is then a small part of it.
TOKENS, IMAGE_TOKENS = 256, 64
# Samples of the two batches whose memory is measured.
PROBED = 2, 3


def _norms(output: Any, batch: Batch) -> Tensor:
    """A loss of every sample without labels."""
    result = next(leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point())
    return result.float().flatten(1).square().mean(1)


@dataclasses.dataclass
class Rehearsal:
    """Passes of some blocks of a run."""

    blocks: tuple[Block, ...]  # all
    samples: int = 0  # that a pass has had, at most

    def first(self, count: int) -> tuple[Block, ...]:
        """The first blocks of every kind: of those with equal shapes."""
        seen, kinds = Counter[object](), []
        for block in self.blocks:
            shapes = tuple((name, parameter.shape) for name, parameter in block.module.named_parameters())
            layers = tuple(layer.name.removeprefix(block.name) for layer in block.layers)
            kinds.append((block, (type(block.module), shapes, layers)))
        return tuple(block for block, kind in kinds if not seen.update([kind]) and seen[kind] <= count)

    @classmethod
    @contextmanager
    def of_model(cls, run: RunSpec) -> Iterator["Rehearsal"]:
        """A rehearsal that leaves the model and the random state unchanged; its first blocks are onloaded."""
        rehearsal = cls(run.selection.structure.blocks)
        with preserved_random_state(), frozen(run.model), ExitStack() as stack:
            for block in rehearsal.first(2):
                stack.enter_context(block.onloaded())
            yield rehearsal

    def note(self, run: RunSpec) -> str:
        """The source of the figures, for the report."""
        count = self.samples * run.tokens
        passed = f"{count:,} tokens" if count else f"{self.samples} samples"
        return f"an estimate from the first blocks of every kind, by passes of at most {passed}"

    def of(self, run: RunSpec, phase: str) -> Rehearsed:
        """Rehearse a phase of a run, which extends "calibration"."""
        batch, one, two = run.calibration.batches[0], len(self.first(1)), len(self.first(2))
        length = batch["input_ids"].shape[1] if "input_ids" in batch else IMAGE_TOKENS
        samples = min(run.count, max(2, TOKENS // length))  # of two, one has token weights (prune/layers.py)
        trials = self._passed(run, 1, min(run.count, 2 * samples), SOLVERS.get(phase)).trials
        heads, visits = list[Point](), list[Point]()
        for probed in sorted({min(size, run.batch) for size in PROBED}):
            live = LiveBytes()
            storage: Any = self._passed(run, 2, probed, None, live).backoff.storage
            (head, caches), *peaks = live.laps
            heads.append((probed, head - caches))
            visits.append((probed, max(0, max((peak for peak, _ in peaks), default=0) - caches - storage.statistics)))
        while (seconds := self._timed(run, 1, samples)) < ENOUGH / 2 and samples < run.count:
            samples = min(run.count, 4 * samples)
        times, passes = [(run.turns(one), seconds)], run.count / samples
        if run.extras is not None and two > one:
            times.append((run.turns(two), self._timed(run, 2, samples)))
        return Rehearsed(
            seconds=extrapolated(times, run.turns(one if run.extras is None else len(self.blocks))) * passes,
            around=extrapolated(times, 0) * passes,
            head=extrapolated(heads, run.batch),
            # The peak with the statistics and that with the most activations may be different moments.
            visit=max(extrapolated(visits, run.batch), (visits[-1][1] - visits[0][1]) * run.batch),
            statistics=storage.statistics,
            hidden=storage.largest / probed,
            trials=trials,
        )

    def _timed(self, run: RunSpec, count: int, samples: int) -> float:
        started = clock(run.storage.device)
        self._passed(run, count, samples)
        return clock(run.storage.device) - started

    def _passed(
        self, run: RunSpec, count: int, samples: int, solve: Solve | None = None, live: LiveBytes | None = None
    ) -> TrialTask:
        """Pass some samples through the first blocks of every kind; if probed, with statistics for all samples."""
        self.samples = max(self.samples, samples)
        every = None if solve is None and live is None else run.calibration.batches

        def visit(stage: Stage) -> None:
            if live is not None:
                live.lap()
            solve_parts(task, stage)

        with self._cut(run, count, samples) as cut, ExitStack() as stack:
            if live is not None:
                stack.enter_context(live)
                stack.callback(live.lap)
            task = TrialTask(run, cut, every, solve)
            run_pipeline(task.pipeline, visit, task.backoff, task.batches)
        return task

    @contextmanager
    def _cut(self, run: RunSpec, count: int, samples: int) -> Iterator[RunSpec]:
        """The run with the first blocks of every kind, and some samples."""
        changes: dict[str, Any] = {}
        with ExitStack() as stack:
            if run.extras is not None:
                blocks, pairs = self.first(count), list(zip(self.blocks, run.extras, strict=True))
                others = [pair for pair in pairs if pair[0] not in blocks]
                stack.enter_context(passing_on([block for block, _ in others], [extra for _, extra in others]))
                resident = tuple(dataclasses.replace(block, weights=RESIDENT) for block in blocks)  # onloaded meanwhile
                structure = dataclasses.replace(run.selection.structure, blocks=resident)
                changes["selection"] = dataclasses.replace(run.selection, structure=structure)
                changes["block_probe"] = BlockProbe([extra for block, extra in pairs if block in blocks], {}, {})
            if run.gradients and not run.selection.needs_losses:
                changes["subject"] = dataclasses.replace(run.subject, loss=_norms)  # a recovery needs no labels
            storage = RoomyStorage(run.storage.device, run.selection.config.max_memory_bytes, None, run.storage.free)
            changes |= {"storage": storage, "backoff": Backoff(storage), "data": run.calibration.spread(samples)}
            yield dataclasses.replace(run, **changes)
