"""Recovery without labels: tune the surviving weights of each block to reproduce the dense block.

Two streams of hidden states pass the blocks, each in a cache. Those of the dense model, d, give each block g its
targets; those of the recovered prefix, h, are its inputs, exactly as in the pruned model:

    min over the surviving weights of block f:   mean over tokens of |f(h) - g(d)|² / |g(d)|²

"blockwise" starts from the pruned weights of the run, "gradual" prunes each block again in stages (gradual.py). The
results of the run remain unchanged, so that an interrupted recovery resumes at its block. Only one block's optimizer
state is in memory. Norms, biases and matrices that are not pruned are tuned where the block loses neurons, heads or
experts (whole_blocks.py).
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property

from ..data.batches import Batch, batch_size, cut_batches, split_batches
from ..errors import Option, Text, require
from ..model.calls import frozen
from ..model.layers import Block, PrunableLayer, all_onloaded
from ..pipeline.block_sequences import BlockSequences, find_block_sequences
from ..pipeline.inputs import Prepared
from ..pipeline.loop import run_pipeline
from ..pipeline.variant import Variant
from ..progress import progress_bar
from ..reports.prune_report import BlockReport
from .gradual import Gradual
from .student import BlockTask, Student, Tensors, padding_mask
from .targets import DenseBlocks, captured
from .tuning import Tuner, changes_structure, part_size, shared_names, step_parts, trainable


@dataclass(frozen=True)
class SmallerBlocks:
    """Blocks that lose parts of their tensors, not only zeros."""

    tensors: Callable[[Block], Tensors]  # the smaller ones of an onloaded block, by name in the block
    configured: Callable[[], AbstractContextManager[None]]  # meanwhile the block runs with them


@dataclass(eq=False)
class RecoveryStage:
    """A block of the model before the run, with the inputs and targets of its recovery."""

    block: Block
    number: int
    task: BlockTask
    dense: DenseBlocks
    make: Callable[[Block], Student]  # from the pruned weights in the store
    last: bool
    configured: Callable[[], AbstractContextManager[None]]  # meanwhile the block runs with the student's tensors

    @property
    def layers(self) -> tuple[PrunableLayer, ...]:
        return self.block.layers

    def onloaded(self) -> AbstractContextManager[None]:
        return self.block.onloaded()

    @cached_property
    def student(self) -> Student:
        """Created while the block is onloaded."""
        return self.make(self.block)

    def advance(self) -> None:
        """The outputs of the recovered block are the inputs of the next."""
        if not self.last:
            with self.configured():
                self.task.advance(self.task.inputs, self.student.rounded())


class Recovery:
    """A pipeline over the sequential blocks of a dense, frozen model, which recovers the results of a run.

    The store of the variant has the pruned weights, and receives the recovered ones.
    """

    def __init__(
        self, prepared: Prepared, sequence: tuple[Block, ...], variant: Variant, smaller: SmallerBlocks | None
    ):
        self.prepared, self.blocks, self.variant, self.smaller = prepared, sequence, variant, smaller
        data = prepared.calibration  # `plan` refuses to recover without
        self.config, self.structure, self.store = variant.selection.config, variant.selection.structure, variant.store
        self.backoff, self.storage = prepared.backoff.single_process(), prepared.storage
        self.parts = step_parts(data.num_samples)
        self.whole_batches = cut_batches(data.batches, self.parts)
        self.gradual: Gradual | None = None
        if self.config.recover == "gradual":
            solver, steps = variant.selection.solver, self.config.recovery_steps
            self.gradual = Gradual(solver, steps, self.batches, self.backoff)
        self.where = sequence[0].name  # the current block
        self.shared = shared_names(prepared.model, sequence)

    @classmethod
    def plan(cls, prepared: Prepared, variant: Variant, smaller: SmallerBlocks | None = None) -> "Recovery":
        """The recovery after a run that is configured with one; layers outside of the blocks are noted in the variant.

        Args:
            prepared: the dense model with the data.
            variant: its store will have the pruned weights when the recovery runs.
            smaller: the blocks, where they lose experts.

        Raises:
            MoonshotError: no data, or no pruned layers in sequential blocks.
        """
        model, config, structure = prepared.model, variant.selection.config, variant.selection.structure
        recover = Option("recover", config.recover)
        require(prepared.data is not None, Text("{} needs data", recover), field="calibration", value=None)
        part_size(prepared.calibration.num_samples)
        if prepared.block_probe is not None:  # all blocks are sequential
            sequences = BlockSequences([structure.blocks], (), ())
        else:
            probe = prepared.probe
            with frozen(model), all_onloaded(structure.blocks):
                sequences = find_block_sequences(model, structure.blocks, probe, False, prepared.subject.loss)
        require(
            len(sequences.sequential) == 1 and not sequences.non_sequential,
            "it needs pruned layers inside one chain of blocks, each of which reads the output of the one before: "
            f"this model has {len(sequences.sequential)}, and {len(sequences.non_sequential)} blocks in none",
            field="recover",
            value=config.recover,
            hint=Text("leave {} out, or choose the layers of one chain by {}", "recover", "targets"),
        )
        if structure.outside:
            variant.notes.append(f"{len(structure.outside)} layers outside of the blocks were not recovered")
        narrowed = prepared.subject.narrowed
        if narrowed or smaller is not None or changes_structure(variant.selection.patterns.values()):
            parts = "directions of the residual stream" if narrowed else "neurons, heads or experts"
            variant.notes.append(f"recovery trained all parameters of the blocks that lost {parts}")
        return cls(prepared, sequences.sequential[0], variant, smaller)

    def batches(self) -> list[Batch]:
        """The batches, which become smaller by backoff."""
        samples = self.backoff.samples
        return self.whole_batches if samples is None else split_batches(self.whole_batches, samples)

    def run(self) -> float:
        """Recover every block that is not recovered yet; returns the seconds."""
        started = time.perf_counter()
        total, shown = sum(bool(block.layers) for block in self.blocks), self.prepared.subject.progress
        with progress_bar(total=total, desc="recovering", unit="block", shown=shown) as bar:

            def visit(stage: RecoveryStage) -> None:
                self.where = stage.block.name
                bar.set_postfix_str(self.where)
                with self.backoff.together():
                    stage.dense.advance(stage.number)
                    if stage.student.parameters and stage.block.name not in self.store.blocks:
                        with stage.configured():
                            self.store.put_block(*self._recover(stage))
                bar.update(bool(stage.layers))

            run_pipeline(self, visit, self.backoff, self.batches, lambda: self.where)
        return time.perf_counter() - started

    def __iter__(self) -> Iterator[RecoveryStage]:
        prepared, batches = self.prepared, self.batches()
        pipeline = captured(prepared, self.blocks, batches)
        inputs = [call.hidden for call in pipeline.calls[pipeline.lowest]]
        masks = [padding_mask(batch, hidden) for batch, hidden in zip(batches, inputs, strict=True)]
        if prepared.subject.teacher is None:
            dense = DenseBlocks(self.blocks, pipeline.calls, inputs, inputs)
            inputs = [self.storage.put(hidden, "inputs of recovered blocks") for hidden in inputs]
        else:
            dense = DenseBlocks.of_teacher(prepared.subject.teacher, prepared, batches, pipeline)
        configured = nullcontext if self.smaller is None else self.smaller.configured
        for i in range(pipeline.lowest, pipeline.highest + 1):
            task = BlockTask(self.blocks[i].module, pipeline.calls[i], inputs, dense.targets, masks)
            yield RecoveryStage(self.blocks[i], i, task, dense, self._student, i == pipeline.highest, configured)

    def _student(self, block: Block) -> Student:
        """The block with its pruned weights. Parameters that are shared with other blocks are not tuned."""
        parameters, modules = set(map(id, block.module.parameters())), set(block.module.modules())
        solved = [layer for layer in self.variant.layers if layer in self.store]
        layers = [layer for layer in solved if id(layer.parameter) in parameters]
        tuned = {layer.name for layer in layers if modules.issuperset(layer.modules)}
        patterns = {layer.name: self.variant.pattern_of(layer) for layer in layers}
        smaller = {} if self.smaller is None else self.smaller.tensors(block)
        others: list[str] = []
        if smaller or self.prepared.subject.narrowed or changes_structure(patterns.values()):
            others = [name for name in trainable(block.module) if f"{block.name}.{name}" not in self.shared]
        recovered = self.store.parameters.intersection(f"{block.name}.{name}" for name in others)  # before a restart
        instead = smaller | {name.removeprefix(f"{block.name}."): self.store.loader(name)() for name in recovered}
        weights = [(layer, self.store.weight(layer)) for layer in layers]
        return Student(block, weights, tuned, patterns, others, instead)

    def _recover(self, stage: RecoveryStage) -> tuple[BlockReport, Tensors, Tensors]:
        started, student, task = time.perf_counter(), stage.student, stage.task
        pieces = [batch_size(batch) for batch in self.batches()]
        tuner = Tuner(student, task, self.config, stage.number, self.parts, pieces)
        before, pruned = tuner.loss(), student.snapshot()
        after, notes = before, ["nothing to tune: it equals the dense block"]
        if before:
            notes = tuner.finish() if self.gradual is None else self.gradual.tune(student, task, tuner)
            after = tuner.loss()
            if not after < before:
                student.restore(pruned)
                after, notes = before, [*notes, "no gain: the pruned weights were kept"]
        name, seconds = stage.block.name, time.perf_counter() - started
        report = BlockReport(name, before, after, tuner.taken, seconds, tuple(notes))
        return report, student.matrices(), student.changed()
