"""Weights rounded to a grid: on it, zero off `keep`, and with a loss that descends from that of rounding to nearest."""

import dataclasses
import itertools

import pytest
import reference
import torch
from objectives import diagonal, full, matrices

from optimum_moonshot import MoonshotConfig, prune_weight
from optimum_moonshot.errors import MoonshotError
from optimum_moonshot.objective.grid import Grid
from optimum_moonshot.objective.linalg import SliceLimit, limited
from optimum_moonshot.objective.patterns import NM, Unstructured
from optimum_moonshot.objective.quadratic import Quadratic
from optimum_moonshot.solvers import quantization
from optimum_moonshot.solvers.quantization import quantize

ROWS, INPUTS, SAMPLES = 12, 160, 6


def layer(seed=0, rows=ROWS, inputs=INPUTS, samples=SAMPLES):
    """A weight, correlated Gram matrix and gradients."""
    torch.manual_seed(seed)
    mix = torch.eye(inputs) + 0.5 * torch.randn(inputs, inputs) / inputs**0.5
    x = torch.randn(4 * inputs, inputs) @ mix
    return 0.05 * torch.randn(rows, inputs), x.T @ x, 0.01 * torch.randn(samples, rows, inputs)


def nearest(grid, weight, objective):
    """Rounding to nearest, with scales searched under the diagonal of F_k."""
    importance = objective.row_hessians(slice(None)).diagonal(dim1=1, dim2=2).float()
    step = grid.per_weight(grid.search(weight, importance), weight.shape[1])
    return grid.values(grid.codes(weight, step), step)


def objective_of(kind, weight, gram, gradients, lam):
    """The same problem, with the Fisher term as vectors, as matrices, or with one Gram matrix per group of rows."""
    if lam == 1:
        gradients = None
    if kind == "groups":
        return full(weight, torch.stack([gram, 2 * gram]), gradients, lam)
    if kind == "matrices" and gradients is not None:
        return Quadratic.build(weight, gram, matrices(gradients), lam)
    return full(weight, gram, gradients, lam)


@pytest.mark.parametrize("kind", ["vectors", "matrices", "groups"])
@pytest.mark.parametrize(("lam", "bits"), list(itertools.product((1, 0.5, 0), (8, 4, 3))))
def test_the_loss_descends_from_rounding_to_nearest(kind, lam, bits):
    weight, gram, gradients = layer()
    objective = objective_of(kind, weight, gram, gradients, lam)
    keep, grid = torch.rand(weight.shape) < 0.5, Grid(bits, 64)
    rounded = nearest(grid, weight * keep, objective)
    quantized = quantize(objective, weight, keep, grid)
    before, after = objective.losses(rounded, quantized)
    assert after.total < before.total
    assert not quantized[~keep].any()
    step = grid.per_weight(grid.scales_of(quantized), INPUTS)
    assert torch.equal(grid.values(grid.codes(quantized, step), step), quantized)


@pytest.mark.parametrize("bits", [8, 4, 3])
def test_codes_that_change_by_much_stay_on_the_grid(bits):
    """In float32 v + (c·s - v) is not always c·s, where v is several times as large."""
    torch.manual_seed(0)
    shared = torch.randn(2000, 1) + 0.3 * torch.randn(2000, 64)  # inputs that can replace each other
    weight = torch.randn(512, 64)
    objective, grid = full(weight, shared.T @ shared, None, 1), Grid(bits, 64)
    start = weight.roll(1, 0)
    values = quantize(objective, start, torch.ones_like(start, dtype=torch.bool), grid)
    moved = (grid.codes(values, scale := grid.per_weight(grid.scales_of(values), 64)) - grid.codes(start, scale)).abs()
    assert moved.max() > grid.top
    assert torch.equal(grid.values(grid.codes(values, scale), scale), values)


@pytest.mark.parametrize("lam", [1, 0.5])
def test_the_loss_is_that_of_the_literal_quadratic(lam):
    """All representations of the same F_k descend to nearly the same loss."""
    weight, gram, gradients = layer()
    keep, grid = torch.rand(weight.shape) < 0.5, Grid(3, 64)
    losses = []
    for kind in ("vectors", "matrices"):
        quantized = quantize(objective_of(kind, weight, gram, gradients, lam), weight, keep, grid)
        exact = [None if lam == 1 else gradients.double()]
        losses.append(float(reference.objective(quantized.double(), weight.double(), gram.double(), *exact, lam)))
    assert losses[0] == pytest.approx(losses[1], rel=0.02)


@pytest.mark.parametrize("lam", [1, 0.5, 0])
def test_no_change_of_one_code_lowers_the_loss(lam):
    weight, gram, gradients = layer(rows=3, inputs=64)
    objective, grid = objective_of("vectors", weight, gram, gradients, lam), Grid(3, 64)
    keep = torch.rand(weight.shape) < 0.6
    quantized = quantize(objective, weight, keep, grid)
    for _ in range(20):  # to convergence: a call stops once it gains little
        quantized = quantize(objective, quantized, keep, grid, grid.scales_of(quantized))
    (best,) = objective.losses(quantized)
    step = grid.per_weight(grid.scales_of(quantized), 64)
    for row, column in keep.nonzero().tolist():
        for code in range(-grid.top, grid.top + 1):
            changed = quantized.clone()
            changed[row, column] = code * step[row, column]
            (loss,) = objective.losses(changed)
            assert loss.total >= best.total * (1 - 1e-4)


def test_the_best_codes_of_a_tiny_row_by_brute_force():
    """With uncorrelated inputs each code is the nearest one, and descent has nothing to change."""
    weight = torch.tensor([[0.31, -0.7, 0.11]])
    objective = full(weight, torch.diag(torch.tensor([1.0, 5.0, 2.0])), None, 1)
    grid, keep = Grid(3, 64), torch.ones(1, 3, dtype=torch.bool)
    quantized = quantize(objective, weight, keep, grid)
    scale = float(grid.scales_of(quantized))
    codes = itertools.product(range(-3, 4), repeat=3)
    losses = objective.losses(*[torch.tensor([code]) * scale for code in codes])
    (loss,) = objective.losses(quantized)
    assert loss.total == pytest.approx(min(each.total for each in losses), rel=1e-5)


def test_diagonals_round_to_nearest():
    weight, gram, gradients = layer()
    objective, grid = diagonal(weight, gram, gradients, 0.5), Grid(4, 64)
    keep = torch.ones_like(weight, dtype=torch.bool)
    step = grid.per_weight(grid.search(weight, objective.diagonal()), INPUTS)
    assert torch.equal(quantize(objective, weight, keep, grid), grid.values(grid.codes(weight, step), step))


@pytest.mark.parametrize("groups", [1, 2])
def test_a_diagonal_gram_matrix_rounds_to_nearest_without_a_descent(groups, monkeypatch):
    weight, gram, _ = layer()
    gram = torch.stack([(1 + group) * gram.diagonal().diag() for group in range(groups)]).squeeze(0)
    objective, grid = full(weight, gram, None, 1), Grid(4, 64)
    keep = torch.rand(weight.shape) < 0.7
    monkeypatch.delattr(quantization._Descent, "run")  # one step of Python for every column
    rounded, quantized = objective.losses(
        nearest(grid, weight * keep, objective), quantize(objective, weight, keep, grid)
    )
    assert quantized.total == pytest.approx(rounded.total, rel=1e-4)  # scales are searched in float32 and in float64


@pytest.mark.parametrize("lam", [1, 0.5])
def test_rows_do_not_interact(lam):
    weight, gram, gradients = layer()
    keep, grid, order = torch.rand(weight.shape) < 0.5, Grid(4, 64), torch.randperm(ROWS)
    whole = quantize(objective_of("vectors", weight, gram, gradients, lam), weight, keep, grid)
    mixed = objective_of("vectors", weight[order], gram, gradients[:, order], lam)
    assert_nearly_equal(quantize(mixed, weight[order], keep[order], grid), whole[order])
    objective = objective_of("vectors", weight, gram, gradients, lam)
    with limited(SliceLimit(4 * 8 * INPUTS)):
        assert_nearly_equal(quantize(objective, weight, keep, grid), whole)


def test_a_row_has_the_same_codes_without_the_others():
    """Small rows at 8 bits, whose descents converge after different numbers of sweeps."""
    weight, gram, _ = layer(rows=64, inputs=16)
    keep, grid = torch.rand(weight.shape) < 0.5, Grid(8, 64)
    whole = quantize(full(weight, gram, None, 1), weight, keep, grid)
    rows = [quantize(full(weight[[row]], gram, None, 1), weight[[row]], keep[[row]], grid) for row in range(64)]
    assert_nearly_equal(torch.cat(rows), whole)


def assert_nearly_equal(weight, other):
    """Equal but for rows in which a code was near a tie, which sums in another order decide differently."""
    differing = ((weight - other).abs() > 1e-6).any(1)
    assert differing.sum() <= 2


@pytest.mark.parametrize("solver", ["sparsegpt", "alps", "obc", "cap", "wanda", "magnitude"])
@pytest.mark.parametrize("bits", [8, 4, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_solver_returns_weights_on_the_grid(solver, bits, dtype):
    weight, gram, gradients = layer(rows=8, inputs=128)
    fields = {"sparsity": 0.5, "lam": 0.5}
    config = MoonshotConfig(solver=solver, bits=bits, quant_group=64, **fields)
    result = prune_weight(weight.to(dtype), gram, gradients, config=config)
    pruned = prune_weight(weight.to(dtype), gram, gradients, config=dataclasses.replace(config, bits=None))
    Grid(bits, 64, dtype).scales_of(result.weight)
    assert not result.weight[~result.keep].any()
    assert solver == "sparsegpt" or torch.equal(result.keep, pruned.keep)
    assert int(result.keep.sum()) == int(pruned.keep.sum())
    assert result.weight.dtype == dtype


@pytest.mark.parametrize("pattern", [NM(2, 4), Unstructured(0.5), Unstructured(0.0)])
@pytest.mark.parametrize("lam", [1, 0.5])
def test_the_sweep_compensates_rounding_on_the_columns_to_the_right(pattern, lam):
    """SparseGPT's loop with rounding and the literal one, at the scales of the former."""
    from optimum_moonshot.objective.linalg import damped_inverse_factor
    from optimum_moonshot.solvers.quantization import ColumnRounding
    from optimum_moonshot.solvers.sparsegpt import RowFactors, SharedFactor, Widths, prune_columns

    weight, gram, gradients = layer(rows=6, inputs=128)
    objective = objective_of("vectors", weight, gram, gradients, lam)
    grid = Grid(4, 64)
    pattern = dataclasses.replace(pattern, grid=grid)
    ridge = 0.01 * objective.damping_unit
    factors = RowFactors(objective, ridge, slice(0, 6))
    if lam == 1:
        factors = SharedFactor(damped_inverse_factor(objective.gram.double() * objective.scales.a, 1.0, ridge))
    swept, rounding = weight.clone(), ColumnRounding(grid, weight)
    keep = prune_columns(swept, factors, pattern, Widths(128, 32), rounding)
    literal = reference.rounded_sweep(
        weight.double(), gram.double(), None if lam == 1 else gradients.double(), lam, keep, grid, rounding.scale
    )
    torch.testing.assert_close(swept * keep, literal, rtol=0, atol=1e-7)


def test_sweeping_loses_less_than_rounding_to_nearest():
    weight, gram, _ = layer(rows=8, inputs=256)
    objective, grid = full(weight, gram, None, 1), Grid(3, 64)
    result = prune_weight(weight, gram, config=MoonshotConfig(bits=3, quant_group=64, lam=1))
    before, after = objective.losses(nearest(grid, weight, objective), result.weight)
    assert after.total < 0.9 * before.total


def test_dead_inputs_and_all_removed():
    weight, gram, _ = layer(inputs=128)
    gram[:, 5], gram[5] = 0, 0
    result = prune_weight(weight, gram, config=MoonshotConfig(bits=4, lam=1))
    assert torch.isfinite(result.weight).all()
    nothing = prune_weight(weight, gram, config=MoonshotConfig(bits=4, lam=1, sparsity=1.0))
    assert not nothing.weight.any()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bits": 5}, "bits=5"),
        ({"bits": 4, "quant_group": 100}, "quant_group=100"),
        ({"bits": 4, "pattern": "structured", "solver": "osscar", "sparsity": 0.5}, "bits=4"),
        ({"bits": 4, "pattern": "experts", "solver": "osscar", "sparsity": 0.5}, "bits=4"),
        ({"pattern": None}, "pattern"),
        ({"pattern": None, "bits": 4, "sparsity": 0.5}, "sparsity=0.5"),
    ],
)
def test_contradictory_fields_are_refused(fields, message):
    with pytest.raises(MoonshotError, match=message):
        MoonshotConfig(**fields)


def test_bits_alone_remove_nothing():
    assert MoonshotConfig(bits=4) == MoonshotConfig(bits=4, pattern=None) == MoonshotConfig(bits=4, sparsity=0.0)
