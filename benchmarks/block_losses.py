"""The measured loss of removing single blocks, and of sets by the sum of what these change: `BlockLosses`.

Each block is skipped in turn, on a few samples. Without block b the last block's output y becomes y + δ_b, and the loss
of a set of blocks is predicted as that of the head at y + Σ_b δ_b. It is exact for single blocks, and takes into
account how changes add up in front of the head; only the effect of a removed block on the δ of another is missing. B
blocks cost B + 1 forward passes over the samples, and each prediction one call of the model's head.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from itertools import combinations
from math import comb
from typing import Any

import torch
from torch import Tensor

from optimum_moonshot.data.batches import Batch, sample_count, spread_samples
from optimum_moonshot.errors import require
from optimum_moonshot.model.calls import first_tensor, frozen, model_device, run_model, to_device
from optimum_moonshot.model.depth import skipping
from optimum_moonshot.model.layers import onloaded_in_turn
from optimum_moonshot.model.losses import sample_losses
from optimum_moonshot.pipeline.block_sequences import Extras, find_sequence, passing_on
from optimum_moonshot.pipeline.inputs import Prepared

# Samples, and most sets of blocks of which `BlockLosses.select` predicts all.
SAMPLES, EXACT = 16, 128


class BlockLosses:
    """Increases of the mean calibration loss without some blocks.

    Args:
        prepared: a model whose blocks are one sequence, and calibration data, of which `SAMPLES` are used.

    Raises:
        MoonshotError: the blocks are not sequential, or change the shape of the hidden state.
    """

    def __init__(self, prepared: Prepared):
        self.prepared, self.blocks = prepared, prepared.selection.structure.blocks
        self.names = tuple(block.name for block in self.blocks)
        model, loss = prepared.model, prepared.subject.loss
        self.batches = spread_samples(prepared.calibration.batches, SAMPLES)
        self.samples = sample_count(self.batches)
        with frozen(model), torch.no_grad(), onloaded_in_turn(self.blocks):
            sequential = prepared.block_probe is not None or find_sequence(
                model, self.blocks, prepared.probe, False, loss
            )
            require(sequential, "its blocks are no sequence, so that their losses cannot be predicted", field="model")
            self.extras = self._count_outputs()
            outputs, dense = self._run(())
            runs = [self._run((index,)) for index in range(len(self.blocks))]
        self.dense = dense  # mean loss of the dense model
        self.losses = torch.tensor([loss - dense for _, loss in runs], dtype=torch.float64)  # without each block  [B]
        self._outputs = outputs  # of the last block, [b, T, d] for every batch
        self._changes = [[new - old for new, old in zip(each, outputs, strict=True)] for each, _ in runs]

    def predict(self, blocks: Collection[int]) -> float:
        """The predicted increase of the mean loss without a set of blocks, given by their indices in any order."""
        total, members = 0.0, sorted(set(blocks))
        with frozen(self.prepared.model), torch.no_grad():
            for index, batch in enumerate(self.batches):
                hidden = self._outputs[index]
                for block in members:
                    hidden = hidden + self._changes[block][index]
                with passing_on(self.blocks, self.extras, _constant(hidden)):
                    total += self._loss(batch)
        return total / self.samples - self.dense

    def select(self, count: int) -> tuple[int, ...]:
        """The set of blocks with the least predicted loss: of all sets, or by greedy removal if these are many.

        Args:
            count: the number of blocks to remove.

        Returns:
            Ascending indices.

        Raises:
            MoonshotError: a number of blocks that the model cannot lose.
        """
        size = len(self.blocks)
        require(1 <= count < size, f"the model can lose 1 to {size - 1} blocks", field="count", value=count)
        if comb(size, count) <= EXACT:
            return min(combinations(range(size), count), key=self.predict)
        removed: tuple[int, ...] = ()
        for _ in range(count):
            sets = [(*removed, block) for block in range(size) if block not in removed]
            removed = min(sets, key=self.predict)
        return tuple(sorted(removed))

    def _run(self, skipped: tuple[int, ...]) -> tuple[list[Tensor], float]:
        """The outputs of the last block, by batch, and the mean loss, without some blocks."""
        outputs, total = list[Tensor](), 0.0
        with skipping(self.blocks[index].module for index in skipped), self._last_output(outputs.append):
            for batch in self.batches:
                total += self._loss(batch)
        return outputs, total / self.samples

    def _loss(self, batch: Batch) -> float:
        model = self.prepared.model
        batch = to_device(batch, model_device(model))
        losses = sample_losses(model, run_model(model, batch), batch, self.prepared.subject.loss)
        return float(losses.double().sum())

    @contextmanager
    def _last_output(self, take: Callable[[Tensor], None]) -> Iterator[None]:
        last = self.blocks[-1].module
        handle = last.register_forward_hook(lambda _, args, output: take(first_tensor(output)))
        try:
            yield
        finally:
            handle.remove()

    def _count_outputs(self) -> Extras:
        """The number of values that each block returns behind its hidden state; None: a bare tensor."""
        extras: list[int | None] = []

        def count(_: Any, args: Any, output: Any) -> None:
            extras.append(None if isinstance(output, Tensor) else len(output) - 1)

        handles = [block.module.register_forward_hook(count) for block in self.blocks]
        try:
            run_model(self.prepared.model, self.prepared.probe)
        finally:
            for handle in handles:
                handle.remove()
        return extras


def _constant(hidden: Tensor) -> Callable[[], Tensor]:
    return lambda: hidden
