"""OSSCAR without a matrix per row has the columns and weights of the dense algorithm."""

import pytest
import reference
import torch
from golden.make import layer
from objectives import full, indefinite

from optimum_moonshot.config import MoonshotConfig
from optimum_moonshot.errors import FactorizationError
from optimum_moonshot.functional import prune_weight
from optimum_moonshot.objective import linalg as slices_module
from optimum_moonshot.objective.patterns import Structured
from optimum_moonshot.objective.quadratic import Quadratic
from optimum_moonshot.solvers import make_solver, osscar
from optimum_moonshot.solvers.osscar import OSSCAR, Draft, RowSupport


def prune(tensors, lam, sparsity, group=1, **more):
    settings = dict(solver="osscar", pattern="structured", sparsity=sparsity, lam=lam, group_size=group)
    return prune_weight(*tensors, config=MoonshotConfig(**settings, **more))


def assert_literal(tensors, lam, sparsity, group, tolerance=1e-5, **more):
    exact = [tensor.double() for tensor in tensors]
    weight, keep = reference.osscar(*exact, lam, sparsity, group, **more)
    result = prune(tensors, lam, sparsity, group, **more)
    assert torch.equal(result.keep, keep)
    assert (result.weight - weight).norm() <= tolerance * weight.norm()
    return result


@pytest.mark.parametrize("lam", [0.0, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("sparsity", [0.25, 0.8])
def test_columns_equal_the_literal_version(lam, group, sparsity):
    assert_literal(layer(9, 40, 7, seed=1, dead=(3,)), lam, sparsity, group)


@pytest.mark.parametrize("lam", [0.0, 0.5])
@pytest.mark.parametrize("group", [1, 3])
def test_more_samples_than_inputs_are_compressed(lam, group):
    assert_literal(layer(5, 12, 40, seed=2), lam, 0.5, group)


@pytest.mark.parametrize("lam", [0.5, 1.0])
@pytest.mark.parametrize("group", [1, 5])
@pytest.mark.parametrize(("waiting", "dead"), [(1, 0.01), (3, 0.25), (7, 0.9)])
def test_the_schedule_of_updates_and_drops_does_not_change_the_result(lam, group, waiting, dead, monkeypatch):
    monkeypatch.setattr(osscar, "WAITING", waiting)
    monkeypatch.setattr(osscar, "DEAD", dead)
    assert_literal(layer(6, 40, 5, seed=3), lam, 0.6, group)


@pytest.mark.parametrize("size", [1, 10_000, 10**12])
def test_the_number_of_rows_per_slice_does_not_change_the_result(size, monkeypatch):
    monkeypatch.setattr(slices_module, "CPU_BYTES", size)
    for group in (1, 4):
        assert_literal(layer(11, 24, 5, seed=4), 0.5, 0.5, group)


@pytest.mark.parametrize("group", [1, 4])
def test_an_ill_conditioned_state_is_stored_in_float64(group):
    weight, gram, gradients = layer(6, 40, 5, seed=5)
    generator = torch.Generator().manual_seed(0)
    tensors = (weight, gram, gradients + 100 * torch.randn(gradients.shape, generator=generator))
    low, high = (RowSupport(full(*tensors, lam), group, 1e-4) for lam in (0.999, 0.001))
    assert low.spread.dtype == torch.float32 and high.spread.dtype == torch.float64
    assert_literal(tensors, 0.001, 0.5, group)


@pytest.mark.parametrize("lam", [0.0, 0.5, 1.0])
def test_the_first_removed_column_is_optimal(lam):
    tensors = layer(4, 8, 5, seed=6)
    dense, gram, gradients = (tensor.double() for tensor in tensors)
    unit = gram.diagonal().mean() / reference.losses_at_zero(dense, gram, None)[0]
    matrices = reference.hessians(dense, gram, gradients, lam) + 0.01 * unit * torch.eye(8)

    def cost(gone):
        kept = [j for j in range(8) if j != gone]
        total = 0.0
        for row, matrix in zip(dense, matrices, strict=True):
            change = torch.zeros(8, dtype=torch.float64)
            change[gone] = -row[gone]
            change[kept] = torch.linalg.solve(matrix[kept][:, kept], matrix[kept][:, gone] * row[gone])
            total += float(change @ matrix @ change)
        return total

    costs = [cost(j) for j in range(8)]
    result = prune(tensors, lam, 1 / 8)
    assert (~result.keep[0]).nonzero().item() == costs.index(min(costs))


def test_of_equal_columns_the_first_are_removed():
    weight = torch.ones(3, 8)
    result = prune((weight, torch.eye(8), torch.zeros(2, 3, 8)), 1.0, 0.5, 2)
    assert result.keep[0].tolist() == [False] * 4 + [True] * 4


def test_damping_grows_for_a_gram_that_is_not_definite():
    weight, gram, gradients = layer(6, 24, 5, seed=7)
    gram = indefinite(gram, 0.05)
    for lam in (0.5, 1.0):
        result = assert_literal((weight, gram, gradients), lam, 0.5, 1, damping=0.1, tolerance=1e-4)
        grown = prune((weight, gram, gradients), lam, 0.5)
        assert grown.damping == 0.1 and grown.notes == ("damping raised from 0.01 to 0.1",)
        assert torch.equal(grown.weight, result.weight)
    with pytest.raises(FactorizationError, match=r"size 24 is not positive definite at any damping of \[0.01, 0.1"):
        prune((weight, indefinite(gram, 3.0), gradients), 0.5, 0.5)


@pytest.mark.parametrize("lam", [0.5, 1.0])
@pytest.mark.parametrize("group", [1, 4])
def test_one_elimination_serves_every_sparsity(lam, group):
    tensors = layer(9, 40, 7, seed=8, dead=(3,))
    objective, solver = full(*tensors, lam), make_solver("osscar", {})
    patterns = [Structured(sparsity, group) for sparsity in (0.8, 0.0, 0.3, 0.3, 1.0, 0.6)]
    assert len({solver.family(pattern) for pattern in patterns}) == 1
    for pattern, result in zip(patterns, solver.solve_path(objective, patterns), strict=True):
        alone = solver.solve(objective, pattern)
        assert torch.equal(result.keep, alone.keep)
        assert (result.weight - alone.weight).norm() <= 1e-6 * alone.weight.norm()


@pytest.mark.parametrize("lam", [0.5, 1.0])
def test_given_zeros_in_removed_columns_change_nothing(lam):
    weight, gram, gradients = layer(6, 24, 5, seed=9)
    plain = prune((weight, gram, gradients), lam, 0.25)
    removed = (~plain.keep[0]).nonzero()[:2, 0]
    scarce = weight.clone()
    scarce[:, removed] *= 1e-3  # they go first, with or without zeros
    with_zeros = scarce.clone()
    with_zeros[2, removed] = 0
    first, second = (prune((each, gram, gradients), lam, 0.25) for each in (scarce, with_zeros))
    assert torch.equal(first.keep, second.keep) and (first.weight - second.weight).norm() <= 1e-3 * weight.norm()


def path(solver, group, sparsities=(0.1, 0.5, 0.8), rows=24, inputs=64):
    """The losses and results of a solver on random inputs with correlated columns."""
    generator = torch.Generator().manual_seed(0)
    inputs_by_token = torch.randn(400, inputs, generator=generator) @ torch.randn(inputs, inputs, generator=generator)
    weight = torch.randn(rows, inputs, generator=generator)
    objective = Quadratic.build(weight, inputs_by_token.T @ inputs_by_token, None, 1.0)
    results = solver.solve_path(objective, [Structured(sparsity, group) for sparsity in sparsities])
    return [loss.total for loss in objective.losses(*(result.weight for result in results))], results


@pytest.mark.parametrize("group", [1, 4])
def test_a_draft_that_removes_a_group_at_a_time_is_osscar(group, monkeypatch):
    monkeypatch.setattr(osscar, "DRAFT_STEP", 1e-9)
    for draft, exact in zip(path(Draft(), group)[1], path(OSSCAR(), group)[1], strict=True):
        assert torch.equal(draft.keep, exact.keep)
        torch.testing.assert_close(draft.weight, exact.weight, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("group", [1, 4])
def test_a_draft_that_removes_several_groups_at_a_time_loses_little(group):
    (drafts, results), (exact, _) = path(Draft(), group, inputs=256), path(OSSCAR(), group, inputs=256)
    counts = [round(sparsity * 256 / group) * group for sparsity in (0.1, 0.5, 0.8)]
    assert [int((~result.keep[0]).sum()) for result in results] == counts
    assert all(draft <= 1.3 * loss for draft, loss in zip(drafts, exact, strict=True))


def test_a_draft_of_a_singular_quadratic_raises_the_damping():
    weight = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    objective = Quadratic.build(weight, torch.ones(8, 8), None, 1.0)
    (result,) = Draft(damping=1e-9).solve_path(objective, [Structured(0.5)])
    assert result.damping >= 1e-9 and torch.isfinite(result.weight).all()
