"""A rehearsal of a run: its own walk over the first blocks of every kind and a few samples, under a timer and a probe
of the memory, with some rows of every matrix solved.

The other blocks return their input meanwhile. Two rehearsals differ by one block or one sample: memory.py and run.py
multiply the difference of their memory and time by the numbers of blocks and samples.
"""

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..calibration.storage import Storage
from ..data.batches import Batch
from ..devices import preserved_random_state, wait_for
from ..model.calls import frozen
from ..model.layers import Block, PrunableLayer
from ..model.weights import RESIDENT
from ..pipeline.backoff import Backoff
from ..pipeline.block_sequences import Extras, passing_on
from ..pipeline.inputs import BlockProbe, Prepared
from ..pipeline.loop import Task, run_pipeline, solve_parts
from ..pipeline.solve import RowStatistics
from ..pipeline.walk import Stage
from ..prune.prefix import find_prefix
from .memory import Line, Rehearsed, RunSpec, Trial, kind_of, module_bytes
from .trials import ENOUGH, LiveBytes, Solve, clock, solver_of, try_layer

# A rehearsal has so many tokens, an image counting as IMAGE_TOKENS, and four times as many samples until it takes half
# of ENOUGH seconds: work that does not depend on the samples is then a small part of it.
TOKENS, IMAGE_TOKENS = 256, 64


class _Roomy(Storage):
    """Has room for everything on the device, and divides the layers by the limit of a run."""

    def place(self, size: int, cache: bool = False) -> torch.device:
        return self.device


def _norms(output: Any, batch: Batch) -> Tensor:
    """A loss of every sample without labels."""
    result = next(leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point())
    return result.float().flatten(1).square().mean(1)


class _Collecting(Task):
    """Passes the data for all layers, with memory for those of `samples`; `solve` tries the first of every shape."""

    def __init__(self, run: RunSpec, prepared: Prepared, solve: Solve | None, samples: list[Batch] | None):
        self.run, self.trial, self.done, self.trials = run, solve, set[str](), dict[Any, Trial]()
        prefix = find_prefix(prepared, self.lacks)
        spec = dataclasses.replace(run.statistics, token_weights=prefix.weights or {})
        if not (spec.keeps_routing or any(map(run.all_token_experts, prepared.selection.layers))):
            spec.under_calibrated_experts = "magnitude"  # a few samples reach few experts
        super().__init__(spec, prepared.backoff, lambda: samples or prepared.batches)
        self.pipeline = prefix.pipeline(prepared, self, lambda layer: layer.matrix)
        if run.backward:
            self.pipeline.gradients = True  # also where no layer has statistics of them

    def lacks(self, layer: PrunableLayer) -> bool:
        return layer.name not in self.done

    def skip(self, layer: PrunableLayer) -> None:
        self.done.add(layer.name)

    def solve(self, layer: PrunableLayer, statistics: Any) -> None:
        """Try the layer; where it is in slices, pass the data as often as a run, to rank removals and to solve."""
        parts = [statistics]
        if isinstance(statistics, RowStatistics):
            slices: Any = statistics
            parts = [slices.collect(rows, None) for rows in (*slices.slices, *slices.slices[-2::-1])][:1]
        elif layer.separate:
            parts = [each for each in statistics.groups(layer.groups) if each is not None]
        key = self.run.key(layer)
        if self.trial is not None and key not in self.trials:
            self.trials[key] = try_layer(self.trial, parts[0], self.run, layer)
        self.done.add(layer.name)


@dataclasses.dataclass
class Rehearsal:
    """A prepared run, some blocks of which pass the data."""

    prepared: Prepared  # with the data of the run
    extras: Extras | None  # with which blocks can return their input; None: all have to run
    reading: float = 0.0  # seconds to read all offloaded blocks
    samples: int = 0  # that a pass has had, at most

    @property
    def blocks(self) -> tuple[Block, ...]:
        return self.prepared.selection.structure.blocks

    def first(self, count: int) -> tuple[Block, ...]:
        """The first blocks of every kind."""
        seen, kinds = Counter[object](), [(block, kind_of(block)) for block in self.blocks]
        return tuple(block for block, kind in kinds if not seen.update([kind]) and seen[kind] <= count)

    @classmethod
    @contextmanager
    def of_model(cls, prepared: Prepared, extras: Extras | None, run: RunSpec) -> Iterator["Rehearsal"]:
        """A rehearsal that leaves the model and the random state unchanged; its first blocks are onloaded."""
        rehearsal = cls(prepared, extras)
        with preserved_random_state(), frozen(prepared.model), ExitStack() as stack:
            if run.offloaded is not None:
                started, first = time.perf_counter(), rehearsal.first(2)
                for block in first:
                    stack.enter_context(block.onloaded())
                    for tensor in (*block.module.parameters(), *block.module.buffers()):
                        tensor.sum()  # a mapped file is read on first access
                wait_for(run.device)
                share = run.offloaded.total / sum(module_bytes(block.module) for block in first)
                rehearsal.reading = (time.perf_counter() - started) * share
            yield rehearsal

    def of(self, run: RunSpec, phase: str) -> Rehearsed:
        """Rehearse a phase of a run, which extends "calibration"."""
        batch = self.prepared.calibration.batches[0]
        length = batch["input_ids"].shape[1] if "input_ids" in batch else IMAGE_TOKENS
        samples = min(run.samples, max(1, TOKENS // length))
        trials = self._passed(run, 1, min(run.samples, 2 * samples), solver_of(run, phase)).trials
        sizes = min(2, run.batch), min(3, run.batch)
        peaks = zip(*(self._probed(run, size) for size in sizes), strict=True)
        head, visit, caches = (Line.through((sizes[0], few), (sizes[1], more)) for few, more in peaks)
        blocks = len(self.blocks if self.extras is None else self.first(2))
        hidden = run.hidden or caches.slope / (blocks + 1 if run.backward and not run.differentiates else 1)
        while (one := self._timed(run, 1, samples)) < ENOUGH / 2 and samples < run.samples:
            samples = min(run.samples, 4 * samples)
        few, more, every = (run.turns(len(blocks)) for blocks in (self.first(1), self.first(2), self.blocks))
        if self.extras is not None and more > few:
            one += max(0.0, self._timed(run, 2, samples) - one) * (every - few) / (more - few)
        return Rehearsed(one * run.samples / samples, head, visit, hidden, trials)

    def _timed(self, run: RunSpec, count: int, samples: int) -> float:
        started = clock(run.device)
        self._passed(run, count, samples)
        return clock(run.device) - started

    def _probed(self, run: RunSpec, samples: int) -> tuple[int, int, int]:
        """The bytes at the peaks of a batch before and during the visits, beside the caches of the walk, and these."""
        first: list[tuple[int, int]] = []
        with LiveBytes() as live:

            def visited() -> None:
                if not first:
                    first.append((live.peak, live.now))
                    live.peak = live.now

            self._passed(run, 2, samples, None, visited)  # the last one visited propagates no gradient
        ((peak, caches),) = first or [(live.peak, 0)]
        return peak - caches, live.peak - caches, caches

    def _passed(
        self,
        run: RunSpec,
        count: int,
        samples: int,
        solve: Solve | None = None,
        visited: Callable[[], None] | None = None,
    ) -> _Collecting:
        """Pass some samples through the first blocks of every kind; if probed, with statistics for all samples."""
        every = None if visited is None else self.prepared.calibration.spread(run.samples).batches

        def visit(stage: Stage) -> None:
            if visited is not None:
                visited()
            solve_parts(task, stage)

        with self._cut(run, count, samples) as prepared:
            task = _Collecting(run, prepared, solve, every)
            run_pipeline(task.pipeline, visit, task.backoff, task.batches)
        return task

    @contextmanager
    def _cut(self, run: RunSpec, count: int, samples: int) -> Iterator[Prepared]:
        """The run with the first blocks of every kind, and some samples."""
        self.samples = max(self.samples, samples)
        probe, structure, config = None, run.selection.structure, run.selection.config
        with ExitStack() as stack:
            if self.extras is not None:
                blocks, pairs = self.first(count), list(zip(self.blocks, self.extras, strict=True))
                others = [pair for pair in pairs if pair[0] not in blocks]
                stack.enter_context(passing_on([block for block, _ in others], [extra for _, extra in others]))
                here = tuple(dataclasses.replace(block, weights=RESIDENT) for block in blocks)  # onloaded meanwhile
                structure = dataclasses.replace(structure, blocks=here)
                probe = BlockProbe([extra for block, extra in pairs if block in blocks], {}, {})
            storage = _Roomy(run.device, config.max_memory_bytes, None, run.storage.free)
            subject = self.prepared.subject
            if run.gradients and not self.prepared.selection.needs_losses:
                subject = dataclasses.replace(subject, loss=_norms)  # a recovery needs no labels
            yield dataclasses.replace(
                self.prepared,
                subject=subject,
                selection=dataclasses.replace(run.selection, structure=structure),
                data=self.prepared.calibration.spread(samples),
                storage=storage,
                backoff=Backoff(storage),
                block_probe=probe,
            )
