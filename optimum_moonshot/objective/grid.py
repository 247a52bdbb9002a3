"""Symmetric grids for quantized weights: signed integer codes times a scale per group of inputs.

A weight is ``round(c·s)`` in the dtype of its layer, with a code c in [-top, top], top = 2^(bits-1) - 1, and a scale s
in the same dtype, which `group` consecutive inputs of a row share; a pruned weight is 0. These weights determine their
codes and scales: `Grid.scales_of` restores them exactly. So a quantized matrix is an ordinary dense one everywhere
between the solver and the packed file.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from ..errors import MAX_INT, MoonshotError, require
from .linalg import CPU_BYTES, slice_bytes, split_within

BITS = (8, 4, 3)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # codes and scales are computed in float32
BLOCK = 64  # inputs per block of a packed row; groups consist of whole blocks
# Scales to try, as fractions of the one that maps the largest weight of a group to the last code.
_FRACTIONS = {8: (0.8, 11), 4: (0.5, 26), 3: (0.4, 31)}  # smallest fraction, number of fractions up to 1
# Intermediates of a search on a CPU: small enough to stay in its cache between fractions, 1.5 times as fast.
SEARCH_BYTES = 8 * 2**20
_SAMPLED = 8  # weights of a group on which a scale is tested before the whole group is compared
_INTEGERS = {2: torch.int16, 4: torch.int32}


@dataclass(frozen=True)
class Grid:
    """The grid of a layer's weights.

    Raises:
        MoonshotError: unsupported bits, or a group that does not consist of whole blocks.
    """

    bits: int
    group: int = 128  # consecutive inputs of a row with one scale; the last group may be shorter
    dtype: torch.dtype = torch.float32  # of the weights and scales

    def __post_init__(self) -> None:
        usage = f"give {', '.join(map(str, BITS))} or None"
        require(type(self.bits) is int and self.bits in BITS, usage, field="bits", value=self.bits)
        valid = type(self.group) is int and 0 < self.group <= MAX_INT and self.group % BLOCK == 0
        require(valid, f"give a multiple of {BLOCK}", field="quant_group", value=self.group)

    def with_dtype(self, dtype: torch.dtype) -> "Grid":
        """The same grid for weights in a dtype.

        Raises:
            MoonshotError: the dtype is none of `DTYPES`.
        """
        message, hint = "its weights cannot be quantized", "use a dtype of 16 or 32 bits"
        require(dtype in DTYPES, message, field="dtype", value=dtype, hint=hint)
        return replace(self, dtype=dtype)

    @property
    def top(self) -> int:
        """The largest code."""
        return 2 ** (self.bits - 1) - 1

    @property
    def zero_point(self) -> int:
        """Offset of the unsigned codes in packed files: the code of 0."""
        return 2 ** (self.bits - 1)

    def groups(self, d_in: int) -> int:
        """Number of groups, and so of scales, of a row."""
        return -(-d_in // self.group)

    def blocks(self, matrix: Tensor) -> Tensor:
        """A matrix [rows, d_in] as [rows, groups, group], padded with zeros."""
        padding = self.groups(matrix.shape[1]) * self.group - matrix.shape[1]
        return functional.pad(matrix, (0, padding)).unflatten(1, (-1, self.group))

    def per_weight(self, scale: Tensor, d_in: int) -> Tensor:
        """Scales [rows, groups], repeated for each input, [rows, d_in]."""
        return scale.repeat_interleave(self.group, 1)[:, :d_in]

    def codes(self, weight: Tensor, step: Tensor) -> Tensor:
        """The nearest codes, in float32, of weights and their scales `step`, two tensors of one shape."""
        step = step.float()
        # Adding 0 turns the −0 of small negative weights into 0.
        return (weight.float() / step.masked_fill(step == 0, 1)).round_().clamp_(-self.top, self.top).add_(0.0)

    def values(self, codes: Tensor, step: Tensor) -> Tensor:
        """The weights in `dtype` of codes and their scales `step`, two tensors of one shape."""
        return codes.to(self.dtype) * step.to(self.dtype)

    def rounded(self, weight: Tensor, scale: Tensor) -> Tensor:
        """Weights [rows, d_in] rounded to nearest on the grid of their scales [rows, groups]."""
        step = self.per_weight(scale, weight.shape[1])
        return self.values(self.codes(weight, step), step)

    def search(self, weight: Tensor, importance: Tensor) -> Tensor:
        """The scales that minimise ``Σ_j importance_j (w_j - round(w_j))²`` of each group.

        Args:
            weight: [rows, d_in], 0 where pruned.
            importance: non-negative, [rows or 1, d_in].

        Returns:
            Scales in `dtype`, [rows, groups].
        """
        scale = torch.empty(len(weight), self.groups(weight.shape[1]), dtype=self.dtype, device=weight.device)
        size = SEARCH_BYTES if weight.device.type == "cpu" else CPU_BYTES
        for rows in split_within(len(weight), 24 * weight.shape[1], size):
            weights = importance if len(importance) == 1 else importance[rows]
            scale[rows] = self._search(self.blocks(weight[rows].float()), self.blocks(weights.float()))
        return scale

    def _search(self, blocks: Tensor, importance: Tensor) -> Tensor:
        largest = blocks.abs().amax(-1, keepdim=True)
        best = self._rounded(largest / self.top)
        least = self._error(blocks, importance, best)
        low, count = _FRACTIONS[self.bits]
        for fraction in torch.linspace(low, 1, count).tolist()[:-1]:
            best, least = self._better(blocks, importance, best, least, largest * (fraction / self.top))
        # The least-squares scale of the codes.
        codes = self.codes(blocks, best.expand_as(blocks))
        products, squares = (importance * codes * blocks).sum(-1, keepdim=True), (importance * codes.square())
        squares = squares.sum(-1, keepdim=True)
        refined = torch.where(squares > 0, products / squares.clamp(min=torch.finfo(torch.float32).tiny), best)
        return self._better(blocks, importance, best, least, refined)[0][..., 0].to(self.dtype)

    def _better(
        self, blocks: Tensor, importance: Tensor, best: Tensor, least: Tensor, scale: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The better of two scales for each group, and its error."""
        scale = self._rounded(scale)
        error = self._error(blocks, importance, scale)
        better = error < least
        return torch.where(better, scale, best), torch.where(better, error, least)

    def _error(self, blocks: Tensor, importance: Tensor, scale: Tensor) -> Tensor:
        # Like `codes`, but with one scale per group instead of one per weight, since up to 26 fractions are tried.
        codes = (blocks / scale.masked_fill(scale == 0, 1)).round_().clamp_(-self.top, self.top)
        return codes.mul_(scale).sub_(blocks).square_().mul_(importance).sum(-1, keepdim=True)

    def _rounded(self, scale: Tensor) -> Tensor:
        """Scales in float32 that are exact in `dtype`."""
        return scale.to(self.dtype).float()

    def scales_of(self, weight: Tensor) -> Tensor:
        """Restore the scales of weights on the grid: `values` of the nearest `codes` are the weights, bit for bit.

        Several scales can reproduce a group, such as one with a single weight; any of them is returned.

        Args:
            weight: [rows, d_in] in `dtype`.

        Returns:
            [rows, groups] in `dtype`; 0 for groups without weights.

        Raises:
            MoonshotError: a group is not on the grid.
        """
        scale = weight.new_empty(len(weight), self.groups(weight.shape[1]))
        for rows in split_within(len(weight), 32 * weight.shape[1], slice_bytes(weight.device)):
            scale[rows] = self._scales_of(self.blocks(weight[rows]), rows.start)
        return scale

    def _scales_of(self, blocks: Tensor, first: int) -> Tensor:
        """`scales_of` for the rows from `first` on."""
        groups = blocks.flatten(0, 1)
        largest, places = groups.abs().topk(min(_SAMPLED, self.group), 1)
        samples, largest = groups.gather(1, places), largest[:, 0]  # few weights suffice to reject most wrong scales
        scale = torch.zeros_like(largest)
        open_groups = largest.nonzero()[:, 0]
        for top in range(self.top, 0, -1):
            for ulps in (0, 1, -1):  # the largest weight is rounded, and so determines its scale to one unit
                if not len(open_groups):
                    return scale.view(blocks.shape[:2])
                candidate = _neighbour((largest[open_groups].float() / top).to(self.dtype), ulps)
                fits = self._reproduces(samples[open_groups], candidate)
                fits[fits.clone()] = self._reproduces(groups[open_groups[fits]], candidate[fits])
                scale[open_groups[fits]] = candidate[fits]
                open_groups = open_groups[~fits]
        if len(open_groups):
            row = first + int(open_groups[0]) // blocks.shape[1]
            raise MoonshotError(
                f"row {row} is not on a grid of {self.bits} bits with groups of {self.group}",
                hint="its weights, or their dtype, have changed since they were quantized; save them dense",
            )
        return scale.view(blocks.shape[:2])

    def _reproduces(self, groups: Tensor, scale: Tensor) -> Tensor:
        """Whether the nearest codes of weights [groups, n], times their scales [groups], are the weights: [groups]."""
        step = scale[:, None].expand_as(groups)
        return (self.values(self.codes(groups, step), step) == groups).all(1)


def _neighbour(values: Tensor, ulps: int) -> Tensor:
    """Non-negative values, moved by units in the last place; not below 0."""
    integers = values.view(_INTEGERS[values.dtype.itemsize])
    return (integers + ulps).clamp_(min=0).view(values.dtype)
