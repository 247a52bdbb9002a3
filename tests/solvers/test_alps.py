"""ALPS with row-specific Hessians against the dense float64 algorithm, its conjugate gradients and convergence."""

import pytest
import reference
import torch
from golden.make import layer
from objectives import full, matrices

from optimum_moonshot.config import MoonshotConfig
from optimum_moonshot.errors import MoonshotError
from optimum_moonshot.functional import prune_weight
from optimum_moonshot.objective.patterns import NM, Unstructured
from optimum_moonshot.objective.quadratic import Quadratic
from optimum_moonshot.solvers import alps, make_solver

PATTERNS = pytest.mark.parametrize("pattern", [Unstructured(0.6), NM(2, 4)], ids=str)
LAMS = pytest.mark.parametrize("lam", [0.1, 0.5, 0.9])


def reference_of(tensors, lam, pattern):
    choice = {"nm": (pattern.n, pattern.m)} if isinstance(pattern, NM) else {"sparsity": pattern.sparsity}
    weight, gram, gradients = (tensor.double() for tensor in tensors)
    return reference.alps(weight, gram, gradients if lam < 1 else None, lam, **choice)


def solve(tensors, lam, pattern, **options):
    weight, gram, gradients = tensors
    return make_solver("alps", options).solve(full(weight, gram, gradients if lam < 1 else None, lam), pattern)


@PATTERNS
def test_at_lambda_one_it_equals_the_dense_algorithm(pattern):
    tensors = layer(16, 96, 12, seed=1)
    weight, keep = reference_of(tensors, 1.0, pattern)
    result = solve(tensors, 1.0, pattern, refit_steps=100)  # until it converges
    assert torch.equal(result.keep, keep)
    assert (result.weight - weight).norm() <= 1e-4 * weight.norm()


@PATTERNS
@LAMS
@pytest.mark.parametrize("samples", [12, 80])  # rows by factors, and by matrices
def test_below_lambda_one_enough_inner_steps_reach_the_dense_algorithm(pattern, lam, samples):
    tensors = layer(16, 96, samples, seed=1)
    weight, keep = reference_of(tensors, lam, pattern)
    result = solve(tensors, lam, pattern, inner_steps=60)
    assert (result.keep == keep).double().mean() > 0.995
    gradients = tensors[2].double()
    losses = [
        float(reference.objective(each.double(), tensors[0].double(), tensors[1].double(), gradients, lam))
        for each in (result.weight, weight)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=0.01)


@PATTERNS
@LAMS
def test_a_few_inner_steps_are_enough(pattern, lam):
    objective = full(*layer(16, 96, 12, seed=1), lam)
    few, many = (make_solver("alps", {"inner_steps": steps}).solve(objective, pattern) for steps in (3, 60))
    first, second = objective.losses(few.weight, many.weight)
    assert first.total <= 1.05 * second.total


@PATTERNS
@pytest.mark.parametrize("lam", [0.5, 1.0])
def test_it_loses_less_than_sparsegpt(pattern, lam):
    weight, gram, gradients = layer(24, 144, 10, seed=3)
    objective = full(weight, gram, gradients if lam < 1 else None, lam)
    losses = [
        objective.losses(make_solver(name, {}).solve(objective, pattern).weight)[0].total
        for name in ("alps", "sparsegpt")
    ]
    assert losses[0] < 0.5 * losses[1]


@PATTERNS
@pytest.mark.parametrize("lam", [0.5, 1.0])
def test_the_default_steps_of_the_refit_lose_as_little_as_many(pattern, lam):
    objective = full(*layer(24, 144, 10, seed=3)[:2], layer(24, 144, 10, seed=3)[2] if lam < 1 else None, lam)
    few, many = (make_solver("alps", options).solve(objective, pattern) for options in ({}, {"refit_steps": 200}))
    first, second = objective.losses(few.weight, many.weight)
    assert torch.equal(few.keep, many.keep) and first.total <= 1.01 * second.total


@PATTERNS
@pytest.mark.parametrize("lam", [0.5, 1.0])
def test_surviving_weights_solve_the_least_squares_problem(pattern, lam):
    weight, gram, gradients = layer(8, 48, 10, seed=4)
    result = solve((weight, gram, gradients), lam, pattern, refit_steps=500)
    lost = float(((weight.double() @ gram.double()) * weight.double()).sum())
    ridge = 0.01 * gram.double().diagonal().mean() / lost * torch.eye(48)
    hessians = reference.hessians(weight.double(), gram.double(), gradients.double() if lam < 1 else None, lam) + ridge
    difference = weight.double() - result.weight
    pull = (hessians @ difference[:, :, None])[:, :, 0]
    assert float(pull[result.keep].abs().max()) < 1e-4 * float(pull.abs().max())


def test_gradients_and_fisher_matrices_give_the_same_result():
    weight, gram, gradients = layer(16, 48, 40, seed=5)
    solver = make_solver("alps", {"refit_steps": 100})  # until it converges
    first = solver.solve(full(weight, gram, gradients, 0.5), Unstructured(0.5))
    second = solver.solve(Quadratic.build(weight, gram, matrices(gradients), 0.5), Unstructured(0.5))
    assert torch.equal(first.keep, second.keep)
    torch.testing.assert_close(first.weight, second.weight, rtol=1e-3, atol=1e-5)


def test_trials_are_those_of_sparsegpt():
    objective, patterns = full(*layer(16, 48, 10)[:2], None, 1.0), [Unstructured(0.5), Unstructured(0.8)]
    first, second = (make_solver(name, {}).trials(objective, patterns) for name in ("alps", "sparsegpt"))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@PATTERNS
@pytest.mark.parametrize("samples", [12, 80])
def test_rows_of_very_different_scale(pattern, samples):
    """Most rows have nearly no Fisher loss; the common direction of the inputs dominates their loss."""
    weight, gram, gradients = layer(16, 96, samples, seed=1)
    gram = gram + 20 * gram.diagonal().mean() * torch.ones(96, 96)
    gradients = gradients * torch.where(torch.arange(16) < 2, 100.0, 0.01)[:, None]
    objective = full(weight, gram, gradients, 0.5)
    result = make_solver("alps", {}).solve(objective, pattern)
    assert result.damping == 0.01
    greedy = make_solver("sparsegpt", {}).solve(objective, pattern)
    gradients = gradients.double()
    losses = [
        float(reference.objective(each.weight.double(), weight.double(), gram.double(), gradients, 0.5))
        for each in (result, greedy)
    ]
    assert losses[0] < losses[1]


def test_nothing_is_refitted_without_steps():
    tensors = layer(16, 48, 10)
    without, with_steps = (solve(tensors, 1.0, Unstructured(0.7), refit_steps=steps) for steps in (0, 100))
    assert torch.equal(without.keep, with_steps.keep)
    objective = full(*tensors[:2], None, 1.0)
    first, second = objective.losses(without.weight, with_steps.weight)
    assert second.total < first.total


@pytest.mark.parametrize(("iterations", "inverses"), [(1, 1), (3, 1), (4, 2), (6, 2), (7, 3)])
def test_only_inverses_that_an_iteration_uses_are_computed(monkeypatch, iterations, inverses):
    penalties, inverse = [], alps.System.inverse
    monkeypatch.setattr(alps.System, "inverse", lambda system, rho: penalties.append(rho) or inverse(system, rho))
    solve(layer(16, 48, 10), 0.5, Unstructured(0.7), iterations=iterations)
    assert len(penalties) == inverses
    assert penalties == sorted(set(penalties))  # ρ grows


def test_conjugate_gradients_reach_the_solution_and_stop_there():
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(3, 12, 12, generator=generator, dtype=torch.float64)
    systems, calls = root @ root.mT + torch.eye(12), []
    right = torch.randn(3, 12, generator=generator, dtype=torch.float64)

    def times(vectors):
        calls.append(1)
        return (systems @ vectors[:, :, None])[:, :, 0]

    result, residual = alps.conjugate_gradients(times, right, torch.zeros_like(right), 500)
    torch.testing.assert_close(residual, right - times(result), rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(result, torch.linalg.solve(systems, right), rtol=1e-5, atol=1e-6)
    assert len(calls) < 60


def test_a_converged_row_stays_unchanged_while_others_iterate():
    systems = torch.stack([torch.eye(40), torch.diag(torch.logspace(-6, 0, 40))]).double()
    right = torch.randn(2, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    right[0, 1:] = 0
    result, _ = alps.conjugate_gradients(
        lambda vectors: (systems @ vectors[:, :, None])[:, :, 0], right, torch.zeros_like(right), 200
    )
    assert result.isfinite().all()
    assert torch.equal(result[0], right[0])


@pytest.mark.parametrize("samples", [200, 8])
def test_few_inputs_and_many_samples_give_finite_weights(samples):
    """As in the first layers of a convolutional network; rows converge at different steps."""
    weight, gram, gradients = layer(16, 27, samples, seed=7)
    gradients[:, :8] *= 1e-4
    for lam in (0.0, 0.5, 1.0):
        result = solve((weight, gram, gradients), lam, Unstructured(0.8))
        assert result.weight.isfinite().all()


@pytest.mark.parametrize(("option", "value"), [("penalty", 0.0), ("iterations", 0), ("inner_steps", 0)])
def test_bad_options_are_named(option, value):
    with pytest.raises(MoonshotError, match=option):
        prune_weight(
            *layer(4, 8, 2), config=MoonshotConfig(solver="alps", sparsity=0.5, lam=1.0, solver_options={option: value})
        )
