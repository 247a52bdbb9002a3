"""The statistics of a layer, in float32: their interface, sums over inputs, and the gradients of the samples.

The hooks of `Observer` convert every call of a layer to the normal form of model/layer_kinds.py and pass it to the
statistics in pieces. An `InputStatistic` needs the inputs only, and is shared by the layers that read the same tensor;
a `GradientStatistic` needs the output gradients too. `merge_statistics` (observer.py) merges the results of several
processes. To add a statistic, write a class, and pass it to the observer:

    Observer(layers, …, extra=(InputMean,))

Its result is then ``observer.take(layer).extra[InputMean]``.

`Gram` and `InputSquares` sum over tokens, `TokenCounts` counts them. The gradients ``A_n = Σ_t δ_t x_tᵀ`` of the
samples are accumulated in one of three ways: `Samples` stores every A_n, `Squares` their elementwise Σ_n A_n², and
`RowMatrices` compresses them exactly, where there are more samples than inputs, to ``Σ_n a_n a_nᵀ`` of every row, or
every column block of a row. A layer that is called several times for a sample, or in strips, has the sum of its pieces
as gradient. `WeightedGram` is an approximation of the row matrices that all rows share, and does not need A_n.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..distributed.sharing import Merger
from ..errors import MoonshotError
from ..model.layers import PrunableLayer
from ..objective.fisher import FisherMatrices, SampleGradients, SharedFisher
from ..objective.linalg import slice_bytes, split_range, split_within
from .storage import Storage

# Samples whose gradients are compressed by one product: with fewer, reading and writing the matrices takes longer.
STAGED = 64
# Gram matrices are symmetric: with 4 blocks of rows, 5/8 of the products are computed, in 0.62 to 0.71 of the time of
# all on one thread (576 to 4,096 inputs; 8 blocks are no faster). Narrow blocks are slower than that.
BLOCKS, LEAST_BLOCK = 4, 128
_NOT_MERGED = "it has no `{}`, so that several processes cannot share the data: write one, or use one process"


class InputStatistic(ABC):
    """A statistic of a layer's inputs, over all tokens except padding.

    Args:
        layer: the first of the layers that share it; all have its groups and its d_in.
        storage: allocates large tensors.
        device: of the inputs.
    """

    def __init__(self, layer: PrunableLayer, storage: Storage, device: torch.device):
        self.layer, self.storage, self.device = layer, storage, device

    @abstractmethod
    def add(self, inputs: Tensor, groups: slice) -> None:
        """Add the inputs of some tokens.

        Args:
            inputs: x, [groups, tokens, in] in float32; not to be changed.
            groups: the layer's groups that read them: all, or one expert alone.
        """

    def sums(self) -> Sequence[Tensor]:
        """The tensors that add up over processes with different samples.

        Raises:
            MoonshotError: this statistic cannot be merged.
        """
        raise MoonshotError(f"{type(self).__name__}: {_NOT_MERGED.format('sums')}")

    @abstractmethod
    def result(self) -> Any:
        """The statistic of all data."""


class GradientStatistic(ABC):
    """A statistic of a layer's inputs and output gradients, sample by sample.

    Args:
        layer: the layer.
        samples: N, calibration samples in all.
        storage: allocates large tensors.
    """

    def __init__(self, layer: PrunableLayer, samples: int, storage: Storage):
        self.layer, self.samples, self.storage = layer, samples, storage

    def begin(self, first: int, count: int) -> None:  # noqa: B027 optional
        """Begin a batch.

        Args:
            first: the index of its first sample among all.
            count: its samples.
        """

    @abstractmethod
    def add(self, inputs: Tensor, delta: Tensor, done: bool, groups: slice) -> None:
        """Add a piece of the batch; a layer that is called several times, or in strips, has several.

        Args:
            inputs: x, [samples, groups, tokens, in] in float32; not to be changed.
            delta: δ, [samples, groups, tokens, out] in float32, 0 at padding; not to be changed.
            done: whether it is the last piece of the batch.
            groups: the layer's groups that the piece belongs to: all, or one expert alone.
        """

    def end(self) -> None:  # noqa: B027 optional
        """End the batch."""

    def merge(self, merger: Merger) -> None:
        """Replace the result of this process's samples by the result of all samples.

        Args:
            merger: sums tensors, stacks them, or collects values over all processes.

        Raises:
            MoonshotError: this statistic cannot be merged.
        """
        raise MoonshotError(f"{type(self).__name__}: {_NOT_MERGED.format('merge')}")

    @abstractmethod
    def result(self) -> Any:
        """The statistic of all data."""


class _Total(InputStatistic):
    value: Tensor

    def sums(self) -> Sequence[Tensor]:
        return [self.value]

    def result(self) -> Tensor:
        return self.value


class InputSum(_Total):
    """A sum over tokens, [groups, d_in, …] or, for one group, [d_in, …]; in `into`, which is zeroed first, if given."""

    axes: ClassVar[int]  # of length d_in

    def __init__(self, layer: PrunableLayer, storage: Storage, device: torch.device, into: Tensor | None = None):
        shape = (layer.groups,)[: layer.groups > 1] + (layer.shape[1],) * self.axes
        if into is None:
            self.value = storage.zeros(shape, torch.float32, f"{layer.name}: Gram matrix").to(device)
        else:
            self.value = into.zero_()


class Gram(InputSum):
    """``G = Σ x xᵀ``, [d_in, d_in] or [groups, d_in, d_in]."""

    axes = 2

    def add(self, inputs: Tensor, groups: slice) -> None:
        if self.value.ndim == 2:
            _add_gram(self.value, inputs[0])
        else:
            self.value[groups].baddbmm_(inputs.mT, inputs)

    def result(self) -> Tensor:
        return self.value if self.value.ndim > 2 else _mirrored(self.value)


class InputSquares(InputSum):
    """Σ x², the diagonal of G, [d_in] or [groups, d_in]."""

    axes = 1

    def add(self, inputs: Tensor, groups: slice) -> None:
        squares = inputs.square().sum(-2)
        if self.value.ndim == 1:
            self.value += squares[0]
        else:
            self.value[groups] += squares


class TokenCounts(_Total):
    """The number of tokens that each group reads, int64 [groups]."""

    def __init__(self, layer: PrunableLayer, storage: Storage, device: torch.device):
        self.value = torch.zeros(layer.groups, dtype=torch.int64)

    def add(self, inputs: Tensor, groups: slice) -> None:
        self.value[groups] += inputs.shape[1]


class TokenWeights(GradientStatistic):
    """√s_t, ``s_t = mean_k δ_tk²``, of all tokens of some samples, and Σ_t δ_tk² of the rows over them.

    They are the weights of the tokens in the Fisher term Σ_t s_t x_t x_tᵀ that rows share (GuidedQuant, arXiv
    2505.07004). One backward pass of the dense model collects them, in 4 bytes a token and layer; they multiply the
    inputs of the pruned prefix later, whose statistics then need no backward pass of their own.
    """

    def __init__(self, layer: PrunableLayer, samples: int, storage: Storage):
        super().__init__(layer, samples, storage)
        self.roots: dict[int, Tensor] = {}  # [T], by call: by sample if the layer is called once for each
        self.row_squares = torch.zeros(layer.shape[0], device=layer.parameter.device)  # [d_out]

    def add(self, inputs: Tensor, delta: Tensor, done: bool, groups: slice) -> None:
        squares = delta[:, 0].square()
        self.roots |= enumerate(squares.mean(-1).sqrt_(), len(self.roots))
        self.row_squares += squares.sum((0, 1))

    def merge(self, merger: Merger) -> None:
        """Every process gets the roots of all samples: it may have others of them in the pruned model."""
        of_processes = merger.values([root.cpu() for root in self.roots.values()])
        self.roots = dict(enumerate(root.to(self.row_squares.device) for roots in of_processes for root in roots))
        self.row_squares = merger.summed(self.row_squares)

    def result(self) -> "TokenWeights":
        return self

    def of_batch(self, first: int, count: int) -> Tensor | None:
        """√s_t of `count` samples from index `first` on, [count, T], 0 for a sample without; None where no one has."""
        roots = [self.roots.get(number) for number in range(first, first + count)]
        present = next((root for root in roots if root is not None), None)
        if present is None:
            return None
        return torch.stack([torch.zeros_like(present) if root is None else root for root in roots])

    @property
    def row_shares(self) -> Tensor:
        """Σ_t δ_tk² relative to its mean over the rows, [d_out]; 1 where all are 0."""
        mean = self.row_squares.mean()
        return self.row_squares / mean if mean > 0 else self.row_squares + 1


@dataclass(frozen=True)
class GradientPlan:
    """The statistics of a layer's gradients to collect."""

    column_block: int | None = None  # compress to matrices of this many inputs; None stores the gradients
    # Of the layer: a whole number of its groups or, also with a step, within one; None is all.
    rows: slice | None = None
    totals: int | None = None  # also L_F(0), of column blocks of this many inputs, and Σ A², both of all rows
    nothing: bool = False  # only the observer's `extra` statistics
    shared: bool = False  # one matrix that all rows share, in place of the gradients
    squares: bool = False  # beside it the diagonals of the rows' own matrices
    weights: TokenWeights | None = None  # of the dense model, for the shared matrix; None: from a backward pass


def numbers_per_row(d_in: int, samples: int, column_block: int | None) -> int:
    """Floats that `Samples` (no column block) or `RowMatrices` hold per row of a layer."""
    return d_in * (samples if column_block is None else column_block + min(STAGED, samples))


class RowGradients(GradientStatistic):
    """Adds up the gradients of a batch's samples in `window` [batch, rows, d_in].

    The rows are a whole number of the layer's groups, or some within one; None is all.
    """

    window: Tensor

    def __init__(self, layer: PrunableLayer, rows: slice | None):
        self.layer = layer
        rows = slice(0, layer.shape[0]) if rows is None else rows
        self.count = len(range(*rows.indices(layer.shape[0])))
        self.group_rows = layer.shape[0] // layer.groups
        self.groups = slice(rows.start // self.group_rows, -(-rows.stop // self.group_rows))
        first = self.groups.start * self.group_rows
        one = self.groups.stop - self.groups.start == 1
        self.within = slice(rows.start - first, rows.stop - first, rows.step) if one else slice(None)

    def add(self, inputs: Tensor, delta: Tensor, done: bool, groups: slice) -> None:
        window, selected = self.window, self.groups
        if groups != slice(None):
            if not selected.start <= groups.start < selected.stop:
                return
            if self.within == slice(None):
                first = (groups.start - selected.start) * self.group_rows
                window = window[:, first : first + self.group_rows]
            selected = slice(None)
        inputs, delta = (x[:, selected].flatten(0, 1) for x in (inputs, delta))
        delta = delta[..., self.within]
        window = window.unflatten(1, (len(delta) // len(window), -1)).flatten(0, 1)
        _add_product(window, delta, inputs)


class Samples(RowGradients):
    """A_n [n, rows, d_in] of the n samples that this process reads (`local_samples`, None for all)."""

    def __init__(
        self, layer: PrunableLayer, samples: int, storage: Storage, plan: GradientPlan, local_samples: int | None = None
    ):
        super().__init__(layer, plan.rows)
        self.samples, self.storage = samples, storage
        shape = (samples if local_samples is None else local_samples, self.count, layer.shape[1])
        self.value = self.window = storage.zeros(shape, torch.float32, f"{layer.name}: gradients")

    def begin(self, first: int, count: int) -> None:
        self.window = self.value[first : first + count]

    def merge(self, merger: Merger) -> None:
        what = f"{self.layer.name}: gradients"
        self.value = merger.stacked(self.value, lambda shape: self.storage.empty(shape, torch.float32, what))
        self.window = self.value[:0]

    def result(self) -> SampleGradients:
        return SampleGradients(self.value)


class Squares(GradientStatistic):
    """Σ_n A_n² [d_out, d_in]: A_n is squared and added sample by sample, never stored."""

    def __init__(self, layer: PrunableLayer, storage: Storage):
        self.value = storage.zeros(layer.shape, torch.float32, f"{layer.name}: gradients")
        self.by_group = self.value.view(layer.groups, -1, layer.shape[1])
        self.count = 0
        self.sums: dict[tuple[int | None, int | None], tuple[slice, Tensor]] = {}  # of a batch's pieces, by groups

    def begin(self, first: int, count: int) -> None:
        self.count = count

    def add(self, inputs: Tensor, delta: Tensor, done: bool, groups: slice) -> None:
        # Only the sum of a batch's pieces can be squared; a single piece is the sum, and needs no [batch, out, in].
        if done and not self.sums:
            for sample_delta, sample in zip(delta, inputs, strict=True):
                self.by_group[groups] += (sample_delta.mT @ sample).square_().to(self.value.device)
            return
        total, key = delta.flatten(0, 1).mT @ inputs.flatten(0, 1), (groups.start, groups.stop)
        self.sums[key] = groups, total + self.sums[key][1] if key in self.sums else total

    def end(self) -> None:
        for groups, total in self.sums.values():
            squares = total.square_().unflatten(0, (self.count, -1)).sum(0)
            self.by_group[groups] += squares.to(self.value.device)
        self.sums.clear()

    def merge(self, merger: Merger) -> None:
        self.value = merger.summed(self.value)

    def result(self) -> Tensor:
        return self.value


class RowMatrices(RowGradients):
    """Σ_n a_n a_nᵀ of column blocks, [rows · blocks, size, size]; `STAGED` samples are added at once."""

    def __init__(self, layer: PrunableLayer, samples: int, storage: Storage, plan: GradientPlan):
        assert plan.column_block is not None
        super().__init__(layer, plan.rows)
        self.samples, self.size = samples, plan.column_block
        shape = (self.count * (layer.shape[1] // self.size), self.size, self.size)
        self.matrices = storage.zeros(shape, torch.float32, f"{layer.name}: gradients of its rows")
        shape = (min(STAGED, samples), self.count, layer.shape[1])
        self.staged = self.window = storage.zeros(shape, torch.float32, f"{layer.name}: gradients of some samples")
        self.used = 0

    def begin(self, first: int, count: int) -> None:
        if self.used + count > len(self.staged):
            self._flush()
        if count > len(self.staged):
            self.staged = self.staged.new_zeros(count, *self.staged.shape[1:])
        self.window = self.staged[self.used : self.used + count]

    def end(self) -> None:
        self.used += len(self.window)

    def _flush(self) -> None:
        """Add the staged samples to the matrices."""
        if not self.used:
            return
        gradients = self.staged[: self.used].unflatten(2, (-1, self.size)).flatten(1, 2)
        for rows in split_within(len(self.matrices), 8 * self.used * self.size, slice_bytes(self.staged.device)):
            vectors = gradients[:, rows].transpose(0, 1)
            self.matrices[rows].baddbmm_(vectors.mT, vectors)
        self.staged.zero_()
        self.used = 0

    def merge(self, merger: Merger) -> None:
        self._flush()
        self.matrices = merger.summed(self.matrices)

    def result(self) -> FisherMatrices:
        self._flush()
        return FisherMatrices(self.matrices, self.samples)


class WeightedGram(GradientStatistic):
    """``Σ_t s_t x_t x_tᵀ``, [groups, d_in, d_in], where ``s_t = mean_k δ_tk²``, and perhaps ``Σ_t δ_tk² x_tj²``.

    They do not depend on the sample that a token belongs to. With the weights of the dense model, √s_t takes the place
    of δ_t, and the second sum has the rows' shares of all tokens: δ_tk² ≈ s_t Σ_t δ_tk² / mean_k Σ_t δ_tk².
    """

    def __init__(self, layer: PrunableLayer, samples: int, storage: Storage, plan: GradientPlan):
        self.layer, self.samples = layer, samples if plan.weights is None else plan.weights.samples
        self.rows, d_in = layer.shape  # that this process solves
        self.value = storage.zeros((layer.groups, d_in, d_in), torch.float32, f"{layer.name}: Fisher matrix")
        self.shares = plan.weights.row_shares if plan.squares and plan.weights is not None else None
        name, separate = f"{layer.name}: Fisher diagonals", plan.squares and plan.weights is None
        self.squares = storage.zeros((self.rows, d_in), torch.float32, name) if separate else None

    def add(self, inputs: Tensor, delta: Tensor, done: bool, groups: slice) -> None:
        # The root of s_t multiplies x on both sides of a product, which is therefore symmetric.
        roots = torch.linalg.vector_norm(delta, dim=-1, keepdim=True).mul_(delta.shape[-1] ** -0.5)
        present = roots.flatten(1).any(1)  # for each sample: only some have token weights
        weighted = (inputs[present] * roots[present]).transpose(0, 1).flatten(1, 2)  # [groups, tokens, in]
        if len(self.value) == 1 and self.value.device == weighted.device:
            _add_gram(self.value[0], weighted[0])
        else:
            _add_product(self.value[groups], weighted, weighted)
        if self.squares is not None:
            squares = self.squares.view(len(self.value), -1, inputs.shape[-1])[groups]
            _add_product(squares, *(x.transpose(0, 1).flatten(1, 2).square() for x in (delta, inputs)))

    def merge(self, merger: Merger) -> None:
        self.squares = None if self.squares is None else merger.summed(self.squares)
        self.shares = None if self.shares is None else merger.rows_here(self.shares)
        self.value, self.rows = merger.summed_groups(self.value, self.rows)

    def result(self) -> SharedFisher:
        if len(self.value) == 1:
            _mirrored(self.value[0])
        which = torch.arange(self.rows) * len(self.value) // max(1, self.rows)
        if self.shares is not None:  # of a single group
            self.squares = torch.outer(self.shares.to(self.value.device), self.value[0].diagonal())
        return SharedFisher(self.value, which, self.samples, self.squares)


def _block_rows(size: int) -> list[slice]:
    return split_range(0, size, max(LEAST_BLOCK, -(-size // BLOCKS)))


def _add_gram(total: Tensor, inputs: Tensor) -> None:
    """Add xᵀx, of x [tokens, d], to the diagonal blocks of a total [d, d] and to those on their right."""
    for rows in _block_rows(len(total)):
        total[rows, rows.start :].addmm_(inputs[:, rows].T, inputs[:, rows.start :])


def _mirrored(total: Tensor) -> Tensor:
    """A symmetric matrix, in place, from its diagonal blocks and the blocks on their right."""
    for rows in _block_rows(len(total)):
        total[rows.stop :, rows] = total[rows, rows.stop :].T
    return total


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add leftᵀ right, of [groups, tokens, …], to a total that may be on another device."""
    if total.device == left.device:
        total.baddbmm_(left.mT, right)
    else:
        total += (left.mT @ right).to(total.device)


class LayerTotals(RowGradients):
    """L_F(0) and the mean of Σ_n A_n² of all rows, from the gradients of one batch at a time.

    L_F(0) omits the products between two column blocks of `block` inputs.
    """

    def __init__(self, layer: PrunableLayer, samples: int, block: int):
        super().__init__(layer, None)
        self.samples, self.block = samples, block
        self.weight = layer.matrix.float()
        self.fisher = self.squares = 0.0

    def begin(self, first: int, count: int) -> None:
        self.window = self.weight.new_zeros(count, *self.weight.shape)

    def end(self) -> None:
        for gradient in self.window:
            products = (gradient * self.weight).unflatten(1, (-1, self.block)).sum(2)
            self.fisher += float(products.double().square().sum()) / self.samples
            self.squares += float(gradient.double().square().mean())
        self.window = self.weight[:0]

    def merge(self, merger: Merger) -> None:
        totals = merger.values((self.fisher, self.squares))
        self.fisher, self.squares = (sum(values) for values in zip(*totals, strict=True))

    def result(self) -> tuple[float, float]:
        return self.fisher, self.squares
