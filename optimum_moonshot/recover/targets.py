"""The targets of a recovery: the outputs of dense blocks, in the coordinates of the recovered model's hidden states."""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from ..data.batches import Batch
from ..model.calls import BlockCall
from ..model.depth import skipping
from ..model.layers import Block, find_structure
from ..pipeline.inputs import Prepared
from ..pipeline.model_pipeline import block_pipeline, streamed
from ..pipeline.selection import DenseTeacher
from ..pipeline.stages import BlockPipeline
from .student import BlockTask, Student


@dataclasses.dataclass(eq=False)
class DenseBlocks:
    """The sequential blocks of a dense model, which a hidden state on every batch passes one after another."""

    blocks: Sequence[Block]
    calls: Sequence[list[BlockCall]]  # by block and batch
    states: list[Tensor]
    targets: list[Tensor]  # the states in the coordinates of the recovered model
    basis: Tensor | None = None  # of these coordinates, as in `DenseTeacher`

    @classmethod
    def of_teacher(
        cls, teacher: DenseTeacher, prepared: Prepared, batches: Sequence[Batch], pipeline: BlockPipeline
    ) -> "DenseBlocks":
        """The blocks of a teacher, after a pass of the data that caches the inputs of the first.

        Args:
            teacher: the dense model, in evaluation mode.
            prepared: the recovered model.
            batches: the data.
            pipeline: of those blocks of the recovered model that correspond to the teacher's.
        """
        whole, places = find_structure(teacher.model).blocks, prepared.selection.structure.blocks
        remaining = [block for index, block in enumerate(whole) if index not in teacher.removed]
        by_name = {ours.name: theirs for ours, theirs in zip(places, remaining, strict=True)}
        blocks = tuple(by_name[block.name] for block in pipeline.blocks)
        dense = BlockPipeline(teacher.model, blocks, batches, False, None, prepared.storage)
        dense.lowest, dense.highest = pipeline.lowest, pipeline.highest
        with skipping(whole[index].module for index in teacher.removed):
            dense.capture()
        states = [call.hidden for call in dense.calls[dense.lowest]]
        if teacher.basis is None:
            return cls(blocks, dense.calls, states, states)
        inside = [prepared.storage.put(_mapped(state, teacher.basis), "targets of blocks") for state in states]
        return cls(blocks, dense.calls, states, inside, teacher.basis)

    def advance(self, number: int) -> None:
        """Replace the states by the outputs of a block, of which the targets follow."""
        block = self.blocks[number]
        task = BlockTask(block.module, self.calls[number], self.states, self.states, [])
        task.advance(self.states, Student(block, [], set()).rounded())
        if self.basis is not None:
            for target, state in zip(self.targets, self.states, strict=True):
                target.copy_(_mapped(state, self.basis))


def captured(prepared: Prepared, blocks: tuple[Block, ...], batches: Sequence[Batch]) -> BlockPipeline:
    """The pipeline of the recovered blocks, after a pass of the data that caches the inputs of the first."""
    offloaded = prepared.block_probe is not None
    pipeline = streamed(prepared, batches, False) if offloaded else block_pipeline(prepared, blocks, batches, False)
    pipeline.capture()
    return pipeline


def _mapped(state: Tensor, basis: Tensor) -> Tensor:
    wide = state if state.dtype == torch.float64 else state.float()
    return (wide @ basis.to("cpu", wide.dtype).to(wide.device)).to(state.dtype)
