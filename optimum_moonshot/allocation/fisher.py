"""`allocation="fisher"`: every matrix gets the sparsity at which a further weight costs the model as much as elsewhere.

The Fisher loss is a loss of the whole model, in one unit for all matrices. What a matrix l loses at a sparsity s,

    F_l(s) = 1/N Σ_n Σ_k (a_nk · (w_k - ŵ_k(s)))²

is a curve, and `objective/loss_allocation.py` divides the total so that the curves' values add up to the least. They
are found before the run proper, in passes of their own over the dense model, which need far less than pruning does:

* an eighth of the calibration samples, spread evenly, but at least `SAMPLES`;
* every eighth row of a matrix, but at least `ROWS`: all rows share the inputs' Gram matrix, and their losses add up;
* ŵ(s) by the run's solver at λ = 1, where one factorisation (one elimination) serves the matrix at every s.

So no more than one block's statistics are alive, less than a pruning holds; the curves do not depend on λ; and the
variants of a sweep share them. A run at λ = 1 has its only backward pass here, one with ``recompute`` its only look
at the dense model. The results' store keeps every curve, so that a killed run goes on with the same allocation.
"""

import dataclasses
import time
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from tqdm.auto import tqdm

from ..calibration.accumulators import GradientPlan
from ..calibration.observer import LayerStatistics
from ..data.batches import batch_size, spread_samples
from ..errors import FactorizationError
from ..model.layers import PrunableLayer
from ..objective.fisher import Fisher
from ..objective.loss_allocation import LossCurve, divide_sparsity, divide_steps
from ..objective.patterns import NM, MixedNM, Pattern, PerExpert, Unstructured
from ..pipeline.inputs import Prepared
from ..pipeline.loop import StatisticsTask, run_pipeline, solve_parts
from ..pipeline.model_pipeline import ModelPipeline
from ..pipeline.slices import ShardedExperts
from ..pipeline.solve import ExpertStatistics, Statistics
from ..pipeline.spec import Slicing, StatisticsSpec
from ..pipeline.under_calibrated_experts import is_under_calibrated
from ..pipeline.variant import Variant, share_curves
from ..progress import progress_bar
from ..solvers import Solver
from .block_scores import exact_patterns

# What the curves are measured at. A matrix's sparsity lies between (`loss_allocation.bounds`).
SPARSITIES = (0.2, 0.4, 0.6, 0.7, 0.8, 0.9, 0.95, 0.985)
# One in so many samples and rows, and at least so many of both.
SHARE, SAMPLES, ROWS = 8, 16, 256
# Why experts have no n of their own.
ONE_N = "the experts of a layer have one n, since config.json says one pattern of a layer"


def trial_patterns(asked: Pattern | MixedNM) -> tuple[Pattern, ...]:
    """The patterns whose losses make a matrix's curve, sparser and sparser.

    Args:
        asked: of the matrix, before the allocation; its own sparsity plays no part.
    """
    if isinstance(asked, MixedNM):
        return asked.choices[1:]
    return tuple(Unstructured(sparsity) for sparsity in SPARSITIES)


def sampled_rows(layer: PrunableLayer) -> slice:
    """The rows of a matrix that its curve is measured on; of experts and grouped convolutions all."""
    d_out = layer.shape[0]
    step = 1 if layer.groups > 1 or layer.separate else min(SHARE, max(1, d_out // ROWS))
    return slice(step // 2, d_out, step)


@torch.no_grad()
def loss_curve(
    solver: Solver,
    layer: PrunableLayer,
    statistics: Statistics,
    patterns: Sequence[Pattern],
) -> LossCurve:
    """What a layer loses by some patterns, estimated on some of its rows; and, unstructured, without any weight.

    Args:
        solver: which prunes them, at λ = 1.
        layer: at its dense weight; of experts, each has a curve of its own.
        statistics: G, and the gradients A_n of the rows `sampled_rows`.
        patterns: of one class, sparser and sparser.

    Raises:
        FactorizationError: a matrix's quadratic stays singular at the largest damping, with the layer's name.
    """
    weight = layer.matrix[sampled_rows(layer)].float()
    try:
        if layer.separate:
            assert not hasattr(statistics, "solve")
            return _expert_curves(solver, weight.unflatten(0, (layer.groups, -1)), statistics, patterns)
        assert isinstance(statistics, LayerStatistics)
        curve = _matrix_curve(solver, weight, statistics, patterns)
    except FactorizationError as error:
        raise error.within(layer.name) from None
    scale = layer.shape[0] / len(weight)
    losses = tuple(scale * loss for loss in curve.losses)
    return dataclasses.replace(curve, size=layer.shape[0] * layer.shape[1], losses=losses)


def _expert_curves(
    solver: Solver,
    weights: Tensor,
    statistics: LayerStatistics | ExpertStatistics,
    patterns: Sequence[Pattern],
) -> LossCurve:
    """The curve of a layer of experts [E, d_out, d_in], with those of each.

    What a starved expert loses is not known: it has the mean of the layer's others, and so no extreme share.
    """
    size, shares = weights[0].numel(), _shares(patterns)
    found: list[tuple[LossCurve | None, bool]] = []
    for index, own in enumerate(statistics.groups(len(weights))):
        if own is None:
            continue  # another process solves it
        curve = None if own.gradients is None else _matrix_curve(solver, weights[index], own, patterns)
        few = own.tokens is not None and is_under_calibrated(int(own.tokens), own.inputs.shape[-1])
        found.append((curve, curve is None or few))
    if isinstance(statistics, ShardedExperts):
        found = statistics.all_gather(found)
    measured = [curve for curve, _ in found]
    starved = [index for index, (_, few) in enumerate(found) if few]
    known = [curve for curve, few in found if curve is not None and not few] or list(filter(None, measured))
    sums = [sum(losses) for losses in zip(*(curve.losses for curve in known), strict=True)] or [0.0] * len(shares)
    mean = LossCurve(size, shares, tuple(loss / max(1, len(known)) for loss in sums))
    experts = tuple(mean if index in starved else curve or mean for index, curve in enumerate(measured))
    total = tuple(map(sum, zip(*(curve.losses for curve in experts), strict=True)))
    return LossCurve(weights.numel(), shares, total, experts)


def _matrix_curve(
    solver: Solver, weight: Tensor, statistics: LayerStatistics, patterns: Sequence[Pattern]
) -> LossCurve:
    """Of a matrix [d_out, d_in], or of some rows of one."""
    known, gradients = statistics, statistics.gradients
    assert isinstance(gradients, Fisher)
    if solver.objective.diagonal_only:
        squares = statistics.inputs.diagonal(dim1=-2, dim2=-1)
        known = LayerStatistics(squares, None, statistics.samples, diagonal=True, limit=statistics.limit)
    objective = known.objective(weight, 1.0, solver.column_block(weight.shape[1], patterns[0]))
    found = solver.trials(objective, patterns)
    if isinstance(patterns[-1], Unstructured):
        found = [*found, torch.zeros_like(weight)]
    losses = gradients.losses(torch.stack([pruned - weight for pruned in found]), statistics.limit)
    return LossCurve(weight.numel(), _shares(patterns), tuple(losses.tolist()))


def _shares(patterns: Sequence[Pattern]) -> tuple[float, ...]:
    """The sparsities of a curve's points."""
    ends = (1.0,) if isinstance(patterns[-1], Unstructured) else ()
    return (*(pattern.sparsity for pattern in patterns), *ends)


class SampledRows(StatisticsSpec):
    """G of every layer and the gradients of some of its rows, whatever the solver; matrices are collected whole."""

    diagonal = False  # whatever the solver

    def plan(self, layer: PrunableLayer) -> GradientPlan:
        return GradientPlan(rows=sampled_rows(layer))

    def slicing(self, layer: PrunableLayer, size: int) -> Slicing:
        return super().slicing(layer, size) if layer.separate else Slicing(1, self.bytes_of(layer), 0)

    def shards_rows(self, layer: PrunableLayer) -> bool:
        return False


class CurveMeasurement(StatisticsTask):
    """Measures the curve of every layer for the variants that lack it.

    Args:
        prepared: the model, dense and frozen, and the sampled data.
        variants: of the same layers and solver.
        bar: advances with the layers.
    """

    def __init__(self, prepared: Prepared, variants: Sequence[Variant], bar: tqdm):
        selection, data = prepared.selection, prepared.calibration  # `prepare` refuses to allocate without
        patterns = {layer.name: [trial_patterns(selection.patterns[layer.name])[0]] for layer in selection.layers}
        spec = SampledRows.of(selection, patterns, data.num_samples)
        super().__init__(spec, prepared.backoff, lambda: prepared.batches)
        self.prepared, self.variants, self.bar = prepared, variants, bar
        self.unreached: set[str] = set()
        self.measured: list[tuple[int, str, LossCurve]] = []  # by this process: variant, layer, curve
        self.pipeline = ModelPipeline(prepared, self)

    def lacking(self, layer: PrunableLayer) -> dict[tuple[Pattern, ...], list[Variant]]:
        """The variants that lack a layer's curve, by the patterns of its points."""
        lacking: dict[tuple[Pattern, ...], list[Variant]] = {}
        for variant in self.variants:
            if layer.name not in variant.store.curves:
                lacking.setdefault(trial_patterns(variant.selection.patterns[layer.name]), []).append(variant)
        return lacking

    def lacks(self, layer: PrunableLayer) -> bool:
        """As `Task.lacks`."""
        return layer.name not in self.unreached and bool(self.lacking(layer))

    def skip(self, layer: PrunableLayer) -> None:
        """As `Task.skip`: the run itself reports the layer."""
        self.unreached.add(layer.name)

    def solve(self, layer: PrunableLayer, statistics: Statistics) -> None:
        """As `Task.solve`."""
        self.bar.set_postfix_str(layer.name)
        for patterns, lacking in self.lacking(layer).items():
            curve = loss_curve(self.prepared.selection.solver, layer, statistics, patterns)
            for variant in lacking:
                variant.store.put_curve(layer.name, curve)
                self.measured.append((self.variants.index(variant), layer.name, curve))
        self.bar.update(1)

    def exchange(self, solved: Sequence[PrunableLayer]) -> None:
        """As `Task.exchange`."""
        share_curves(self.prepared, self.variants, self.measured)
        self.measured = []


def gather_curves(prepared: Prepared, variants: Sequence[Variant]) -> None:
    """Give every variant the curves that it lacks, of all layers that the data reach.

    Args:
        prepared: the model, dense and frozen, and the data.
        variants: of the same layers and solver.

    Raises:
        MoonshotError: bad statistics, or too little memory.
        FactorizationError: a layer's quadratic stays singular at the largest damping, with the layer's name.
    """
    started, sampled = time.perf_counter(), _sampled(prepared)
    names = [layer.name for layer in prepared.selection.layers]
    lacking = sum(any(name not in variant.store.curves for variant in variants) for name in names)
    with progress_bar(total=lacking, desc="allocating", unit="layer", shown=prepared.subject.progress) as bar:
        task = CurveMeasurement(sampled, variants, bar)
        run_pipeline(task.pipeline, partial(solve_parts, task), task.backoff, task.batches)
    for variant in variants:
        variant.allocating = (time.perf_counter() - started) / len(variants)


def sampled_count(samples: int) -> int:
    """How many of so many samples the curves are found by."""
    return min(samples, max(SAMPLES, samples // SHARE))


def _sampled(prepared: Prepared) -> Prepared:
    """The same model, to be seen dense and with gradients, and some of the data."""
    selection, data = prepared.selection, prepared.data
    assert data is not None  # `prepare` refuses to allocate without
    batches = spread_samples(data.batches, sampled_count(data.num_samples))
    count = sum(map(batch_size, batches))
    return dataclasses.replace(
        prepared,
        selection=selection.of_the_dense_model(lam=0.0),
        data=dataclasses.replace(data, batches=batches, num_samples=count),
    )


def fisher_patterns(variant: Variant) -> tuple[dict[str, Pattern], str]:
    """The pattern of every layer that has a curve, and a note for the report.

    Args:
        variant: with its curves.
    """
    known = variant.store.curves
    curves = {layer.name: known[layer.name] for layer in variant.selection.layers if layer.name in known}
    asked = variant.selection.config.parsed_pattern
    sizes = {name: curve.size for name, curve in curves.items()}
    found: dict[str, Pattern]
    if isinstance(asked, MixedNM):
        losses = {name: (0.0, *curve.losses) for name, curve in curves.items()}
        steps = {name: size // asked.m for name, size in sizes.items()}
        taken = divide_steps(losses, steps, round(asked.sparsity * sum(sizes.values())))
        found = {name: NM(asked.m - count, asked.m) for name, count in taken.items()}
        total = sum(taken[name] * steps[name] for name in taken) / max(1, sum(sizes.values()))
        alike = "; " + ONE_N if any(curve.experts for curve in curves.values()) else ""
        return found, f"Fisher allocation: {_counts(found)}; sparsity {total:.6f} of {asked.sparsity:g} asked{alike}"
    assert asked is not None  # an allocation by name is another
    parts = {name: _matrices(name, curve) for name, curve in curves.items()}
    matrices = {part: own for of_layer in parts.values() for part, own in of_layer.items()}
    sparsities = divide_sparsity(matrices, asked.sparsity)
    each = exact_patterns({part: own.size for part, own in matrices.items()}, sparsities, asked.sparsity)
    found = {name: _of_layer(curve, [each[part] for part in parts[name]]) for name, curve in curves.items()}
    low, high = min(sparsities.values(), default=0), max(sparsities.values(), default=0)
    experts = sum(len(curve.experts) for curve in curves.values())
    alone = f", {experts} experts each with its own" if experts else ""
    return found, f"Fisher allocation: sparsities {low:.4f} to {high:.4f} in {len(found)} layers{alone}"


def _matrices(name: str, curve: LossCurve) -> dict[str, LossCurve]:
    """The curves of what has a share of its own in a layer: the layer, or each of its experts."""
    return {f"{name} of expert {index}": own for index, own in enumerate(curve.experts)} or {name: curve}


def _of_layer(curve: LossCurve, patterns: Sequence[Unstructured]) -> Pattern:
    """The pattern of a layer from those of its experts, or from its own."""
    if not curve.experts:
        return patterns[0]
    shares = tuple(pattern.sparsity for pattern in patterns)
    return PerExpert(sum(shares) / len(shares), exact=True, experts=shares)


def _counts(patterns: dict[str, Pattern]) -> str:
    """Such as "3 layers dense, 4 layers 2:4"."""
    found: dict[float, list[str]] = {}
    for pattern in patterns.values():
        found.setdefault(pattern.sparsity, []).append("dense" if not pattern.sparsity else str(pattern))
    return ", ".join(f"{len(names)} layers {names[0]}" for _, names in sorted(found.items()))
