"""A convolution as a matrix product: the patches of its input times its flattened kernels.

Tensor format: images x [B, C, H, W] have patches [B, groups, T, C/groups·kh·kw], one for each of the T output
positions, and output channel k of group g is ``patches[:, g] @ W[k]``. All patches together need kh·kw times the memory
of the input, so they are computed in strips of output rows.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn import functional

# The patches of a strip take about this many bytes, and at least those of one output row.
STRIP_BYTES = 64 * 2**20


class Strip(NamedTuple):
    """Some output rows of a convolution."""

    rows: slice
    patches: Tensor  # [B, groups, T, C/groups·kh·kw] float32
    last: bool


def geometry(conv: nn.Conv2d) -> tuple[Any, ...]:
    """A key that is equal for convolutions that read the same patches of a tensor."""
    return conv.kernel_size, conv.stride, conv.padding, conv.dilation, conv.padding_mode, conv.groups


def strips(conv: nn.Conv2d, images: Tensor) -> Iterator[Strip]:
    """The patches of `images` [B, C, H, W], some output rows at a time."""
    padded = _pad(conv, images.float())
    (height, width), (down, _), (spread, _) = conv.kernel_size, conv.stride, conv.dilation
    reach = spread * (height - 1) + 1  # input rows that one output row sees
    across = (padded.shape[3] - conv.dilation[1] * (width - 1) - 1) // conv.stride[1] + 1
    count = (padded.shape[2] - reach) // down + 1
    row = 4 * len(padded) * padded.shape[1] * height * width * across
    step = max(1, STRIP_BYTES // row)
    for first in range(0, count, step):
        stop = min(first + step, count)
        seen = padded[:, :, first * down : (stop - 1) * down + reach]
        patches = functional.unfold(seen, conv.kernel_size, conv.dilation, 0, conv.stride)
        yield Strip(slice(first, stop), patches.unflatten(1, (conv.groups, -1)).mT, stop == count)


def _pad(conv: nn.Conv2d, images: Tensor) -> Tensor:
    """With the borders that the convolution adds, whatever its mode; "same" may add more on one side."""
    borders = conv._reversed_padding_repeated_twice
    if not any(borders):
        return images
    mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
    return functional.pad(images, borders, mode)


def strip_of(delta: Tensor, rows: slice, groups: int) -> Tensor:
    """The output gradients of a strip, laid out like its patches: [B, groups, T, d_out/groups].

    Args:
        delta: ∂ℓ/∂y of all output rows, [B, d_out, H', W'].
        rows: output rows of the strip.
        groups: of the convolution.
    """
    return delta[:, :, rows].flatten(2).unflatten(1, (groups, -1)).mT


def joined(patches: Tensor) -> Tensor:
    """The patches of all images [B, groups, T, d] one after another, [groups, B·T, d]."""
    # `unfold` stores [B, groups, d, T]: this order copies contiguous runs of T.
    return patches.mT.permute(1, 2, 0, 3).flatten(2).mT


def batched(images: Tensor) -> Tensor:
    """[B, C, H, W], also of a single image [C, H, W]."""
    return images if images.ndim == 4 else images[None]
