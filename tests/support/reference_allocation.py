"""Reference implementations of OWL, AlphaPruning and expert sparsities by loops and brute force, without the package.

Written from arXiv 2310.05175 (OWL) and arXiv 2410.10912 (AlphaPruning) and of their published code.
"""

import itertools
import math
import operator
from collections.abc import Callable

import torch
from torch import Tensor


def owl_score(weights: list[Tensor], norms: list[Tensor], threshold: float) -> float:
    """Percentage of |W|·‖x‖₂ above `threshold` times their mean over all matrices of a block."""
    values = torch.cat([(w.double().abs() * n.double()).flatten() for w, n in zip(weights, norms, strict=True)])
    return 100 * float((values > threshold * values.mean()).double().mean())


def owl(scores: list[float], sparsity: float, spread: float) -> list[float]:
    """Sparsities of blocks of equal size, before any clipping."""
    low, high = min(scores), max(scores)
    scaled = [(score - low) / (high - low) * 2 * spread for score in scores]
    mean = sum(scaled) / len(scaled)
    return [1 - (value - mean + 1 - sparsity) for value in scaled]


def exponent(weight: Tensor) -> float:
    """The exponent of the power law; every start of the tail is tried."""
    values = torch.linalg.svdvals(weight.double()).square().sort().values.tolist()
    logs = [math.log10(value) for value in values]
    low, high = logs[0], logs[-1]
    counts = [0] * 100
    for value in logs:
        counts[min(99, int((value - low) / (high - low) * 100))] += 1
    peak = 10 ** (low + (high - low) * counts.index(max(counts)) / 100)
    best = (math.inf, math.nan)
    for i, start in enumerate(values[:-1]):
        if math.log10(0.95 * peak) <= start <= 1.5 * peak:
            tail = values[i:]
            alpha = 1 + len(tail) / sum(math.log(value / start) for value in tail)
            gaps = [abs(1 - (v / start) ** (1 - alpha) - j / len(tail)) for j, v in enumerate(tail)]
            best = min(best, (max(gaps), alpha))
    return best[1]


def alpha(exponents: list[float], sizes: list[int], sparsity: float, spread: float) -> list[float]:
    """Sparsities of blocks, before any clipping."""
    low, high = min(exponents), max(exponents)
    ratios = [(value - low) / (high - low) * 2 * spread + 1 - spread for value in exponents]
    scale = sparsity * sum(sizes) / sum(size * ratio for size, ratio in zip(sizes, ratios, strict=True))
    return [ratio * scale for ratio in ratios]


def expert_losses(
    solve: Callable[[Tensor, Tensor, float], Tensor],
    weight: Tensor,
    gram: Tensor,
    gradients: Tensor,
    shares: list[float],
) -> list[float]:
    """1/N Σ_n Σ_k (a_nk · (w_k - ŵ_k))² of one expert at each sparsity, row by row and sample by sample.

    Args:
        solve: weight, Gram matrix and sparsity → pruned matrix.
        weight: [d_out, d_in].
        gram: [d_in, d_in], of the tokens routed to the expert.
        gradients: [N, d_out, d_in].
        shares: sparsities.
    """
    losses = []
    for share in shares:
        change = solve(weight, gram, share) - weight
        losses.append(
            sum(float(a.double() @ d.double()) ** 2 for n in gradients for a, d in zip(n, change, strict=True))
        )
    return [loss / len(gradients) for loss in losses]


def least_division(
    curves: list[Callable[[float], float]], sizes: list[int], sparsity: float, grid: list[float]
) -> float:
    """The smallest sum of losses over all assignments of grid sparsities with this mean sparsity."""
    best, total = math.inf, sparsity * sum(sizes)
    for shares in itertools.product(grid, repeat=len(curves)):
        if abs(sum(map(operator.mul, shares, sizes)) - total) < 1e-6 * total:
            best = min(best, sum(curve(share) for curve, share in zip(curves, shares, strict=True)))
    return best
