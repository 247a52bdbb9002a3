"""How much every layer loses: the same everywhere, by outliers (OWL), by spectra (AlphaPruning), or as the user says.

OWL (Yin et al., arXiv 2310.05175) keeps more of the decoder layers with many outliers among |W|·‖x‖₂; AlphaPruning (Lu
et al., arXiv 2410.10912) keeps more of those whose singular values have the heavier tail. Both score decoder layers;
all matrices of one get the same sparsity, up to one weight. A layer outside of the decoder layers is scored alone.

Whatever the scores, exactly ``round(sparsity · total)`` of all weights go: the blocks' sparsities are shifted (OWL) or
scaled (AlphaPruning) until their clipped values have the wanted mean over the weights, then each layer's share is
rounded down and the largest remainders up. Every layer's comparison groups share its count without a remainder.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import MoonshotError, Option, Text
from ..objective.patterns import Unstructured
from ..objective.quadratic import of_rows
from ..progress import progress_bar

if TYPE_CHECKING:
    from ..config import MoonshotConfig
    from ..model.layers import PrunableLayer

# AlphaPruning: bins of the histogram whose peak bounds the search for the tail's start, and those bounds.
BINS, LOWEST, HIGHEST = 100, 0.95, 1.5
# Rows of the matrix of Kolmogorov-Smirnov distances pass in slices of about this many bytes.
SLICE_BYTES = 64 * 2**20


def block_scores(
    config: MoonshotConfig,
    blocks: Iterable[Sequence[PrunableLayer]],
    input_squares: dict[str, Tensor],
    progress: bool = False,
) -> list[float]:
    """OWL's or AlphaPruning's score of every block of the dense model; no sparsity enters it.

    Args:
        config: ``allocation="owl"`` or ``"alpha"``, and the method's parameters.
        blocks: the layers that get the same sparsity, their weights present until the next ones are asked for.
        input_squares: layer → Σ x² of its inputs in the dense model, [d_in]; OWL alone uses them.
        progress: show a bar: AlphaPruning takes the singular values of every matrix.

    Raises:
        MoonshotError: AlphaPruning on a block whose spectra have no tail.
    """
    if config.allocation == "owl":
        return [
            outlier_share(
                [layer.matrix for layer in block], [input_squares[layer.name] for layer in block], config.owl_threshold
            )
            for block in blocks
        ]
    bar = progress_bar(blocks, desc="singular values", unit="block", leave=False, shown=progress)
    return [_mean_exponent(block) for block in bar]


def allocate(
    config: MoonshotConfig, blocks: Sequence[Sequence[PrunableLayer]], scores: list[float]
) -> tuple[dict[str, Unstructured], str]:
    """The pattern of every layer at the configuration's sparsity by the blocks' scores, and a note for the report.

    Args:
        config: ``allocation="owl"`` or ``"alpha"``, and the method's parameters.
        blocks: the layers that get the same sparsity.
        scores: of `block_scores`, one for each.
    """
    sizes = {layer.name: layer.shape[0] * layer.shape[1] for block in blocks for layer in block}
    sparsity = config.sparsity
    assert sparsity is not None  # the pattern is unstructured
    by_block = [sum(sizes[layer.name] for layer in block) for block in blocks]
    if config.allocation == "owl":
        sparsities = owl_sparsities(scores, by_block, sparsity, config.owl_lambda)
        note = "OWL, after one more forward pass"
    else:
        sparsities = alpha_sparsities(scores, by_block, sparsity, config.alpha_tau)
        note = "AlphaPruning"
    named = {layer.name: each for block, each in zip(blocks, sparsities, strict=True) for layer in block}
    patterns = exact_patterns(sizes, named, sparsity)
    return patterns, f"{note}: sparsities {min(sparsities):.4f} to {max(sparsities):.4f} in {len(blocks)} blocks"


def _mean_exponent(block: Sequence[PrunableLayer]) -> float:
    found = [exponent for layer in block if (exponent := tail_exponent(layer.matrix)) is not None]
    if not found:
        names = ", ".join(layer.name for layer in block)
        raise MoonshotError(
            f"the singular values of {names} have no tail to fit",
            field="allocation",
            value="alpha",
            hint=Text("{} layers of zeros, or use {}", "ignore", Option("allocation", "owl")),
        )
    return sum(found) / len(found)


def outlier_share(weights: list[Tensor], input_squares: list[Tensor], threshold: float) -> float:
    """OWL's score of a block, in percent: the |W|·‖x‖₂ above `threshold` times the mean of them all.

    Args:
        weights: the block's matrices, [d_out, d_in] each.
        input_squares: Σ x² over every token, [d_in] each, or [groups, d_in] where rows read inputs of their own.
        threshold: M.
    """
    total, size = 0.0, sum(weight.numel() for weight in weights)
    for weight, squares in zip(weights, input_squares, strict=True):
        total += float(_magnitudes(weight, squares).double().sum())
    limit, above = threshold * total / size, 0
    for weight, squares in zip(weights, input_squares, strict=True):
        above += int((_magnitudes(weight, squares) > limit).sum())
    return 100 * above / size


def _magnitudes(weight: Tensor, squares: Tensor) -> Tensor:
    """|W|·‖x‖₂, [d_out, d_in]."""
    norms = squares.float().sqrt()
    return weight.abs().float() * (norms if norms.ndim == 1 else of_rows(norms, len(weight)))


def tail_exponent(weight: Tensor) -> float | None:
    """AlphaPruning's exponent of a power law fitted to the tail of the squared singular values of [d_out, d_in].

    The tail starts at the value, among those near the peak of the log-histogram, from which on the fit has the least
    Kolmogorov-Smirnov distance. None where no two different singular values allow a fit.
    """
    gram = weight.double()
    gram = gram @ gram.T if len(gram) <= gram.shape[1] else gram.T @ gram
    values = torch.linalg.eigvalsh(gram).cpu()
    values = values[values > values[-1].clamp_min(0) * len(values) * torch.finfo(torch.float64).eps]
    if len(values) < 2 or values[0] == values[-1]:
        return None
    starts = _tail_starts(values)
    logs = values.log()
    counts = len(values) - starts
    sums = logs.flip(0).cumsum(0).flip(0)[starts] - counts * logs[starts]
    starts, counts, sums = starts[sums > 0], counts[sums > 0], sums[sums > 0]
    if not len(starts):
        return None
    exponents = 1 + counts / sums
    return float(exponents[_distances(logs, starts, exponents).argmin()])


def _tail_starts(values: Tensor) -> Tensor:
    """Indices of the ascending `values` at which the tail may start."""
    logs = values.log10()
    low, high = logs[0].item(), logs[-1].item()
    peak = 10 ** torch.linspace(low, high, BINS + 1, dtype=logs.dtype)[torch.histc(logs, BINS, low, high).argmax()]
    # The lower bound is a logarithm compared with values that are none: so it is in the authors' code.
    fits = (values[:-1] >= (LOWEST * peak).log10()) & (values[:-1] <= HIGHEST * peak)
    return fits.nonzero().squeeze(1)


def _distances(logs: Tensor, starts: Tensor, exponents: Tensor) -> Tensor:
    """Kolmogorov-Smirnov distances of the tails from `starts` on to their power laws."""
    index = torch.arange(len(logs))
    found = []
    for part in torch.arange(len(starts)).split(max(1, SLICE_BYTES // (8 * len(logs)))):
        start, exponent = starts[part, None], exponents[part, None]
        fitted = 1 - ((logs - logs[start]) * (1 - exponent)).exp()
        observed = (index - start) / (len(logs) - start)
        found.append((fitted - observed).abs().masked_fill(index < start, 0).amax(1))
    return torch.cat(found)


def owl_sparsities(scores: list[float], sizes: list[int], sparsity: float, spread: float) -> list[float]:
    """Sparsities of blocks: densities 1 - s spread over 2·`spread`, more where the share of outliers is larger.

    Args:
        scores: of `outlier_share`.
        sizes: weights of each block.
        sparsity: the mean over all weights.
        spread: λ_OWL.
    """
    unit = _unit(scores)
    asked = [sparsity - 2 * spread * value for value in unit]
    return _meet(lambda shift: [value + shift for value in asked], -1 - spread, 1 + 2 * spread, sizes, sparsity)


def alpha_sparsities(exponents: list[float], sizes: list[int], sparsity: float, spread: float) -> list[float]:
    """Sparsities of blocks in proportion to 1 - `spread` … 1 + `spread`, less where the tail is heavier.

    Args:
        exponents: the mean of the matrices' `tail_exponent` per block.
        sizes: weights of each block.
        sparsity: the mean over all weights.
        spread: τ.
    """
    weights = [1 - spread + 2 * spread * value for value in _unit(exponents)]
    return _meet(lambda factor: [factor * value for value in weights], 0.0, 1 / (1 - spread), sizes, sparsity)


def _unit(scores: list[float]) -> list[float]:
    """Mapped linearly to [0, 1]; equal scores to the middle."""
    low, high = min(scores), max(scores)
    return [(score - low) / (high - low) if high > low else 0.5 for score in scores]


def _meet(
    values: Callable[[float], list[float]], low: float, high: float, sizes: list[int], mean: float
) -> list[float]:
    """`values(x)`, growing in x, clipped to [0, 1], at the x in [low, high] where their mean by `sizes` is `mean`."""
    total = mean * sum(sizes)
    clipped: list[float] = []
    for _ in range(200):
        middle = (low + high) / 2
        clipped = [min(1.0, max(0.0, value)) for value in values(middle)]
        if sum(map(lambda value, size: value * size, clipped, sizes)) < total:
            low = middle
        else:
            high = middle
    return clipped


def apportion(shares: list[float], total: int) -> list[int]:
    """Whole numbers near shares, with a given sum: shares are rounded down, those with the largest remainders up.

    Args:
        shares: at least 0; together within rounding of the total.
        total: what the numbers add up to.
    """
    counts = [math.floor(share) for share in shares]
    order = sorted(range(len(shares)), key=lambda k: counts[k] - shares[k])
    for k in order[: total - sum(counts)]:
        counts[k] += 1
    return counts


def exact_patterns(sizes: dict[str, int], sparsities: dict[str, float], sparsity: float) -> dict[str, Unstructured]:
    """Patterns of layers that together remove ``round(sparsity · total)`` weights.

    Args:
        sizes: layer → its number of weights.
        sparsities: layer → the share that it should lose, in [0, 1].
        sparsity: the mean of these over all weights.
    """
    shares = [sizes[name] * sparsities[name] for name in sizes]
    counts = apportion(shares, round(sparsity * sum(sizes.values())))
    return {name: Unstructured(count / sizes[name], exact=True) for name, count in zip(sizes, counts, strict=True)}
