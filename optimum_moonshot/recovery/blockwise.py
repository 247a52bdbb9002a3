"""Recovery, without labels: tune the weights that survived until each block does again what it did dense.

Two streams of hidden states run forward over the blocks, in a cache each. The dense model's, d, gives every block g its
targets; those of the recovered prefix, h, are its inputs, exactly as it will see them in the pruned model:

    min over the surviving weights of block f:   mean over tokens of |f(h) - g(d)|² / |g(d)|²

"blockwise" begins with the weights that the run pruned, "gradual" prunes each block once more, in stages (gradual.py);
neither changes the results of the run, so that a killed recovery resumes at its block. One block's
optimizer state is alive at a time. Norms and biases stay as they are.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

from torch import Tensor

from ..data.batches import Batch, batch_size, split_batches
from ..errors import Option, Text, require
from ..model.calls import frozen
from ..model.layers import Block, all_onloaded
from ..model.losses import token_mask
from ..pipeline.block_sequences import BlockSequences, find_block_sequences
from ..pipeline.inputs import Prepared
from ..pipeline.loop import run_pipeline
from ..pipeline.model_pipeline import block_pipeline, streamed
from ..pipeline.stages import BlockPipeline
from ..pipeline.variant import Variant
from ..progress import progress_bar
from ..reports.prune_report import BlockReport
from .gradual import Gradual
from .student import Student, Task, Tensors, positions
from .tuning import Tuner, part_size


class RecoveryStage:
    """A block, with the inputs and the targets of its recovery.

    Args:
        block: of the dense model.
        number: of the block.
        task: its inputs and targets.
        student: gives the block with its pruned weights, as the store has them.
        leads_on: whether another stage follows.
    """

    def __init__(self, block: Block, number: int, task: Task, student: Callable[[Block], Student], leads_on: bool):
        self.block, self.number, self.task, self.leads_on = block, number, task, leads_on
        self.layers, self._make, self._student = block.layers, student, list[Student]()

    def onloaded(self) -> AbstractContextManager[None]:
        """As `Stage.onloaded`."""
        return self.block.onloaded()

    @property
    def student(self) -> Student:
        """The block that is trained."""
        if not self._student:
            self._student.append(self._make(self.block))
        return self._student[0]

    def advance_targets(self) -> None:
        """Replace the dense model's inputs of the block by its outputs, the targets."""
        self.task.advance(self.task.targets, Student(self.block, [], set()).rounded())

    def advance(self) -> None:
        """As `Stage.advance`: the outputs of the recovered block are the next one's inputs."""
        if self.leads_on:
            self.task.advance(self.task.inputs, self.student.rounded())


class Recovery:
    """The recovery of one run's results; as a pipeline, the stages of its blocks.

    Args:
        prepared: the model, dense and frozen, and the data.
        sequence: the sequential blocks.
        variant: of the run: how many steps, at which rate, and the seed of their order; the pruned weights in its
            store, which gets the recovered ones.
    """

    def __init__(self, prepared: Prepared, sequence: tuple[Block, ...], variant: Variant):
        self.prepared, self.blocks, self.variant = prepared, sequence, variant
        data = prepared.calibration  # `plan` refuses to recover without
        self.config, self.structure, self.store = variant.selection.config, variant.selection.structure, variant.store
        self.backoff, self.storage = prepared.backoff.single_process(), prepared.storage
        self.whole_batches = split_batches(data.batches, part_size(data.num_samples))
        self.gradual: Gradual | None = None
        if self.config.recover == "gradual":
            arguments = variant.pattern_of, self.config.recover_steps, self.batches, self.backoff
            self.gradual = Gradual(variant.selection.solver, *arguments)
        self.where = sequence[0].name  # the current block

    @classmethod
    def plan(cls, prepared: Prepared, variant: Variant) -> "Recovery | None":
        """The recovery that follows a run, if one was asked for; what it cannot do is found here, before any work.

        Args:
            prepared: the model and the data.
            variant: of the run, which gets a note on what is not recovered.

        Raises:
            MoonshotError: no data, or no pruned layers inside of a chain of blocks.
        """
        model, config, structure = prepared.model, variant.selection.config, variant.selection.structure
        if config.recover is None:
            return None
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
        return cls(prepared, sequences.sequential[0], variant)

    def batches(self) -> list[Batch]:
        """The batches, as small as backoff has made them."""
        samples = self.backoff.samples
        return self.whole_batches if samples is None else split_batches(self.whole_batches, samples)

    def run(self) -> float:
        """Recover every block that is not recovered yet, under a bar; returns the seconds it took."""
        started = time.perf_counter()
        total, shown = sum(bool(block.layers) for block in self.blocks), self.prepared.subject.progress
        with progress_bar(total=total, desc="recovering", unit="block", shown=shown) as bar:

            def visit(stage: RecoveryStage) -> None:
                self.where = stage.block.name
                bar.set_postfix_str(self.where)
                with self.backoff.together():
                    self.recover(stage)
                bar.update(bool(stage.layers))

            run_pipeline(self, visit, self.backoff, self.batches, lambda: self.where)
        return time.perf_counter() - started

    def __iter__(self) -> Iterator[RecoveryStage]:
        prepared, batches = self.prepared, self.batches()
        pipeline: BlockPipeline
        if prepared.block_probe is not None:
            pipeline = streamed(prepared, batches, False)
        else:
            pipeline = block_pipeline(prepared, self.blocks, batches, False)
        pipeline.capture()
        dense = [call.hidden for call in pipeline.calls[pipeline.lowest]]
        inputs = [self.storage.put(hidden, "inputs of recovered blocks") for hidden in dense]
        masks = [self._mask(batch, hidden) for batch, hidden in zip(batches, dense, strict=True)]
        for i in range(pipeline.lowest, pipeline.highest + 1):
            task = Task(self.blocks[i].module, pipeline.calls[i], inputs, dense, masks)
            yield RecoveryStage(self.blocks[i], i, task, self._student, i < pipeline.highest)

    def recover(self, stage: RecoveryStage) -> None:
        """Recover a block, if it is not recovered yet.

        Args:
            stage: onloaded.
        """
        stage.advance_targets()
        if stage.student.trained and stage.block.name not in self.store.blocks:
            self.store.put_block(*self._recover(stage))

    def _mask(self, batch: Batch, hidden: Tensor) -> Tensor | None:
        """Which of a hidden state's positions are no padding; None for all."""
        mask = token_mask(batch)
        if mask is None or bool(mask.all()):
            return None
        require(
            positions(hidden).shape[:2] == mask.shape,
            f"hidden states of shape {list(hidden.shape)} do not show which tokens are padding",
            field="recover",
            hint="use samples of equal length",
        )
        return mask

    def _student(self, block: Block) -> Student:
        """The block with its pruned weights. A layer that other blocks share is not tuned."""
        inside, here = set(map(id, block.module.parameters())), set(block.module.modules())
        solved = [layer for layer in self.structure.layers() if layer in self.store]
        layers = [layer for layer in solved if id(layer.parameter) in inside]
        tuned = {layer.name for layer in layers if here.issuperset(layer.modules)}
        return Student(block, [(layer, self.store.weight(layer)) for layer in layers], tuned)

    def _recover(self, stage: RecoveryStage) -> tuple[BlockReport, Tensors]:
        started, student, task = time.perf_counter(), stage.student, stage.task
        sizes = [batch_size(batch) for batch in self.whole_batches]
        tuner = Tuner(student, task, self.config, stage.number, sizes, self.backoff.samples)
        before, pruned = tuner.loss(), student.snapshot()
        notes = tuner.finish() if self.gradual is None else self.gradual.tune(student, task, tuner)
        after = tuner.loss()
        if not after < before:
            student.restore(pruned)
            after, notes = before, [*notes, "no gain: the pruned weights were kept"]
        name, seconds = stage.block.name, time.perf_counter() - started
        return BlockReport(name, before, after, tuner.taken, seconds, tuple(notes)), student.matrices()
