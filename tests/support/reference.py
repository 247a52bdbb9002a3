"""Reference implementations: literal loops for everything the package does fast. They do not import the package.

Written from the formulas of MOONSHOT (arXiv 2604.13287), SparseGPT (arXiv 2301.00774) and ALPS (arXiv 2406.07831) in
their order; the benchmarks run the same code in float32, all rows batched, as the textbook side
of every ratio.
"""

from itertools import product

import torch
from torch import Tensor


def patches(images, kernel, stride=(1, 1), padding=(0, 0), dilation=(1, 1), groups=1, mode="zeros") -> Tensor:
    """Every patch that a convolution multiplies, [B, groups, T, C/groups·kh·kw], pixel by pixel."""
    if isinstance(padding, str):  # "same" pads the odd element at the end
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

    columns = images.new_zeros(len(images), groups, *counts, wide, *kernel)
    for y, x, i, j in product(*map(range, (*counts, *kernel))):
        row, column = place(0, y, i), place(1, x, j)
        if row is not None and column is not None:
            columns[:, :, y, x, :, i, j] = images[:, :, row, column].view(len(images), groups, wide)
    return columns.flatten(4).flatten(2, 3)


def of_rows(gram: Tensor, d_out: int) -> Tensor:
    """G of every row, [d_out, d_in, d_in]: one for all, or that of the row's group [groups, d_in, d_in]."""
    grams = gram[None] if gram.ndim == 2 else gram
    return torch.stack([grams[k * len(grams) // d_out] for k in range(d_out)])


def without_dead_inputs(weight: Tensor, gram: Tensor) -> Tensor:
    return weight.masked_fill(of_rows(gram, len(weight)).diagonal(dim1=1, dim2=2) == 0, 0)


def row_fishers(gradients: Tensor) -> Tensor:
    """Σ_n a_n a_nᵀ of every row of gradients [N, d_out, d_in], sample by sample: [d_out, d_in, d_in]."""
    fishers = gradients.new_zeros(gradients.shape[1], gradients.shape[2], gradients.shape[2])
    for sample in gradients:
        for row, matrix in zip(sample, fishers, strict=True):
            matrix += torch.outer(row, row)
    return fishers


def weighted_gram(inputs: Tensor, deltas: Tensor) -> Tensor:
    """``Σ_t s_t x_t x_tᵀ``, ``s_t = mean_k δ_tk²``, token by token: inputs [T, d_in], output gradients [T, d_out]."""
    total = inputs.new_zeros(inputs.shape[1], inputs.shape[1])
    for x, delta in zip(inputs, deltas, strict=True):
        total += (delta**2).mean() * torch.outer(x, x)
    return total


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
    for k, row_gram in enumerate(of_rows(gram, len(weight))):
        row = lam / r0 * row_gram
        if lam < 1:
            row = row + (1 - lam) / (len(gradients) * f0) * gradients[:, k].T @ gradients[:, k]
        rows.append(row)
    return torch.stack(rows)


def remove(scores: Tensor, count: int) -> Tensor:
    """keep: False for the `count` smallest scores; ties are broken by the lower index."""
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


def rounded_sweep(weight, gram, gradients, lam, keep, grid, scale, damping=0.01) -> Tensor:
    """The column loop with a given mask and given scales, whose survivors are rounded: GPTQ with sparsity."""
    weight = without_dead_inputs(weight, gram)
    factor = torch.linalg.cholesky(inverse_hessians(weight, gram, gradients, lam, damping), upper=True)
    weight, step = weight.clone(), grid.per_weight(scale, weight.shape[1])
    for j in range(weight.shape[1]):
        value = weight[:, j].clone()
        weight[:, j] = torch.where(keep[:, j], grid.values(grid.codes(value, step[:, j]), step[:, j]), 0).double()
        error = (value - weight[:, j]) / factor[:, j, j]
        weight[:, j + 1 :] -= error[:, None] * factor[:, j, j + 1 :]
    return weight.float()


def blocks(weight, gram, gradients, lam, size, damping=0.01) -> Tensor:
    """The damped matrices of blocks of `size` inputs, [d_out · d_in/size, size, size], normalised by their own losses.

    Each block has μ = damping · the mean of its diagonal; where that is 0, of all diagonals.
    """
    starts = range(0, weight.shape[1], size)
    r0 = sum(row[s : s + size] @ gram[s : s + size, s : s + size] @ row[s : s + size] for row in weight for s in starts)
    matrices = []
    if lam < 1:
        f0 = sum((g * weight).unflatten(1, (-1, size)).sum(2).square().sum() for g in gradients) / len(gradients)
    for k in range(len(weight)):
        for s in starts:
            matrix = lam / r0 * gram[s : s + size, s : s + size]
            if lam < 1:
                a = gradients[:, k, s : s + size]
                matrix = matrix + (1 - lam) / (len(gradients) * f0) * a.T @ a
            matrices.append(matrix)
    matrices = torch.stack(matrices)
    means = matrices.diagonal(dim1=1, dim2=2).mean(1)
    means[means == 0] = means.mean()
    return matrices + damping * means[:, None, None] * torch.eye(size, dtype=gram.dtype)


def greedy(weight, inverse, nm=None, steps=None) -> tuple[Tensor, Tensor, list[Tensor]]:
    """OBS on every row at once, to the end: the order and the losses [r, steps], and the weights after every step.

    `inverse` [r, d, d] is overwritten; `steps` ends it early. The textbook loop: each removal updates all of it.
    """
    rows, size = torch.arange(len(weight)), weight.shape[1]
    gone = torch.zeros(weight.shape, dtype=torch.bool)
    order, losses, trace = [], [], [weight]
    every = size // nm[1] * (nm[1] - nm[0]) if nm else size
    for _ in range(every if steps is None else steps):
        barred = gone
        if nm:
            full = gone.unflatten(1, (-1, nm[1])).sum(2) >= nm[1] - nm[0]
            barred = gone | full.repeat_interleave(nm[1], 1)
        diagonal = inverse.diagonal(dim1=1, dim2=2)
        scores = (weight**2 / diagonal).masked_fill(barred, torch.inf)
        p = scores.argmin(1)
        column, pivot = inverse[rows, p], diagonal[rows, p]
        order.append(p)
        losses.append(scores[rows, p] / 2)
        weight = weight - (weight[rows, p] / pivot)[:, None] * column
        gone[rows, p] = True
        weight = weight.masked_fill(gone, 0)
        trace.append(weight)
        column = column / pivot.sqrt()[:, None]
        inverse -= column[:, :, None] @ column[:, None, :]
        inverse.diagonal(dim1=1, dim2=2)[gone] = 1
    return torch.stack(order, 1), torch.stack(losses, 1), trace


def ranked(weight, gram, gradients, lam, size, cumulative, sparsity=None, nm=None, damping=0.01):
    """OBC and CAP: run every row (block) to the end, compare the losses of the whole layer, truncate each row."""
    weight = weight.masked_fill(gram.diagonal() == 0, 0)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(blocks(weight, gram, gradients, lam, size, damping)))
    order, losses, trace = greedy(weight.reshape(-1, size), inverse, nm)
    losses = losses.cumsum(1) if cumulative else losses
    counts = [order.shape[1]] * len(order)
    if not nm:
        counts = (~remove(losses, round(sparsity * losses.numel()))).sum(1)
    pruned = torch.stack([trace[count][k] for k, count in enumerate(counts)])
    keep = torch.ones(pruned.shape, dtype=torch.bool)
    for k, count in enumerate(counts):
        keep[k, order[k, :count]] = False
    return pruned.view(weight.shape), keep.view(weight.shape)


def obc(weight, gram, gradients, lam, sparsity=None, nm=None, damping=0.01) -> tuple[Tensor, Tensor]:
    """ExactOBS on whole rows, ranked by the loss of each removal."""
    return ranked(weight, gram, gradients, lam, weight.shape[1], False, sparsity, nm, damping)


def cap(weight, gram, gradients, lam, sparsity=None, nm=None, block_size=192, damping=0.01) -> tuple[Tensor, Tensor]:
    """OBS on blocks of inputs, ranked by the cumulative loss of a block's removals."""
    size = max(d for d in range(1, min(block_size, weight.shape[1]) + 1) if weight.shape[1] % d == 0)
    return ranked(weight, gram, gradients, lam, size, True, sparsity, nm, damping)


def osscar(weight, gram, gradients, lam, sparsity, group_size=1, damping=0.01) -> tuple[Tensor, Tensor]:
    """Remove groups of columns greedily, for all rows at once, on dense inverse Hessians; then the exact minimiser."""
    weight = weight.masked_fill(gram.diagonal() == 0, 0)
    dense, inverse = weight, inverse_hessians(weight, gram, gradients, lam, damping).clone()
    matrices = torch.cholesky_inverse(torch.linalg.cholesky(inverse))
    groups = [torch.arange(s, s + group_size) for s in range(0, weight.shape[1], group_size)]
    left = list(range(len(groups)))
    for _ in range(round(sparsity * len(groups))):
        scores = []
        for g in left:
            w, block = weight[:, groups[g], None], inverse[:, groups[g]][:, :, groups[g]]
            scores.append((w.mT @ torch.cholesky_solve(w, torch.linalg.cholesky(block))).sum())
        g = groups[left.pop(int(torch.stack(scores).argmin()))]
        lower = torch.linalg.cholesky(inverse[:, g][:, :, g])
        columns = inverse[:, :, g]
        weight = weight - (columns @ torch.cholesky_solve(weight[:, g, None], lower))[:, :, 0]
        inverse = inverse - columns @ torch.cholesky_solve(columns.mT, lower)
    keep = torch.zeros(weight.shape[1], dtype=torch.bool)
    for g in left:
        keep[groups[g]] = True
    pruned = torch.zeros_like(weight)
    for k, matrix in enumerate(matrices):
        pull = matrix[keep][:, ~keep] @ dense[k, ~keep]
        pruned[k, keep] = dense[k, keep] + torch.cholesky_solve(
            pull[:, None], torch.linalg.cholesky(matrix[keep][:, keep])
        ).squeeze(1)
    return pruned, keep.expand_as(weight).clone()


def alps(weight, gram, gradients, lam, sparsity=None, nm=None, damping=0.01) -> tuple[Tensor, Tensor]:
    """ADMM with every row's matrix inverted at every step, in coordinates of unit diagonal; then least squares."""
    weight = without_dead_inputs(weight, gram)
    r0, _ = losses_at_zero(weight, gram, gradients)
    identity = torch.eye(len(gram), dtype=gram.dtype)
    matrices = hessians(weight, gram, gradients, lam) + damping * gram.diagonal().mean() / r0 * identity
    diagonals = matrices.diagonal(dim1=1, dim2=2)
    inputs = diagonals.mean(0).sqrt()
    scale = inputs * (diagonals / inputs**2).mean(1, keepdim=True).sqrt()
    matrices = matrices / scale[:, :, None] / scale[:, None]
    dense = sparse = weight * scale
    dual, before, rho = torch.zeros_like(dense), torch.ones(dense.shape, dtype=torch.bool), 0.1
    for number in range(1, 61):
        right = (matrices @ dense[:, :, None])[:, :, 0] - dual + rho * sparse
        free = torch.linalg.solve(matrices + rho * identity, right)
        score = (free + dual / rho) ** 2
        keep = remove_nm(score, *nm) if nm else remove(score, round(sparsity * score.numel()))
        sparse = (free + dual / rho) * keep
        dual = dual + rho * (free - sparse)
        if number % 3 == 0:
            changed = (keep != before).sum() / 2 / keep.sum()
            if changed < 1e-4:
                break
            rho *= 1.3 if changed >= 0.1 else 1.2 if changed >= 0.005 else 1.1
            before = keep
    refitted = torch.zeros_like(dense)
    for k, matrix in enumerate(matrices):
        on = keep[k]
        refitted[k, on] = torch.linalg.solve(matrix[on][:, on], matrix[on] @ dense[k])
    return refitted / scale, keep


def expert_losses(contributions: Tensor, gradients: Tensor, samples: Tensor, gone: Tensor, lam: float) -> Tensor:
    """L_λ of a choice, by loops, from contributions c_e(t) [T, E, H], ∂ℓ/∂y_t [T, H] and each token's sample [T]."""

    def losses(gone) -> tuple[Tensor, Tensor]:
        left_out = torch.stack([sum(c[e] for e in range(len(c)) if gone[e]) + 0 * c[0] for c in contributions])
        fisher, count = 0.0, int(samples.max()) + 1
        for n in range(count):
            slope = sum(g @ x for g, x, of in zip(gradients, left_out, samples, strict=True) if of == n)
            fisher = fisher + slope**2 / count
        return (left_out**2).sum(), fisher

    (r, f), (r1, f1) = losses(gone), losses(torch.ones_like(gone))
    return lam * r / r1 + ((1 - lam) * f / f1 if lam < 1 else 0)


def fewest_lost(contributions, gradients, samples, lam, count, groups=1) -> Tensor:
    """The best experts to remove, bool [E]: `count` of every group, by exhaustive search."""
    experts = contributions.shape[1]
    size = experts // groups
    best, least = None, torch.inf
    for removed in product([False, True], repeat=experts):
        gone = torch.tensor(removed)
        if (gone.view(groups, size).sum(1) == count).all():
            loss = float(expert_losses(contributions, gradients, samples, gone, lam))
            if loss < least:
                best, least = gone, loss
    return best


def reap(contributions: Tensor, chosen: Tensor) -> Tensor:
    """REAP's score of every expert [E]: the mean of ‖c_e(t)‖ over its tokens; `chosen` is bool [T, E]."""
    scores = torch.zeros(contributions.shape[1], dtype=contributions.dtype)
    for e in range(len(scores)):
        norms = [c[e].norm() for c, routed in zip(contributions, chosen, strict=True) if routed[e]]
        scores[e] = sum(norms) / len(norms) if norms else 0
    return scores
