"""The slow truth: literal, loop-by-loop versions of what the package does fast. Nothing here imports the package.

Written from the formulas of MOONSHOT (arXiv 2604.13287) and SparseGPT (arXiv 2301.00774) in the order in which they
stand there; the benchmarks run the same code in float32, all rows batched, as the textbook side of every ratio.
"""

from itertools import product

import torch
from torch import Tensor


def patches(images, kernel, stride=(1, 1), padding=(0, 0), dilation=(1, 1), groups=1, mode="zeros") -> Tensor:
    """Every patch that a convolution multiplies, [B, groups, T, C/groups·kh·kw], pixel by pixel."""
    if isinstance(padding, str):  # "same" puts the odd one behind
        totals = [d * (k - 1) if padding == "same" else 0 for d, k in zip(dilation, kernel, strict=True)]
        borders = [(total // 2, total - total // 2) for total in totals]
    else:
        borders = [(p, p) for p in padding]
    sizes = images.shape[2:]
    counts = [
        (n + sum(b) - d * (k - 1) - 1) // s + 1
        for n, b, d, k, s in zip(sizes, borders, dilation, kernel, stride, strict=True)
    ]
    wide = images.shape[1] // groups

    def place(axis: int, position: int, offset: int) -> int | None:
        n = sizes[axis]
        i = position * stride[axis] + offset * dilation[axis] - borders[axis][0]
        if 0 <= i < n or mode == "zeros":
            return i if 0 <= i < n else None
        mirrored = -i if i < 0 else 2 * (n - 1) - i
        return {"replicate": min(max(i, 0), n - 1), "circular": i % n, "reflect": mirrored}[mode]

    found = images.new_zeros(len(images), groups, *counts, wide, *kernel)
    for y, x, i, j in product(*map(range, (*counts, *kernel))):
        row, column = place(0, y, i), place(1, x, j)
        if row is not None and column is not None:
            found[:, :, y, x, :, i, j] = images[:, :, row, column].view(len(images), groups, wide)
    return found.flatten(4).flatten(2, 3)


def of_rows(gram: Tensor, d_out: int) -> Tensor:
    """G of every row, [d_out, d_in, d_in]: one for all, or that of the row's group [groups, d_in, d_in]."""
    grams = gram[None] if gram.ndim == 2 else gram
    return torch.stack([grams[k * len(grams) // d_out] for k in range(d_out)])


def without_dead_inputs(weight: Tensor, gram: Tensor) -> Tensor:
    return weight.masked_fill(of_rows(gram, len(weight)).diagonal(dim1=1, dim2=2) == 0, 0)


def losses_at_zero(weight: Tensor, gram: Tensor, gradients: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """L_R(0) and L_F(0), row by row."""
    reconstruction = sum(row @ g @ row for row, g in zip(weight, of_rows(gram, len(weight)), strict=True))
    if gradients is None:
        return reconstruction, None
    return reconstruction, sum(((g * weight).sum(1) ** 2).sum() for g in gradients) / len(gradients)


def objective(pruned: Tensor, weight: Tensor, gram: Tensor, gradients: Tensor | None, lam: float) -> Tensor:
    """L_λ(pruned), eq. 4."""
    r0, f0 = losses_at_zero(weight, gram, gradients)
    r, f = losses_at_zero(pruned - weight, gram, gradients)
    return lam * r / r0 + ((1 - lam) * f / f0 if lam < 1 else 0)


def hessians(weight: Tensor, gram: Tensor, gradients: Tensor | None, lam: float) -> Tensor:
    """F_k for every row, [d_out, d_in, d_in], undamped."""
    r0, f0 = losses_at_zero(weight, gram, gradients)
    rows = []
    for k, own in enumerate(of_rows(gram, len(weight))):
        row = lam / r0 * own
        if lam < 1:
            row = row + (1 - lam) / (len(gradients) * f0) * gradients[:, k].T @ gradients[:, k]
        rows.append(row)
    return torch.stack(rows)


def remove(scores: Tensor, count: int) -> Tensor:
    """keep: False for the `count` smallest scores, the first index first among equals."""
    keep = torch.ones(scores.numel(), dtype=torch.bool)
    keep[torch.argsort(scores.flatten(), stable=True)[:count]] = False
    return keep.view(scores.shape)


def remove_nm(scores: Tensor, n: int, m: int) -> Tensor:
    keep = torch.empty(scores.shape, dtype=torch.bool)
    for k in range(scores.shape[0]):
        for start in range(0, scores.shape[1], m):
            keep[k, start : start + m] = remove(scores[k, start : start + m], m - n)
    return keep


def wanda(weight, gram, gradients, lam, sparsity=None, nm=None) -> tuple[Tensor, Tensor]:
    """Scores w² F_jj with diagonal losses; one row is one group."""
    weight = without_dead_inputs(weight, gram)
    diagonal = of_rows(gram, len(weight)).diagonal(dim1=1, dim2=2)
    r0 = (weight**2 * diagonal).sum()
    score = lam / r0 * weight**2 * diagonal
    if lam < 1:
        f0 = sum((weight**2 * g**2).sum() for g in gradients) / len(gradients)
        score = score + (1 - lam) / (len(gradients) * f0) * weight**2 * sum(g**2 for g in gradients)
    keep = remove_nm(score, *nm) if nm else torch.stack([remove(row, round(sparsity * len(row))) for row in score])
    return weight * keep, keep


def inverse_hessians(weight, gram, gradients, lam, damping=0.01) -> Tensor:
    """Algorithm 1: G_k = F_k⁻¹ by the Woodbury identity from one shared inverse, for all rows at once."""
    r0, f0 = losses_at_zero(weight, gram, gradients)
    identity = torch.eye(gram.shape[-1], dtype=gram.dtype)
    if gram.ndim == 3:
        ridge = damping * gram.diagonal(dim1=1, dim2=2).mean() / r0 * identity
        return torch.cholesky_inverse(torch.linalg.cholesky(hessians(weight, gram, gradients, lam) + ridge))
    base = lam / r0 * gram + damping * gram.diagonal().mean() / r0 * identity
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(base))
    if lam == 1:
        return inverse.expand(len(weight), -1, -1)
    scale = (1 - lam) / (len(gradients) * f0)
    factors = gradients.permute(1, 2, 0)  # A_k  [d_out, d_in, N]
    spread = inverse @ factors
    small = torch.eye(len(gradients), dtype=gram.dtype) + scale * factors.mT @ spread
    solved = torch.cholesky_solve(spread.mT, torch.linalg.cholesky(small))
    return torch.baddbmm(inverse.expand(len(weight), -1, -1), spread, solved, alpha=-float(scale))


def sparsegpt(
    weight, gram, gradients, lam, sparsity=None, nm=None, block_size=128, damping=0.01
) -> tuple[Tensor, Tensor]:
    """Algorithm 2 with K_p = d_out: dense inverse Hessians, their Cholesky factors, the column loop."""
    weight = without_dead_inputs(weight, gram)
    factor = torch.linalg.cholesky(inverse_hessians(weight, gram, gradients, lam, damping), upper=True)
    weight, keep = weight.clone(), torch.ones(weight.shape, dtype=torch.bool)
    if nm:
        block_size = max(1, block_size // nm[1]) * nm[1]
    pivots = factor.diagonal(dim1=1, dim2=2)
    for start in range(0, weight.shape[1], block_size):
        stop = min(start + block_size, weight.shape[1])
        errors = torch.zeros_like(weight[:, start:stop])
        if not nm:
            scores = (weight[:, start:stop] / pivots[:, start:stop]) ** 2
            keep[:, start:stop] = remove(scores, round(sparsity * scores.numel()))
        for j in range(start, stop):
            if nm and j % nm[1] == 0:
                scores = (weight[:, j : j + nm[1]] / pivots[:, j : j + nm[1]]) ** 2
                keep[:, j : j + nm[1]] = remove_nm(scores, *nm)
            errors[:, j - start] = torch.where(keep[:, j], 0.0, weight[:, j] / pivots[:, j])
            weight[:, j:stop] -= errors[:, j - start, None] * factor[:, j, j:stop]
        weight[:, stop:] -= (errors[:, None] @ factor[:, start:stop, stop:]).squeeze(1)
    return weight * keep, keep
