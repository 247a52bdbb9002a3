"""Allocate the sparsity of variants to their layers, from scores (block_scores.py) or loss curves of the dense model.

``allocation="fisher"`` finds the sparsities at which one more weight costs the model the same in every matrix. The
Fisher loss is a loss of the whole model, with one unit for all matrices. The loss of a matrix l at sparsity s,

    F_l(s) = 1/N Σ_n Σ_k (a_nk · (w_k - ŵ_k(s)))²

is a curve, and `objective/loss_allocation.py` divides the total sparsity so that the sum of the curves is minimal. They
are measured before the run, by separate passes over the dense model, from fewer statistics than pruning needs:

* one in `SHARE` calibration samples, evenly spread, but at least `SAMPLES`;
* one in `SHARE` rows of a matrix, but at least `ROWS`: all rows share one Gram matrix, and their losses add up;
* ŵ(s) by the run's solver at λ = 1, whose single factorization (or elimination) serves every s.

At most the statistics of one block are in memory, fewer than for pruning. The curves do not depend on λ, and the
variants of a sweep share them. They need the only backward pass of a run at λ = 1, and the only pass over the dense
model of a run with ``recompute``. Every curve is stored, so that a resumed run has the same allocation.

With a budget of bytes, every matrix has a sparsity and a number of bits. The choices are combinations of a sparsity and
the bits of the survivors, with the losses that `loss_curves` measures with rounding to nearest. `divide_bytes`
minimises their sum within the budget, which includes everything else in a packed checkpoint.
"""

import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import nn
from tqdm.auto import tqdm

from ..config import MoonshotConfig
from ..errors import require
from ..model.layers import PrunableLayer, other_parameters
from ..model.word_embeddings import bytes_beside, word_embeddings
from ..objective.grid import BITS, BLOCK, Grid
from ..objective.loss_allocation import LossCurve, divide_bytes, divide_sparsity, divide_steps
from ..objective.patterns import NM, MixedNM, Pattern, PerExpert, Unstructured
from ..pipeline.inputs import Prepared
from ..pipeline.loop import Task, run_pipeline, solve_parts
from ..pipeline.model_pipeline import ModelPipeline
from ..pipeline.solve import Statistics
from ..pipeline.variant import Variant, share_curves
from ..progress import progress_bar
from .block_scores import allocate, block_scores, exact_patterns, input_squares
from .loss_curves import SampledRows, loss_curve, sampled_count, trial_patterns

# Sparsities of the choices; below 0.3 a bitmask needs more bytes than it saves.
SPARSITIES = (0.0, *(step / 40 for step in range(12, 39)))
HEADER_BYTES = 512  # of a tensor in a file: its name, shape and offsets
TENSORS = 3  # of a packed matrix
ONE_N = "the experts of a layer have one n, since config.json has one pattern for a layer"


def allocate_sparsity(prepared: Prepared, variants: Sequence[Variant]) -> None:
    """Set the patterns of every variant, unless they are uniform or given by name; the model is dense and frozen."""
    selection = prepared.selection
    if selection.config.allocation == "fisher":
        gather_curves(prepared, variants)
        for variant in variants:
            budget = variant.selection.config.has_budget
            patterns, note = byte_patterns(variant, prepared.model) if budget else fisher_patterns(variant)
            variant.patterns |= patterns
            variant.notes.append(note)
        return
    lacking = any(variant.lacks(layer) for variant in variants for layer in selection.layers)
    if selection.config.allocation not in ("owl", "alpha") or not (lacking or selection.config.recover == "gradual"):
        return
    squares = input_squares(prepared) if selection.config.allocation == "owl" else {}
    reached = squares if squares else {layer.name for layer in selection.layers}

    def groups() -> Iterator[tuple[PrunableLayer, ...]]:
        """Layers with the same sparsity that the data reaches, onloaded until the next ones are requested."""
        for block in selection.structure.blocks:
            layers = tuple(layer for layer in block.layers if layer.name in reached)
            if layers:
                with block.onloaded():
                    yield layers
        yield from ((layer,) for layer in selection.structure.outside if layer.name in reached)

    scores = block_scores(selection.config, groups(), squares, prepared.subject.progress)
    for variant in variants:
        by_layer, note = allocate(variant.selection.config, list(groups()), scores)
        variant.patterns = {**by_layer}
        variant.notes.append(note)


class CurveMeasurement(Task):
    """Measures the curve of every layer of a dense, frozen model for the variants without it."""

    def __init__(self, prepared: Prepared, variants: Sequence[Variant], bar: tqdm):
        selection, data = prepared.selection, prepared.calibration
        patterns = {layer.name: [trial_patterns(selection.patterns[layer.name])[0]] for layer in selection.layers}
        spec = SampledRows.of(selection, patterns, data.num_samples)
        super().__init__(spec, prepared.backoff, lambda: prepared.batches)
        self.prepared, self.variants, self.bar = prepared, variants, bar
        self.unreached: set[str] = set()
        self.measured: list[tuple[int, str, LossCurve]] = []  # variant, layer and curve, before the next exchange
        self.pipeline = ModelPipeline(prepared, self)

    def lacking(self, layer: PrunableLayer) -> dict[tuple[Pattern, ...], list[Variant]]:
        """The variants without a layer's curve, by the patterns of its points."""
        lacking: dict[tuple[Pattern, ...], list[Variant]] = {}
        for variant in self.variants:
            if layer.name not in variant.store.curves:
                lacking.setdefault(trial_patterns(variant.selection.patterns[layer.name]), []).append(variant)
        return lacking

    def lacks(self, layer: PrunableLayer) -> bool:
        return layer.name not in self.unreached and bool(self.lacking(layer))

    def skip(self, layer: PrunableLayer) -> None:
        """Skip the layer, which the run reports."""
        self.unreached.add(layer.name)

    def solve(self, layer: PrunableLayer, statistics: Statistics) -> None:
        self.bar.set_postfix_str(layer.name)
        config = self.prepared.selection.config
        for patterns, lacking in self.lacking(layer).items():
            grids = [Grid(bits, config.quant_group) for bits in allocated_bits(config)]
            curve = loss_curve(self.prepared.selection.solver, layer, statistics, patterns, grids)
            for variant in lacking:
                variant.store.put_curve(layer.name, curve)
                self.measured.append((self.variants.index(variant), layer.name, curve))
        self.bar.update(1)

    def exchange(self, solved: Sequence[PrunableLayer]) -> None:
        share_curves(self.prepared, self.variants, self.measured)
        self.measured = []


def gather_curves(prepared: Prepared, variants: Sequence[Variant]) -> None:
    """Measure the missing curves of the variants for all layers that the data reaches, in a dense, frozen model."""
    started, selection, data = time.perf_counter(), prepared.selection, prepared.calibration
    data = data.spread(sampled_count(data.num_samples))
    sampled = replace(prepared, selection=selection.of_the_dense_model(lam=0.0), data=data)
    names = [layer.name for layer in selection.layers]
    lacking = sum(any(name not in variant.store.curves for variant in variants) for name in names)
    with progress_bar(total=lacking, desc="allocating", unit="layer", shown=prepared.subject.progress) as bar:
        task = CurveMeasurement(sampled, variants, bar)
        run_pipeline(task.pipeline, partial(solve_parts, task), task.backoff, task.batches)
    for variant in variants:
        variant.allocating = (time.perf_counter() - started) / len(variants)


def fisher_patterns(variant: Variant) -> tuple[dict[str, Pattern], str]:
    """The pattern of every layer of a variant that has a curve, and a note for the report."""
    stored = variant.store.curves
    curves = {layer.name: stored[layer.name] for layer in variant.selection.layers if layer.name in stored}
    pattern = variant.selection.config.parsed_pattern
    if isinstance(pattern, MixedNM):
        return _mixed_patterns(curves, pattern)
    assert pattern is not None  # else the allocation is by name
    names = {name: [f"{name} of expert {i}" for i in range(len(curve.experts))] for name, curve in curves.items()}
    matrices: dict[str, LossCurve] = {}  # of layers, or of experts
    for name, curve in curves.items():
        matrices |= zip(names[name] or [name], curve.experts or [curve], strict=True)
    sparsities = divide_sparsity(matrices, pattern.sparsity)
    sizes = {name: curve.size for name, curve in matrices.items()}
    # Weights that every mask removes: zeros, and all weights of inputs that are always 0.
    dead = {name: round(curve.dead * curve.size) for name, curve in matrices.items()}
    exact = exact_patterns(sizes, sparsities, pattern.sparsity, dead)
    patterns: dict[str, Pattern] = {}
    for name, experts in names.items():
        by_expert = tuple(exact[expert].sparsity for expert in experts)
        patterns[name] = (
            PerExpert(sum(by_expert) / len(by_expert), exact=True, experts=by_expert) if experts else exact[name]
        )
    low, high = min(sparsities.values(), default=0), max(sparsities.values(), default=0)
    count = sum(len(curve.experts) for curve in curves.values())
    separate = f", {count} experts each with its own" if count else ""
    note = f"Fisher allocation: sparsities {low:.4f} to {high:.4f} in {len(patterns)} layers{separate}"
    total, least = sum(sizes.values()), sum(dead.values())
    if least > round(pattern.sparsity * total):
        note += f"; {least / total:.4f} of the weights are 0 or at inputs that are always 0, above the target"
    return patterns, note


def _mixed_patterns(curves: dict[str, LossCurve], pattern: MixedNM) -> tuple[dict[str, Pattern], str]:
    """Like `fisher_patterns`, for n:m patterns with one n per layer."""
    sizes = {name: curve.size for name, curve in curves.items()}
    losses = {name: (0.0, *curve.losses) for name, curve in curves.items()}
    steps = {name: size // pattern.m for name, size in sizes.items()}
    removed = divide_steps(losses, steps, round(pattern.sparsity * sum(sizes.values())))
    patterns: dict[str, Pattern] = {name: NM(pattern.m - count, pattern.m) for name, count in removed.items()}
    total = sum(removed[name] * steps[name] for name in removed) / max(1, sum(sizes.values()))
    by_sparsity: dict[float, list[str]] = {}
    for one in patterns.values():
        by_sparsity.setdefault(one.sparsity, []).append(str(one) if one.sparsity else "dense")
    counts = ", ".join(f"{len(names)} layers {names[0]}" for _, names in sorted(by_sparsity.items()))
    one_n = "; " + ONE_N if any(curve.experts for curve in curves.values()) else ""
    return patterns, f"Fisher allocation: {counts}; sparsity {total:.6f}, target {pattern.sparsity:g}{one_n}"


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
