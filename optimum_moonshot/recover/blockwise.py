"""Recovery without labels: tune the surviving weights of each block to reproduce the dense block.

Two streams of cached hidden states pass through the blocks. The targets of a block are the outputs g(d) of the dense
block for the hidden states d of the dense model; its inputs are the hidden states h of the recovered prefix:

    min over the surviving weights of block f:   mean over tokens of |f(h) - g(d)|² / |g(d)|²

"blockwise" starts from the pruned weights of the run. Results are stored block by block, so that an interrupted
recovery resumes at its block. Only one block's optimizer state is in memory. Norms, biases and matrices that are not
pruned train only in blocks from which neurons, heads, experts or directions of the residual stream are removed.

"gradual" prunes each block again, in stages of increasing sparsity, and tunes it between them. If most weights of a
layer are removed at once, its survivors were selected for a block that no longer exists. Here the block starts dense.
Stage q of `STAGES` removes the fraction 1 - (1 - q/STAGES)³ of the layer's sparsity (the schedule of Zhu and Gupta,
arXiv 1710.01878) by the run's solver, with the Gram matrix of the *current* inputs, which come from the recovered
blocks and from this block as tuned so far; then the survivors are tuned towards the dense block's outputs. n:m patterns
keep fewer and fewer of every m. Removed weights may return in a later stage. The reconstruction error is the only
objective: the Fisher gradients belong to the dense model, and recovery removes the gain of λ < 1 in one shot
(docs/recover.md).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

import torch

from ..data.batches import Batch, batch_size, cut_batches, sample_count, split_batches
from ..errors import FactorizationError, require
from ..objective.patterns import NM, Experts, Pattern
from ..pipeline.loop import Task, run_pipeline, solve_parts
from ..pipeline.model_pipeline import block_sequences, walk_over
from ..pipeline.partition import StatisticsSpec
from ..pipeline.solve import Statistics, solve_layer
from ..pipeline.walk import OpenStage, PassObserver
from ..progress import progress_bar
from ..reports.prune_report import BlockReport
from .student import StudentBlock, Tensors, changes_structure, shared_names, trainable
from .teacher import DenseBlocks
from .tuning import BlockTask, Tuner, padding_mask, step_parts

if TYPE_CHECKING:
    from ..model.layers import Block, PrunableLayer
    from ..pipeline.backoff import Backoff
    from ..pipeline.inputs import Prepared
    from ..pipeline.variant import Variant
    from ..solvers import Solver

STAGES = 6  # of "gradual"; fewer reduce accuracy; each costs a pass through the block and a solution of its layers


@dataclass(frozen=True)
class SmallerModel:
    """A model whose tensors become smaller, instead of only sparse."""

    tensors: Callable[[Block], Tensors]  # the smaller tensors of an onloaded block, by name in the block
    configured: Callable[[], AbstractContextManager[None]]  # a context in which blocks run with these tensors
    removed: Callable[[], AbstractContextManager[None]]  # a context in which the model, in memory, has these tensors


@dataclass(eq=False)
class RecoveryStage:
    """A block of the model before the run, with the inputs and targets of its recovery."""

    recovery: Recovery
    number: int
    task: BlockTask
    dense: DenseBlocks
    last: bool

    @property
    def block(self) -> Block:
        return self.recovery.blocks[self.number]

    def onloaded(self) -> AbstractContextManager[None]:
        return self.block.onloaded()

    @cached_property
    def student(self) -> StudentBlock:
        """The block with its pruned weights; created while the block is onloaded."""
        return self.recovery.student(self.block)

    def advance(self) -> None:
        """Replace the inputs by the outputs of the recovered block, which are the inputs of the next."""
        if not self.last:
            with self.recovery.configured():
                self.task.advance(self.task.inputs, self.student.rounded())


class Recovery:
    """A pipeline over the sequential blocks of a dense, frozen model, which recovers the results of a run.

    Layers outside of the blocks are not recovered, with a note in the variant.

    Args:
        prepared: the dense model with data.
        variant: when the recovery runs, its store has the pruned weights; the recovered weights are added to the store.
        smaller: the model without the removed experts, if experts are removed.

    Raises:
        MoonshotError: no pruned layers in sequential blocks.
    """

    def __init__(self, prepared: Prepared, variant: Variant, smaller: SmallerModel | None = None):
        model, selection = prepared.model, variant.selection
        self.prepared, self.variant, self.smaller = prepared, variant, smaller
        self.config, self.structure, self.store = selection.config, selection.structure, variant.store
        data = prepared.calibration
        self.sizes = step_parts(data.num_samples)
        sequences = block_sequences(prepared, False)
        require(
            len(sequences.sequential) == 1 and not sequences.non_sequential,
            "it needs pruned layers inside one chain of blocks, each of which reads the output of the one before: "
            f"this model has {len(sequences.sequential)}, and {len(sequences.non_sequential)} blocks in none",
            field="recover",
            value=self.config.recover,
            hint="leave `recover` out, or choose the layers of one chain by `targets`",
        )
        if self.structure.outside:
            variant.notes.append(f"{len(self.structure.outside)} layers outside of the blocks were not recovered")
        narrowed = prepared.subject.narrowed
        if narrowed or smaller is not None or changes_structure(selection.patterns.values()):
            removed = "directions of the residual stream" if narrowed else "neurons, heads or experts"
            variant.notes.append(f"recovery trained all parameters of the blocks that lost {removed}")
        (self.sequence,) = sequences.sequential
        self.blocks = self.sequence.blocks
        self.configured = nullcontext if smaller is None else smaller.configured
        self.backoff = prepared.backoff.single_process()
        self.whole_batches = cut_batches(data.batches, self.sizes)
        self.where = self.blocks[0].name  # the current block
        self.shared = shared_names(model, self.blocks)

    def batches(self) -> list[Batch]:
        """The batches, split further after a shortage of memory."""
        samples = self.backoff.samples.size
        return self.whole_batches if samples is None else split_batches(self.whole_batches, samples)

    def run(self) -> float:
        """Recover every block that is not recovered yet, and return the seconds."""
        started = time.perf_counter()
        total, subject = sum(bool(block.layers) for block in self.blocks), self.prepared.subject
        with progress_bar(total=total, desc="recovering", unit="block", shown=subject.progress) as bar:

            def visit(stage: RecoveryStage) -> None:
                self.where = stage.block.name
                bar.set_postfix_str(self.where)
                with self.backoff.together():
                    stage.dense.advance(stage.number)
                    if stage.student.masters and stage.block.name not in self.store.blocks:
                        with self.configured():
                            self._recover(stage)
                bar.update(bool(stage.block.layers))

            run_pipeline(self, visit, self.backoff, self.batches, lambda: self.where)
        return time.perf_counter() - started

    def __iter__(self) -> Iterator[RecoveryStage]:
        prepared, batches = self.prepared, self.batches()
        walk = walk_over(prepared, self.sequence, batches, False)
        walk.capture()
        inputs = [call.hidden for call in walk.calls[walk.lowest]]
        masks = [padding_mask(batch, hidden) for batch, hidden in zip(batches, inputs, strict=True)]
        dense = DenseBlocks.of(prepared, batches, walk)
        if prepared.subject.teacher is None:  # copies: dense blocks overwrite these hidden states
            inputs = [prepared.storage.put(hidden, "inputs of recovered blocks") for hidden in inputs]
        for i in range(walk.lowest, walk.highest + 1):
            task = BlockTask(self.blocks[i].module, walk.calls[i], inputs, dense.targets, masks)
            yield RecoveryStage(self, i, task, dense, i == walk.highest)

    def student(self, block: Block) -> StudentBlock:
        """Return an onloaded block with its pruned weights; parameters shared with other blocks do not train."""
        parameters, modules = set(map(id, block.module.parameters())), set(block.module.modules())
        pruned = [layer for layer in self.variant.layers if layer.name in self.store.reports]
        layers = [layer for layer in pruned if id(layer.parameter) in parameters]
        tuned = {layer.name for layer in layers if modules.issuperset(layer.modules)}
        patterns = {layer.name: self.variant.pattern_of(layer) for layer in layers}
        smaller = {} if self.smaller is None else self.smaller.tensors(block)
        others: list[str] = []
        if smaller or self.prepared.subject.narrowed or changes_structure(patterns.values()):
            others = [name for name in trainable(block.module) if f"{block.name}.{name}" not in self.shared]
        recovered = self.store.parameters.intersection(f"{block.name}.{name}" for name in others)  # before a restart
        replacements = smaller | {name.removeprefix(f"{block.name}."): self.store.loader(name)() for name in recovered}
        weights = [(layer, self.store.weight(layer)) for layer in layers]
        return StudentBlock(block, weights, tuned, patterns, others, replacements)

    def _recover(self, stage: RecoveryStage) -> None:
        """Tune a block, and store the result."""
        started, student, batches = time.perf_counter(), stage.student, self.batches()
        tuner = Tuner(student, stage.task, self.config, stage.number, self.sizes, [*map(batch_size, batches)])
        before, pruned = tuner.loss(), student.snapshot()
        after, notes = before, ["nothing to tune: it equals the dense block"]
        if before:
            if self.config.recover == "gradual":
                solver = self.variant.selection.solver
                notes = tune_gradually(tuner, solver, self.backoff, self.batches)
            else:
                notes = tuner.finish()
            after = tuner.loss()
            if not after < before:
                student.restore(pruned)
                after, notes = before, [*notes, "no gain: the pruned weights were kept"]
        seconds = time.perf_counter() - started
        report = BlockReport(stage.block.name, before, after, tuner.taken, seconds, tuple(notes))
        self.store.put_block(report, *student.results())


# Gradual recovery


def stage_patterns(pattern: Pattern) -> list[Pattern]:
    """The patterns of a layer by stage; only the last, the final pattern, has the grid."""
    fractions = [1 - (1 - q / STAGES) ** 3 for q in range(1, STAGES)]
    if isinstance(pattern, NM):
        removed = [round(fraction * (pattern.m - pattern.n)) for fraction in fractions]
        return [*(NM(pattern.m - count, pattern.m) for count in removed), pattern]
    assert not isinstance(pattern, Experts)  # a separate run removes them
    return [*(replace(pattern.times(fraction), grid=None) for fraction in fractions), pattern]


class StagePruning(Task):
    """Solves the layers of a student for their patterns, from statistics of the current block.

    No result is written to the student before all are solved, so that every pass observes the same block even if
    several are needed to save memory.
    """

    def __init__(
        self, spec: StatisticsSpec, backoff: Backoff, batches: Callable[[], Sequence[Batch]], unreached: Tensors
    ):
        super().__init__(spec, backoff, batches)
        self.unreached = unreached  # weights of layers that no data reach
        self.weights: Tensors = {}
        self.solver_notes: list[str] = []

    def lacks(self, layer: PrunableLayer) -> bool:
        return layer.name not in self.weights

    def skip(self, layer: PrunableLayer) -> None:
        self.weights[layer.name] = self.unreached[layer.name]

    def solve(self, layer: PrunableLayer, statistics: Statistics) -> None:
        try:
            (solved,) = solve_layer(self.spec.solver, layer, self.spec.patterns[layer.name], statistics, 1.0)
        except FactorizationError as error:
            raise error.within(layer.name) from None
        self.weights[layer.name] = solved.weight
        self.solver_notes += [f"{layer.name}: {note}" for note in solved.notes]


def tune_gradually(tuner: Tuner, solver: Solver, backoff: Backoff, batches: Callable[[], Sequence[Batch]]) -> list[str]:
    """Recover a block from its dense weights; a layer without data keeps its pruned weight.

    Half of the steps follow the last stage; the others are divided evenly among the earlier stages.

    Args:
        tuner: the tuner of the block with its pruned weights.
        solver: the solver of the run.
        backoff: reduces the size of batches if memory is short.
        batches: returns the batches of the data.

    Returns:
        Notes for the report.

    Raises:
        MoonshotError: activations that are not finite, or too little memory for the statistics.
        FactorizationError: a layer's quadratic stays singular at the largest damping; it names the layer.
        Restart: the recovery must restart with smaller batches.
    """
    student, notes = tuner.student, list[str]()
    pruned = {layer.name: layer.matrix.clone() for layer in student.layers.values()}
    stages = {name: stage_patterns(student.patterns[name]) for name in pruned}
    student.to_dense()
    for stage in range(STAGES):
        if stage:
            tuner.settle(tuner.total // (2 * (STAGES - 1)))
        patterns = {name: [of_stages[stage]] for name, of_stages in stages.items()}
        spec = StatisticsSpec(solver, patterns, dict.fromkeys(patterns, 1.0), sample_count(batches()))
        pruning = StagePruning(spec, backoff, batches, pruned)
        solve_parts(pruning, OpenStage([*student.layers.values()], partial(_observe, tuner, batches())))
        student.prune(pruning.weights)
        notes += pruning.solver_notes
    student.to_grids()
    return [*dict.fromkeys(notes), *tuner.finish()]


@torch.no_grad()
def _observe(tuner: Tuner, batches: Sequence[Batch], observer: PassObserver) -> None:
    """Pass the data through the block under an observer's hooks."""
    task, tensors, first = tuner.task, tuner.student.tensors, 0
    device = next(iter(tensors.values())).device
    for index, (batch, inputs, mask) in enumerate(zip(batches, task.inputs, task.masks, strict=True)):
        observer.begin(first, batch_size(batch), None if mask is None else mask.to(device))
        task.output(index, tensors, inputs, widen=True)
        observer.end()
        first += batch_size(batch)
