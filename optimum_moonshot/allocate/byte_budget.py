"""`allocation="fisher"` with a budget of bytes: a sparsity and a number of bits for every matrix.

The choices are combinations of a sparsity and the bits of the survivors, with the losses that `loss_curves` measures
with rounding to nearest. `divide_bytes` minimises their sum within the budget, which includes everything else in a
packed checkpoint.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from ..config import MoonshotConfig
from ..errors import require
from ..model.layers import PrunableLayer, other_parameters
from ..model.word_embeddings import bytes_beside, word_embeddings
from ..objective.grid import BITS, BLOCK, Grid
from ..objective.loss_allocation import LossCurve, divide_bytes
from ..objective.patterns import Pattern, Unstructured
from ..pipeline.variant import Variant

# Sparsities of the choices; below 0.3 a bitmask needs more bytes than it saves.
SPARSITIES = (0.0, *(step / 40 for step in range(12, 39)))
HEADER_BYTES = 512  # of a tensor in a file: its name, shape and offsets
TENSORS = 3  # of a packed matrix


@dataclass(frozen=True)
class Choice:
    """A combination for one matrix; `bits` is None if the survivors have the model's dtype."""

    sparsity: float
    bits: int | None

    def bytes(self, layer: PrunableLayer, quant_group: int) -> float:
        """An upper bound on the bytes of the packed matrix [d_out, d_in], or of the dense one if that is smaller."""
        (d_out, d_in), itemsize = layer.shape, layer.parameter.dtype.itemsize
        weights, mask = d_out * d_in, d_out * -(-d_in // 8)
        survivors = weights - self.pattern().up_to(weights)
        if self.bits is None:
            return min(weights * itemsize, survivors * itemsize + mask)
        scales = d_out * Grid(self.bits, quant_group).groups(d_in) * itemsize
        whole, rest = divmod(d_in, BLOCK)
        dense = d_out * (whole * BLOCK * self.bits // 8 + -(-rest * self.bits // 8))
        # The codes of a block are padded to a whole byte; the sparsity of a layer does not tell by how many bits.
        padding = {8: 0.0, 4: 4 / 8, 3: 7 / 8}[self.bits] * d_out * -(-d_in // BLOCK)
        return scales + min(dense, mask + survivors * self.bits / 8 + padding)

    def pattern(self, grid: Grid | None = None) -> Unstructured:
        """The pattern of the layer's weights, with a grid of its bits."""
        return Unstructured(self.sparsity, exact=True, grid=grid)


def allocated_bits(config: MoonshotConfig) -> tuple[int, ...]:
    """The bits among which an allocation chooses, besides those of the model's dtype; none without a budget."""
    if not config.has_budget:
        return ()
    return BITS if config.bits is None else (config.bits,)


def byte_patterns(variant: Variant, model: nn.Module) -> tuple[dict[str, Pattern], str]:
    """The pattern of every layer of a variant that has a curve, with its grid, and a note for the report.

    Raises:
        MoonshotError: the budget is too small.
    """
    config, curves = variant.selection.config, variant.store.curves
    layers = {layer.name: layer for layer in variant.selection.layers if layer.name in curves}
    choices = {name: _choices(config, curves[name]) for name in layers}
    points = {
        name: [(choice.bytes(layers[name], config.quant_group), loss) for choice, loss in losses.items()]
        for name, losses in choices.items()
    }
    weights = sum(layer.shape[0] * layer.shape[1] for layer in layers.values())
    budget = _budget(config, layers, model, sum(min(of_layer)[0] for of_layer in points.values()), weights)
    chosen = {name: list(choices[name])[index] for name, index in divide_bytes(points, budget).items()}
    patterns: dict[str, Pattern] = {
        name: choice.pattern(None if choice.bits is None else Grid(choice.bits, config.quant_group))
        for name, choice in chosen.items()
    }
    size = sum(choice.bytes(layers[name], config.quant_group) for name, choice in chosen.items())
    counts = Counter("unrounded" if choice.bits is None else f"{choice.bits} bits" for choice in chosen.values())
    kinds = ", ".join(f"{count} layers {kind}" for kind, count in sorted(counts.items()))
    sparsities = [choice.sparsity for choice in chosen.values()] or [0.0]
    low, high = min(sparsities), max(sparsities)
    mean = f"{8 * size / max(1, weights):.3f} bits a weight"
    return patterns, f"Fisher allocation: {kinds}, sparsities {low:.3f} to {high:.3f}; {mean}"


def _choices(config: MoonshotConfig, curve: LossCurve) -> dict[Choice, float]:
    """The loss of each combination, at sparsities from the fraction of weights that every mask removes."""
    choices: dict[Choice, float] = {}
    sparsities = sorted({max(sparsity, curve.dead) for sparsity in SPARSITIES})
    if config.bits is None:
        losses = [0.0, *curve.values(sparsities[1:])]
        choices |= {Choice(s, None): loss for s, loss in zip(sparsities, losses, strict=True)}
    for bits in curve.quantized:
        losses = curve.of_bits(bits).values(sparsities)
        choices |= {Choice(s, bits): loss for s, loss in zip(sparsities, losses, strict=True)}
    return choices


def _budget(
    config: MoonshotConfig, layers: Mapping[str, PrunableLayer], model: nn.Module, least: float, weights: int
) -> float:
    """The budget of bytes for layers with this number of `weights`, which need at `least` so many bytes."""
    smaller = ""
    if config.bits_per_weight is not None:
        budget = config.bits_per_weight * weights / 8
        bits = math.ceil(8000 * least / max(1, weights)) / 1000
        message, field, value = f"the smallest choices need {bits:g} bits per weight", "bits_per_weight", bits
    else:
        target, pruned = config.target_bytes_number, [*layers.values()]
        assert target is not None
        grid = config.embedding_grid
        packed = len(layers) + (0 if grid is None else len(word_embeddings(model, pruned)))
        headers = TENSORS * packed + len(other_parameters(model, pruned))
        fixed = bytes_beside(model, pruned, grid) + HEADER_BYTES * headers
        budget, value = target - fixed, math.ceil(least + fixed)
        message = f"the smallest choices need {value:,} bytes, {fixed:,} of them for other parameters and headers"
        field = "target_bytes"
        smaller = ", or round the word embeddings, by embedding_bits=8" if grid is None else ""
    require(least <= budget, message, field=field, value=getattr(config, field), hint=f"give at least {value}{smaller}")
    return budget
