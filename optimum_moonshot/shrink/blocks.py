"""The loss of removing whole blocks: MOONSHOT's two objectives (arXiv 2604.13287, eq. 4) for sets of blocks.

A block f maps a hidden state h to f(h), and to h once it is removed: its output changes by Δ = h - f(h). With z_b = 1
for a removed block, and sums over the tokens that are not padding,

    L_R(z) = Σ_b z_b Σ_t ‖Δ_b(t)‖² / Σ_t ‖f_b(h_t)‖²
    L_F(z) = 1/N ‖S z‖²        S_tb = <∂ℓ_n/∂f_b(h_t), Δ_b(t)> of token t in sample n
    L_λ(z) = λ L_R(z)/L_R(1) + (1-λ) L_F(z)/L_F(1)

which is the loss of removing experts (objective/removal.py) with a diagonal C. ½ L_F is a second-order estimate of the
increase of the mean loss, with the empirical Fisher matrix in place of the Hessian. It treats tokens as independent:
summed over the tokens of a few samples, the slopes would mostly cancel. The products S_ta S_tb are the interactions of
pairs, so one forward and one backward pass over the data predict the loss of every set.

The baseline is ShortGPT's block influence (Men et al., arXiv 2403.03853): 1 - the mean cosine of h and f(h).
"""

import dataclasses
import heapq
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from ..distributed.sharing import Merger
from ..errors import NOT_FINITE, require
from ..model.calls import first_tensor, frozen, hook_gradient, split_hidden
from ..model.layers import Block, PrunableLayer
from ..objective.linalg import all_finite
from ..objective.patterns import Experts
from ..objective.removal import Removal
from ..pipeline.inputs import Prepared
from ..pipeline.loop import run_pipeline
from ..pipeline.model_pipeline import ModelPipeline
from ..pipeline.walk import Stage
from ..solvers.experts import best_subset

BLOCKS = "blocks"  # the name of the dimension of a decision
# `BlockScores.select` evaluates all sets of blocks if there are at most this many.
EXACT = 200_000


@dataclasses.dataclass(frozen=True)
class BlockScores:
    """The scores of a model's blocks, in float64 on the CPU; block b has the index b of `find_blocks`."""

    names: tuple[str, ...]
    influence: Tensor  # block influence  [B]
    reconstruction: Tensor  # L_R of each block alone, relative to its output  [B]
    slopes: Tensor  # S  [tokens, B]; the blocks of an encoder and of a decoder have different rows
    samples: int  # N

    @property
    def fisher(self) -> Tensor:
        """½/N SᵀS, [B, B], the quadratic ½ L_F; its diagonal scores single blocks."""
        return self.slopes.T @ self.slopes / (2 * self.samples)

    def removal(self, lam: float) -> Removal:
        """The relative loss L_λ of sets of blocks, 0 for none and 1 for all."""
        ones = torch.ones_like(self.influence)
        return Removal.build(torch.diag(self.reconstruction), self.slopes, self.influence, ones, lam)

    def predict(self, blocks: Collection[int], lam: float = 0.0) -> float:
        """The relative loss L_λ of removing a set of blocks.

        Args:
            blocks: indices of the blocks, in any order.
            lam: the weight of the reconstruction error; 0 is the Fisher loss alone.

        Returns:
            A number ≥ 0. At λ = 0 it is proportional to the estimated increase of the model's loss.
        """
        keep = torch.ones(len(self.names), dtype=torch.bool)
        keep[list(blocks)] = False
        return self.removal(lam).losses(keep)[0].total

    def select(self, count: int, lam: float = 0.0, stay: Collection[int] = ()) -> tuple[int, ...]:
        """The set of blocks with the least predicted loss: exact for up to `EXACT` sets, else by a local search.

        Args:
            count: the number of blocks to remove.
            lam: see `predict`.
            stay: blocks that are not removed.

        Returns:
            Ascending indices.

        Raises:
            MoonshotError: `count` blocks cannot be removed.
        """
        most = len(self.names) - max(1, len(stay))
        require(1 <= count <= most, f"1 to {most} blocks of the model can be removed", field="count", value=count)
        may = torch.tensor([block for block in range(len(self.names)) if block not in stay])
        keep = best_subset(self.removal(lam).among(may), Experts(count / len(may)), EXACT)
        return tuple(may[~keep].tolist())

    def select_allowed(
        self, count: int, lam: float, kinds: Collection[Collection[int]], allowed: Callable[[tuple[int, ...]], bool]
    ) -> tuple[int, ...] | None:
        """Like `select`, but only among sets that `allowed` accepts; None if no such set is found.

        After a rejected set, the search continues with one block more that stays, of a kind that was removed entirely.

        Args:
            count: the number of blocks to remove.
            lam: see `predict`.
            kinds: the blocks of each kind.
            allowed: whether a set can be removed.
        """
        queue, seen = list[tuple[float, tuple[int, ...], frozenset[int]]](), set[frozenset[int]]()

        def add(stay: frozenset[int]) -> None:
            if stay not in seen and count <= len(self.names) - max(1, len(stay)):
                blocks = self.select(count, lam, stay)
                heapq.heappush(queue, (self.predict(blocks, lam), blocks, stay))
            seen.add(stay)

        add(frozenset())
        while queue:
            _, blocks, stay = heapq.heappop(queue)  # least loss first: it grows with the blocks that stay
            if allowed(blocks):
                return blocks
            for kind in kinds:
                for block in kind if set(kind) <= set(blocks) else ():
                    add(stay | {block})
        return None


def score_blocks(prepared: Prepared) -> BlockScores:
    """Score every block of a dense model, by one forward and one backward pass over the calibration data.

    Raises:
        MoonshotError: bad data, a block that maps its input to another shape or that no data reaches, or too little
            memory.
    """
    prepared = dataclasses.replace(prepared, selection=prepared.selection.of_the_dense_model(lam=0.0))
    scoring = _Scoring(prepared)
    with frozen(prepared.model):
        run_pipeline(ModelPipeline(prepared, scoring), scoring.visit, prepared.backoff, lambda: prepared.batches)
    return scoring.scores()


class _Scoring:
    """Collects the scores of a model's blocks, stage by stage of a pipeline."""

    def __init__(self, prepared: Prepared):
        self.prepared, self.blocks = prepared, prepared.selection.structure.blocks
        self.sums: dict[str, _BlockSums] = {}

    def lacks(self, layer: PrunableLayer) -> bool:
        return not any(layer in block.layers for block in self.blocks if block.name in self.sums)

    def skip(self, layer: PrunableLayer) -> None:
        """Do nothing: `scores` raises an error for a block that no data reaches."""

    def visit(self, stage: Stage) -> None:
        names = {layer.name for layer in stage.layers}
        blocks = [block for block in self.blocks if names & {layer.name for layer in block.layers}]
        blocks = [block for block in blocks if block.name not in self.sums]
        if not blocks:
            return
        with self.prepared.backoff.passing(BlockObserver(blocks), _merge) as observer:
            stage.observe(observer, advance=True)
        self.sums |= observer.sums

    def scores(self) -> BlockScores:
        for name in (block.name for block in self.blocks):
            reached = name in self.sums and self.sums[name].tokens > 0
            require(reached, f"{name}: no calibration data reached this block, or nothing in it can be pruned")
        sums = [self.sums[block.name] for block in self.blocks]
        slopes = _side_by_side([torch.cat(of_block.slopes) for of_block in sums])
        totals = torch.stack([of_block.totals for of_block in sums])
        message = "the updates of the blocks or their gradients contain NaN or infinite values"
        require(all_finite(slopes) and all_finite(totals), message, hint=NOT_FINITE)
        cosines, changes, squares, tokens = totals.unbind(1)
        names = tuple(block.name for block in self.blocks)
        samples = self.prepared.calibration.num_samples
        return BlockScores(names, 1 - cosines / tokens, changes / squares, slopes, samples)


class _BlockSums:
    """The sums of one block over the samples of this process."""

    def __init__(self) -> None:
        self.slopes: list[Tensor] = []  # [tokens] for each call
        self.totals = torch.zeros(4, dtype=torch.float64)  # of cosines, ‖Δ‖², ‖f(h)‖², tokens

    @property
    def tokens(self) -> float:
        return float(self.totals[3])

    def add(self, hidden: Tensor, after: Tensor, mask: Tensor | None) -> None:
        """Add the inputs and outputs of a call, [B, …, d]."""
        before, after = hidden.float(), after.float()
        cosines = cosine_similarity(before, after, dim=-1)
        by_token = [cosines, (after - before).square().sum(-1), after.square().sum(-1), torch.ones_like(cosines)]
        if mask is not None and mask.shape == cosines.shape:
            by_token = [values.masked_fill(~mask.to(values.device), 0) for values in by_token]
        self.totals += torch.stack([values.double().sum().cpu() for values in by_token])


class BlockObserver(AbstractContextManager["BlockObserver"]):
    """Hooks that add up the sums of blocks over the batches of a pass; removed on exit."""

    def __init__(self, blocks: Sequence[Block]):
        self.blocks, self.sums = blocks, {block.name: _BlockSums() for block in blocks}
        self._hooks = ExitStack()
        self._mask: Tensor | None = None

    @property
    def gradients(self) -> Mapping[str, object]:
        return self.sums

    def __enter__(self) -> "BlockObserver":
        for block in self.blocks:
            hook = partial(self._observe, block.name)
            self._hooks.callback(block.module.register_forward_hook(hook, with_kwargs=True).remove)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._hooks.close()

    def begin(self, first: int, count: int, mask: Tensor | None) -> None:
        self._mask = mask

    def end(self) -> None:
        """Do nothing: gradients are added in the backward pass."""

    def _observe(self, name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        hidden, after = split_hidden(args, kwargs)[0], first_tensor(output)
        message = f"{name} maps {list(hidden.shape)} to {list(after.shape)}, so it cannot be removed"
        require(hidden.shape == after.shape, message)
        change, sums = (hidden - after).detach(), self.sums[name]
        sums.add(hidden.detach(), after.detach(), self._mask)
        slopes = torch.zeros(change.shape[:-1].numel(), dtype=torch.float64)
        sums.slopes.append(slopes)  # in the order of the calls; zeros if the loss does not depend on this one

        def add(delta: Tensor) -> None:
            slopes.copy_((change.float() * delta.float()).sum(-1).flatten())

        start = hook_gradient(after, add)  # the start of the graph, at the first block
        return start if start is None or isinstance(output, Tensor) else (start, *output[1:])


def _merge(observer: BlockObserver, merger: Merger) -> None:
    """Merge the sums of the blocks over the samples of all processes."""
    for sums in observer.sums.values():
        merger.summed(sums.totals)
        sums.slopes = [slopes for process in merger.values(sums.slopes) for slopes in process]


def _side_by_side(columns: Sequence[Tensor]) -> Tensor:
    """A matrix [rows, columns]: columns of equal length share rows, others follow below; zeros elsewhere."""
    lengths = [len(column) for column in columns]
    starts = dict(zip(dict.fromkeys(lengths), accumulate(dict.fromkeys(lengths), initial=0), strict=False))
    matrix = torch.zeros(sum(starts), len(columns), dtype=torch.float64)
    for index, column in enumerate(columns):
        matrix[starts[len(column)] : starts[len(column)] + len(column), index] = column
    return matrix
