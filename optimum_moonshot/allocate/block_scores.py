"""Sparsities of decoder layers by outliers (OWL) or by spectra (AlphaPruning).

OWL (Yin et al., arXiv 2310.05175) prunes decoder layers less if they have many outliers among |W|·‖x‖₂, AlphaPruning
(Lu et al., arXiv 2410.10912) if their singular values have a heavy tail. All matrices of a decoder layer have the same
sparsity, up to one weight; other layers are scored alone.

Exactly ``round(sparsity · total)`` of all weights are removed for any scores. The sparsities of the blocks are shifted
(OWL) or scaled (AlphaPruning) until their clipped values have the target mean over the weights, then the counts of the
layers are rounded by largest remainders. A layer's count is divided between its comparison groups without a remainder.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..calibration.observer import Observer
from ..errors import MoonshotError
from ..objective.patterns import Unstructured
from ..objective.quadratic import of_rows
from ..pipeline.inputs import Prepared
from ..pipeline.loop import run_pipeline
from ..pipeline.model_pipeline import ModelPipeline
from ..pipeline.walk import Stage
from ..progress import progress_bar

if TYPE_CHECKING:
    from ..config import MoonshotConfig
    from ..model.layers import PrunableLayer

# AlphaPruning: bins of the histogram, and bounds, relative to its peak, of the start of the tail.
BINS, LOWEST, HIGHEST = 100, 0.95, 1.5
# Size of a slice of rows of the matrix of Kolmogorov-Smirnov distances.
SLICE_BYTES = 64 * 2**20


def input_squares(prepared: Prepared) -> dict[str, Tensor]:
    """Σ x² of the inputs of every layer that the data reach, [d_in] or [groups, d_in], by one forward pass."""
    prepared = dataclasses.replace(prepared, selection=prepared.selection.of_the_dense_model(lam=1.0))
    collected = _InputSquares(prepared)
    pipeline = ModelPipeline(prepared, collected)
    run_pipeline(pipeline, collected.visit, prepared.backoff, lambda: prepared.batches, lambda: "the outliers")
    return collected.squares


class _InputSquares:
    """Σ x² by layer, from the stages of a pipeline."""

    def __init__(self, prepared: Prepared):
        self.prepared = prepared
        self.squares: dict[str, Tensor] = {}

    def lacks(self, layer: PrunableLayer) -> bool:
        return layer.name not in self.squares

    def skip(self, layer: PrunableLayer) -> None:
        """Do nothing: the pruning that follows reports layers without data."""

    def visit(self, stage: Stage) -> None:
        samples, storage = self.prepared.calibration.num_samples, self.prepared.storage
        observer = Observer(stage.layers, True, set(), samples, storage, share=False)
        with self.prepared.backoff.passing(observer):
            stage.observe(observer, advance=True)
        reached = [layer for layer in stage.layers if observer.reached(layer)]
        self.squares |= {layer.name: observer.take(layer).inputs for layer in reached}


def block_scores(
    config: MoonshotConfig,
    blocks: Iterable[Sequence[PrunableLayer]],
    input_squares: dict[str, Tensor],
    progress: bool = False,
) -> list[float]:
    """The score of every block of the dense model by OWL or AlphaPruning, for any sparsity.

    `input_squares` has Σ x² of each layer's inputs [d_in], for OWL.

    Raises:
        MoonshotError: the singular values of a block have no tail, for AlphaPruning.
    """
    if config.allocation == "owl":
        threshold = config.owl_threshold
        return [
            outlier_share([layer.matrix for layer in block], [input_squares[layer.name] for layer in block], threshold)
            for block in blocks
        ]
    bar = progress_bar(blocks, desc="singular values", unit="block", leave=False, shown=progress)
    return [_mean_exponent(block) for block in bar]


def allocate(
    config: MoonshotConfig, blocks: Sequence[Sequence[PrunableLayer]], scores: list[float]
) -> tuple[dict[str, Unstructured], str]:
    """The pattern of every layer at the configured sparsity, by the scores of the blocks, and a note."""
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
    by_layer = {layer.name: value for block, value in zip(blocks, sparsities, strict=True) for layer in block}
    patterns = exact_patterns(sizes, by_layer, sparsity)
    return patterns, f"{note}: sparsities {min(sparsities):.4f} to {max(sparsities):.4f} in {len(blocks)} blocks"


def _mean_exponent(block: Sequence[PrunableLayer]) -> float:
    exponents = [exponent for layer in block if (exponent := tail_exponent(layer.matrix)) is not None]
    if not exponents:
        names = ", ".join(layer.name for layer in block)
        raise MoonshotError(
            f"the singular values of {names} have no tail to fit",
            field="allocation",
            value="alpha",
            hint="`ignore` layers of zeros, or use allocation='owl'",
        )
    return sum(exponents) / len(exponents)


def outlier_share(weights: list[Tensor], input_squares: list[Tensor], threshold: float) -> float:
    """OWL's score of a block: the percentage of |W|·‖x‖₂ above `threshold` (M) times their mean.

    `input_squares` are Σ x² over all tokens, [d_in], or [groups, d_in] for groups of rows with separate inputs.
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

    The tail starts at the value, among those near the peak of the log-histogram, with the least Kolmogorov-Smirnov
    distance of the fit. None without two different singular values.
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
    # The lower bound compares a logarithm with values, as in the authors' code.
    fits = (values[:-1] >= (LOWEST * peak).log10()) & (values[:-1] <= HIGHEST * peak)
    return fits.nonzero().squeeze(1)


def _distances(logs: Tensor, starts: Tensor, exponents: Tensor) -> Tensor:
    """Kolmogorov-Smirnov distances between the tails that begin at `starts` and their power laws."""
    index = torch.arange(len(logs))
    distances = []
    for rows in torch.arange(len(starts)).split(max(1, SLICE_BYTES // (8 * len(logs)))):
        start, exponent = starts[rows, None], exponents[rows, None]
        fitted = 1 - ((logs - logs[start]) * (1 - exponent)).exp()
        observed = (index - start) / (len(logs) - start)
        distances.append((fitted - observed).abs().masked_fill(index < start, 0).amax(1))
    return torch.cat(distances)


def owl_sparsities(scores: list[float], sizes: list[int], sparsity: float, spread: float) -> list[float]:
    """Sparsities of blocks by `outlier_share`: linear, over a range of 2·`spread` (λ_OWL), lower for more outliers.

    `sizes` are the weights of each block; `sparsity` is the mean over all weights.
    """
    targets = [sparsity - 2 * spread * value for value in _unit(scores)]
    return _at_mean(lambda shift: [value + shift for value in targets], -1 - spread, 1 + 2 * spread, sizes, sparsity)


def alpha_sparsities(exponents: list[float], sizes: list[int], sparsity: float, spread: float) -> list[float]:
    """Like `owl_sparsities`, but in proportion to 1 - `spread` … 1 + `spread` (τ), lower for a heavier tail.

    `exponents` has the mean `tail_exponent` of each block.
    """
    weights = [1 - spread + 2 * spread * value for value in _unit(exponents)]
    return _at_mean(lambda factor: [factor * value for value in weights], 0.0, 1 / (1 - spread), sizes, sparsity)


def _unit(scores: list[float]) -> list[float]:
    """Scores mapped linearly to [0, 1]; equal ones to 0.5."""
    low, high = min(scores), max(scores)
    return [(score - low) / (high - low) if high > low else 0.5 for score in scores]


def _at_mean(
    values: Callable[[float], list[float]], low: float, high: float, sizes: list[int], mean: float
) -> list[float]:
    """`values(x)`, increasing in x and clipped to [0, 1], at the x in [low, high] with a weighted mean of `mean`."""
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


def apportion(quotas: list[float], total: int) -> list[int]:
    """Round quotas to integers with a given sum, by largest remainders; the quotas have that sum up to rounding."""
    counts = [math.floor(quota) for quota in quotas]
    order = sorted(range(len(quotas)), key=lambda k: counts[k] - quotas[k])
    for k in order[: total - sum(counts)]:
        counts[k] += 1
    return counts


def exact_patterns(
    sizes: dict[str, int],
    sparsities: dict[str, float],
    sparsity: float,
    least: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, Unstructured]:
    """Patterns near the sparsities of the layers that together remove ``round(sparsity · total)`` weights.

    `least` has the number of weights that any mask removes from a layer; the sum may exceed that total.
    """
    fixed = [least.get(name, 0) for name in sizes]
    quotas = [max(0.0, sizes[name] * sparsities[name] - count) for name, count in zip(sizes, fixed, strict=True)]
    free = apportion(quotas, max(0, round(sparsity * sum(sizes.values())) - sum(fixed)))
    counts = [count + more for count, more in zip(fixed, free, strict=True)]
    return {name: Unstructured(count / sizes[name], exact=True) for name, count in zip(sizes, counts, strict=True)}
