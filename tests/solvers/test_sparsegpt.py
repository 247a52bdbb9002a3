"""SparseGPT with row-specific Hessians and its factorisations against the dense float64 algorithm."""

import math
from itertools import combinations

import pytest
import reference
import torch
from golden.make import grouped_layer, layer
from objectives import full, indefinite

from optimum_moonshot.config import MoonshotConfig
from optimum_moonshot.errors import FactorizationError
from optimum_moonshot.functional import prune_weight
from optimum_moonshot.solvers import sparsegpt

PATTERNS = pytest.mark.parametrize("pattern", [0.6, "2:4"])
LAMS = pytest.mark.parametrize("lam", [0.0, 0.1, 0.9])


def prune(tensors, lam, pattern, **more):
    choice = {"pattern": pattern} if isinstance(pattern, str) else {"sparsity": pattern}
    return prune_weight(*tensors, config=MoonshotConfig(solver="sparsegpt", lam=lam, **choice, **more))


def exact(tensors, lam, pattern, **more):
    choice = {"nm": tuple(map(int, pattern.split(":")))} if isinstance(pattern, str) else {"sparsity": pattern}
    return reference.sparsegpt(*(tensor.double() for tensor in tensors), lam, **choice, **more)


def assert_same(result, expected, tolerance):
    weight, keep = expected
    assert torch.equal(result.keep, keep)
    assert (result.weight - weight).norm() <= tolerance * weight.norm()


def hard_layer(seed=0):
    """Weights almost orthogonal to a few strong gradients: L_F(0) is small, so the row Hessians are ill-conditioned."""
    weight, gram, gradients = layer(16, 96, 12, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    directions = torch.linalg.qr(torch.randn(96, 3, generator=generator)).Q
    gradients = gradients + 300 * torch.randn(12, 16, 3, generator=generator) @ directions.T
    return weight - 0.97 * weight @ directions @ directions.T, gram, gradients


@pytest.mark.parametrize("dense", [False, True], ids=["low rank", "dense rows"])
@pytest.mark.parametrize(
    ("shape", "lam", "pattern", "block_size"),
    [
        ((8, 128, 16), 0.9, 0.5, 128),
        ((8, 200, 16), 0.5, 0.6, 128),
        ((8, 200, 16), 0.1, "2:4", 128),
        ((8, 150, 16), 0.0, 0.7, 128),
        ((8, 300, 8), 0.9, "1:4", 128),
        ((5, 37, 6), 0.9, 0.6, 128),
        ((5, 37, 6), 0.25, 0.6, 10),
        ((5, 36, 6), 0.25, "2:4", 10),
        ((5, 36, 6), 0.9, "1:4", 33),
        ((5, 42, 6), 0.9, "3:7", 20),
        ((5, 42, 6), 0.9, "3:7", 2),
        ((5, 48, 6), 0.5, "24:48", 32),
        ((5, 48, 6), 0.5, 0.5, 1),
        ((5, 100, 6), 0.5, 0.5, 65),
        ((8, 72, 1), 0.9, 0.6, 32),
        ((8, 72, 1), 0.0, "2:4", 128),
        ((6, 24, 60), 0.5, 0.6, 128),
        ((6, 24, 60), 0.0, "2:4", 16),
        ((1, 16, 4), 0.9, 0.5, 128),
        ((6, 1, 3), 0.9, 0.5, 128),
        ((1, 1, 1), 0.5, 0.0, 128),
    ],
)
def test_results_equal_the_dense_algorithm(shape, lam, pattern, block_size, dense, monkeypatch):
    monkeypatch.setattr(sparsegpt, "DENSE_BELOW", math.inf if dense else 0)
    tensors = layer(*shape, seed=sum(shape))
    result = prune(tensors, lam, pattern, block_size=block_size)
    assert_same(result, exact(tensors, lam, pattern, block_size=block_size), 2e-5)


@PATTERNS
@pytest.mark.parametrize("lam", [0.0, 0.1, 0.9, 1.0])
@pytest.mark.parametrize("sizes", [(3, 4, 40, 12), (5, 1, 36, 4), (2, 3, 12, 30)])
def test_grouped_rows_have_separate_hessians(sizes, lam, pattern, monkeypatch):
    monkeypatch.setattr(sparsegpt, "STATE_BYTES", 4 * 4 * sizes[2] ** 2)  # splits n:m patterns
    tensors = grouped_layer(*sizes, seed=1, dead=(2,))
    assert_same(prune(tensors, lam, pattern), exact(tensors, lam, pattern), 2e-5)


@pytest.mark.parametrize(
    ("shape", "pattern", "block_size"),
    [((8, 200, 1), 0.6, 128), ((8, 200, 1), "2:4", 128), ((5, 37, 1), 0.5, 10), ((5, 42, 1), "3:7", 20)],
)
def test_lambda_one_equals_the_single_objective_algorithm(shape, pattern, block_size):
    tensors = layer(*shape, seed=5)
    result = prune(tensors[:2], 1.0, pattern, block_size=block_size)
    assert_same(result, exact(tensors, 1.0, pattern, block_size=block_size), 2e-5)


@pytest.mark.parametrize("damping", [1e-3, 0.1, 1.0])
def test_damping_follows_the_formula(damping):
    tensors = layer(8, 80, 6, seed=6)
    result = prune(tensors, 0.5, 0.6, damping=damping)
    assert_same(result, exact(tensors, 0.5, 0.6, damping=damping), 2e-5)
    assert result.damping == damping and result.notes == ()


@PATTERNS
def test_dead_inputs_are_excluded_as_in_the_dense_algorithm(pattern):
    tensors = layer(8, 140, 6, seed=7, dead=(0, 50, 139))
    assert_same(prune(tensors, 0.5, pattern), exact(tensors, 0.5, pattern), 2e-5)


def test_the_factorisation_depends_on_samples_and_lambda(monkeypatch):
    factorisations = []
    for name in ("RowFactors", "LowRankFactors", "SharedFactor"):
        original = getattr(sparsegpt, name)
        monkeypatch.setattr(
            sparsegpt, name, lambda *args, name=name, original=original: factorisations.append(name) or original(*args)
        )
    for samples, lam in ((40, 0.5), (4, 0.5), (4, 1.0)):
        prune(layer(4, 40, samples), lam, 0.5)
    assert factorisations == ["RowFactors", "LowRankFactors", "SharedFactor"]


@LAMS
@PATTERNS
@pytest.mark.parametrize("samples", [1, 12, 100])
def test_low_rank_and_dense_rows_agree(lam, pattern, samples, monkeypatch):
    tensors = layer(8, 72, samples, seed=8)
    results = []
    for dense in (True, False):
        monkeypatch.setattr(sparsegpt, "DENSE_BELOW", math.inf if dense else 0)
        results.append(prune(tensors, lam, pattern, block_size=40))
    assert_same(results[0], (results[1].weight, results[1].keep), 2e-5)


@pytest.mark.parametrize("dense", [False, True], ids=["low rank", "dense rows"])
@LAMS
@PATTERNS
def test_rows_in_groups_and_slices_give_the_same_result(lam, pattern, dense, monkeypatch):
    monkeypatch.setattr(sparsegpt, "DENSE_BELOW", math.inf if dense else 0)
    tensors = layer(10, 140, 12, seed=9)
    whole = prune(tensors, lam, pattern)
    slices, states = (sparsegpt, "SLICE_BYTES"), (sparsegpt, "STATE_BYTES")
    for (module, name), size in ((slices, 1), (states, 1), (slices, 300_000), (states, 300_000)):
        monkeypatch.setattr(module, name, size)
        assert_same(prune(tensors, lam, pattern), (whole.weight, whole.keep), 1e-5)


def test_only_independent_rows_are_split(monkeypatch):
    monkeypatch.setattr(sparsegpt, "STATE_BYTES", 1)
    tensors = layer(6, 64, 5)
    seen = []
    original = sparsegpt.prune_columns
    monkeypatch.setattr(sparsegpt, "prune_columns", lambda w, *rest: seen.append(len(w)) or original(w, *rest))
    for pattern, rows in ((0.5, [6]), ("2:4", [1] * 6)):
        seen.clear()
        prune(tensors, 0.5, pattern)
        assert seen == rows


@pytest.mark.parametrize("lam", [0.0, 0.5, 0.9])
@PATTERNS
def test_float32_state_gives_the_float64_result(lam, pattern, monkeypatch):
    tensors = layer(12, 160, 10, seed=10)
    usual = prune(tensors, lam, pattern)
    monkeypatch.setattr(sparsegpt, "SINGLE_CONDITION", 0)
    double = prune(tensors, lam, pattern)
    assert_same(usual, (double.weight, double.keep), 1e-5)


@pytest.mark.parametrize("lam", [0.0, 0.05])
@PATTERNS
@pytest.mark.parametrize("dense", [False, True], ids=["low rank", "dense rows"])
def test_ill_conditioned_rows_are_accurate_to_four_digits(lam, pattern, dense, monkeypatch):
    monkeypatch.setattr(sparsegpt, "DENSE_BELOW", math.inf if dense else 0)
    tensors = hard_layer()
    hessians = reference.hessians(*(tensor.double() for tensor in tensors), lam)
    quadratic = full(*tensors, lam)
    hessians.diagonal(dim1=1, dim2=2).add_(0.01 * quadratic.damping_unit)
    assert torch.linalg.cond(hessians).max() > 1e5
    assert_same(prune(tensors, lam, pattern), exact(tensors, lam, pattern), 1e-4)


@pytest.mark.parametrize("lam", [0.5, 1.0])
@PATTERNS
@pytest.mark.parametrize(("share", "taken"), [(2e-2, 0.1), (0.2, 1.0)])
def test_damping_grows_for_an_indefinite_gram_and_is_reported(lam, pattern, share, taken):
    weight, gram, gradients = layer(6, 40, 5, seed=11)
    tensors = (weight, indefinite(gram, share), gradients)
    result = prune(tensors, lam, pattern)
    assert result.damping == pytest.approx(taken)
    assert result.notes == (f"damping raised from 0.01 to {taken:g}",)
    assert_same(result, exact(tensors, lam, pattern, damping=taken), 1e-4)


def test_damping_grows_for_rows_whose_factorisation_fails(monkeypatch):
    tensors = layer(6, 40, 5, seed=12)
    original, calls = sparsegpt.check_factored, []

    def fail_once(ok, *matrix):
        if matrix:
            return original(ok, *matrix)  # of the matrix that all rows share
        calls.append(None)
        original(ok & (len(calls) > 1))

    monkeypatch.setattr(sparsegpt, "check_factored", fail_once)
    result = prune(tensors, 0.5, 0.5)
    assert result.damping == 0.1 and result.notes == ("damping raised from 0.01 to 0.1",)
    monkeypatch.undo()
    assert_same(result, exact(tensors, 0.5, 0.5, damping=0.1), 2e-5)


@pytest.mark.parametrize("lam", [0.5, 1.0])
def test_a_gram_beyond_damping_is_an_error_with_the_attempts(lam):
    weight, gram, gradients = layer(6, 40, 5, seed=13)
    before = weight.clone()
    with pytest.raises(FactorizationError, match=r"size 40 .*\[0\.01, 0\.1, 1\.0\]"):
        prune((weight, indefinite(gram, 3.0), gradients), lam, 0.5)
    assert torch.equal(weight, before)


@pytest.mark.parametrize("lam", [0.0, 0.5, 0.9, 1.0])
def test_losses_of_tiny_rows_are_between_the_optimum_and_the_mask_alone(lam):
    reached, masked = [], []
    for seed in range(8):
        tensors = layer(1, 4, 6, seed=seed)
        result = prune(tensors, lam, "2:4")
        dense = tensors[0].double()[0]
        hessian = reference.hessians(*(tensor.double() for tensor in tensors), lam)[0]

        def loss(row, dense=dense, hessian=hessian):
            return float((row - dense) @ hessian @ (row - dense))

        best = []
        for kept in map(list, combinations(range(4), 2)):
            row = torch.zeros(4, dtype=torch.float64)
            row[kept] = torch.linalg.solve(hessian[kept][:, kept], hessian[kept] @ dense)
            best.append(loss(row))
        reached.append(loss(result.weight[0].double()))
        masked.append(loss(dense * result.keep[0]))
        assert min(best) - 1e-9 <= reached[-1]
    # Errors propagate to the right only, so a single row may be slightly worse than its mask.
    assert all(one <= 1.05 * other for one, other in zip(reached, masked, strict=True))
    assert sum(reached) <= 0.9 * sum(masked)
