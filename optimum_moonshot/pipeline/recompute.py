"""Statistics on the already pruned prefix: the paper's "++" (MOONSHOT, arXiv 2604.13287, "Hessian Recomputation").

The blocks are pruned first to last. The inputs of a block's layers, and the gradients of their outputs, come from a
model whose blocks before it are pruned and whose blocks from it on are dense; all layers of a block are observed before
one is pruned, as in SparseGPT. Pruned weights are in the model only during a pass, while the device holds them beside
the dense ones (of one block, or of the whole prefix where the blocks are not sequential).

Cost, over the calibration data, for L blocks: at λ = 1 every block runs twice, dense to be observed and pruned to
compute the next one's inputs. At λ < 1 every block needs the passes of itself and all blocks behind it, L(L+1)/2 block
passes backwards and twice as many forwards (a block is run again for its backward pass, so that one block's graph is
alive at a time), and L passes of the head; one-shot statistics take L backwards and 2L forwards. Cached inputs replace
the blocks before. `FullModelPipeline` with the prefix pruned serves blocks that are not sequential, and layers outside
of blocks: each of these comes after all blocks, in the model's order, as a separate stage.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from ..calibration.storage import Storage
from ..data.batches import Batch
from ..model.layers import PrunableLayer, Structure
from ..model.losses import Loss
from .block_probe import Extras
from .stages import FullModelPipeline, OpenStage, PassObserver, Stage
from .walk import BlockStage, Walk

Layers = tuple[PrunableLayer, ...]


@contextmanager
def swapped_weights(layers: Layers, weight: Callable[[PrunableLayer], Tensor]) -> Iterator[None]:
    """Meanwhile the layers have other weights, `weight(layer)` [d_out, d_in]; their tensors are restored on exit."""
    original = []
    try:
        for layer in layers:
            parameter, matrix = layer.parameter, weight(layer)
            original.append((parameter, parameter.data))
            parameter.data = torch.empty_like(parameter.data)
            layer.assign(matrix)
        yield
    finally:
        for parameter, data in original:
            parameter.data = data


class _RecomputeStage(BlockStage):
    """A block that is observed dense behind pruned ones, and advances with its pruned weights to the next, if any."""

    def __init__(self, recompute: "RecomputePipeline", blocks: Walk, index: int, has_next: bool):
        super().__init__(blocks, index)
        self.recompute, self.has_next = recompute, has_next

    def observe(self, observer: PassObserver | None, advance: bool = False) -> None:
        """Like `BlockStage.observe`, but without advancing; the gradients come from the dense blocks behind it."""
        recompute, blocks, index = self.recompute, self.walk, self.index
        assert observer is not None
        if not observer.gradients:
            super().observe(observer)
            recompute.forward += 1
            return
        blocks.run_from(index, observer)
        behind = recompute.last - index
        recompute.forward += 2 * (1 + behind)
        recompute.backward += 1 + behind

    def advance(self) -> None:
        if self.has_next:
            with swapped_weights(self.layers, self.recompute.weight):
                self.walk.forward(self.index)
            self.recompute.forward += 1
            self.advanced = True
        self.walk.calls[self.index] = []


@dataclass(eq=False)
class RecomputePipeline:
    """Stages in the order of pruning; see the module's docstring."""

    model: nn.Module  # frozen
    structure: Structure
    batches: Sequence[Batch]
    loss: Loss | None  # (output, batch) → [B] losses; None for the model's own
    storage: Storage  # of the caches
    weight: Callable[[PrunableLayer], Tensor]  # a layer's pruned weight [d_out, d_in], once its stage is solved
    gradients: bool  # whether any layer needs them
    extras: Extras | None  # with which the blocks, all in one sequence, can return their input; None where they cannot

    def __post_init__(self) -> None:
        self.blocks, self.last = self.structure.blocks, len(self.structure.blocks) - 1
        self.forward, self.backward, self.whole = 0, 0, 0  # passes over all data: of blocks, and of the whole model

    @property
    def cost(self) -> str:
        """The passes that the stages took, for the report."""
        parts = [f"{self.forward} block passes forwards", f"{self.backward} backwards"] if self.forward else []
        parts += [f"{self.whole} passes of the whole model"] if self.whole or not parts else []
        return f"statistics recomputed on the pruned prefix: {', '.join(parts)}"

    def __iter__(self) -> Iterator[Stage]:
        """One stage per block with layers to observe (and those between), then one per layer outside of blocks."""
        inside, done = [block.layers for block in self.blocks if block.layers], Layers()
        tied = any(len(layer.modules) > 1 for layers in inside for layer in layers)
        if inside and self.extras is not None and not tied:
            yield from self._blocks()
            inside, done = [], sum(inside, ())
        for layers in (*inside, *((layer,) for layer in self.structure.outside)):
            yield OpenStage(layers, partial(self._run_whole, done))
            done += layers

    def _blocks(self) -> Iterator[Stage]:
        blocks = Walk(self.model, self.blocks, self.batches, self.gradients, self.loss, self.storage, self.extras)
        observed = range(blocks.lowest, 1 + max(i for i, block in enumerate(self.blocks) if block.layers))
        blocks.capture_arguments()
        for i in range(observed[0]):
            with self.blocks[i].onloaded():
                blocks.forward(i)
        self.forward += observed[0]
        for i in observed:
            yield _RecomputeStage(self, blocks, i, i < observed[-1])

    def _run_whole(self, done: Layers, observer: PassObserver) -> None:
        with swapped_weights(done, self.weight):
            full = FullModelPipeline(self.model, self.blocks, self.batches, bool(observer.gradients), self.loss)
            full.run(observer)
        self.whole += 1
