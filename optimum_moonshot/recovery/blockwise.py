"""Recovery, without labels: tune the weights that survived until each block does again what it did dense.

Two streams of hidden states run forward over the blocks, in a cache each. The dense model's, d, gives every block g its
targets; those of the recovered prefix, h, are its inputs, exactly as it will see them in the pruned model:

    min over the surviving weights of block f:   mean over tokens of |f(h) - g(d)|² / |g(d)|²

"blockwise" begins with the weights that the run pruned, "gradual" prunes each block once more, in stages (gradual.py);
neither changes what the run gives it, so a recovery that is killed goes on at the block where it was. One block's
optimizer state is alive at a time. Norms and biases stay as they are.
"""

import time
from collections.abc import Iterator

from torch import Tensor

from ..data.batches import Batch, batch_size, split_batches
from ..errors import require
from ..model.calls import frozen
from ..model.layers import Block
from ..model.losses import token_mask
from ..model.onloading import all_onloaded
from ..pipeline.block_pipeline import BlockwisePasses
from ..pipeline.block_sequences import BlockSequences, find_block_sequences
from ..pipeline.inputs import Prepared
from ..pipeline.schedule import StatisticsSchedule
from ..pipeline.statistics_source import streamed
from ..pipeline.variant import Variant
from ..reports.prune_report import BlockReport
from .gradual import Gradual
from .student import Student, Task, Tensors, positions
from .tuning import Tuner, part_size


class Recovery:
    """The recovery of one run's results.

    Args:
        prepared: the model, dense and frozen, and the data.
        chain: of the blocks that it is inside of.
        variant: of the run: how many steps, at which rate, and the seed of their order; the pruned weights in its
            store, which gets the recovered ones.
    """

    def __init__(self, prepared: Prepared, chain: tuple[Block, ...], variant: Variant):
        assert prepared.data is not None  # `plan` refuses to recover without
        self.prepared, self.blocks, self.variant = prepared, chain, variant
        self.config, self.structure, self.store = variant.selection.config, variant.selection.structure, variant.store
        self.backoff, self.storage = prepared.backoff.by_one(), prepared.storage
        self.batches = split_batches(prepared.data.batches, part_size(prepared.data.num_samples))
        self.gradual: Gradual | None = None
        self.where = chain[0].name  # the latest block

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
        require(prepared.data is not None, f"calibration=None: recover={config.recover!r} needs data")
        part_size(prepared.data.num_samples)
        if prepared.surveyed is not None:  # which found one chain
            found = BlockSequences([structure.blocks], (), ())
        else:
            probe = prepared.probe
            with frozen(model), all_onloaded(structure.blocks):
                found = find_block_sequences(model, structure.blocks, probe, False, prepared.subject.loss)
        require(
            len(found.sequential) == 1 and not found.non_sequential,
            f"recover={config.recover!r} needs pruned layers inside one chain of blocks, each of which reads what the "
            f"one before gives: this model has {len(found.sequential)}, and {len(found.non_sequential)} blocks in none; "
            "use recover=None, or choose the layers of one chain by targets=",
        )
        if structure.outside:
            variant.notes.append(f"{len(structure.outside)} layers outside of the blocks were not recovered")
        return cls(prepared, found.sequential[0], variant)

    @property
    def parts(self) -> list[Batch]:
        """The batches, as small as the device's memory has turned out to ask for."""
        samples = self.backoff.samples
        return self.batches if samples is None else split_batches(self.batches, samples)

    @property
    def schedule(self) -> StatisticsSchedule | None:
        """Of the latest stage of a block, if there are stages."""
        return None if self.gradual is None else self.gradual.schedule

    def run(self) -> Iterator[Block]:
        """Recover every block that is not yet; yields each one when it is done.

        Raises:
            torch.OutOfMemoryError: the device; then this may be called again.
        """
        blocks, batches = self.blocks, self.parts
        passes = self._passes(batches)
        if self.config.recover == "gradual":
            sizes, patterns = [batch_size(batch) for batch in batches], self.variant.pattern_of
            steps, solver = self.config.recover_steps, self.variant.selection.solver
            self.gradual = Gradual(solver, patterns, steps, sizes, self.backoff)
        passes.capture()
        dense = [call.hidden for call in passes.calls[passes.lowest]]
        inputs = [self.storage.put(hidden, "inputs of recovered blocks") for hidden in dense]
        masks = [self._mask(batch, hidden) for batch, hidden in zip(batches, dense, strict=True)]
        for i in range(passes.lowest, passes.highest + 1):
            self.where = blocks[i].name
            task = Task(blocks[i].module, passes.calls[i], inputs, dense, masks)
            with blocks[i].onloaded():
                self._step(i, task, i < passes.highest)
            if blocks[i].layers:
                yield blocks[i]

    def _passes(self, batches: list[Batch]) -> BlockwisePasses:
        """Over the chain, of the model as it is dense."""
        if self.prepared.surveyed is not None:
            return streamed(self.prepared, batches, False)
        around = [block for block in self.structure.blocks if block not in self.blocks]
        return BlockwisePasses(self.prepared.model, self.blocks, batches, False, None, self.storage, around)

    def _step(self, i: int, task: Task, leads_on: bool) -> None:
        """Recover block `i`, if it is not yet; its inputs become its outputs where a block follows."""
        block = self.blocks[i]
        task.advance(task.targets, Student(block, [], set()).rounded())  # they are the targets from here on
        student = self._student(block)
        if student.trained and block.name not in self.store.blocks:
            self.store.put_block(*self._recover(i, student, task))
        if leads_on:
            task.advance(task.inputs, student.rounded())

    def _mask(self, batch: Batch, hidden: Tensor) -> Tensor | None:
        """Which of a hidden state's positions are no padding; None for all."""
        mask = token_mask(batch)
        if mask is None or bool(mask.all()):
            return None
        require(
            positions(hidden).shape[:2] == mask.shape,
            f"recover: hidden states of shape {list(hidden.shape)} do not show which tokens are padding: "
            "use samples of equal length",
        )
        return mask

    def _student(self, block: Block) -> Student:
        """The block with its pruned weights. A layer that other blocks share is not tuned."""
        inside, here = set(map(id, block.module.parameters())), set(block.module.modules())
        known = [layer for layer in self.structure.layers() if layer in self.store]
        layers = [layer for layer in known if id(layer.parameter) in inside]
        tuned = {layer.name for layer in layers if here.issuperset(layer.modules)}
        return Student(block, [(layer, self.store.weight(layer)) for layer in layers], tuned)

    def _recover(self, i: int, student: Student, task: Task) -> tuple[BlockReport, Tensors]:
        started = time.perf_counter()
        sizes = [batch_size(batch) for batch in self.batches]
        tuner = Tuner(student, task, self.config, i, sizes, self.backoff.samples)
        before, pruned = tuner.loss(), student.snapshot()
        notes = tuner.finish() if self.gradual is None else self.gradual.tune(student, task, tuner)
        after = tuner.loss()
        if not after < before:
            student.restore(pruned)
            after, notes = before, [*notes, "no gain: the pruned weights were kept"]
        name, seconds = self.blocks[i].name, time.perf_counter() - started
        return BlockReport(name, before, after, tuner.taken, seconds, tuple(notes)), student.matrices()
