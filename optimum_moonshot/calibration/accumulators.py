"""What becomes of the gradients ``A_n = Σ_t δ_t x_tᵀ`` of a layer's samples, in float32: three ways to gather them.

`Samples` keeps every A_n, `Squares` their elementwise Σ_n A_n², and `RowMatrices` compresses them exactly, where there
are more samples than inputs, to ``Σ_n a_n a_nᵀ`` for every row, or every column block of a row. All but `Squares` give
a `Fisher`, and may gather some rows of the layer alone. Pieces arrive as x [samples, groups, tokens, in] and δ
[samples, groups, tokens, out] (`model/layer_kinds.py`); a layer that is called several times for a
sample, or in strips, has the sum of its pieces as gradient.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..model.layers import PrunableLayer
from ..objective.fisher import FisherMatrices, SampleGradients
from ..objective.row_slices import row_slices
from .statistic import GradientStatistic, Small, Stacked, Summed
from .storage import Storage

# Samples whose gradients are compressed by one product: with fewer, reading and writing the matrices takes longer.
STAGED = 64


@dataclass(frozen=True)
class GradientPlan:
    """What to gather of a layer's gradients."""

    column_block: int | None = None  # compress to matrices of so many inputs; None keeps the gradients
    # Of the layer: a whole number of its groups or, also with a step, inside of one; None is all.
    rows: slice | None = None
    totals: int | None = None  # also L_F(0), of column blocks of so many inputs, and Σ A², both of all rows
    nothing: bool = False  # but the further statistics that the observer was asked for


def numbers_per_row(d_in: int, samples: int, column_block: int | None) -> int:
    """Floats that `Samples` (no column block) or `RowMatrices` hold per row of a layer.

    Args:
        d_in: inputs of the row.
        samples: N, calibration samples in all.
        column_block: inputs of a column block, as in `GradientPlan`.
    """
    return d_in * (samples if column_block is None else column_block + min(STAGED, samples))


class Samples(GradientStatistic):
    """A_n [N, rows, d_in].

    Args:
        layer: whose gradients they are.
        samples: N, calibration samples in all.
        storage: where they live.
        plan: which rows of the layer.
        here: how many of the samples this process sees, where several share them; None is all.
    """

    def __init__(
        self, layer: PrunableLayer, samples: int, storage: Storage, plan: GradientPlan, here: int | None = None
    ):
        super().__init__(layer, samples, storage)
        self.part = Part(layer, plan.rows)
        shape = (samples if here is None else here, self.part.count, layer.shape[1])
        self.value = storage.zeros(shape, torch.float32, f"{layer.name}: gradients")
        self.window = self.value

    def begin(self, first: int, count: int) -> None:
        self.window = self.value[first : first + count]

    def add(self, inputs: Tensor, delta: Tensor, done: bool, groups: slice) -> None:
        self.part.add(self.window, inputs, delta, groups)

    def partial(self) -> Stacked:
        what = f"{self.layer.name}: gradients"
        return Stacked(self.value, self.samples, lambda shape: self.storage.empty(shape, torch.float32, what))

    def combine(self, merged: Tensor) -> None:
        self.value, self.window = merged, merged[:0]

    def result(self) -> SampleGradients:
        return SampleGradients(self.value)


class Squares(GradientStatistic):
    """Σ_n A_n² [d_out, d_in]: A_n is squared and added sample by sample, never stored."""

    def __init__(self, layer: PrunableLayer, storage: Storage):
        self.value = storage.zeros(layer.shape, torch.float32, f"{layer.name}: gradients")
        self.of_group = self.value.view(layer.groups, -1, layer.shape[1])
        self.count = 0
        self.sums: dict[tuple[int | None, int | None], tuple[slice, Tensor]] = {}  # of pieces, by their groups

    def begin(self, first: int, count: int) -> None:
        self.count = count

    def add(self, inputs: Tensor, delta: Tensor, done: bool, groups: slice) -> None:
        # A_n is the sum of a batch's pieces, so that these wait for its end; a piece that is alone does not.
        if done and not self.sums:
            for sample_delta, sample in zip(delta, inputs, strict=True):
                self.of_group[groups] += (sample_delta.mT @ sample).square_().to(self.value.device)
            return
        total, key = delta.flatten(0, 1).mT @ inputs.flatten(0, 1), (groups.start, groups.stop)
        self.sums[key] = groups, total + self.sums[key][1] if key in self.sums else total

    def end(self) -> None:
        for groups, total in self.sums.values():
            squares = total.square_().unflatten(0, (self.count, -1)).sum(0)
            self.of_group[groups] += squares.to(self.value.device)
        self.sums.clear()

    def partial(self) -> Summed:
        return Summed(self.value)

    def combine(self, merged: Tensor) -> None:
        self.value = merged

    def result(self) -> Tensor:
        return self.value


class RowMatrices(GradientStatistic):
    """Σ_n a_n a_nᵀ of column blocks, [rows · blocks, size, size]; `STAGED` samples are added at once.

    Args:
        layer: whose gradients they are.
        samples: N, calibration samples in all.
        storage: where they live.
        plan: which rows of the layer, and the size of a column block.
    """

    def __init__(self, layer: PrunableLayer, samples: int, storage: Storage, plan: GradientPlan):
        assert plan.column_block is not None
        self.part, self.samples, self.size = Part(layer, plan.rows), samples, plan.column_block
        blocks = layer.shape[1] // self.size
        shape = (self.part.count * blocks, self.size, self.size)
        self.matrices = storage.zeros(shape, torch.float32, f"{layer.name}: gradients of its rows")
        shape = (min(STAGED, samples), self.part.count, layer.shape[1])
        self.staged = storage.zeros(shape, torch.float32, f"{layer.name}: gradients of some samples")
        self.used, self.window = 0, self.staged

    def begin(self, first: int, count: int) -> None:
        if self.used + count > len(self.staged):
            self._flush()
        if count > len(self.staged):
            self.staged = self.staged.new_zeros(count, *self.staged.shape[1:])
        self.window = self.staged[self.used : self.used + count]

    def add(self, inputs: Tensor, delta: Tensor, done: bool, groups: slice) -> None:
        self.part.add(self.window, inputs, delta, groups)

    def end(self) -> None:
        self.used += len(self.window)

    def _flush(self) -> None:
        """Add the staged samples to the matrices."""
        if not self.used:
            return
        gradients = self.staged[: self.used].unflatten(2, (-1, self.size)).flatten(1, 2)
        for rows in row_slices(slice(0, len(self.matrices)), 8 * self.used * self.size, self.staged.device):
            some = gradients[:, rows].transpose(0, 1)
            self.matrices[rows].baddbmm_(some.mT, some)
        self.staged.zero_()
        self.used = 0

    def partial(self) -> Summed:
        self._flush()
        return Summed(self.matrices)

    def combine(self, merged: Tensor) -> None:
        self.matrices = merged

    def result(self) -> FisherMatrices:
        self._flush()
        return FisherMatrices(self.matrices, self.samples)


class LayerTotals(GradientStatistic):
    """L_F(0) and the mean of Σ_n A_n² of all of a layer's rows, from one batch's gradients at a time.

    Args:
        layer: at its dense weight.
        samples: N, calibration samples in all.
        block: inputs of a column block; L_F(0) leaves out what lies between two of them.
    """

    def __init__(self, layer: PrunableLayer, samples: int, block: int):
        self.part, self.samples = Part(layer, None), samples
        self.weight = layer.matrix.float()
        self.size = block
        self.fisher = self.squares = 0.0
        self.window = self.weight[:0]

    def begin(self, first: int, count: int) -> None:
        self.window = self.weight.new_zeros(count, *self.weight.shape)

    def add(self, inputs: Tensor, delta: Tensor, done: bool, groups: slice) -> None:
        self.part.add(self.window, inputs, delta, groups)

    def end(self) -> None:
        for gradient in self.window:
            products = (gradient * self.weight).unflatten(1, (-1, self.size)).sum(2)
            self.fisher += float(products.double().square().sum()) / self.samples
            self.squares += float(gradient.double().square().mean())
        self.window = self.weight[:0]

    def partial(self) -> Small:
        return Small((self.fisher, self.squares))

    def combine(self, merged: Sequence[tuple[float, float]]) -> None:
        self.fisher, self.squares = (sum(values) for values in zip(*merged, strict=True))

    def result(self) -> tuple[float, float]:
        return self.fisher, self.squares


class Part:
    """Some rows of a layer: a whole number of its groups, or some inside of one.

    Args:
        layer: the layer.
        rows: which; None is all.
    """

    def __init__(self, layer: PrunableLayer, rows: slice | None):
        self.rows = slice(0, layer.shape[0]) if rows is None else rows
        self.count = len(range(*self.rows.indices(layer.shape[0])))
        self.d_in = layer.shape[1]
        self.size = size = layer.shape[0] // layer.groups
        self.groups = slice(self.rows.start // size, -(-self.rows.stop // size))
        first = self.groups.start * size
        within = self.groups.stop - self.groups.start == 1
        self.within = slice(self.rows.start - first, self.rows.stop - first, self.rows.step) if within else slice(None)

    def add(self, out: Tensor, inputs: Tensor, delta: Tensor, groups: slice) -> None:
        """Add δᵀx of these rows to `out` [samples, rows, d_in].

        Args:
            out: where the gradients of a batch's samples add up.
            inputs: x, [samples, groups, tokens, in].
            delta: δ, [samples, groups, tokens, out].
            groups: which they are of: all, or one alone.
        """
        mine = self.groups
        if groups != slice(None):
            if not mine.start <= groups.start < mine.stop:
                return
            if self.within == slice(None):
                first = (groups.start - mine.start) * self.size
                out = out[:, first : first + self.size]
            mine = slice(None)
        inputs, delta = (x[:, mine].flatten(0, 1) for x in (inputs, delta))
        delta = delta[..., self.within].mT
        out = out.unflatten(1, (len(delta) // len(out), -1)).flatten(0, 1)
        if out.device == delta.device:
            out.baddbmm_(delta, inputs)
        else:
            out += (delta @ inputs).to(out.device)
